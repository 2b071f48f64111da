"""What an experiment needs next: a pure function of its plan and of the runs that have ended. It has no state.

The baseline's first seed comes first, and again: both must be bit-identical. Then, on the seeds of the first look, the
baseline, the null variant (only its initial MLPs differ) and all variants. At each look, the verdict rule decides;
variants whose comparison has not ended get the seeds of the next look. Pairs that were added to the plan (``extend``)
follow the last planned look, up to a further one.

With tuning, the same follows once more: every side is tuned on seeds of its own (``ablate.tuning``), and the tuned
baseline and variants are compared on the seeds of the looks. Both comparisons have the plan's alpha.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from lightning_llm.ablate.experiment import AGAIN, BASELINE, NULL
from lightning_llm.ablate.tuning import Tune, Tuned, tuning_of
from lightning_llm.statistics.design import Design
from lightning_llm.statistics.verdict import Sample, Verdict, verdicts


class Run(NamedTuple):
    """One run of an experiment: its side and its seed."""

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


class Rules(NamedTuple):
    """What a plan says about verdicts.

    Attributes:
        variants: Their names.
        looks: Numbers of pairs.
        delta: As ``verdicts`` takes it.
        alpha: Likewise.
        precision: Likewise.
        first_seed: Of the pairs.
        added: Pairs that were added, in this order.
        tune: What is tuned; ``None``: nothing.
    """

    variants: Sequence[str]
    looks: Sequence[int]
    delta: float | None
    alpha: float
    precision: float | None = None
    first_seed: int = 0
    added: Sequence[Added] = ()
    tune: Tune | None = None

    @property
    def design(self) -> Design:
        """Of the comparison of each variant."""
        return Design(self.alpha / len(self.variants), tuple(self.looks), self.delta, self.precision)

    def seeds(self, pairs: int) -> range:
        """The seeds of this many pairs."""
        return range(self.first_seed, self.first_seed + pairs)


@dataclasses.dataclass(frozen=True)
class State:
    """How far an experiment is.

    Attributes:
        needed: Runs to start, in this order; none: it has ended.
        look: Pairs of the look that they are for, or of the last one.
        verdicts: Of each variant, at its last look; empty before the first.
        undecided: Variants whose comparison has not ended.
        null: What the null variant's runs say, as if it were the only variant; ``None`` before the first look.
        tuning: What tuning has found, by side; empty before its end.
        tuned: The same of the tuned sides, without those that diverge at every value; ``None`` before.
    """

    needed: list[Run]
    look: int
    verdicts: dict[str, Verdict]
    undecided: list[str]
    null: Verdict | None = None
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
    pairs, found, null = dict.fromkeys(variants, 0), dict[str, Verdict](), None
    undecided, first = variants, rules.looks[0]
    planned = [(look, Added(0)) for look in rules.looks]
    for look, added in (*planned, *((0, each) for each in rules.added)):
        growing = undecided if added.variants is None else [name for name in variants if name in added.variants]
        wanted = {name: look or rules.design.look_with(pairs[name] + added.pairs) for name in growing}
        runs = [Run(BASELINE, rules.first_seed), Run(AGAIN, rules.first_seed)] if with_null else []
        for place, seed in enumerate(rules.seeds(max(wanted.values(), default=0))):
            sides = [name for name in growing if place < wanted[name]]
            nulls = [NULL] if with_null and place < first else []
            runs += [Run(name, seed) for name in (names[BASELINE], *nulls, *(names[side] for side in sides))]
        if needed := [run for run in dict.fromkeys(runs) if run not in losses]:
            return State(needed, max(wanted.values()), found, list(growing), null)
        pairs |= wanted
        if with_null and null is None:
            of_null = sample(losses, names[BASELINE], NULL, rules.seeds(first))
            null = verdicts({NULL: of_null}, delta=rules.delta, alpha=rules.alpha)[NULL]
        alike = _alike(losses, rules.seeds(first)) if with_null else []
        samples = {
            name: sample(losses, names[BASELINE], names[name], rules.seeds(count), alike)
            for name, count in pairs.items()
        }
        found = verdicts(
            samples,
            delta=rules.delta,
            alpha=rules.alpha,
            looks=rules.looks,
            precision=rules.precision,
            variants=len(rules.variants),
        )
        undecided = [name for name in variants if not found[name].has_ended]
    return State([], max(pairs.values(), default=0), found, undecided, null)


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
