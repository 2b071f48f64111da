"""The command ``same``: its verdicts and exit statuses, what it writes, and how it answers mistakes."""

import json
from functools import partial

import pytest
import torch

from lightning_llm.__main__ import main
from lightning_llm.cli import same

PARTS = """
import torch
from torch.nn import functional as F
from lightning_llm.model.mlp import SwiGLU


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return 1.01 * gradient


class Wrong(SwiGLU):
    def __init__(self, config, layer):
        super().__init__(config.hidden_size, config.intermediate_size)
        self.layer = layer

    def forward(self, x):
        return super().forward(Scaled.apply(x) if self.layer == 1 else x)


class InFloat32(SwiGLU):
    def __init__(self, config):
        super().__init__(config.hidden_size, config.intermediate_size)

    def forward(self, x):
        return super().forward(x.float().to(x.dtype))


def right(part, x):
    return part.down_proj(F.silu(part.gate_proj(x)) * part.up_proj(x))


def gelu(part, x):
    return part.down_proj(F.gelu(part.gate_proj(x)) * part.up_proj(x))


def narrow(part, x):
    return x[..., :1]


number = 3
"""


@pytest.fixture
def config(write_config, tmp_path, monkeypatch):
    """``config(section={…}, …)`` writes a config and returns its path; ``same_parts.py`` can be imported."""
    (tmp_path / "same_parts.py").write_text(PARTS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    return partial(write_config, model={"architecture": {"hidden_size": 64}}, trainer={"precision": "bf16-mixed"})


def test_settings_that_are_the_same(config, capsys):
    threads = torch.get_num_threads()
    words = ["--vary", "checkpoint_level=2", "--vary", "model.loss_chunks=1,3", "--json", "out.json"]
    assert main(["same", "--config", config(), *words]) == 0
    lines = capsys.readouterr().out.splitlines()
    for name in ("base", "checkpoint_level=2", "model.loss_chunks=1", "model.loss_chunks=3"):
        assert any(line.startswith(f"{name}: same up to rounding") for line in lines)
        assert len([line for line in lines if line.startswith(f"{name} ")]) == 2  # in bf16-mixed and 64-true
    with open("out.json", encoding="utf-8") as file:
        written = json.load(file)
    row = written["checkpoint_level=2"]["64-true"][0]
    assert row == {"module": "embed_tokens", "phase": "forward", "what": "output", "differs": False, **row}
    assert torch.get_num_threads() == threads


def test_a_part_of_another_package_has_the_bits_of_the_base(config, capsys):
    sizes = "{hidden_size: '${hidden_size}', intermediate_size: '${intermediate_size}'}"
    arguments = f"{{config: {{class_path: transformers.LlamaConfig, init_args: {sizes}}}}}"
    llama = f"{{class_path: transformers.models.llama.modeling_llama.LlamaMLP, init_args: {arguments}}}"
    path = config(model={"architecture": {"hidden_size": 64, "mlp": "swiglu"}})
    words = ["same", "--config", path, f"--vary=model.architecture.mlp={llama}", "--vary=model.architecture.mlp=geglu"]
    assert main(words) == 1
    out = capsys.readouterr().out
    assert "mlp=LlamaMLP: same up to rounding, and the bits of base" in out
    assert "base: same up to rounding\n" in out
    assert "mlp=geglu: layers.0.mlp differs first" in out


def test_one_percent_is_named_with_its_layer(config, capsys):
    assert main(["same", "--config", config(), "--vary", "model.architecture.mlp=same_parts.Wrong"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert "base: same up to rounding" in lines
    (verdict,) = [line for line in lines if line.startswith("mlp=same_parts.Wrong: ")]
    assert "layers.1.mlp differs first, in backward (gradient of its input): its error is 0.01 in 64-true" in verdict
    marked = [line.split()[0] for line in lines if line.endswith("differs first")]
    assert marked == ["layers.1.mlp"]


def test_a_part_that_computes_in_float32_is_taken_for_one(config, capsys):
    words = [
        "--vary",
        "model.architecture.mlp=same_parts.InFloat32",
        "--vary",
        "model.architecture.mlp=same_parts.Wrong",
    ]
    assert main(["same", "--config", config(), *words]) == 1
    lines = [line for line in capsys.readouterr().out.splitlines() if " differs first, in " in line]
    hint = "may be that of a part which computes in float32"
    assert [(line.partition(":")[0], hint in line) for line in lines] == [
        ("mlp=same_parts.InFloat32", True),
        ("mlp=same_parts.Wrong", False),
    ]


def test_a_function_of_the_users(config, capsys):
    words = ["same", "--config", config(trainer={"precision": "32-true"}), "--against"]
    assert main([*words, "same_parts:right", "--table"]) == 0
    out = capsys.readouterr().out
    assert "base: same up to rounding" in out
    assert "layers.1.mlp" in out
    assert main([*words, "same_parts:gelu", "--part", "layers.2.mlp"]) == 1
    assert "base: layers.2.mlp differs first, in forward (output)" in capsys.readouterr().out


def test_all_leaves_out_what_does_not_apply(config, capsys, monkeypatch):
    monkeypatch.setattr(same, "VARIES", {"model.architecture.checkpoint_level": same.Vary((0, 1))})
    assert main(["same", "--config", config(model={"architecture": {"mlp": "relu"}}), "--vary", "all"]) == 0
    out = capsys.readouterr().out
    assert "checkpoint_level=1 does not apply: checkpoint_level 1 needs mlp 'memory_optimized_swiglu'" in out
    words = ["same", "--config", config(model={"architecture": {"mlp": "relu"}}), "--vary", "all"]
    assert main([*words, "--vary", "model.architecture.nosuch=1"]) == 2  # what was typed is no part of all
    assert "--vary model.architecture.nosuch=1: " in capsys.readouterr().err
    assert "checkpoint_level=0: same up to rounding" in out


@pytest.mark.parametrize(
    ("words", "sections", "reason"),
    [
        ([], {}, "there is nothing to compare: give --vary or --against"),
        (["--vary", "colour=red"], {}, "--vary 'colour=red' is not supported: choose among checkpoint_level,"),
        (["--vary", "model.architecture.mlp"], {}, "--vary 'model.architecture.mlp' is not supported: choose among"),
        (["--vary", "checkpoint_level=7"], {}, "checkpoint_level must be one of 0, 1, 2, got 7"),
        (["--vary", "model.architecture.colour=1"], {}, "colour=1: there is no such option of the architecture"),
        (["--vary", "micro_batch_size=9"], {}, "--vary data.micro_batch_size=9: it takes 1, 2, 3, 4"),
        (["--vary", "loss_chunks=-1"], {}, "--vary model.loss_chunks=-1: it takes a whole number of at least 0"),
        (["--vary", "precision=16-true"], {}, "it takes 32-true, 64-true, bf16-mixed, bf16-true"),
        (["--vary", "devices=3"], {}, "--vary trainer.devices=3: it takes 2"),
        (["--vary", "model.architecture.mlp=gelu"], {}, "it has other parameters than the base (layers.0.mlp"),
        (["--vary", "model.architecture.mlp=nowhere.MLP"], {}, "mlp 'nowhere.MLP' cannot be imported"),
        (["--vary", "export"], {"model": {"architecture": {"position": "none"}}}, "no Hugging Face class computes"),
        (["--vary", "loss_chunks"], {"trainer": {"precision": "16-mixed"}}, "trainer.precision 16-mixed is not"),
        (["--vary", "compile_scope=layers"], {}, "--vary model.compile_scope=layers: it takes blocks, model"),
        (["--vary", "loss_chunks"], {"model": {"class_path": "mine.Model"}}, "model.class_path mine.Model: same"),
        (["--vary", "loss_chunks"], {"model": {"architecture": {"mlp": "same_parts.Wrong"}}}, "give --trust-code"),
        (["--against", "same_parts"], {}, "--against 'same_parts' must be MODULE:FUNCTION"),
        (["--against", "nowhere:f"], {}, "--against 'nowhere:f' cannot be imported"),
        (["--against", "same_parts:nothing"], {}, "has no attribute 'nothing'"),
        (["--against", "same_parts:number"], {}, "--against 'same_parts:number' is no function"),
        (["--against", "same_parts:narrow"], {}, "mlp SwiGLU must return the shape (4, 64, 32) of its input"),
        (["--against", "same_parts:right", "--part", "mpl"], {}, "--part 'mpl' is no part of the model: choose among"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line(config, capsys, words, sections, reason):
    assert main(["same", "--config", config(**sections), *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("lightning-llm same: error: ")
    assert reason in line
    assert line.endswith("(docs/extending.md)")


def test_kernels_are_interpreted_on_a_cpu_in_float32(config, capsys, monkeypatch):
    asked = []
    monkeypatch.setattr(
        "lightning_llm.same.steps.Float64Reference.findings",
        lambda reference, setting: asked.append(setting) or {"x": []},
    )
    assert main(["same", "--config", config(), "--vary", "kernels"]) == 0
    assert [(one.interpreted, one.precision) for one in asked] == [(False, "bf16-mixed"), (True, "32-true")]


def test_a_config_that_is_not_there(capsys):
    assert main(["same", "--config", "nowhere.yaml", "--vary", "all"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
