"""The model of the network behind ``benchmarks process-scaling``, and the bench on two processes."""

import json

import pytest

from benchmarks.__main__ import main
from benchmarks.process_scaling import LARGE, SMALL, _rows, link_of, ring_seconds
from lightning_llm.bench.harness import Request

COUNTS = [1, 2]
SIZES = {"layers": 4, "hidden": 256, "context": 128, "rows": 2}
ASKED = Request(bench="process-scaling", shape="4x256x128x2", sizes=SIZES)


def found(step=1.0, apart=1.0, two=1.5, latency=1e-4, bandwidth=1e9, gradient_bytes=4e8, backward=0.4):
    links = [ring_seconds(2, size, latency, bandwidth) for size in (SMALL, LARGE)]
    return {
        "taken": {1: [step], 2: [two], 0: [apart]},
        "wire": {1: 0, 2: 1000},
        "links": {2: links},
        "gradient_bytes": gradient_bytes,
        "backward": backward,
    }


def test_latency_and_bandwidth_come_back_from_two_times():
    for processes in (2, 4, 7):
        times = [ring_seconds(processes, size, 3e-5, 5e9) for size in (SMALL, LARGE)]
        latency, bandwidth = link_of(processes, *times)
        assert latency == pytest.approx(3e-5, rel=1e-3)
        assert bandwidth == pytest.approx(5e9, rel=1e-3)


def test_a_ring_moves_twice_the_bytes_once_there_are_many():
    assert ring_seconds(1, 1e9, 1.0, 1e9) == 0
    assert ring_seconds(2, 1e9, 0, 1e9) == pytest.approx(1)
    assert ring_seconds(1000, 1e9, 0, 1e9) == pytest.approx(2, rel=2e-3)


def test_what_was_exposed_with_two_is_exposed_with_more():
    rows = {row.variant: row for row in _rows(found(), COUNTS, ASKED)}
    assert rows["1"].ratio == 1
    assert rows["2"].ratio == pytest.approx(1 / 1.5)
    assert rows["2"].tokens_per_s == pytest.approx(2 * 2 * 128 / 1.5)
    assert rows["2"].wire_bytes == 1000
    # two exchange for 0.4 s and show 0.5: nothing is hidden
    exchange = ring_seconds(8, 4e8, 1e-4, 1e9)
    assert rows["8 (predicted)"].total_s == pytest.approx(1 + exchange, rel=1e-6)
    assert rows["8 (predicted)"].wire_bytes == pytest.approx(2 * 7 * 4e8)


def test_backward_hides_what_it_hid_with_two():
    rows = {row.variant: row for row in _rows(found(two=1.0), COUNTS, ASKED)}
    exchange = ring_seconds(64, 4e8, 1e-4, 1e9)
    hidden = ring_seconds(2, 4e8, 1e-4, 1e9)  # all of it, and no more is known to fit
    assert rows["64 (predicted)"].total_s == pytest.approx(1 + exchange - min(hidden, 0.4), rel=1e-6)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--shapes", "4x256"], "must be layers x hidden x context x rows"),
        (["--variants", "4096"], "numbers of processes from 1 to"),
        (["--variants", "two"], "numbers of processes from 1 to"),
    ],
)
def test_bad_input(words, named, capsys):
    assert main(["process-scaling", *words]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()[-1:]
    assert named in line


@pytest.mark.slow
def test_two_processes_exchange_the_gradients_once_a_step(tmp_path):
    path = tmp_path / "rows.json"
    words = ["--shapes", "2x64x32x1", "--variants", "1", "2", "--rounds", "1", "--json", str(path)]
    assert main(["process-scaling", *words]) == 0
    one, two, *predicted = json.loads(path.read_text())["rows"]
    assert (one["variant"], two["variant"]) == ("1", "2")
    gradients = 4 * (2 * 4096 * 64 + 2 * (4 * 64**2 + 3 * 64 * 192 + 2 * 64) + 64)
    # a ring of two sends each gradient twice; the headers of TCP and the barriers come on top
    assert 2 * gradients < two["wire_bytes"] < 2.6 * gradients
    assert [row["variant"] for row in predicted] == ["8 (predicted)", "64 (predicted)"]
