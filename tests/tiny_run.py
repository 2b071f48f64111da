"""Fixtures: a tiny model that the command line trains in about a second. `conftest.py` loads them for all tests."""

import json

import pytest

from lightning_llm.__main__ import main
from lightning_llm.cli.train import cli_main

TINY = {
    "model.architecture.hidden_size": 32,
    "model.architecture.num_hidden_layers": 2,
    "model.architecture.num_attention_heads": 2,
    "model.architecture.max_position_embeddings": 32,
    "data.tokenizer": "char",
    "data.context_length": 16,
    "data.global_batch_size": 8,
    "data.eval_batch_size": 64,  # all of the validation text in 9 batches, not in 66
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
        options = {**TINY, "data.path": str(text_file), **changes}
        given = {name: value for name, value in options.items() if value is not None}
        return [f"--{name}={json.dumps(v) if isinstance(v, dict | list) else v}" for name, v in given.items()]

    return words


@pytest.fixture
def tiny(flags, tmp_path, monkeypatch):
    """``tiny("fit", **{name: value, …})`` runs a command on a tiny model, below ``tmp_path``."""
    monkeypatch.chdir(tmp_path)

    def run(command, *words, **changes):
        return cli_main([command, *words, *flags(**changes)])

    return run


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
