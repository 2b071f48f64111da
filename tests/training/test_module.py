"""LanguageModel with any Trainer: what it logs and returns, and the groups of its optimizer, in a resumed run too."""

import csv
import dataclasses

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger

from lightning_llm import LanguageModel, ModelConfig, TokenDataModule
from lightning_llm.accounting import step_memory
from lightning_llm.measure import MemoryMeter
from lightning_llm.training.callbacks import TrainingLog
from lightning_llm.training.trainer import Trainer
from tests.cli.test_resume import CONSTANT, FOLDER, killed_after
from tests.tiny_run import assert_same_weights, curves, weights

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


class Gradients(pl.Callback):
    """How many parameters have a gradient, and the peak of the second step without parameters and optimizer state."""

    def __init__(self):
        self.seen, self.peak_bytes, self.meter = [], 0, None

    def note(self, when, pl_module):
        self.seen.append((when, sum(parameter.grad is not None for parameter in pl_module.parameters())))

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.note("start", pl_module)
        if trainer.global_step == 1 and self.meter is None:
            state = [t for own in trainer.optimizers[0].state.values() for t in own.values() if torch.is_tensor(t)]
            self.meter = MemoryMeter(exclude=[pl_module, *state]).__enter__()

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.note("before step", pl_module)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.note("end", pl_module)
        if self.meter is not None and trainer.global_step == 2 and not self.peak_bytes:
            self.meter.__exit__(None, None, None)
            self.peak_bytes = self.meter.peak_bytes


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


@pytest.mark.parametrize("micro_batch_size", [8, 4])
@pytest.mark.parametrize("trainer_class", [Trainer, pl.Trainer])
def test_gradients_die_with_the_optimizer_step(data, trainer_class, micro_batch_size):
    data.micro_batch_size = micro_batch_size
    gradients = Gradients()
    trainer = trainer_class(
        **OPTIONS, max_steps=3, limit_val_batches=0, enable_model_summary=False, callbacks=[gradients], logger=False
    )
    config = dataclasses.replace(ModelConfig(**ARCHITECTURE), vocab_size=500)  # so that the peak is in the loss
    trained = LanguageModel(config, loss_chunks=0)
    trainer.fit(trained, data)
    every = len(list(trained.parameters()))
    accumulated = [("start", every), ("before step", every), ("end", 0)]
    assert gradients.seen == 3 * (
        [("start", 0), ("before step", every), ("end", 0)]
        if micro_batch_size == 8
        else [("start", 0), ("end", every), *accumulated]
    )
    predicted = step_memory(
        config, rows=micro_batch_size, context_length=16, loss_chunks=0, accumulation=8 // micro_batch_size
    )
    assert predicted.peak_point.endswith("loss")
    assert gradients.peak_bytes == pytest.approx(predicted.step_peak, rel=0.05)


@pytest.mark.parametrize("trainer_class", [Trainer, pl.Trainer])
def test_validate_returns_its_metrics_and_logs_them_once(data, trainer_class):
    logger = CSVLogger("logs")
    trainer = trainer_class(**OPTIONS, max_steps=2, limit_val_batches=2, enable_model_summary=False, logger=logger)
    trained = model()
    trainer.fit(trained, data)
    within = dict(trainer.callback_metrics)
    for found in trainer.validate(trained, data, verbose=False):
        assert {"val_loss", "val_perplexity", "val_bits_per_byte", "val_recall_loss", "train_loss_eval"} < set(found)
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


# ---- groups of parameters

EMBEDDINGS, REST = {"pattern": "embed_*", "lr_factor": 0.1}, {"pattern": "layers.1*", "weight_decay_factor": 0.0}
GROUPS = {"model.groups": [EMBEDDINGS, REST]}


def test_each_group_has_its_rate_in_the_log_and_in_a_resumed_run(tiny, monkeypatch):
    whole = tiny("fit", **GROUPS, **{"trainer.default_root_dir": "whole"})
    (optimizer,) = whole.trainer.optimizers
    names = [group["name"] for group in optimizer.param_groups]
    assert {"embeddings:embed_*", "hidden_matrices:layers.1*", "hidden_matrices", "vectors"} <= set(names)
    assert {group["weight_decay"] for group in optimizer.param_groups if "layers.1" in group["name"]} == {0.0}
    run = whole.trainer.log_dir
    usual = curves(run)["learning_rate"]
    assert len({rate for _, rate in usual}) > 3  # the schedule
    assert curves(run)["learning_rate/hidden_matrices"] == usual
    assert curves(run)["learning_rate/embeddings:embed_*"] == [(n, pytest.approx(0.1 * rate)) for n, rate in usual]
    killed_after(monkeypatch, tiny, 5, **GROUPS)
    assert_same_weights(weights(whole), weights(tiny("fit", "--ckpt_path=last", **GROUPS)))
    loaded = LanguageModel.load_from_checkpoint(FOLDER / "step-00000006.ckpt")
    assert [group["name"] for group in loaded.groups_of(loaded)] == names


def test_a_resumed_run_may_change_factors_and_not_patterns(tiny, error_line):
    tiny("fit", **CONSTANT, **GROUPS, **{"trainer.max_steps": 3})
    changed = {"model.groups": [{**EMBEDDINGS, "lr_factor": 0.5}, REST]}
    run = tiny("fit", "--ckpt_path=last", **CONSTANT, **changed)
    rates = {group["name"]: group["lr"] for group in run.trainer.optimizers[0].param_groups}
    assert rates["embeddings:embed_*"] == pytest.approx(0.5 * rates["vectors"])
    with pytest.raises(SystemExit):
        tiny("fit", "--ckpt_path=last", **CONSTANT, **{"model.groups": [EMBEDDINGS], "trainer.max_steps": 7})
    assert "its parameter groups have" in error_line()


@pytest.mark.parametrize(
    ("rule", "says"),
    [
        (
            {"pattern": "embd_*"},
            "model.groups: pattern 'embd_*' matches no trainable parameter, such as",
        ),
        ({"pattern": "norm", "lr": 0.1}, "lr"),
        ({"pattern": "norm", "lr_factor": -1}, "lr_factor must be a number of at least 0, got -1"),
    ],
)
def test_a_mistake_in_a_group_is_one_line(tiny, error_line, rule, says):
    with pytest.raises(SystemExit):
        tiny("fit", **{"model.groups": [rule]})
    assert says in error_line()


def test_mup_is_in_the_checkpoint_and_resumes(tiny, monkeypatch, error_line):
    options = {"model.architecture.mup": {"base_width": 16, "base_head_dim": 16}}
    whole = tiny("fit", **options, **{"trainer.default_root_dir": "whole"})
    rates = {group["name"]: group["lr"] for group in whole.trainer.optimizers[0].param_groups}
    assert rates["hidden_matrices:*_proj.weight"] == pytest.approx(rates["embeddings"] / 2)
    usual = curves(whole.trainer.log_dir)["learning_rate"]
    half = curves(whole.trainer.log_dir)["learning_rate/matrices:lm_head.weight"]
    assert half == [(step, pytest.approx(rate / 2)) for step, rate in usual]
    killed_after(monkeypatch, tiny, 5, **options)
    assert_same_weights(weights(whole), weights(tiny("fit", "--ckpt_path=last", **options)))
    loaded = LanguageModel.load_from_checkpoint(FOLDER / "step-00000006.ckpt")
    assert loaded.architecture.mup == options["model.architecture.mup"]
    with pytest.raises(SystemExit):
        tiny("fit", "--ckpt_path=last", "--model.architecture.mup=null")
    assert "mup is {'base_width': 16, 'base_head_dim': 16} there and None here" in error_line()
    with pytest.raises(SystemExit):
        tiny("fit", **options, **{"model.optimizer": "lightning_llm.optim.MuonAdamW"})
    assert "model.optimizer: architecture.mup sets the learning rates of Adam, got MuonAdamW" in error_line()


class RateByEpoch(LanguageModel):
    """Its schedule follows epochs, of which there is one."""

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1.0)}


def test_a_schedule_of_a_subclass_that_follows_epochs_resumes(data, tmp_path):
    for steps, checkpoint in ((2, None), (4, tmp_path / "x.ckpt")):
        trainer = Trainer(max_steps=steps, default_root_dir=tmp_path, limit_val_batches=0, **OPTIONS)
        trainer.fit(RateByEpoch(ARCHITECTURE), data, ckpt_path=checkpoint)
        assert trainer.global_step == steps
        trainer.save_checkpoint(tmp_path / "x.ckpt")
