"""Live bytes by category and module over one step, from allocations and frees of storages.

The clock is the number of operators run so far: unlike seconds it is the same in every run, so that two runs can be
compared.
"""

import bisect
import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

CATEGORIES = ("parameters", "gradients", "optimizer_state", "inputs", "activations", "temporary", "other")
SAMPLES = 400  # of a step


@dataclasses.dataclass
class Owner:
    """Owner of bytes; known when the step is over."""

    category: str
    module: str


class Event(NamedTuple):
    """Bytes allocated or freed; ``owner`` has a category and a module."""

    operator: int
    change: int
    owner: Any


@dataclasses.dataclass(frozen=True)
class MemorySample:
    """Live bytes at one point in the step.

    Attributes:
        operator: Operators run so far.
        phase: ``forward``, ``backward`` or ``optimizer``.
        table: Bytes by (category, module); no zeros.
    """

    operator: int
    phase: str
    table: dict[tuple[str, str], int]

    @property
    def total_bytes(self) -> int:
        """Bytes of everything that is live."""
        return sum(self.table.values())

    def by_category(self) -> dict[str, int]:
        """Bytes of each category, in the order of ``CATEGORIES``."""
        sums = _sums((category, size) for (category, _), size in self.table.items())
        return {category: sums[category] for category in CATEGORIES}

    def by_module(self) -> dict[str, int]:
        """Bytes of each module, most first."""
        return dict(_sums((module, size) for (_, module), size in self.table.items()).most_common())


class Timeline:
    """One step.

    Args:
        events: In the order in which they happened; those of operator 0 are taken first.
        marks: Where phases begin: operator and name.
        operators: Their number.
    """

    def __init__(self, events: Sequence[Event], marks: Sequence[tuple[int, str]], operators: int) -> None:
        self._events = sorted(events, key=lambda event: event.operator > 0)  # stable
        self.marks = list(marks)
        self.operators = operators
        self._totals = list(itertools.accumulate(event.change for event in self._events))

    @property
    def peak(self) -> MemorySample:
        """When the most was live, over the whole step."""
        return self.points([self._highest(0, len(self._totals))])[0]

    @property
    def saved(self) -> MemorySample | None:
        """When backward begins, after the last forward: what forward has saved for it."""
        begins = [operator for operator, phase in self.marks if phase == "backward"]
        return self.points([self._place(begins[-1])])[0] if begins else None

    def phases(self) -> dict[str, dict[str, int]]:
        """``peak_bytes`` and ``live_bytes`` (at its end) of each phase; the maximum, if it came several times."""
        found: dict[str, dict[str, int]] = {}
        ends = [*(operator for operator, _ in self.marks), self.operators][1:]
        for (begin, phase), end in zip(self.marks, ends, strict=True):
            first, last = self._place(begin), self._place(end)
            record = found.setdefault(phase, {"peak_bytes": 0, "live_bytes": 0})
            record["peak_bytes"] = max(record["peak_bytes"], self._totals[self._highest(first, last + 1)])
            record["live_bytes"] = max(record["live_bytes"], self._totals[last])
        return found

    def samples(self) -> list[MemorySample]:
        """The step in at most ``SAMPLES`` intervals, each by its own peak: the step's is among them."""
        count = len(self._totals)
        intervals = min(SAMPLES, len(self._totals))
        starts = [number * count // intervals for number in range(intervals)]
        places = {self._highest(start, end) for start, end in itertools.pairwise([*starts, count])}
        places = {place for place in places if self._events[place].operator > 0} | {self._place(0)}
        return self.points(sorted(places))

    def points(self, places: Iterable[int]) -> list[MemorySample]:
        """Live bytes after each of these events, given in order."""
        table: Counter[tuple[str, str]] = Counter()
        found = []
        done = 0
        for place in places:
            for event in self._events[done : place + 1]:
                table[event.owner.category, event.owner.module] += event.change
            done = place + 1
            operator = self._events[place].operator
            live = {key: size for key, size in table.items() if size}
            found.append(MemorySample(operator, self.phase_at(operator), live))
        return found

    def phase_at(self, operator: int) -> str:
        """The phase that an operator belongs to."""
        first = self.marks[0][1] if self.marks else ""
        return next((phase for begin, phase in reversed(self.marks) if begin < operator), first)

    def _highest(self, first: int, last: int) -> int:
        return max(range(first, max(first + 1, last)), key=self._totals.__getitem__)

    def _place(self, operator: int) -> int:
        """The last event until the end of this operator."""
        return max(0, bisect.bisect_right(self._events, operator, key=lambda event: event.operator) - 1)


def _sums(pairs: Iterable[tuple[str, int]]) -> Counter[str]:
    sums: Counter[str] = Counter()
    for name, number in pairs:
        sums[name] += number
    return sums
