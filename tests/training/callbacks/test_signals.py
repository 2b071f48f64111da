"""Signals at any moment of a run: one line, 128 plus the signal's number, no stack trace."""

import os
import signal
from pathlib import Path

import pytest

from lightning_llm.checkpoints.reading import is_intact
from lightning_llm.cli import training_output
from lightning_llm.training.callbacks import RunCheckpoints, StopOnSignal
from lightning_llm.training.module import LanguageModel

ALL = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
pytestmark = pytest.mark.usefixtures("default_signals")


def send(*numbers):
    for number in numbers:
        os.kill(os.getpid(), number)


def sending(owner, name, monkeypatch, *numbers, when=lambda *args: True):
    """The method sends the signals to this process, once, before it does what it always does."""
    original, sent = getattr(owner, name), []

    def method(self, *args, **kwargs):
        if not sent and when(*args):
            sent.append(numbers)
            send(*numbers)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(owner, name, method)


def ended(tiny, capsys, command="fit", **options):
    """Exit status and what was said of the interruption: one line."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as leaving:
        tiny(command, **options)
    said = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("step ")]
    assert len(said) == 1, said
    assert said[0].startswith(f"lightning-llm {command}: interrupted")
    return leaving.value.code, said[0]


def at_step(number):
    return lambda trainer, *args: trainer.state.fn == "fit" and trainer.global_step == number


@pytest.mark.parametrize("first", ALL)
def test_ctrl_c_after_a_signal_does_not_wait(tiny, monkeypatch, capsys, first):
    sending(StopOnSignal, "on_train_batch_end", monkeypatch, first, signal.SIGINT, when=at_step(3))
    status, line = ended(tiny, capsys)
    assert (status, line) == (130, "lightning-llm fit: interrupted")


@pytest.mark.parametrize("number", ALL)
@pytest.mark.parametrize(
    ("owner", "name"), [(LanguageModel, "configure_model"), (StopOnSignal, "setup"), (training_output, "print_sample")]
)
def test_a_signal_before_and_after_training_is_one_line(tiny, monkeypatch, capsys, owner, name, number):
    sending(owner, name, monkeypatch, number)
    status, line = ended(tiny, capsys)
    assert status == 128 + number
    assert line == "lightning-llm fit: interrupted" + ("" if number == signal.SIGINT else f" by {number.name}")
    assert signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler)


@pytest.mark.parametrize("number", ALL)
def test_a_signal_while_a_checkpoint_is_validated_is_one_line(finished, tiny, monkeypatch, capsys, number):
    sending(StopOnSignal, "on_validation_batch_end", monkeypatch, number)
    assert ended(tiny, capsys, "validate", ckpt_path="last")[0] == 128 + number


@pytest.mark.parametrize("number", ALL)
def test_a_signal_while_the_last_step_is_saved_ends_the_run_once_it_is(tiny, monkeypatch, capsys, number):
    sending(RunCheckpoints, "on_train_end", monkeypatch, number)
    status, line = ended(tiny, capsys, **{"trainer.val_check_interval": 4})
    assert status == 128 + number
    assert "after step 6" in line
    run = Path("runs/run/version_0")
    assert is_intact(run / "checkpoints" / "step-00000006.ckpt")
    assert not (run / "summary.json").exists()


@pytest.mark.parametrize("number", ALL)
def test_what_the_parent_ignores_stays_ignored(tiny, monkeypatch, number):
    signal.signal(number, signal.SIG_IGN)
    sending(StopOnSignal, "on_train_batch_end", monkeypatch, number, number, when=at_step(3))
    sending(training_output, "print_sample", monkeypatch, number)
    cli = tiny("fit")
    assert cli.trainer.global_step == 6
    assert signal.getsignal(number) is signal.SIG_IGN
