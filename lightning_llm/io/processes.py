"""Other processes of this host, and the signals that end one."""

import os
import signal
from contextlib import suppress

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def is_alive(process: int) -> bool:
    """Whether a process of this number runs on this host, whoever owns it."""
    try:
        with suppress(PermissionError):
            os.kill(process, 0)
    except (ProcessLookupError, OverflowError):  # OverflowError: no process has so high a number
        return False
    return True
