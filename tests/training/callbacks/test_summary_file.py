"""A run that Python starts, with either Trainer, is finished and comparable."""

import json
import os
import re
from pathlib import Path

import lightning.pytorch as pl
import pytest

from lightning_llm import LanguageModel, ModelConfig, TokenDataModule, Trainer
from lightning_llm.__main__ import main
from lightning_llm.runs.status import unfinished

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers", "ignore:.*tensorboard")
SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 16}


def fit(make, text, mlp, **options):
    data = TokenDataModule(path=str(text), tokenizer="char", context_length=16, global_batch_size=4)
    trainer = make(
        max_steps=2, limit_val_batches=1, accelerator="cpu", log_every_n_steps=1, enable_progress_bar=False, **options
    )
    trainer.fit(LanguageModel(ModelConfig(**SIZES, mlp=mlp)), data)
    return trainer


@pytest.mark.parametrize(("make", "folder"), [(Trainer, "runs"), (pl.Trainer, "lightning_logs")])
def test_runs_of_python_are_compared(make, folder, text_file, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PL_GLOBAL_SEED", "3")
    for mlp in ("relu", "gelu"):
        fit(make, text_file, mlp, enable_model_summary=False)
    runs = sorted(path.parent for path in Path(folder).rglob("summary.json"))
    assert [unfinished(run) for run in runs] == [None, None]
    summary = json.loads((runs[0] / "summary.json").read_text())
    assert summary["options"]["seed_everything"] == 3
    assert (summary["steps"], summary["validated_step"]) == (2, 2)
    assert summary["train_loss_eval"] > 0
    assert "train_loss" not in summary
    capsys.readouterr()
    assert main(["compare", folder]) == 0
    said = capsys.readouterr().out
    assert re.search("mlp=gelu versus mlp=relu, validation loss: .*difference [+-]", said)
    assert "not paired" in said or "1 pair" in said


def test_a_trainer_without_a_folder_writes_nothing(text_file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = {"logger": False, "enable_checkpointing": False, "enable_model_summary": False}
    fit(pl.Trainer, text_file, "relu", **options)
    assert [name for name in os.listdir(tmp_path) if name != text_file.name and name != "stores"] == []
