"""Memory of this process as the system and CUDA's allocator report it, at next to no cost.

Loads no torch, whose own memory would count too. Nothing here waits for the device. The operator-level meter knows more
and costs more.

On Linux from ``/proc``: the high-water mark that ``getrusage`` reports starts from the parent's, which outlives fork
and exec, so that a small process would show what a large one had before it.
"""

import abc
import contextlib
import os
import re
import resource
import sys
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, NamedTuple

if TYPE_CHECKING:
    import torch

_PROC = Path("/proc/self")
_MAXRSS_UNIT = 1 if sys.platform == "darwin" else 1024


class ResidentSet:
    """Resident set of the process that makes it: keeps the system's file open, since opening it takes 11 of 13 µs."""

    def __init__(self) -> None:
        self._file: int | None = None
        with contextlib.suppress(OSError):
            self._file = os.open(_PROC / "statm", os.O_RDONLY | os.O_CLOEXEC)
            weakref.finalize(self, os.close, self._file)
        self._page = os.sysconf("SC_PAGE_SIZE")

    def read(self) -> int:
        """Bytes in memory now; 0 where the system does not tell. 1.6 µs."""
        return 0 if self._file is None else int(os.pread(self._file, 128, 0).split(None, 2)[1]) * self._page


def host_memory() -> int | None:
    """Bytes of memory that this machine has; ``None`` where the system does not tell."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else None


def device_memory(device: "torch.device") -> int | None:
    """Bytes of a device's memory, which processes on a CPU share; ``None`` if that is not known."""
    if device.type == "cuda":
        import torch

        return int(torch.cuda.get_device_properties(device).total_memory)
    return host_memory() if device.type == "cpu" else None


def resident_bytes() -> int:
    """In memory now; 0 where the system does not tell."""
    return ResidentSet().read()


def high_water_bytes() -> int:
    """The most that was in memory since the process began, or since :func:`restart_high_water`."""
    try:
        found = re.search(r"^VmHWM:\s+(\d+) kB$", (_PROC / "status").read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        found = None
    return quick_high_water_bytes() if found is None else int(found[1]) * 1024


def quick_high_water_bytes() -> int:
    """High-water mark by ``getrusage``: a microsecond, but not below the highest of the parent."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _MAXRSS_UNIT


def restart_high_water() -> int:
    """Resets the high-water mark where the system can (Linux); returns what it starts from."""
    with contextlib.suppress(OSError):
        (_PROC / "clear_refs").write_text("5")
    return high_water_bytes()


class Reading(NamedTuple):
    """Bytes now, and the most since the reading before."""

    live_bytes: int
    peak_bytes: int


class Gauge(abc.ABC):
    """Bytes in use, and the most since the reading before.

    The counters keep one high-water mark, which is not reset here: the user may read and reset CUDA's. If an interval
    changed the mark, it is the peak of the interval; else the peak is only known to be at least what is in use at
    either end, which is reported.

    Attributes:
        source: Of the numbers, in words.
    """

    source: ClassVar[str]

    def __init__(self) -> None:
        self._live, self._high = self.counters()

    @abc.abstractmethod
    def counters(self) -> tuple[int, int]:
        """Bytes in use now, and the high-water mark."""

    def read(self) -> Reading:
        """One look at the counters. Nothing is waited for."""
        live, high = self.counters()
        peak = max(live, self._live, high if high != self._high else 0)
        self._live = live
        self._high = high
        return Reading(live, peak)


class AllocatorGauge(Gauge):
    """Bytes of tensors on a device by CUDA's caching allocator."""

    source = "CUDA allocator"

    def __init__(self, device: "torch.device") -> None:
        self._device = device
        super().__init__()

    def counters(self) -> tuple[int, int]:
        """Bytes of tensors now, and at their peak."""
        from torch import cuda

        stats = cuda.memory_stats_as_nested_dict(self._device).get("allocated_bytes", {}).get("all", {})
        return stats.get("current", 0), stats.get("peak", 0)


class ResidentGauge(Gauge):
    """The resident set of this process: about 3 µs on Linux."""

    source = "resident set"

    def __init__(self) -> None:
        self._resident = ResidentSet()
        super().__init__()

    def counters(self) -> tuple[int, int]:
        """Where the system does not report what is resident now, its high-water mark is both."""
        high = quick_high_water_bytes()
        return self._resident.read() or high, high


def gauge_for(device: "torch.device") -> Gauge:
    """The gauge that fits a device; each reading of it begins a new interval."""
    return AllocatorGauge(device) if device.type == "cuda" else ResidentGauge()
