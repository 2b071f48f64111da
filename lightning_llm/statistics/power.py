"""Power of a design: simulated before the first run, and given the pairs that are there.

Differences are normal here. Their sum over ``b`` pairs is normal, and the sum of their squared deviations from the mean
is chi-squared with ``b - 1`` degrees of freedom, so no single difference is drawn.
"""

import dataclasses
import math
from typing import Any

import numpy as np

from lightning_llm.statistics.design import BETTER, EQUIVALENT, FEWEST, UNDECIDED, WORSE, Design
from lightning_llm.statistics.estimates import student

PATHS, FUTURES = 20_000, 2_000
POWER = 0.8
SPREADS = 1e-9, 1e6  # what is believed to be a standard deviation of losses
_WORDS = (EQUIVALENT, BETTER, WORSE, UNDECIDED)  # in the order in which they are tested


@dataclasses.dataclass(frozen=True)
class PowerAnalysis:
    """Power analysis of an experiment at one true difference.

    Attributes:
        difference: The true one.
        probabilities: Of each verdict at the end.
        pairs: How many it takes on average.
        ended: By each look, how likely it is that the comparison has ended there with what was asked for.
    """

    difference: float
    probabilities: dict[str, float]
    pairs: float
    ended: dict[int, float]

    def longest(self, variants: int) -> float:
        """How many pairs the last of several variants takes on average, if they are independent."""
        looks = list(self.ended)
        previous_share = 0.0
        total = 0.0
        for look in looks:
            share = 1.0 if look == looks[-1] else self.ended[look] ** variants
            total += look * (share - previous_share)
            previous_share = share
        return total

    @property
    def direction(self) -> float:
        """The probability of ``better`` or ``worse``."""
        return self.probabilities[BETTER] + self.probabilities[WORSE]


def power_analysis(design: Design, difference: float, sd: float) -> PowerAnalysis:
    """Power analysis of planned looks.

    Args:
        design: With looks.
        difference: The true one.
        sd: Standard deviation of the difference of one pair.

    Raises:
        ValueError: It is out of range.
    """
    if not SPREADS[0] <= sd <= SPREADS[1]:
        raise ValueError(f"the spread must be from {SPREADS[0]:g} to {SPREADS[1]:g}, got {sd:g}")
    rng = np.random.default_rng(0)
    sums = _Sums(0, np.zeros(PATHS), np.zeros(PATHS))
    verdicts = np.full(PATHS, _WORDS.index(UNDECIDED))
    pairs = np.zeros(PATHS)
    is_open = np.ones(PATHS, dtype=bool)
    ended = dict[int, float]()
    reached = np.zeros(PATHS, dtype=bool)
    for look in design.looks:
        sums = sums.extended(rng, look - sums.pairs, difference, sd)
        mean, half = sums.interval(design)
        verdict, has_ended = _read(design, mean - half, mean + half, look)
        reached |= is_open & has_ended
        ended[look] = float(np.mean(reached))
        ends_here = is_open & (has_ended | (look == design.looks[-1]))
        verdicts[ends_here] = verdict[ends_here]
        pairs[ends_here] = look
        is_open &= ~ends_here
    shares = {word: float(np.mean(verdicts == number)) for number, word in enumerate(_WORDS)}
    return PowerAnalysis(difference, shares, float(pairs.mean()), ended)


@dataclasses.dataclass(frozen=True)
class FurtherPairs:
    """How many more pairs end a comparison with a probability of 80%. ``None``: more than a thousand.

    Attributes:
        expected: If the true difference is the present one.
        low: The fewest, if it is anywhere in its interval of 80%.
        high: The most, likewise.
    """

    expected: int | None
    low: int | None
    high: int | None


def further_pairs(design: Design, difference: float, sd: float, pairs: int, left_out: int = 0) -> FurtherPairs | None:
    """How many more pairs are needed, given those that are there; ``None`` if no number of them helps.

    Args:
        design: Of the comparison.
        difference: The mean of the pairs.
        sd: Their standard deviation.
        pairs: How many there are.
        left_out: How many more there were, whose baselines failed to train.
    """
    if not sd:
        return None
    reach = float(student(1 - POWER, pairs - 1)) * sd / math.sqrt(pairs)
    present = _Sums(pairs, np.full(FUTURES, pairs * difference), np.full(FUTURES, (pairs - 1) * sd**2))
    truths = [difference + step * reach for step in (0, -1, -0.5, 0.5, 1)]
    expected, *others = (_further(design, present, truth, sd, left_out) for truth in truths)
    known_numbers = [needed for needed in (expected, *others) if needed is not None]
    if not known_numbers:
        return None
    is_bounded = len(known_numbers) == len(truths)
    return FurtherPairs(expected, min(known_numbers), max(known_numbers) if is_bounded else None)


def _further(design: Design, present: "_Sums", truth: float, sd: float, left_out: int) -> int | None:
    planned_pairs = present.pairs + left_out
    for look in (look for look in (*design.looks, *design.further) if look > planned_pairs):
        later = present.extended(np.random.default_rng(0), look - planned_pairs, truth, sd)
        mean, half = later.interval(design, left_out)
        if np.mean(_read(design, mean - half, mean + half, later.pairs)[1]) >= POWER:
            return look - planned_pairs
    return None


@dataclasses.dataclass(frozen=True)
class _Sums:
    """Many comparisons: sums of their differences, and of the squared deviations from their means."""

    pairs: int
    total: Any
    squares: Any

    def extended(self, rng: np.random.Generator, added: int, difference: float, sd: float) -> "_Sums":
        comparisons = len(self.total)
        pairs = self.pairs
        increment = added * difference + rng.normal(0, sd * math.sqrt(added), comparisons)
        within = sd**2 * rng.chisquare(added - 1, comparisons) if added > 1 else 0.0
        distance = increment / added - (self.total / pairs if pairs else increment / added)
        between = distance**2 * pairs * added / (pairs + added)
        return _Sums(pairs + added, self.total + increment, self.squares + within + between)

    def interval(self, design: Design, left_out: int = 0) -> tuple[Any, Any]:
        """Means, and half the widths of their intervals."""
        critical = design.rule(self.pairs, left_out).critical(design.alpha)
        return self.total / self.pairs, critical * np.sqrt(self.squares / (self.pairs - 1) / self.pairs)


def _read(design: Design, low: Any, high: Any, pairs: int) -> tuple[Any, Any]:
    """``Answer.word`` and ``Design.ends`` of many intervals: numbers in ``_WORDS``, and whether they end there."""
    delta = -math.inf if design.delta is None else design.delta
    is_enough = pairs >= FEWEST
    tests = [is_enough & test for test in ((-delta < low) & (high < delta), high < 0, low > 0)]
    verdicts = np.select(tests, [0, 1, 2], 3)
    if design.half_width is not None:
        return verdicts, is_enough & ((high - low) / 2 <= design.half_width)
    return verdicts, verdicts != _WORDS.index(UNDECIDED)
