"""The report of a stream: lines, table, JSON, and page."""

import json

import numpy as np
import pytest
from msgspec.structs import replace

from lightning_llm.ablate.report.figures import staircase
from lightning_llm.ablate.report.from_stream import idea_lines, stream_report
from lightning_llm.ablate.report.report import Report
from lightning_llm.ablate.report.words import power_of_stream, stream_lines
from lightning_llm.ablate.stream import Asked, Confirmation, Mean, Stream, StreamRecord, Verdict
from lightning_llm.io.charts import canvas
from tests.ablate.test_experiment import ROOT

REASON = "12 fresh pairs: p 0.0012, at most its level of 0.0045"
TOO_LITTLE = "the screen of 3 pairs found too little: t is -0.80, and 0.5 is needed"
VERDICT = Verdict(
    place=1,
    name="<b>relu2",
    because="cheap",
    options={"model.architecture.mlp": "relu2"},
    match="flops",
    metric="val_loss",
    unit="nats/token",
    verdict="adopted",
    reason=REASON,
    screen=Mean(difference=-0.031, interval=(-0.04, -0.02), pairs=8, sd=0.012),
    level=0.0045,
    confirmation=Confirmation(
        difference=-0.02, interval=(-0.03, -0.01), pairs=12, sd=0.011, p=0.00123, median=-0.019, worst=0.002
    ),
    parameters=(100_000, 102_000),
    steps=(60, 70),
    runs=28,
    run_seconds=90.0,
    asked={},
    plan="0" * 64,
)
REJECTED = replace(
    VERDICT,
    place=2,
    name="b",
    verdict="rejected",
    reason=TOO_LITTLE,
    screen=Mean(difference=0.01, interval=(-0.01, 0.03), pairs=3, sd=0.016),
    confirmation=None,
    because="",
    run_seconds=30.0,
    parameters=(100_000, 100_500),
    steps=(70, 70),
)


@pytest.fixture
def stream(tmp_path):
    """Two ideas, of which the first was adopted, and a third without a verdict."""
    asked = Asked(baseline={"base.yaml": "0" * 64}, options=[])
    environment = {"precision": "32-true"}
    record = StreamRecord(
        asked=asked, alpha=0.05, looks=(12, 20), minimal_gain=0.0, workers=None, environment=environment
    )
    return Stream(tmp_path, record, [VERDICT, REJECTED], tmp_path / "ideas" / "0003-c")


def test_a_verdict_is_a_few_lines_and_the_decision_comes_first():
    assert idea_lines(VERDICT) == [
        f"<b>relu2: adopted (place 1 of the stream): {REASON}.",
        "Because: cheap",
        "Screen: difference -0.0310 (95% interval -0.0400 to -0.0200) nats/token after 8 pairs.",
        "Gain, on 12 fresh pairs: -0.0200 (95% interval -0.0300 to -0.0100) nats/token.",
        "Of the fresh pairs, the median is -0.0190, and the one with the least improvement +0.0020.",
        "Same flops; 102,000 parameters instead of 100,000; 70 steps instead of 60.",
        "28 runs were trained, 90.0 s together.",
    ]
    lines = idea_lines(REJECTED)
    assert not any("Because" in line or "fresh" in line for line in lines)
    assert "Same flops." in lines  # half a percent of the parameters is no difference to name
    none = idea_lines(replace(REJECTED, screen=Mean(difference=None, interval=None, pairs=0)))
    assert "Screen: difference – nats/token after 0 pairs." in none


def test_the_table_and_the_sentences_tell_what_was_tried(stream):
    report = stream_report(stream)
    found = report.to_markdown().splitlines()
    assert found[found.index("| idea | verdict | pairs | difference | 95% interval |") + 2 :][:2] == [
        "| 1. &lt;b>relu2 | adopted | 12 fresh | -0.0200 | -0.0300 to -0.0100 |",
        "| 2. b | rejected | 3 | +0.0100 | -0.0100 to +0.0300 |",
    ]
    page = report.write(stream.out).read_text()
    assert f"<td>1. &lt;b&gt;relu2</td><td>cheap</td><td>adopted</td><td>{REASON}</td>" in page
    assert f"<td>2. b</td><td>–</td><td>rejected</td><td>{TOO_LITTLE}</td>" in page
    numbers = "<td>8</td><td>-0.0310</td><td>-0.0400 to -0.0200</td><td>0.00123</td><td>0.0045</td><td>28</td>"
    assert f"<td>1. &lt;b&gt;relu2</td>{numbers}<td>90.0 s</td>" in page
    assert "<td>–</td><td>0.0045</td><td>28</td><td>30.0 s</td>" in page
    lines = stream_lines(report)
    assert lines[0] == "2 ideas, adopted: 1. <b>relu2; 2.0 minutes of runs."
    assert lines[1].startswith("0003-c has no verdict yet: lightning-llm ablate try ")
    assert lines[2] == "The next idea is adopted if p is at most 0.0076, after 12 or 20 fresh pairs."
    assert lines[3] == (
        "Improvements are adopted in these cases: of 0.007 in 7%, of 0.014 in 74%, of 0.021 in 98%, in nats/token. A "
        "pair's difference has a standard deviation of 0.014, the median of the ideas."
    )
    assert lines[4].endswith("useless ideas among the adopted ones is at most 5%.")
    assert "a difference is idea minus baseline, so a negative one is an improvement." in str(report)


def test_the_page_escapes_names_and_the_json_has_every_idea(stream):
    report = stream_report(stream)
    page = report.write(stream.out).read_text()
    assert "&lt;b&gt;relu2" in page
    assert "<b>relu2" not in page
    assert "<svg" in page
    assert "precision 32-true" in page
    assert Report.read(stream.out) == report
    content = json.loads((stream.out / "report.json").read_text())
    facts = content["stream"]
    assert (facts["adopted"], facts["gain"], facts["run_seconds"]) == ([1], -0.02, 120.0)
    assert [(row["variant"], row["kind"]) for row in content["rows"]] == [
        ("<b>relu2", "result"),
        ("<b>relu2", "confirmation"),
        ("b", "result"),
    ]
    idea = content["rows"][0]["idea"]
    assert (idea["place"], idea["because"], idea["match"], idea["plan"]) == (1, "cheap", "flops", "0" * 64)
    assert idea["options"] == VERDICT.options


def test_a_stream_without_a_verdict_has_a_page(stream):
    empty = stream_report(Stream(stream.out, stream.record, [], None))
    assert "<svg" not in empty.write(stream.out).read_text()
    assert stream_lines(empty)[0] == "0 ideas, adopted: none; 0 ms of runs."
    assert empty.rows == []


def test_where_higher_is_better_an_improvement_is_positive(stream):
    of_accuracy = {"metric": "-accuracy", "unit": "accuracy"}
    verdicts = [replace(verdict, **of_accuracy) for verdict in (VERDICT, REJECTED)]
    report = stream_report(Stream(stream.out, stream.record, verdicts, None))
    assert (report.metric, report.unit, report.higher_is_better) == ("accuracy", "accuracy", True)
    row, fresh, rejected = report.rows
    assert (row.difference, row.interval) == (0.031, (0.02, 0.04))
    assert (fresh.difference, fresh.interval) == (0.02, (0.01, 0.03))
    assert (rejected.difference, rejected.interval) == (-0.01, (-0.03, 0.01))
    assert report.stream.gain == 0.02
    lines = idea_lines(verdicts[0])
    assert "Screen: difference +0.0310 (95% interval +0.0200 to +0.0400) accuracy after 8 pairs." in lines
    assert "Of the fresh pairs, the median is +0.0190, and the one with the least improvement -0.0020." in lines


def test_the_staircase_goes_down_by_the_confirmed_difference(stream):
    with canvas(6, 3) as axes:
        staircase(axes[0], stream_report(stream))
        axis = axes[0, 0]
        line = next(line for line in axis.lines if line.get_drawstyle() == "steps-post")
        np.testing.assert_allclose(line.get_xdata(), [0.5, 1.5, 2.5, 3.0])
        np.testing.assert_allclose(line.get_ydata(), [0.0, -0.02, -0.02, -0.02])
        dots = [container.lines[0].get_xydata()[0] for container in axis.containers]
    np.testing.assert_allclose(dots, [[1, -0.031], [2, -0.02 + 0.01]])


def test_power_is_told_in_standard_deviations_until_one_is_known():
    assert power_of_stream((12, 20), None, 0.0, "nats/token") == (
        "Improvements are adopted in these cases: of 0.5 in 7%, of 1 in 74%, of 1.5 in 98%, in standard deviations of "
        "a pair's difference, which the first screen measures."
    )
    thorough = power_of_stream((24, 48), 0.02, 0.01, "nats/token")
    assert thorough.startswith(
        "Improvements beyond the minimal gain of 0.01 are adopted in these cases: of 0.01 in 25%"
    )


def test_a_report_by_the_earlier_rule_shows_its_evidence():
    report = Report.read(ROOT / "docs" / "experiments" / "stream-parts.json")
    assert report.stream.rule == "e-LOND"
    page = report._repr_html_()
    assert "<th>e-value</th><th>threshold</th>" in page
    assert "<td>0.217</td><td>40.6</td>" in page


def test_a_change_of_code_is_called_by_its_reason(stream):
    code = replace(VERDICT, name="05b45f47ad1d", options={}, because="the rate is low " + "and the run is short " * 4)
    report = stream_report(Stream(stream.out, stream.record, [code, replace(REJECTED, options={})], None))
    reason = "1. the rate is low and the run is short and the run is short…"
    assert f"| {reason} | adopted |" in report.to_markdown()
    assert "| 2. b | rejected |" in report.to_markdown()  # it has no reason
    assert stream_lines(report)[0].startswith(f"2 ideas, adopted: {reason}; ")
    assert f"1. 05b45f47ad1d</td><td>{code.because}</td>" in report.write(stream.out).read_text()
