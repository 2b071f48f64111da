"""Checks of what the t test takes for granted: signs, median, skewness and outliers of the differences.

The t test rests on differences that are about symmetric. A variant that changes nothing has such differences, because
then each is as likely to be ``-d`` as ``d``. One that changes the *shape* has not: a variant that is a little better in
most runs and far worse in a few can be found ``better`` although its mean is worse.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

EXACT_PAIRS = 20  # up to here, all signs are tried
DRAWS = 100_000  # of signs, for more pairs
# The skewness of fewer pairs says nothing. That of normal differences is beyond the limit in 5.0, 2.4 and 1.2% of the
# comparisons with 8, 12 and 16 pairs, that of exponential ones in 28, 33 and 37%.
SKEWED_FROM, SKEWED = 8, 1.5
# An outlier is this many robust standard deviations from the median. Normal differences have one in 4.1, 2.6, 1.2 and
# 0.7% of the comparisons with 6, 8, 12 and 16 pairs. Fewer than six pairs have none.
FAR, OUTLIERS_FROM = 6.0, 6
_MAD = 1.4826  # turns the median absolute deviation of normal values into their standard deviation


@dataclasses.dataclass(frozen=True)
class Robust:
    """A second look at the differences of the pairs.

    Attributes:
        median: Of the differences.
        sign_flip_p: Of the two-sided sign-flip test.
        smallest_p: The smallest p that this number of pairs can reach.
        skewness: Third standardized moment; ``None`` below eight pairs. Its standard error is about ``√(6 / n)``.
        outliers: Indices of the pairs that are far from the median; in a report, their seeds.
        without_outliers: The mean difference without them; ``None`` if there are none.
    """

    median: float
    sign_flip_p: float
    smallest_p: float
    skewness: float | None
    outliers: list[Any]
    without_outliers: float | None

    def doubts(self, difference: float, alpha: float) -> list[str]:
        """Why a direction that the t test shows is not to be trusted yet.

        Args:
            difference: The mean.
            alpha: Of the sign-flip test.
        """
        doubts = []
        if self.smallest_p > alpha:
            limits = f"its p is at least {self.smallest_p:.2g}, and must be at most {alpha:.2g}"
            doubts.append(f"too few pairs for the sign-flip test ({limits})")
        elif self.sign_flip_p > alpha:
            doubts.append(f"the sign-flip test does not confirm it (p {self.sign_flip_p:.2g})")
        if self.skewness is not None and abs(self.skewness) > SKEWED:
            doubts.append(f"the differences are skewed ({self.skewness:+.1f}), so its error is larger than alpha")
        if self.median * difference < 0:
            doubts.append(f"the median difference {self.median:+.4f} has the other sign")
        return doubts


def robust(differences: ArrayLike) -> Robust:
    """Check the differences of at least two pairs."""
    values = np.asarray(differences, dtype=np.float64)
    far = outliers(values)
    p, smallest = sign_flip(values.tolist())
    others = np.delete(values, far)
    return Robust(float(np.median(values)), p, smallest, skewness(values), far, float(others.mean()) if far else None)


def sign_flip(differences: Sequence[float]) -> tuple[float, float]:
    """The share of all signs of the differences whose sum is at least as far from 0 as their own sum.

    It assumes only that each difference is as likely to be ``-d`` as ``d`` if the variant changes nothing (Fisher 1935,
    "The Design of Experiments", section 21). Exact up to ``EXACT_PAIRS`` pairs, where the smallest p is ``2 / 2ⁿ``:
    five pairs cannot reach 0.05. Beyond, ``(1 + k) / (1 + m)`` with ``k`` of ``m`` seeded draws (Phipson and Smyth
    2010).

    Returns:
        The p of the two-sided test, and the smallest that this number of pairs can reach.
    """
    own_sum = abs(math.fsum(differences)) - 1e-9 * math.fsum(map(abs, differences))  # with a tolerance for rounding
    if len(differences) <= EXACT_PAIRS:
        sums = np.array(differences[:1], dtype=np.float64)  # the other sign of the first gives the mirror image
        for difference in differences[1:]:
            sums = np.concatenate([sums + difference, sums - difference])
        return float(np.mean(np.abs(sums) >= own_sum)), 2.0 ** (1 - len(differences))
    rng = np.random.default_rng(0)
    sums = np.zeros(DRAWS)
    for difference in differences:
        sums += np.where(rng.random(DRAWS) < 0.5, difference, -difference)
    extreme = int(np.sum(np.abs(sums) >= own_sum))
    return (1 + extreme) / (1 + DRAWS), 1 / (1 + DRAWS)


def skewness(differences: ArrayLike) -> float | None:
    """The adjusted skewness ``G₁`` (Joanes and Gill 1998); ``None`` for few pairs, or if they do not vary."""
    values = np.asarray(differences, dtype=np.float64)
    pairs = len(values)
    if pairs < SKEWED_FROM or not values.std():
        return None
    third = float(np.mean((values - values.mean()) ** 3)) / float(values.std()) ** 3
    return third * math.sqrt(pairs * (pairs - 1)) / (pairs - 2)


def outliers(differences: ArrayLike) -> list[int]:
    """Indices of the differences that are more than ``FAR`` robust standard deviations from the median."""
    values = np.asarray(differences, dtype=np.float64)
    distance = np.abs(values - np.median(values))
    spread = _MAD * float(np.median(distance))
    if len(values) < OUTLIERS_FROM or not spread:
        return []
    return [int(index) for index in np.flatnonzero(distance > FAR * spread)]
