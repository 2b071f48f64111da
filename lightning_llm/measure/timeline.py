"""What was alive when, by kind and module, from the births and deaths of storages in one step.

The clock is the number of operators run so far: unlike seconds it is the same in every run, and two runs can be laid
beside one another.
"""

import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

CATEGORIES = ("parameters", "gradients", "optimizer_state", "inputs", "activations", "temporary", "other")


@dataclasses.dataclass(frozen=True)
class Event:
    """Bytes that begin or cease to be alive. ``owner``, if there is one, says in the end of which kind and module."""

    operator: int
    kind: str
    module: str
    phase: str
    change: int
    owner: Any

    @property
    def key(self) -> tuple[str, str]:
        """Kind and module."""
        return (self.kind, self.module) if self.owner is None else (self.owner.kind, self.owner.module)


@dataclasses.dataclass(frozen=True)
class StepPoint:
    """What is alive at one time.

    Attributes:
        operator: Operators run so far.
        phase: ``forward``, ``backward`` or ``optimizer``.
        table: Bytes by (kind, module); no zeros.
    """

    operator: int
    phase: str
    table: dict[tuple[str, str], int]

    @property
    def total_bytes(self) -> int:
        """All that is alive."""
        return sum(self.table.values())

    def by_category(self) -> dict[str, int]:
        """Bytes of each kind, all kinds, in the order of ``CATEGORIES``."""
        sums = _sums((kind, size) for (kind, _), size in self.table.items())
        return {kind: sums[kind] for kind in CATEGORIES}

    def by_module(self) -> dict[str, int]:
        """Bytes of each module, most first."""
        return dict(_sums((module, size) for (_, module), size in self.table.items()).most_common())


class Timeline:
    """One step.

    Args:
        events: In the order in which they happened; those of operator 0 come first, wherever they stand.
        marks: Where phases begin: operator and name.
        operators: How many there were.
    """

    def __init__(self, events: Sequence[Event], marks: Sequence[tuple[int, str]], operators: int) -> None:
        self._events = sorted(events, key=lambda event: event.operator > 0)  # stable
        self.marks, self.operators = list(marks), operators
        self._totals: list[int] = []
        total = 0
        for event in self._events:
            total += event.change
            self._totals.append(total)

    @property
    def peak(self) -> StepPoint:
        """When the most was alive, over the whole step."""
        return self.points([self._highest(0, len(self._totals))])[0]

    @property
    def saved(self) -> StepPoint | None:
        """When backward begins, after the last forward: what forward has kept for it."""
        begins = [operator for operator, phase in self.marks if phase == "backward"]
        return self.points([self._place(begins[-1])])[0] if begins else None

    def phases(self) -> dict[str, dict[str, int]]:
        """``peak_bytes`` and ``live_bytes`` (alive at its end) of each phase; the most, if it came several times."""
        found: dict[str, dict[str, int]] = {}
        ends = [*(operator for operator, _ in self.marks), self.operators][1:]
        for (begin, phase), end in zip(self.marks, ends, strict=True):
            first, last = self._place(begin), self._place(end)
            record = found.setdefault(phase, {"peak_bytes": 0, "live_bytes": 0})
            record["peak_bytes"] = max(record["peak_bytes"], self._totals[self._highest(first, last + 1)])
            record["live_bytes"] = max(record["live_bytes"], self._totals[last])
        return found

    def samples(self, most: int = 400) -> list[StepPoint]:
        """The step in at most ``most`` stretches, each by the moment when most was alive in it: the peak is kept."""
        count = len(self._totals)
        places = (
            {self._highest(n * count // most, max(n * count // most + 1, (n + 1) * count // most)) for n in range(most)}
            if count > most
            else set(range(count))
        )
        places = {place for place in places if self._events[place].operator > 0} | {self._place(0)}
        return self.points(sorted(places))

    def points(self, places: Iterable[int]) -> list[StepPoint]:
        """What is alive after each of these events, given in order."""
        wanted = list(places)
        return list(self._replay(wanted))

    def phase_at(self, operator: int) -> str:
        """The phase that an operator belongs to."""
        return next((phase for begin, phase in reversed(self.marks) if begin < operator), self._first_phase())

    def _first_phase(self) -> str:
        return self.marks[0][1] if self.marks else ""

    def _replay(self, places: Sequence[int]) -> Iterator[StepPoint]:
        table: Counter[tuple[str, str]] = Counter()
        done = 0
        for place in places:
            for event in self._events[done : place + 1]:
                table[event.key] += event.change
            done = place + 1
            operator = self._events[place].operator
            yield StepPoint(operator, self.phase_at(operator), {key: size for key, size in table.items() if size})

    def _highest(self, first: int, last: int) -> int:
        return max(range(first, max(first + 1, last)), key=self._totals.__getitem__)

    def _place(self, operator: int) -> int:
        """The last event until the end of this operator."""
        place = -1
        for place, event in enumerate(self._events):
            if event.operator > operator:
                return max(0, place - 1)
        return place


def _sums(pairs: Iterable[tuple[str, int]]) -> Counter[str]:
    sums: Counter[str] = Counter()
    for name, number in pairs:
        sums[name] += number
    return sums
