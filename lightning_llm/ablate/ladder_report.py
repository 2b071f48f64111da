"""The report of a ladder: differences at each size, the prediction at a larger one, and whether predictions were right.

``report.json`` holds it, and the screen and ``report.html`` show it. The statistics are those of
``statistics.extrapolation``. No torch.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from lightning_llm.ablate import page, words
from lightning_llm.ablate.experiment import Experiment
from lightning_llm.ablate.ladder import (
    PredictedVariant,
    Prediction,
    folder_of_size,
    pairs_of,
    predicted_sizes,
    prediction_of,
)
from lightning_llm.ablate.names import PLAN
from lightning_llm.ablate.report import NOT_TESTED, report_of
from lightning_llm.ablate.results import load_experiment
from lightning_llm.io.charts import COLORS, GRAY, legend
from lightning_llm.io.shell import shell_path
from lightning_llm.io.untrusted import printable
from lightning_llm.statistics.design import BETTER, WORSE
from lightning_llm.statistics.extrapolation import LEVEL, MOST_BEYOND, AtSize, Interval, SpreadBySize, answer, predict

DIRECTIONS = {BETTER: -1, WORSE: 1}
NO_BEND = "A prediction assumes a smooth curve: nothing predicts a bend that has not begun."
_OF_NULL = ("difference", "sd", "pairs", "by_seed")  # from which, and from the variants' losses, all else follows
_SHOWN = (*_OF_NULL, "interval", "verdict", "direction", "sentence")  # of a variant at a size
_POINTS = 40  # between the largest size and the furthest target


def ladder_report(ladder: Experiment, computes: Mapping[str, float]) -> dict[str, Any]:
    """The report of a ladder as it is now, as JSON takes it.

    Args:
        ladder: Of the folder.
        computes: FLOPs of a baseline's run, of each size and of the target.
    """
    stored = {size: prediction_of(ladder, size) for size in predicted_sizes(ladder)}
    computes = {**computes, **{size: prediction.compute for size, prediction in stored.items() if prediction}}
    names = dict.fromkeys((*ladder.sizes, *stored))
    sizes = {size: _report(ladder, size) for size in names if (folder_of_size(ladder, size) / PLAN).exists()}
    if not sizes:
        command = f"lightning-llm ablate run {shell_path(ladder.folder)}"
        raise ValueError(f"no size of {ladder.folder} is planned yet: {command} continues it")
    first = next(iter(sizes.values()))
    of_variants = {name: _rows(name, sizes, computes) for name in first["variants"]}
    target = None if ladder.predict is None or ladder.predict in sizes else ladder.predict
    found = predictions(sizes, computes, target, pairs_of(ladder)) if target else {}
    predicted = {name: {"answer": None} if row is None else msgspec.to_builtins(row) for name, row in found.items()}
    return {
        "name": ladder.name,
        "out": ladder.folder,
        **{field: first[field] for field in ("metric", "unit", "delta", "alpha", "interval")},
        "has_ended": all(report["has_ended"] for report in sizes.values()),
        "pairs": pairs_of(ladder),
        "tuned": _tuning(ladder),
        "sizes": {
            size: {"compute": computes[size], "plan": report["plan"], **_base(report)} for size, report in sizes.items()
        },
        "target": None if target is None else {"size": target, "compute": computes[target]},
        "level": LEVEL,
        "ladder": {
            name: {**predicted.get(name, {"answer": None}), "sizes": rows} for name, rows in of_variants.items()
        },
        "predictions": [_outcome(prediction, sizes.get(size)) for size, prediction in stored.items() if prediction],
    }


def predictions(
    sizes: Mapping[str, Mapping[str, Any]], computes: Mapping[str, float], target: str, pairs: int
) -> dict[str, PredictedVariant | None]:
    """Predictions for each variant at a target; ``None``: its differences do not allow it.

    Args:
        sizes: The report of each size.
        computes: FLOPs of a baseline's run, of each size and of the target.
        target: The size.
        pairs: That it will have.
    """
    reports = list(sizes.values())
    xs = {size: _x(computes[size]) for size in (*sizes, target)}
    all_differences = [row for size, report in sizes.items() for row in _spreads(xs[size], report)]
    by_variant: dict[str, PredictedVariant | None] = {}
    for name in reports[0]["variants"]:
        rows = [(xs[size], report["variants"][name]) for size, report in sizes.items()]
        differences = [_at_size(x, row) for x, row in rows if row["difference"] is not None]
        direction = DIRECTIONS.get(rows[-1][1]["direction"], 0)
        delta = reports[0]["delta"]
        try:
            spread = SpreadBySize.of(all_differences)
            prediction = predict(differences, spread, xs[target], pairs)
            shown_xs = [
                x
                for x in np.linspace(differences[-1].x, differences[-1].x + MOST_BEYOND, _POINTS)
                if answer(predict(differences, spread, float(x), pairs).interval, direction, None) == "holds"
            ]
        except ValueError:
            by_variant[name] = None
            continue
        by_variant[name] = PredictedVariant(
            difference=float(prediction.mean),
            interval=_floats(prediction.interval),
            prediction_interval=_floats(prediction.prediction_interval),
            answer=answer(prediction.interval, direction, delta),
            shown_up_to=4.0 ** float(shown_xs[-1]) if shown_xs else None,
        )
    return by_variant


def _floats(interval: Interval) -> tuple[float, float]:
    low, high = interval
    return float(low), float(high)


def prediction_for(ladder: Experiment, computes: Mapping[str, float]) -> Prediction:
    """The prediction for each variant at the predicted size, by all sizes below.

    Raises:
        ValueError: One of them has not ended.
    """
    sizes = {size: _report(ladder, size) for size in ladder.sizes}
    if left := [size for size, report in sizes.items() if not report["has_ended"]]:
        command = f"lightning-llm ablate run {shell_path(ladder.folder)}"
        raise ValueError(f"{folder_of_size(ladder, left[0])} has not ended: {command} continues it")
    size = str(ladder.predict)
    return Prediction(
        size=size,
        compute=computes[size],
        pairs=pairs_of(ladder),
        variants=predictions(sizes, computes, size, pairs_of(ladder)),
        plans={size: report["plan"] for size, report in sizes.items()},
    )


def tuned_factors(ladder: Experiment) -> dict[str, float]:
    """The tuned value of each variant as a multiple of its own at the smallest size; 1 where every value failed."""
    loaded = load_experiment(folder_of_size(ladder, ladder.sizes[0]))
    own = {name: variant.tuned or math.nan for name, variant in loaded.plan.variants.items()}
    return {name: (tuned.best or own[name]) / own[name] for name, tuned in loaded.state.tuning.items()}


def _tuning(ladder: Experiment) -> dict[str, Any] | None:
    """Tuned option of the smallest size, and its factors; ``None``: nothing was tuned, or it has not ended."""
    if ladder.tune is None or not (factors := tuned_factors(ladder)):
        return None
    return {"option": ladder.tune.option, "size": ladder.sizes[0], "factors": factors}


def _report(ladder: Experiment, size: str) -> dict[str, Any]:
    """The report of a size; of one that is tuned, the comparison of the tuned variants."""
    report = report_of(load_experiment(folder_of_size(ladder, size)))
    if ladder.tune is None or size != ladder.sizes[0]:
        return report
    return {**report, **_tuned(report)}


def _tuned(report: Mapping[str, Any]) -> dict[str, Any]:
    """Rows of the tuned variants, in place of the untuned ones."""
    variants = {name: row["tuned"] or {**row, **NOT_TESTED} for name, row in report["variants"].items()}
    means = [row["tuned"]["baseline_mean"] for row in report["variants"].values() if row["tuned"]]
    return {"variants": variants, "baseline": {**report["baseline"], "mean": means[0] if means else None}}


def _spreads(x: float, report: Mapping[str, Any]) -> Iterator[AtSize]:
    for row in (*report["variants"].values(), report["aa"]["null"]):
        if row is not None and row["difference"] is not None and (at := _at_size(x, row)).pairs > 1:
            yield at


def _at_size(x: float, row: Mapping[str, Any]) -> AtSize:
    """A difference and its pairs: those whose baseline failed to train are left out."""
    return AtSize(x, row["difference"], row["sd"], row["pairs"] - row["baseline_diverged"])


def _x(compute: float) -> float:
    return math.log(compute, 4)


def _base(report: Mapping[str, Any]) -> dict[str, Any]:
    null = report["aa"]["null"]
    of_null = None if null is None else {field: null[field] for field in _OF_NULL}
    return {**{field: report["baseline"][field] for field in ("mean", "steps", "parameters")}, "null": of_null}


def _rows(name: str, sizes: Mapping[str, Mapping[str, Any]], computes: Mapping[str, float]) -> list[dict[str, Any]]:
    """A variant at each size: its difference, and how many times the baseline's compute would give its loss."""
    means = [report["baseline"]["mean"] for report in sizes.values()]
    xs = [_x(computes[size]) for size in sizes]
    is_known = len(means) > 1 and None not in means
    slopes = np.gradient(means, xs).tolist() if is_known else [None] * len(means)
    rows = []
    for (size, report), slope in zip(sizes.items(), slopes, strict=True):
        row = report["variants"][name]
        facts = {"size": size, "compute": computes[size], **{field: row[field] for field in _SHOWN}}
        facts["against_delta"] = row["size"]
        facts["multiplier"] = _multiplier(row["difference"], slope)
        ends = (_multiplier(end, slope) for end in row["interval"] or ())
        facts["multiplier_interval"] = sorted(filter(None, ends)) or None
        rows.append(facts)
    return rows


def _multiplier(difference: float | None, slope: float | None) -> float | None:
    """By the slope of the baseline's loss over the logarithm of its compute, which is taken as exact."""
    return None if difference is None or slope is None or slope >= 0 else float(4 ** (difference / slope))


def _outcome(prediction: Prediction, report: Mapping[str, Any] | None) -> dict[str, Any]:
    """A stored prediction, with what was observed of each variant, and whether it is a hit."""
    outcomes: dict[str, Any] = {}
    has_ended = report is not None and report["has_ended"]
    for name, predicted in prediction.variants.items():
        observed = report["variants"][name]["difference"] if report is not None and has_ended else None
        low, high = predicted.prediction_interval if predicted else (math.nan, math.nan)
        is_hit = None if observed is None or predicted is None else low <= observed <= high
        numbers = None if predicted is None else msgspec.to_builtins(predicted)
        outcomes[name] = {"predicted": numbers, "observed": observed, "hit": is_hit, "has_ended": has_ended}
    facts = {"size": prediction.size, "compute": prediction.compute, "hash": prediction.hash}
    return {**facts, "variants": outcomes}


# ---- in words


def lines_of(report: Mapping[str, Any]) -> list[str]:
    """Sentences about what was found, for each variant and each stored prediction."""
    lines = [] if report["tuned"] is None else [_tuned_in_words(**report["tuned"])]
    if target := report["target"]:
        for name, row in report["ladder"].items():
            lines.append(_predicted(name, row, target, report))
        lines.append(NO_BEND)
    for prediction in report["predictions"]:
        lines += [_outcome_in_words(name, row, prediction["size"]) for name, row in prediction["variants"].items()]
    each, together = (words.percent(report["interval"][which]) for which in ("each", "together"))
    differences = f"Intervals of differences: {each} each, {together} for all variants of a size together"
    return [*lines, f"{differences}; predictions: {words.percent(LEVEL)} for each variant."]


def _tuned_in_words(option: str, size: str, factors: Mapping[str, float]) -> str:
    times = ", ".join(f"{name} × {factor:.3g}" for name, factor in factors.items())
    return f"{option} was tuned at {size}, and at larger sizes multiplies what size sets there: {times}."


def _predicted(name: str, row: Mapping[str, Any], target: Mapping[str, Any], report: Mapping[str, Any]) -> str:
    title = f"{name} at {target['size']} ({target['compute']:.2g} FLOPs)"
    if row["answer"] is None:
        return f"{title}: no prediction, which needs a difference at three sizes or more."
    meaning = {
        "holds": "holds: the direction is that at the largest size",
        "fades": f"fades: the difference is smaller than {report['delta']}",
        "flips": "flips: the direction is the opposite of that at the largest size",
        "unknown": "unknown: the interval allows more than one answer",
    }[row["answer"]]
    numbers = f"difference {words.signed(row['difference'])} ({words.bounds(row['interval'])}) {report['unit']}"
    observed = f"its {report['pairs']} pairs should show {words.bounds(row['prediction_interval'])}"
    up_to = f"; the direction is shown up to {row['shown_up_to']:.2g} FLOPs" if row["shown_up_to"] else ""
    return f"{title}: {meaning}; {numbers}; {observed}{up_to}."


def _outcome_in_words(name: str, row: Mapping[str, Any], size: str) -> str:
    if row["predicted"] is None:
        return f"{name} at {size}: nothing was predicted."
    predicted = f"predicted {words.bounds(row['predicted']['prediction_interval'])}"
    if row["observed"] is None:
        observed = "no difference was observed, since a run failed to train" if row["has_ended"] else "not observed yet"
        return f"{name} at {size}: {predicted}; {observed}."
    return (
        f"{name} at {size}: {'hit' if row['hit'] else 'miss'}: {predicted}, observed {words.signed(row['observed'])}."
    )


HEAD = ("variant", "size", "difference", "interval", "verdict", "× compute")
MORE = ("its interval", "FLOPs of a run", "pairs", "in words")


def table_of(report: Mapping[str, Any]) -> list[tuple[list[str], list[str]]]:
    """For each variant and size the cells of ``HEAD``, and those of ``MORE``."""
    rows = []
    for name, variant in report["ladder"].items():
        for row in variant["sizes"]:
            times = "–" if row["multiplier"] is None else f"{row['multiplier']:.2f}"
            ends = "–" if row["multiplier_interval"] is None else "{:.2f} to {:.2f}".format(*row["multiplier_interval"])
            values = [words.signed(row["difference"]), words.bounds(row["interval"]), row["verdict"], times]
            more = [ends, f"{row['compute']:.2e}", str(row["pairs"]), row["sentence"] or "–"]
            rows.append(([name, row["size"], *values], more))
    return rows


# ---- the page


def write_ladder_report(ladder: Experiment, computes: Mapping[str, float]) -> tuple[dict[str, Any], Path]:
    """Write ``report.json`` and ``report.html`` to the ladder's folder; the report, and where the page is."""
    report = ladder_report(ladder, computes)
    facts = f"{report['metric']}, {report['pairs']} pairs at each size, alpha {report['alpha']:g} per size"
    unfinished = [] if report["has_ended"] else ["<p><strong>The ladder has not ended.</strong></p>"]
    caption = "× compute: how many times the baseline's compute would give the variant's loss, by the slope of the "
    caption += "baseline's own losses between the sizes, which is taken as exact. "
    caption += "FLOPs are counted, with head and attention."
    sections = [
        f"<h1>{page.text(report['name'])}</h1>",
        f'<p class="soft">{page.text(facts)}</p>',
        *unfinished,
        "<h2>Does it hold at larger scale?</h2>",
        page.plot(draw, report, height=4.2),
        page.paragraphs(lines_of(report)),
        "<h2>Differences at each size</h2>",
        page.table([*HEAD, *MORE], [[*row, *more] for row, more in table_of(report)]),
        f"<figcaption>{page.text(caption)}</figcaption>",
        "<h2>Sizes</h2>",
        page.table(*_sizes_table(report)),
    ]
    return report, page.write(Path(ladder.folder), report, f"{report['name']}: ladder report", sections)


def _sizes_table(report: Mapping[str, Any]) -> tuple[Sequence[str], list[list[str]]]:
    head = ("size", "FLOPs of a run", "parameters", "steps", f"baseline's {report['metric']}", "report")
    rows = []
    for size, row in report["sizes"].items():
        mean = "–" if row["mean"] is None else f"{row['mean']:.4f}"
        counts = ["–" if row[field] is None else f"{row[field]:,}" for field in ("parameters", "steps")]
        rows.append([size, f"{row['compute']:.2e}", *counts, mean, f"sizes/{size}/{page.PAGE}"])
    return head, rows


def draw(axes: Sequence[Any], report: Mapping[str, Any]) -> None:
    """Differences over compute with their intervals; at the target, the interval of the mean and of the next mean."""
    axis = axes[0]
    target = report["target"]
    if report["delta"] is not None:
        axis.axhspan(-report["delta"], report["delta"], color=GRAY, alpha=0.2, lw=0)
    axis.axhline(0, color=axis.xaxis.label.get_color(), lw=0.8)
    count = len(report["ladder"])
    for index, (name, variant) in enumerate(report["ladder"].items()):
        color = COLORS[index % len(COLORS)]
        shift = 1.04 ** (index - (count - 1) / 2)
        rows = [row for row in variant["sizes"] if row["difference"] is not None]
        x = [row["compute"] * shift for row in rows]
        y = [row["difference"] for row in rows]
        ends = [row["interval"] or [row["difference"]] * 2 for row in rows]
        halves = abs(np.reshape(ends, (-1, 2)).T - y)
        axis.errorbar(x, y, yerr=halves, fmt="o-", ms=5, capsize=3, lw=1, color=color, label=printable(name))
        if target and variant["answer"]:
            at = target["compute"] * shift
            axis.vlines(at, *variant["prediction_interval"], color=color, lw=1)
            axis.vlines(at, *variant["interval"], color=color, lw=6, alpha=0.5)
            axis.plot(at, variant["difference"], "o", mfc="none", color=color)
    axis.set_xscale("log")
    axis.set(xlabel="counted FLOPs of a run", ylabel=f"difference of {report['metric']}, {report['unit']}")
    axis.grid()
    legend(axis)
