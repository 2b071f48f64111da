"""How long ``fit`` takes from the command to the end of its first step, and what the time goes to.

    python -m benchmarks.start_up SECONDS WORD …

runs `lightning-llm WORD …` as begun at SECONDS (of ``time.time()``), notes when its parts begin and end, prints the
parts as JSON after the first step and leaves at once. ``imports`` is the time until model and data module are loaded,
the start of Python included; ``data`` that of preparing and opening the token store; ``model`` that of building the
transformer; ``rest`` is the parser's own imports, the parsing of the config, the Trainer, and the step itself, the
compiling of its blocks included where that is asked for.
"""

import itertools
import json
import os
import random
import runpy
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.commands import ROOT, finish, last_line

if TYPE_CHECKING:  # it loads torch, and loading is timed here
    from benchmarks.harness import Request

COMMAND = "lightning_llm"
CONFIG = ROOT / "configs" / "shakespeare-char.yaml"
BAR_S = 4.0  # a start with a token store should take less
PARTS = ("imports", "data", "model", "rest")
TEXT_BYTES = 1_115_394  # as many as Tiny Shakespeare has
LETTERS = "\n !$&',-.3:;?ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"  # its 65 characters


def measure(request: "Request", *, compiled: bool = False) -> Iterator[tuple[str, dict[str, float]]]:
    """Seconds of each part, the median over rounds: with the token store still to be made, and with it there.

    With compiled blocks, the first start finds nothing in the compiler's cache, and the second finds all.
    """
    with tempfile.TemporaryDirectory(prefix="bench-startup-") as folder:
        text = Path(folder, "text.txt")
        text.write_text("".join(random.Random(0).choices(LETTERS, k=TEXT_BYTES)), encoding="utf-8")

        def start(rounds: Iterator[int]) -> dict[str, float]:
            place = str(Path(folder, f"{next(rounds)}"))  # shared by both starts of a round
            options = {"data.path": text, "data.store": f"{place}-store", "trainer.default_root_dir": folder}
            options |= {"trainer.accelerator": request.device}
            options |= {"model.compile_mode": "default"} if compiled else {}
            words = [__name__, repr(time.time()), "fit", "--config", str(CONFIG)]
            words += [f"--{name}={value}" for name, value in options.items()]
            out, _ = finish(*words, TORCHINDUCTOR_CACHE_DIR=f"{place}-cache")
            seconds: dict[str, float] = json.loads(last_line(out))
            return seconds

        names = ("compiled for the first time", "compiled before") if compiled else ("store to be made", "store there")
        starts_of = request.interleaved({name: partial(start, itertools.count()) for name in names})
        for name, starts in starts_of.items():
            yield name, {part: statistics.median(one[part] for one in starts) for part in PARTS}


def main(begun: float, words: list[str]) -> None:
    """Run the command until its first step is done."""
    # only now: loading them is what is timed
    import torch

    from lightning_llm.data import datamodule
    from lightning_llm.training.module import LanguageModel

    spent = {"imports": time.time() - begun, "data": 0.0, "model": 0.0}

    inside: list[str] = []  # the parts that are running: one within another counts once

    @contextmanager
    def timed(part: str) -> Iterator[None]:
        start = time.time()
        inside.append(part)
        try:
            yield
        finally:
            inside.pop()
            if not inside:
                spent[part] += time.time() - start

    def first_step_done(self: LanguageModel, *args: Any, **kwargs: Any) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        parts = {**spent, "rest": time.time() - begun - sum(spent.values())}
        print("\n" + json.dumps(parts, allow_nan=False), flush=True)
        os._exit(0)  # the other steps are not asked for

    for owner, name, part in (
        (datamodule, "find_or_prepare", "data"),  # the first who asks for the vocabulary may cause it
        (datamodule.TokenDataModule, "prepare_data", "data"),
        (datamodule.TokenDataModule, "setup", "data"),
        (datamodule.TokenDataModule, "train_dataloader", "data"),
        (LanguageModel, "configure_model", "model"),
    ):
        setattr(owner, name, timed(part)(getattr(owner, name)))
    LanguageModel.on_train_batch_end = first_step_done  # type: ignore[assignment]
    sys.argv = [COMMAND, *words]
    runpy.run_module(COMMAND, run_name="__main__")  # as the shell starts it; leaves by itself


if __name__ == "__main__":
    main(float(sys.argv[1]), sys.argv[2:])
