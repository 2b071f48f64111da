"""Ratios of cost between a variant and its baseline: intervals, and what reports say about them. No torch.

A *time ratio* is the time of a variant's step over that of the baseline's: the median of the ratios of interleaved
rounds. Where its interval contains 1, the two times cannot be distinguished.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from scipy import special

from lightning_llm.io.schema import check

UNKNOWN = "not distinguishable"
MISSES = 0.05  # probability that an interval misses the median
INTERVAL = check("two numbers", lambda value: isinstance(value, list) and [type(end) for end in value] == [float] * 2)
Interval = Sequence[float]


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
    return low <= 1 <= high and low < high  # an arm's ratio to itself is known


def is_unknown(arm: Mapping[str, Any]) -> bool:
    """Whether the time ratio of an arm of ``cost.json`` cannot be distinguished from 1; older files do not say."""
    return "ratio_interval" in arm and is_one(arm["ratio_interval"])


def ratio_in_words(arm: Mapping[str, Any]) -> str:
    """The time ratio of an arm of ``cost.json``, if it can be distinguished from 1."""
    return UNKNOWN if is_unknown(arm) else f"{arm['ratio']:.3f}"


def time_in_words(arm: Mapping[str, Any]) -> str:
    """The same within a sentence."""
    return f"{UNKNOWN} in time" if is_unknown(arm) else f"{arm['ratio']:.3f} × the time"
