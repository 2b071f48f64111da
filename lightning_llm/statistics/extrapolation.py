"""From differences at several sizes to the difference one size up: an interval, a promise, and an answer.

A size's place is x, the logarithm to base 4 of its compute. From one size to the next, over a step h, the true
difference Δ of a variant from its baseline is taken to shrink by φ^h and to move by chance:

    Δ(x + h) = φ^h Δ(x) + a normal error of variance h (τ² + κ² Δ(x)²)

φ, τ, and κ are those of all known steps (``Drift.of``), at the largest likelihood times weak priors: of ladders that
this project has trained (``statistics.known_steps``), and of the user's own. Steps count as independent, although two
neighbors share a mean. With s² for the squared standard error of a mean, the next
mean is predicted as φ^h times the last one, with variance

    φ^2h s_last² + s_next² + h (τ² + κ² max(0, Δ_last² - s_last²))

and the true mean without s_next². With fewer than ``FEWEST_STEPS`` steps, φ is 1: the difference persists, and drifts.
Errors have t distributions with 5 degrees of freedom in the likelihood, of which τ and κ are scales. Intervals have
these too, or n - p if that is less, with n steps and p parameters; and τ and κ are larger by √(n / (n - p)) than the
likelihood says. In 300 simulations of each case with normal errors, 90% intervals hold 90% after 60 steps, 87% after 8,
and 95 to 97% after 4, where φ is 1 (``tests/statistics/test_extrapolation.py`` has fewer of these).

``python -m benchmarks ladder --shapes rules`` scores this rule and others on what was measured.
"""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
from scipy import special

from lightning_llm.statistics.estimates import student

LEVEL = 0.9  # of the intervals
_SAME = 1e-6  # in x: no two sizes of a ladder are so close
FEWEST_SIZES = 2  # a step has two ends, and two sizes show that a difference is no accident
FEWEST_STEPS = 8  # that tell whether differences shrink
MOST_COMPUTE = 5.0  # of the target, in multiples of the largest size: one size up
FREEDOM = 5.0  # of the t distribution of a step's error, in the likelihood and in intervals
_LOG_DECAY_SD = 0.5  # of the prior of log φ, around 0
_LOG_SCALE_SD = 5.0  # of the weak priors of log τ and log κ
_SHARE = 0.25  # center of the prior of κ

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
class SpreadBySize:
    """The standard deviation of a pair's difference as a function of the size: log-linear in x."""

    log_sd: float
    slope: float

    @classmethod
    def of(cls, sizes: Sequence[AtSize]) -> "SpreadBySize":
        """Fitted to all variants, the null variant among them; sizes whose differences are all equal say nothing."""
        varying = [size for size in sizes if size.sd > 0]
        if not varying:
            return cls(-math.inf, 0.0)
        x = np.array([size.x for size in varying])
        freedom = np.array([size.pairs - 1.0 for size in varying])
        # the mean of log s is below log σ
        logs = np.log([size.sd for size in varying]) - (special.digamma(freedom / 2) - np.log(freedom / 2)) / 2
        weights = freedom / freedom.sum()
        center = float(weights @ x)
        variance = float(weights @ (x - center) ** 2)
        slope = float(weights @ ((x - center) * logs)) / variance if np.ptp(x) > _SAME else 0.0
        return cls(float(weights @ logs) - slope * center, slope)

    def at(self, x: float) -> float:
        """The standard deviation at a size."""
        return math.exp(self.log_sd + self.slope * x)

    def error(self, x: float, pairs: int) -> float:
        """The standard error of the mean of some pairs at a size."""
        return self.at(x) / math.sqrt(pairs)


@dataclasses.dataclass(frozen=True)
class Step:
    """A variant's mean differences at two sizes, one after the other.

    Attributes:
        h: From the smaller size to the larger one, in x.
        before: Mean difference at the smaller size.
        after: At the larger one.
        error_before: Standard error of ``before``.
        error_after: Of ``after``.
    """

    h: float
    before: float
    after: float
    error_before: float
    error_after: float


def steps_of(sizes: Sequence[AtSize], spread: SpreadBySize) -> list[Step]:
    """The steps of one variant, from each size to the next."""
    ordered = sorted(sizes, key=lambda size: size.x)
    return [
        Step(
            h=after.x - before.x,
            before=before.mean,
            after=after.mean,
            error_before=spread.error(before.x, before.pairs),
            error_after=spread.error(after.x, after.pairs),
        )
        for before, after in itertools.pairwise(ordered)
    ]


@dataclasses.dataclass(frozen=True)
class Drift:
    """How differences change with the compute.

    Attributes:
        decay: φ, by which a difference is multiplied for 4 times the compute.
        base: τ, the scale of a change by chance for 4 times the compute, in the unit of the metric.
        share: κ, the same as a share of the difference.
        steps: The number of steps that these were learned from.
        freedom: Degrees of freedom of an interval.
    """

    decay: float
    base: float
    share: float
    steps: int
    freedom: float = FREEDOM

    @classmethod
    def of(cls, steps: Sequence[Step], is_decaying: bool | None = None) -> "Drift":
        """Learn from steps: the values at the largest posterior density.

        Args:
            steps: At least one.
            is_decaying: ``False``: φ is 1. By default it is fitted if there are ``FEWEST_STEPS`` steps.

        Raises:
            ValueError: There is no step, or no difference varies.
        """
        from scipy import optimize  # takes 0.3 s

        if not steps or not any(step.error_before or step.error_after for step in steps):
            raise ValueError("no step between two sizes is known")
        fits_decay = len(steps) >= FEWEST_STEPS if is_decaying is None else is_decaying
        h, before, after, error_before, error_after = np.array([dataclasses.astuple(step) for step in steps]).T
        shown = np.maximum(before**2 - error_before**2, 0)
        log_base = math.log(float(np.median(np.hypot(error_before, error_after))))

        def negative(parameters: Sequence[float]) -> float:
            log_decay = parameters[0] if fits_decay else 0.0
            base, share = math.exp(parameters[-2]), math.exp(parameters[-1])
            factor = np.exp(log_decay * h)
            variance = factor**2 * error_before**2 + error_after**2 + h * (base**2 + share**2 * shown)
            z = (after - factor * before) / np.sqrt(variance)
            log_density = -(FREEDOM + 1) / 2 * np.log1p(z**2 / FREEDOM) - np.log(variance) / 2
            scales = (parameters[-2] - log_base) ** 2 + (parameters[-1] - math.log(_SHARE)) ** 2
            prior = (log_decay / _LOG_DECAY_SD) ** 2 / 2 + scales / (2 * _LOG_SCALE_SD**2)
            return float(prior - log_density.sum())

        starts = [
            [*([math.log(decay)] if fits_decay else []), log_base, math.log(share)]
            for decay in ((0.6, 0.9) if fits_decay else (1.0,))
            for share in (0.1, 0.4)
        ]
        found = [
            optimize.minimize(negative, start, method="Nelder-Mead", options={"maxiter": 2000}) for start in starts
        ]
        best = min(found, key=lambda result: float(result.fun)).x.tolist()
        left = max(1, len(steps) - len(best))  # the likelihood takes too small scales where few steps are left
        wider = math.sqrt(len(steps) / left)
        return cls(
            decay=math.exp(best[0]) if fits_decay else 1.0,
            base=wider * math.exp(best[-2]),
            share=wider * math.exp(best[-1]),
            steps=len(steps),
            freedom=min(FREEDOM, left),
        )


@dataclasses.dataclass(frozen=True)
class Prediction:
    """The difference at a target.

    Attributes:
        mean: Of the difference.
        interval: Of this mean.
        prediction_interval: Of the mean that the target's pairs will show.
    """

    mean: float
    interval: Interval
    prediction_interval: Interval


def predict(sizes: Sequence[AtSize], spread: SpreadBySize, drift: Drift, target: float, pairs: int) -> Prediction:
    """The difference at a target.

    Args:
        sizes: Of one variant.
        spread: Of the pairs, from all variants.
        drift: From one size to the next.
        target: Its x.
        pairs: That it will have.

    Raises:
        ValueError: There are fewer than ``FEWEST_SIZES`` sizes, the target is more than one size up, or no pair differs
            from another.
    """
    if (found := len({size.x for size in sizes})) < FEWEST_SIZES:
        raise ValueError(f"a prediction needs differences at {FEWEST_SIZES} sizes or more, got {found}")
    if not spread.at(target):
        raise ValueError("all differences are equal: without a spread there is no interval")
    last = max(sizes, key=lambda size: size.x)
    h = target - last.x
    if 4**h > MOST_COMPUTE * (1 + 1e-9):
        times = f"{4**h:.3g} times the compute of the largest size"
        raise ValueError(f"the target has {times}, expected at most {MOST_COMPUTE:g} times: one size up")
    factor, error = drift.decay**h, spread.error(last.x, last.pairs)
    shown = max(0.0, last.mean**2 - error**2)
    variance = factor**2 * error**2 + h * (drift.base**2 + drift.share**2 * shown)
    quantile = float(student(1 - LEVEL, drift.freedom))
    mean = factor * last.mean

    def around(variance: float) -> Interval:
        return mean - quantile * math.sqrt(variance), mean + quantile * math.sqrt(variance)

    return Prediction(mean, around(variance), around(variance + spread.error(target, pairs) ** 2))


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
