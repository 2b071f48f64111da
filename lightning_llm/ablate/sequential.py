"""When a difference counts as real although it is tested more than once: at planned looks, and at others.

Whoever tests after 4, 6, 8, 12 and 16 pairs, and stops at the first p below 0.05, finds a difference in 15 % of the
cases without one. A *rule* says what a t statistic is worth at one number of pairs, so that this is at most ``alpha``
over all of them: ``critical(alpha)`` is the value that ``|t|`` must reach, and ``p(t)`` the smallest alpha at which it
does. ``d ± critical(alpha) s / √n`` is an interval that covers the true difference at all looks together (a repeated
confidence interval: Jennison and Turnbull 1984). There are three rules:

=====================  =================================================================================================
:class:`OneLook`       the t test, once, at a number of pairs that was fixed before
:class:`PlannedLook`   a group-sequential t test at looks that were declared before the first run
:class:`AnyLook`       the t e-process, at any number of pairs
=====================  =================================================================================================
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike

from lightning_llm.ablate.statistics import Array, student, two_sided

PATHS = 500_000  # of the simulation: boundaries are within 0.02 at alpha 0.05
FEWEST = 50  # paths at a look that make a boundary
# the boundaries between them are interpolated
ALPHAS, _LOG_ALPHAS = np.geomspace(1e-4, 1, 80), np.linspace(math.log(1e-4), 0, 80)
RHO = 2.0  # of the planned looks: ``python -m benchmarks ablate --shapes looks`` compares 1, 2 and 3
G = 1.0  # width of the e-process's prior for the difference, in standard deviations squared
_LARGE = 1e100  # in place of an infinite t


class Rule(Protocol):
    """What a t statistic is worth."""

    @property
    def name(self) -> str:
        """For reports."""

    def critical(self, alpha: float) -> float:
        """The ``|t|`` at which a true null is rejected; infinite if none is enough."""

    def p(self, t: ArrayLike) -> Array:
        """The smallest alpha at which ``|t|`` is rejected."""


@dataclasses.dataclass(frozen=True)
class OneLook:
    """The t test with this many degrees of freedom."""

    freedom: float
    name = "one look"

    def critical(self, alpha: float) -> float:
        """As :class:`Rule`."""
        return float(student(alpha, self.freedom))

    def p(self, t: ArrayLike) -> Array:
        """As :class:`Rule`."""
        return np.asarray(two_sided(t, self.freedom))


@dataclasses.dataclass(frozen=True)
class PlannedLook:
    """The group-sequential t test at one of its looks.

    ``alpha`` is spent as pairs come in (Lan and DeMets 1983, "Discrete sequential boundaries for clinical trials"): up
    to look ``k``, a true null is rejected with probability ``alpha (n_k / n_K)^rho``. That is the power family of Kim
    and DeMets (1987, "Design and analysis of group sequential tests based on the type I error spending rate
    function"). With ``rho = 1``, each pair spends the same. A larger ``rho`` saves alpha for the later looks, so an
    early stop needs a larger t.

    The boundary at each look is the one that spends its share, given that no earlier look has rejected. A path of t
    does not depend on the scale of the differences, so one simulation gives all boundaries.

    Args:
        looks: Numbers of pairs, increasing.
        number: Which look, from 0.
        rho: Of the spending, above 0.
    """

    looks: tuple[int, ...]
    number: int
    rho: float = RHO

    @property
    def name(self) -> str:
        """Such as ``look 2 of 5``."""
        return f"look {self.number + 1} of {len(self.looks)}"

    def critical(self, alpha: float) -> float:
        """As :class:`Rule`."""
        if self.number == 0 or alpha < ALPHAS[0]:
            return float(student(alpha * self._share, self.freedom))
        return float(np.interp(math.log(alpha), _LOG_ALPHAS, boundaries(self.looks, self.rho)[:, self.number]))

    def p(self, t: ArrayLike) -> Array:
        """As :class:`Rule`; below the smallest of ``ALPHAS`` it is an upper bound."""
        # alone, this look would reject with its own share of alpha: a bound, and at the first look the p value
        bound = np.minimum(1.0, two_sided(t, self.freedom) / self._share)
        if self.number == 0:
            return np.asarray(bound)
        column = boundaries(self.looks, self.rho)[::-1, self.number]
        found = np.exp(np.interp(np.abs(t), column, _LOG_ALPHAS[::-1]))
        return np.where(found > ALPHAS[0] * (1 + 1e-9), found, np.minimum(found, bound))

    @property
    def freedom(self) -> int:
        """Of the t statistic."""
        return self.looks[self.number] - 1

    @property
    def _share(self) -> float:
        return float(np.diff(_spending(self.looks, self.rho), prepend=0)[self.number])


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
        """That of the planned look."""
        return self.planned.name

    def critical(self, alpha: float) -> float:
        """As :class:`Rule`."""
        alone = two_sided(self.planned.critical(alpha), self.planned.freedom)
        return float(student(alone, self.pairs - 1))

    def p(self, t: ArrayLike) -> Array:
        """As :class:`Rule`."""
        alone = two_sided(np.minimum(np.abs(t), _LARGE), self.pairs - 1)
        return self.planned.p(student(alone, self.planned.freedom))


@dataclasses.dataclass(frozen=True)
class AnyLook:
    """The t e-process: looks need not be planned, and more pairs can follow.

    With ``ν = n - 1``, ``E = (1 + n g)^(-1/2) [(1 + t²/ν) / (1 + t²/(ν (1 + n g)))]^(n/2)`` is the likelihood ratio
    of a normal prior for the difference, whose variance is ``g`` times that of the noise (Wang and Ramdas, arXiv
    2310.03722). Without a difference, it ever reaches ``1 / alpha`` with a probability of at most ``alpha``.

    The price: at a true difference of one standard deviation, it finds it within 16 pairs in 74 % of the cases, looking
    at each number of them, and planned looks at 8, 12 and 16 in 95 %.

    Args:
        pairs: How many there are.
    """

    pairs: int
    name = "e-process"

    def critical(self, alpha: float) -> float:
        """As :class:`Rule`: E solved for t."""
        grown = 1 + self.pairs * G
        ratio = (math.sqrt(grown) / alpha) ** (2 / self.pairs)
        return math.sqrt((self.pairs - 1) * (ratio - 1) / (1 - ratio / grown)) if ratio < grown else math.inf

    def p(self, t: ArrayLike) -> Array:
        """``min(1, 1 / E)``."""
        return np.minimum(1.0, np.exp(-self.log_e(t)))

    def log_e(self, t: ArrayLike) -> Array:
        """The logarithm of E."""
        grown, squared = 1 + self.pairs * G, np.minimum(np.abs(t), _LARGE) ** 2 / (self.pairs - 1)
        gain = np.log1p(squared) - np.log1p(squared / grown)
        return np.asarray(self.pairs / 2 * gain - math.log(grown) / 2)


def _spending(looks: Sequence[int], rho: float) -> Array:
    """The part of alpha that is spent up to each look."""
    return np.asarray((np.array(looks) / looks[-1]) ** rho)


@functools.lru_cache(maxsize=8)
def boundaries(looks: tuple[int, ...], rho: float = RHO) -> Array:
    """Critical values at each of ``ALPHAS`` and each look, shape (alphas, looks), from ``PATHS`` seeded paths.

    Where a look spends so little that fewer than ``FEWEST`` paths would end there, its boundary is that of a look by
    itself: it spends less than its share, never more.

    A path needs no single differences: between two looks, the sum of ``b`` standard normal values is normal, and the
    sum of their squared deviations from their mean is chi-squared with ``b - 1`` degrees of freedom.
    """
    rng, paths = np.random.default_rng(0), np.empty((len(looks), PATHS))
    total, squares = np.zeros(PATHS), np.zeros(PATHS)
    for number, added in enumerate(np.diff(looks, prepend=0)):
        part = rng.normal(0, math.sqrt(added), PATHS)
        squares += part**2 / added + (rng.chisquare(added - 1, PATHS) if added > 1 else 0.0)
        total += part
        pairs = looks[number]
        paths[number] = np.abs(total) / np.sqrt((squares - total**2 / pairs) * pairs / (pairs - 1))
    descending = np.argsort(-paths[1:], axis=1)
    found = np.empty((len(ALPHAS), len(looks)))
    for row, alpha in enumerate(ALPHAS):
        spent = alpha * _spending(looks, rho)
        found[row, 0] = student(spent[0], looks[0] - 1)
        is_open = paths[0] < found[row, 0]
        for number in range(1, len(looks)):
            share = spent[number] - spent[number - 1]
            if PATHS * share < FEWEST:
                found[row, number] = student(share, looks[number] - 1)
                is_open &= paths[number] < found[row, number]
                continue
            # at most the paths that were to be rejected before are closed, so the rest is among the highest
            highest = descending[number - 1, : int(PATHS * spent[number] * 1.05) + 100]
            highest = highest[is_open[highest]]
            last = min(round(PATHS * share), len(highest)) - 1
            found[row, number] = paths[number, highest[last]] if last >= 0 else paths[number].min()
            is_open[highest[: last + 1]] = False
    found = np.minimum.accumulate(found)  # a larger alpha never has a higher boundary
    found.setflags(write=False)
    return found
