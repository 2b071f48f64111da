"""Settings of a step against the plain form in float64: all that should be the same is, and a wrong part is found."""

import dataclasses

import pytest
import torch
from torch import nn

from lightning_llm.data.batches import IGNORED
from lightning_llm.model.config import ModelConfig
from lightning_llm.model.mlp import MLP, SwiGLU
from lightning_llm.model.norm import RMSNorm
from lightning_llm.same import steps as same
from lightning_llm.same.steps import EXACT, Float64Reference, Setting
from lightning_llm.same.tiny_model import make_batch, tiny_config

HERE = __name__


class Scaled(torch.autograd.Function):
    """The same in forward; a wrong scale in backward."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.factor, None


class WrongInside(SwiGLU):
    """One percent too much in the backward of layer 1."""

    def __init__(self, config, layer):
        super().__init__(config.hidden_size, config.intermediate_size)
        self.factor = 1.01 if layer == 1 else 1.0

    def forward(self, x):
        return self.down_proj(Scaled.apply(self.activation(self.gate_proj(x)) * self.up_proj(x), self.factor))


class WrongWeight(WrongInside):
    def forward(self, x):
        return nn.functional.linear(
            self.activation(self.gate_proj(x)) * self.up_proj(x), Scaled.apply(self.down_proj.weight, self.factor)
        )


class WrongForward(WrongInside):
    def forward(self, x):
        return SwiGLU.forward(self, x) * self.factor


class WrongNorm(RMSNorm):
    def forward(self, x):
        return Scaled.apply(super().forward(x), 1.01)


@pytest.fixture(scope="module")
def reference():
    return Float64Reference(BASE)


@pytest.fixture(autouse=True)
def _settled():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


BASE = Setting(config=tiny_config(ModelConfig(hidden_size=128)))


def with_config(**changes):
    return dataclasses.replace(BASE, config=dataclasses.replace(BASE.config, **changes))


def different(reference, setting):
    """By precision, the first module that differs, and where; only those with one."""
    found = reference.findings(setting)
    assert all(len(of_all) >= 15 for of_all in found.values())
    first = {name: next((one for one in of_all if one.differs), None) for name, of_all in found.items()}
    return {name: (one.module, one.phase) for name, one in first.items() if one is not None}


SAME = {
    "base": BASE,
    **{f"level {level}": with_config(checkpoint_level=level) for level in (1, 2, [0, 1, 2])},
    **{f"recompute {part}": with_config(recompute=part) for part in ("mlp", "attention", "block")},
    "level 2, recompute": with_config(checkpoint_level=2, recompute="block"),
    **{f"loss chunks {count}": dataclasses.replace(BASE, loss_chunks=count) for count in (0, 1, 3)},
    **{f"rows {rows}": dataclasses.replace(BASE, micro_batch=rows) for rows in (1, 3)},
    "decoding": dataclasses.replace(BASE, form="cached"),
    "transformers": dataclasses.replace(BASE, form="transformers"),
}


# what is asked in float32 is computed in float64 too; in a half precision only what has another path there
PRECISIONS = [*((name, "32-true") for name in SAME), *((name, "bf16-true") for name in ("base", "level 2, recompute"))]
PRECISIONS += [(name, "bf16-mixed") for name in ("base", "level [0, 1, 2]", "transformers")]


@pytest.mark.parametrize(("name", "precision"), PRECISIONS)
def test_settings_that_are_the_same(reference, name, precision):
    assert not different(reference, dataclasses.replace(SAME[name], precision=precision))


@pytest.mark.parametrize("name", ["WrongInside", "WrongWeight", "WrongForward"])
def test_one_percent_in_one_layer_is_found_there(reference, name):
    where = ("layers.1.mlp", "forward" if name == "WrongForward" else "backward")
    setting = with_config(mlp=f"{HERE}.{name}")
    assert different(reference, dataclasses.replace(setting, precision="32-true")) == {"32-true": where, EXACT: where}
    if name == "WrongInside":  # in bfloat16, one percent is rounding: float64 finds it
        assert different(reference, dataclasses.replace(setting, precision="bf16-mixed"))[EXACT] == where


def test_a_wrong_norm_is_found_in_the_last_one(reference):
    assert different(reference, with_config(norm=f"{HERE}.WrongNorm"))[EXACT] == ("norm", "backward")


def test_a_wrong_level_is_found_in_its_layer(reference, monkeypatch):
    from lightning_llm.ops import swiglu_tiles

    right = swiglu_tiles.swiglu_backward

    def wrong(*args):
        gradients = right(*args)
        return [1.01 * gradients[0], *gradients[1:]]

    monkeypatch.setattr("lightning_llm.ops.swiglu.tiles.swiglu_backward", wrong)
    for level in ([0, 0, 2], [0, 0, 1], 0):
        assert different(reference, with_config(checkpoint_level=level))["32-true"] == ("layers.2.mlp", "backward")


def test_a_mean_of_means_is_found(reference, monkeypatch):
    batch = make_batch(documents=False)
    assert len({int(count) for count in (batch["targets"] != IGNORED).sum(1)}) > 1
    monkeypatch.setattr(same, "make_batch", lambda documents: batch)
    monkeypatch.setattr(same, "IGNORED", -1)  # each micro-batch then has the same weight
    assert different(reference, dataclasses.replace(BASE, micro_batch=1))[EXACT] == ("lm_head", "backward")


@pytest.mark.parametrize(
    "changes",
    [
        {"norm": "layernorm", "position": "learned", "mlp": "gelu", "attention_bias": True, "mlp_bias": True},
        {"attention": {"class_path": "sliding_window", "init_args": {"window": 2000, "every": 2}}, "qk_norm": True},
        {"mlp": "mixture_of_experts", "num_attention_heads": 12, "num_key_value_heads": 4, "hidden_size": 192},
        {"tie_word_embeddings": True, "vocab_multiple_of": 64, "block": "sandwich", "lm_head_bias": True},
        {"num_hidden_layers": 1, "position": "none", "block": "post", "mlp": "geglu"},
    ],
    ids=["gpt", "window", "experts", "sandwich", "post"],
)
def test_other_parts(changes):
    base = Setting(config=tiny_config(ModelConfig(**{"num_attention_heads": 4, "dropout": 0.1, **changes})))
    reference = Float64Reference(base)
    recomputed = dataclasses.replace(base.config, recompute="block")
    for setting in (base, dataclasses.replace(base, config=recomputed, loss_chunks=2, precision="bf16-mixed")):
        assert not different(reference, setting)


def test_gpt2_in_transformers():
    config = ModelConfig(norm="layernorm", position="learned", mlp="gelu", attention_bias=True, mlp_bias=True)
    setting = Setting(config=tiny_config(config), form="transformers")
    found = Float64Reference(setting).findings(setting)["32-true"]
    assert not [one for one in found if one.differs]
    assert {"layers.2.mlp", "layers.0.self_attn", "norm", "layers.1"} <= {one.module for one in found}


def test_documents():
    base = dataclasses.replace(BASE, documents=True)
    reference = Float64Reference(base)
    for setting in (base, dataclasses.replace(base, micro_batch=3)):
        assert not different(reference, setting)
    assert different(reference, BASE)["32-true"] == ("layers.0.self_attn", "forward")


def right(part, x):
    return part.down_proj(nn.functional.silu(part.gate_proj(x)) * part.up_proj(x))


def wrong(part, x):
    return part.down_proj(nn.functional.gelu(part.gate_proj(x)) * part.up_proj(x))


def test_a_reference_of_the_users():
    assert not different(Float64Reference(BASE, "mlp", right), BASE)
    assert different(Float64Reference(BASE, "mlp", wrong), BASE)["32-true"] == ("layers.0.mlp", "forward")
    assert different(Float64Reference(BASE, "layers.2.mlp", wrong), BASE)[EXACT] == ("layers.2.mlp", "forward")
    with pytest.raises(ValueError, match=r"--part 'ml' is no part of the model: choose among .*self_attn, .*mlp"):
        Float64Reference(BASE, "ml", right)


class Wider(MLP):
    def __init__(self, config):
        super().__init__(config.hidden_size, 2 * config.intermediate_size, activation="relu")


@pytest.mark.parametrize("mlp", ["gelu", f"{HERE}.Wider"])
def test_other_parameters_are_refused(reference, mlp):
    with pytest.raises(ValueError, match=r"other parameters than the base \(layers.0.mlp"):
        reference.findings(with_config(mlp=mlp))


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{"strategy": "ddp"}, {"strategy": "fsdp2"}], ids=["ddp", "fsdp2"])
def test_two_processes(reference, changes):
    assert not different(reference, dataclasses.replace(BASE, processes=2, **changes))


@pytest.mark.slow
def test_kernels(reference):
    pytest.importorskip("triton", reason="the kernels need Triton")
    assert not different(reference, dataclasses.replace(BASE, interpreted=True))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")
@pytest.mark.filterwarnings("ignore:.*Function.. should not be instantiated")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_compiled_blocks(reference):
    found = reference.findings(dataclasses.replace(BASE, compile_mode="default"))
    assert not [one for of_all in found.values() for one in of_all if one.differs]
    assert "layers.1" in {one.module for one in found["32-true"] if one.phase == "forward"}
    assert "layers.1.mlp" in {one.module for one in found["32-true"]}  # by its parameters
