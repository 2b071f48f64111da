"""A stream of ideas, one after another: when an idea is adopted, and when it is given up.

Each idea is compared in pairs with the current baseline. A pair's difference is the idea's loss minus the baseline's.
Whoever keeps an idea because one pair is lower adopts half of the useless ones. Here:

1. The evidence for an idea is the *e-value* of its pairs, by a one-sided t e-process: its expectation is at most 1 for
   a useless idea, however often one looks (Wang and Ramdas 2023, arXiv 2310.03722). Its prior on an improvement is half
   normal, with a width of one standard deviation.
2. An idea has to reach a *threshold* that rises with its place in the stream, and falls with each adoption: e-LOND (Xu
   and Ramdas 2024, "Online multiple testing with e-values"). Over the whole stream, the expected share of useless ideas
   among the adopted ones is at most ``alpha``.
3. An idea at its threshold is *confirmed* on fresh seeds: the interval of their mean has to lie below zero. The
   e-process takes differences for normal. It is fooled by an idea that is mostly a little better and sometimes much
   worse: 50% of streams of 100 useless ideas with exponential differences adopted one without the confirmation, 7.5%
   with it. The confirmation is also the honest size of the gain, since the pairs that won have won partly by chance.
4. An idea is given up after ``LEAST`` pairs if the evidence does not speak for it, and after ``most`` pairs in any
   case.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from scipy import special

from lightning_llm.statistics.estimates import Array, student

LEAST = 4  # pairs before an idea is given up
CONFIRMATION = 8  # fresh pairs
CONFIDENCE = 0.95  # of the interval that has to lie below zero
_GRID = np.linspace(-1, 1, 4001)  # on it, e-values are interpolated when there are many, as in simulations
_FEW = 64

Step = Literal["pair", "confirm", "adopted", "rejected", "out of pairs"]


class Decision(NamedTuple):
    """Next step for an idea.

    Attributes:
        step: ``pair`` or ``confirm``: train one; else the verdict.
        pairs: That count, besides those that confirm it.
    """

    step: Step
    pairs: int


@dataclasses.dataclass(frozen=True)
class StreamRule:
    """When an idea is adopted, and when it is given up.

    Attributes:
        alpha: The share of useless ideas among the adopted ones, in expectation.
        most: Pairs of an idea, besides those that confirm it.
    """

    alpha: float = 0.05
    most: int = 24

    def threshold(self, place: int, adopted: int) -> float:
        """The e-value that the idea at this place in the stream, from 1, has to reach after this many adoptions."""
        return 1 / (self.alpha * _share(place) * (adopted + 1))

    def next(self, differences: Sequence[float], fresh: Sequence[float], threshold: float) -> Decision:
        """Next step for an idea: train another pair, or one that confirms it, or end with a verdict.

        The first pair that ends the comparison ends it: what was trained beyond it does not count.

        Args:
            differences: Of its pairs in their order; infinite: its run failed to train.
            fresh: Of the pairs that confirm it.
            threshold: As of :meth:`threshold`.
        """
        for pairs in range(1, len(differences) + 1):
            if not math.isfinite(differences[pairs - 1]):
                return Decision("rejected", pairs)
            e_value = e_value_of(differences[:pairs])
            if e_value >= threshold:
                return Decision(_confirmed(fresh), pairs)
            if pairs >= LEAST and e_value <= 1:
                return Decision("rejected", pairs)
            if pairs >= self.most:
                return Decision("out of pairs", pairs)
        return Decision("pair", len(differences))


def _confirmed(fresh: Sequence[float]) -> Step:
    if not all(map(math.isfinite, fresh)):
        return "rejected"
    if len(fresh) < CONFIRMATION:
        return "confirm"
    interval = interval_of(fresh)
    return "adopted" if interval is not None and interval[1] < 0 else "rejected"


def interval_of(differences: Sequence[float]) -> tuple[float, float] | None:
    """The interval of the mean, as a t test gives it; ``None``: there are fewer than two finite differences."""
    values = np.asarray([value for value in differences if math.isfinite(value)], float)
    if len(values) < 2:
        return None
    half = student(1 - CONFIDENCE, len(values) - 1) * values.std(ddof=1) / math.sqrt(len(values))
    return float(values.mean() - half), float(values.mean() + half)


def e_value_of(differences: Sequence[float]) -> float:
    """The factor by which these differences speak for an improvement; 1 for none or one."""
    values = np.asarray(differences, float)
    if len(values) < 2 or not values.any():
        return 1.0
    return float(np.exp(log_e_value(-values.sum() / math.sqrt(len(values) * (values**2).sum()), len(values))))


def log_e_value(u: ArrayLike, pairs: int) -> Array:
    """The logarithm of the e-value.

    Args:
        u: The improvements' sum, divided by the root of ``pairs`` times their sum of squares: t / √(t² + pairs - 1).
        pairs: Their number.
    """
    values = np.asarray(u, float)
    if values.size <= _FEW:
        return _exact_log_e_values(values, pairs)
    return np.asarray(np.interp(values, _GRID, _on_grid(pairs)))


@functools.cache
def _on_grid(pairs: int) -> Array:
    """The logarithm of the e-value on the grid, which takes about a second."""
    return _exact_log_e_values(_GRID, pairs)


def _exact_log_e_values(u: Array, pairs: int) -> Array:
    """The logarithm of the e-value by numerical integration.

    Given the effect δ, in standard deviations, the likelihood ratio of t is the mean of exp(τ δ √n u - n δ²/2) over the
    scale τ = √Σd² / σ, whose density is that of τ^(n-1) exp(-τ²/2). The mean over a half-normal δ is in closed form:
    2 / √(n + 1) · exp(b²/2) Φ(b) with b = √(n / (n + 1)) u τ.
    """
    scale = np.linspace(0, 8 + 2 * math.sqrt(pairs), 1601)[1:]
    weight = (pairs - 1) * np.log(scale) - scale**2 / 2
    weight -= special.logsumexp(weight)
    b = math.sqrt(pairs / (pairs + 1)) * np.multiply.outer(u, scale)
    inner = special.logsumexp(weight + b**2 / 2 + special.log_ndtr(b), axis=-1)
    return np.asarray(inner + math.log(2 / math.sqrt(pairs + 1)))


def _share(place: int) -> float:
    """Share of alpha for one place; all add up to less than 1."""
    return 1 / (2.11 * (place + 1) * math.log(place + 1) ** 2)
