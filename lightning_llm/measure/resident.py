"""Memory of this process as the system sees it. Loads no torch, whose own memory would count too.

On Linux from ``/proc``: the high-water mark that ``getrusage`` reports starts from the parent's, which outlives fork
and exec, so that a small process would show what a large one had before it.
"""

import contextlib
import os
import re
import resource
import sys
from pathlib import Path

_PROC = Path("/proc/self")
_MAXRSS_UNIT = 1 if sys.platform == "darwin" else 1024


def resident_bytes() -> int:
    """In memory now; 0 where the system does not tell."""
    try:
        return int((_PROC / "statm").read_bytes().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def high_water_bytes() -> int:
    """The most that was in memory since the process began, or since :func:`restart_high_water`."""
    try:
        found = re.search(r"^VmHWM:\s+(\d+) kB$", (_PROC / "status").read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        found = None
    return quick_high_water_bytes() if found is None else int(found[1]) * 1024


def quick_high_water_bytes() -> int:
    """As ``getrusage`` has it: a microsecond, but not below the highest of the parent."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _MAXRSS_UNIT


def restart_high_water() -> int:
    """Begins a new high-water mark where the system can (Linux); returns what it starts from."""
    with contextlib.suppress(OSError):
        (_PROC / "clear_refs").write_text("5")
    return high_water_bytes()
