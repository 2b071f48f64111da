"""Fair tuning: one option of every arm on the same grid, until the best value of each arm is inside it.

Each arm's own value is multiplied by the same factors, with the same seeds, which no verdict uses. If the best value
of any arm is the first or the last of the grid, the grid grows there for all arms. Then each arm is trained once
more, with the same seeds, at the lowest point of the parabola through its best mean loss and its two neighbors, over
the logarithm of the value. The tuned value is that one if its mean loss is lower than the grid's best. A pure function
of the plan and of the losses; no torch.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from lightning_llm.io.units import four_digits

FIRST_SEED = 100
MOST_EXTENSIONS = 6
Losses = Mapping[Any, float | None]  # by name and seed of a run; None: it failed to train


class Tune(NamedTuple):
    """What a plan says about tuning.

    Attributes:
        option: Of ``fit``.
        factors: Of the first grid, increasing.
        seeds: How many there are of each value.
        values: The value that each arm has without tuning.
    """

    option: str
    factors: Sequence[float]
    seeds: int
    values: Mapping[str, float]

    @property
    def word(self) -> str:
        """The option's last word, which names the runs."""
        return self.option.rpartition(".")[2]

    @property
    def all_seeds(self) -> range:
        """The seeds of all values, which no pair has."""
        return range(FIRST_SEED, FIRST_SEED + self.seeds)

    def value(self, arm: str, factor: float) -> float:
        """An arm's value times a factor."""
        return four_digits(self.values[arm] * factor)

    def name(self, arm: str, value: float) -> str:
        """What the runs of an arm with this value are called."""
        return f"{arm},{self.word}={value:g}"

    def tuned_name(self, arm: str, best: float) -> str:
        """What the runs of a tuned arm are called: those without tuning, if its own value is the best one."""
        return arm if best == self.values[arm] else self.name(arm, best)


@dataclasses.dataclass(frozen=True)
class Tuned:
    """What tuning says of an arm.

    Attributes:
        values: Of the grid, increasing.
        losses: Their means over the seeds; ``None``: a run failed to train.
        best: The tuned value; ``None``: each value has a run that failed to train.
        best_loss: Its mean over the seeds.
        is_bracketed: Whether a lower and a higher value are worse than the best one of the grid.
        vertex: Where the parabola is lowest; ``None``: nowhere.
        vertex_loss: The mean there; ``None``: not trained, or a run failed to train.
        vertices: Where the parabola of each seed alone is lowest: how far the vertex may be off.
    """

    values: Sequence[float]
    losses: Sequence[float | None]
    best: float | None
    best_loss: float | None
    is_bracketed: bool
    vertex: float | None = None
    vertex_loss: float | None = None
    vertices: Sequence[float | None] = ()

    @classmethod
    def of(cls, values: Sequence[float], by_seed: Sequence[Sequence[float | None]]) -> "Tuned":
        """Find the best value of the grid, and the vertex.

        Args:
            values: Of the grid, increasing.
            by_seed: The losses of each value, one per seed.
        """
        losses = [_mean(of_value) for of_value in by_seed]
        comparable = [math.inf if loss is None else loss for loss in losses]
        index = min(range(len(comparable)), key=comparable.__getitem__)
        if comparable[index] == math.inf:
            return cls(values, losses, None, None, is_bracketed=False)
        is_inside = 0 < index < len(comparable) - 1
        tuned = cls(values, losses, values[index], comparable[index], is_inside)
        if not is_inside:
            return tuned
        neighbors = slice(index - 1, index + 2)
        vertices = [_vertex(values[neighbors], of_seed) for of_seed in zip(*by_seed[neighbors], strict=True)]
        return dataclasses.replace(tuned, vertex=_vertex(values[neighbors], losses[neighbors]), vertices=vertices)

    def with_vertex(self, losses: Sequence[float | None]) -> "Tuned":
        """The same with the losses of the vertex, one per seed."""
        mean = _mean(losses)
        if mean is None or self.best_loss is None or mean >= self.best_loss:
            return dataclasses.replace(self, vertex_loss=mean)
        return dataclasses.replace(self, vertex_loss=mean, best=self.vertex, best_loss=mean)

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
        arms: What has been found; empty before the end.
    """

    needed: list[tuple[str, int]]
    arms: Mapping[str, Tuned]


def tuning_of(tune: Tune, arms: Sequence[str], losses: Losses) -> Tuning:
    """The tuned values of all arms, or the runs that are needed first.

    Args:
        tune: The plan's.
        arms: That are tuned.
        losses: Of the runs that have ended, by name and seed.
    """
    factors = list(tune.factors)
    seeds, extensions = tune.all_seeds, 0
    while True:
        grid = {arm: [tune.value(arm, factor) for factor in factors] for arm in arms}
        if needed := _missing_runs(tune, grid, seeds, losses):
            return Tuning(needed, {})
        tuned: dict[str, Tuned] = {}
        for arm, values in grid.items():
            tuned[arm] = Tuned.of(values, [_losses_at(tune, arm, value, seeds, losses) for value in values])
        edges = {of_arm.edge for of_arm in tuned.values()} - {0}
        if not edges or extensions == MOST_EXTENSIONS:
            break
        below = [four_digits(factors[0] ** 2 / factors[1])] if -1 in edges else []
        above = [four_digits(factors[-1] ** 2 / factors[-2])] if 1 in edges else []
        factors, extensions = [*below, *factors, *above], extensions + 1
    vertices = {arm: [of_arm.vertex] for arm, of_arm in tuned.items() if of_arm.vertex is not None}
    if needed := _missing_runs(tune, vertices, seeds, losses):
        return Tuning(needed, {})
    for arm, (vertex,) in vertices.items():
        tuned[arm] = tuned[arm].with_vertex(_losses_at(tune, arm, vertex, seeds, losses))
    return Tuning([], tuned)


def _missing_runs(
    tune: Tune, values: Mapping[str, Sequence[float]], seeds: Sequence[int], losses: Losses
) -> list[tuple[str, int]]:
    runs = [(tune.name(arm, value), seed) for arm in values for value in values[arm] for seed in seeds]
    return [run for run in dict.fromkeys(runs) if run not in losses]


def _losses_at(tune: Tune, arm: str, value: float, seeds: Sequence[int], losses: Losses) -> list[float | None]:
    return [losses[tune.name(arm, value), seed] for seed in seeds]


def lowest_point(x: Sequence[float], y: Sequence[float]) -> float | None:
    """Where the parabola through three points is lowest; ``None`` if it is nowhere, or a point is infinite."""
    if not all(map(math.isfinite, y)):
        return None
    first, second = (y[1] - y[0]) / (x[1] - x[0]), (y[2] - y[1]) / (x[2] - x[1])
    curvature = (second - first) / (x[2] - x[0])
    return (x[0] + x[1]) / 2 - first / (2 * curvature) if curvature > 0 else None


def _vertex(values: Sequence[float], losses: Sequence[float | None]) -> float | None:
    """Where the parabola over the logarithm of three values is lowest, if it is between them."""
    comparable = [math.inf if loss is None else loss for loss in losses]
    lowest = lowest_point([math.log(value) for value in values], comparable)
    if lowest is None or not math.log(values[0]) < lowest < math.log(values[2]):
        return None
    return four_digits(math.exp(lowest))


def _mean(losses: Sequence[float | None]) -> float | None:
    finite = [loss for loss in losses if loss is not None and math.isfinite(loss)]
    return math.fsum(finite) / len(finite) if len(finite) == len(losses) else None
