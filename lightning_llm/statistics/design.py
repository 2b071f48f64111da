"""The design of one comparison: which interval a number of pairs has, and what that interval says.

A variant has one interval of its difference at each number of pairs. With a probability of at least ``1 - alpha``, all
of them contain the true difference (repeated confidence intervals: Jennison and Turnbull 1984). Both answers are read
off the interval of the present pairs, so a word never contradicts it:

=========  ===========  ===============================
answer     word         the interval
=========  ===========  ===============================
direction  ``better``   is below 0
           ``worse``    is above 0
size       ``smaller``  is inside ``±delta``
           ``larger``   is below ``-delta`` or above it
=========  ===========  ===============================

Fewer than ``FEWEST`` pairs show neither. Looks after the last planned one have a share of ``alpha`` that was held back
for them (``statistics.looks``), so a comparison that is extended keeps its ``alpha``.
"""

import dataclasses
from bisect import bisect_left
from collections.abc import Sequence

from lightning_llm.statistics.looks import OneLook, PlannedLook, Rule, ShortLook, further_looks, spending

BETTER = "better"
WORSE = "worse"
EQUIVALENT = "equivalent"
UNDECIDED = "undecided"
SMALLER = "smaller"
LARGER = "larger"
NOT_SHOWN = "not shown"
FAILED_TO_TRAIN = "failed to train"  # of a run that diverged, or that is no better than chance
# With 2, 3, 4 and 5 pairs, the 95% interval of one look reaches 9.0, 2.5, 1.6 and 1.2 standard deviations of a pair to
# each side, and that standard deviation may be 32, 6.3, 3.7 and 2.9 times as large as it is found to be.
FEWEST = 4
# Whoever asks how many more pairs are needed reads ten further looks in turn. Simulated one at a time they take 3.4 s,
# five at a time 0.9 s; the first one then takes 0.3 s in place of 0.1 s.
TOGETHER = 5


@dataclasses.dataclass(frozen=True)
class Answer:
    """Answer of an interval.

    Attributes:
        direction: ``better``, ``worse`` or ``not shown``.
        size: ``smaller`` or ``larger`` than delta, or ``not shown``; ``None`` without a delta.
    """

    direction: str
    size: str | None

    @property
    def word(self) -> str:
        """Both in one word: a difference that is shown to be smaller than delta is ``equivalent``, whatever its sign.

        Otherwise the direction decides; if it is not shown either, ``undecided``.
        """
        if self.size == SMALLER:
            return EQUIVALENT
        return UNDECIDED if self.direction == NOT_SHOWN else self.direction

    def sentence(self, delta: float | None) -> str:
        """Such as ``worse, by less than 0.005``."""
        if self.direction == NOT_SHOWN:
            if self.size == SMALLER:
                return f"differs by less than {delta:g}, in either direction"
            return "neither better nor worse is shown"
        sizes = {SMALLER: f", by less than {delta or 0:g}", LARGER: f", by more than {delta or 0:g}", None: ""}
        return self.direction + sizes.get(self.size, f"; whether by more than {delta or 0:g} is not shown")


@dataclasses.dataclass(frozen=True)
class Design:
    """How one variant is compared with the baseline.

    Attributes:
        alpha: Probability that any of the variant's intervals misses the true difference.
        looks: The planned numbers of pairs. None: the number of pairs was fixed before.
        delta: The smallest difference that matters; ``None``: there is no size.
        half_width: Half the width of the interval at which the comparison ends; ``None``: it ends with a word.
    """

    alpha: float
    looks: Sequence[int] = ()
    delta: float | None = None
    half_width: float | None = None

    def rule(self, pairs: int, left_out: int = 0) -> Rule:
        """The rule at a number of pairs.

        Args:
            pairs: How many there are, at least two.
            left_out: How many more there were, whose baselines failed to train.

        Raises:
            ValueError: No look has this many pairs.
        """
        if not self.looks:
            return OneLook(pairs - 1)
        all_looks = [*self.looks, *self.further]
        if (planned_pairs := pairs + left_out) not in all_looks:
            planned = ", ".join(map(str, self.looks))
            raise ValueError(f"{planned_pairs} pairs are no look: there are {planned}, and further ones")
        number = all_looks.index(planned_pairs)
        # further looks are simulated several at a time: the boundary of a look does not depend on later ones
        further = min(-(-max(0, number + 1 - len(self.looks)) // TOGETHER) * TOGETHER, len(self.further))
        looks = tuple(all_looks[: len(self.looks) + further])
        look = PlannedLook(looks, number, spending(self.looks, further=further))
        return ShortLook(look, pairs) if left_out else look

    @property
    def further(self) -> list[int]:
        """The numbers of pairs after the last planned look."""
        return further_looks(self.looks[-1]) if self.looks else []

    def look_with(self, pairs: int) -> int:
        """The first look with at least this many pairs.

        Raises:
            ValueError: There is none.
        """
        all_looks = [*self.looks, *self.further]
        if pairs > all_looks[-1]:
            raise ValueError(f"{pairs} pairs are too many: the last look is at {all_looks[-1]}")
        return all_looks[bisect_left(all_looks, pairs)]

    def answer(self, low: float, high: float, pairs: int) -> Answer:
        """Answer of an interval of this many pairs."""
        if pairs < FEWEST:
            return Answer(NOT_SHOWN, None if self.delta is None else NOT_SHOWN)
        direction = WORSE if low > 0 else BETTER if high < 0 else NOT_SHOWN
        if self.delta is None:
            return Answer(direction, None)
        if -self.delta < low and high < self.delta:
            return Answer(direction, SMALLER)
        return Answer(direction, LARGER if low > self.delta or high < -self.delta else NOT_SHOWN)

    def ends(self, low: float, high: float, pairs: int) -> bool:
        """Whether the comparison ends here: with a word, or at the half-width that was asked for."""
        if self.half_width is not None:
            return pairs >= FEWEST and (high - low) / 2 <= self.half_width
        return self.answer(low, high, pairs).word != UNDECIDED


def checked_looks(looks: Sequence[int]) -> tuple[int, ...]:
    """Planned numbers of pairs.

    Raises:
        ValueError: They do not increase, or begin below two.
    """
    if looks and (looks[0] < 2 or sorted(set(looks)) != list(looks)):
        raise ValueError(f"looks must be increasing numbers of pairs from 2 on, got {list(looks)}")
    return tuple(looks)
