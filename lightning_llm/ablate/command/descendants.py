"""The processes that a process has started, with theirs: their memory and their end. Only Linux tells them."""

import ctypes
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from lightning_llm.io.processes import await_ends

KIB = 1024
GRACE_S = 10.0  # between SIGTERM and SIGKILL
AFTER_KILL_S = 0.05  # for the kernel to end them
_PR_SET_CHILD_SUBREAPER, _PR_SET_PDEATHSIG = 36, 1


def adopt_orphans() -> None:
    """Become the parent of every descendant whose parent ends, so that what forked away is still found."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_with_parent() -> None:
    """Let the kernel kill this process when its parent ends: for ``preexec_fn``."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def descendants(process: int) -> Iterator[int]:
    """The processes that a process has started, with theirs."""
    for file in Path(f"/proc/{process}/task").glob("*/children"):
        with suppress(OSError):  # it has just ended
            for child in map(int, file.read_text(encoding="ascii").split()):
                yield child
                yield from descendants(child)


def memory_of(processes: Iterator[int]) -> int:
    """Bytes that processes have in memory together: shared pages count once (their proportional set size)."""
    return sum(map(_pss, processes))


def _pss(process: int) -> int:
    with suppress(OSError):
        for line in Path(f"/proc/{process}/smaps_rollup").read_text(encoding="ascii").splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * KIB
    return 0


def end_all(process: int, grace_s: float = GRACE_S) -> None:
    """End everything that a process has started, with SIGTERM, and after a while with SIGKILL."""
    deadline = time.monotonic() + grace_s
    number = signal.SIGTERM
    while running := [child for child in descendants(process) if _runs(child)]:
        for child in running:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(child, number)
        await_ends(running, max(0.0, deadline - time.monotonic()) if number == signal.SIGTERM else AFTER_KILL_S)
        number = signal.SIGKILL
        if time.monotonic() > deadline + grace_s:  # one that the kernel does not let go, as on a dead network disk
            return


def _runs(process: int) -> bool:
    """Whether a process has not ended; one that nobody has waited for yet has."""
    with suppress(OSError):
        return Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace").rpartition(") ")[2][0] != "Z"
    return False
