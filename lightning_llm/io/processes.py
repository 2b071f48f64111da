"""Other processes of this host."""

import os
from contextlib import suppress


def is_alive(process: int) -> bool:
    """Whether a process of this number runs on this host, whoever owns it."""
    try:
        with suppress(PermissionError):
            os.kill(process, 0)
    except (ProcessLookupError, OverflowError):  # OverflowError: no process has so high a number
        return False
    return True
