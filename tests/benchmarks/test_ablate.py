"""The bench of ``ablate``: its predictions, comparisons and counts; whole experiments are slow."""

import random
import subprocess
import sys
from functools import partial

import msgspec
import numpy as np
import pytest

from benchmarks import ablate, ablate_experiments
from benchmarks.__main__ import main
from benchmarks.ablate import PEEKING, WAYS, Way, predicted
from benchmarks.ablate_experiments import Experiment, differing, kill_all, killed, processes
from lightning_llm.ablate.report.record import VERSION
from lightning_llm.ablate.report.report import Report
from lightning_llm.io.processes import is_alive


@pytest.fixture
def rows_of(measured):
    return partial(measured, "ablate")


def test_predictions_are_those_that_are_known():
    assert predicted(WAYS["planned looks"], 1.0) == pytest.approx(0.936, abs=0.01)
    assert predicted(WAYS["planned looks, then two further ones"], 1.0) > 0.99
    assert predicted(WAYS[PEEKING], 0.0) == pytest.approx(0.098, abs=0.005)
    assert predicted(WAYS["planned looks"], 0.0) == pytest.approx(0.04, abs=0.003)
    # the first two further looks spend two thirds of the fifth that is held back
    assert predicted(WAYS["planned looks, then two further ones"], 0.0) == pytest.approx(0.0467, abs=0.002)
    assert predicted(WAYS["one look"], 0.0) == pytest.approx(0.05, abs=1e-9)
    for effect, pairs in ((0.5, 34), (0.75, 16), (1.0, 10), (1.5, 6), (2.0, 5)):  # the fewest with a power of 80 %
        assert predicted(Way([pairs - 1]), effect) < 0.8 <= predicted(Way([pairs]), effect)


def test_shares_of_verdicts_are_compared_with_their_predictions(rows_of, monkeypatch, capsys):
    losses = np.random.default_rng(0).normal(3.0, 0.01, (64, 2))
    monkeypatch.setattr(ablate, "pool", lambda: losses)
    monkeypatch.setattr(ablate, "NULLS", 100)
    monkeypatch.setattr(ablate, "PLANTED", 25)
    monkeypatch.setattr(ablate, "NULL_TOLERANCE", 0.04)
    monkeypatch.setattr(ablate, "POWER_TOLERANCE", 0.12)
    monkeypatch.setattr(ablate, "EFFECTS", (1.0,))
    rows = rows_of("--shapes", "null", "power")
    assert rows["planned looks"]["found"] == pytest.approx(0.05, abs=0.04)
    assert rows[PEEKING]["found"] > rows["planned looks"]["found"]
    assert rows["planned looks, 1 sd"]["found"] == pytest.approx(rows["planned looks, 1 sd"]["predicted"], abs=0.12)
    assert rows["planned looks, 1 sd"]["pairs"] < rows["one look, 1 sd"]["pairs"] == 16
    monkeypatch.setattr(ablate, "NULL_TOLERANCE", 0.0)
    rows_of("--shapes", "null", status=2)
    assert "planned looks: " in capsys.readouterr().err


def report(**changes):
    """A report of an experiment; ``changes`` are those of its fields."""
    row = {"difference": -0.1, "interval": [-0.2, 0.0], "verdict": "better", "direction": "better", "sentence": ""}
    row |= {"pairs": 4, "level": 0.95, "diverged": 0, "baseline_diverged": 0, "note": "", "warnings": []}
    row |= {"variant": "relu", "metric": "val_loss", "unit": "nats/token", "has_ended": True}
    step = {"step_s": 0.1, "step_p20_s": 0.1, "step_p80_s": 0.1, "peak_bytes": 7, "ratio_interval": None}
    step |= {"ratio": 1.0, "ratio_p20": 1.0, "ratio_p80": 1.0}
    content = {
        **{"version": VERSION, "kind": "experiment", "name": "a", "folder": "runs/a", "metric": "val_loss"},
        **{"unit": "nats/token", "alpha": 0.05, "level": 0.95, "rows": [row]},
        "design": {"plan": "1f"},
        "variants": {"relu": {"ratio": 1.0, "step": step, "training_s": 3.0}},
        "spent": {"runs": 9, "run_seconds": 31.5, "date": "a", "other_cores": 0.1},
        "tuning": {"option": "lr", "seeds": [0], "variants": {}, "runs": 4, "run_seconds": 3.5},
    }
    for path, value in changes.items():
        *outer, last = path.split(".")
        inner = content
        for name in outer:
            inner = inner[int(name) if name.isdecimal() else name]
        inner[last] = value
    return msgspec.convert(content, Report)


@pytest.mark.parametrize(
    ("path", "value", "names"),
    [
        ("variants.relu.step.step_s", 0.2, []),
        ("variants.relu.step.peak_bytes", 8, []),
        ("variants.relu.training_s", 4.0, []),
        ("spent.run_seconds", 90.0, []),
        ("spent.other_cores", 1.5, []),
        ("tuning.run_seconds", 90.0, []),
        ("variants.relu.training_s", None, ["variants.relu.training_s"]),
        ("design.plan", "2f", []),
        ("folder", "runs/b", []),
        ("design.seen", {"mlps": [0, 1]}, []),
        ("spent.runs", 10, ["spent.runs"]),
        ("rows.0.difference", -0.1 + 1e-12, ["rows.0.difference"]),
        ("rows.0.interval", [-0.2, 0.1], ["rows.0.interval.1"]),
        ("variants.relu.ratio", 1.1, ["variants.relu.ratio"]),
        ("variants.gelu", {}, ["variants.gelu"]),
    ],
)
def test_reports_are_equal_but_for_what_is_measured(path, value, names):
    other = report(**{path: value})
    assert differing(other, report()) == names
    assert sorted(differing(report(), other)) == sorted(names)
    assert differing(report(), report()) == []


def test_runs_are_counted_from_what_all_workers_have_written(tmp_path):
    one = Experiment(tmp_path, "x", {"variants": {}})
    (one.out / "logs").mkdir(parents=True)
    (one.out / "logs" / "runner.txt").write_text("a,seed=0: starting\na,seed=1: starting\na,seed=1: resuming\n")
    (tmp_path / "x-worker-1.txt").write_text("")
    (tmp_path / "x-worker-2.txt").write_text("a,seed=0: starting\n")
    assert one.count("starting") == {"a,seed=0": 2, "a,seed=1": 1}
    assert one.count("resuming") == {"a,seed=1": 1}
    assert sorted(one.taken()) == [False, True, True]


def test_only_processes_of_the_experiment_are_killed(tmp_path, monkeypatch):
    monkeypatch.setattr(ablate_experiments, "MOST_WAIT_S", 0.0)
    monkeypatch.setattr(ablate_experiments, "KINDS", ("all", ablate_experiments.COMMAND))

    def start(*words):
        return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", *words])

    class Endless(Experiment):
        def start(self):
            started.append(start(f"x ablate run {self.out}"))
            return started[-1]

    started, other = [], start(str(tmp_path / "runs" / "other"))
    try:
        process, kills = killed(Endless(tmp_path, "x"), 3, random.Random(0))
        assert (kills, process) == (3, started[-1])
        assert [each.wait() for each in started[:-1]] == [-9] * (len(started) - 1)
        assert is_alive(process.pid)
        kill_all(tmp_path / "runs" / "x")
        assert process.wait(60) == -9  # it would sleep for ten minutes
        assert other.poll() is None
        assert processes(tmp_path) == [other.pid]
    finally:
        for each in (*started, other):
            each.kill()
            each.wait()


def test_a_part_that_is_none_is_one_line(capsys):
    assert main(["ablate", "--shapes", "luck"]) == 2
    assert "there are null, power, tuning, kills, workers, throughput" in capsys.readouterr().err
