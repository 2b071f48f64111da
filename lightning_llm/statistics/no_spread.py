"""Pairs that all differ by the same amount, and what can be said of them without a t test.

A t interval takes its width from how much the differences vary. If they do not vary, it has no width and its p is 0,
whatever the number of pairs: it claims a certainty that nobody has measured. Three cases are told apart. The change may
have no effect. It may shift every seed alike, as a constant added to the loss does. Or the seed itself changes nothing:
then the runs of a side are copies of one run, and they say nothing about others. In no case do more seeds help.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from lightning_llm.statistics.design import NOT_SHOWN, Answer, Design

# Numbers that were printed with a few decimals are not exact in binary: 3.12 - 3.11 and 2.02 - 2.01 are 2e-15 apart.
ROUNDING = 8 * float(np.finfo(np.float64).eps)
NO_EFFECT = "the change has no effect on the output, so more seeds tell nothing"
ALL_ALIKE = "the change shifts every seed alike, so more seeds tell nothing"
NO_SEED = "all runs of a side have the same result, so the seed changes nothing, and more seeds tell nothing"


@dataclasses.dataclass(frozen=True)
class NoSpread:
    """Differences that do not vary.

    Attributes:
        shift: The difference of every pair; 0 if it is not larger than rounding.
        has_seeds: Whether the seed changes the results of the baseline.
    """

    shift: float
    has_seeds: bool

    def answer(self, design: Design, runs: int) -> Answer:
        """Direction and size of the shift; neither is shown by copies of one run."""
        if self.shift and not self.has_seeds:
            return Answer(NOT_SHOWN, None if design.delta is None else NOT_SHOWN)
        return design.answer(self.shift, self.shift, runs)

    @property
    def note(self) -> str:
        """Note for a reader of the difference, in a few words."""
        if not self.shift:
            return NO_EFFECT
        return ALL_ALIKE if self.has_seeds else NO_SEED


def no_spread(baseline: Sequence[float], variant: Sequence[float], *, is_paired: bool = True) -> NoSpread | None:
    """Check whether a comparison has no spread, up to rounding; ``None``: it has some.

    Args:
        baseline: At least two finite values.
        variant: Likewise; with pairs as many, in the order of the same seeds.
        is_paired: Whether they are pairs. Without pairs, neither side may vary.
    """
    base, own = (np.asarray(side, dtype=np.float64) for side in (baseline, variant))
    rounding = ROUNDING * float(max(np.abs(base).max(), np.abs(own).max()))
    with np.errstate(all="ignore"):  # values that are too large to calculate with have a spread
        varying = (own - base,) if is_paired else (base, own)
        if not all(np.ptp(values) <= rounding for values in varying):
            return None
        shift = float(own.mean() - base.mean())
        return NoSpread(shift if abs(shift) > rounding else 0.0, bool(np.ptp(base) > rounding))
