"""What is said of a run while it trains, on a terminal and without one, and what other commands read."""

import io
import json
import math
import re
import types
from pathlib import Path

import pytest

from lightning_llm.io.console import Console
from lightning_llm.training.callbacks import StatusFile, StepProgressBar
from lightning_llm.training.trainer import Trainer

STATUS = Path("runs/run/version_0/status.json")


def shown(tiny, monkeypatch, *, is_terminal):
    """All that the bar of a tiny run writes."""
    written = io.StringIO()

    def bar_of(trainer, *_):
        bar = next(callback for callback in trainer.callbacks if isinstance(callback, StepProgressBar))
        bar.console = Console(file=written, force_terminal=is_terminal, width=160)
        return []

    monkeypatch.setattr(Trainer, "preflight", bar_of)
    tiny("fit")
    return written.getvalue()


def test_without_a_terminal_each_validation_is_a_line(tiny, monkeypatch):
    lines = shown(tiny, monkeypatch, is_terminal=False).splitlines()
    assert [line.split("  ")[0] for line in lines] == ["step 3", "step 6"]
    for word in ("loss ", "val ", "lr ", "|g| ", " tokens/s"):
        assert word in lines[1]


def test_on_a_terminal_the_bar_counts_steps(tiny, monkeypatch):
    text = shown(tiny, monkeypatch, is_terminal=True)
    assert "0/6" in text
    assert "6/6" in text
    assert "tokens/s" in text


def test_the_status_of_a_run_is_in_its_file(finished):
    status = json.loads(STATUS.read_text())
    assert (status["status"], status["step"]) == ("finished", 6)
    assert status["val_loss"] == pytest.approx(json.loads(STATUS.with_name("summary.json").read_text())["val_loss"])


def test_a_resumed_run_counts_the_time_before_its_checkpoint(tiny, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        patch.setattr(StatusFile, "state_dict", lambda self: {"seconds": 1000.0})
        tiny("fit")
    summary = STATUS.with_name("summary.json")
    assert json.loads(summary.read_text())["seconds"] < 1000
    tiny("fit", "--ckpt_path", "last")  # no steps are left
    assert json.loads(summary.read_text())["seconds"] == 1000
    capsys.readouterr()
    tiny("fit", "--ckpt_path", "last", **{"trainer.max_steps": 8})
    assert 1000 < json.loads(summary.read_text())["seconds"] < 2000
    (printed,) = re.findall(r"2 steps in (\S+) s", capsys.readouterr().out)  # those of this process
    assert float(printed) < 1000


def test_a_trainer_that_trains_twice_counts_both(monkeypatch):
    clock = iter([10.0, 13.0, 100.0, 104.0])
    monkeypatch.setattr(
        "lightning_llm.training.callbacks.progress.time", types.SimpleNamespace(perf_counter=clock.__next__)
    )
    status = StatusFile()
    for total in (3.0, 7.0):
        status.on_train_start(None, None)
        status.on_train_end(None, None)
        assert status.seconds == total
    assert status.state_dict() == {"seconds": 7.0}


@pytest.mark.parametrize("seconds", ["1", -1.0, math.nan, math.inf, 10**400, True, None])
def test_a_checkpoint_cannot_set_a_time_that_is_none(seconds):
    status = StatusFile()
    status.load_state_dict({"seconds": seconds})
    assert status.seconds == 0
