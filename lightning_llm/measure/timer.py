"""Times of rival functions, taken by turns: A B A B …, so that a machine that slows down slows them all alike."""

import contextlib
import dataclasses
import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

_DEVICES = ("cpu", "cuda")


@dataclasses.dataclass(frozen=True)
class Timing:
    """The times of one function, in seconds.

    Attributes:
        samples: One time a round, in the order in which they were taken.
    """

    samples: tuple[float, ...]

    @property
    def median(self) -> float:
        """The middle time, in seconds."""
        return statistics.median(self.samples)

    @property
    def p20(self) -> float:
        """A fifth of the rounds took no longer, in seconds."""
        return self.quantile(0.2)

    @property
    def p80(self) -> float:
        """Four fifths of the rounds took no longer, in seconds."""
        return self.quantile(0.8)

    def quantile(self, fraction: float) -> float:
        """The time below which ``fraction`` of the rounds lie, in seconds, interpolated between neighbours."""
        ordered = sorted(self.samples)
        place = fraction * (len(ordered) - 1)
        below = math.floor(place)
        above = min(below + 1, len(ordered) - 1)
        return ordered[below] + (place - below) * (ordered[above] - ordered[below])

    def ratio_to(self, other: "Timing") -> float:
        """How many times as long this took as ``other``: the median over rounds of the ratio within a round.

        Raises:
            ValueError: If the two were not taken by turns.
        """
        if len(self.samples) != len(other.samples):
            raise ValueError(f"timings of {len(self.samples)} and {len(other.samples)} rounds were not taken by turns")
        return statistics.median(a / b for a, b in zip(self.samples, other.samples, strict=True))


def interleave(
    functions: Mapping[str, Callable[[], Any]],
    *,
    rounds: int = 20,
    warmup: int = 3,
    device: str | torch.device = "cpu",
    budget_s: float | None = None,
) -> dict[str, Timing]:
    """Times functions by turns.

    Args:
        functions: What to time, by name; each is called without arguments.
        rounds: How often each is timed.
        warmup: How often each is called before, untimed.
        device: ``cpu``: by the clock. ``cuda``: by events on the current stream, so that what the host does meanwhile
            does not count as long as it keeps ahead of the device.
        budget_s: Stop after the first timed round that ends later than so many seconds from the start, warm-up
            included. ``None``: no limit.

    Returns:
        The timings, by name. All have equally many samples: ``rounds``, or fewer within a budget, but at least one.

    Raises:
        ValueError: For options out of range, all of them at once.
    """
    kind = torch.device(device).type
    faults = [] if functions else ["functions must name at least one"]
    faults += [] if rounds >= 1 else [f"rounds must be at least 1, got {rounds}"]
    faults += [] if warmup >= 0 else [f"warmup must be at least 0, got {warmup}"]
    faults += [] if kind in _DEVICES else [f"device must be {' or '.join(_DEVICES)}, got {kind!r}"]
    faults += [] if budget_s is None or budget_s > 0 else [f"budget_s must be above 0 or None, got {budget_s}"]
    if faults:
        raise ValueError("; ".join(faults))

    start = time.perf_counter()
    for _ in range(warmup):
        for function in functions.values():
            function()
    time_round = _time_round_by_events if kind == "cuda" else _time_round_by_clock
    samples: dict[str, list[float]] = {name: [] for name in functions}
    with _no_garbage_collection():
        for _ in range(rounds):
            for name, seconds in time_round(functions).items():
                samples[name].append(seconds)
            if budget_s is not None and time.perf_counter() - start > budget_s:
                break
    return {name: Timing(tuple(seconds)) for name, seconds in samples.items()}


def _time_round_by_clock(functions: Mapping[str, Callable[[], Any]]) -> dict[str, float]:
    seconds = {}
    for name, function in functions.items():
        before = time.perf_counter()
        function()
        seconds[name] = time.perf_counter() - before
    return seconds


def _time_round_by_events(functions: Mapping[str, Callable[[], Any]]) -> dict[str, float]:
    torch.cuda.synchronize()
    events = {}
    for name, function in functions.items():
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        before.record()
        function()
        after.record()
        events[name] = before, after
    torch.cuda.synchronize()
    return {name: before.elapsed_time(after) / 1000 for name, (before, after) in events.items()}  # from milliseconds


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Collects first, then not at all: a collection would hit one of the rivals by chance."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
