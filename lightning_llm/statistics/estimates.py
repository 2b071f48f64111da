"""Differences between the runs of a variant and those of its baseline, at one number of seeds: estimates, tests, noise.

A *difference* is variant minus baseline, of a metric of which lower is better. With pairs, ``d_i`` is the difference of
the two runs with seed ``i``, ``d`` the mean of the ``n`` differences and ``s`` their standard deviation (``n - 1`` in
the denominator). There is no bootstrap: with 3, 5, 8 and 16 seeds, its percentile intervals of 95 % cover 75, 84, 88
and 91%.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import special

Array = NDArray[np.float64]

SAVED_FROM = 8  # pairs that tell how many seeds pairing saved


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A mean difference and its standard error.

    Attributes:
        difference: Variant minus baseline.
        error: Its standard error.
        freedom: Degrees of freedom of ``difference / error``, which has Student's t distribution.
        sd: Standard deviation of the difference of one run from one other.
    """

    difference: float
    error: float
    freedom: float
    sd: float

    def t(self) -> float:
        """``difference / error``; 0 or infinite if no difference varies."""
        if self.error:
            return self.difference / self.error
        return math.copysign(math.inf, self.difference) if self.difference else 0.0

    @property
    def p(self) -> float:
        """P-value of a two-sided t test, ``2 P(T ≥ |t|)``."""
        return float(two_sided(self.t(), self.freedom))

    def interval(self, critical: float) -> tuple[float, float] | None:
        """``difference ± critical · error``; ``None`` if that is infinite."""
        half = critical * self.error if self.error else 0.0
        return (self.difference - half, self.difference + half) if math.isfinite(half) else None


def paired(baseline: Sequence[float], variant: Sequence[float]) -> Estimate:
    """The paired t test: standard error ``s / √n``, ``n - 1`` degrees of freedom (Student 1908; scipy's ``ttest_rel``).

    Args:
        baseline: At least two values.
        variant: As many, in the same order.
    """
    differences = np.subtract(variant, baseline)
    sd = float(differences.std(ddof=1))
    pairs = len(differences)
    return Estimate(float(differences.mean()), sd / math.sqrt(pairs), pairs - 1, sd)


def unpaired(baseline: Sequence[float], variant: Sequence[float]) -> Estimate:
    """Welch's t test for two samples of at least two values each, whose variances may differ.

    Standard error ``√(v₁ + v₂)`` with ``v = s² / n``, and ``(v₁ + v₂)² / (v₁² / (n₁ - 1) + v₂² / (n₂ - 1))`` degrees of
    freedom (Welch 1947; scipy's ``ttest_ind`` with ``equal_var=False``).
    """
    variances = [float(np.var(sample, ddof=1)) for sample in (baseline, variant)]
    squared_errors = [variance / len(sample) for variance, sample in zip(variances, (baseline, variant), strict=True)]
    freedom = float(len(baseline) + len(variant) - 2)
    if spread := squared_errors[0] ** 2 / (len(baseline) - 1) + squared_errors[1] ** 2 / (len(variant) - 1):
        freedom = sum(squared_errors) ** 2 / spread
    difference = float(np.mean(variant) - np.mean(baseline))
    return Estimate(difference, math.sqrt(sum(squared_errors)), freedom, math.sqrt(sum(variances)))


def two_sided(t: ArrayLike, freedom: float) -> Any:
    """``P(|T| ≥ |t|)`` of Student's t distribution."""
    return 2 * special.stdtr(freedom, -np.abs(t))


def student(alpha: ArrayLike, freedom: float) -> Any:
    """The value that ``|T|`` exceeds with probability ``alpha``: the critical value of a two-sided test."""
    return -special.stdtrit(freedom, np.asarray(alpha) / 2)


def p_of_failures(lost: int, runs: int, base_lost: int, base_runs: int) -> float:
    """The p of a two-sided test on how many runs of two sides failed to train.

    Fisher's exact test (1935, "The Design of Experiments", section 21.02): given all that failed, twice the
    probability that as many or more of them are on the side that has more than its share. 4 of 4 runs against 0 of 4
    give 0.029.

    Args:
        lost: Runs of the variant that failed.
        runs: All of its runs.
        base_lost: Runs of the baseline that failed.
        base_runs: All of its runs.
    """
    if lost * base_runs < base_lost * runs:
        lost, runs, base_lost, base_runs = base_lost, base_runs, lost, runs
    all_lost = lost + base_lost
    most = min(all_lost, runs)
    ways = sum(math.comb(runs, k) * math.comb(base_runs, all_lost - k) for k in range(lost, most + 1))
    return min(1.0, 2 * ways / math.comb(runs + base_runs, all_lost))


# ---- how far a number from a few pairs may be off


def sd_interval(sd: float, pairs: int) -> tuple[float, float]:
    """The 95% interval of a standard deviation of normal values: ``s √(ν / χ²)`` with ``ν = n - 1``."""
    freedom = pairs - 1
    low, high = (math.sqrt(freedom / float(special.chdtri(freedom, tail))) for tail in (0.025, 0.975))
    return sd * low, sd * high


def correlation_interval(correlation: float, pairs: int) -> tuple[float, float] | None:
    """The 95% interval of a correlation, by Fisher's z (1921); ``None`` below four pairs."""
    if pairs < 4 or abs(correlation) >= 1:
        return None
    middle = math.atanh(correlation)
    half = 1.96 / math.sqrt(pairs - 3)
    return math.tanh(middle - half), math.tanh(middle + half)


def correlation(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Pearson's, of at least three pairs; ``None`` if one side does not vary."""
    a, b = (np.asarray(values) - np.mean(values) for values in (first, second))
    norm = math.sqrt(float(a @ a) * float(b @ b))
    return float(a @ b) / norm if len(a) > 2 and norm else None


def seeds_saved(baseline: Sequence[float], variant: Sequence[float]) -> tuple[int, int, int] | None:
    """How many more seeds on each side an unpaired comparison would need for the same standard error.

    ``n ((s₁² + s₂²) / s² - 1)``: the variance of a difference of means is ``(s₁² + s₂²) / m`` without pairs, and
    ``s² / n`` with them. It is also ``n (F - 1) / 2``, where ``F`` is the variance of the sums of the pairs over that
    of their differences. Of normal values with equal variances, ``F`` over its true value has an F distribution
    (Pitman 1939), which gives the interval.

    Returns:
        The number, negative if pairing cost some, and the ends of its 95% interval; ``None`` if the differences do not
        vary, and below eight pairs, which say nothing: with four, and a truth of 4, they give -1 to 54.
    """
    if (pairs := len(baseline)) < SAVED_FROM:
        return None
    sums, differences = np.add(variant, baseline), np.subtract(variant, baseline)
    if not (variance := float(differences.var(ddof=1))):
        return None
    ratio = float(sums.var(ddof=1)) / variance
    reach = float(special.fdtri(pairs - 1, pairs - 1, 0.975))
    saved, low, high = (round(pairs * (f - 1) / 2) for f in (ratio, ratio / reach, ratio * reach))
    return saved, low, high
