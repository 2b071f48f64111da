"""Attention against its formula, written out in float64; decoding; memory."""

import pytest
import torch

from lightning_llm import Transformer
from lightning_llm.measure import MemoryMeter
from lightning_llm.model.kv_cache import KVCache
from lightning_llm.ops import sizes
from tests.model.made import attention_run, built, config, context_of, with_arguments, written_out


@pytest.fixture(params=[128, 7], ids=["one block", "blocks of 7"])
def blocks(request, monkeypatch):
    monkeypatch.setattr(sizes, "ATTENTION_ROWS", request.param)


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("options", [{"window": 5}, {"softcap": 0.7}, {"window": 5, "softcap": 0.7}, {"window": 99}])
@pytest.mark.parametrize("has_documents", [False, True])
def test_attention_is_its_formula(options, has_documents):
    name = "sliding_window" if "window" in options else "full"
    documents = torch.tensor([[0] * 9 + [1] * 11, [2] * 20]) if has_documents else None
    attention, x, got = attention_run(documents, attention=with_arguments(name, **options), position="none")
    expected = written_out(attention, x, documents=documents, **options)
    torch.testing.assert_close(got, expected)
    weight, inputs = torch.randn_like(got), list(attention.parameters())
    ours, theirs = (torch.autograd.grad((out * weight).sum(), inputs, retain_graph=True) for out in (got, expected))
    torch.testing.assert_close(ours, theirs)


def test_each_so_manieth_layer_is_full():
    made = Transformer(config(num_hidden_layers=6, attention=with_arguments("sliding_window", window=3, every=3)))
    assert (
        [layer.self_attn.window for layer in made.layers] == [3, 3, None, 3, 3, None] == made.config.attention_windows
    )


@pytest.mark.parametrize("name", ["sliding_window", "softcap", "bias"])
def test_decoding_with_a_cache_equals_the_full_forward_pass(name):
    """Several positions after old ones, and rows of unequal length."""
    options = {
        "sliding_window": {"attention": with_arguments("sliding_window", window=4)},
        "softcap": {"attention": with_arguments("full", softcap=1.0)},
        "bias": {"position": "elsewhere.Distance"},
    }[name]
    model = Transformer(config(**options), seed=0).double()
    ids = torch.randint(61, (2, 15))
    whole = model(ids)
    cache = KVCache(model.config, 2, 15, torch.device("cpu"), torch.float64)
    pieces = [model(part, cache=cache) for part in (ids[:, :6], ids[:, 6:10], *ids[:, 10:].split(1, dim=1))]
    torch.testing.assert_close(torch.cat(pieces, dim=1), whole)
    cache.set_lengths([9, 12])
    new = torch.stack([ids[0, 9:10], ids[1, 12:13]])
    torch.testing.assert_close(model(new, cache=cache)[:, 0], torch.stack([whole[0, 9], whole[1, 12]]))


def peak_of(attention, seq):
    x = torch.randn(1, seq, 24, requires_grad=True)
    context = context_of(seq)
    with MemoryMeter(exclude=[attention, x]) as meter:
        attention(x, context).sum().backward()
    return meter.peak_bytes


@pytest.mark.parametrize("options", [{"window": 64}, {"window": 64, "softcap": 5.0}, {"softcap": 5.0}])
def test_memory_grows_with_the_context_and_not_with_its_square(options):
    attention = built(
        "attention", attention=with_arguments("sliding_window" if "window" in options else "full", **options)
    )
    peaks = [peak_of(attention.float(), seq) for seq in (2048, 4096)]
    assert peaks[1] <= 2.05 * peaks[0]


def test_a_window_with_dropout_drops_weights():
    options = {"attention": with_arguments("sliding_window", window=4), "dropout": 0.5, "position": "none"}
    attention, x = built("attention", **options), torch.randn(1, 30, 24, dtype=torch.float64)
    assert not torch.equal(attention(x, context_of(30)), attention(x, context_of(30)))
    torch.testing.assert_close(attention.eval()(x, context_of(30)), written_out(attention, x, window=4))
