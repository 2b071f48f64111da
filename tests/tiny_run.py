"""A tiny model that the command line trains in about a second, and its runs. `conftest.py` loads the fixtures."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.summary.writer import event_file_writer

from lightning_llm.__main__ import main
from lightning_llm.cli.train import cli_main
from lightning_llm.runs.lock import LOCK
from lightning_llm.runs.status import FAILED, FINISHED, write_status

# TensorBoard reads a run's event files in the order of their names: second, host, process, number. Two runs of one
# process within a second would come in the wrong order where the second's number has a digit more: 10 before 9.
event_file_writer._global_uid = event_file_writer.AtomicCounter(10**6)

TINY = {
    "model.architecture.hidden_size": 32,
    "model.architecture.num_hidden_layers": 2,
    "model.architecture.num_attention_heads": 2,
    "model.architecture.max_position_embeddings": 32,
    "data.tokenizer": "char",
    "data.context_length": 16,
    "data.global_batch_size": 8,
    "data.eval_batch_size": 512,  # all of the validation text in 2 batches, not in 66
    "trainer.max_steps": 6,
    "trainer.val_check_interval": 3,
    "trainer.log_every_n_steps": 1,
    "trainer.accelerator": "cpu",
    "keep_freed_memory": False,
}


@pytest.fixture
def flags(text_file):
    """``flags(name=value, …)``: the options of a tiny run as words of a command line; ``None`` leaves one out."""

    def words(**changes):
        return words_of({**TINY, "data.path": str(text_file), **changes})

    return words


def words_of(options):
    given = {name: value for name, value in options.items() if value is not None}
    return [f"--{name}={json.dumps(v) if isinstance(v, dict | list) else v}" for name, v in given.items()]


@pytest.fixture
def tiny(flags, tmp_path, monkeypatch):
    """``tiny("fit", **{name: value, …})`` runs a command on a tiny model, below ``tmp_path``."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("lightning_llm.cli.training_output.SAMPLE_TOKENS", 20)  # 200 take a fifth of a tiny run

    def run(command, *words, **changes):
        return cli_main([command, *words, *flags(**changes)])

    return run


@pytest.fixture(scope="session")
def _trained_once(tmp_path_factory, text_file):
    folder, before = tmp_path_factory.mktemp("finished"), os.getcwd()
    os.chdir(folder)
    try:
        cli_main(["fit", *words_of({**TINY, "data.path": str(text_file)})])
    finally:
        os.chdir(before)
    return folder


@pytest.fixture
def finished(_trained_once, tiny, tmp_path, capsys):
    """What ``tiny("fit")`` leaves in the folder, without its output."""
    shutil.copytree(_trained_once, tmp_path, dirs_exist_ok=True)
    capsys.readouterr()


@pytest.fixture
def error_line(capsys):
    """``error_line()``: the error that was printed since; one line, no stack trace."""

    def line():
        error = capsys.readouterr().err.strip()
        assert "Traceback" not in error
        lines = [line for line in error.splitlines() if "error:" in line]
        assert len(lines) == 1, error
        return lines[0]

    return line


@pytest.fixture
def refused(flags, tmp_path, monkeypatch, capsys):
    """``refused("fit", …)``: the one line that a command answers with; all files are as before."""
    monkeypatch.chdir(tmp_path)

    def run(*words, tiny=True, **changes):
        before = contents(tmp_path)
        assert main([*words, *(flags(**changes) if tiny else [])]) == 2
        error = capsys.readouterr().err.strip()
        assert "Traceback" not in error
        assert len(error.splitlines()) == 1, error
        assert error.startswith(f"lightning-llm {words[0]}: error: "), error
        after = contents(tmp_path)
        # the token store may have been prepared, whole; no run may have begun
        assert {name: after[name] for name in before} == before
        assert not [name for name in after if name.startswith("runs") or ".tmp" in name], after.keys()
        return error

    return run


def contents(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def summary(cli):
    return json.loads((Path(cli.trainer.log_dir) / "summary.json").read_text())


def weights(cli):
    return {name: value.clone() for name, value in cli.model.state_dict().items()}


def assert_same_weights(first, second):
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


def curves(run):
    """What TensorBoard shows of a run: (step, value) of each scalar."""
    events = EventAccumulator(str(run)).Reload()
    return {name: [(event.step, event.value) for event in events.Scalars(name)] for name in events.Tags()["scalars"]}


@pytest.fixture
def make_run(tmp_path, monkeypatch):
    """``make_run("a/version_0", status)``: a run below ``runs`` that ended so, without training or a checkpoint."""
    monkeypatch.chdir(tmp_path)

    def run(name, status=FAILED, *, checkpoint="", summary=None):
        folder = Path("runs", name)
        folder.mkdir(parents=True)
        (folder / "config.yaml").write_text("trainer: {}\n")
        (folder / LOCK).write_text("1 host\n")
        if status is not None:
            write_status(folder, status, step=7, val_loss=2.5, reason="" if status == FINISHED else "why")
        if checkpoint:
            (folder / checkpoint).parent.mkdir(exist_ok=True)
            (folder / checkpoint).write_bytes(b"x" * 5000)
        if summary is not None:
            (folder / "summary.json").write_text(summary)
        return folder

    return run


def listed(*words):
    """The rows of ``lightning-llm runs``, by run."""
    assert main(["runs", *words, "--json", "list.json"]) == 0
    return {row.pop("run").removeprefix("runs/"): row for row in json.loads(Path("list.json").read_text())}


def killed_process():
    """The id of a process that has ended."""
    done = subprocess.Popen([sys.executable, "-c", ""])
    done.wait()
    return done.pid


@contextlib.contextmanager
def lock_held(run):
    """Another process holds the lock of a run directory; yields its id."""
    code = "import sys, time; from pathlib import Path; from lightning_llm.runs.lock import RunLock\n"
    code += "RunLock(Path(sys.argv[1])).acquire(); print('held', flush=True); time.sleep(600)"
    holder = subprocess.Popen([sys.executable, "-c", code, str(run)], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout.readline() == "held\n"
        yield holder.pid
    finally:
        holder.kill()
        holder.communicate()
