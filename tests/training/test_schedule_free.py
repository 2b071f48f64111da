"""A schedule-free optimizer: evaluated and saved at its average, resumed where it trains."""

from pathlib import Path

import pytest
import torch

from lightning_llm import LanguageModel
from lightning_llm.checkpoints.reading import read_checkpoint
from lightning_llm.training.evaluation import Evaluation
from tests.cli.test_resume import CONSTANT, FOLDER, killed_after
from tests.tiny_run import assert_same_weights, weights


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


@pytest.mark.slow
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
