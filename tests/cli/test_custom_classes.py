"""Classes of the user's own for model and data: ``--model.class_path``, ``--data.class_path``, and in Python."""

import json
import sys
from pathlib import Path

import pytest
import torch
import yaml
from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader

from lightning_llm import LanguageModel, ModelConfig, Trainer
from lightning_llm.__main__ import main
from lightning_llm.cli.train import cli_main
from lightning_llm.runs.options import short_options
from lightning_llm.training.callbacks.rank_consistency import RankConsistencyCheck
from tests.tiny_run import assert_same_weights, weights

SHAKESPEARE = Path(__file__).parents[2] / "configs" / "shakespeare-char.yaml"
RUN = Path("runs/run/version_0")
MINE = """
import itertools
import sys

import torch
from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader

from lightning_llm import LanguageModel
from lightning_llm.data import Tokenizer

print("mine: imported", file=sys.stderr)


class Model(LanguageModel):
    def __init__(self, *args, factor: float = 2.0, **kwargs):
        super().__init__(*args, **kwargs)
        self.factor, self.bias = factor, torch.nn.Parameter(torch.zeros(1))
        self.save_hyperparameters("factor")

    def loss(self, batch):
        return self.factor * super().loss(batch) + (self.bias - 1).square().sum()


class Broken(LanguageModel):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.shape["x"]


class FromStep:
    def __init__(self, data):
        self.data = data

    def __iter__(self):
        return map(self.data.batch, itertools.count(self.data.trainer.global_step))


class Bare(LightningDataModule):
    tokenizer, seed = "of another library", None

    @property
    def context_length(self):
        raise RuntimeError("not set up")

    def __init__(self, rows: int = 8, length: int = 12):
        super().__init__()
        self.rows, self.length = rows, length

    def batch(self, number):
        generator = torch.Generator().manual_seed(number)
        digits = torch.randint(10, (self.rows, self.length + 1), generator=generator)
        return {"input_ids": digits[:, :-1], "targets": digits[:, 1:]}

    def train_dataloader(self):
        return FromStep(self)


class Digits(Bare):
    vocab_size, bytes_per_token, context_length = 10, 1.0, 12
    loaded = None

    @property
    def tokens_per_step(self):
        return self.rows * self.length

    def val_dataloader(self):
        return DataLoader([self.batch(1000), self.batch(1001)], batch_size=None)

    def state_dict(self):
        return {"step": self.trainer.global_step}

    def load_state_dict(self, state):
        self.loaded = state


class Bytes(Digits):
    vocab_size, tokenizer = 256, Tokenizer.train_byte()


class ThreeLoaders(Digits):
    def val_dataloader(self):
        return [super(ThreeLoaders, self).val_dataloader()] * 3


class Tuples(Digits):
    def batch(self, number):
        return tuple(super().batch(number).values())
"""


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """A module ``mine`` in the current folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    Path("mine.py").write_text(MINE)
    yield
    sys.modules.pop("mine", None)


@pytest.fixture
def run(mine, flags):
    """``run("fit", "--data.class_path=mine.Digits", …)``: a command on a tiny model; of token data, no option."""

    def words(command, *given, **changes):
        has_own = any(word.startswith("--data.class_path") for word in given)
        options = {word.partition("=")[0][2:]: None for word in flags() if word.startswith("--data.")}
        return [command, *given, *flags(**{**(options if has_own else {}), **changes})]

    return words


def summary():
    return json.loads((RUN / "summary.json").read_text())


def test_the_keys_of_a_config_go_to_a_subclass(run, capsys):
    words = run("fit", "--config", str(SHAKESPEARE), "--model.class_path", "mine.Model", "--model.factor=3")
    cli = cli_main([*words, "--trainer.default_root_dir=whole"])
    assert (type(cli.model).__qualname__, cli.model.factor) == ("Model", 3.0)
    config = yaml.safe_load(SHAKESPEARE.read_text())["model"]["architecture"]
    assert cli.model.architecture.mlp == config["mlp"]
    assert cli.model.bias.item() > 0  # its own parameter is trained too
    shown = capsys.readouterr()
    assert "mine.Model: " in shown.out
    assert "imports mine.Model" not in shown.err  # the command line named it
    cli_main([*words, "--trainer.max_steps=3"])
    run_dir = Path("runs/shakespeare-char/version_0")
    saved = yaml.safe_load((run_dir / "config.yaml").read_text())
    assert (saved["model"]["class_path"], saved["model"]["factor"]) == ("mine.Model", 3.0)
    sys.modules.pop("mine")
    capsys.readouterr()
    rest = cli_main(["fit", "--ckpt_path", str(run_dir), "--trainer.max_steps=6"])
    lines = capsys.readouterr().err.splitlines()
    said = f"lightning-llm fit: {run_dir / 'config.yaml'} imports mine.Model"
    assert lines.index(said) < lines.index("mine: imported")
    assert_same_weights(weights(cli), weights(rest))
    assert type(rest.model).load_from_checkpoint(run_dir / "checkpoints" / "best.ckpt").factor == 3.0
    assert main(["generate", str(run_dir), "--prompt", "A", "--max-new-tokens", "2"]) == 0
    assert main(["validate", "--ckpt_path", str(run_dir)]) == 0
    assert main(["estimate", "--config", str(run_dir / "config.yaml")]) == 0
    assert "model.class_path mine.Model is counted as a LanguageModel" in capsys.readouterr().err


def test_other_data_train_resume_and_report_what_they_tell(run, capsys, monkeypatch):
    schedule = {"model.schedule.class_path": "lightning_llm.optim.Constant"}
    words = run("fit", "--data.class_path=mine.Digits", "--data.rows=4", **schedule)
    whole = cli_main([*words, "--trainer.default_root_dir=whole"])
    assert whole.model.architecture.vocab_size == 10
    shown = " ".join(capsys.readouterr().out.split())
    for part in ("data mine.Digits", "steps 6 of 48 tokens", "bits/byte", "no sample the data have no tokenizer"):
        assert part in shown
    assert "lightning-llm generate" not in shown
    cli_main([*words, "--trainer.max_steps=3"])
    rest = cli_main(["fit", "--ckpt_path=last", "--trainer.max_steps=6"])
    assert_same_weights(weights(whole), weights(rest))
    assert (whole.datamodule.loaded, rest.datamodule.loaded) == (None, {"step": 3})
    result = summary()
    assert result["tokens"] == 6 * 48
    assert result["bits_per_byte"] == pytest.approx(result["val_loss"] / torch.log(torch.tensor(2.0)).item())
    assert main(["validate", "--ckpt_path", "last"]) == 0
    assert f"val_loss                {result['val_loss']:.6f}" in capsys.readouterr().out
    assert main(["compare", "runs", "whole"]) == 0
    monkeypatch.setattr("lightning_llm.cli.dashboard._serve", lambda *options: None)
    assert main(["dashboard", str(RUN), "--port", "0"]) == 0
    assert main(["runs"]) == 0
    assert main(["generate", str(RUN), "--prompt", "1"]) == 2
    assert "holds no tokenizer" in capsys.readouterr().err


def test_what_data_do_not_tell_is_left_out(run, capsys):
    words = run("fit", "--data.class_path", "mine.Bare", "--model.architecture.vocab_size=10")
    cli_main([*words, "--model.architecture.dropout=0.1"])
    shown = capsys.readouterr()
    assert "mfu" not in shown.out.lower()
    result = summary()
    assert (result["steps"], result["val_loss"], result["bits_per_byte"]) == (6, None, None)
    assert "tokens" not in result
    assert main(["compare", str(RUN)]) == 0


def test_their_tokenizer_is_in_the_checkpoint(run, capsys):
    cli_main(run("fit", "--data.class_path=mine.Bytes", "--trainer.max_steps=3"))
    shown = capsys.readouterr().out
    assert "a sample" in shown
    assert f"lightning-llm generate {RUN}" in shown
    assert main(["generate", str(RUN), "--prompt", "1", "--max-new-tokens", "2"]) == 0


def test_a_budget_is_not_dropped_with_a_loader(tmp_path):
    config = ModelConfig(vocab_size=5, hidden_size=32, num_hidden_layers=1, num_attention_heads=2)
    row = {"input_ids": torch.zeros(4, dtype=torch.int64), "targets": torch.zeros(4, dtype=torch.int64)}
    trainer = Trainer(max_steps=1, accelerator="cpu", logger=False, default_root_dir=str(tmp_path))
    with pytest.raises(ValueError, match=r"memory_budget 1GiB sets the micro-batch of a TokenDataModule"):
        trainer.fit(LanguageModel(config, memory_budget="1GiB"), *[DataLoader([row], batch_size=1)] * 2)


@pytest.mark.parametrize(("own", "found"), [("Bare", ()), ("Digits", ("10 ids in the data", "12 tokens", "need"))])
def test_check_checks_what_is_known(run, capsys, own, found):
    cli_main(run("check", f"--data.class_path=mine.{own}"))
    shown = capsys.readouterr().out
    for part in (f"mine.{own}", *found, "ok"):
        assert part in shown
    assert not Path("runs").exists()


def test_estimate_asks_for_the_sizes_of_other_data(mine, capsys):
    Path("own.yaml").write_text("data: {class_path: mine.Digits}\nmodel: {architecture: {vocab_size: 10}}\n")
    Path("sizes.yaml").write_text("data: {context_length: 12, global_batch_size: 8}\n")
    assert main(["estimate", "--config", "own.yaml"]) == 2
    says = "mine.Digits is not run: add data.context_length and data.global_batch_size"
    assert says in capsys.readouterr().err
    assert main(["estimate", "--config", "own.yaml", "--config", "sizes.yaml"]) == 0
    assert "mine" not in sys.modules


def test_options_of_token_data_in_a_config_are_left_out(run, capsys):
    words = run("check", "--config", str(SHAKESPEARE), "--data.class_path=mine.Digits")
    cli = cli_main(words)
    assert cli.datamodule.rows == 8
    (line,) = (line for line in capsys.readouterr().err.splitlines() if "left out" in line)
    named = line.removeprefix("lightning-llm check: mine.Digits lacks ").removesuffix(": left out")
    assert set(named.split(", ")) == {f"data.{name}" for name in yaml.safe_load(SHAKESPEARE.read_text())["data"]}


@pytest.mark.parametrize("as_path", [False, True])
def test_in_python(run, as_path):
    class Local(LanguageModel):
        pass

    class Data(LightningDataModule):
        vocab_size = 5

        def train_dataloader(self):
            row = torch.arange(9) % 5
            return DataLoader([{"input_ids": row[None, :-1], "targets": row[None, 1:]}] * 4, batch_size=None)

        val_dataloader = train_dataloader

    words = run("fit", "--data.class_path=mine.Digits")
    given = words if as_path else [word for word in words if "class_path" not in word]
    options = ["--trainer.max_steps=2", "--trainer.val_check_interval=2"]
    cli = cli_main([*given, *options], model_class=Local, data_class=Data)
    assert type(cli.model) is Local
    assert type(cli.datamodule).__name__ == ("Digits" if as_path else "Data")
    assert yaml.safe_load((RUN / "config.yaml").read_text())["model"]["class_path"].endswith("<locals>.Local")


BAD = [
    (
        ["--model.class_path=nowhere.Mine"],
        "model.class_path 'nowhere.Mine' cannot be imported: no module was found by this path",
    ),
    (["--model.class_path=mine.Nobody"], "model.class_path mine.Nobody cannot be imported: AttributeError"),
    (["--model.class_path=Mine"], "model.class_path 'Mine' cannot be imported: no module was found by this path"),
    (["--data.class_path=broken.Data"], "data.class_path broken.Data cannot be imported: ZeroDivisionError"),
    (["--model.class_path=mine.Digits"], "model.class_path must be any LightningModule, got mine.Digits"),
    (["--model.class_path=torch.nn.Linear"], "must be any LightningModule, got torch.nn.Linear"),
    (["--data.class_path=mine.Model"], "data.class_path must be any LightningDataModule, got mine.Model"),
    (["--model.class_path=mine.Model", "--model.colour=red"], "model.colour"),
    (["--data.class_path=mine.Digits", "--data.corpus=stdlib"], "data.corpus"),
    (["--data.class_path=mine.Digits", "--data.rows=many"], "data.rows: expected a whole number, got many"),
    (["--config=own.yaml"], "data.colour"),
    (
        ["--model={class_path: mine.Model}"],
        "model.class_path mine.Model: write it in a config, or --model.class_path",
    ),
    (["--config=nested.yaml"], "write each argument of data.class_path as data.NAME"),
    (["--model.class_path=mine.Broken"], "mine.Broken: its constructor failed: AttributeError"),
    (["--model.class_path=mine.Model", "--model.loss_chunks=-1"], "mine.Model: its constructor failed: ValueError"),
    (["--data.class_path=mine.Digits", "--model.memory_budget=1GiB"], "memory_budget 1GiB sets the micro-batch of"),
    (["--data.class_path=mine.Digits", "--model.architecture.vocab_size=9"], "vocab_size 9 is smaller than the 10 ids"),
    (["--data.class_path=mine.Bare"], "architecture.vocab_size is null and there is no data to take it from"),
    (["--data.class_path=mine.ThreeLoaders"], "the data have more than 2 loaders for this evaluation: return fewer"),
    (["--data.class_path=mine.Tuples"], "a batch of the data must be a dict with input_ids and targets, got tuple"),
]


@pytest.mark.parametrize(("given", "says"), BAD, ids=lambda value: value if isinstance(value, str) else value[-1])
def test_a_mistake_is_one_line(run, error_line, given, says):
    Path("broken.py").write_text("1 / 0\n")
    Path("own.yaml").write_text("data: {class_path: mine.Digits, colour: red}\n")
    Path("nested.yaml").write_text("data: {class_path: mine.Digits, init_args: {rows: 4}}\n")
    own_data = ["--data.class_path=mine.Digits"] if any("--config" in word for word in given) else []
    with pytest.raises(SystemExit) as leaving:
        cli_main(run("fit", *own_data, *given))
    assert leaving.value.code == 2
    assert says in error_line()


def test_a_class_path_has_a_short_name():
    assert short_options({"model": {"class_path": "mine.Model"}, "data": {"class_path": "mine.Digits"}}) == {
        "model": "Model",
        "data": "Digits",
    }


def test_several_processes_compare_data_without_a_store():
    assert RankConsistencyCheck().facts(LightningDataModule())["data"] is None
