"""Learning rates by group, schedule-free optimizers, schedules that follow a metric: from options to a resumed run."""

from pathlib import Path

import pytest
import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from lightning_llm import LanguageModel
from lightning_llm.checkpoints.reading import read_checkpoint
from lightning_llm.training.evaluation import Evaluation
from tests.cli.test_resume import CONSTANT, FOLDER, assert_same_weights, curve, killed_after, weights

EMBEDDINGS, REST = {"pattern": "embed_*", "lr_factor": 0.1}, {"pattern": "layers.1*", "weight_decay_factor": 0.0}
GROUPS = {"model.groups": [EMBEDDINGS, REST]}


def test_each_group_has_its_rate_in_the_log_and_in_a_resumed_run(tiny, monkeypatch):
    whole = tiny("fit", **GROUPS, **{"trainer.default_root_dir": "whole"})
    (optimizer,) = whole.trainer.optimizers
    names = [group["name"] for group in optimizer.param_groups]
    assert {"embeddings:embed_*", "hidden_matrices:layers.1*", "hidden_matrices", "vectors"} <= set(names)
    assert {group["weight_decay"] for group in optimizer.param_groups if "layers.1" in group["name"]} == {0.0}
    run = whole.trainer.log_dir
    usual = curve(run, "learning_rate")
    assert len({rate for _, rate in usual}) > 3  # the schedule
    assert curve(run, "learning_rate/hidden_matrices") == usual
    assert curve(run, "learning_rate/embeddings:embed_*") == [(n, pytest.approx(0.1 * rate)) for n, rate in usual]
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


# ---- schedule-free


class ScheduleFreeSGD(torch.optim.Optimizer):
    """z ← z - lr g at y = (1 - β) z + β x, where x averages z (Defazio et al. 2024, equations 3 to 5)."""

    def __init__(self, params, lr=0.5, beta=0.9):
        super().__init__(params, {"lr": lr, "beta": beta, "k": 0, "train_mode": False})

    def _to(self, train):
        for group in self.param_groups:
            weight = 1 - group["beta"] if train else 1 - 1 / group["beta"]
            for param in group["params"] if group["train_mode"] != train else ():
                if "z" in self.state[param]:
                    param.data.lerp_(self.state[param]["z"], weight)
            group["train_mode"] = train

    def train(self):
        self._to(True)

    def eval(self):
        self._to(False)

    @torch.no_grad()
    def step(self, closure=None):
        with torch.enable_grad():
            loss = closure()
        for group in self.param_groups:
            assert group["train_mode"], "a step at the average"
            share = 1 / (group["k"] + 1)
            for param in group["params"]:
                z = self.state[param].setdefault("z", param.clone())
                param.lerp_(z, share).add_(param.grad, alpha=group["lr"] * (group["beta"] * (1 - share) - 1))
                z.sub_(param.grad, alpha=group["lr"])
            group["k"] += 1
        return loss


FREE = {"model.optimizer": f"{__name__}.ScheduleFreeSGD", **CONSTANT}


def test_a_schedule_free_optimizer_is_evaluated_and_saved_at_its_average(tiny, monkeypatch):
    modes, add = [], Evaluation.add

    def seen(self, *args):
        modes.append(run_of["model"].trainer.optimizers[0].param_groups[0]["train_mode"])
        add(self, *args)

    run_of = {}
    monkeypatch.setattr(LanguageModel, "on_fit_start", lambda self: run_of.update(model=self))
    monkeypatch.setattr(Evaluation, "add", seen)
    often = {"class_path": "lightning_llm.training.callbacks.RunCheckpoints", "init_args": {"every_n_steps": 2}}
    sampling = {"class_path": "lightning_llm.training.callbacks.SampleText", "init_args": {"every_n_steps": 1}}
    options = {**FREE, "trainer.callbacks": [often]}
    whole = tiny("fit", **options, **{"trainer.default_root_dir": "whole"})
    assert modes
    assert not any(modes)
    final = read_checkpoint(Path(whole.trainer.log_dir) / "checkpoints/step-00000006.ckpt")
    assert final["optimizer_states"][0]["param_groups"][0]["k"] == 6
    assert final["optimizer_states"][0]["param_groups"][0]["train_mode"] is False
    assert_same_weights(final["state_dict"], weights(whole))  # after fit too
    sampled = {**options, "trainer.callbacks": [often, sampling], "trainer.default_root_dir": "sampled"}
    assert_same_weights(weights(whole), weights(tiny("fit", **sampled)))
    killed_after(monkeypatch, tiny, 5, **options)  # saved at 4, which is no validation
    (state,) = read_checkpoint(FOLDER / "step-00000004.ckpt")["optimizer_states"]
    assert state["param_groups"][0]["train_mode"] is False
    assert_same_weights(weights(whole), weights(tiny("fit", "--ckpt_path=last", **options)))


def test_a_resumed_schedule_free_optimizer_keeps_its_count_of_steps(tiny):
    tiny("fit", **FREE, **{"trainer.max_steps": 3})
    run = tiny("fit", "--ckpt_path=last", **FREE, **{"model.optimizer.lr": 0.25, "trainer.max_steps": 5})
    group = run.trainer.optimizers[0].param_groups[0]
    assert (group["k"], group["lr"]) == (5, 0.25)


# ---- schedules that follow a metric

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
    assert [rate for _, rate in curve(whole.trainer.log_dir, "learning_rate")] == pytest.approx(expected)
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


# ---- μP


def test_mup_is_in_the_checkpoint_and_resumes(tiny, monkeypatch, error_line):
    options = {"model.architecture.mup": {"base_width": 16, "base_head_dim": 16}}
    whole = tiny("fit", **options, **{"trainer.default_root_dir": "whole"})
    rates = {group["name"]: group["lr"] for group in whole.trainer.optimizers[0].param_groups}
    assert rates["hidden_matrices:*_proj.weight"] == pytest.approx(rates["embeddings"] / 2)
    usual = curve(whole.trainer.log_dir, "learning_rate")
    half = curve(whole.trainer.log_dir, "learning_rate/matrices:lm_head.weight")
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
