"""What an experiment needs next: a pure function of its plan and of the runs that have ended. It has no state.

The baseline's seed 0 comes first, and again: both must be equal to the bit. Then, on the seeds of the first look, the
baseline, the null variant (only its draw of the MLP differs) and all variants. At each look, the verdict rule decides;
variants without a verdict get the seeds of the next look. Seeds that were added to the plan (``extend``) follow the
last look, for the variants that are still undecided.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

from lightning_llm.ablate.experiment import AGAIN, BASELINE, NULL
from lightning_llm.ablate.verdict import UNDECIDED, Sample, Verdict, verdicts


class Run(NamedTuple):
    """One run of an experiment: its side and its seed."""

    name: str
    seed: int

    def __str__(self) -> str:
        return f"{self.name},seed={self.seed}"


Losses = Mapping[Run, float | None]  # of the runs that have ended; None: it diverged


class Rules(NamedTuple):
    """What a plan says about verdicts.

    Attributes:
        variants: Their names.
        looks: Numbers of pairs.
        delta: As ``verdicts`` takes it.
        alpha: Likewise.
        added: Pairs added after the last look, one number for each ``extend``.
    """

    variants: Sequence[str]
    looks: Sequence[int]
    delta: float | None
    alpha: float
    added: Sequence[int] = ()


@dataclasses.dataclass(frozen=True)
class State:
    """How far an experiment is.

    Attributes:
        needed: Runs to start, in this order; none: it has ended.
        look: Pairs of the look that they are for, or of the last one.
        verdicts: Of each variant, at its last look; empty before the first.
        undecided: Variants that more pairs could decide.
    """

    needed: list[Run]
    look: int
    verdicts: dict[str, Verdict]
    undecided: list[str]


def state_of(rules: Rules, losses: Losses) -> State:
    """How far an experiment is, and what it needs next."""
    pairs, found = dict.fromkeys(rules.variants, 0), dict[str, Verdict]()
    undecided, first, look = list(rules.variants), rules.looks[0], 0
    for look in (*rules.looks, *list(accumulate(rules.added, initial=rules.looks[-1]))[1:]):
        sides = [BASELINE, *([NULL] if look == first else []), *undecided]
        wanted = [Run(BASELINE, 0), Run(AGAIN, 0), *(Run(name, seed) for seed in range(look) for name in sides)]
        if needed := [run for run in dict.fromkeys(wanted) if run not in losses]:
            return State(needed, look, found, undecided)
        pairs |= dict.fromkeys(undecided, look)
        samples = {name: sample(losses, name, range(count)) for name, count in pairs.items()}
        found = verdicts(samples, delta=rules.delta, alpha=rules.alpha, looks=rules.looks)
        undecided = [name for name in undecided if found[name].verdict == UNDECIDED and not has_diverged(samples[name])]
        if not undecided:
            break
    return State([], look, found, undecided)


def sample(losses: Losses, name: str, seeds: Sequence[int]) -> Sample:
    """The losses of the baseline and of a variant."""
    return Sample([losses[Run(BASELINE, seed)] for seed in seeds], [losses[Run(name, seed)] for seed in seeds])


def has_diverged(sides: Sample) -> bool:
    """Whether more pairs cannot help, since a run has diverged."""
    return any(loss is None or not math.isfinite(loss) for loss in (*sides.baseline, *sides.variant))
