"""Fair tuning: one option of every side on the same grid, until the best value of each side is inside it.

Each side's own value is multiplied by the same factors, with the same seeds, which no verdict uses. If the best value
of any side is the first or the last of the grid, the grid grows there for all sides. The tuned value is the lowest
point of the parabola through a side's best mean loss and its two neighbors, over the logarithm of the value. A pure
function of the plan and of the losses; no torch.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

FIRST_SEED = 100
MOST_EXTENSIONS = 6


class Tune(NamedTuple):
    """What a plan says about tuning.

    Attributes:
        option: Of ``fit``.
        factors: Of the first grid, increasing.
        seeds: How many there are of each value.
        values: The value that each side has without tuning.
    """

    option: str
    factors: Sequence[float]
    seeds: int
    values: Mapping[str, float]

    @property
    def word(self) -> str:
        """The option's last word, which names the runs."""
        return self.option.rpartition(".")[2]

    def value(self, side: str, factor: float) -> float:
        """A side's value times a factor."""
        return _rounded(self.values[side] * factor)

    def name(self, side: str, value: float) -> str:
        """What the runs of a side with this value are called."""
        return f"{side},{self.word}={value:g}"

    def tuned_name(self, side: str, best: float) -> str:
        """What the runs of a tuned side are called: those without tuning, if its own value is the best one."""
        return side if best == self.values[side] else self.name(side, best)


@dataclasses.dataclass(frozen=True)
class Tuned:
    """What the grid says of a side.

    Attributes:
        values: That were tried, increasing.
        losses: Their means over the seeds; ``None``: a run diverged.
        best: The tuned value; ``None``: each value has a run that diverged.
        is_bracketed: Whether a lower and a higher value are worse than the best one of the grid.
    """

    values: Sequence[float]
    losses: Sequence[float | None]
    best: float | None
    is_bracketed: bool

    @classmethod
    def of(cls, values: Sequence[float], losses: Sequence[float | None]) -> "Tuned":
        """Find the best value."""
        known = [math.inf if loss is None else loss for loss in losses]
        place = min(range(len(known)), key=known.__getitem__)
        is_inside = 0 < place < len(known) - 1
        best = None if known[place] == math.inf else values[place]
        if best is not None and is_inside:
            near = slice(place - 1, place + 2)
            lowest = lowest_point([math.log(value) for value in values[near]], known[near])
            best = best if lowest is None else _rounded(math.exp(lowest))
        return cls(values, losses, best, is_inside)

    @property
    def edge(self) -> int:
        """-1 or 1 if the grid has to grow at its low or high end, else 0."""
        if self.is_bracketed:
            return 0
        return 1 if self.best is not None and self.best == self.values[-1] else -1


class Tuning(NamedTuple):
    """How far the tuning is.

    Attributes:
        needed: Names and seeds of runs to start; none: it has ended.
        sides: What has been found; empty before the end.
    """

    needed: list[tuple[str, int]]
    sides: Mapping[str, Tuned]


def tuning_of(tune: Tune, sides: Sequence[str], losses: Mapping[Any, float | None]) -> Tuning:
    """The tuned values of all sides, or the runs that are needed first.

    Args:
        tune: The plan's.
        sides: That are tuned.
        losses: Of the runs that have ended, by name and seed.
    """
    factors, seeds, extensions = list(tune.factors), range(FIRST_SEED, FIRST_SEED + tune.seeds), 0
    while True:
        grid = {side: [tune.value(side, factor) for factor in factors] for side in sides}
        wanted = [(tune.name(side, value), seed) for side in sides for value in grid[side] for seed in seeds]
        if needed := [each for each in dict.fromkeys(wanted) if each not in losses]:
            return Tuning(needed, {})
        found = {}
        for side, values in grid.items():
            of_values = [[losses[tune.name(side, value), seed] for seed in seeds] for value in values]
            found[side] = Tuned.of(values, [_mean(each) for each in of_values])
        edges = {each.edge for each in found.values()} - {0}
        if not edges or extensions == MOST_EXTENSIONS:
            return Tuning([], found)
        below = [_rounded(factors[0] ** 2 / factors[1])] if -1 in edges else []
        above = [_rounded(factors[-1] ** 2 / factors[-2])] if 1 in edges else []
        factors, extensions = [*below, *factors, *above], extensions + 1


def lowest_point(x: Sequence[float], y: Sequence[float]) -> float | None:
    """Where the parabola through three points is lowest; ``None`` if it is nowhere, or a point is infinite."""
    if not all(map(math.isfinite, y)):
        return None
    first, second = (y[1] - y[0]) / (x[1] - x[0]), (y[2] - y[1]) / (x[2] - x[1])
    curvature = (second - first) / (x[2] - x[0])
    return (x[0] + x[1]) / 2 - first / (2 * curvature) if curvature > 0 else None


def _mean(losses: Sequence[float | None]) -> float | None:
    known = [loss for loss in losses if loss is not None and math.isfinite(loss)]
    return math.fsum(known) / len(known) if len(known) == len(losses) else None


def _rounded(value: float) -> float:
    """To four digits: what the name of a run says is its value, to the bit."""
    return float(f"{value:.4g}")
