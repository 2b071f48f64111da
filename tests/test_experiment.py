"""Experiments in Python: run, report, and what they refuse."""

import random
import sys
from pathlib import Path

import pytest
import yaml

from lightning_llm import Experiment
from lightning_llm.ablate.report.report import Report

PROGRAM = """
import random, sys
seed, lr = int(sys.argv[1]), float(sys.argv[2].partition("=")[2])
print("loss", 3 + random.Random(seed).gauss(0, 0.1) - 0.1 * (lr == 3) + random.Random(seed + lr).gauss(0, 0.01))
"""
KEYS = {
    "command": f"{sys.executable} program.py {{seed}} {{options}}",
    "read": "loss {number}",
    "options": {"lr": 1},
    "variants": {"high": {"lr": 3}},
    "metric": "loss",
    "pairs": 8,
}


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("program.py").write_text(PROGRAM)


def expected(seed, lr):
    noise = random.Random(seed + float(lr)).gauss(0, 0.01)
    return 3 + random.Random(seed).gauss(0, 0.1) - 0.1 * (lr == 3) + noise


@pytest.fixture
def keys():
    command = f"sh -c '{sys.executable} program.py {{seed}} {{options}} # {{run}}'"
    return {**KEYS, "command": command}


def test_an_experiment_runs_and_reports(keys, capsys):
    experiment = Experiment(**keys, name="rate")
    assert "high" in repr(experiment)
    with pytest.raises(ValueError, match="runs/rate does not exist yet: call run first"):
        experiment.report()
    report = experiment.run(workers=2)
    assert isinstance(report, Report)
    row = report["high"]
    differences = [expected(seed, 3) - expected(seed, 1) for seed in range(8)]
    assert [pair.difference for pair in row.by_seed] == pytest.approx(differences)
    assert row.verdict == "better"
    assert "run 17/17" in capsys.readouterr().out  # with the baseline once more
    shown = report._repr_html_()
    assert "<svg" in shown
    assert "high" in shown
    assert experiment.report() == report
    assert Report.read(experiment.folder) == report


def test_what_has_ended_is_not_trained_again(keys, capsys):
    first = Experiment(**keys, name="rate").run(workers=2)
    Path("program.py").unlink()  # nothing could be trained any more
    Path("program.py").write_text(PROGRAM)
    capsys.readouterr()
    assert Experiment(**keys, name="rate").run(workers=2).rows == first.rows
    assert "run 1/" not in capsys.readouterr().out


def test_mistakes_are_said_at_once(keys):
    with pytest.raises(ValueError, match="Experiment"):
        Experiment(**{**keys, "paris": 8})
    with pytest.raises(ValueError, match="nothing is compared"):
        Experiment(command=keys["command"], metric="loss", read="loss {number}")


def test_a_command_that_fails_is_one_line_and_said_once(keys, capsys):
    with pytest.raises(RuntimeError) as failed:
        Experiment(**{**keys, "command": "sh -c 'exit 3 # {seed} {options} {run}'"}, name="broken").run(workers=1)
    assert "\n" not in str(failed.value)
    assert "status 3" in str(failed.value)
    assert "error: " not in str(failed.value)
    assert str(failed.value) not in capsys.readouterr().out


def test_a_file_runs_its_command_only_if_it_is_trusted(keys):
    Path("file.yaml").write_text(yaml.safe_dump(keys))
    with pytest.raises(RuntimeError, match="--trust-code"):
        Experiment("file.yaml").run()
    assert not list(Path("runs").glob("**/summary.json"))
    assert Experiment("file.yaml", trust_code=True).run(workers=2)["high"].verdict == "better"
