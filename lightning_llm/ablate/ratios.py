"""Ratios of cost between a variant and its baseline: intervals, and what reports say about them. No torch.

A *time ratio* is the time of a variant's step over that of the baseline's: the median of the ratios of interleaved
rounds. Where its interval contains 1, the two times cannot be distinguished.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from scipy import special

from lightning_llm.ablate.experiment import BASELINE, FLOPS, TIME

TIMED = ("time_ratio", "time_ratio_interval")  # fields of a side of the plan
UNKNOWN = "not distinguishable"
MISSES = 0.05  # probability that an interval misses the median
Interval = Sequence[float]


def median_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """A 95 % interval of the median by order statistics; it assumes no distribution, only independent values.

    The number of n values below the median is binomial with probability 1/2. So the interval from the k-th smallest
    to the k-th largest value misses the median with probability ``2 P(B < k)``. k is the largest one for which that is
    at most 5 % (David and Nagaraja 2003, "Order Statistics", 3rd edition, section 7.1).

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
    return low <= 1 <= high and low < high  # a side's ratio to itself is known


def is_unknown(side: Mapping[str, Any]) -> bool:
    """Whether the time ratio of a side of ``cost.json`` cannot be distinguished from 1; older files do not say."""
    return "ratio_interval" in side and is_one(side["ratio_interval"])


def ratio_in_words(side: Mapping[str, Any]) -> str:
    """The time ratio of a side of ``cost.json``, if it can be distinguished from 1."""
    return UNKNOWN if is_unknown(side) else f"{side['ratio']:.3f}"


def time_in_words(side: Mapping[str, Any]) -> str:
    """The same within a sentence."""
    return f"{UNKNOWN} in time" if is_unknown(side) else f"{side['ratio']:.3f} × the time"


def matched_within(row: Mapping[str, Any], base: Mapping[str, Any]) -> float | None:
    """How far training times may be apart after matching, as a share of the baseline's; ``None``: that is not known.

    It covers the interval of the time ratio, the steps that were left as they are inside of it, and their rounding.

    Args:
        row: Of a variant in a report, or a side of a plan: its steps, and the interval of its time ratio.
        base: The baseline's.
    """
    interval = row.get("time_ratio_interval")
    return None if interval is None else max(abs(end * row["steps"] / base["steps"] - 1) for end in interval)


def matched_lines(report: Mapping[str, Any]) -> list[str]:
    """What was matched in a report, how closely, and what that leaves out."""
    solved = f" by {report['solved']}" if report["solved"] else ""
    rows, unit = report["variants"], " × the baseline's"
    words = [_with_ratio(name, row) for name, row in rows.items() if row["ratio"] is not None]
    if report["match"] == TIME:
        within = {name: matched_within(row, report["baseline"]) for name, row in rows.items()}
        words, unit = [f"{name} within ±{_upward(share)}" for name, share in within.items() if share is not None], ""
        if not words:  # a plan without intervals
            sides, unit = report["cost"]["sides"], " × the baseline's"
            base = sides.get(BASELINE, {}).get("training_s")
            known = {name: side["training_s"] / base for name, side in sides.items() if base and name != BASELINE}
            words = [f"{name} {ratio:.3g}" for name, ratio in known.items()]
    lines = [f"Matched: {report['match']}{solved}{': ' if words else ''}{', '.join(words)}{unit if words else ''}."]
    return [*lines, "FLOPs leave out the optimizer and recomputation."] if report["match"] == FLOPS else lines


def _with_ratio(name: str, row: Mapping[str, Any]) -> str:
    return f"{name} {row['ratio']:.4g}" if row["solved"] is None else f"{name} {row['solved']}, {row['ratio']:.4g}"


def _upward(share: float) -> str:
    return f"{math.ceil(1000 * share - 1e-9) / 1000:.1%}"
