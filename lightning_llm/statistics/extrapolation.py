"""From differences at several sizes to the difference at a larger one: an interval, a promise, and an answer.

A size's place is x, the logarithm to base 4 of its compute. The difference of a variant from its baseline is taken to
follow Δ(x) = a + b g(x), with g(x) = (1 - ρ^x) / (1 - ρ), and g(x) = x where ρ is 1: constant, linear, and each decay
to zero or to another level are cases of it. For each ρ of a grid, a and b are fitted by weighted least squares. A ρ
counts unless its residuals are larger than the pairs' own variance explains (an F test at 10%). The interval of the
mean is the union of their t intervals. The *prediction* interval, in which the next observed mean should be, also has
that mean's own variance. If no ρ counts, differences scatter more over sizes than pairs explain. Then all variances of
the best one are multiplied by its misfit per degree of freedom (Birge 1932, "The Calculation of Errors by the Method of
Least Squares").

Of 12,000 simulations of each of eight smooth curves, 93 to 97% had the truth in the interval of the mean at 90%
(``python -m benchmarks ladder --shapes coverage``). Nothing predicts a bend: targets are at most ``MOST_BEYOND`` away.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
from scipy import special

from lightning_llm.statistics.estimates import Array, student

RATIOS = (0.25, 0.35, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)  # ρ
LEVEL = 0.9  # of the intervals
REJECTED = 0.1  # the F test's level
FEWEST_SIZES = 3  # two fit any curve
MOST_BEYOND = 2.0  # in x: a factor of 16 in compute

Answer = Literal["holds", "fades", "flips", "unknown"]
Interval = tuple[float, float]


@dataclasses.dataclass(frozen=True)
class AtSize:
    """The differences of a variant's pairs at one size.

    Attributes:
        x: The logarithm to base 4 of the compute.
        mean: Of the differences, variant minus baseline.
        sd: Their standard deviation.
        pairs: Their number, at least 2.
    """

    x: float
    mean: float
    sd: float
    pairs: int


@dataclasses.dataclass(frozen=True)
class Prediction:
    """The difference at a target.

    Attributes:
        mean: By the best curve.
        interval: Of the mean.
        prediction_interval: Of the mean that the target's pairs will show.
        ratios: The ρ that count, the best one first; the best one alone if none counts.
    """

    mean: float
    interval: Interval
    prediction_interval: Interval
    ratios: tuple[float, ...]


@dataclasses.dataclass(frozen=True)
class SpreadBySize:
    """The standard deviation of a pair's difference as a function of the size: log-linear in x."""

    log_sd: float
    slope: float
    freedom: float

    @classmethod
    def of(cls, sizes: Sequence[AtSize]) -> "SpreadBySize":
        """Fitted to all variants, the null variant among them; sizes whose differences are all equal say nothing."""
        varying = [size for size in sizes if size.sd > 0]
        if not varying:
            return cls(-math.inf, 0.0, 1.0)
        x = np.array([size.x for size in varying])
        freedom = np.array([size.pairs - 1.0 for size in varying])
        # the mean of log s is below log σ
        logs = np.log([size.sd for size in varying]) - (special.digamma(freedom / 2) - np.log(freedom / 2)) / 2
        weights = freedom / freedom.sum()
        center = float(weights @ x)
        variance = float(weights @ (x - center) ** 2)
        slope = float(weights @ ((x - center) * logs)) / variance if variance > 0 else 0.0
        return cls(float(weights @ logs) - slope * center, slope, float(freedom.sum()))

    def at(self, x: float) -> float:
        """The standard deviation at a size."""
        return math.exp(self.log_sd + self.slope * x)


def predict(sizes: Sequence[AtSize], spread: SpreadBySize, target: float, pairs: int) -> Prediction:
    """The difference at a target.

    Args:
        sizes: Of one variant.
        spread: Of the pairs, from all variants.
        target: Its x.
        pairs: That it will have.

    Raises:
        ValueError: There are fewer than ``FEWEST_SIZES`` sizes, the target is too far from the largest one, or no pair
            differs from another.
    """
    if not spread.at(target):
        raise ValueError("all differences are equal: without a spread there is no interval")
    xs = sorted(size.x for size in sizes)
    if len(set(xs)) < FEWEST_SIZES:
        raise ValueError(f"a prediction needs differences at {FEWEST_SIZES} sizes or more, got {len(set(xs))}")
    if target - xs[-1] > MOST_BEYOND + 1e-9:
        times = f"{4 ** (target - xs[-1]):.3g} times the compute of the largest size"
        raise ValueError(f"the target has {times}, expected at most {4**MOST_BEYOND:g} times: nothing predicts further")
    x = np.array([size.x - xs[0] for size in sizes])
    means = np.array([size.mean for size in sizes])
    errors = np.array([spread.at(size.x) / math.sqrt(size.pairs) for size in sizes])
    fits = sorted((fit_curve(x, means, errors, target - xs[0], ratio) for ratio in RATIOS), key=lambda fit: fit.misfit)
    max_misfit = (len(sizes) - 2) * special.fdtri(len(sizes) - 2, spread.freedom, 1 - REJECTED)
    accepted = [fit for fit in fits if fit.misfit <= max_misfit]
    scale = 1.0
    if not accepted:
        accepted = fits[:1]
        scale = fits[0].misfit / (len(sizes) - 2)
    quantile = float(student(1 - LEVEL, spread.freedom))
    own_variance = spread.at(target) ** 2 / pairs

    def union(extra_variance: float) -> Interval:
        reaches = [(fit.mean, quantile * math.sqrt(scale * (fit.variance + extra_variance))) for fit in accepted]
        return min(mean - reach for mean, reach in reaches), max(mean + reach for mean, reach in reaches)

    return Prediction(fits[0].mean, union(0.0), union(own_variance), tuple(fit.ratio for fit in accepted))


@dataclasses.dataclass(frozen=True)
class Fit:
    """One curve: the mean at the target with its variance, and the weighted sum of squared residuals."""

    ratio: float
    mean: float
    variance: float
    misfit: float


def fit_curve(x: Array, means: Array, errors: Array, target: float, ratio: float) -> Fit:
    """By weighted least squares, at a ratio ρ; 1 is a straight line. ``errors`` are those of the means."""

    def row(at: Array | float) -> Array:
        curve = at if ratio == 1 else (1 - ratio ** np.asarray(at)) / (1 - ratio)
        return np.stack([np.ones_like(curve, float), np.asarray(curve, float)], -1)

    weighted = row(x) / errors[:, None]
    covariance = np.linalg.inv(weighted.T @ weighted)
    coefficients = covariance @ (weighted.T @ (means / errors))
    at_target = row(target)
    misfit = float((((means - row(x) @ coefficients) / errors) ** 2).sum())
    return Fit(ratio, float(at_target @ coefficients), float(at_target @ covariance @ at_target), misfit)


def answer(interval: Interval, direction: int, delta: float | None) -> Answer:
    """Answer of an interval at the target to a difference at the largest size.

    Args:
        interval: Of the mean at the target.
        direction: Of the difference at the largest size: -1 or 1 if it is shown, else 0.
        delta: The smallest difference that matters; ``None``: none is too small.
    """
    low, high = interval
    if delta is not None and -delta < low and high < delta:
        return "fades"
    target_direction = -1 if high < 0 else 1 if low > 0 else 0
    if target_direction == 0 or direction == 0:
        return "unknown"
    return "holds" if target_direction == direction else "flips"
