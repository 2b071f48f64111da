"""The parent of the runs of ``benchmarks faults``: it imports everything once and forks a process for each run.

Forking a process that has threads would be unsafe: a lock that one of them holds stays locked in the child. So this one
has a single thread at every fork, which is checked: torch and the libraries for linear algebra are told to start none,
and nothing is computed before the fork. Requests and replies are lines of JSON.
"""

import atexit
import json
import os
import runpy
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from benchmarks.fault_injection import MOMENT, inject

ROOT = Path(__file__).resolve().parents[1]
_SINGLE = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
# this is none of their runs
_OF_JOBS = ("SLURM_", "TORCHELASTIC_", "RANK", "LOCAL_", "WORLD_SIZE", "MASTER_", "GROUP_")


class Ended(NamedTuple):
    """How a process ended.

    Attributes:
        status: Its exit status, or minus the signal; ``None``: it did not end, and was killed at the time limit.
        seconds: How long it ran.
        out: What it wrote.
        error: What it wrote to the standard error.
        notes: See ``fault_injection``.
    """

    status: int | None
    seconds: float
    out: str
    error: str
    notes: list[str]


class Forker:
    """Starts the parent process; every run is a child of it."""

    def __init__(self) -> None:
        environment = {name: value for name, value in os.environ.items() if not name.startswith(_OF_JOBS)}
        environment |= {**_SINGLE, "PYTHONPATH": os.pathsep.join([*filter(None, sys.path), str(ROOT)])}
        command = [sys.executable, "-m", "benchmarks.fault_process"]
        self._parent = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True
        )

    def run(self, children: Sequence[Mapping[str, Any]], time_limit_s: float) -> list[Ended]:
        """Run processes at the same time.

        Args:
            children: For each ``folder``, ``words`` of the command line, ``threads`` that compute, ``environment`` on
                top of the parent's, ``effects`` (see ``fault_injection``), and ``kill_after_s`` from the moment in
                them, or null.
            time_limit_s: Processes that have not ended by then are killed.

        Raises:
            RuntimeError: The parent has ended.
        """
        assert self._parent.stdin is not None
        assert self._parent.stdout is not None
        try:
            self._parent.stdin.write(
                json.dumps({"children": list(children), "time_limit_s": time_limit_s}, allow_nan=False) + "\n"
            )
            self._parent.stdin.flush()
            reply = json.loads(self._parent.stdout.readline())
        except (OSError, ValueError) as error:
            raise RuntimeError(f"the process that starts the runs has ended ({error})") from error
        return [Ended(*ended) for ended in reply]

    def close(self) -> None:
        """End the parent."""
        self._parent.communicate()


def main() -> None:
    """Serve requests until there are no more."""
    replies = os.dup(1)
    os.set_inheritable(replies, False)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
    _import_everything()
    while line := sys.stdin.readline():
        asked = json.loads(line)
        running: list[_Child] = []
        for child in asked["children"]:
            _check_single_thread()
            pipes = [os.pipe() for _ in range(3)]  # not files: a full disk must not swallow what is said of it
            process = os.fork()
            if not process:
                os.close(replies)
                _train(child, *(writes for _, writes in pipes))
            for _, writes in pipes:
                os.close(writes)
            running.append(_Child(process, [reads for reads, _ in pipes], child["kill_after_s"]))
        reply = _wait(running, asked["time_limit_s"])
        sent = memoryview((json.dumps(reply, allow_nan=False) + "\n").encode())
        while sent:
            sent = sent[os.write(replies, sent) :]


class _Child:
    def __init__(self, process: int, pipes: list[int], kill_after_s: float | None) -> None:
        self.process, self.pipes, self.kill_after_s = process, pipes, kill_after_s
        self.heard = dict.fromkeys(pipes, b"")
        self.status: int | None = None
        self.seconds = 0.0

    def hear(self, pipe: int) -> bool:
        """Read what has come; False at the end."""
        content = os.read(pipe, 1 << 16)
        self.heard[pipe] += content
        if pipe == self.pipes[2] and self.kill_after_s is not None and f"{MOMENT}\n".encode() in self.heard[pipe]:
            time.sleep(self.kill_after_s)
            self.kill_after_s = None
            os.kill(self.process, signal.SIGKILL)
        return bool(content)


def _import_everything() -> None:
    import torch
    import torch.utils.tensorboard  # which the command imports only when it trains

    torch.set_num_threads(1)
    _command(["fit", "--help"])


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
    import torch

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


def _wait(running: Sequence[_Child], time_limit_s: float) -> list[tuple[int | None, float, str, str, list[str]]]:
    """Hear all, kill at the moments and at the time limit; what :class:`Ended` holds, for each in their order."""
    start, late = time.monotonic(), set[int]()
    speaking = {pipe: child for child in running for pipe in child.pipes}
    while speaking:
        for pipe in select.select(list(speaking), [], [], 0.5)[0]:
            child = speaking[pipe]
            if not child.hear(pipe):
                os.close(pipe)
                del speaking[pipe]
            if not speaking.keys() & set(child.pipes):
                child.status = os.waitstatus_to_exitcode(os.waitpid(child.process, 0)[1])
                child.seconds = time.monotonic() - start
        if time.monotonic() - start > time_limit_s:
            for process in {child.process for child in speaking.values()} - late:
                os.kill(process, signal.SIGKILL)
                late.add(process)
    return [_told(child, is_late=child.process in late) for child in running]


def _told(child: _Child, *, is_late: bool) -> tuple[int | None, float, str, str, list[str]]:
    out, error, notes = (child.heard[pipe].decode(errors="replace") for pipe in child.pipes)
    return None if is_late else child.status, child.seconds, out, error, notes.splitlines()


if __name__ == "__main__":
    main()
