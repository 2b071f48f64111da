"""What is said of a run while it trains, on a terminal and without one, and what other commands read."""

import io
import json
from pathlib import Path

import pytest

from lightning_llm.io.console import Console
from lightning_llm.training.callbacks import StepProgressBar
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


def test_the_status_of_a_run_is_in_its_file(tiny):
    tiny("fit")
    status = json.loads(STATUS.read_text())
    assert (status["status"], status["step"]) == ("finished", 6)
    assert status["val_loss"] == pytest.approx(json.loads(STATUS.with_name("summary.json").read_text())["val_loss"])
