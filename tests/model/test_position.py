"""Rotations against their formula and against Hugging Face."""

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from lightning_llm import ModelConfig, Transformer
from lightning_llm.model.position import rotation
from lightning_llm.ops.rotation import rotate_halves
from tests.model.made import YARN, attention_run, config, written_out


def test_a_part_of_each_head_is_rotated():
    x = torch.randn(2, 4, 9, 10, dtype=torch.float64)
    cos_sin = rotation(torch.arange(9), 6, 100.0, torch.float64)
    got = rotate_halves(x, *cos_sin)
    torch.testing.assert_close(got[..., :6], rotate_halves(x[..., :6], *cos_sin))
    assert torch.equal(got[..., 6:], x[..., 6:])
    model = Transformer(config(partial_rotary_factor=0.6))
    assert model.embed_positions.prepare(torch.arange(9), torch.float32)[0].shape == (9, 3)


def test_the_angles_of_a_float64_model_are_exact():
    angles = np.arange(9)[:, None] / 100.0 ** (np.arange(0, 6, 2) / 6)
    expected = torch.from_numpy(np.cos(angles)), torch.from_numpy(np.sin(angles))
    torch.testing.assert_close(rotation(torch.arange(9), 6, 100.0, torch.float64), expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize("documents", [None, torch.tensor([[0] * 5 + [1] * 8])], ids=["one", "documents"])
def test_alibi_is_its_formula(documents):
    attention, x, got = attention_run(documents, position="alibi")
    place = torch.arange(x.shape[1])
    bias = torch.stack([-(2.0 ** (-2 * head)) * (place[:, None] - place) for head in (1, 2, 3, 4)])
    torch.testing.assert_close(got, written_out(attention, x, bias=bias, documents=documents))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"truncate": False},
        {"beta_fast": 8, "beta_slow": 2},
        {"attention_factor": 1.5},
        {"mscale": 0.7, "mscale_all_dim": 0.5},
    ],
    ids=lambda changes: next(iter(changes), "usual"),
)
def test_yarn_equals_hugging_face(changes):
    scaling = {**YARN, **changes}
    theirs = LlamaConfig(
        hidden_size=64,
        num_attention_heads=2,
        max_position_embeddings=64,
        rope_parameters={**scaling, "rope_theta": 500.0},
    )
    frequencies, factor = ROPE_INIT_FUNCTIONS["yarn"](theirs, torch.device("cpu"))
    cos, sin = rotation(torch.arange(64), 32, 500.0, torch.float32, scaling)
    angles = torch.arange(64.0)[:, None] * frequencies
    torch.testing.assert_close((cos, sin), (angles.cos() * factor, angles.sin() * factor))


def test_a_llama_with_yarn_has_the_logits_of_hugging_face():
    shape = {
        "vocab_size": 61,
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    ours = Transformer(ModelConfig(**shape, mlp="swiglu", max_position_embeddings=64, rope_scaling=YARN), seed=0)
    rope = {**YARN, "rope_theta": 10000.0}
    theirs = LlamaForCausalLM(LlamaConfig(**shape, max_position_embeddings=64, rms_norm_eps=1e-5, rope_parameters=rope))
    names = {(name if name.startswith("lm_head") else f"model.{name}"): name for name in ours.state_dict()}
    theirs.load_state_dict({hf: ours.state_dict()[name] for hf, name in names.items()})
    ids = torch.randint(61, (2, 50))
    torch.testing.assert_close(ours.logits(ours(ids)), theirs(ids).logits)
