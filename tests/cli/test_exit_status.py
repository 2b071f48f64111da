"""Whatever ends a training command is one line and an exit status."""

import argparse
import errno
import os
import signal
import threading
from pathlib import Path

import pytest
import torch

from lightning_llm.cli import exit_status
from lightning_llm.cli.interrupts import interrupts
from lightning_llm.training.callbacks.non_finite import NonFinite
from lightning_llm.training.callbacks.signals import Interrupted
from lightning_llm.training.callbacks.throughput import TrainingLog

WORDS = ["fit", "--config", "a.yaml"]


@pytest.fixture(autouse=True)
def _signals_as_they_are(monkeypatch):
    monkeypatch.setattr(type(interrupts), "ignore_signals", lambda self: None)


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
    assert exit_status.exit_status_of(error, "fit", WORDS) == status
    (line,) = capsys.readouterr().err.splitlines()
    assert says in line


@pytest.mark.parametrize("error", [RuntimeError("a bug"), KeyError("another")])
def test_what_nobody_expected_is_left_to_the_caller(capsys, error):
    assert exit_status.exit_status_of(error, "fit", WORDS) is None
    assert capsys.readouterr().err == ""


def test_an_interrupted_job_says_whether_it_is_queued_again(capsys, monkeypatch):
    interruption = Interrupted(signal.SIGUSR1, 3, requeue=True)
    monkeypatch.setattr(exit_status, "requeue_job", lambda: "42")
    exit_status.exit_status_of(interruption, "fit", WORDS)
    assert capsys.readouterr().err.splitlines()[1:] == ["SLURM queues job 42 again"]

    def refuse():
        raise OSError("scontrol is missing")

    monkeypatch.setattr(exit_status, "requeue_job", refuse)
    exit_status.exit_status_of(interruption, "fit", WORDS)
    assert capsys.readouterr().err.splitlines()[1:] == ["the job could not be queued again: scontrol is missing"]


@pytest.mark.parametrize(("error", "is_reported"), [(OSError("disk full"), False), (ValueError("a bug"), True)])
def test_an_error_of_a_thread_is_reported_unless_it_will_be_raised_again(capsys, error, is_reported):
    exit_status.report_thread_error(threading.ExceptHookArgs((type(error), error, None, None)))
    assert ("failed: ValueError: a bug" in capsys.readouterr().err) == is_reported


def full(*args, **kwargs):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_an_error_without_words_gets_some(capsys):
    assert exit_status.exit_status_of(MemoryError(), "fit", WORDS) == 1
    assert "out of memory: the system gives this process no more (docs/memory.md)" in capsys.readouterr().err
    assert exit_status.exit_status_of(ValueError(), "fit", WORDS) == 2
    assert "fit: error: ValueError (docs/" in capsys.readouterr().err


@pytest.mark.parametrize("saves", [0, 1])
def test_a_full_disk_names_the_file_and_what_to_do(tiny, error_line, monkeypatch, saves):
    save, made = torch.save, []

    def saved(*args, **kwargs):
        made.append(args)
        return save(*args, **kwargs) if len(made) <= saves else full()

    monkeypatch.setattr(torch, "save", saved)
    with pytest.raises(SystemExit, match="2"):
        tiny("fit")
    said = error_line()
    step = 3 * (saves + 1)
    file = f"runs/run/version_0/checkpoints/step-0000000{step}.ckpt"
    assert f"error: cannot save the checkpoint: No space left on device: {file}; " in said
    first = "no checkpoint was saved: free some space and start again"
    later = "earlier checkpoints are untouched: free some space and resume with --ckpt_path last"
    assert said.endswith(f"; {later if saves else first} (docs/resume.md)")
    monkeypatch.undo()


@pytest.mark.parametrize("hook", ["on_train_start", "on_validation_end"])
def test_a_full_disk_where_no_file_is_named_advises_by_what_was_saved(tiny, error_line, monkeypatch, hook):
    monkeypatch.setattr(TrainingLog, hook, full)
    with pytest.raises(SystemExit, match="2"):
        tiny("fit", **{"trainer.val_check_interval": 2})
    said = error_line()
    assert "error: No space left on device; no checkpoint was saved: free some space and start again (docs/" in said


def test_a_folder_that_became_read_only_is_named_by_the_file_that_was_to_be_written(tiny, error_line, monkeypatch):
    replace = os.replace

    def refused(source, target):
        if Path(target).name == "status.json" and Path(target).exists():
            raise PermissionError(errno.EPERM, "Operation not permitted", str(source), None, str(target))
        replace(source, target)

    monkeypatch.setattr(os, "replace", refused)
    with pytest.raises(SystemExit, match="2"):
        tiny("fit")
    said = error_line()
    assert "error: Operation not permitted: runs/run/version_0/status.json; " in said
    assert "make it writable and " in said
    assert ".tmp" not in said
    assert said.endswith("(docs/resume.md)")


def test_a_file_that_is_not_of_the_run_gets_no_advice_about_checkpoints(tiny, error_line):
    with pytest.raises(SystemExit, match="2"):
        tiny("fit", **{"data.path": "nowhere.txt"})
    assert "checkpoint" not in error_line()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            {"model.schedule.class_path": "lightning_llm.optim.WarmupCosine"}
            | {f"model.schedule.init_args.{name}": value for name, value in (("warmup_steps", 10), ("decay_steps", 5))},
            "error: model.schedule: WarmupCosine: decay_steps 5 must not be before warmup_steps 10 (docs/",
        ),
        (
            {"trainer.callbacks": [{"class_path": "lightning_llm.training.callbacks.SampleText"}]},
            "error: trainer.callbacks",
        ),
        (
            {
                "trainer.callbacks": [
                    {
                        "class_path": "lightning_llm.training.callbacks.SampleText",
                        "init_args": {"every_n_steps": 4, "prompt": "a", "top_k": 0},
                    }
                ]
            },
            "error: trainer.callbacks: SampleText.top_k must be at least 1, got 0 (docs/",
        ),
        (
            {
                "trainer.callbacks": [
                    {
                        "class_path": "lightning.pytorch.callbacks.EarlyStopping",
                        "init_args": {"monitor": "val_loss", "mode": "foo"},
                    }
                ]
            },
            "error: trainer.callbacks: EarlyStopping: `mode` can be min, max, got foo (docs/",
        ),
        (
            {
                "trainer.logger": {
                    "class_path": "lightning_llm.training.json_logger.JSONLinesLogger",
                    "init_args": {"version": "/x"},
                }
            },
            "error: trainer.logger: ",
        ),
    ],
)
def test_what_a_constructor_refuses_begins_with_the_option_and_the_reason(tiny, error_line, options, says):
    with pytest.raises(SystemExit, match="2"):
        tiny("fit", **options)
    said = error_line()
    assert says in said
    assert len(said) < 300
