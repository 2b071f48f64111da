"""Which keys torch's attention gets on CUDA, where grouped ones may cost all scores at once."""

import pytest
import torch
from torch.nn import functional as F

from lightning_llm import ModelConfig
from lightning_llm.model.attention import CausalSelfAttention
from lightning_llm.model.attention import _attend as attend
from lightning_llm.model.context import Context, Shared
from lightning_llm.model.position import Position

HEADS, KV_HEADS = 4, 2


def build(**options):
    config = ModelConfig(hidden_size=64, num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, **options)
    return CausalSelfAttention(config, 0)


def run(layer, x, mask=None):
    """Without positions."""
    positions = torch.arange(x.shape[1], device=x.device)
    return layer(x, Context(positions, Position(ModelConfig()), Shared(), mask=mask))


@pytest.mark.parametrize(
    ("dtype", "has_mask", "heads"),
    [
        (torch.float32, False, HEADS),
        (torch.float32, True, HEADS),
        (torch.bfloat16, True, HEADS),
        (torch.bfloat16, False, KV_HEADS),  # flash attention
        (torch.float64, False, KV_HEADS),  # nothing is gained
    ],
)
def test_grouped_keys_are_expanded_where_torch_would_take_its_plain_form(
    fake_cuda, monkeypatch, dtype, has_mask, heads
):
    calls = []

    def attention(query, key, value, mask, dropout, causal, *, enable_gqa):
        calls.append((key.shape[1], value.shape[1], enable_gqa, causal))
        return query

    monkeypatch.setattr(F, "scaled_dot_product_attention", attention)
    with fake_cuda():
        query, key, value = (torch.empty(2, n, 6, 16, device="cuda", dtype=dtype) for n in (HEADS, KV_HEADS, KV_HEADS))
        mask = torch.zeros(2, 1, 6, 6, device="cuda", dtype=dtype) if has_mask else None
        attend(query, key, value, mask, 0.0, causal=not has_mask)
    assert calls == [(heads, heads, heads == KV_HEADS, not has_mask)]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_on_a_gpu_grows_with_the_context_and_not_with_its_square(dtype):
    layer, peaks = build(max_position_embeddings=8192).to("cuda", dtype), []
    for seq in (2048, 4096, 8192):
        x = torch.randn(1, seq, 64, device="cuda", dtype=dtype, requires_grad=True)
        run(layer, x).sum().backward()  # workspaces of libraries
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run(layer, x).sum().backward()
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert peaks[1] <= 2.2 * peaks[0]
    assert peaks[2] <= 2.2 * peaks[1]
