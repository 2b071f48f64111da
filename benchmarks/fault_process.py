"""The processes of ``benchmarks faults``: how its runs are forked, and what goes wrong inside of them.

One process imports everything and forks one for each run. Forking a process that has threads would be unsafe: a lock
that one of them holds stays locked in the child. So this one has a single thread at every fork, which is checked: torch
and the libraries for linear algebra are told to start none, and nothing is computed before the fork.

A run notes how far it came: ``step 7`` when a micro-batch of step 7 begins, ``saved 6`` when the checkpoint of step 6
has its name, and ``moment``. Notes do not go through the code that is put to the test.
"""

import atexit
import contextlib
import multiprocessing
import os
import re
import resource
import runpy
import select
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, NoReturn
from unittest.mock import patch

import torch
import torch.utils.tensorboard  # which the command imports only when it trains

from benchmarks.commands import ROOT
from lightning_llm.training.module import LanguageModel

MOMENT = "moment"
_STEP_FILE = re.compile(r"step-(\d+)\.ckpt")
_SINGLE = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
# this is none of their runs
_OF_JOBS = ("SLURM_", "TORCHELASTIC_", "RANK", "LOCAL_", "WORLD_SIZE", "MASTER_", "GROUP_")


class Ended(NamedTuple):
    """How a process ended, after how many seconds, what it wrote, and how far it came by its notes.

    The status is minus the signal that killed it; ``None``: it did not end, and was killed at the time limit.
    """

    status: int | None
    seconds: float
    out: str
    error: str
    notes: list[str]


Run = Callable[[Sequence[Mapping[str, Any]], float], list[Ended]]


@contextlib.contextmanager
def forker() -> Iterator[Run]:
    """Starts the process that forks; gives what runs children of it at the same time, to the end or a time limit.

    Each child has a ``folder``, ``words`` of the command line, ``threads`` that compute, an ``environment`` on top of
    the parent's, ``effects`` (see ``inject``), and ``kill_after_s`` from the moment in them, or ``None``.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith(_OF_JOBS)}
    environment |= {**_SINGLE, "PYTHONPATH": os.pathsep.join([*filter(None, sys.path), str(ROOT)])}
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), _import_everything) as parent:
        with patch.dict(os.environ, environment, clear=True):
            parent.submit(_check_single_thread)  # starts it
        yield lambda children, time_limit_s: parent.submit(_run, children, time_limit_s).result()


def _import_everything() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    torch.set_num_threads(1)
    _command(["fit", "--help"])


def _run(children: Sequence[Mapping[str, Any]], time_limit_s: float) -> list[Ended]:
    running = [_Child(child, time_limit_s) for child in children]
    start, speaking = time.monotonic(), {pipe: child for child in running for pipe in child.heard}
    while speaking:
        for pipe in select.select(list(speaking), [], [])[0]:
            child = speaking[pipe]
            if not child.hear(pipe):
                os.close(pipe)
                del speaking[pipe]
            if not speaking.keys() & child.heard.keys():
                child.status = os.waitstatus_to_exitcode(os.waitpid(child.process, 0)[1])
                child.seconds = time.monotonic() - start
    return [child.ended() for child in running]


class _Child:
    """A run, and what it has written by pipe: its output, its errors, its notes."""

    def __init__(self, told: Mapping[str, Any], time_limit_s: float) -> None:
        _check_single_thread()
        pipes = [os.pipe() for _ in range(3)]  # not files: a full disk must not swallow what is said of it
        self.process, self.kill_after_s = os.fork(), told["kill_after_s"]
        if not self.process:
            signal.setitimer(signal.ITIMER_REAL, time_limit_s)
            _train(told, *(writes for _, writes in pipes))
        for _, writes in pipes:
            os.close(writes)
        self.heard = {reads: b"" for reads, _ in pipes}
        self.status, self.seconds = 0, 0.0

    def hear(self, pipe: int) -> bool:
        """Read what has come, and kill the run at its moment; False at the end."""
        content = os.read(pipe, 1 << 16)
        self.heard[pipe] += content
        if pipe == list(self.heard)[2] and self.kill_after_s is not None and f"{MOMENT}\n".encode() in content:
            time.sleep(self.kill_after_s)
            os.kill(self.process, signal.SIGKILL)
        return bool(content)

    def ended(self) -> Ended:
        out, error, notes = (text.decode(errors="replace") for text in self.heard.values())
        status = None if self.status == -signal.SIGALRM else self.status
        return Ended(status, self.seconds, out, error, notes.splitlines())


def _command(words: Sequence[str]) -> int:
    """What ``python -m lightning_llm WORD …`` does."""
    sys.argv = ["lightning-llm", *words]
    try:
        runpy.run_module("lightning_llm", run_name="__main__", alter_sys=True)
    except SystemExit as leaving:
        return leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    return 0


def _check_single_thread() -> None:
    tasks = Path("/proc/self/task")
    if tasks.is_dir() and len(list(tasks.iterdir())) > 1:
        raise RuntimeError("the process that starts the runs has several threads: it cannot be forked safely")


def _train(child: Mapping[str, Any], out: int, error: int, notes: int) -> NoReturn:
    """In a child: as in a process of its own, up to the exit handlers at its end."""
    os.chdir(child["folder"])
    os.environ.update(child["environment"])
    for source, number in ((os.open(os.devnull, os.O_RDONLY), 0), (out, 1), (error, 2)):
        os.dup2(source, number)
        os.close(source)
    torch.set_num_threads(child["threads"])
    inject(child["effects"], lambda note: os.write(notes, f"{note}\n".encode()))
    status = _command(child["words"])
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(status)  # as at the end of any process, but for taking apart all that was imported, which takes a second


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
            real, real_ns = time.time, time.time_ns
            time.time = lambda: real() + clock["seconds"]
            time.time_ns = lambda: real_ns() + int(clock["seconds"] * 1e9)

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
        if match := _STEP_FILE.fullmatch(Path(target).name):
            if clock:
                os.utime(target, (time.time(), time.time()))  # the system's own clock stays as it is
            note(f"saved {int(match[1])}")

    def noted_save(*args: Any, **options: Any) -> None:
        reach("save")
        save(*args, **options)

    LanguageModel.training_step = noted_step  # type: ignore[method-assign]
    os.replace, torch.save = noted_replace, noted_save  # type: ignore[assignment]
    reach("start")
    disturb()
