"""LanguageModel with any Trainer: what it logs and returns."""

import csv

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger

from lightning_llm import LanguageModel, ModelConfig, TokenDataModule
from lightning_llm.training.callbacks import TrainingLog
from lightning_llm.training.trainer import Trainer

ARCHITECTURE = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 16}
OPTIONS = {"accelerator": "cpu", "precision": "32-true", "enable_progress_bar": False, "log_every_n_steps": 2}

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:Experiment logs directory"),
]


class Losses(pl.Callback):
    """The loss of each micro-batch."""

    def __init__(self):
        self.seen = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.seen.append(float(outputs["loss"]) * trainer.accumulate_grad_batches)


@pytest.fixture
def data(text_file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = {"context_length": 16, "global_batch_size": 8, "micro_batch_size": 4}
    return TokenDataModule(path=str(text_file), tokenizer="char", **options)


def model():
    torch.manual_seed(0)
    return LanguageModel(ModelConfig(**ARCHITECTURE))


@pytest.mark.parametrize("trainer_class", [Trainer, pl.Trainer])
def test_train_loss_is_logged_once_by_any_trainer(data, trainer_class):
    losses, logger = Losses(), CSVLogger("logs")
    trainer = trainer_class(
        **OPTIONS, max_steps=6, limit_val_batches=0, enable_model_summary=False, callbacks=[losses], logger=logger
    )
    trainer.fit(model(), data)
    assert sum(isinstance(callback, TrainingLog) for callback in trainer.callbacks) == 1
    with open(f"{logger.log_dir}/metrics.csv", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["train_loss"]]
    assert [int(row["step"]) for row in rows] == [2, 4, 6]
    windows = [sum(losses.seen[first : first + 4]) / 4 for first in (0, 4, 8)]  # two steps of two micro-batches
    assert [float(row["train_loss"]) for row in rows] == pytest.approx(windows, rel=1e-5)
    assert float(trainer.callback_metrics["train_loss"]) == pytest.approx(windows[-1], rel=1e-5)


def test_a_barebones_trainer_logs_nothing(data):
    trainer = pl.Trainer(accelerator="cpu", barebones=True, max_steps=2, limit_val_batches=1)
    trainer.fit(model(), data)
    assert trainer.callbacks == []
    assert trainer.callback_metrics == {}


@pytest.mark.parametrize("trainer_class", [Trainer, pl.Trainer])
def test_validate_returns_its_metrics_and_logs_them_once(data, trainer_class):
    logger = CSVLogger("logs")
    trainer = trainer_class(**OPTIONS, max_steps=2, limit_val_batches=2, enable_model_summary=False, logger=logger)
    trained = model()
    trainer.fit(trained, data)
    within = dict(trainer.callback_metrics)
    for found in trainer.validate(trained, data, verbose=False):
        assert set(found) == {"val_loss", "val_perplexity", "val_bits_per_byte", "train_loss_eval"}
        assert found["val_loss"] == pytest.approx(float(trainer.callback_metrics["val_loss"]))
    with open(f"{logger.log_dir}/metrics.csv", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row.get("val_loss")]
    assert [int(row["step"]) for row in rows] == [2] * len(rows)
    assert len(rows) == 1 + ("val_loss" in within)


def test_a_batch_of_fewer_tokens_than_loss_chunks_is_cut_into_its_tokens():
    torch.manual_seed(0)
    made = LanguageModel(ModelConfig(**ARCHITECTURE, vocab_size=20), loss_chunks=64)
    made.configure_model()
    ids = torch.arange(6)[None]
    chunked = made.loss({"input_ids": ids, "targets": ids})
    made.loss_chunks = 0
    assert float(chunked.detach()) == pytest.approx(float(made.loss({"input_ids": ids, "targets": ids}).detach()))
