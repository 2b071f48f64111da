"""The report of a stream: lines, table, JSON, and page."""

import json

import numpy as np
import pytest
from lightning_llm.ablate.stream_report import (
    HEAD,
    MORE,
    draw,
    lines_of,
    rows_of,
    stream_report,
    summary_of,
    write_stream_report,
)
from msgspec.structs import replace

from lightning_llm.ablate.stream import Asked, Mean, Stream, StreamRecord, Verdict
from lightning_llm.io.charts import canvas

VERDICT = Verdict(
    place=1,
    name="<b>relu2",
    because="cheap",
    options={"model.architecture.mlp": "relu2"},
    match="flops",
    metric="val_loss",
    verdict="adopted",
    reason="8 fresh pairs: the interval -0.0300 to -0.0100 lies below 0",
    difference=-0.031,
    interval=(-0.04, -0.02),
    pairs=6,
    e_value=81.2345,
    threshold=40.55,
    confirmation=Mean(difference=-0.02, interval=(-0.03, -0.01), pairs=8),
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
    reason="the e-value is below 1",
    pairs=4,
    confirmation=None,
    because="",
    difference=0.01,
    interval=(-0.01, 0.03),
    run_seconds=30.0,
    parameters=(100_000, 100_500),
    steps=(70, 70),
)


@pytest.fixture
def stream(tmp_path):
    """Two ideas, of which the first was adopted, and a third without a verdict."""
    asked = Asked(baseline={"base.yaml": "0" * 64}, options=[])
    environment = {"precision": "32-true"}
    record = StreamRecord(asked=asked, alpha=0.05, most=24, workers=None, environment=environment)
    return Stream(tmp_path, record, [VERDICT, REJECTED], tmp_path / "ideas" / "0003-c")


def test_a_verdict_is_a_few_lines_and_the_decision_comes_first():
    assert lines_of(VERDICT) == [
        "<b>relu2: adopted (place 1 of the stream): 8 fresh pairs: the interval -0.0300 to -0.0100 lies below 0.",
        "Because: cheap",
        "Difference -0.0310 (95% interval -0.0400 to -0.0200) nats/token after 6 pairs.",
        "On 8 fresh pairs: -0.0200 (95% interval -0.0300 to -0.0100) nats/token.",
        "E-value 81.2, threshold 40.5.",
        "Same flops; 102,000 parameters instead of 100,000; 70 steps instead of 60.",
        "28 runs were trained, 90.0 s together.",
    ]
    lines = lines_of(REJECTED)
    assert not any("Because" in line or "fresh" in line for line in lines)
    assert "Same flops." in lines  # half a percent of the parameters is no difference to name
    none = lines_of(replace(REJECTED, difference=None, interval=None, pairs=0))
    assert "Difference – nats/token after 0 pairs." in none


def test_the_table_and_the_sentences_tell_what_was_tried(stream):
    rows = rows_of(stream)
    assert [row[:5] for row in rows] == [
        ["1. <b>relu2 – cheap", "adopted", "6", "-0.0310", "-0.0400 to -0.0200"],
        ["2. b", "rejected", "4", "+0.0100", "-0.0100 to +0.0300"],
    ]
    assert all(len(row) == len(HEAD) + len(MORE) for row in rows)
    lines = summary_of(stream)
    assert lines[0] == "2 ideas, adopted: 1. <b>relu2; 2.0 minutes of runs."
    assert lines[1].startswith("0003-c has no verdict yet: lightning-llm ablate try ")
    assert lines[2] == "An idea at place 3 has to reach an e-value of 162 within 24 pairs."
    assert lines[3].endswith("useless ideas among the adopted ones is at most 5%.")


def test_the_page_escapes_names_and_the_json_has_every_idea(stream):
    page = write_stream_report(stream).read_text()
    assert "&lt;b&gt;relu2" in page
    assert "<b>relu2" not in page
    assert "<svg" in page
    assert "precision 32-true" in page
    report = json.loads((stream.out / "report.json").read_text())
    assert report == json.loads(json.dumps(stream_report(stream)))
    assert (report["adopted"], report["gain"], report["run_seconds"]) == ([1], -0.02, 120.0)
    assert [idea["name"] for idea in report["ideas"]] == ["<b>relu2", "b"]


def test_a_stream_without_a_verdict_has_a_page(stream):
    empty = Stream(stream.out, stream.record, [], None)
    assert "<svg" not in write_stream_report(empty).read_text()
    assert summary_of(empty)[0] == "0 ideas, adopted: none; 0 ms of runs."


def test_the_staircase_goes_down_by_the_confirmed_difference(stream):
    with canvas(6, 3) as axes:
        draw(axes[0], stream_report(stream))
        axis = axes[0, 0]
        line = next(line for line in axis.lines if line.get_drawstyle() == "steps-post")
        np.testing.assert_allclose(line.get_xdata(), [0.5, 1.5, 2.5, 3.0])
        np.testing.assert_allclose(line.get_ydata(), [0.0, -0.02, -0.02, -0.02])
        dots = [container.lines[0].get_xydata()[0] for container in axis.containers]
    np.testing.assert_allclose(dots, [[1, -0.031], [2, -0.02 + 0.01]])
