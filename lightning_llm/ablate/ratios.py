"""Ratios of cost between a variant and its baseline: intervals, and what reports say about them. No torch.

A *time ratio* is the time of a variant's step over that of the baseline's: the median of the ratios of interleaved
rounds. Where its interval contains 1, the two times cannot be distinguished.
"""

from collections.abc import Sequence

import msgspec
import numpy as np
from scipy import special

UNKNOWN = "not distinguishable"
MISSES = 0.05  # probability that an interval misses the median
Interval = Sequence[float]


class StepCost(msgspec.Struct, frozen=True, kw_only=True):
    """Time and memory of a training step of a variant, measured alone.

    Attributes:
        step_s: Median of its seconds.
        step_p20_s: The 20th percentile.
        step_p80_s: The 80th.
        ratio: Its time over the baseline's.
        ratio_p20: The 20th percentile of the rounds.
        ratio_p80: The 80th.
        ratio_interval: The 95% interval of the ratio; ``None``: unbounded, from too few rounds.
        peak_bytes: The most that a step holds; ``None``: it cannot be seen.
    """

    step_s: float
    step_p20_s: float
    step_p80_s: float
    ratio: float
    ratio_p20: float
    ratio_p80: float
    ratio_interval: tuple[float, float] | None
    peak_bytes: int | None


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """The content of ``cost.json``.

    Attributes:
        plan: The hash of the plan.
        machine: What measured it: the GPU or the CPU.
        threads: That it had.
        date: Of the measurement.
        torch: The version.
        rounds: Interleaved steps of each pair, at least.
        other_cores: Cores that other programs used meanwhile; ``None``: that cannot be seen.
        variants: The baseline and the variants.
    """

    plan: str
    machine: str
    threads: int
    date: str
    torch: str
    rounds: int
    other_cores: float | None
    variants: dict[str, StepCost]


def median_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """A 95% interval of the median by order statistics; it assumes no distribution, only independent values.

    The number of n values below the median is binomial with probability 1/2. So the interval from the k-th smallest
    to the k-th largest value misses the median with probability ``2 P(B < k)``. k is the largest one for which that is
    at most 5% (David and Nagaraja 2003, "Order Statistics", 3rd edition, section 7.1).

    Args:
        values: In any order.

    Returns:
        Both ends; ``None`` below six values, where even the smallest and the largest miss it more often.
    """
    ordered = np.sort(np.asarray(values, dtype=np.float64))
    ranks = np.arange(1, len(ordered) // 2 + 1)
    if not (fitting := ranks[2 * special.bdtr(ranks - 1, len(ordered), 0.5) <= MISSES]).size:
        return None
    return float(ordered[fitting[-1] - 1]), float(ordered[-fitting[-1]])


def is_one(interval: Interval | None) -> bool:
    """Whether a ratio with this interval cannot be distinguished from 1; ``None`` is an unbounded one."""
    if interval is None:
        return True
    low, high = interval
    return low <= 1 <= high and low < high  # a variant's ratio to itself is known


def is_unknown(step: StepCost) -> bool:
    """Whether the time ratio of a variant cannot be distinguished from 1."""
    return is_one(step.ratio_interval)


def ratio_in_words(step: StepCost) -> str:
    """The time ratio of a variant, if it can be distinguished from 1."""
    return UNKNOWN if is_unknown(step) else f"{step.ratio:.3f}"


def time_in_words(step: StepCost) -> str:
    """The same within a sentence."""
    return f"{UNKNOWN} in time" if is_unknown(step) else f"{step.ratio:.3f} × the time"
