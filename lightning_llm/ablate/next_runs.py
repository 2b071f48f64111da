"""The runs that an experiment needs next: a pure function of its plan and of the runs that have ended. It has no state.

The baseline's first seed comes first, and again: both must be bit-identical. Then, on the seeds of the first look, the
baseline, the null variant if there is one (only chance differs) and all variants. At each look the verdict rule
decides; variants whose comparison has not ended get the seeds of the next look. Extensions follow the last planned
look, each up to a further one.

With tuning, the same follows once more: every variant is tuned on seeds of its own (``ablate.tuning``), and the tuned
baseline and variants are compared on the seeds of the looks. Both comparisons have the plan's alpha.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from lightning_llm.ablate.experiment import Batch, Experiment
from lightning_llm.ablate.names import AGAIN, BASELINE, NULL
from lightning_llm.ablate.tuning import Losses, Tune, Tuned, tuning_of
from lightning_llm.statistics.batch import batch_verdicts
from lightning_llm.statistics.verdict import Sample, Verdict, verdicts


class RunKey(NamedTuple):
    """One run of an experiment: its variant and its seed."""

    name: str
    seed: int

    def __str__(self) -> str:
        return f"{self.name},seed={self.seed}"


class Extension(msgspec.Struct, frozen=True):
    """Pairs that were added to a plan.

    Attributes:
        pairs: How many, at least: up to the next look.
        variants: For which; ``None``: for those whose comparison has not ended.
    """

    pairs: int
    variants: tuple[str, ...] | None = None


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
        tuning: What tuning has found, by variant; empty before its end.
        tuned: The same of the tuned variants, without those that fail to train with every value; ``None`` before.
    """

    needed: list[RunKey]
    look: int
    verdicts: dict[str, Verdict]
    unfinished: list[str]
    looks: list[int]
    null: Verdict | None = None
    tuning: Mapping[str, Tuned] = dataclasses.field(default_factory=dict)
    tuned: "State | None" = None


def state_of(
    experiment: Experiment,
    losses: Losses,
    *,
    extensions: Sequence[Extension] = (),
    tune: Tune | None = None,
    has_null: bool = True,
) -> State:
    """How far an experiment is, and what it needs next.

    Args:
        experiment: What was asked for.
        losses: Of the runs that have ended.
        extensions: Pairs that were added, in this order.
        tune: What is tuned; ``None``: nothing.
        has_null: Whether there is a null variant.
    """
    variants = [BASELINE, *experiment.variants]
    untuned = _Comparison(experiment, losses, {name: name for name in variants}, is_first=True, has_null=has_null)
    state = untuned.carry_on(extensions)
    if state.needed or tune is None:
        return state
    tuning = tuning_of(tune, variants, losses)
    state = dataclasses.replace(state, needed=[RunKey(*run) for run in tuning.needed], tuning=tuning.variants)
    best = {name: tuned.best for name, tuned in tuning.variants.items() if tuned.best is not None}
    if BASELINE not in best or len(best) == 1:
        return state
    names = {name: tune.tuned_name(name, value) for name, value in best.items()}
    tuned = _Comparison(experiment, losses, names, is_first=False, has_null=False).carry_on(extensions)
    return dataclasses.replace(state, needed=tuned.needed, tuned=tuned)


class _Comparison:
    """The comparison of variants with the baseline, look by look.

    Args:
        experiment: What was asked for.
        losses: Of the runs that have ended.
        names: Of the baseline and the variants, those of their runs.
        is_first: Whether the baseline's first seed runs again, to see whether it repeats its bits.
        has_null: Whether the null variant runs, on the seeds of the first look.

    Attributes:
        pairs: Of each variant, up to its last look.
        unfinished: Variants whose comparison has not ended.
    """

    def __init__(
        self, experiment: Experiment, losses: Losses, names: Mapping[str, str], *, is_first: bool, has_null: bool
    ) -> None:
        self._experiment = experiment
        self._losses = losses
        self._names = names
        self._is_first = is_first
        self._has_null = has_null
        self.pairs = {name: 0 for name in names if name != BASELINE}
        self.unfinished = list(self.pairs)
        self._looks = {*experiment.looks}
        self._verdicts: dict[str, Verdict] = {}
        self._null: Verdict | None = None

    def carry_on(self, extensions: Sequence[Extension]) -> State:
        """Make the verdicts of all looks whose runs have ended; how far it is then."""
        for look in self._experiment.looks:
            if state := self.lacking(dict.fromkeys(self.unfinished, look)):
                return state
        look_with = self._experiment.design.look_with
        for extension in extensions:
            chosen = self.unfinished if extension.variants is None else extension.variants
            growing = [name for name in self.pairs if name in chosen]
            if state := self.lacking({name: look_with(self.pairs[name] + extension.pairs) for name in growing}):
                return state
        return self.state([], self.pairs)

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
        null_pairs = self._experiment.null_pairs if self._has_null else 0
        if self._is_first:
            yield from (RunKey(name, self._experiment.first_seed) for name in (BASELINE, AGAIN))
        for index, seed in enumerate(self._experiment.seeds(max(targets.values(), default=0))):
            nulls = [NULL] if index < null_pairs else []
            variants = [self._names[name] for name, pairs in targets.items() if index < pairs]
            yield from (RunKey(name, seed) for name in (self._names[BASELINE], *nulls, *variants))

    def _judge(self) -> None:
        """The verdicts of what has ended."""
        experiment = self._experiment
        losses = self._losses
        base = self._names[BASELINE]
        rule: dict[str, Any] = {"delta": experiment.delta, "alpha": experiment.alpha}
        more_baseline: list[float | None] = []
        if self._has_null:
            first_seeds = experiment.seeds(experiment.null_pairs)
            more_baseline = _more_baseline(losses, first_seeds)
            self._null = self._null or verdicts({NULL: sample(losses, base, NULL, first_seeds)}, **rule)[NULL]
        samples = {
            name: sample(losses, base, self._names[name], experiment.seeds(pairs), more_baseline)
            for name, pairs in self.pairs.items()
        }
        if isinstance(experiment.stop, Batch):
            self._verdicts = batch_verdicts(samples, experiment.alpha)
            self.unfinished = [name for name in self.pairs if not self._verdicts[name].has_ended]
            return
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
