"""Bytes in use, at next to no cost: the allocator's counters on CUDA, elsewhere the resident set of the process.

Neither waits for the device. The operator-level meter knows more and costs more.
"""

from typing import NamedTuple, Protocol

import torch

from lightning_llm.measure.resident import ResidentSet, quick_high_water_bytes


class Reading(NamedTuple):
    """Bytes now, and the most since the reading before."""

    live_bytes: int
    peak_bytes: int


class Gauge(Protocol):
    """Something to read again and again."""

    source: str

    def read(self) -> Reading:
        """What is in use now, and the most since the last call; a new interval begins."""


class AllocatorGauge:
    """Bytes of tensors by CUDA's caching allocator. Each reading resets the allocator's own peak.

    Args:
        device: Which one.
    """

    source = "CUDA allocator"

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def read(self) -> Reading:
        """One look at the counters of the host: nothing is waited for."""
        stats = torch.cuda.memory_stats_as_nested_dict(self._device).get("allocated_bytes", {}).get("all", {})
        torch.cuda.reset_peak_memory_stats(self._device)
        return Reading(stats.get("current", 0), stats.get("peak", 0))


class ResidentGauge:
    """The resident set of this process.

    The system keeps one high-water mark for the whole life of a process. Where an interval raised it, it is the peak of
    the interval; else the peak is only known to be at least what is resident at either end, which is reported.
    """

    source = "resident set"

    def __init__(self) -> None:
        self._resident = ResidentSet()
        self._high, self._live = quick_high_water_bytes(), 0

    def read(self) -> Reading:
        """About 3 µs on Linux. Where the system does not report what is resident now, its high-water mark is both."""
        high = quick_high_water_bytes()
        live = self._resident.read() or high
        peak = high if high > self._high else max(live, self._live)
        self._high, self._live = high, live
        return Reading(live, max(peak, live))


def gauge_for(device: torch.device) -> Gauge:
    """The gauge that fits a device."""
    return AllocatorGauge(device) if device.type == "cuda" else ResidentGauge()
