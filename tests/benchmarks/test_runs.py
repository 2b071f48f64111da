"""The bench of the shipped configs, made small."""

import json
import sys

import pytest

from benchmarks import runs
from benchmarks.__main__ import main


@pytest.mark.slow
def test_the_runs_are_those_that_a_user_makes(tmp_path, monkeypatch, text_file, quick_processes):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "executable", quick_processes.python)
    for name, value in quick_processes.environment.items():
        monkeypatch.setenv(name, value)
    words = [f"--data.path={text_file}", "--trainer.max_steps=2", "--trainer.val_check_interval=2"]
    assert main(["runs", "--shapes", "shakespeare", "--json", "rows.json", "--", *words]) == 0
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert [(row["variant"], row["seed"], row["steps"]) for row in rows] == [
        ("shakespeare-char.yaml", seed, 2) for seed in (1, 2, 3, None)
    ]
    assert len({row["val_loss"] for row in rows}) == 4
    assert not (tmp_path / "runs").exists()


def test_a_set_that_is_not_there_is_a_mistake(capsys):
    assert main(["runs", "--shapes", "hamlet"]) == 2
    assert "there are quickstart, shakespeare" in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_that_fails_says_why(tmp_path, monkeypatch):
    with pytest.raises(RuntimeError, match=r"nowhere\.yaml"):
        runs.fit(["--config=nowhere.yaml"], str(tmp_path))
