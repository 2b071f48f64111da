"""The record of a report: rows in the metric's own values, and files that are read back."""

import dataclasses
import json
import math

import pytest

from lightning_llm.ablate import verdict
from lightning_llm.ablate.report.record import NOT_TESTED, Pair, row_of
from lightning_llm.ablate.report.report import Report
from lightning_llm.statistics.verdict import Sample, Verdict, verdicts

BASE = [3.0, 3.1, 3.2, 3.3, 3.4, 3.5, 3.6, 3.7]
OWN = [value - shift for value, shift in zip(BASE, (0.01, 0.012, 0.011, 0.013, 0.01, 0.012, 0.3, 0.011), strict=True)]
ABOUT = {"variant": "a", "metric": "score", "unit": "score"}


def pairs(base, own, seeds=range(10, 18)):
    return [Pair(*each) for each in zip(seeds, base, own, strict=True)]


def test_a_row_is_its_verdict_and_outliers_are_seeds():
    found = verdicts({"a": Sample(BASE, OWN)})["a"]
    row = row_of(found, by_seed=pairs(BASE, OWN), **ABOUT)
    assert found.robust.outliers == [6]
    assert row.robust.outliers == [16]
    for field in dataclasses.fields(Verdict):
        if field.name != "robust":
            assert getattr(row, field.name) == getattr(found, field.name)
    base = [None, *BASE[1:]]  # indices are those of the pairs that are left
    found = verdicts({"a": Sample(base, OWN)})["a"]
    assert found.robust.outliers == [5]
    assert row_of(found, by_seed=pairs(base, OWN), **ABOUT).robust.outliers == [16]


def test_where_higher_is_better_all_values_of_a_row_have_the_other_sign():
    own = [value + 2 * BASE[0] - 6 for value in OWN]
    found = verdicts({"a": Sample([-value for value in own], [-value for value in BASE])})["a"]
    minus = [Pair(pair.seed, -pair.baseline, -pair.variant) for pair in pairs(own, BASE)]
    means = {"baseline_mean": -math.fsum(own) / 8, "mean": -math.fsum(BASE) / 8}
    row = row_of(found, by_seed=minus, higher_is_better=True, **means, **ABOUT)
    truth = verdicts({"a": Sample(own, BASE)})["a"]  # of the values as they are, where a lower one were better
    assert row.higher_is_better
    assert row.by_seed == pairs(own, BASE)
    assert (row.baseline_mean, row.mean) == (math.fsum(own) / 8, math.fsum(BASE) / 8)
    assert row.difference == pytest.approx(truth.difference)
    assert row.interval == pytest.approx(truth.interval)
    assert row.robust.median == pytest.approx(truth.robust.median)
    assert row.robust.skewness == pytest.approx(truth.robust.skewness)
    assert row.robust.without_outliers == pytest.approx(truth.robust.without_outliers)
    assert (row.p, row.sd, row.correlation) == pytest.approx((truth.p, truth.sd, truth.correlation))
    assert row.robust.outliers == [16]
    assert f"the difference is {truth.robust.without_outliers:+.4f}" in row.warnings[-1]
    assert not any(f"{-truth.robust.without_outliers:+.4f}" in warning for warning in row.warnings)


def test_a_direction_is_named_for_what_is_better():
    lower = verdict({"baseline": BASE, "a": [value - 0.1 * (1 + n % 3) for n, value in enumerate(BASE)]})["a"]
    higher = verdict(
        {"baseline": BASE, "a": [value + 0.1 * (1 + n % 3) for n, value in enumerate(BASE)]}, metric="-accuracy"
    )["a"]
    assert (lower.direction, higher.direction) == ("better", "better")
    assert lower.difference < 0 < higher.difference
    assert higher.interval == pytest.approx([-end for end in reversed(lower.interval)])


def test_a_row_before_its_first_look_has_no_numbers():
    row = row_of(None, **ABOUT)
    assert (row.verdict, row.note, row.is_tested, row.pairs) == ("undecided", NOT_TESTED, False, 0)
    assert (row.difference, row.interval, row.p) == (None, None, None)


@pytest.fixture
def report():
    return verdict({"baseline": BASE, "a": OWN, "failed": [math.nan, *OWN[1:]]}, delta=0.05)


def test_a_report_is_read_from_its_folder_or_its_file(report, tmp_path):
    report.write(tmp_path)
    assert Report.read(tmp_path) == report
    assert Report.read(tmp_path / "report.json") == report
    assert json.loads((tmp_path / "report.json").read_text()) == json.loads(report.to_json())


@pytest.mark.parametrize("version", [1, 2, 4])
def test_a_report_of_another_version_is_one_line(report, tmp_path, version):
    path = tmp_path / "report.json"
    path.write_text(json.dumps({**report.to_dict(), "version": version}))
    with pytest.raises(ValueError, match=rf"report.json has version {version}, and this .* reads version 3$") as raised:
        Report.read(tmp_path)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", "is no file of this program: Input data was truncated"),
        ("[]", "is no file of this program: Expected `object`, got `array`"),
        ('{"version": 3}', "is no file of this program: Object missing required field `kind`"),
        ('{"version": "3"}', r"is no file of this program: Expected `int`, got `str` - at `\$.version`"),
    ],
)
def test_a_damaged_report_is_one_line(tmp_path, content, says):
    path = tmp_path / "report.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=says) as raised:
        Report.read(path)
    assert "\n" not in str(raised.value)
    assert str(path) in str(raised.value)


def test_a_row_that_is_not_there_is_an_error_that_names_those_that_are(report):
    assert report["a"].variant == "a"
    with pytest.raises(KeyError, match="'gelu' is none of the variants a, failed"):
        report["gelu"]


def test_means_of_variants_are_at_the_paired_difference(report):
    base = report.variants["baseline"].means["loss"].value
    assert report.mean_of("baseline") == base
    assert report.mean_of("a") == pytest.approx(base + report["a"].difference)
    assert report.mean_of("failed") is None
