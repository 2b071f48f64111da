"""A stream of ideas, one after another: when an idea is adopted, and when it is given up.

Each idea is compared in pairs with the current baseline. A pair's difference is the idea's loss minus the baseline's;
an *improvement* is the same with the other sign. Here:

1. A *screen* gives up ideas that are hopeless, after 3 or 8 pairs (``SCREEN``). It spends none of ``alpha``, so it may
   use seeds that all ideas share.
2. What is left is *confirmed* on seeds that no verdict has seen, for both sides, at the looks of the rule. The evidence
   is a one-sided p of :func:`skewness_corrected` t, by the boundaries of a group-sequential test
   (``statistics.looks``). So whoever proposes ideas may have learned anything from the verdicts before: given all of
   that, p is at most u with a probability of at most u for a useless idea.
3. An idea is adopted if p is at most its *level*, ``alpha (R + 1) k₀ / ((k + k₀ - 1)(k + k₀))``, where k numbers the
   confirmations of the stream, and R the adoptions before: LOND (Javanmard and Montanari 2015, arXiv 1502.06197), whose
   weights add up to 1. Over the whole stream, the expected share of useless ideas among the adopted ones is at most
   ``alpha``: it is at most the sum of P(p_k ≤ level of k) / (R + 1) over the useless ideas.
4. The size of the gain is the mean of the confirming pairs alone, since those of the screen have won partly by chance.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

from lightning_llm.statistics.estimates import student
from lightning_llm.statistics.looks import PlannedLook, spending
from lightning_llm.statistics.no_spread import ROUNDING

SCREEN = ((3, 0.5), (8, 1.6))  # pairs, and the t that an idea must have after them
CONFIRMED_AFTER = (12, 20)  # fresh pairs
THOROUGH = (24, 48)
# Share of ideas that are adopted, by their improvement in standard deviations of a pair (python -m benchmarks stream)
POWER: dict[tuple[int, ...], dict[float, float]] = {
    CONFIRMED_AFTER: {0.5: 0.07, 1.0: 0.74, 1.5: 0.98},
    THOROUGH: {0.5: 0.25, 1.0: 0.81, 1.5: 0.98},
}
HOPELESS = 0.3  # a confirmation with a larger p ends at its first look
FLATNESS = 10  # k₀: how slowly levels fall with the number of confirmations
CONFIDENCE = 0.95  # of the intervals that are shown
MINIMAL_CONFIDENCE = 0.8  # that the mean of the screen is below a minimal gain

Step = Literal["screen", "confirm", "adopted", "rejected"]


class Decision(NamedTuple):
    """Next step for an idea.

    Attributes:
        step: ``screen`` or ``confirm``: train pairs up to ``wanted``; else the verdict.
        pairs: That the screen counts.
        confirming: Fresh pairs that count.
        wanted: Pairs that the step takes, those that have ended included; 0: there is a verdict.
        t: Of the last look at the screen; ``None``: there was none.
        p: Of the last look at the confirmation; ``None``: there was none.
    """

    step: Step
    pairs: int
    confirming: int = 0
    wanted: int = 0
    t: float | None = None
    p: float | None = None


@dataclasses.dataclass(frozen=True)
class StreamRule:
    """When an idea is adopted, and when it is given up.

    Attributes:
        alpha: The share of useless ideas among the adopted ones, in expectation.
        looks: Numbers of fresh pairs after which an idea may be adopted, increasing.
        minimal_gain: An adopted idea improves the metric by more than this, in the metric's unit.
    """

    alpha: float = 0.05
    looks: tuple[int, ...] = CONFIRMED_AFTER
    minimal_gain: float = 0.0

    def level(self, confirmation: int, adopted: int) -> float:
        """The p that an idea must not exceed.

        Args:
            confirmation: Its number among the ideas of the stream that are confirmed, from 1.
            adopted: Ideas that were adopted before.
        """
        share = FLATNESS / ((confirmation + FLATNESS - 1) * (confirmation + FLATNESS))
        return self.alpha * (adopted + 1) * share

    def next(self, differences: Sequence[float], fresh: Sequence[float], level: float) -> Decision:
        """Next step for an idea: train further pairs, or end with a verdict.

        The first look that ends the comparison ends it: what was trained beyond it does not count.

        Args:
            differences: Of the pairs of its screen in their order; infinite: its run failed to train.
            fresh: Of the pairs that confirm it.
            level: As of :meth:`level`.
        """
        t = None
        for pairs, least in SCREEN:
            seen = differences[:pairs]
            if not all(map(math.isfinite, seen)):
                return Decision("rejected", _up_to_failure(seen), t=t)
            if len(seen) < pairs:
                return Decision("screen", len(seen), wanted=pairs, t=t)
            t = skewness_corrected(seen) if pairs == SCREEN[-1][0] else _t(seen)  # three say nothing of skewness
            if t < least or self._misses_minimal_gain(seen):
                return Decision("rejected", pairs, t=t)
        return self._confirmed(fresh, level, SCREEN[-1][0], t)

    def _confirmed(self, fresh: Sequence[float], level: float, pairs: int, t: float | None) -> Decision:
        p = None
        for number, look in enumerate(self.looks):
            seen = fresh[:look]
            if not all(map(math.isfinite, seen)):
                return Decision("rejected", pairs, _up_to_failure(seen), t=t, p=p)
            if len(seen) < look:
                return Decision("confirm", pairs, len(seen), look, t=t, p=p)
            p = self.p_at(number, seen)
            is_last = look == self.looks[-1]
            if p <= level or is_last or (number == 0 and p > HOPELESS):
                return Decision("adopted" if p <= level else "rejected", pairs, look, t=t, p=p)
        raise AssertionError("a rule has looks")

    def p_at(self, number: int, fresh: Sequence[float]) -> float:
        """One-sided p of the pairs at a look of the confirmation: that their mean is no improvement.

        Args:
            number: Of the look, from 0.
            fresh: Differences of its pairs.
        """
        t = skewness_corrected([value + self.minimal_gain for value in fresh])
        look = PlannedLook(self.looks, number, spending(self.looks, reserve=0.0))
        return float(look.p(t)) / 2 if t > 0 else 1.0

    def _misses_minimal_gain(self, differences: Sequence[float]) -> bool:
        if not self.minimal_gain:
            return False
        improvements = -np.asarray(differences, float)
        error = improvements.std(ddof=1) / math.sqrt(len(improvements))
        width = student(2 * (1 - MINIMAL_CONFIDENCE), len(improvements) - 1) * error  # one-sided
        return bool(improvements.mean() + width < self.minimal_gain)


def _up_to_failure(differences: Sequence[float]) -> int:
    """The number of pairs up to the first whose run failed to train, which counts."""
    return next(number for number, value in enumerate(differences, 1) if not math.isfinite(value))


def skewness_corrected(differences: Sequence[float]) -> float:
    """The t statistic of improvements, transformed so that skewness does not fool it: positive speaks for the idea.

    The cubic transformation of Hall (1992, "On the removal of skewness by transformation", Journal of the Royal
    Statistical Society B 54, 221-228). Only a negative skewness counts, that of an idea which is mostly a little better
    and sometimes much worse, so the result is never above t.

    Args:
        differences: Two or more, finite. If they do not vary, the result is infinite, or 0 if they are all 0.
    """
    t = _t(differences)
    if not math.isfinite(t) or not t:
        return t
    improvements = -np.asarray(differences, float)
    pairs = len(improvements)
    ratio = t / math.sqrt(pairs)
    standardized = (improvements - improvements.mean()) / improvements.std(ddof=1)
    skewness = min(0.0, float((standardized**3).mean()))
    transformed = ratio + skewness * ratio**2 / 3 + skewness**2 * ratio**3 / 27 + skewness / (6 * pairs)
    return math.sqrt(pairs) * min(ratio, transformed)


def _t(differences: Sequence[float]) -> float:
    """The t statistic of improvements."""
    improvements = -np.asarray(differences, float)
    mean = float(improvements.mean())
    spread = float(improvements.std(ddof=1))
    if spread <= ROUNDING * float(np.abs(improvements).max()):
        return math.copysign(math.inf, mean) if mean else 0.0
    return mean / spread * math.sqrt(len(improvements))


def interval_of(differences: Sequence[float]) -> tuple[float, float] | None:
    """The interval of the mean, as a t test gives it; ``None``: there are fewer than two finite differences."""
    values = np.asarray([value for value in differences if math.isfinite(value)], float)
    if len(values) < 2:
        return None
    half = student(1 - CONFIDENCE, len(values) - 1) * values.std(ddof=1) / math.sqrt(len(values))
    return float(values.mean() - half), float(values.mean() + half)
