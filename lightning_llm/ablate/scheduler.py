"""What an experiment needs next: a pure function of its plan and of the runs that have ended. It has no state.

The baseline's seed 0 comes first, and again: both must be equal to the bit. Then, on the seeds of the first look, the
baseline, the null variant (only its draw of the MLP differs) and all variants. At each look, the verdict rule decides;
variants without a verdict get the seeds of the next look. Seeds that were added to the plan (``extend``) follow the
last look, for the variants that are still undecided.

With tuning, the same follows once more: every side is tuned on seeds of its own (``ablate.tuning``), and the tuned
baseline and variants are compared on the seeds of the looks. Both comparisons have the plan's alpha.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

from lightning_llm.ablate.experiment import AGAIN, BASELINE, NULL
from lightning_llm.ablate.tuning import Tune, Tuned, tuning_of
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
        tune: What is tuned; ``None``: nothing.
    """

    variants: Sequence[str]
    looks: Sequence[int]
    delta: float | None
    alpha: float
    added: Sequence[int] = ()
    tune: Tune | None = None


@dataclasses.dataclass(frozen=True)
class State:
    """How far an experiment is.

    Attributes:
        needed: Runs to start, in this order; none: it has ended.
        look: Pairs of the look that they are for, or of the last one.
        verdicts: Of each variant, at its last look; empty before the first.
        undecided: Variants that more pairs could decide.
        tuning: What tuning has found, by side; empty before its end.
        tuned: The same of the tuned sides, without those that diverge at every value; ``None`` before.
    """

    needed: list[Run]
    look: int
    verdicts: dict[str, Verdict]
    undecided: list[str]
    tuning: Mapping[str, Tuned] = dataclasses.field(default_factory=dict)
    tuned: "State | None" = None


def state_of(rules: Rules, losses: Losses) -> State:
    """How far an experiment is, and what it needs next."""
    sides = [BASELINE, *rules.variants]
    state = _compare(rules, losses, {name: name for name in sides}, with_null=True)
    if state.needed or rules.tune is None:
        return state
    tuning = tuning_of(rules.tune, sides, losses)
    state = dataclasses.replace(state, needed=[Run(*each) for each in tuning.needed], tuning=tuning.sides)
    best = {name: found.best for name, found in tuning.sides.items() if found.best is not None}
    if BASELINE not in best or len(best) == 1:
        return state
    names = {name: rules.tune.tuned_name(name, value) for name, value in best.items()}
    tuned = _compare(rules, losses, names, with_null=False)
    return dataclasses.replace(state, needed=tuned.needed, tuned=tuned)


def _compare(rules: Rules, losses: Losses, names: Mapping[str, str], *, with_null: bool) -> State:
    """The comparison of variants with the baseline, by the names of their runs."""
    variants = [name for name in names if name != BASELINE]
    pairs, found = dict.fromkeys(variants, 0), dict[str, Verdict]()
    undecided, look = variants, 0
    before = [Run(BASELINE, 0), Run(AGAIN, 0)] if with_null else []
    for look in (*rules.looks, *list(accumulate(rules.added, initial=rules.looks[-1]))[1:]):
        nulls = [NULL] if with_null and look == rules.looks[0] else []
        sides = [names[BASELINE], *nulls, *(names[name] for name in undecided)]
        wanted = [*before, *(Run(name, seed) for seed in range(look) for name in sides)]
        if needed := [run for run in dict.fromkeys(wanted) if run not in losses]:
            return State(needed, look, found, undecided)
        pairs |= dict.fromkeys(undecided, look)
        samples = {name: sample(losses, names[BASELINE], names[name], range(count)) for name, count in pairs.items()}
        found = verdicts(samples, delta=rules.delta, alpha=rules.alpha, looks=rules.looks)
        undecided = [name for name in undecided if found[name].verdict == UNDECIDED and not has_diverged(samples[name])]
        if not undecided:
            break
    return State([], look, found, undecided)


def sample(losses: Losses, baseline: str, variant: str, seeds: Sequence[int]) -> Sample:
    """The losses of the baseline and of a variant, by the names of their runs."""
    return Sample([losses[Run(baseline, seed)] for seed in seeds], [losses[Run(variant, seed)] for seed in seeds])


def has_diverged(sides: Sample) -> bool:
    """Whether more pairs cannot help, since a run has diverged."""
    return any(loss is None or not math.isfinite(loss) for loss in (*sides.baseline, *sides.variant))
