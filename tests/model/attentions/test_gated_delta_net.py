"""Gated DeltaNet: its chunks against the recurrence in float64, the layer against its formula, and decoding."""

import pytest
import torch
from torch.nn import functional as F

from lightning_llm import Transformer
from lightning_llm.model.attentions.gated_delta_net import gated_delta_rule
from tests.model.attentions.test_canon import convolved
from tests.model.made import assert_decoding_is_the_full_pass, attention_run, config

OPTIONS = {"attention": "gated_delta_net", "num_key_value_heads": 4, "position": "none"}


def recurrence(query, key, value, log_decay, strength, state, start=None):
    """Token by token, as equation 10 says; the state is of another document at the first token of each."""
    outputs, state = [], state.mT  # of the paper: from keys, which are columns, to values
    for t in range(query.shape[2]):
        q, k, v = (x[:, :, t, :, None] for x in (query, key, value))
        alpha, beta = log_decay[:, :, t, None, None].exp(), strength[:, :, t, None, None]
        if start is not None:
            alpha = alpha * (start[:, t] < max(t, 1))[:, None, None, None]
        state = alpha * (state - beta * state @ k @ k.mT) + beta * v @ k.mT
        outputs.append((state @ q)[..., 0])
    return torch.stack(outputs, dim=2), state.mT


@pytest.mark.parametrize("chunk", [1, 4, 5, 64])
@pytest.mark.parametrize("has_documents", [False, True])
def test_chunks_are_the_recurrence(chunk, has_documents):
    query, key, value = (torch.randn(2, 3, 13, 6, dtype=torch.float64) for _ in range(3))
    log_decay, strength = torch.rand(2, 3, 13, dtype=torch.float64).log(), torch.rand(2, 3, 13, dtype=torch.float64)
    state = torch.zeros(2, 3, 6, 6, dtype=torch.float64) if has_documents else torch.randn(2, 3, 6, 6).double()
    start = torch.tensor([[0] * 3 + [3] * 6 + [9] * 4, [0] * 5 + [5] * 8]) if has_documents else None
    inputs = [x.requires_grad_() for x in (query, F.normalize(key, dim=-1), value, log_decay, strength, state)]
    got, expected = gated_delta_rule(*inputs, start, chunk), recurrence(*inputs, start)
    torch.testing.assert_close(got, expected)
    dy = [torch.randn_like(x) for x in got]
    ours, theirs = (torch.autograd.grad(out, inputs, dy) for out in (got, expected))
    torch.testing.assert_close(ours, theirs)


def test_the_layer_is_its_formula():
    attention, x, got = attention_run(**OPTIONS, seq=9)
    every = torch.cat([proj(x) for proj in (attention.q_proj, attention.k_proj, attention.v_proj)], dim=-1)
    every = convolved(every, attention.convolution.weight) - every
    every = every / (1 + (-every).exp())
    query, key, value = (part.unflatten(-1, (4, 10)).transpose(1, 2) for part in every.chunk(3, dim=-1))
    query, key = (part / part.square().sum(-1, keepdim=True).sqrt() for part in (query, key))
    strength = (1 / (1 + (-attention.strength_proj(x)).exp())).transpose(1, 2)
    step = (1 + (attention.decay_proj(x) + attention.step_bias).exp()).log().transpose(1, 2)
    log_decay = -attention.log_rate.exp()[:, None] * step
    mixed, _ = recurrence(query / 10**0.5, key, value, log_decay, strength, x.new_zeros(2, 4, 10, 10))
    mixed = mixed / (mixed.square().mean(-1, keepdim=True) + 1e-5).sqrt() * attention.head_norm.weight
    gate = attention.gate_proj(x)
    expected = attention.o_proj(mixed.transpose(1, 2).flatten(2) * gate / (1 + (-gate).exp()))
    torch.testing.assert_close(got, expected)


def test_decoding_equals_the_full_forward_pass_and_holds_a_state_of_one_size():
    model = Transformer(config(**OPTIONS), seed=0).double()
    cache = assert_decoding_is_the_full_pass(model)
    held = sum(store.numel() for stores in cache._stores for store in stores.values())
    assert held == 2 * 2 * (4 * 10 * 10 + 3 * 3 * 40)  # layers, rows


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"qk_norm": True}, "attention 'gated_delta_net' has a norm of its own: qk_norm must be false"),
        ({"num_key_value_heads": 2}, "attention 'gated_delta_net' has keys for each of the 4 query heads"),
        ({"position": "rope"}, "attention 'gated_delta_net' needs position learned, or none, got rope"),
    ],
)
def test_what_it_cannot_have_is_one_line(changes, says):
    with pytest.raises(ValueError, match=says):
        config(**{**OPTIONS, **changes})
