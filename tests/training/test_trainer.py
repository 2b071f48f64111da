"""Options of Lightning's Trainer on the command line: those that leave our own parts out, and values that cannot be."""

import itertools
import os
import signal
from pathlib import Path

import pytest
from lightning.pytorch.callbacks import Callback, LambdaCallback, Timer

from lightning_llm.training.callbacks import RunCheckpoints
from lightning_llm.training.trainer import Trainer
from tests.tiny_run import summary

BAREBONES = {"trainer.barebones": True, "trainer.log_every_n_steps": None}


def test_without_checkpointing_a_run_reports_and_saves_none(tiny):
    validated = []
    count = LambdaCallback(on_validation_end=lambda trainer, module: validated.append(trainer.global_step))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "preflight", lambda trainer, *_: trainer.callbacks.append(count) or [])
        cli = tiny("fit", **{"trainer.enable_checkpointing": False})
    assert not any(isinstance(callback, RunCheckpoints) for callback in cli.trainer.callbacks)
    assert not list(Path().rglob("*.ckpt"))
    assert summary(cli)["checkpoint"] is None
    assert summary(cli)["val_loss"] == pytest.approx(float(cli.trainer.callback_metrics["val_loss"]))
    assert validated == [3, 6]  # not again at the end


class CountsSteps(Callback):
    def __init__(self):
        self.steps = 0

    def on_train_batch_end(self, *args, **kwargs):
        self.steps += 1


class CountsAll(CountsSteps):
    """Inherits one hook, and has one of its own."""

    def on_before_zero_grad(self, *args, **kwargs):
        self.steps += 100


def test_hooks_of_ours_that_do_nothing_are_not_called_and_all_others_are(tiny, monkeypatch):
    called = []
    kinds = [CountsSteps(), CountsAll(), LambdaCallback(on_after_backward=lambda *_: called.append("backward"))]
    kinds.append(Callback())
    kinds[-1].on_before_backward = lambda *_: called.append("own")
    ours = Trainer(accelerator="cpu", logger=False, callbacks=kinds).callbacks
    checkpoints = next(callback for callback in ours if isinstance(callback, RunCheckpoints))
    assert checkpoints.on_before_zero_grad is None
    assert callable(checkpoints.on_train_batch_end)
    assert all(callable(each.on_before_zero_grad) for each in kinds)  # the user's own code may call them
    monkeypatch.setattr(Trainer, "preflight", lambda trainer, *_: trainer.callbacks.extend(kinds) or [])
    tiny("fit")
    assert [each.steps for each in kinds[:2]] == [6, 606]
    assert called == ["own", "backward"] * 6


def test_an_interrupted_run_without_checkpoints_says_so(tiny, capsys, monkeypatch):
    stop = LambdaCallback(on_train_batch_start=lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    monkeypatch.setattr(Trainer, "preflight", lambda trainer, *_: trainer.callbacks.insert(0, stop) or [])
    with pytest.raises(SystemExit) as leaving:
        tiny("fit", **{"trainer.enable_checkpointing": False})
    assert leaving.value.code == 143
    error = capsys.readouterr().err
    assert "no checkpoint was saved" in error
    assert "nothing is lost" not in error


def test_barebones_adds_nothing_of_ours_and_writes_nothing(tiny, capsys):
    cli = tiny("fit", **BAREBONES)
    assert cli.trainer.global_step == 6
    names = {type(callback).__name__ for callback in cli.trainer.callbacks}
    assert names == {
        "RankConsistencyCheck",
        "ResumeDiff",
        "TrainingSummary",
        "SaveConfig",
        "StatusFile",
    }  # none works in a step
    assert cli.trainer.loggers == []
    assert not Path("runs").exists()
    said = capsys.readouterr()
    assert "result  6 steps in" in said.out
    assert "self.log" not in said.err


def test_barebones_trainer_has_no_callback():
    assert Trainer(barebones=True, accelerator="cpu", precision="32-true").callbacks == []


def test_what_barebones_refuses_is_one_line(tiny, error_line):
    with pytest.raises(SystemExit) as leaving:
        tiny("fit", **{"trainer.barebones": True})
    assert leaving.value.code == 2
    assert "log_every_n_steps=1" in error_line()


def test_a_profiler_prints_what_it_found(tiny, caplog):
    tiny("fit", **{"trainer.max_steps": 2, "trainer.profiler": "simple"})
    assert "run_training_batch" in caplog.text


def test_a_time_alone_ends_a_run(tiny, capsys, monkeypatch):
    seconds = itertools.count()  # one for each look at the clock
    monkeypatch.setattr(Timer, "time_elapsed", lambda *_: next(seconds))
    cli = tiny("fit", **{"trainer.max_steps": None, "trainer.max_time": "00:00:00:10"})
    assert 3 <= cli.trainer.global_step <= 10
    assert summary(cli)["steps"] == cli.trainer.global_step
    assert "of 128 tokens (8 × 16), until max_time" in capsys.readouterr().out


@pytest.mark.parametrize("limit", ["max_steps", "limit_train_batches"])
def test_no_steps_at_all_report_the_first_weights(tiny, capsys, limit):
    cli = tiny("fit", **{f"trainer.{limit}": 0})
    assert summary(cli)["steps"] == 0
    said = capsys.readouterr().out
    assert "no steps are left" in said
    assert "None" not in said


def test_a_number_that_switches_something_off_works(tiny):
    cli = tiny("fit", **{"trainer.limit_val_batches": 0, "trainer.log_every_n_steps": 0, "trainer.max_steps": 1})
    assert summary(cli)["val_loss"] is None


def test_nodes_that_the_environment_names_are_waited_for_with_a_limit(tiny, capsys, monkeypatch):
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "NODE_RANK": "0", "LOCAL_RANK": "0"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)

    def wait(trainer, *args, **kwargs):
        raise ValueError("nobody came")

    monkeypatch.setattr(Trainer, "_run", wait)
    with pytest.raises(SystemExit):
        tiny("fit", **{"trainer.num_nodes": 2})
    error = capsys.readouterr().err
    assert "process 0 on" in error
    assert "waits for the 2 processes of 2 nodes at 127.0.0.1:29500, at most 0:30:00" in error


def test_validate_prints_each_metric_once(tiny, capsys):
    tiny("fit", **{"trainer.max_steps": 1})
    capsys.readouterr()
    tiny("validate", "--ckpt_path=last")
    said = capsys.readouterr().out
    for metric in ("val_loss", "val_perplexity", "val_bits_per_byte", "train_loss_eval"):
        assert said.count(metric) == 1, said
