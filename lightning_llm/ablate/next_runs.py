"""What an experiment needs next: a pure function of its plan and of the runs that have ended. It has no state.

The baseline's first seed comes first, and again: both must be bit-identical. Then, on the seeds of the first look, the
baseline, the null variant (only its initial MLPs differ) and all variants. At each look, the verdict rule decides;
variants whose comparison has not ended get the seeds of the next look. Pairs that were added to the plan (``extend``)
follow the last planned look, up to a further one.

With tuning, the same follows once more: every arm is tuned on seeds of its own (``ablate.tuning``), and the tuned
baseline and variants are compared on the seeds of the looks. Both comparisons have the plan's alpha.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from lightning_llm.ablate.arm import AGAIN, BASELINE, NULL
from lightning_llm.ablate.experiment import Experiment
from lightning_llm.ablate.tuning import Losses, Tune, Tuned, tuning_of
from lightning_llm.statistics.verdict import Sample, Verdict, verdicts


class RunKey(NamedTuple):
    """One run of an experiment: its arm and its seed."""

    name: str
    seed: int

    def __str__(self) -> str:
        return f"{self.name},seed={self.seed}"


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
        unfinished: Variants whose comparison has not ended.
        looks: Numbers of pairs after which the results are tested: the planned ones, and those that were added.
        null: What the null variant's runs say, as if it were the only variant; ``None`` before the first look.
        tuning: What tuning has found, by arm; empty before its end.
        tuned: The same of the tuned arms, without those that fail to train with every value; ``None`` before.
    """

    needed: list[RunKey]
    look: int
    verdicts: dict[str, Verdict]
    unfinished: list[str]
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
    state = dataclasses.replace(state, needed=[RunKey(*run) for run in tuning.needed], tuning=tuning.arms)
    best = {name: tuned.best for name, tuned in tuning.arms.items() if tuned.best is not None}
    if BASELINE not in best or len(best) == 1:
        return state
    names = {name: tune.tuned_name(name, value) for name, value in best.items()}
    comparison = _compare(experiment, losses, added, names, with_null=False)
    return dataclasses.replace(state, needed=comparison.needed, tuned=comparison)


def _compare(
    experiment: Experiment, losses: Losses, added: Sequence[Added], names: Mapping[str, str], *, with_null: bool
) -> State:
    """The comparison of variants with the baseline, by the names of their runs."""
    comparison = _Looks(experiment, losses, names, with_null)
    for look in experiment.looks:
        if state := comparison.lacking(dict.fromkeys(comparison.unfinished, look)):
            return state
    for pairs, variants in added:
        growing = comparison.unfinished if variants is None else [name for name in comparison.pairs if name in variants]
        look_with = experiment.design.look_with
        if state := comparison.lacking({name: look_with(comparison.pairs[name] + pairs) for name in growing}):
            return state
    return comparison.state([], comparison.pairs)


class _Looks:
    """Variants and the baseline, look by look.

    Args:
        experiment: What was asked for.
        losses: Of the runs that have ended.
        names: Of the baseline and the variants, those of their runs.
        with_null: With the null variant and the same again, on the seeds of the first look.

    Attributes:
        pairs: Of each variant, up to its last look.
        unfinished: Variants whose comparison has not ended.
    """

    def __init__(self, experiment: Experiment, losses: Losses, names: Mapping[str, str], with_null: bool) -> None:
        self._experiment, self._losses, self._names, self._with_null = experiment, losses, names, with_null
        self.pairs = {name: 0 for name in names if name != BASELINE}
        self.unfinished = list(self.pairs)
        self._looks = {*experiment.looks}
        self._verdicts: dict[str, Verdict] = {}
        self._null: Verdict | None = None

    def lacking(self, targets: dict[str, int]) -> State | None:
        """How far it is, where a look lacks runs; if it lacks none, its verdicts are made.

        Args:
            targets: Of each variant that gets more pairs, how many it has then.
        """
        self._looks |= {*targets.values()}
        if needed := [run for run in dict.fromkeys(self._runs(targets)) if run not in self._losses]:
            return self.state(needed, targets)
        self.pairs |= targets
        self._judge()
        return None

    def state(self, needed: list[RunKey], pairs: Mapping[str, int]) -> State:
        """How far it is, with these pairs of the variants that count."""
        look = max(pairs.values(), default=0)
        return State(needed, look, self._verdicts, self.unfinished, sorted(self._looks), self._null)

    def _runs(self, targets: Mapping[str, int]) -> Iterator[RunKey]:
        """All runs of a look, seed by seed."""
        first_look = self._experiment.looks[0] if self._with_null else 0
        if self._with_null:
            yield from (RunKey(name, self._experiment.first_seed) for name in (BASELINE, AGAIN))
        for index, seed in enumerate(self._experiment.seeds(max(targets.values(), default=0))):
            nulls = [NULL] if index < first_look else []
            variants = [self._names[name] for name, pairs in targets.items() if index < pairs]
            yield from (RunKey(name, seed) for name in (self._names[BASELINE], *nulls, *variants))

    def _judge(self) -> None:
        """The verdicts of what has ended."""
        experiment, losses, base = self._experiment, self._losses, self._names[BASELINE]
        rule: dict[str, Any] = {"delta": experiment.delta, "alpha": experiment.alpha}
        more_baseline: list[float | None] = []
        if self._with_null:
            first_seeds = experiment.seeds(experiment.looks[0])
            more_baseline = _more_baseline(losses, first_seeds)
            self._null = self._null or verdicts({NULL: sample(losses, base, NULL, first_seeds)}, **rule)[NULL]
        samples = {
            name: sample(losses, base, self._names[name], experiment.seeds(pairs), more_baseline)
            for name, pairs in self.pairs.items()
        }
        rule |= {"looks": experiment.looks, "half_width": experiment.half_width, "variants": len(experiment.variants)}
        self._verdicts = verdicts(samples, **rule)
        self.unfinished = [name for name in self.pairs if not self._verdicts[name].has_ended]


def _more_baseline(losses: Losses, seeds: Sequence[int]) -> list[float | None]:
    """The null variant's losses; none if it is a copy of the baseline: with ``model.init_from``, nothing is random."""
    null, base = ([losses[RunKey(name, seed)] for seed in seeds] for name in (NULL, BASELINE))
    return [] if null == base else null


def sample(
    losses: Losses, baseline: str, variant: str, seeds: Sequence[int], more_baseline: Sequence[float | None] = ()
) -> Sample:
    """The losses of the baseline and of a variant, by the names of their runs."""
    first, second = ([losses[RunKey(name, seed)] for seed in seeds] for name in (baseline, variant))
    return Sample(first, second, more_baseline=more_baseline)
