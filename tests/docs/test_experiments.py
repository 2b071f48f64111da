"""The stored reports of the documentation: each is read, and its verdicts are computed again from its pairs."""

from pathlib import Path

import pytest

from lightning_llm.ablate.factors import named_cells
from lightning_llm.ablate.report.report import Report
from lightning_llm.statistics.factorial import factorial
from lightning_llm.statistics.verdict import Sample, verdicts, with_window_error

FOLDER = Path(__file__).parents[2] / "docs" / "experiments"
PATHS = sorted(set(FOLDER.glob("*.json")) - {FOLDER / "audit.json"})  # which has numbers of logs, and is no report
NUMBERS = ("pairs", "difference", "interval", "p", "p_adjusted", "sd", "level", "critical")
WORDS = ("verdict", "direction", "against_delta", "diverged", "baseline_diverged", "rule")


def sample(row, more_baseline=()):
    """The losses of a row's pairs."""
    base, own = ([getattr(pair, side) for pair in row.by_seed] for side in ("baseline", "variant"))
    return Sample(base, own, more_baseline=more_baseline)


def recomputed(report, row):
    """The verdict of a row, from pairs alone and from what the report says of its design."""
    if row.kind == "null":
        found = verdicts({"null": sample(row)}, delta=report.delta, alpha=report.alpha)["null"]
        return with_window_error(found, row.window_error, report.delta)
    nulls = [pair.variant for null in report.of_kind("null") if null.size == row.size for pair in null.by_seed]
    variants = sum((each.kind, each.size) == ("result", row.size) for each in report.rows)
    looks = report.design.looks if report.sizes is None else [report.sizes.pairs]
    found = verdicts(
        {row.variant: sample(row, nulls if row.kind == "result" else ())},
        delta=report.delta,
        alpha=report.alpha,
        looks=looks,
        half_width=report.half_width,
        variants=variants,
    )
    return with_window_error(found[row.variant], row.window_error, report.delta)


@pytest.mark.parametrize("path", PATHS, ids=[path.stem for path in PATHS])
def test_a_stored_report_is_read_and_its_pairs_give_its_verdicts_again(path):
    report = Report.read(path)
    assert report.rows
    checked = 0
    for row in report.rows:
        if row.kind not in ("result", "tuned", "null") or not row.by_seed or report.kind == "stream":
            continue
        found = recomputed(report, row)
        of_row = {name: getattr(row, name) for name in NUMBERS}
        assert of_row == {name: getattr(found, name) for name in NUMBERS}, row.variant
        assert {name: getattr(row, name) for name in WORDS} == {name: getattr(found, name) for name in WORDS}
        checked += 1
    assert checked or report.kind == "stream" or not any(row.by_seed for row in report.rows)


def test_stored_effects_of_factors_are_those_of_the_pairs_of_all_combinations():
    reports = [report for report in map(Report.read, PATHS) if report.effects]
    assert reports
    for report in reports:
        results = {row.variant: row.by_seed for row in report.of_kind("result")}
        names = named_cells([name for name in results if "+" not in name])  # up to three factors have each alone
        losses = {cell: [pair.variant for pair in results[name]] for cell, name in names.items() if any(cell)}
        base = [pair.baseline for pair in next(iter(results.values()))]
        effects = factorial({next(iter(names)): base, **losses}, alpha=report.alpha, delta=report.delta)
        for row, effect in zip(report.effects, effects, strict=True):
            of_row = (row.kind, row.difference, row.interval, row.sd, row.p)
            assert of_row == (effect.kind, effect.difference, effect.interval, effect.sd, effect.p)
            differences = [pair.difference for pair in row.by_seed]
            assert sum(differences) / len(differences) == pytest.approx(row.difference)


def test_a_stored_stream_that_takes_more_ideas_hides_its_pairs():
    streams = [report for report in map(Report.read, PATHS) if report.kind == "stream"]
    assert streams
    for report in streams:
        assert report.stream.is_final or not any(row.by_seed for row in report.rows)


def test_each_stored_report_has_its_page():
    assert len(PATHS) > 15
    pages = {path.stem for path in FOLDER.glob("*.html")}
    assert pages <= {path.stem for path in PATHS}
