"""Do improvements add up? Contrasts of the cells of a factorial experiment, with one number for each seed.

A *cell* is a set of factors that are set together, and every cell has the same seeds. Each effect is a contrast of the
cells of one seed, so the mean over seeds has a t interval whatever the correlation of the cells.

============  =====================================================  ===============================================
effect        contrast of a seed                                     reads
============  =====================================================  ===============================================
main          with the factor minus without it, mean over the rest   what a factor does on average
interaction   effect of one with the other minus that without it     above 0: less together than apart
together      all factors minus none                                 what all do
sum           together minus the sum of each alone                   above 0: less together than apart
============  =====================================================  ===============================================

Values are losses. There are four families, each with its own ``alpha``: ``k`` main effects at ``alpha / k``, two-way
interactions at ``alpha`` over their number (``k (k - 1) / 2`` where all can be told apart), ``together``, and ``sum``.
A three-way interaction has an interval at ``alpha``, and no words.

Up to three factors, all ``2^k`` cells are there. Four and five have a half of them (Box and Hunter 1961, "The 2^(k-p)
fractional factorial designs", Technometrics 3): those with an even number of factors set, which hold the baseline.

- Four, 2^(4-1), resolution IV: main effects are clear of two-way interactions, and these are confounded in pairs, which
  are named. Interactions of three factors are taken to be 0.
- Five, 2^(5-1), resolution V, and the cell with all: main effects and two-way interactions are clear, if interactions
  of three factors are 0.

In both, no factor is alone in a cell. ``sum`` is then estimated from the two-way interactions, taking higher ones to be
0. From six factors on, there are ``none``, ``all``, and ``all but one``: an effect is what a factor adds to all others.
"""

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt
from scipy import stats

from lightning_llm.statistics.design import BETTER, FAILED_TO_TRAIN, FEWEST, NOT_SHOWN, WORSE

Cell = tuple[int, ...]  # for each factor whether it is set: 0 or 1
Kind = Literal["main", "interaction", "together", "sum"]
Values = npt.NDArray[np.float64]

MOST_COMPLETE = 3  # factors with all cells
MOST_HALF = 5  # factors with half of them
LESS = "less together than apart"
MORE = "more together than apart"
ADD_UP = "they add up"
NO_THREE_WAY = "interactions of three factors are taken to be 0"  # of a half of the cells
NO_WORDS = ""  # of a three-way interaction


@dataclasses.dataclass(frozen=True, kw_only=True)
class Effect:
    """An effect of one factor or of several.

    Attributes:
        kind: What it is a contrast of.
        factors: Places of its factors.
        aliases: Places of the factors of other effects that are confounded with it.
        first: One value for each seed, which ``second`` is compared with.
        second: Likewise; the contrast is ``second - first``.
        alpha: Probability that its interval misses.
        word: What the interval shows: ``better``, ``worse``, ``less together than apart``, ``more together than
            apart``, ``they add up``, ``not shown``; empty for a three-way interaction.
        difference: Mean of the contrast; ``None``: a run failed to train.
        interval: Its t interval; ``None``: there is none.
        sd: Standard deviation of the contrast; ``None`` below two seeds.
        p: Of the t test; ``None``: there is none.
        note: Why there is no interval, or no word; empty if there are both.
        is_estimated: Whether interactions of three or more factors are taken to be 0.
    """

    kind: Kind
    factors: tuple[int, ...]
    aliases: tuple[tuple[int, ...], ...] = ()
    first: list[float | None]
    second: list[float | None]
    alpha: float
    word: str
    difference: float | None = None
    interval: tuple[float, float] | None = None
    sd: float | None = None
    p: float | None = None
    note: str = ""
    is_estimated: bool = False

    @property
    def is_three_way(self) -> bool:
        """Whether it is an interaction of more than two factors, which has no words."""
        return self.kind == "interaction" and len(self.factors) > 2


def cells_of(factors: int) -> list[Cell]:
    """The cells of a number of factors: the baseline, then those with fewer factors first.

    Raises:
        ValueError: There are fewer than two.
    """
    if factors < 2:
        raise ValueError(f"a factorial experiment needs two factors or more, got {factors}")
    counts: Sequence[int] = range(factors + 1)
    if factors > MOST_HALF:
        counts = (0, factors - 1, factors)
    elif factors > MOST_COMPLETE:
        counts = sorted({*range(0, factors + 1, 2), factors})
    chosen = [places for count in counts for places in itertools.combinations(range(factors), count)]
    return [tuple(int(place in places) for place in range(factors)) for places in chosen]


def factorial(
    losses: Mapping[Cell, Sequence[float | None]], *, alpha: float = 0.05, delta: float | None = None
) -> list[Effect]:
    """The effects: main effects, interactions, all together, and all against the sum of each alone.

    Args:
        losses: Of each cell of :func:`cells_of`, one for each seed, in the same order. ``None``: the run failed.
        alpha: Of each family.
        delta: The smallest difference that matters; ``None``: nothing is said to add up.

    Raises:
        ValueError: The cells are not those of a design, or their seeds differ in number.
    """
    factors = len(next(iter(losses), ()))
    cells = cells_of(factors)
    if {*losses} != {*cells} or len({len(values) for values in losses.values()}) != 1:
        raise ValueError(f"{factors} factors need {len(cells)} cells with the same seeds")
    rule = _Rule(losses, alpha, delta)
    if factors > MOST_HALF:
        return rule.all_but_one()
    return rule.mains() + rule.interactions() + [rule.together(), rule.sum()]


class _Rule:
    """The effects of the cells of one experiment."""

    def __init__(self, losses: Mapping[Cell, Sequence[float | None]], alpha: float, delta: float | None) -> None:
        self.count = len(next(iter(losses)))
        self.alpha = alpha
        self.delta = delta
        self.values = {
            cell: np.array([math.nan if value is None else value for value in values], dtype=np.float64)
            for cell, values in losses.items()
        }
        self.none: Cell = (0,) * self.count
        self.all: Cell = (1,) * self.count
        is_half = MOST_COMPLETE < self.count <= MOST_HALF
        self.is_half = is_half
        # the cell with all of five factors is beside the half
        self.balanced = [cell for cell in self.values if not is_half or sum(cell) % 2 == 0]

    def mains(self) -> list[Effect]:
        """The main effects."""
        alpha = self.alpha / self.count
        return [self._effect("main", (place,), alpha, self.balanced) for place in range(self.count)]

    def interactions(self) -> list[Effect]:
        """The two-way interactions, confounded ones once, and the three-way one of three factors."""
        pairs = [places for places, _ in self._pairs()]
        aliases = dict(self._pairs())
        found = [
            self._effect("interaction", each, self.alpha / len(pairs), self.balanced, aliases[each]) for each in pairs
        ]
        if self.count == MOST_COMPLETE:
            found.append(self._effect("interaction", (0, 1, 2), self.alpha, self.balanced))
        return found

    def together(self) -> Effect:
        """All factors against none."""
        first, second = self.values[self.none], self.values[self.all]
        return self._judged("together", range(self.count), first, second, self.alpha, [self.none, self.all])

    def sum(self) -> Effect:
        """All factors against the sum of each alone."""
        base, together = self.values[self.none], self.values[self.all]
        if self.is_half:
            mains = sum(self._contrast((place,), self.balanced)[2] for place in range(self.count))
            twos = sum(self._contrast(places, self.balanced)[2] for places, _ in self._pairs())
            return self._judged(
                "sum", range(self.count), base + mains - twos, together, self.alpha, [*self.values], is_estimated=True
            )
        alone = [tuple(int(place == other) for other in range(self.count)) for place in range(self.count)]
        apart = base + sum(self.values[cell] - base for cell in alone)
        return self._judged("sum", range(self.count), apart, together, self.alpha, [self.none, *alone, self.all])

    def all_but_one(self) -> list[Effect]:
        """Contribution of each factor to all others, and of all together."""
        found = []
        for place in range(self.count):
            without = tuple(int(other != place) for other in range(self.count))
            sides = (self.values[without], self.values[self.all])
            found.append(self._judged("main", (place,), *sides, self.alpha / self.count, [without, self.all]))
        return [*found, self.together()]

    def _pairs(self) -> list[tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]]:
        """The pairs of factors whose interactions are told apart, each with those that are confounded with it."""
        pairs = list(itertools.combinations(range(self.count), 2))
        if self.count != 4:
            return [(places, ()) for places in pairs]
        return [(places, (tuple(sorted({0, 1, 2, 3} - {*places})),)) for places in pairs if 0 in places]

    def _contrast(self, places: Sequence[int], cells: Sequence[Cell]) -> tuple[Values, Values, Values]:
        """The effect of all but the last factor without the last one and with it, and the difference, by seed."""
        *others, last = places
        sides: list[Values] = []
        scale = 2 ** len(places) / len(cells)
        for is_set in (0, 1):
            signs = {
                cell: math.prod(1 if cell[place] else -1 for place in others) for cell in cells if cell[last] == is_set
            }
            sides.append(scale * np.sum([sign * self.values[cell] for cell, sign in signs.items()], axis=0))
        return sides[0], sides[1], sides[1] - sides[0]

    def _effect(
        self,
        kind: Kind,
        places: tuple[int, ...],
        alpha: float,
        cells: Sequence[Cell],
        aliases: tuple[tuple[int, ...], ...] = (),
    ) -> Effect:
        first, second, _ = self._contrast(places, cells)
        return self._judged(kind, places, first, second, alpha, cells, aliases, is_estimated=self.is_half)

    def _judged(
        self,
        kind: Kind,
        places: Sequence[int],
        first: Values,
        second: Values,
        alpha: float,
        cells: Sequence[Cell],
        aliases: tuple[tuple[int, ...], ...] = (),
        *,
        is_estimated: bool = False,
    ) -> Effect:
        """The effect with its interval and its word."""
        effect = Effect(
            kind=kind,
            factors=tuple(places),
            aliases=aliases,
            first=_or_none(first),
            second=_or_none(second),
            alpha=alpha,
            word=NOT_SHOWN,
            is_estimated=is_estimated,
        )
        if effect.is_three_way:
            effect = dataclasses.replace(effect, word=NO_WORDS)
        lost = sum(int(np.isnan(self.values[cell]).sum()) for cell in cells if cell != self.none)
        if lost:
            return dataclasses.replace(effect, note=f"{_runs(lost)} that it is a contrast of {FAILED_TO_TRAIN}")
        contrast = (second - first)[np.isfinite(second - first)]
        left_out = len(second) - len(contrast)
        notes = [f"{_runs(left_out)} of the baseline {FAILED_TO_TRAIN}"] if left_out else []
        seeds = len(contrast)
        if seeds < 2:
            return dataclasses.replace(effect, note="; ".join([*notes, "fewer than two seeds: no interval"]))
        mean = float(contrast.mean())
        sd = float(contrast.std(ddof=1))
        # rounding of a contrast whose true spread is 0
        if sd <= 1e-12 * max(np.abs(first).max(), np.abs(second).max()):
            notes.append("the contrast does not vary: no interval")
            return dataclasses.replace(effect, difference=mean, sd=sd, note="; ".join(notes))
        error = sd / math.sqrt(seeds)
        half = float(stats.t.isf(alpha / 2, seeds - 1)) * error
        interval = (mean - half, mean + half)
        word = effect.word
        if seeds < FEWEST:
            notes.append(f"a verdict needs at least {FEWEST} pairs")
        elif not effect.is_three_way:
            word = self._word(kind, *interval)
        p = float(2 * stats.t.sf(abs(mean) / error, seeds - 1))
        return dataclasses.replace(
            effect, difference=mean, sd=sd, interval=interval, word=word, p=p, note="; ".join(notes)
        )

    def _word(self, kind: Kind, low: float, high: float) -> str:
        """Word for an interval; one that holds 0 never shows that effects add up, unless it is inside ±delta."""
        below, above = (BETTER, WORSE) if kind in ("main", "together") else (MORE, LESS)
        is_small = self.delta is not None and -self.delta < low and high < self.delta
        if is_small and kind in ("interaction", "sum"):
            return ADD_UP
        return above if low > 0 else below if high < 0 else NOT_SHOWN


def _runs(count: int) -> str:
    return "1 run" if count == 1 else f"{count} runs"


def _or_none(values: Values) -> list[float | None]:
    return [float(value) if math.isfinite(value) else None for value in values]
