"""Whatever ends a training command is one line and an exit status."""

import argparse
import signal
import threading

import pytest

from lightning_llm.cli import ends
from lightning_llm.cli.interrupts import interrupts
from lightning_llm.training.callbacks.non_finite import NonFinite
from lightning_llm.training.callbacks.signals import Interrupted

WORDS = ["fit", "--config", "a.yaml"]


@pytest.fixture(autouse=True)
def _signals_as_they_are(monkeypatch):
    monkeypatch.setattr(type(interrupts), "hold_off", lambda self: None)


@pytest.mark.parametrize(
    ("error", "status", "says"),
    [
        (ValueError("it is wrong"), 2, "lightning-llm fit: error: it is wrong"),
        (argparse.ArgumentError(None, "no such option"), 2, "lightning-llm fit: error: no such option"),
        (
            FileNotFoundError(2, "No such file or directory", "a.yaml"),
            2,
            "lightning-llm fit: error: No such file or directory: a.yaml",
        ),
        (NonFinite("the loss is NaN"), 1, "lightning-llm fit: stopped: the loss is NaN"),
        (MemoryError("9 GiB"), 1, "lightning-llm fit: out of memory: 9 GiB"),
        (
            Interrupted(signal.SIGTERM, 7),
            143,
            "lightning-llm fit: interrupted by SIGTERM after step 7; nothing is lost.",
        ),
        (Interrupted(signal.SIGINT, 7, is_saved=False), 130, "after step 7; no checkpoint was saved: the run has none"),
    ],
)
def test_one_line_and_a_status(capsys, error, status, says):
    assert ends.report(error, "fit", WORDS) == status
    (line,) = capsys.readouterr().err.splitlines()
    assert says in line


@pytest.mark.parametrize("error", [RuntimeError("a bug"), KeyError("another")])
def test_what_nobody_expected_is_left_to_the_caller(capsys, error):
    assert ends.report(error, "fit", WORDS) is None
    assert capsys.readouterr().err == ""


def test_an_interrupted_job_says_whether_it_is_queued_again(capsys, monkeypatch):
    interruption = Interrupted(signal.SIGUSR1, 3, requeue=True)
    monkeypatch.setattr(ends, "requeue_job", lambda: "42")
    ends.report(interruption, "fit", WORDS)
    assert capsys.readouterr().err.splitlines()[1:] == ["SLURM queues job 42 again"]

    def refuse():
        raise OSError("scontrol is missing")

    monkeypatch.setattr(ends, "requeue_job", refuse)
    ends.report(interruption, "fit", WORDS)
    assert capsys.readouterr().err.splitlines()[1:] == ["the job could not be queued again: scontrol is missing"]


@pytest.mark.parametrize(("error", "is_reported"), [(OSError("disk full"), False), (ValueError("a bug"), True)])
def test_an_error_of_a_thread_is_reported_unless_it_will_be_raised_again(capsys, error, is_reported):
    ends.of_thread(threading.ExceptHookArgs((type(error), error, None, None)))
    assert ("failed: ValueError: a bug" in capsys.readouterr().err) == is_reported
