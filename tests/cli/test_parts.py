"""Parts of a model from a config and from the command line: trained, resumed, generated with, and estimated."""

import json
from pathlib import Path

import pytest
import torch
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lightning_llm.__main__ import main
from lightning_llm.ablate.options import command_line_of
from lightning_llm.checkpoints.reading import read_checkpoint
from lightning_llm.cli.ablate_fit import read_variant
from lightning_llm.model.parts import BUILT_IN
from lightning_llm.training.run_config import read_config

RUNNING_MEAN = """
from torch import nn


class RunningMean(nn.Module):
    def __init__(self, config, *, scale):
        super().__init__()
        self.scale = scale

    def forward(self, x, context):
        return self.scale * x.cumsum(dim=1) / (context.positions + 1)[..., None].to(x.dtype)
"""
EXPERTS = {"class_path": "mixture_of_experts", "init_args": {"num_experts": 4, "top_k": 2}}
WINDOW = {"class_path": "sliding_window", "init_args": {"window": 8, "every": 2}}
ARCHITECTURE = {"vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}


@pytest.fixture
def of_parts(tmp_path):
    path = tmp_path / "parts.yaml"
    parts = {"mlp": EXPERTS, "attention": WINDOW, "block": {"class_path": "sandwich"}}
    path.write_text(yaml.safe_dump({"model": {"architecture": parts}}))
    return str(path)


def weights(run):
    (path,) = (Path(run.trainer.log_dir) / "checkpoints").glob("step-*4.ckpt")
    return read_checkpoint(path)["state_dict"]


def test_a_run_with_parts_of_a_config_resumes_to_the_same_bits_and_generates(tiny, of_parts, capsys):
    words = "--config", of_parts, "--model.schedule.class_path", "lightning_llm.optim.Constant"
    whole = tiny("fit", *words, **{"trainer.max_steps": 4, "trainer.log_every_n_steps": 1})
    architecture = whole.model.architecture
    assert (architecture.mlp, architecture.attention, architecture.block) == (EXPERTS, WINDOW, "sandwich")
    events = EventAccumulator(whole.trainer.log_dir).Reload()
    assert [point.value > 0 for point in events.Scalars("auxiliary_loss")] == 4 * [True]
    saved = read_config(Path(whole.trainer.log_dir) / "config.yaml")["model"]["architecture"]
    assert saved["attention"] == WINDOW
    first = tiny("fit", *words, **{"trainer.max_steps": 2})
    again = tiny("fit", *words, **{"trainer.max_steps": 4, "ckpt_path": first.trainer.log_dir})
    found, expected = weights(again), weights(whole)
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    capsys.readouterr()
    assert main(["generate", whole.trainer.log_dir, "--prompt", "a", "--max-new-tokens", "3"]) == 0


def test_a_part_on_the_command_line_takes_its_arguments(tiny):
    words = ["--model.architecture.attention", json.dumps(WINDOW)]
    assert tiny("check", *words).model.architecture.attention == WINDOW


SLIDING = {"class_path": "sliding_window", "init_args": {"window": 8}}
NEVER = {"window": 8, "every": None}
TANH = {"class_path": "dynamic_tanh", "init_args": {"alpha": 0.5}}


@pytest.mark.parametrize(
    ("words", "kind", "part"),
    [
        (["attention=sliding_window", "attention.window=8"], "attention", SLIDING),
        (["attention.init_args.window=8", "attention.class_path=sliding_window"], "attention", SLIDING),
        ([f"attention={json.dumps(WINDOW)}", "attention.every=null"], "attention", {**SLIDING, "init_args": NEVER}),
        (["attention=sliding_window", 'attention.init_args={"window": 8}'], "attention", SLIDING),
        (["mlp=mixture_of_experts", "mlp.num_experts=4", "mlp.top_k=2"], "mlp", EXPERTS),
        (["norm=dynamic_tanh", "norm.alpha=5e-1"], "norm", TANH),
        (["loss.z_loss=1e-4"], "loss", {"class_path": "cross_entropy", "init_args": {"z_loss": 0.0001}}),
        (["position.class_path=alibi"], "position", "alibi"),
        (["block.class_path=post"], "block", "post"),
    ],
)
def test_arguments_of_a_part_are_options_by_name(tiny, words, kind, part):
    model = tiny("check", *(f"--model.architecture.{word}" for word in words)).model
    assert getattr(model.architecture, kind) == part


def test_an_argument_by_name_changes_the_part_of_a_config(tiny, of_parts):
    name = "--model.architecture.attention"
    architecture = tiny("check", "--config", of_parts, f"{name}.window=4").model.architecture
    assert architecture.attention == {"class_path": "sliding_window", "init_args": {"window": 4, "every": 2}}
    assert architecture.mlp == EXPERTS
    assert tiny("check", "--config", of_parts, f"{name}.class_path=full").model.architecture.attention == "full"
    section = json.dumps({"attention": SLIDING})
    architecture = tiny("check", f"--model.architecture={section}", f"{name}.every=3").model.architecture
    assert architecture.attention["init_args"] == {"window": 8, "every": 3}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([f"{kind}.class_path={next(iter(BUILT_IN[kind]))}", f"{kind}.nothing=1"], "has no argument 'nothing'")
        for kind in BUILT_IN
    ]
    + [
        (
            ["attention=full", "attention.window=8"],
            "attention 'full' has no argument 'window': it takes softcap (docs/parts.md)",
        ),
        (["attention=sliding_window", "attention.window="], "attention.window must be a whole number from 1, got None"),
        (["mlp.init_args=8"], "model.architecture.mlp.init_args must have options by name, got '8'"),
        (["mlp=7", "mlp.a=1"], "mlp must be a name, an import path, or class_path and init_args, got 7"),
        (["norm=dynamic_tanh", "norm.alpha=.inf"], "model.architecture.norm.alpha is '.inf', expected a finite number"),
        (["mlp.class_path=relue"], "mlp 'relue' is unknown: choose one of swiglu"),
    ],
)
def test_a_wrong_argument_of_a_part_is_one_line(flags, tmp_path, monkeypatch, error_line, words, says):
    monkeypatch.chdir(tmp_path)
    assert main(["check", *flags(), *(f"--model.architecture.{word}" for word in words)]) == 2
    assert says in error_line()


def test_a_variant_of_an_experiment_gives_arguments_by_name(flags, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    option = "model.architecture.attention"
    given = [*flags(), *command_line_of({option: "sliding_window", f"{option}.window": 8})]
    assert read_variant("v", [], given).options["model"]["architecture"]["attention"] == SLIDING
    with pytest.raises(ValueError, match="v: attention 'sliding_window' has no argument 'windo': it takes window"):
        read_variant("v", [], [*given, *command_line_of({f"{option}.windo": 8})])


FOREIGN = """
from torch import nn


class Attributes(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.act = config.hidden_act


class Width(nn.Module):
    def __init__(self, dim, mult=4):
        super().__init__()
        self.inner = nn.Linear(dim, dim * mult)


class Asserts(nn.Module):
    def __init__(self, size, *, eps):
        super().__init__()
        assert size % 7 == 0, "7 heads"
"""


@pytest.mark.parametrize(
    ("kind", "name", "says"),
    [
        ("mlp", "Attributes", "AttributeError: 'ModelConfig' object has no attribute 'hidden_act'"),
        ("mlp", "Width", "TypeError: unsupported operand type(s) for *: 'ModelConfig' and 'int'"),
        (
            "attention",
            "Width",
            "it takes (dim, mult=4): name its arguments in init_args, such as {dim: ${hidden_size}}",
        ),
        ("mlp", "Attributes", "it takes (config): name its arguments in init_args, such as {config: {class_path: …"),
        ("loss", "Attributes", "Attributes(config, **arguments), where config is the ModelConfig"),
        ("norm", "Asserts", "Asserts(size, *, eps, **arguments), where size and eps are numbers"),
        ("norm", "Asserts", "its constructor failed: AssertionError: 7 heads"),
    ],
)
def test_a_class_whose_constructor_does_not_fit_is_one_line(flags, tmp_path, monkeypatch, error_line, kind, name, says):
    (tmp_path / "foreign_parts.py").write_text(FOREIGN)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    for command in ("check", "fit"):
        assert main([command, *flags(**{f"model.architecture.{kind}": f"foreign_parts.{name}"})]) == 2
        line = error_line()
        assert says in line
        assert f"{kind} 'foreign_parts.{name}' is called as" in line
        assert "foreign_parts.py, line " in line


def test_an_argument_that_a_part_lacks_is_named(tiny, error_line):
    with pytest.raises(SystemExit):
        tiny("fit", **{"model.architecture.mlp": json.dumps({"class_path": "relu2", "init_args": {"top_k": 2}})})
    assert "mlp 'relu2' has no argument 'top_k': it takes none (docs/extending.md)" in error_line()


def test_code_of_any_part_is_trusted_only_when_told(tiny, monkeypatch, capsys, tmp_path, recwarn):
    (tmp_path / "running_mean.py").write_text(RUNNING_MEAN)
    monkeypatch.syspath_prepend(tmp_path)
    mean = {"class_path": "running_mean.RunningMean", "init_args": {"scale": 2.0}}
    options = {"model.architecture.attention": json.dumps(mean)}
    run = tiny("fit", **{**options, "trainer.max_steps": 1}).trainer.log_dir
    capsys.readouterr()
    for words in (["generate", run, "--prompt", "a"], ["estimate", "--config", f"{run}/config.yaml"]):
        assert main(words) == 2
        error = capsys.readouterr().err
        assert "names code from outside lightning_llm: running_mean.RunningMean; nothing was imported" in error
        assert main([*words, "--trust-code", *(["--max-new-tokens", "2"] if words[0] == "generate" else [])]) == 0
    assert "parameters and FLOPs of attention running_mean.RunningMean were measured" in capsys.readouterr().out
    assert any("RunningMean has no cache" in str(warning.message) for warning in recwarn)
    assert main(["export", run, "out", "--trust-code"]) == 2
    assert "cannot have attention" in capsys.readouterr().err


def test_the_estimate_says_what_it_assumes_of_experts(tmp_path, capsys):
    config = tmp_path / "config.yaml"
    data = {"context_length": 16, "global_batch_size": 8}
    config.write_text(yaml.safe_dump({"model": {"architecture": {**ARCHITECTURE, "mlp": EXPERTS}}, "data": data}))
    assert main(["estimate", "--config", str(config), "--json", str(tmp_path / "out.json")]) == 0
    out = capsys.readouterr().out
    assert "each expert is assumed to get the same number of tokens" in out
    flops = json.loads((tmp_path / "out.json").read_text())["flops"]["forward_by_part"]["mlp"]
    tokens, width = 8 * 16, 128  # 8/3 of the hidden size, rounded up to a multiple of 64
    assert flops == tokens * 2 * (2 * 3 * 2 * 32 * width + 2 * 32 * 4)  # of two layers: two experts, and the router
    words = ["plan", "--config", str(config), "--memory", "1GiB"]
    assert main(words) == 0
    assert "each expert is assumed" in capsys.readouterr().out


def test_the_next_command_of_a_run_with_an_own_part_trusts_it(tiny, tmp_path, monkeypatch, capsys):
    (tmp_path / "next_part.py").write_text("from torch import nn\n\nclass MLP(nn.Identity):\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    for mlp, words in (("next_part.MLP", " --trust-code"), ("relu", "")):
        tiny("fit", **{"model.architecture.mlp": mlp, "trainer.max_steps": 1})
        (line,) = (line for line in capsys.readouterr().out.splitlines() if "lightning-llm generate" in line)
        assert line.endswith(f"--max-new-tokens 200{words}")


NEXT_TOKEN = """
from torch import nn


class NextToken(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.scale = nn.Linear(1, 1)

    def forward(self, x):
        return self.scale.weight * x.roll(-1, 1)
"""


@pytest.mark.parametrize(
    ("words", "which"),
    [
        (["check", "--config=base.yaml", "--model.architecture.mlp=next_parts.NextToken"], ""),
        (
            [
                "fit",
                "--config=base.yaml",
                "--model.architecture.mlp=next_parts.NextToken",
                "--trainer.log_every_n_steps=1",
            ],
            "lightning-llm fit: ",
        ),
        (
            ["ablate", "run", "--baseline=base.yaml", "--vary=model.architecture.mlp=next_parts.NextToken"],
            "lightning-llm ablate: NextToken: ",
        ),
    ],
    ids=["check", "fit", "ablate"],
)
def test_a_part_that_sees_later_tokens_is_named_before_the_first_step(folder, monkeypatch, capsys, words, which):
    monkeypatch.setattr("lightning_llm.cli.ablate_run.run_experiment", lambda *arguments: None)
    monkeypatch.syspath_prepend(folder)
    (folder / "next_parts.py").write_text(NEXT_TOKEN)
    assert main(words) == 0
    said = "".join(capsys.readouterr())
    assert f"{which}layers.0: with mlp next_parts.NextToken, outputs change" in " ".join(said.split())
