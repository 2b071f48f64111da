"""Fair tuning: one option of every variant on the same grid, until the best value of each variant is inside it.

Each variant's own value is multiplied by the same factors, with the same seeds, which no verdict uses. The baseline
counts as a variant. If the best value of any is the first or the last of the grid, the grid grows there for all of
them. Then each is trained once more, with the same seeds, at the lowest point of the parabola through its best mean
loss and its two neighbors, over the logarithm of the value. The tuned value is that one if its mean loss is lower than
the grid's best. A pure function of the plan and of the losses; no torch.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from lightning_llm.io.units import four_digits

FIRST_SEED = 100
MOST_EXTENSIONS = 6
Losses = Mapping[Any, float | None]  # by name and seed of a run; None: it failed to train


class Grid(msgspec.Struct, frozen=True, kw_only=True):
    """The option that a user asks to tune, and its grid.

    Attributes:
        option: By dotted name.
        factors: Of each variant's own value, increasing.
        seeds: How many there are of each value.
    """

    option: str
    factors: tuple[float, ...]
    seeds: int


class Tune(NamedTuple):
    """A grid, with the values that its factors multiply.

    Attributes:
        grid: What a user asks to tune.
        values: The value that each variant has without tuning.
    """

    grid: Grid
    values: Mapping[str, float]

    @property
    def option(self) -> str:
        """The option that is tuned."""
        return self.grid.option

    @property
    def word(self) -> str:
        """The option's last word, which names the runs."""
        return self.option.rpartition(".")[2]

    @property
    def all_seeds(self) -> range:
        """The seeds of all values, which no pair has."""
        return range(FIRST_SEED, FIRST_SEED + self.grid.seeds)

    def value(self, variant: str, factor: float) -> float:
        """A variant's value times a factor."""
        return four_digits(self.values[variant] * factor)

    def name(self, variant: str, value: float) -> str:
        """The name of the runs of a variant with this value."""
        return f"{variant},{self.word}={value:g}"

    def tuned_name(self, variant: str, best: float) -> str:
        """The name of the runs of a tuned variant: that of those without tuning, if its own value is the best one."""
        return variant if best == self.values[variant] else self.name(variant, best)


@dataclasses.dataclass(frozen=True)
class Tuned:
    """The outcome of tuning for a variant.

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
        variants: What has been found; empty before the end.
    """

    needed: list[tuple[str, int]]
    variants: Mapping[str, Tuned]


def tuning_of(tune: Tune, variants: Sequence[str], losses: Losses) -> Tuning:
    """The tuned values of all variants, or the runs that are needed first.

    Args:
        tune: The plan's.
        variants: That are tuned.
        losses: Of the runs that have ended, by name and seed.
    """
    factors = list(tune.grid.factors)
    seeds = tune.all_seeds
    extensions = 0
    while True:
        grid = {variant: [tune.value(variant, factor) for factor in factors] for variant in variants}
        if needed := _missing_runs(tune, grid, seeds, losses):
            return Tuning(needed, {})
        tuned: dict[str, Tuned] = {}
        for variant, values in grid.items():
            tuned[variant] = Tuned.of(values, [_losses_at(tune, variant, value, seeds, losses) for value in values])
        edges = {of_variant.edge for of_variant in tuned.values()} - {0}
        if not edges or extensions == MOST_EXTENSIONS:
            break
        below = [four_digits(factors[0] ** 2 / factors[1])] if -1 in edges else []
        above = [four_digits(factors[-1] ** 2 / factors[-2])] if 1 in edges else []
        factors = [*below, *factors, *above]
        extensions = extensions + 1
    vertices = {variant: [of_variant.vertex] for variant, of_variant in tuned.items() if of_variant.vertex is not None}
    if needed := _missing_runs(tune, vertices, seeds, losses):
        return Tuning(needed, {})
    for variant, (vertex,) in vertices.items():
        tuned[variant] = tuned[variant].with_vertex(_losses_at(tune, variant, vertex, seeds, losses))
    return Tuning([], tuned)


def _missing_runs(
    tune: Tune, values: Mapping[str, Sequence[float]], seeds: Sequence[int], losses: Losses
) -> list[tuple[str, int]]:
    runs = [(tune.name(variant, value), seed) for variant in values for value in values[variant] for seed in seeds]
    return [run for run in dict.fromkeys(runs) if run not in losses]


def _losses_at(tune: Tune, variant: str, value: float, seeds: Sequence[int], losses: Losses) -> list[float | None]:
    return [losses[tune.name(variant, value), seed] for seed in seeds]


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
