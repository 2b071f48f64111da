"""Other processes of this host."""

import os


def is_alive(process: int) -> bool:
    """Whether a process of this number runs on this host, whoever owns it."""
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):  # OverflowError: no process has so high a number
        return False
    except PermissionError:
        return True
    return True
