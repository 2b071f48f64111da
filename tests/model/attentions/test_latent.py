"""Latent attention against its formula in float64, decoding with the weights absorbed, and what its cache holds."""

import math

import pytest
import torch

from lightning_llm import Transformer
from lightning_llm.model.kv_cache import KVCache
from tests.model.made import attention_run, config, with_arguments

LATENT = with_arguments("latent", rank=7)
OPTIONS = {"attention": LATENT, "num_key_value_heads": 4, "attention_bias": True}
PARTIAL = {**OPTIONS, "partial_rotary_factor": 0.4}


def rotated(x, theta=10000.0):
    """(batch, heads, seq, 4): the pairs are dimensions i and i + 2."""
    out = x.clone()
    for place in range(x.shape[2]):
        for pair in range(2):
            angle = place * theta ** (-2 * pair / 4)
            first, second = x[:, :, place, pair], x[:, :, place, pair + 2]
            out[:, :, place, pair] = first * math.cos(angle) - second * math.sin(angle)
            out[:, :, place, pair + 2] = second * math.cos(angle) + first * math.sin(angle)
    return out


@pytest.mark.parametrize("documents", [None, torch.tensor([[0] * 4 + [1] * 9])], ids=["one", "documents"])
@pytest.mark.parametrize("position", ["rope", "none"])
def test_it_is_its_formula(position, documents):
    given = PARTIAL if position == "rope" else {**OPTIONS, "position": position}
    attention, x, got = attention_run(documents, seq=9, **given)
    dims = 4 if position == "rope" else 0
    both = x @ attention.latent_proj.weight.T + attention.latent_proj.bias
    latent, shared = both[..., :7], both[..., 7:]
    latent = latent / (latent.square().mean(-1, keepdim=True) + 1e-5).sqrt() * attention.latent_norm.weight
    query = attention.q_proj(x).unflatten(-1, (4, 10)).transpose(1, 2)
    key, value = (
        (latent @ attention.kv_proj.weight.T)
        .unflatten(-1, (4, 20 - dims))
        .transpose(1, 2)
        .split([10 - dims, 10], dim=-1)
    )
    key = torch.cat((shared[:, None].expand(-1, 4, -1, -1), key), dim=-1)
    lengths = [9] if documents is None else [4, 9]  # places count from the beginning of a document
    parts = [each.split(lengths, dim=2) for each in (query, key)]
    if dims:
        parts = [[torch.cat((rotated(part[..., :4]), part[..., 4:]), dim=-1) for part in each] for each in parts]
    query, key = (torch.cat(list(each), dim=2) for each in parts)
    place = torch.arange(x.shape[1])
    seen = place <= place[:, None]
    if documents is not None:
        seen = seen & (documents[:, None, None] == documents[:, None, :, None])
    scores = (query @ key.mT / math.sqrt(10)).masked_fill(~seen, -math.inf)
    expected = attention.o_proj((scores.softmax(-1) @ value).transpose(1, 2).flatten(2))
    # rotations are computed in float32
    torch.testing.assert_close(got, expected, **({"rtol": 1e-4, "atol": 1e-5} if dims else {}))


@pytest.mark.parametrize("options", [PARTIAL, {**OPTIONS, "position": "alibi"}], ids=["rope", "alibi"])
def test_decoding_equals_the_full_forward_pass_and_holds_latents(options):
    model = Transformer(config(**options), seed=0).double()
    ids = torch.randint(61, (2, 15))
    whole, cache = model(ids), KVCache(model.config, 2, 15, torch.device("cpu"), torch.float64)
    pieces = [model(part, cache=cache) for part in (ids[:, :6], ids[:, 6:10], *ids[:, 10:].split(1, dim=1))]
    torch.testing.assert_close(torch.cat(pieces, dim=1), whole)
    cache.set_lengths([9, 12])
    new = torch.stack([ids[0, 9:10], ids[1, 12:13]])
    torch.testing.assert_close(model(new, cache=cache)[:, 0], torch.stack([whole[0, 9], whole[1, 12]]))
    held = sum(store.numel() for stores in cache._stores for store in stores.values())
    assert held == 2 * 2 * 15 * (7 + (4 if "partial_rotary_factor" in options else 0))  # layers, rows, positions


def test_a_hook_on_the_projection_is_called_in_decoding():
    model = Transformer(config(**PARTIAL), seed=0).double()
    seen = []
    for layer in model.layers:
        layer.self_attn.kv_proj.register_forward_hook(lambda module, args, out: seen.append(1) or 2 * out)
    ids = torch.randint(61, (1, 5))
    whole, cache = model(ids), KVCache(model.config, 1, 5, torch.device("cpu"), torch.float64)
    pieces = [model(part, cache=cache) for part in ids.split(1, dim=1)]
    torch.testing.assert_close(torch.cat(pieces, dim=1), whole)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"qk_norm": True}, "attention 'latent' has a norm of its own: qk_norm must be false"),
        ({"num_key_value_heads": 2}, "attention 'latent' has keys for each of the 4 query heads: num_key_value_heads"),
        (
            {"partial_rotary_factor": 1.0},
            "attention 'latent' needs position rope with partial_rotary_factor below 1, or",
        ),
        ({"attention": with_arguments("latent", rank=0)}, "attention.rank must be null or a whole number from 1"),
    ],
)
def test_what_it_cannot_have_is_one_line(changes, says):
    with pytest.raises(ValueError, match=says):
        config(**{**PARTIAL, **changes})
