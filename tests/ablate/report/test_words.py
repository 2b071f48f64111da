"""The report in words: what was matched, and how closely; digits; what a sign means."""

import math

import pytest

from lightning_llm.ablate.report.record import VERSION, Design, Variant, row_of
from lightning_llm.ablate.report.report import Report
from lightning_llm.ablate.report.words import (
    UNFINISHED,
    difference_of,
    digits_of,
    direction_line,
    interval_of,
    matched_lines,
    share_of,
)
from lightning_llm.statistics.verdict import Sample, verdicts


def report(match, **variants):
    """Of an experiment that matches something; the baseline has 200 steps."""
    base = variants.pop("baseline", Variant(steps=200))
    about = {"name": "test", "metric": "val_loss", "unit": "nats/token", "alpha": 0.05, "level": 0.95}
    design = Design(plan="0" * 64, match=match)
    return Report(version=VERSION, kind="experiment", variants={"baseline": base, **variants}, design=design, **about)


def test_a_report_says_how_closely_time_was_matched():
    a = Variant(steps=100, time_ratio_interval=(1.99, 2.024))
    b = Variant(steps=200, time_ratio_interval=(0.9999, 1.00001))
    assert matched_lines(report("time", a=a, b=b)) == ["Matched: time (a within ±1.2%, b within ±0.1%)."]


def test_a_plan_without_intervals_is_reported_by_the_time_measured_afterwards():
    base, a = Variant(steps=200, training_s=4.0), Variant(steps=100, training_s=5.0)
    assert matched_lines(report("time", baseline=base, a=a)) == ["Matched: time (a 1.25 times the baseline's)."]
    assert matched_lines(report("time", a=Variant(steps=100))) == ["Matched: time."]


def test_a_report_says_what_flops_leave_out():
    assert matched_lines(report("flops", a=Variant(ratio=1.021))) == [
        "Matched: flops (a 1.02 times the baseline's).",
        "FLOPs leave out the optimizer and recomputation.",
    ]
    assert matched_lines(report("tokens", a=Variant(ratio=1.0))) == ["Matched: tokens (a 1.00 times the baseline's)."]


def row(metric, base, own, **about):
    found = verdicts({"a": Sample(base, own)})["a"]
    return row_of(found, variant="a", metric=metric, unit=metric, **about)


BASE = [1.0, 1.5, 1.25, 1.75]
OWN = [1.1, 1.7, 1.3, 1.9]


@pytest.mark.parametrize(
    ("scale", "digits", "difference"),
    [
        (1.0, 4, "+0.1250"),  # half of the interval is 0.1: four digits at least
        (1e-4, 6, "+0.000013"),
        (1e-30, 10, "+0.0000000000"),  # at most ten
        (1e2, 0, "+13"),  # 12.5 ± 10
        (1e4, 0, "+1250"),
    ],
)
def test_digits_of_another_programs_metric_follow_its_error(scale, digits, difference):
    found = row("score", [scale * value for value in BASE], [scale * value for value in OWN])
    low, high = found.interval
    assert high - low == pytest.approx(0.205 * scale, rel=0.01)
    assert digits_of(found) == digits
    assert difference_of(found) == difference
    assert interval_of(found) == f"{low:+.{digits}f} to {high:+.{digits}f}"


def test_digits_without_an_interval_are_those_of_the_difference_and_of_a_known_metric_its_own():
    single = row("score", [1.0], [1.00012345])
    assert (single.interval, digits_of(single)) == (None, 5)
    assert digits_of(row("score", [1.0, 1.0], [1.0, 1.0])) == 4
    assert digits_of(row("score", [1.0], [math.nan])) == 4
    assert digits_of(row("seconds", [1.0], [1.00012345])) == 1
    assert digits_of(row("peak_memory_gib", [1.0], [1.00012345])) == 3
    assert digits_of(row("val_loss", BASE, OWN)) == 4


@pytest.mark.parametrize(
    ("scale", "digits", "difference"), [(1.0, 2, "+0.12"), (1e-3, 5, "+0.00013"), (1e2, 1, "+12.5")]
)
def test_digits_of_a_cost_show_its_error(scale, digits, difference):
    found = row("seconds", [scale * value for value in BASE], [scale * value for value in OWN])
    assert digits_of(found) == digits
    assert difference_of(found) == difference


def test_a_cost_has_a_percentage_and_a_loss_has_none():
    assert share_of(row("seconds", BASE, OWN, baseline_mean=1.25)) == " (+10.0%)"
    assert share_of(row("seconds", BASE, OWN)) == ""
    assert share_of(row("val_loss", BASE, OWN, baseline_mean=1.25)) == ""


def test_the_sign_of_an_improvement_is_said():
    found = report("tokens")
    assert direction_line(found) == (
        "no delta; a difference is variant minus baseline, so a negative one is an improvement."
    )
    found.higher_is_better, found.delta = True, 0.5
    assert direction_line(found) == (
        "delta 0.5 nats/token; a difference is variant minus baseline, higher values are better, so a positive one is "
        "an improvement."
    )


def test_a_report_of_an_experiment_that_goes_on_says_so():
    found = report("tokens")
    assert UNFINISHED not in str(found)
    found.has_ended = False
    assert UNFINISHED in str(found).splitlines()
