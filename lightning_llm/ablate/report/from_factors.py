"""The effects of combined factors as rows: contrasts of the cells that an experiment has trained. No torch."""

from collections.abc import Mapping, Sequence

from lightning_llm.ablate.factors import named_cells
from lightning_llm.ablate.names import BASELINE
from lightning_llm.ablate.next_runs import RunKey
from lightning_llm.ablate.report.record import NO_VERDICT, Pair, Row, row_of
from lightning_llm.ablate.results import Loaded, losses_of
from lightning_llm.statistics.design import BETTER, NOT_SHOWN, UNDECIDED, WORSE
from lightning_llm.statistics.factorial import ADD_UP, MOST_COMPLETE, MOST_HALF, NO_THREE_WAY, Cell, Effect, factorial
from lightning_llm.statistics.verdict import Verdict

TIMES = " × "
ALL = "all together"
SUM = "all against the sum of each alone"


def effect_rows(loaded: Loaded) -> list[Row]:
    """The rows of all effects; none without factors, or before all runs have ended."""
    experiment = loaded.plan.experiment
    factors = list(experiment.factors)
    if not factors or not loaded.state.verdicts:
        return []
    seeds = experiment.seeds(experiment.looks[-1])
    found = losses_of(loaded.results)
    losses: dict[Cell, list[float | None]] = {
        cell: [found[RunKey(name, seed)] for seed in seeds] for cell, name in named_cells(factors).items()
    }
    effects = factorial(losses, alpha=experiment.alpha, delta=experiment.delta)
    lost = {name: sum(found[RunKey(name, seed)] is None for seed in seeds) for name in named_cells(factors).values()}
    rows = []
    for effect in effects:
        pairs = [Pair(*values) for values in zip(seeds, effect.first, effect.second, strict=True)]
        rows.append(
            row_of(
                _verdict(effect, effects, lost, delta=experiment.delta, is_last=len(factors) > MOST_HALF),
                by_seed=pairs,
                higher_is_better=experiment.higher_is_better,
                variant=_title(effect, factors),
                baseline=_other_side(effect, factors, is_last=len(factors) > MOST_HALF),
                kind=effect.kind,
                metric=experiment.metric_name,
                unit=experiment.unit,
                baseline_mean=_mean(effect.first),
                mean=_mean(effect.second),
            )
        )
    return rows


def _title(effect: Effect, factors: Sequence[str]) -> str:
    """The name of an effect, with the names of those that it is confounded with."""
    if effect.kind == "together":
        return ALL
    if effect.kind == "sum":
        return SUM
    own, *others = (TIMES.join(factors[place] for place in places) for places in (effect.factors, *effect.aliases))
    return f"{own} (or {', '.join(others)})" if others else own


def design_notes(factors: int) -> list[str]:
    """Sentences about what a design takes for granted.

    Args:
        factors: Number of factors; 0: there are none.
    """
    if not MOST_COMPLETE < factors <= MOST_HALF:
        return []
    named = "; effects that it cannot tell apart share a line: one (or another)" if factors < MOST_HALF else ""
    return [f"Half of all combinations were trained: {NO_THREE_WAY}{named}."]


def _other_side(effect: Effect, factors: Sequence[str], *, is_last: bool) -> str:
    """Name of the first side of a contrast."""
    name = factors[effect.factors[-1]]
    if effect.kind == "main":
        return f"all but {name}" if is_last else f"without {name}"
    others = TIMES.join(factors[place] for place in effect.factors[:-1])
    return {"together": BASELINE, "sum": "the sum of each alone"}.get(effect.kind, f"{others} without {name}")


def _verdict(
    effect: Effect, effects: Sequence[Effect], lost: Mapping[str, int], *, delta: float | None, is_last: bool
) -> Verdict:
    """An effect as a verdict; its p is adjusted for the family of its kind."""
    family = sum(other.kind == effect.kind and not other.is_three_way for other in effects)
    tests = 1 if effect.is_three_way else family
    return Verdict(
        verdict=NO_VERDICT if effect.is_three_way else UNDECIDED if effect.word == NOT_SHOWN else effect.word,
        direction=effect.word if effect.word in (BETTER, WORSE) else NOT_SHOWN,
        sentence=_words(effect, delta, is_last=is_last),
        has_ended=True,
        pairs=len(effect.first),
        difference=effect.difference,
        interval=effect.interval,
        level=1 - effect.alpha,
        p=effect.p,
        p_adjusted=None if effect.p is None else min(1.0, effect.p * tests),
        sd=effect.sd,
        diverged=sum(count for name, count in lost.items() if name != BASELINE),
        baseline_diverged=lost[BASELINE],
        rule=None if effect.interval is None else "one look",
        note=effect.note,
        warnings=[],
    )


def _words(effect: Effect, delta: float | None, *, is_last: bool) -> str:
    """Finding about an effect, without numbers except delta."""
    if effect.is_three_way:
        return "shown without words"
    if effect.kind in ("interaction", "sum"):
        if effect.word == ADD_UP:
            return f"{ADD_UP}, within {delta:g}"
        return "whether they add up is not shown" if effect.word == NOT_SHOWN else effect.word
    where = {"together": ""}.get(effect.kind, " on top of all others" if is_last else " on average over the others")
    return f"neither better nor worse is shown{where}" if effect.word == NOT_SHOWN else f"{effect.word}{where}"


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if len(known) == len(values) and known else None
