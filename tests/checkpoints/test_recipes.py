"""``LanguageModel.load_from_checkpoint`` brings optimizer and schedule back, or says that it does not."""

import dataclasses
from functools import partial

import lightning.pytorch as pl
import pytest
import torch

from lightning_llm import LanguageModel, ModelConfig, TokenDataModule
from lightning_llm.checkpoints.reading import read_checkpoint
from lightning_llm.checkpoints.recipes import LostSchedule
from lightning_llm.optim import AdamW, MuonAdamW, Schedule, WarmupLinear, WarmupStableDecay
from lightning_llm.optim.groups import param_groups
from lightning_llm.optim.schedules import SCHEDULES

ARCHITECTURE = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 16}

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers")


class OwnSGD(torch.optim.SGD):
    """A class that this project does not know."""


class OwnSchedule(Schedule):
    """Likewise."""

    def factor(self, step, total_steps=None):
        return 0.5


@dataclasses.dataclass(frozen=True)
class NewSchedule(Schedule):
    """One that this project gets later."""

    share: float = 1.0

    def factor(self, step, total_steps=None):
        return self.share


@pytest.fixture
def saved(text_file, tmp_path, monkeypatch):
    """``saved(**arguments)``: the checkpoint of a run of one step."""
    monkeypatch.chdir(tmp_path)

    def save(**arguments):
        data = TokenDataModule(path=str(text_file), tokenizer="char", context_length=16, global_batch_size=4)
        model = LanguageModel(ModelConfig(**ARCHITECTURE), **arguments)
        options = {"accelerator": "cpu", "enable_progress_bar": False, "enable_model_summary": False}
        trainer = pl.Trainer(**options, max_steps=1, limit_val_batches=0, logger=False, enable_checkpointing=False)
        trainer.fit(model, data)
        trainer.save_checkpoint("model.ckpt")
        return "model.ckpt"

    return save


@pytest.mark.parametrize(
    "make",
    [
        partial(AdamW, lr=0.02, betas=(0.8, 0.9), weight_decay=0.3),
        partial(MuonAdamW, lr=0.03, momentum=0.9, newton_schulz_steps=3, state_dtype="bfloat16"),
        partial(torch.optim.AdamW, lr=0.04, amsgrad=True),
        partial(torch.optim.SGD, lr=0.05, momentum=0.7, nesterov=True),
        lambda params: AdamW(params, lr=0.06),
    ],
)
def test_the_optimizer_is_restored_with_its_settings(saved, make):
    loaded = LanguageModel.load_from_checkpoint(saved(optimizer=make), weights_only=True)
    ours, theirs = loaded.make_optimizer(param_groups(loaded)), make(param_groups(loaded))
    assert type(ours) is type(theirs)
    assert ours.defaults == theirs.defaults


@pytest.mark.parametrize("schedule", [None, WarmupLinear(warmup_steps=3), WarmupStableDecay(decay_fraction=0.5)])
def test_the_schedule_is_restored(saved, schedule):
    assert LanguageModel.load_from_checkpoint(saved(schedule=schedule), weights_only=True).schedule == schedule


def test_a_new_schedule_of_this_project_is_restored(saved, monkeypatch):
    monkeypatch.setitem(SCHEDULES, "NewSchedule", NewSchedule)
    loaded = LanguageModel.load_from_checkpoint(saved(schedule=NewSchedule(share=0.3)), weights_only=True)
    assert loaded.schedule == NewSchedule(share=0.3)


@pytest.mark.parametrize("schedule", [NewSchedule(), partial(torch.optim.lr_scheduler.StepLR, step_size=2)])
def test_no_model_trains_with_another_schedule_than_its_own(saved, text_file, schedule):
    path = saved(schedule=schedule)
    with pytest.warns(UserWarning, match="is not restored: give load_from_checkpoint the argument schedule"):
        loaded = LanguageModel.load_from_checkpoint(path, weights_only=True)
    data = TokenDataModule(path=str(text_file), tokenizer="char", context_length=16, global_batch_size=4)
    trainer = pl.Trainer(accelerator="cpu", max_steps=1, logger=False, enable_checkpointing=False)
    with pytest.raises(ValueError, match="give load_from_checkpoint the argument schedule to train this model"):
        trainer.fit(loaded, data)
    given = LanguageModel.load_from_checkpoint(path, weights_only=True, schedule=WarmupLinear())
    trainer.fit(given, data)


def test_a_loaded_model_hands_the_settings_on(saved, text_file):
    loaded = LanguageModel.load_from_checkpoint(saved(optimizer=partial(AdamW, lr=0.02)), weights_only=True)
    data = TokenDataModule(path=str(text_file), tokenizer="char", context_length=16, global_batch_size=4)
    trainer = pl.Trainer(accelerator="cpu", logger=False, limit_val_batches=1, enable_progress_bar=False)
    trainer.validate(loaded, data, verbose=False)  # makes no optimizer
    trainer.save_checkpoint("again.ckpt")
    again = LanguageModel.load_from_checkpoint("again.ckpt", weights_only=True)
    assert again.make_optimizer.keywords["lr"] == 0.02


def test_what_is_given_wins(saved):
    path = saved(optimizer=OwnSGD, schedule=OwnSchedule())
    loaded = LanguageModel.load_from_checkpoint(path, weights_only=True, optimizer=AdamW, schedule=WarmupLinear())
    assert loaded.make_optimizer is AdamW
    assert loaded.schedule == WarmupLinear()


def test_what_is_not_restored_is_said(saved):
    path = saved(optimizer=OwnSGD, schedule=OwnSchedule())
    with pytest.warns(UserWarning, match="is not restored") as warned:
        loaded = LanguageModel.load_from_checkpoint(path, weights_only=True)
    messages = [str(warning.message) for warning in warned]
    for name, kind in (("optimizer", "OwnSGD"), ("schedule", "OwnSchedule")):
        line = f"{kind} is not restored: give load_from_checkpoint the argument {name} to train this model"
        assert any(line in message for message in messages)
    with pytest.raises(ValueError, match="OwnSGD is not restored"):
        loaded.make_optimizer([torch.nn.Parameter(torch.zeros(1))])
    assert isinstance(loaded.schedule, LostSchedule)


def test_a_scheduler_of_torch_is_said_not_to_be_restored(saved):
    path = saved(schedule=partial(torch.optim.lr_scheduler.StepLR, step_size=2))
    with pytest.warns(UserWarning, match="lr_scheduler.StepLR is not restored"):
        LanguageModel.load_from_checkpoint(path, weights_only=True)


def test_a_checkpoint_decides_on_no_import(saved):
    content = read_checkpoint(saved())
    content["hyper_parameters"]["optimizer"] = {"class_path": "os.system", "init_args": {"command": "true"}}
    torch.save(content, "evil.ckpt")
    with pytest.warns(UserWarning, match=r"os\.system is not restored"):
        loaded = LanguageModel.load_from_checkpoint("evil.ckpt", weights_only=True)
    with pytest.raises(ValueError, match=r"os\.system is not restored"):
        loaded.make_optimizer([])


def test_an_older_checkpoint_says_that_it_has_no_settings(saved):
    content = read_checkpoint(saved())
    del content["hyper_parameters"]["optimizer"]
    torch.save(content, "older.ckpt")
    with pytest.warns(UserWarning, match="its optimizer is not restored"):
        LanguageModel.load_from_checkpoint("older.ckpt", weights_only=True)
