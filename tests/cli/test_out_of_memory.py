"""When memory runs out: the report, one line, and no stack trace."""

import pytest
import torch

from lightning_llm.training.module import LanguageModel


def failing(kind):
    def step(self, batch, batch_idx):
        raise kind

    return step


def test_running_out_is_explained_in_the_run_directory(tiny, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(LanguageModel, "training_step", failing(torch.OutOfMemoryError("tried to allocate 9 GiB")))
    with pytest.raises(SystemExit) as leaving:
        tiny("fit")
    assert leaving.value.code == 1
    error = capsys.readouterr().err
    assert "Traceback" not in error
    assert "lightning-llm fit: out of memory: tried to allocate 9 GiB" in error
    assert len(list(tmp_path.glob("runs/*/version_0/memory/out-of-memory.txt"))) == 1


def test_another_failure_of_the_program_is_not_hidden(tiny, monkeypatch):
    monkeypatch.setattr(LanguageModel, "training_step", failing(RuntimeError("a bug")))
    with pytest.raises(RuntimeError, match="a bug"):
        tiny("fit")
