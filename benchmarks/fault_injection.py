"""What goes wrong inside of a training process of ``benchmarks faults``, and what is noted of how far it came.

Notes are ``step 7`` when a micro-batch of step 7 begins, ``saved 6`` when the checkpoint of step 6 has its name, and
``moment``. They do not go through the code that is put to the test.
"""

import os
import re
import resource
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from lightning_llm.training.module import LanguageModel

MOMENT = "moment"
_STEP_FILE = re.compile(r"step-(\d+)\.ckpt")


def inject(effects: Mapping[str, Any], note: Callable[[str], object]) -> None:
    """Arrange for effects in this process; micro-batches and files are counted from the start of the process, from 1.

    Args:
        effects: By name. ``moment``: ``{"on": what, "count": n}`` notes a moment at the start, or when the n-th
            ``micro-batch``, ``save`` or ``rename`` of a file begins. ``full_disk``: ``{"batch": n, "bytes": b}``, from
            the n-th micro-batch on no file can grow beyond b bytes; 0: from the start. ``poison``: ``{"batch": n,
            "value": "nan"}``, what the loss of that micro-batch is multiplied with. ``clock``: ``{"batch": n,
            "seconds": s}``, from then on the wall clock, and the times of checkpoint files, are s seconds off.
        note: Called with what is to be noted.
    """
    moment, poison = effects.get(MOMENT) or {}, effects.get("poison") or {}
    disk, clock = effects.get("full_disk"), effects.get("clock")
    counts: Counter[str] = Counter()

    def reach(kind: str) -> None:
        counts[kind] += 1
        if moment.get("on") == kind and moment["count"] == counts[kind]:
            note(MOMENT)

    def disturb() -> None:
        if disk and counts["micro-batch"] == disk["batch"]:
            resource.setrlimit(resource.RLIMIT_FSIZE, (disk["bytes"], resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
        if clock and counts["micro-batch"] == clock["batch"]:
            _move_clock(clock["seconds"])

    training_step, replace, save = LanguageModel.training_step, os.replace, torch.save

    def noted_step(self: LanguageModel, batch: Any, batch_idx: int) -> Any:
        note(f"step {self.global_step + 1}")
        reach("micro-batch")
        disturb()
        loss = training_step(self, batch, batch_idx)
        return loss * float(poison["value"]) if poison and counts["micro-batch"] == poison["batch"] else loss

    def noted_replace(source: Any, target: Any, **options: Any) -> None:
        reach("rename")
        replace(source, target, **options)
        if found := _STEP_FILE.fullmatch(Path(target).name):
            if clock:
                os.utime(target, (time.time(), time.time()))  # the system's own clock stays as it is
            note(f"saved {int(found[1])}")

    def noted_save(*args: Any, **options: Any) -> None:
        reach("save")
        save(*args, **options)

    LanguageModel.training_step = noted_step  # type: ignore[method-assign]
    os.replace, torch.save = noted_replace, noted_save  # type: ignore[assignment]
    reach("start")
    disturb()


def _move_clock(seconds: float) -> None:
    real, real_ns = time.time, time.time_ns
    time.time = lambda: real() + seconds
    time.time_ns = lambda: real_ns() + int(seconds * 1e9)
