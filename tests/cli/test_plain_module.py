"""A plain LightningModule, with data of its own: ``fit``, a resume, and an experiment with it."""

import json
from pathlib import Path

import pytest
import yaml

from lightning_llm.__main__ import main
from lightning_llm.ablate.results import load_experiment
from lightning_llm.runs.status import read_summary

MODULE = """
import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch import nn
from torch.utils.data import DataLoader


class Line(LightningModule):
    def __init__(self, width: int = 4, lr: float = 0.1) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, width), nn.Tanh(), nn.Linear(width, 1))
        self.lr = lr

    def loss(self, batch):
        x, y = batch
        return (self.net(x)[:, 0] - y).square().mean()

    def training_step(self, batch, index):
        return self.loss(batch)

    def validation_step(self, batch, index):
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), self.lr)


class ByHand(Line):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, index):
        self.optimizers().zero_grad()
        self.manual_backward(self.loss(batch))
        self.optimizers().step()


class Mute(LightningModule):
    def __init__(self) -> None:
        super().__init__()


class FromStep:
    def __init__(self, data) -> None:
        self.data = data

    def __iter__(self):
        for step in range(self.data.trainer.global_step, 100):
            yield self.data.batch(1000 * self.data.order + self.data.skip + step)


class Points(LightningDataModule):
    def __init__(self, rows: int = 4, order: int = 0, skip: int = 0) -> None:
        super().__init__()
        self.rows, self.order, self.skip = rows, order, skip

    def batch(self, number):
        x = torch.randn(self.rows, 2, generator=torch.Generator().manual_seed(number))
        return x, x.sum(1)

    def train_dataloader(self):
        return FromStep(self)

    def val_dataloader(self):
        return DataLoader([self.batch(10**6)], batch_size=None)
"""
CONFIG = {
    "model": {"class_path": "line_model.Line"},
    "data": {"class_path": "line_model.Points"},
    "trainer": {"accelerator": "cpu", "max_steps": 8, "val_check_interval": 4, "log_every_n_steps": 2},
}
FIT = ["fit", "--config=line.yaml"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "line_model.py").write_text(MODULE)
    (tmp_path / "line.yaml").write_text(yaml.safe_dump(CONFIG))
    return tmp_path


def test_a_plain_module_trains_resumes_with_the_same_batches_and_is_listed(folder, capsys):
    assert main([*FIT, "--trainer.run_dir=whole"]) == 0
    said = capsys.readouterr()
    assert "line_model.Line; no LanguageModel: no memory or FLOPs in advance" in said.out + said.err
    assert "line_model.Line: 17 parameters" in said.out
    assert "no sample" not in said.out
    assert main([*FIT, "--trainer.run_dir=parts", "--trainer.max_steps=4"]) == 0
    assert main([*FIT, "--trainer.run_dir=parts", "--ckpt_path=last"]) == 0
    whole, parts = (read_summary(folder / name, ("val_loss",)) for name in ("whole", "parts"))
    for field in ("val_loss", "steps", "batches", "validation_batches", "initial_values", "batches_at"):
        assert whole[field] == parts[field] is not None, field
    capsys.readouterr()
    assert main(["validate", "--ckpt_path=whole"]) == 0
    assert f"{whole['val_loss']:.6f}" in capsys.readouterr().out
    assert main(["runs", "."]) == 0
    assert capsys.readouterr().out.count("finished") == 2
    assert main([*FIT, "--trainer.run_dir=slow", "--model.lr=0.01"]) == 0
    capsys.readouterr()
    assert main(["compare", "whole", "parts", "--format=json"]) == 0  # one group, no comparison
    assert '"unit": "val_loss"' in capsys.readouterr().out
    assert main(["compare", "whole", "slow", "--format=markdown"]) == 0
    printed = capsys.readouterr().out
    assert "val_loss" in printed
    assert "nats/token" not in printed  # the unit is the module's own


def test_a_module_that_optimizes_by_itself_takes_the_same_steps(folder):
    assert main([*FIT, "--trainer.run_dir=usual"]) == 0
    assert main([*FIT, "--trainer.run_dir=by_hand", "--model.class_path=line_model.ByHand"]) == 0
    usual, by_hand = (read_summary(folder / name, ("val_loss",)) for name in ("usual", "by_hand"))
    for field in ("val_loss", "steps", "batches", "initial_values"):
        assert usual[field] == by_hand[field] is not None, field


@pytest.mark.parametrize("command", ["fit", "check"])
def test_a_module_without_a_training_step_is_one_line(folder, capsys, command):
    assert main([command, "--config=line.yaml", "--model.class_path=line_model.Mute"]) == 2
    line = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    assert line == [
        f"lightning-llm {command}: error: model.class_path line_model.Mute has no training_step, which training calls: "
        "add it (docs/extending.md)"
    ]
    assert not Path("runs").exists()


@pytest.mark.slow
def test_a_plain_module_is_compared_and_hashes_say_which_batches_pairs_share(folder, capsys):
    experiment = {
        "baseline": "line.yaml",
        "variants": {"wide": {"model.width": 8}, "slow": {"model.lr": 0.01}, "rows": {"data.rows": 2}},
        "seeds": {"option": "data.order"},
        "pairs": 2,
        "out": "out",
    }
    (folder / "exp.yaml").write_text(yaml.safe_dump(experiment))
    assert main(["ablate", "run", "exp.yaml"]) == 2  # another number of rows is another validation text
    assert "rows,seed=0 and out/runs/baseline,seed=0 are no pair: their validation batches differ" in " ".join(
        capsys.readouterr().err.split()
    )
    experiment["variants"]["rows"] = {"data.skip": 50}
    (folder / "exp.yaml").write_text(yaml.safe_dump({**experiment, "out": "again"}))
    assert main(["ablate", "run", "exp.yaml"]) == 0
    loaded = load_experiment(folder / "again")
    assert loaded.replay is not None
    assert loaded.replay.difference == 0
    batches = {(key.name, key.seed): result.summary["batches"] for key, result in loaded.results.items()}
    assert batches["baseline", 0] == batches["slow", 0] == batches["wide", 0] != batches["baseline", 1]
    report = json.loads((folder / "again" / "report.json").read_text())
    assert report["unit"] == "val_loss"
    others = "rows: by their hashes, its pairs share no training batches; it trains 8 steps, on an amount of data that "
    assert f"{others}is not known." in report["notes"]
    assert {row["pairs"] for row in report["rows"] if row["variant"] != "baseline"} == {2}
