"""The checks, the summary and the schedule know how many steps a run really has."""

import lightning.pytorch as pl
import pytest

from lightning_llm import LanguageModel, ModelConfig, TokenDataModule
from lightning_llm.cli.training_output import _describe_steps
from lightning_llm.training.run_length import total_steps
from lightning_llm.training.trainer import Trainer

CONFIG = ModelConfig(
    vocab_size=32, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, max_position_embeddings=16
)
OWN = {"accelerator": "cpu", "precision": "32-true", "logger": False, "enable_progress_bar": False}

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*is smaller than the logging interval"),
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`"),
    pytest.mark.filterwarnings("ignore:`max_epochs` was not set. Setting it to 1000 epochs"),
]


@pytest.fixture
def data(text_file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return TokenDataModule(
        path=str(text_file), tokenizer="char", context_length=16, global_batch_size=512, micro_batch_size=256
    )


class Enough(Exception):
    """What a test wanted to see has been there."""


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({"max_epochs": 2}, lambda per_epoch: 2 * per_epoch),
        ({"max_epochs": 3, "limit_train_batches": 4}, lambda per_epoch: 6),
        ({"max_epochs": 2, "limit_train_batches": 0.5}, lambda per_epoch: per_epoch),
        ({"max_steps": 3}, lambda per_epoch: 3),
        ({}, lambda per_epoch: 1000 * per_epoch),
    ],
)
def test_what_is_printed_agrees_with_the_schedule(data, tmp_path, options, steps):
    found = {}

    class Look(pl.Callback):
        def on_train_start(self, trainer, pl_module):
            found["loaded"], found["said"] = total_steps(trainer), _describe_steps(trainer)
            found["scheduled"] = trainer.lr_scheduler_configs[0].scheduler.lr_lambdas[0].args[1]
            raise Enough

    trainer = Trainer(**OWN, **options, default_root_dir=str(tmp_path), limit_val_batches=0, callbacks=[Look()])
    model = LanguageModel(ModelConfig(**{**CONFIG.to_dict(), "vocab_size": None}))
    before = next(check.finding for check in trainer.preflight(model, data) if check.name == "steps")
    with pytest.raises(Enough):
        trainer.fit(model, data)
    expected = steps(data.steps_per_epoch)
    assert found["loaded"] == found["scheduled"] == expected
    assert before.startswith(f"{expected:,} steps of")
    assert found["said"].startswith(f"{expected:,} of")
