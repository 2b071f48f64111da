"""Learning rates over a run: with loaders of the user's own, by time, resumed, and where they follow the validation."""

import lightning.pytorch as pl
import pytest
import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, IterableDataset

from lightning_llm import LanguageModel, ModelConfig
from lightning_llm.optim import AdamW, Constant, WarmupCosine, WarmupLinear
from lightning_llm.training.trainer import Trainer
from tests.cli.test_resume import killed_after
from tests.tiny_run import assert_same_weights, curves, weights

CONFIG = ModelConfig(
    vocab_size=32, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, max_position_embeddings=16
)
OWN = {"accelerator": "cpu", "precision": "32-true", "logger": False, "enable_progress_bar": False}
PLAIN = {
    **OWN,
    "enable_model_summary": False,
    "enable_checkpointing": False,
    "num_sanity_val_steps": 0,
    "max_steps": -1,
}

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*is smaller than the logging interval"),
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`"),
    pytest.mark.filterwarnings("ignore:`max_epochs` was not set. Setting it to 1000 epochs"),
]


class Rates(pl.Callback):
    """The learning rate of each update."""

    def __init__(self):
        self.seen = []

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.seen.append(optimizer.param_groups[0]["lr"])


def batches(count, size=2):
    tokens = torch.arange(count * size * 17).remainder(32).view(-1, 17)
    return [{"input_ids": row[:-1], "targets": row[1:]} for row in tokens]


class Data(pl.LightningDataModule):
    """Knows nothing of steps; counts how often its loader is made."""

    def __init__(self, count):
        super().__init__()
        self.count, self.made = count, 0

    def train_dataloader(self):
        self.made += 1
        return DataLoader(batches(self.count), batch_size=2)


class Endless(IterableDataset):
    def __iter__(self):
        while True:
            yield from batches(4)


def rates_of(trainer_class, options, data, schedule=None, limit=None):
    rates = Rates()
    callbacks = [rates] if limit is None else [rates, limit]
    model = LanguageModel(CONFIG, optimizer=lambda params: AdamW(params, lr=1.0), schedule=schedule)
    trainer_class(**options, callbacks=callbacks).fit(model, data)
    return rates.seen


def expected(steps, schedule=None):
    schedule = schedule or WarmupCosine(warmup_steps=min(100, steps // 10))
    return [schedule.factor(step + 1, steps) for step in range(steps)]


@pytest.mark.parametrize("trainer_class", [Trainer, pl.Trainer])
@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({"max_epochs": 2}, 20),
        ({"max_epochs": 2, "limit_train_batches": 3}, 6),
        ({"max_epochs": 2, "limit_train_batches": 0.5}, 10),
        ({"max_epochs": 2, "max_steps": 7}, 7),
        ({"max_epochs": 1, "max_steps": 70}, 10),
        ({"max_epochs": 2, "accumulate_grad_batches": 4}, 6),
    ],
)
def test_a_loader_of_the_users_own_sets_the_length(tmp_path, trainer_class, options, steps):
    options = {**(OWN if trainer_class is Trainer else PLAIN), **options, "default_root_dir": str(tmp_path)}
    loader = DataLoader(batches(10), batch_size=2)
    assert rates_of(trainer_class, options, loader) == expected(steps)


def test_a_data_module_of_the_users_own_is_loaded_once(tmp_path):
    data = Data(5)
    assert rates_of(pl.Trainer, {**PLAIN, "max_epochs": 2, "default_root_dir": str(tmp_path)}, data) == expected(10)
    assert data.made == 1


def test_a_loader_without_a_length_has_the_length_of_max_steps(tmp_path):
    options = {**PLAIN, "max_epochs": 1, "max_steps": 4, "default_root_dir": str(tmp_path)}
    assert rates_of(pl.Trainer, options, DataLoader(Endless(), batch_size=2)) == expected(4)


class AfterFive(pl.callbacks.Timer):
    """Five steps are all that fit into its time."""

    def _check_time_remaining(self, trainer):
        trainer.should_stop = trainer.global_step >= 5


def test_a_time_alone_gives_a_constant_rate_after_the_warm_up(tmp_path):
    options = {**PLAIN, "default_root_dir": str(tmp_path)}
    timer = AfterFive("00:01:00:00")
    rates = rates_of(pl.Trainer, options, DataLoader(batches(3), batch_size=2), limit=timer)
    assert rates == expected(5, Constant(warmup_steps=100))
    with pytest.raises(ValueError, match="WarmupLinear does not know at which step"):
        rates_of(pl.Trainer, options, DataLoader(batches(3), batch_size=2), WarmupLinear(), limit=timer)


def test_a_resumed_run_goes_on_with_the_rates_of_an_uninterrupted_one(tmp_path):
    options = {**PLAIN, "max_epochs": 2, "default_root_dir": str(tmp_path)}
    whole = rates_of(pl.Trainer, options, Data(5))

    class Save(pl.Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            if trainer.current_epoch == 0:
                trainer.save_checkpoint(tmp_path / "half.ckpt")

    model, rates = LanguageModel(CONFIG, optimizer=lambda params: AdamW(params, lr=1.0)), Rates()
    pl.Trainer(**options, callbacks=[Save()]).fit(model, Data(5))
    model = LanguageModel(CONFIG, optimizer=lambda params: AdamW(params, lr=1.0))
    pl.Trainer(**options, callbacks=[rates]).fit(model, Data(5), ckpt_path=tmp_path / "half.ckpt", weights_only=True)
    assert rates.seen == whole[5:]


# ---- schedules that follow the validation

PLATEAU = {
    "model.schedule": {
        "class_path": "torch.optim.lr_scheduler.ReduceLROnPlateau",
        "init_args": {"factor": 0.5, "patience": 0, "threshold": 0.5},  # half the loss, or the rate is halved
    },
    "trainer.val_check_interval": 2,
    "trainer.limit_val_batches": 1,
}


def test_a_schedule_follows_the_validation_and_resumes(tiny, monkeypatch):
    options = PLATEAU
    whole = tiny("fit", **options, **{"trainer.default_root_dir": "whole"})
    expected = [0.001, 0.001, 0.001, 0.001, 0.0005, 0.0005]  # logged before the validations after steps 2, 4 and 6
    assert [rate for _, rate in curves(whole.trainer.log_dir)["learning_rate"]] == pytest.approx(expected)
    (config,) = whole.trainer.lr_scheduler_configs
    assert isinstance(config.scheduler, ReduceLROnPlateau)
    assert config.scheduler.last_epoch == 3
    killed_after(monkeypatch, tiny, 5, **options)
    rest = tiny("fit", "--ckpt_path=last", **options)
    assert_same_weights(weights(whole), weights(rest))
    # more steps change nothing that it has learned; another rate does
    more = tiny("fit", "--ckpt_path=last", **options, **{"trainer.max_steps": 8})
    assert more.trainer.lr_scheduler_configs[0].scheduler.last_epoch == 4
    assert more.trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.000125)
    other = tiny("fit", "--ckpt_path=last", **options, **{"model.optimizer.lr": 0.01, "trainer.max_steps": 9})
    assert other.trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.01)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"trainer.limit_val_batches": 0}, "ReduceLROnPlateau follows the validation, and this run has none"),
        (
            {
                "model.schedule": {
                    "class_path": "lightning.pytorch.cli.ReduceLROnPlateau",
                    "init_args": {"monitor": "loss"},
                }
            },
            "model.schedule monitors 'loss': choose one of val_loss",
        ),
    ],
)
def test_a_schedule_that_would_not_hear_of_its_metric_is_an_error(tiny, error_line, changes, says):
    with pytest.raises(SystemExit):
        tiny("fit", **{**PLATEAU, **changes})
    assert says in error_line()
