"""When a difference counts as real although it is tested more than once: at planned looks, and at further ones.

Whoever tests after 4, 6, 8, 12 and 16 pairs, and stops at the first p below 0.05, finds a difference in 15% of the
cases without one. A *rule* says what a t statistic is worth at one number of pairs, so that this is at most ``alpha``
over all of them: ``critical(alpha)`` is the value that ``|t|`` must reach, and ``p(t)`` the smallest alpha at which it
does. ``d ± critical(alpha) s / √n`` is an interval that covers the true difference at all looks together (a repeated
confidence interval: Jennison and Turnbull 1984). There are three rules:

=====================  =================================================================================================
:class:`OneLook`       the t test, once, at a number of pairs that was fixed before
:class:`PlannedLook`   a group-sequential t test at looks that were known before the first run
:class:`ShortLook`     the same with fewer pairs than were planned
=====================  =================================================================================================

The looks do not end with the last planned one. Whoever adds pairs looks again at half as many pairs more, and so on
(``further_looks``): these numbers follow from the plan, so that nobody can choose them to suit the result.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from lightning_llm.statistics.estimates import Array, student, two_sided

PATHS = 500_000  # of the simulation: boundaries are within 0.02 at alpha 0.05
FEWEST_PATHS = 50  # paths at a look that make a boundary
# the boundaries between them are interpolated
ALPHAS = np.geomspace(1e-4, 1, 80)
_LOG_ALPHAS = np.linspace(math.log(1e-4), 0, 80)
RHO = 2.0  # of the planned looks: ``python -m benchmarks ablate --shapes looks`` compares 1, 2 and 3
RESERVE = 0.2  # of alpha, for the looks after the last planned one
GROWTH, LAST_LOOK = 1.5, 1000  # of the number of pairs from one of them to the next; there is none beyond
_LARGE = 1e100  # in place of an infinite t


@dataclasses.dataclass(frozen=True)
class OneLook:
    """The t test with this many degrees of freedom."""

    freedom: float
    name = "one look"

    def critical(self, alpha: float) -> float:
        """The critical ``|t|`` at an error of ``alpha``."""
        return float(student(alpha, self.freedom))

    def p(self, t: ArrayLike) -> Array:
        """The smallest ``alpha`` at which this ``t`` is significant."""
        return np.asarray(two_sided(t, self.freedom))


@dataclasses.dataclass(frozen=True)
class PlannedLook:
    """The group-sequential t test at one of its looks.

    Up to each look, a true null is rejected with a probability of ``alpha`` times what is ``spent`` there (Lan and
    DeMets 1983, "Discrete sequential boundaries for clinical trials"). The boundary at a look is the one that spends
    its share, given that no earlier look has rejected. A path of t does not depend on the scale of the differences, so
    one simulation gives all boundaries.

    Args:
        looks: Numbers of pairs, increasing.
        number: Which look, from 0.
        spent: The share of alpha up to each look, as of :func:`spending`.
    """

    looks: tuple[int, ...]
    number: int
    spent: tuple[float, ...]

    @property
    def name(self) -> str:
        """Such as ``look 2``."""
        return f"look {self.number + 1}"

    def critical(self, alpha: float) -> float:
        """The critical ``|t|`` at an error of ``alpha``."""
        if self.number == 0 or alpha < ALPHAS[0]:
            return float(student(alpha * self.share, self.freedom))
        return float(np.interp(math.log(alpha), _LOG_ALPHAS, boundaries(self.looks, self.spent)[:, self.number]))

    def p(self, t: ArrayLike) -> Array:
        """The smallest ``alpha`` at which this ``t`` is significant; below those of ``ALPHAS`` an upper bound."""
        # alone, this look would reject with its own share of alpha: a bound, and at the first look the p value
        bound = np.minimum(1.0, two_sided(t, self.freedom) / self.share)
        if self.number == 0:
            return np.asarray(bound)
        column = boundaries(self.looks, self.spent)[::-1, self.number]
        alphas = np.exp(np.interp(np.abs(t), column, _LOG_ALPHAS[::-1]))
        return np.where(alphas > ALPHAS[0] * (1 + 1e-9), alphas, np.minimum(alphas, bound))

    @property
    def freedom(self) -> int:
        """Degrees of freedom of the t statistic."""
        return self.looks[self.number] - 1

    @property
    def share(self) -> float:
        """Share of alpha that this look spends."""
        return self.spent[self.number] - (self.spent[self.number - 1] if self.number else 0.0)


@dataclasses.dataclass(frozen=True)
class ShortLook:
    """A planned look at which some pairs are left out, since their baselines diverged.

    A t statistic with fewer degrees of freedom is worth what the planned one with the same p is worth alone (the
    significance level approach: Jennison and Turnbull 2000, "Group Sequential Methods", section 4.4).

    Args:
        planned: The look.
        pairs: How many are left, at least two.
    """

    planned: PlannedLook
    pairs: int

    @property
    def name(self) -> str:
        """Name of the planned look."""
        return self.planned.name

    def critical(self, alpha: float) -> float:
        """The critical ``|t|`` at an error of ``alpha``."""
        alone = two_sided(self.planned.critical(alpha), self.planned.freedom)
        return float(student(alone, self.pairs - 1))

    def p(self, t: ArrayLike) -> Array:
        """The smallest ``alpha`` at which this ``t`` is significant."""
        alone = two_sided(np.minimum(np.abs(t), _LARGE), self.pairs - 1)
        return self.planned.p(student(alone, self.planned.freedom))


Rule = OneLook | PlannedLook | ShortLook


def spending(planned: Sequence[int], rho: float = RHO, further: int = 0, reserve: float = RESERVE) -> tuple[float, ...]:
    """The share of alpha that is spent up to each look.

    Up to a planned look with ``n`` of at most ``N`` pairs, it is ``(1 - reserve) (n / N)^rho``: the power family of Kim
    and DeMets (1987, "Design and analysis of group sequential tests based on the type I error spending rate function").
    With ``rho = 1``, each pair spends the same. A larger ``rho`` saves alpha for the later looks, so an early stop
    needs a larger t. The further looks share the reserve: the first ``j`` of them spend ``j / (j + 1)`` of it.

    Args:
        planned: Numbers of pairs, increasing.
        rho: The exponent, above 0.
        further: How many further looks there are.
        reserve: The share of alpha that they have together.
    """
    at_planned = ((1 - reserve) * (pairs / planned[-1]) ** rho for pairs in planned)
    return (*at_planned, *(1 - reserve / (number + 1) for number in range(1, further + 1)))


def further_looks(last: int) -> list[int]:
    """The numbers of pairs after the last planned one, at each of which half as many are added."""
    looks = []
    while (last := math.ceil(GROWTH * last)) <= LAST_LOOK:
        looks.append(last)
    return looks


@functools.lru_cache(maxsize=8)
def boundaries(looks: tuple[int, ...], spent: tuple[float, ...]) -> Array:
    """Critical values at each of ``ALPHAS`` and each look, shape (alphas, looks), from ``PATHS`` seeded paths.

    Where a look spends so little that fewer than ``FEWEST_PATHS`` would end there, its boundary is that of a look by
    itself: it spends less than its share, never more.

    A path needs no single differences: between two looks, the sum of ``b`` standard normal values is normal, and the
    sum of their squared deviations from their mean is chi-squared with ``b - 1`` degrees of freedom.
    """
    rng = np.random.default_rng(0)
    paths = np.empty((len(looks), PATHS))
    total, squares = np.zeros(PATHS), np.zeros(PATHS)
    for number, added in enumerate(np.diff(looks, prepend=0)):
        increment = rng.normal(0, math.sqrt(added), PATHS)
        squares += increment**2 / added + (rng.chisquare(added - 1, PATHS) if added > 1 else 0.0)
        total += increment
        pairs = looks[number]
        paths[number] = np.abs(total) / np.sqrt((squares - total**2 / pairs) * pairs / (pairs - 1))
    descending = np.argsort(-paths[1:], axis=1)
    critical = np.empty((len(ALPHAS), len(looks)))
    for row, alpha in enumerate(ALPHAS):
        spent_alpha = alpha * np.array(spent)
        critical[row, 0] = student(spent_alpha[0], looks[0] - 1)
        is_open = paths[0] < critical[row, 0]
        for number in range(1, len(looks)):
            share = spent_alpha[number] - spent_alpha[number - 1]
            if PATHS * share < FEWEST_PATHS:
                critical[row, number] = student(share, looks[number] - 1)
                is_open &= paths[number] < critical[row, number]
                continue
            # at most the paths that were to be rejected before are closed, so the rest is among the highest
            highest = descending[number - 1, : int(PATHS * spent_alpha[number] * 1.05) + 100]
            highest = highest[is_open[highest]]
            last_rejected = min(round(PATHS * share), len(highest)) - 1
            critical[row, number] = paths[number, highest[last_rejected]] if last_rejected >= 0 else paths[number].min()
            is_open[highest[: last_rejected + 1]] = False
    critical = np.minimum.accumulate(critical)  # a larger alpha never has a higher boundary
    critical.setflags(write=False)
    return critical
