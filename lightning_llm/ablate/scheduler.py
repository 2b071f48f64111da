"""What an experiment needs next: a pure function of its plan and of the runs that have ended. It has no state.

The baseline's first seed comes first, and again: both must be bit-identical. Then, on the seeds of the first look, the
baseline, the null variant (only its initial MLPs differ) and all variants. At each look, the verdict rule decides;
variants whose comparison has not ended get the seeds of the next look. Pairs that were added to the plan (``extend``)
follow the last planned look, up to a further one.

With tuning, the same follows once more: every arm is tuned on seeds of its own (``ablate.tuning``), and the tuned
baseline and variants are compared on the seeds of the looks. Both comparisons have the plan's alpha.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from lightning_llm.ablate.arm import AGAIN, BASELINE, NULL
from lightning_llm.ablate.experiment import Experiment
from lightning_llm.ablate.tuning import Tune, Tuned, tuning_of
from lightning_llm.statistics.verdict import Sample, Verdict, verdicts


class Run(NamedTuple):
    """One run of an experiment: its arm and its seed."""

    name: str
    seed: int

    def __str__(self) -> str:
        return f"{self.name},seed={self.seed}"


Losses = Mapping[Run, float | None]  # of the runs that have ended; None: it diverged


class Added(NamedTuple):
    """Pairs that were added to a plan.

    Attributes:
        pairs: How many, at least: up to the next look.
        variants: For which; ``None``: for those whose comparison has not ended.
    """

    pairs: int
    variants: Sequence[str] | None = None


@dataclasses.dataclass(frozen=True)
class State:
    """How far an experiment is.

    Attributes:
        needed: Runs to start, in this order; none: it has ended.
        look: Pairs of the look that they are for, or of the last one.
        verdicts: Of each variant, at its last look; empty before the first.
        undecided: Variants whose comparison has not ended.
        looks: Numbers of pairs after which the results are tested: the planned ones, and those that were added.
        null: What the null variant's runs say, as if it were the only variant; ``None`` before the first look.
        tuning: What tuning has found, by arm; empty before its end.
        tuned: The same of the tuned arms, without those that diverge at every value; ``None`` before.
    """

    needed: list[Run]
    look: int
    verdicts: dict[str, Verdict]
    undecided: list[str]
    looks: list[int]
    null: Verdict | None = None
    tuning: Mapping[str, Tuned] = dataclasses.field(default_factory=dict)
    tuned: "State | None" = None


def state_of(experiment: Experiment, losses: Losses, *, added: Sequence[Added] = (), tune: Tune | None = None) -> State:
    """How far an experiment is, and what it needs next.

    Args:
        experiment: What was asked for.
        losses: Of the runs that have ended.
        added: Pairs that were added, in this order.
        tune: What is tuned; ``None``: nothing.
    """
    arms = [BASELINE, *experiment.variants]
    state = _compare(experiment, losses, added, {name: name for name in arms}, with_null=True)
    if state.needed or tune is None:
        return state
    tuning = tuning_of(tune, arms, losses)
    state = dataclasses.replace(state, needed=[Run(*run) for run in tuning.needed], tuning=tuning.sides)
    best = {name: tuned.best for name, tuned in tuning.sides.items() if tuned.best is not None}
    if BASELINE not in best or len(best) == 1:
        return state
    names = {name: tune.tuned_name(name, value) for name, value in best.items()}
    comparison = _compare(experiment, losses, added, names, with_null=False)
    return dataclasses.replace(state, needed=comparison.needed, tuned=comparison)


def _compare(
    experiment: Experiment, losses: Losses, added: Sequence[Added], names: Mapping[str, str], *, with_null: bool
) -> State:
    """The comparison of variants with the baseline, by the names of their runs."""
    variants = [name for name in names if name != BASELINE]
    pairs = dict.fromkeys(variants, 0)
    by_variant: dict[str, Verdict] = {}
    null: Verdict | None = None
    undecided = variants
    first = experiment.looks[0]
    looks = {*experiment.looks}
    rule: dict[str, Any] = {"delta": experiment.delta, "alpha": experiment.alpha}
    look_options: dict[str, Any] = {"looks": experiment.looks, "precision": experiment.precision}
    look_options["variants"] = len(experiment.variants)
    planned = [(look, Added(0)) for look in experiment.looks]
    for look, extra in (*planned, *((0, extra) for extra in added)):
        growing = undecided if extra.variants is None else [name for name in variants if name in extra.variants]
        targets = {name: look or experiment.design.look_with(pairs[name] + extra.pairs) for name in growing}
        looks |= {*targets.values()}
        runs = [Run(BASELINE, experiment.first_seed), Run(AGAIN, experiment.first_seed)] if with_null else []
        for index, seed in enumerate(experiment.seeds(max(targets.values(), default=0))):
            arms = [name for name in growing if index < targets[name]]
            nulls = [NULL] if with_null and index < first else []
            runs += [Run(name, seed) for name in (names[BASELINE], *nulls, *(names[arm] for arm in arms))]
        if needed := [run for run in dict.fromkeys(runs) if run not in losses]:
            return State(needed, max(targets.values()), by_variant, list(growing), sorted(looks), null)
        pairs |= targets
        if with_null and null is None:
            null_sample = sample(losses, names[BASELINE], NULL, experiment.seeds(first))
            null = verdicts({NULL: null_sample}, **rule)[NULL]
        alike = _alike(losses, experiment.seeds(first)) if with_null else []
        samples = {
            name: sample(losses, names[BASELINE], names[name], experiment.seeds(count), alike)
            for name, count in pairs.items()
        }
        by_variant = verdicts(samples, **rule, **look_options)
        undecided = [name for name in variants if not by_variant[name].has_ended]
    return State([], max(pairs.values(), default=0), by_variant, undecided, sorted(looks), null)


def _alike(losses: Losses, seeds: Sequence[int]) -> list[float | None]:
    """The null variant's losses; none if it is a copy of the baseline: with ``model.init_from``, nothing is random."""
    null, base = ([losses[Run(name, seed)] for seed in seeds] for name in (NULL, BASELINE))
    return [] if null == base else null


def sample(
    losses: Losses, baseline: str, variant: str, seeds: Sequence[int], alike: Sequence[float | None] = ()
) -> Sample:
    """The losses of the baseline and of a variant, by the names of their runs."""
    first, second = ([losses[Run(name, seed)] for seed in seeds] for name in (baseline, variant))
    return Sample(first, second, alike=alike)
