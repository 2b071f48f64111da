"""Which rule predicts a difference one size up? Shape ``rules`` of the bench ``ladder``; it trains nothing.

The ladders are those of ``docs/experiments``. From all sizes below the predicted one, each rule predicts the mean
difference that was then observed, with an interval of 90%:

- *curves*: the earlier method, as it stood in the reports before the predicted size was trained.
- *persists, pairs alone*: the last difference, give or take what pairs vary.
- *persists with drift*: the last difference, with a drift that is learned (``statistics.extrapolation``, φ = 1).
- *pooled decay*: the present method.

The last two learn from steps between sizes, either from those *below* the predicted size alone, or also from the
predicted size of all *other variants*, which share the baseline's runs there. The spread is that of the variants'
pairs; what was stored also counts the null variant's. Ladders of ``FRESH`` are not in the first group, nor learned from
there: their prediction by pooled decay is the one that was stored before the predicted size was trained.

The interval score (Gneiting and Raftery 2007, "Strictly Proper Scoring Rules, Prediction, and Estimation",
equation 43) is the width of an interval, and 2 / (1 - level) times what it misses the observation by: lower is better.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from benchmarks.harness import Request
from benchmarks.known_steps import EXPERIMENTS, ladders, series, spread_of
from benchmarks.rows import Row
from lightning_llm.ablate.report.record import Predicted
from lightning_llm.ablate.report.report import Report
from lightning_llm.io.charts import chart
from lightning_llm.statistics.estimates import student
from lightning_llm.statistics.extrapolation import (
    LEVEL,
    AtSize,
    Drift,
    Interval,
    SpreadBySize,
    Step,
    predict,
    steps_of,
)

RULES, FRESH = "rules", "held-out-again"
BY_CURVES = f"{FRESH}-curves"  # the report of its three sizes by the earlier method
ODD = "no-positions"  # one variant that decides the mean score
SHOWN = 0.01  # nats: a difference whose sign counts


@dataclass(frozen=True)
class Case:
    """A difference that was observed one size above those that predict it.

    Attributes:
        ladder: Its name.
        variant: Its name.
        sizes: Of the variant, below the predicted one.
        spread: Of all pairs of the ladder at these sizes.
        target: x of the predicted size.
        pairs: That it has.
        observed: Mean difference there.
        stored: What was predicted before, by the method of its time; ``None``: nothing.
        curves: The same by the earlier method.
    """

    ladder: str
    variant: str
    sizes: tuple[AtSize, ...]
    spread: SpreadBySize
    target: float
    pairs: int
    observed: float
    stored: Predicted | None
    curves: Predicted | None


Rule = Callable[[Case], tuple[float, Interval]]


def rules(request: Request) -> Iterator[Row]:
    """A row for each rule and group: the mean score with and without ``ODD``, hits, mean absolute error, signs, ranks.

    ``share_low`` and ``share_high`` are the exact binomial 95% interval of the share of hits. It takes variants as
    independent, which they are not: they share the baseline's runs.
    """
    reports = list(ladders())
    by_ladder = series(reports)
    cases = [case for report in reports for case in cases_of(report, by_ladder[report.name])]
    known = [case for case in cases if case.ladder != FRESH]
    earlier = {name: variants for name, variants in by_ladder.items() if name != FRESH}
    below = steps_below(earlier, {case.ladder: case.target for case in known})
    others = {case.variant: steps_without(earlier, case) for case in known}
    groups: list[tuple[str, list[Case], dict[str, Rule]]] = [
        ("known", known, {"curves": by_curves, "persists, pairs alone": persists}),
        ("below", known, pooled(lambda case: below)),
        ("other variants", known, pooled(lambda case: others[case.variant])),
    ]
    if fresh := [case for case in cases if case.ladder == FRESH]:
        every = steps_below(earlier, {})
        own = steps_below({FRESH: by_ladder[FRESH]}, {FRESH: fresh[0].target})
        drifting = pooled(lambda case: [*every, *own])["persists with drift"]
        simple = {"curves": by_curves, "persists, pairs alone": persists, "persists with drift": drifting}
        groups.append(("fresh", fresh, {**simple, "pooled decay": as_stored}))
    for group, own_cases, own_rules in groups:
        for name, rule in own_rules.items():
            yield request.row(f"{name}; {group}", group=group, rule=name, **scores(own_cases, rule))


def cases_of(report: Report, variants: Mapping[str, Sequence[AtSize]]) -> Iterator[Case]:
    """The differences of a ladder that were predicted and observed."""
    assert report.sizes is not None
    if not report.sizes.predictions:
        return
    prediction = report.sizes.predictions[-1]
    target = math.log(prediction.compute, 4)
    below = {name: tuple(at for at in places if at.x < target - 1e-9) for name, places in variants.items()}
    spread = spread_of({name: list(places) for name, places in below.items()})
    earlier = Report.read(EXPERIMENTS / f"{BY_CURVES}.json").sizes if report.name == FRESH else None
    for name, places in variants.items():
        outcome = prediction.variants.get(name)
        if outcome is None or outcome.observed is None or places[-1].x < target - 1e-9:
            continue
        by_curves = outcome.predicted if earlier is None else earlier.predicted[name]
        yield Case(
            ladder=report.name,
            variant=name,
            sizes=below[name],
            spread=spread,
            target=target,
            pairs=places[-1].pairs,
            observed=outcome.observed,
            stored=outcome.predicted,
            curves=by_curves,
        )


def steps_below(
    by_ladder: Mapping[str, Mapping[str, Sequence[AtSize]]], targets: Mapping[str, float], without: str = ""
) -> list[Step]:
    """The steps of ladders, below a target where one is given; without a variant."""
    found = []
    for name, variants in by_ladder.items():
        below = {
            variant: [at for at in places if at.x < targets.get(name, math.inf) - 1e-9]
            for variant, places in variants.items()
        }
        below.pop(without, None)
        spread = spread_of(below)
        found += [step for places in below.values() for step in steps_of(places, spread)]
    return found


def steps_without(by_ladder: Mapping[str, Mapping[str, Sequence[AtSize]]], case: Case) -> list[Step]:
    """All steps of the other variants, and those of this one in its ladder below the predicted size."""
    return [*steps_below(by_ladder, {}, without=case.variant), *steps_of(case.sizes, case.spread)]


# ---- rules


def by_curves(case: Case) -> tuple[float, Interval]:
    """What the earlier method had predicted."""
    assert case.curves is not None
    return case.curves.difference, case.curves.prediction_interval


def as_stored(case: Case) -> tuple[float, Interval]:
    """What was stored before the predicted size was trained."""
    assert case.stored is not None
    return case.stored.difference, case.stored.prediction_interval


def persists(case: Case) -> tuple[float, Interval]:
    """The last difference, give or take what pairs vary."""
    last = case.sizes[-1]
    error = math.hypot(case.spread.error(last.x, last.pairs), case.spread.error(case.target, case.pairs))
    half = float(student(1 - LEVEL, (last.pairs - 1) * len(case.sizes))) * error
    return last.mean, (last.mean - half, last.mean + half)


def pooled(steps: Callable[[Case], Sequence[Step]]) -> dict[str, Rule]:
    """The two rules that learn from steps."""
    fits: dict[tuple[tuple[Step, ...], bool], Drift] = {}

    def rule(is_decaying: bool) -> Rule:
        def predicted(case: Case) -> tuple[float, Interval]:
            key = (tuple(steps(case)), is_decaying)
            if key not in fits:
                fits[key] = Drift.of(*key)
            found = predict(case.sizes, case.spread, fits[key], case.target, case.pairs)
            return found.mean, found.prediction_interval

        return predicted

    return {"persists with drift": rule(is_decaying=False), "pooled decay": rule(is_decaying=True)}


# ---- scores


def scores(cases: Sequence[Case], rule: Rule) -> dict[str, Any]:
    """What a row has of a rule, with the interval and the observation of each case."""
    found = [rule(case) for case in cases]
    observed = np.array([case.observed for case in cases])
    means = np.array([mean for mean, _ in found])
    each = np.array([interval_score(interval, case.observed) for (_, interval), case in zip(found, cases, strict=True)])
    is_odd = np.array([case.variant == ODD for case in cases])
    hits = sum(low <= case.observed <= high for (_, (low, high)), case in zip(found, cases, strict=True))
    is_shown = np.abs(observed) > SHOWN
    share = stats.binomtest(hits, len(cases)).proportion_ci(0.95, method="exact")
    return {
        **{"count": len(cases), "hits": int(hits), "share_low": float(share.low), "share_high": float(share.high)},
        **{"score": float(each.mean()), "score_without": float(each[~is_odd].mean())},
        **{"width": float(np.mean([high - low for _, (low, high) in found]))},
        **{"error": float(np.abs(means - observed).mean()), "shown": int(is_shown.sum())},
        **{"signs": int((np.sign(means) == np.sign(observed))[is_shown].sum())},
        **{"rank": float(stats.spearmanr(means, observed).statistic)},
        **{"variants": [f"{case.ladder}: {case.variant}" for case in cases], "observed": observed.tolist()},
        **{"means": means.tolist(), "intervals": [list(interval) for _, interval in found]},
    }


def interval_score(interval: Interval, observed: float) -> float:
    """The width, and 2 / (1 - level) times the distance of an observation outside."""
    low, high = interval
    return high - low + 2 / (1 - LEVEL) * max(0.0, low - observed, observed - high)


def draw_rules(rows: Sequence[Row], path: Path, title: str, **options: Any) -> None:
    """Of each variant of the last group the prediction intervals of its rules, and what was observed."""
    rows = [row for row in rows if row.group == rows[-1].group]
    names = [name.split(": ")[-1] for name in rows[0].variants]
    with chart(path, title, height=1.2 + 0.45 * len(names), **options) as axes:
        (axis,) = np.ravel(axes)
        for index, row in enumerate(rows):
            places = np.arange(len(names)) + 0.18 * (index - (len(rows) - 1) / 2)
            low, high = np.array(row.intervals).T
            axis.hlines(places, low, high, lw=4, alpha=0.6, color=f"C{index}", label=row.rule)
        for place, observed in enumerate(rows[0].observed):
            color = axis.xaxis.label.get_color()
            axis.vlines(observed, place - 0.4, place + 0.4, color=color, lw=1.5, label="" if place else "observed")
        axis.axvline(0, color=axis.xaxis.label.get_color(), lw=0.5, ls=":")
        axis.set_yticks(range(len(names)), names)
        axis.set(xlabel="difference, nats per character: intervals of 90%, and what was observed")
        axis.invert_yaxis()
        axis.legend(fontsize=8.5)
