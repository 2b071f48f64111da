"""Seconds per phase of a loop, without waiting for the device: by the clock on a CPU, by events on CUDA."""

import time
from collections import defaultdict
from typing import Any

import torch


class PhaseClock:
    """Adds up how long each phase took, from one mark to the next.

    On CUDA a mark records an event, which the host does not wait for; :meth:`take` reads them, and is to be called when
    the device has caught up anyway (after a value was read).

    Args:
        device: ``cuda`` or anything else.
    """

    def __init__(self, device: str | torch.device = "cpu") -> None:
        self._by_events = torch.device(device).type == "cuda"
        self._seconds: dict[str, float] = defaultdict(float)
        self._stretches: list[tuple[str, Any, Any]] = []
        self._last: Any = None

    def start(self) -> None:
        """What comes next is the beginning of a phase; what came before does not count."""
        self._last = self._now()

    def mark(self, phase: str) -> None:
        """Ends a phase, which began at the last mark. Before the first ``start`` nothing is counted."""
        if self._last is None:
            return
        now = self._now()
        if self._by_events:
            self._stretches.append((phase, self._last, now))
        else:
            self._seconds[phase] += now - self._last
        self._last = now

    def take(self) -> dict[str, float]:
        """Seconds by phase since the last time, and begins anew."""
        for phase, before, after in self._stretches:
            self._seconds[phase] += before.elapsed_time(after) / 1000  # from milliseconds
        taken = dict(self._seconds)
        self._seconds.clear()
        self._stretches.clear()
        return taken

    def _now(self) -> Any:
        if not self._by_events:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event
