"""What nobody foresaw is one line too, with status 1 and the traceback in a file."""

import importlib
import re
import stat
import sys
import tempfile
import threading
from pathlib import Path

import pytest

from benchmarks.__main__ import main as benchmarks
from lightning_llm.__main__ import SUBCOMMANDS, TRAINER_WORDS, main
from lightning_llm.cli.commands import COMMANDS
from lightning_llm.cli.errors import one_line, reports
from lightning_llm.data.batches import TrainBatches
from lightning_llm.io.trust import TRUSTED
from lightning_llm.training.module import LanguageModel


@pytest.fixture(autouse=True)
def _nothing_trusted_yet():
    """What earlier tests of this process have trusted would count as the user's own code."""
    earlier = set(TRUSTED)
    TRUSTED.clear()
    yield
    TRUSTED.update(earlier)


@pytest.fixture(autouse=True)
def traces(tmp_path, monkeypatch):
    """The folder that tracebacks go to."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield folder
    reports.begin([])


def the_line(capsys):
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1, lines
    return lines[0]


def module_of(word):
    return f"lightning_llm.cli.{COMMANDS[word].module}"


@pytest.mark.parametrize("word", [*TRAINER_WORDS, *SUBCOMMANDS])
def test_every_command_fails_in_one_line_and_keeps_the_traceback(word, traces, monkeypatch, capsys):
    def broken(*words):
        raise ZeroDivisionError("by\nnothing")

    module = importlib.import_module(module_of(word))
    monkeypatch.setattr(module, "run" if word in TRAINER_WORDS else f"run_{word}", broken)
    assert main([word, "--model.secret", "a b", "--ckpt_path", str(Path(__file__))]) == 1
    (file,) = traces.iterdir()
    assert the_line(capsys) == (
        f"lightning-llm {word}: failed: ZeroDivisionError: by nothing; where: {file} (--debug shows it)"
    )
    content = file.read_text()
    assert content.startswith(f"lightning-llm {word} --model.secret 'a b' ")
    assert "in broken" in content
    assert stat.S_IMODE(file.stat().st_mode) == 0o600  # others of the machine do not read what was typed


@pytest.mark.parametrize("word", ["fit", "generate"])
def test_from_the_first_import_on(word, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, module_of(word), None)
    assert main([word]) == 1
    assert f"lightning-llm {word}: failed: ModuleNotFoundError: import of {module_of(word)}" in the_line(capsys)


def test_debug_prints_the_traceback_instead(traces, monkeypatch, capsys):
    monkeypatch.setattr("lightning_llm.cli.estimate.run_estimate", lambda words: 1 // 0)
    assert main(["estimate", "--debug"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("lightning-llm estimate: failed: ZeroDivisionError")
    assert "Traceback (most recent call last)" in error
    assert not list(traces.iterdir())


@pytest.mark.parametrize("words", [["estimate", "--config", "nowhere.yaml"], ["fit", "--config", "nowhere.yaml"]])
def test_debug_shows_where_a_mistake_was_found(words, capsys):
    assert main(words) == 2
    assert "Traceback" not in capsys.readouterr().err
    assert main([*words, "--debug"]) == 2
    assert "Traceback (most recent call last)" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["cost", "--rounds", "1"], ["--rounds", "1", "cost"]])
def test_benchmarks_fail_under_their_own_name(words, traces, monkeypatch, capsys):
    monkeypatch.setattr("benchmarks.command_line._measure", lambda *given, **named: 1 // 0)
    assert benchmarks(words) == 1
    (file,) = traces.iterdir()
    assert the_line(capsys).startswith(f"python -m benchmarks {words[0]}: failed: ZeroDivisionError: ")
    assert file.read_text().startswith(f"python -m benchmarks {' '.join(words)}\n")
    assert main(["estimate", "--config", "nowhere.yaml"]) == 2
    assert the_line(capsys).startswith("lightning-llm estimate: error: ")


@pytest.mark.parametrize(
    ("run", "words", "name", "function"),
    [
        (benchmarks, ["cost"], "python -m benchmarks cost", "benchmarks.command_line._measure"),
        (main, ["compare", "runs"], "lightning-llm compare", "lightning_llm.cli.compare.compare_runs"),
    ],
)
def test_an_interruption_has_the_name_of_the_command(run, words, name, function, monkeypatch, capsys):
    def stop(*given, **named):
        raise KeyboardInterrupt

    monkeypatch.setattr(function, stop)
    assert run(words) == 130
    assert the_line(capsys) == f"{name}: interrupted"


def test_a_traceback_that_cannot_be_written(traces, monkeypatch, capsys):
    monkeypatch.setattr("lightning_llm.cli.estimate.run_estimate", lambda words: 1 // 0)
    traces.rmdir()
    assert main(["estimate"]) == 1
    assert the_line(capsys).endswith("integer division or modulo by zero; --debug shows where")


def test_while_it_trains(flags, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(LanguageModel, "training_step", lambda *args: {}["nobody foresaw"])
    assert main(["fit", *flags()]) == 1
    assert "lightning-llm fit: failed: KeyError: 'nobody foresaw'; where: " in the_line(capsys)


def broken_data(*args):
    raise TypeError("what a worker\nfound")


def test_of_a_data_worker_only_what_it_found(flags, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(TrainBatches, "__getitem__", broken_data)
    assert main(["fit", *flags(**{"data.num_workers": 1})]) == 1
    assert "lightning-llm fit: failed: TypeError: what a worker found; where: " in the_line(capsys)


def test_another_thread(capsys, flags, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = threading.excepthook
    try:
        assert main(["fit", *flags(**{"trainer.max_steps": 1})]) == 0
        capsys.readouterr()
        thread = threading.Thread(target=lambda: 1 // 0)
        thread.start()
        thread.join()
    finally:
        threading.excepthook = before
    assert re.match(r"lightning-llm fit: failed: ZeroDivisionError: .*; where: ", the_line(capsys))


def test_which_process_of_several_speaks(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setattr("lightning_llm.cli.estimate.run_estimate", lambda words: 1 // 0)
    assert main(["estimate"]) == 1
    assert the_line(capsys).startswith("process 3: lightning-llm estimate: failed: ")
    assert reports.mistake("estimate", "a mistake") == 2
    assert the_line(capsys) == "process 3: a mistake (docs/accounting.md)"


def test_the_cause_without_its_trace():
    trace = "Caught it.\nOriginal Traceback (most recent call last):\n  File x\nValueError: it: broke\n"
    assert one_line(ValueError(trace)) == "it: broke"
    assert one_line(ValueError("a\n  b")) == "a b"


def test_an_error_in_the_users_code_says_where(tmp_path, monkeypatch, flags, capsys):
    monkeypatch.syspath_prepend(str(tmp_path))
    source = "import torch\n\nclass MLP(torch.nn.Linear):\n    def __init__(self, config):\n"
    source += "        super().__init__(8, 8)\n\n    def forward(self, x):\n        return torch.relu(x.nothing)\n"
    (tmp_path / "failing_part.py").write_text(source)
    assert main(["fit", *flags(**{"model.architecture.mlp": "failing_part.MLP"})]) == 1
    assert f"attribute 'nothing', in {tmp_path / 'failing_part.py'}, line 8; where: " in capsys.readouterr().err
