"""``size`` of the training commands: what it sets, what wins, and what a run records."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
import yaml

from lightning_llm.__main__ import main
from lightning_llm.accounting.sizing import sizing_for
from lightning_llm.cli.ablate import _split
from lightning_llm.cli.ablate_fit import read_variant
from lightning_llm.cli.train import cli_main
from lightning_llm.model.transformer import Transformer

BASE = {
    "model": {
        "architecture": {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "mlp": "swiglu"},
        "optimizer": {"class_path": "lightning_llm.optim.AdamW", "init_args": {"lr": 0.01, "weight_decay": 0.2}},
        "schedule": {"class_path": "lightning_llm.optim.WarmupLinear", "init_args": {"warmup_steps": 5}},
    },
    "data": {"tokenizer": "char", "context_length": 16, "global_batch_size": 8, "store": "stores/text"},
    "trainer": {
        "max_steps": 40,
        "accelerator": "cpu",
        "devices": 1,
        "precision": "32-true",
        "val_check_interval": 20,
        "log_every_n_steps": 1,
    },
}


def counted(cli):
    """Parameters of the model itself, without embeddings and head."""
    with torch.device("meta"):
        model = Transformer(dataclasses.replace(cli.model.architecture, vocab_size=5))
    return sum(p.numel() for name, p in model.named_parameters() if not name.startswith(("embed", "lm_head")))


@pytest.fixture
def base(tmp_path, text_file, monkeypatch):
    """A config whose store exists; the current folder is empty otherwise."""
    monkeypatch.chdir(tmp_path)
    assert main(["prepare", str(text_file), "--out", "stores/text", "--tokenizer", "char"]) == 0
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(BASE))
    return "base.yaml"


def options_of(*words):
    """All options of ``check``, by dotted name, and the command line object."""
    cli = cli_main(["check", *words])
    return cli.resolved, cli


def test_fit_records_the_options_that_size_set(base, capfd):
    words = ["--config", base, "--size", "3k", "--tokens_per_parameter", "0.2", "--keep_freed_memory=false"]
    cli_main(["fit", *words])
    expected = sizing_for(BASE, 3000, 0.2)
    assert "fit: size 3k sets hidden_size 16" in capfd.readouterr().err
    (config,) = Path("runs").glob("base/version_0/config.yaml")
    recorded = yaml.safe_load(config.read_text())
    assert not {"size", "tokens_per_parameter", "repeat"} & recorded.keys()
    for name, value in expected.options.items():
        found = recorded
        for part in name.split("."):
            found = found[part]
        assert found == value, name
    # the record starts the same run again, without size
    again, _ = options_of("--config", str(config), "--keep_freed_memory=false")
    first, _ = options_of(*words)
    for section in ("model", "data"):
        assert again[section] == first[section]
    assert again["trainer"]["max_steps"] == first["trainer"]["max_steps"]
    # a resumed run takes the options of its record, and so does the same command
    cli_main(["fit", "--ckpt_path", "last", "--keep_freed_memory=false"])
    cli_main(["fit", *words, "--ckpt_path", "last"])
    assert "changed" not in capfd.readouterr().err
    with pytest.raises(SystemExit):
        cli_main(["fit", "--ckpt_path", "last", "--size", "3k"])
    assert "leave size out" in capfd.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ["--size=4k", "--tokens_per_parameter=1"],
        ["--size", "4000", "--tokens_per_parameter", "1"],
        ["--config", "size.yaml"],
    ],
)
def test_size_is_given_in_words_or_in_a_file(base, words, tmp_path):
    (tmp_path / "size.yaml").write_text("{size: 4k, tokens_per_parameter: 1}")
    found, cli = options_of("--config", base, *words)
    expected = sizing_for(BASE, 4000, 1.0)
    assert cli.sizing.options == expected.options
    assert found["model"]["architecture"]["hidden_size"] == expected.options["model.architecture.hidden_size"]


def test_words_and_later_files_win(base, tmp_path):
    (tmp_path / "size.yaml").write_text("{size: 6k, tokens_per_parameter: 1, trainer: {max_steps: 80}}")
    later = {"model": {"architecture": {"num_hidden_layers": 2}, "optimizer": {"init_args": {"lr": 0.5}}}}
    (tmp_path / "later.yaml").write_text(yaml.safe_dump(later))
    words = ["--model.architecture={mlp: gelu}", "--data.context_length", "8"]
    found, cli = options_of("--config", base, "--config", "size.yaml", "--config", "later.yaml", *words)
    architecture = found["model"]["architecture"]
    assert (architecture["num_hidden_layers"], architecture["mlp"], architecture["head_dim"]) == (2, "gelu", 16)
    assert found["model"]["optimizer"]["init_args"]["lr"] == 0.5
    assert found["data"]["context_length"] == 8
    assert counted(cli) == cli.sizing.parameters
    assert abs(cli.sizing.parameters / 6000 - 1) <= 0.1
    assert found["trainer"]["max_steps"] != 80  # which is the base's: the file has size itself
    length = found["trainer"]["max_steps"] * found["data"]["global_batch_size"] * 8
    assert length == pytest.approx(6000, rel=0.1)


def test_custom_parts_are_measured(base, tmp_path, monkeypatch):
    code = "from torch import nn\nclass Wide(nn.Module):\n    def __init__(self, config):\n        super().__init__()\n"
    code += "        self.up = nn.Linear(config.hidden_size, config.intermediate_size)\n"
    code += "        self.down = nn.Linear(config.intermediate_size, config.hidden_size)\n"
    code += "    def forward(self, x):\n        return self.down(self.up(x).relu())\n"
    (tmp_path / "wide_part.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    words = ["--model.architecture.mlp", "wide_part.Wide", "--size", "9k", "--tokens_per_parameter", "1"]
    _, cli = options_of("--config", base, *words)
    assert abs(cli.sizing.parameters / 9000 - 1) <= 0.1
    assert counted(cli) == cli.sizing.parameters


def test_too_many_epochs_are_refused_unless_they_are_asked_for(base, capfd, tmp_path):
    words = ["--config", base, "--size", "50k", "--tokens_per_parameter", "50"]
    with pytest.raises(SystemExit) as leaving:
        cli_main(["fit", *words])
    assert leaving.value.code == 2
    (line,) = [line for line in capfd.readouterr().err.splitlines() if "error" in line]
    assert "more than 4: the largest size that fits is" in line
    largest = line.partition("fits is ")[2].partition(";")[0]
    cli_main(["check", *words, "--repeat"])
    (tmp_path / "repeat.yaml").write_text("repeat: true")
    cli_main(["check", *words, "--config", "repeat.yaml"])
    cli_main(["check", *words, "--size", largest])
    assert main(["estimate", *words]) == 2
    assert line.partition("error: ")[2].partition(" (docs")[0] in capfd.readouterr().err
    assert main(["estimate", *words, "--repeat"]) == 0


def test_estimate_prints_what_fit_would_set(base, capsys, tmp_path):
    words = ["--config", base, "--size", "4k", "--tokens_per_parameter", "1"]
    assert main(["estimate", *words, "--json", "out.json"]) == 0
    report, printed = json.loads((tmp_path / "out.json").read_text()), capsys.readouterr().out
    _, cli = options_of(*words)
    assert report["sizing"]["options"] == cli.sizing.options
    assert report["sizing"]["flops"] > 0
    tokens = cli.datamodule.store.splits["train"].tokens
    assert report["sizing"]["epochs"] == pytest.approx(cli.sizing.tokens / tokens)
    for name, value in cli.sizing.options.items():
        assert any(line.split() == [name, f"{value:,}"] for line in printed.splitlines()), name
    assert f"{report['sizing']['epochs']:.2f}" in printed
    (tmp_path / "size.yaml").write_text("{size: 4k, tokens_per_parameter: 1}")
    (tmp_path / "later.yaml").write_text("model: {architecture: {num_hidden_layers: 2}}")
    words = ["--config", base, "--config", "size.yaml", "--config", "later.yaml"]
    assert main(["estimate", *words, "--json", "later.json"]) == 0
    found = json.loads((tmp_path / "later.json").read_text())["sizing"]["options"]
    assert "model.architecture.num_hidden_layers" not in found
    assert found == options_of(*words)[1].sizing.options
    capsys.readouterr()
    assert main(["plan", *words, "--memory", "1GiB"]) == 0
    assert "size 4k sets hidden_size" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--size", "10"], "size 10 cannot be made from this base: the nearest are"),
        (["--size", "large"], "size must be a number of parameters such as 100k or 1.5M, got 'large'"),
        (["--size", "4k", "--tokens_per_parameter=-1"], "tokens_per_parameter must be a number above 0, got -1"),
        (["--repeat"], "repeat needs size"),
        (["--tokens_per_parameter", "3"], "tokens_per_parameter needs size"),
    ],
)
@pytest.mark.parametrize("command", ["check", "estimate"])
def test_mistakes_are_one_line(base, capfd, command, words, problem):
    assert main([command, "--config", base, *words]) == 2
    (line,) = capfd.readouterr().err.strip().splitlines()
    assert problem in line


def test_a_variant_of_an_experiment_has_the_resolved_options(base):
    words = ["--size=4k", "--tokens_per_parameter=1", "--model.architecture.mlp=relu"]
    variant = read_variant("baseline", [base], words)
    assert not {"size", "tokens_per_parameter", "repeat"} & variant.options.keys()
    assert variant.steps == sizing_for(BASE, 4000, 1.0).options["trainer.max_steps"]
    assert variant.architecture.mlp == "relu"
    null = [f"--{name}=null" for name in ("size", "tokens_per_parameter", "repeat")]
    last = read_variant("baseline", [base], ["--size=4k", "--repeat", *null])
    assert last.trainer.sizing is None  # the last word wins
    with pytest.raises(ValueError, match="baseline: size 10 cannot be made"):
        read_variant("baseline", [base], ["--size=10"])


def test_words_of_ablate_that_belong_to_fit():
    words = ["run", "x.yaml", "--size", "4k", "--repeat", "--name", "n", "--tokens_per_parameter=2"]
    assert _split(words) == (["run", "x.yaml", "--name", "n"], ["--size", "4k", "--repeat", "--tokens_per_parameter=2"])
