"""Traced steps: as the meter counts real ones, and nothing of a trace is left behind."""

import dataclasses

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lightning_llm.accounting import memory, step_memory, tracing
from lightning_llm.accounting.memory_trace import NeedsValues
from lightning_llm.accounting.step_settings import StepSettings
from lightning_llm.accounting.tracing import trace_step
from lightning_llm.model.attention import CausalSelfAttention
from lightning_llm.model.config import ModelConfig
from lightning_llm.model.parts import BUILT_IN, name_of
from lightning_llm.model.transformer import Transformer
from lightning_llm.ops import sizes, traced
from tests.accounting.test_memory import SMALL_TILES, second_step

SIZES = {"vocab_size": 300, "hidden_size": 64, "intermediate_size": 160, "num_attention_heads": 4}
STEP = {"rows": 2, "context_length": 160, "precision": "32-true"}
HERE = __name__


class EinsumMLP(nn.Module):
    """Two matrices that no linear layer holds."""

    def __init__(self, config):
        super().__init__()
        self.wide = nn.Parameter(torch.empty(config.hidden_size, config.intermediate_size).normal_(std=0.02))
        self.narrow = nn.Parameter(torch.empty(config.intermediate_size, config.hidden_size).normal_(std=0.02))

    def forward(self, x):
        return torch.einsum("bti,ih->bth", torch.einsum("bth,hi->bti", x, self.wide).relu().square(), self.narrow)


class Convolution(nn.Module):
    """A causal convolution along the sequence, in place of an MLP."""

    def __init__(self, config):
        super().__init__()
        self.mix = nn.Conv1d(config.hidden_size, config.hidden_size, 3, padding=2)

    def forward(self, x):
        return self.mix(x.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2)


class Adapted(nn.Module):
    """A frozen layer with a low-rank term beside it."""

    def __init__(self, frozen):
        super().__init__()
        self.frozen = frozen.requires_grad_(False)
        self.down, self.up = nn.Linear(frozen.in_features, 4), nn.Linear(4, frozen.out_features)

    def forward(self, x):
        return self.frozen(x) + self.up(self.down(x))


class AdaptedAttention(CausalSelfAttention):
    def __init__(self, config, layer):
        super().__init__(config, layer)
        self.o_proj = Adapted(self.o_proj)


class OnlyPositive(nn.Module):
    """An MLP of the tokens whose first feature is positive: how many there are depends on values."""

    threshold = 0.0

    def __init__(self, config):
        super().__init__()
        self.into = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, x):
        chosen = x[..., 0] > self.threshold
        out = torch.zeros_like(x)
        out[chosen] = self.into(x[chosen]).to(out.dtype)
        return out


class NonePositive(OnlyPositive):
    threshold = float("inf")


class WithOtherShapes(nn.Module):
    """An MLP with operators that change the shapes of their arguments."""

    def __init__(self, config):
        super().__init__()
        self.into = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, x):
        with torch.no_grad():
            wide = x.detach().clone().unsqueeze_(0)
            scale = torch.mm(wide[0, 0], wide[0, 0].clone().t_(), out=x.new_empty(0)).diagonal()
        return self.into(x) * scale.squeeze_()[:, None]


OTHERS = {
    "einsum": {"mlp": f"{HERE}.EinsumMLP"},
    "convolution": {"mlp": f"{HERE}.Convolution"},
    "other shapes": {"mlp": f"{HERE}.WithOtherShapes"},
    "LoRA": {"attention": f"{HERE}.AdaptedAttention"},
    "experts": {"mlp": "mixture_of_experts"},
    "dropout": {"dropout": 0.1},
    "softcap": {"attention": {"class_path": "full", "init_args": {"softcap": 30.0}}},
    "windows": {"attention": {"class_path": "sliding_window", "init_args": {"window": 48, "every": 2}}},
    "latent": {"attention": "latent", "position": "alibi"},
    "delta net": {"attention": "gated_delta_net", "position": "none"},
    **{name: {"attention": name} for name in ("canon", "gated", "value_residual")},
    **{name: {"mlp": name} for name in ("geglu", "relu2")},
    **{name: {"block": name} for name in ("post", "sandwich")},
    "dynamic tanh": {"norm": "dynamic_tanh"},
    "smoothing": {"loss": {"class_path": "cross_entropy", "init_args": {"z_loss": 1e-3, "label_smoothing": 0.1}}},
}


def test_every_built_in_part_is_compared():
    drawn = {"attention": {"full"}, "norm": {"rmsnorm", "layernorm"}, "position": {"rope", "learned", "none"}}
    drawn |= {"block": {"pre"}, "loss": {"cross_entropy"}}
    drawn["mlp"] = {"swiglu", "memory_optimized_swiglu", "gelu", "gelu_tanh", "relu"}  # in test_memory.py
    for kind, names in BUILT_IN.items():
        compared = {name_of(part[kind]) for part in OTHERS.values() if kind in part} | drawn[kind]
        assert names.keys() <= compared, kind


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("name", OTHERS)
def test_the_peak_is_that_of_a_real_step(name, precision):
    config = ModelConfig(**SIZES, num_hidden_layers=2, **OTHERS[name])
    step = {**STEP, "precision": precision, "loss_chunks": None, "accumulation": 2}
    peak, _, held = second_step(config, **step)
    buffers = sum(buffer.nbytes for buffer in Transformer(config, seed=0).buffers())  # such as the slopes of ALiBi
    found = step_memory(config, **step)
    # the experts of a real step do not get the same number of tokens
    assert found.step_peak == pytest.approx(peak, rel=0.05 if name == "experts" else 0.005)
    assert found.parameters == held - buffers
    assert not found.is_extrapolated


def test_a_step_that_depends_on_values_is_run():
    config = ModelConfig(**SIZES, num_hidden_layers=6, mlp=f"{HERE}.OnlyPositive")
    with pytest.raises(NeedsValues):
        trace_step(config, StepSettings(**STEP))
    found = step_memory(config, **STEP)
    assert found.is_extrapolated
    peak = second_step(config, **STEP, loss_chunks=None, accumulation=1)[0]
    assert found.step_peak == pytest.approx(peak, rel=0.05)  # about half of the tokens are chosen


@pytest.mark.parametrize("name", ["DropPath", "DropPathByNumpy"])
def test_a_part_whose_constructor_reads_values_is_run(name):
    config = ModelConfig(**SIZES, num_hidden_layers=6, mlp=f"tests.model.test_initial_values.{name}")
    with pytest.raises(NeedsValues):
        trace_step(config, StepSettings(**STEP))
    found = step_memory(config, **STEP)
    assert found.is_extrapolated
    assert found.step_peak == pytest.approx(second_step(config, **STEP, loss_chunks=None, accumulation=1)[0], rel=0.005)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_what_depends_on_values_is_the_same_each_time(precision):
    """On CUDA, stand-ins for kernels write values, too, and nothing is left as it was in memory."""
    config = ModelConfig(**SIZES, num_hidden_layers=3, mlp=f"{HERE}.OnlyPositive", norm="layernorm")
    settings = StepSettings(**{**STEP, "precision": precision}, device="cuda")
    peaks = set()
    for size in (1, 2, 3):
        garbage = [torch.full((2**16 * size,), float("nan")) for _ in range(20)]
        del garbage
        peaks.add(step_memory(config, settings).peak)
    assert len(peaks) == 1
    none_chosen = step_memory(dataclasses.replace(config, mlp=f"{HERE}.NonePositive"), settings).peak
    assert peaks.pop() > none_chosen


def test_norms_and_softmax_of_16_bits_are_wide_on_cuda_under_autocast():
    x = torch.zeros(8, 16, dtype=torch.bfloat16)
    functions = (lambda: F.layer_norm(x, (16,)), lambda: F.rms_norm(x, (16,)), lambda: F.softmax(x, dim=-1))
    for device, wanted in (("cpu", torch.bfloat16), ("cuda", torch.float32)):
        with tracing.trace_mode(device, has_values=True), torch.autocast("cpu", torch.bfloat16):
            assert [function().dtype for function in functions] == [wanted] * 3
        with tracing.trace_mode(device, has_values=True):
            assert [function().dtype for function in functions] == [torch.bfloat16] * 3


@pytest.mark.parametrize(
    "architecture",
    [
        {"mlp": "memory_optimized_swiglu", "checkpoint_level": 2},
        {"mlp": "gelu", "recompute": "block", "block": "post"},
        {"attention": "value_residual", "tie_word_embeddings": True},
    ],
)
def test_a_deep_model_is_extended_from_two_shallow_ones(monkeypatch, architecture):
    config = ModelConfig(**SIZES, num_hidden_layers=7, **architecture)
    depths = []

    def trace(config, settings):
        depths.append(config.num_hidden_layers)
        return trace_step(config, settings)

    monkeypatch.setattr(tracing, "trace_step", trace)
    short = {**STEP, "rows": 1, "context_length": 32, "accumulation": 2}  # gradients decide about the peak
    for step in (STEP, short):
        found = step_memory(config, **step)
        assert depths == [3, 4]
        monkeypatch.setattr(memory, "DEEPER", 7)
        whole = step_memory(config, **step)
        assert depths == [3, 4, 7]
        monkeypatch.undo()
        monkeypatch.setattr(tracing, "trace_step", trace)
        depths.clear()
        assert found.points.keys() < whole.points.keys()
        assert {point: whole.points[point] for point in found.points} == found.points
        assert (found.peak, found.peak_point, found.saved) == (whole.peak, whole.peak_point, whole.saved)


def test_layers_that_differ_are_all_traced(monkeypatch):
    depths = []

    def trace(config, settings):
        depths.append(config.num_hidden_layers)
        return trace_step(config, settings)

    monkeypatch.setattr(tracing, "trace_step", trace)
    every = {"class_path": "sliding_window", "init_args": {"window": 48, "every": 3}}
    wider = "tests.accounting.test_measured_parts.WiderWithDepth"
    for different in ({"attention": every}, {"layers": [{}, {"mlp": "gelu"}]}, {"mlp": wider}):
        memory.memory_trace(ModelConfig(**SIZES, num_hidden_layers=6, **different), StepSettings(**STEP))
    assert depths == [6, 6, 6]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_some_tiles_and_no_writes_show_what_all_do(monkeypatch, device, precision):
    for name, value in SMALL_TILES.items():
        monkeypatch.setattr(sizes, name, value)
    settings = StepSettings(**{**STEP, "precision": precision}, device=device)
    for level in (0, 2):
        config = ModelConfig(
            **SIZES, num_hidden_layers=1, mlp="memory_optimized_swiglu", checkpoint_level=level, lm_head_bias=True
        )
        short = trace_step(config, settings)
        with monkeypatch.context() as patch:
            patch.setattr(traced, "some_of", lambda tiles, *, is_even: tiles)
            patch.setattr(tracing, "_written", lambda operator: None)
            long = trace_step(config, settings)
        assert dataclasses.replace(short, points={}) == dataclasses.replace(long, points={})
        assert {point: live.total for point, live in short.points.items()} == {
            point: live.total for point, live in long.points.items()
        }


def test_after_a_trace_a_model_of_the_same_shape_computes():
    config = ModelConfig(**SIZES, num_hidden_layers=1, dropout=0.1)
    functions = F.dropout, F.rms_norm, F.layer_norm
    for device in ("cpu", "cuda"):
        trace_step(config, StepSettings(**STEP, device=device))
    assert traced.current() is None
    assert (F.dropout, F.rms_norm, F.layer_norm) == functions
    model = Transformer(config, seed=0)
    ids = torch.zeros(2, 160, dtype=torch.int64)
    total, _ = model.objective(model(ids), model.lm_head, ids)
    total.backward()
    assert torch.isfinite(total)


def test_a_trace_of_cuda_has_the_kernels_and_tiles_of_cuda():
    config = ModelConfig(**SIZES, num_hidden_layers=1)
    on_cpu, on_cuda = (trace_step(config, StepSettings(**STEP, device=device)) for device in ("cpu", "cuda"))
    assert on_cuda.saved["attention"] < on_cpu.saved["attention"]  # no probabilities
    assert on_cuda.parameters == on_cpu.parameters
