"""Times of functions, interleaved, and of the phases of a loop.

``interleave`` runs functions A B, B A, A B, …, so that a machine that slows down slows all of them, and no function
always comes first. ``PhaseClock`` adds up seconds per phase without waiting for the device: by the clock on a CPU, by
events on CUDA. ``num_threads`` sets torch's threads for a while.
"""

import contextlib
import dataclasses
import gc
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from lightning_llm.io.garbage import no_garbage_collection
from lightning_llm.io.options import raise_all

_DEVICES = ("cpu", "cuda")


@contextlib.contextmanager
def num_threads(number: int) -> Iterator[None]:
    """Let torch compute with so many threads, and with as many as before afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


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
        return self.quantile(0.5)

    @property
    def p20(self) -> float:
        """A fifth of the rounds took no longer, in seconds."""
        return self.quantile(0.2)

    @property
    def p80(self) -> float:
        """Four fifths of the rounds took no longer, in seconds."""
        return self.quantile(0.8)

    def quantile(self, fraction: float) -> float:
        """The time below which ``fraction`` of the rounds are, in seconds, interpolated between neighbors."""
        return float(np.quantile(self.samples, fraction))

    def ratio_to(self, other: "Timing") -> float:
        """How many times as long this took as ``other``: the median of :meth:`ratios_to`, with its errors."""
        return statistics.median(self.ratios_to(other))

    def ratios_to(self, other: "Timing") -> list[float]:
        """How many times as long this took as ``other`` in each round.

        Raises:
            ValueError: If the two were not interleaved.
        """
        if len(self.samples) != len(other.samples):
            raise ValueError(f"timings of {len(self.samples)} and {len(other.samples)} rounds were not interleaved")
        return [a / b for a, b in zip(self.samples, other.samples, strict=True)]


def interleave(
    functions: Mapping[str, Callable[[], Any]],
    *,
    rounds: int = 20,
    warmup: int = 3,
    device: str | torch.device = "cpu",
    budget_s: float | None = None,
    least: int = 1,
) -> dict[str, Timing]:
    """Times functions, interleaved.

    Every second round has the reverse order: whatever helps the first or the last of a round then helps each function
    equally often in any two. Neighbors stay neighbors. On CUDA, the first of a round finds an idle device.

    Args:
        functions: What to time, by name; each is called without arguments.
        rounds: How often each is timed.
        warmup: How often each is called before, untimed.
        device: ``cpu``: by the clock. ``cuda``: by events on the current stream, so that what the host does meanwhile
            does not count as long as it keeps ahead of the device.
        budget_s: Stop after the first timed round that ends later than so many seconds from the start, warm-up
            included. ``None``: no limit.
        least: How often each is timed even if that exceeds the budget.

    Returns:
        The timings, by name. All have the same number of samples: ``rounds``, or fewer within a budget, but at least
        ``least``.

    Raises:
        ValueError: For options out of range, all of them at once.
    """
    kind = torch.device(device).type
    problems = [] if functions else ["functions must name at least one"]
    problems += [] if rounds >= 1 else [f"rounds must be at least 1, got {rounds}"]
    problems += [] if 1 <= least <= max(1, rounds) else [f"least must be between 1 and rounds, got {least}"]
    problems += [] if warmup >= 0 else [f"warmup must be at least 0, got {warmup}"]
    problems += [] if kind in _DEVICES else [f"device must be {' or '.join(_DEVICES)}, got {kind!r}"]
    problems += [] if budget_s is None or budget_s > 0 else [f"budget_s must be above 0 or None, got {budget_s}"]
    raise_all(problems)

    start = time.perf_counter()
    for _ in range(warmup):
        for function in functions.values():
            function()
    samples: dict[str, list[float]] = {name: [] for name in functions}
    gc.collect()
    with no_garbage_collection():  # which would hit one of the functions by chance
        reverse = dict(reversed(list(functions.items())))
        for taken in range(1, rounds + 1):
            for name, seconds in _time_round(functions if taken % 2 else reverse, kind).items():
                samples[name].append(seconds)
            if budget_s is not None and taken >= least and time.perf_counter() - start > budget_s:
                break
    return {name: Timing(tuple(seconds)) for name, seconds in samples.items()}


def _time_round(functions: Mapping[str, Callable[[], Any]], kind: str) -> dict[str, float]:
    marks = {}
    now(kind)  # the device has caught up
    for name, function in functions.items():
        before = _mark(kind)
        function()
        marks[name] = before, _mark(kind)
    now(kind)
    return {name: _seconds_between(*pair) for name, pair in marks.items()}


def now(device: str = "cpu") -> float:
    """The time in seconds, once a CUDA device has done all that was asked of it."""
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def _mark(kind: str) -> Any:
    """Now: the time, or an event recorded on the current stream."""
    if kind != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def _seconds_between(before: Any, after: Any) -> float:
    if isinstance(before, torch.cuda.Event):
        return float(before.elapsed_time(after)) / 1000  # from milliseconds
    return float(after - before)


class PhaseClock:
    """Adds up how long each phase took, from one mark to the next.

    On CUDA a mark records an event, which the host does not wait for. :meth:`take` reads them: call it when the device
    has caught up anyway (after a value was read).

    Args:
        device: ``cuda`` or anything else.
    """

    def __init__(self, device: str | torch.device = "cpu") -> None:
        self._kind = torch.device(device).type
        self._stretches: list[tuple[str, Any, Any]] = []
        self._last: Any = None

    def start(self) -> None:
        """Starts a phase; what came before does not count."""
        self._last = _mark(self._kind)

    def mark(self, phase: str) -> None:
        """Ends a phase, which began at the last mark. Nothing counts before the first ``start``."""
        if self._last is not None:
            begun, self._last = self._last, _mark(self._kind)
            self._stretches.append((phase, begun, self._last))

    def drop(self) -> None:
        """Forget what :meth:`take` would give."""
        self._stretches.clear()

    def take(self) -> dict[str, float]:
        """Seconds by phase since the last call; starts again."""
        taken: dict[str, float] = defaultdict(float)
        for phase, before, after in self._stretches:
            taken[phase] += _seconds_between(before, after)
        self.drop()
        return dict(taken)
