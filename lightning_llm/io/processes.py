"""Processes from outside: whether one is alive, when it ends, which of them trains as the first; what ends one."""

import os
import select
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

POLL_S = 0.05
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def is_alive(process: int) -> bool:
    """Whether a process of this number runs on this host, whoever owns it; one that has ended unnoticed does not."""
    try:
        with suppress(PermissionError):
            os.kill(process, 0)
    except (ProcessLookupError, OverflowError):  # OverflowError: no process has so high a number
        return False
    with suppress(OSError):  # not Linux, or hidden
        stat = Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace")
        return stat.rpartition(") ")[2][:1] not in ("Z", "X")
    return True


def await_ends(processes: Sequence[int], wait_s: float) -> None:
    """Wait until processes have ended, whoever started them, or so many seconds."""
    deadline = time.monotonic() + wait_s
    if not hasattr(os, "pidfd_open"):  # not Linux: nothing tells the end of somebody else's child
        while any(map(is_alive, processes)) and time.monotonic() < deadline:
            time.sleep(POLL_S)
        return
    for process in processes:
        with suppress(ProcessLookupError):  # it has ended
            descriptor = os.pidfd_open(process)
            try:
                ends = select.poll()
                ends.register(descriptor, select.POLLIN)
                ends.poll(1000 * max(0.0, deadline - time.monotonic()))
            finally:
                os.close(descriptor)


def is_first_process() -> bool:
    """Whether this is the first of the processes that train together, before they have met."""
    return all(os.environ.get(name, "0") == "0" for name in ("RANK", "LOCAL_RANK", "SLURM_PROCID"))
