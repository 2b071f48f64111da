"""Which keys torch's attention gets on CUDA, where grouped ones may cost all scores at once."""

import pytest
import torch
from torch.nn import functional as F

from lightning_llm import ModelConfig
from lightning_llm.model.attention import CausalSelfAttention, _attention_by_form, attention_kernel
from lightning_llm.model.context import Context, CrossLayerState
from lightning_llm.model.position import Position
from lightning_llm.ops import sizes

HEADS, KV_HEADS = 4, 2


def build(**options):
    config = ModelConfig(hidden_size=64, num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, **options)
    return CausalSelfAttention(config, 0)


def run(layer, x, mask=None):
    """Without positions."""
    positions = torch.arange(x.shape[1], device=x.device)
    return layer(x, Context(positions, Position(ModelConfig()), CrossLayerState(), mask=mask))


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
        _attention_by_form(query, key, value, mask, 0.0)
    assert calls == [(heads, heads, heads == KV_HEADS, not has_mask)]


def test_without_gradients_lengths_vary_and_cudnn_would_plan_each(fake_cuda, monkeypatch):
    seen = []

    def attention(*args, **options):
        seen.append(torch.backends.cuda.cudnn_sdp_enabled())
        return args[0]

    monkeypatch.setattr(F, "scaled_dot_product_attention", attention)
    for device, needs_grad in (("cuda", False), ("cuda", True), ("cpu", False)):
        with fake_cuda():
            query = torch.empty(2, HEADS, 600, 16, device=device, dtype=torch.bfloat16)
            query = query.requires_grad_(needs_grad) if device == "cpu" else Demanding(query, needs_grad)
            _attention_by_form(query, query, query, None, 0.0)
    assert seen == [False, True, True]


class Demanding:
    """A fake tensor of CUDA, which cannot require a gradient, that says whether it does."""

    def __init__(self, tensor, requires_grad):
        self.tensor, self.requires_grad = tensor, requires_grad

    def __getattr__(self, name):
        return getattr(self.tensor, name)


def test_the_kernel_of_a_training_step_is_named(monkeypatch):
    asked = []

    def choose(query, key, value, mask, dropout, causal, *, enable_gqa):
        asked.append((query.shape, key.shape[1], query.dtype, dropout, enable_gqa, query.requires_grad, causal))
        return 3

    config = ModelConfig(hidden_size=64, num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, dropout=0.2)
    assert attention_kernel(config, 32, torch.bfloat16, torch.device("cpu")) == "math"  # for its dropout
    monkeypatch.setattr(torch, "_fused_sdp_choice", choose)
    assert attention_kernel(config, 32, torch.bfloat16, torch.device("cpu")) == "cudnn"
    form = sizes.attention_form
    monkeypatch.setattr(sizes, "attention_form", lambda device, *args, **options: form("cuda", *args, **options))
    with torch.inference_mode():
        attention_kernel(config, 32, torch.float32, torch.device("cpu"))
    shape = torch.Size([1, HEADS, 32, 16])
    assert asked == [
        (shape, KV_HEADS, torch.bfloat16, 0.2, True, True, True),
        (shape, HEADS, torch.float32, 0.2, False, True, True),  # as the layer expands them
    ]


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
