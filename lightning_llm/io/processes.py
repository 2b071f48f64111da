"""What is known of processes without asking them: whether one is alive, which trains as the first; what ends one."""

import os
import signal
from contextlib import suppress
from pathlib import Path

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


def is_first_process() -> bool:
    """Whether this is the first of the processes that train together, before they have met."""
    return all(os.environ.get(name, "0") == "0" for name in ("RANK", "LOCAL_RANK", "SLURM_PROCID"))
