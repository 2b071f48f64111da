"""The report of an experiment at several sizes: a row for each variant and size, and predictions. No torch.

The statistics are those of ``statistics.extrapolation``.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping

import msgspec
import numpy as np

from lightning_llm.ablate.experiment import Experiment
from lightning_llm.ablate.ladder import (
    Prediction,
    folder_of_size,
    pairs_of,
    predicted_sizes,
    prediction_of,
)
from lightning_llm.ablate.names import PLAN
from lightning_llm.ablate.report.from_experiment import report_of
from lightning_llm.ablate.report.record import (
    VERSION,
    LearnedDrift,
    Outcome,
    Predicted,
    ReportRecord,
    Row,
    SizeFacts,
    Sizes,
    StoredPrediction,
    Variant,
    row_of,
)
from lightning_llm.ablate.report.report import Report
from lightning_llm.ablate.results import load_experiment
from lightning_llm.io.shell import shell_path
from lightning_llm.statistics.design import BETTER, WORSE
from lightning_llm.statistics.extrapolation import (
    LEVEL,
    AtSize,
    Drift,
    Interval,
    SpreadBySize,
    Step,
    answer,
    predict,
    steps_of,
)
from lightning_llm.statistics.known_steps import LADDERS, METRIC, STEPS

DIRECTIONS = {BETTER: -1, WORSE: 1}


def ladder_report(ladder: Experiment, computes: Mapping[str, float]) -> Report:
    """The report of a ladder as it is now.

    Args:
        ladder: Of the folder.
        computes: FLOPs of a baseline's run, of each size and of the target.

    Raises:
        ValueError: No size is planned yet.
    """
    stored = {size: prediction_of(ladder, size) for size in predicted_sizes(ladder)}
    computes = {**computes, **{size: prediction.compute for size, prediction in stored.items() if prediction}}
    names = dict.fromkeys((*ladder.sizes, *stored))
    reports = {size: size_report(ladder, size) for size in names if (folder_of_size(ladder, size) / PLAN).exists()}
    if not reports:
        command = f"lightning-llm ablate run {shell_path(ladder.folder)}"
        raise ValueError(f"no size of {ladder.folder} is planned yet: {command} continues it")
    first = next(iter(reports.values()))
    target = None if ladder.predict is None or ladder.predict in reports else ladder.predict
    found, drift = predictions(reports, computes, target, pairs_of(ladder)) if target else ({}, None)
    factors = {} if ladder.tune is None else tuned_factors(ladder)
    return Report(
        version=VERSION,
        kind="sizes",
        name=ladder.name,
        folder=str(ladder.folder),
        metric=first.metric,
        unit=first.unit,
        higher_is_better=first.higher_is_better,
        delta=first.delta,
        alpha=first.alpha,
        level=first.level,
        has_ended=all(report.has_ended for report in reports.values()),
        rows=[row for name in _variants(first) for row in _rows(name, reports, computes)] + _nulls(reports),
        variants={name: Variant(what=each.what, options=each.options) for name, each in first.variants.items()},
        sizes=Sizes(
            sizes={size: _facts(report, computes[size]) for size, report in reports.items()},
            pairs=pairs_of(ladder),
            level=LEVEL,
            tuned_option=ladder.tune.option if ladder.tune is not None and factors else "",
            tuned_factors=factors,
            target=target or "",
            target_compute=computes[target] if target else None,
            predicted=found,
            drift=drift,
            predictions=[_outcomes(prediction, reports.get(size)) for size, prediction in stored.items() if prediction],
        ),
        environment=first.environment,
    )


def _variants(report: ReportRecord) -> list[str]:
    return [name for name in report.variants if name != report.baseline]


def predictions(
    reports: Mapping[str, ReportRecord], computes: Mapping[str, float], target: str, pairs: int
) -> tuple[dict[str, Predicted | None], LearnedDrift | None]:
    """Predictions for each variant at a target, ``None`` where its differences do not allow it; and what they rest on.

    Args:
        reports: Of each size.
        computes: FLOPs of a baseline's run, of each size and of the target.
        target: The size.
        pairs: That it will have.
    """
    xs = {size: _x(computes[size]) for size in (*reports, target)}
    first = next(iter(reports.values()))
    spread = SpreadBySize.of([at for size, report in reports.items() for at in _spreads(xs[size], report)])
    rows = {name: [report.row(name) for report in reports.values()] for name in _variants(first)}
    differences = {
        name: [at for size, row in zip(reports, of_name, strict=True) if (at := at_size(xs[size], row)) is not None]
        for name, of_name in rows.items()
    }
    other = STEPS if first.metric == METRIC else ()  # τ has a unit
    known = {(step.before, step.after) for step in other}  # this may be one of the known ladders
    own = [step for sizes in differences.values() for step in steps_of(sizes, spread) if _rounded(step) not in known]
    try:
        drift = Drift.of([*other, *own])
    except ValueError:
        return dict.fromkeys(rows), None
    by_variant: dict[str, Predicted | None] = {}
    for name, sizes in differences.items():
        last = rows[name][-1]
        direction = 0 if last.difference is None else DIRECTIONS.get(last.direction, 0)
        try:
            prediction = predict(sizes, spread, drift, xs[target], pairs)
        except ValueError:
            by_variant[name] = None
            continue
        by_variant[name] = Predicted(
            difference=float(prediction.mean),
            interval=_floats(prediction.interval),
            prediction_interval=_floats(prediction.prediction_interval),
            answer=answer(prediction.interval, direction, first.delta),
        )
    learned = LearnedDrift(
        decay=drift.decay,
        base=drift.base,
        share=drift.share,
        own_steps=len(own),
        other_steps=len(other),
        other_ladders=len(LADDERS) if other else 0,
    )
    return by_variant, learned


def _rounded(step: Step) -> tuple[float, float]:
    """The differences of a step as ``known_steps`` has them."""
    return float(f"{step.before:.5g}"), float(f"{step.after:.5g}")


def _floats(interval: Interval) -> tuple[float, float]:
    low, high = interval
    return float(low), float(high)


def prediction_for(ladder: Experiment, computes: Mapping[str, float]) -> Prediction:
    """The prediction for each variant at the predicted size, by all sizes below.

    Raises:
        ValueError: One of them has not ended.
    """
    reports = {size: size_report(ladder, size) for size in ladder.sizes}
    if left := [size for size, report in reports.items() if not report.has_ended]:
        command = f"lightning-llm ablate run {shell_path(ladder.folder)}"
        raise ValueError(f"{folder_of_size(ladder, left[0])} has not ended: {command} continues it")
    size = str(ladder.predict)
    variants, drift = predictions(reports, computes, size, pairs_of(ladder))
    return Prediction(
        size=size,
        compute=computes[size],
        pairs=pairs_of(ladder),
        variants=variants,
        drift=drift,
        plans={size: report.design.plan for size, report in reports.items() if report.design is not None},
    )


def tuned_factors(ladder: Experiment) -> dict[str, float]:
    """The tuned value of each variant as a multiple of its own at the smallest size; 1 where every value failed."""
    loaded = load_experiment(folder_of_size(ladder, ladder.sizes[0]))
    own = {name: variant.tuned or math.nan for name, variant in loaded.plan.variants.items()}
    return {name: (tuned.best or own[name]) / own[name] for name, tuned in loaded.state.tuning.items()}


def size_report(ladder: Experiment, size: str) -> Report:
    """The report of a size; of one that is tuned, with the comparison of the tuned variants as its results."""
    report = report_of(load_experiment(folder_of_size(ladder, size)), with_curves=False)
    if ladder.tune is None or size != ladder.sizes[0]:
        return report
    tuned = {row.variant: row for row in report.of_kind("tuned")}
    rows = []
    for row in report.of_kind("result"):
        own = tuned.get(row.variant)
        untested = row_of(None, variant=row.variant, metric=row.metric, unit=row.unit)
        rows.append(untested if own is None else dataclasses.replace(own, kind="result"))
    return msgspec.structs.replace(report, rows=[*rows, *report.of_kind("null")])


def _spreads(x: float, report: ReportRecord) -> Iterator[AtSize]:
    for row in report.rows:
        at = at_size(x, row) if row.kind in ("result", "null") else None
        if at is not None and at.pairs > 1:
            yield at


def at_size(x: float, row: Row) -> AtSize | None:
    """The difference of a row and its pairs, without those whose baseline failed to train; ``None``: there is none."""
    if row.difference is None or row.sd is None:
        return None
    return AtSize(x, row.difference, row.sd, row.pairs - row.baseline_diverged)


def _x(compute: float) -> float:
    return math.log(compute, 4)


def _facts(report: ReportRecord, compute: float) -> SizeFacts:
    base = report.variants[report.baseline]
    tuned = [row.baseline_mean for row in report.of_kind("result")]
    return SizeFacts(
        compute=compute,
        plan="" if report.design is None else report.design.plan,
        mean=next(iter(tuned), None),
        steps=base.steps,
        parameters=base.parameters,
    )


def _rows(name: str, reports: Mapping[str, ReportRecord], computes: Mapping[str, float]) -> list[Row]:
    """A variant at each size: its difference, and how many times the baseline's compute would give its loss."""
    means = [_facts(report, computes[size]).mean for size, report in reports.items()]
    xs = [_x(computes[size]) for size in reports]
    is_known = len(means) > 1 and None not in means
    slopes = np.gradient(np.array(means, dtype=np.float64), xs).tolist() if is_known else [None] * len(means)
    rows = []
    for (size, report), slope in zip(reports.items(), slopes, strict=True):
        row = report.row(name)
        ends = [_multiplier(end, slope) for end in row.interval or ()]
        known = sorted(end for end in ends if end)
        rows.append(
            dataclasses.replace(
                row,
                size=size,
                compute=computes[size],
                multiplier=_multiplier(row.difference, slope),
                multiplier_interval=(known[0], known[-1]) if len(known) > 1 else None,
            )
        )
    return rows


def _nulls(reports: Mapping[str, ReportRecord]) -> list[Row]:
    """The null variant at each size, which the spread of predictions rests on too."""
    return [dataclasses.replace(row, size=size) for size, report in reports.items() for row in report.of_kind("null")]


def _multiplier(difference: float | None, slope: float | None) -> float | None:
    """By the slope of the baseline's loss over the logarithm of its compute, which is taken as exact."""
    return None if difference is None or slope is None or slope >= 0 else float(4 ** (difference / slope))


def _outcomes(prediction: Prediction, report: ReportRecord | None) -> StoredPrediction:
    """A stored prediction, with what was observed of each variant, and whether it is a hit."""
    has_ended = report is not None and report.has_ended
    outcomes = {}
    for name, predicted in prediction.variants.items():
        observed = report.row(name).difference if report is not None and has_ended else None
        low, high = predicted.prediction_interval if predicted else (math.nan, math.nan)
        is_hit = None if observed is None or predicted is None else low <= observed <= high
        outcomes[name] = Outcome(predicted=predicted, observed=observed, is_hit=is_hit, has_ended=has_ended)
    return StoredPrediction(size=prediction.size, compute=prediction.compute, hash=prediction.hash, variants=outcomes)
