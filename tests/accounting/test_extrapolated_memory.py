"""Memory for any depth from a few traces: to the byte that of a whole trace."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_llm.accounting import extrapolated_memory, step_memory
from lightning_llm.accounting.extrapolated_memory import ExtrapolatedMemory, memory_trace
from lightning_llm.accounting.settings import StepSettings
from lightning_llm.model.config import ModelConfig
from lightning_llm.training.measured_parts import measure_parts
from tests.accounting.test_memory import drawn


def windowed(window, every, **options):
    return {"class_path": "sliding_window", "init_args": {"window": window, "every": every, **options}}


@st.composite
def cases(draw):
    """A model with runs of layers, and a step."""
    pick = st.sampled_from
    norm = draw(pick(["rmsnorm", "layernorm"]))
    mlp = draw(pick(["memory_optimized_swiglu", "memory_optimized_swiglu", "swiglu", "gelu"]))
    count = pick([0, 0, 1, 2, 3, 5, 9])
    has_levels = mlp == "memory_optimized_swiglu"
    deep = draw(count) if has_levels and norm == "rmsnorm" else 0
    shallow = draw(count) if has_levels else 0
    rest = draw(count) or int(deep + shallow == 0)
    config = ModelConfig(
        vocab_size=draw(pick([50, 700])),
        hidden_size=64,
        intermediate_size=draw(pick([64, 300])),
        num_hidden_layers=deep + shallow + rest,
        num_attention_heads=4,
        num_key_value_heads=draw(pick([1, 2, 4])),
        mlp=mlp,
        norm=norm,
        checkpoint_level=[2] * deep + [1] * shallow + [0] * rest,
        recompute=draw(pick(["none", "mlp", "attention", "block"])),
        tie_word_embeddings=draw(st.booleans()),
        position=draw(pick(["rope", "learned"])),
        attention=draw(st.just("full") | st.builds(windowed, pick([8, 40]), pick([None, 2, 3, 7]))),
    )
    step = StepSettings(
        rows=draw(pick([1, 4, 16])),
        context_length=draw(pick([32, 600])),
        precision=draw(pick(["32-true", "bf16-true", "bf16-mixed"])),
        device=draw(pick(["cpu", "cuda"])),
        loss_chunks=draw(pick([None, 0, 3])),
        accumulation=draw(pick([1, 2])),
        document_mask=draw(st.booleans()),
        state_per_parameter=0,
    )
    return config, (deep, shallow, rest), step


@drawn(80)
@given(cases())
def test_to_the_byte(case):
    config, counts, step = case
    whole = step_memory(config, step)
    found = ExtrapolatedMemory(config, step).with_layers(counts)
    peak = max(total for total, _ in found.points.values())
    assert (peak, found.parameters, found.gradients) == (whole.peak, whole.parameters, whole.gradients)
    without_gradients = [max(rest for _, rest in points.values()) for points in (found.points, whole.points)]
    assert without_gradients[0] == without_gradients[1]


def test_measured_attention_with_windows_in_some_layers():
    config = ModelConfig(
        vocab_size=50,
        hidden_size=64,
        num_hidden_layers=6,
        num_attention_heads=4,
        attention=windowed(8, 2, softcap=30.0),
    )
    measured = measure_parts(config, "32-true", 32)
    assert "attention" in measured
    step = StepSettings(rows=3, context_length=32, state_per_parameter=0, measured=measured)
    found = ExtrapolatedMemory(config, step).with_layers((0, 0, 6))
    assert max(total for total, _ in found.points.values()) == step_memory(config, step).peak


@pytest.mark.parametrize("every", [2, 7, 100])
def test_few_layers_are_traced_however_many_differ_in_window(monkeypatch, every):
    config = ModelConfig(
        vocab_size=50,
        hidden_size=64,
        num_hidden_layers=200,
        num_attention_heads=4,
        mlp="memory_optimized_swiglu",
        checkpoint_level=[2] * 50 + [1] * 50 + [0] * 100,
        attention=windowed(8, every),
    )
    step = StepSettings(rows=3, context_length=32, state_per_parameter=0)
    peak = step_memory(config, step).peak
    traced = []

    def traces(config, settings):
        traced.append(config.num_hidden_layers)
        return step_memory(config, settings)

    monkeypatch.setattr(extrapolated_memory, "step_memory", traces)
    assert max(total for total, _ in memory_trace(config, step).points.values()) == peak
    assert len(traced) <= 12
    assert max(traced) <= 10


@pytest.mark.parametrize("levels", [[2, 2, 2, 2, 1, 0, 0, 0, 0], [0, 1, 2, 0, 1, 2], [1, 2]])
def test_the_points_of_any_order_of_levels_have_the_peak_of_the_whole(levels):
    config = ModelConfig(
        vocab_size=50,
        hidden_size=64,
        num_hidden_layers=len(levels),
        num_attention_heads=4,
        mlp="memory_optimized_swiglu",
        checkpoint_level=levels,
    )
    step = StepSettings(rows=3, context_length=32, state_per_parameter=0)
    assert max(total for total, _ in memory_trace(config, step).points.values()) == step_memory(config, step).peak


def test_points_are_said_in_words():
    config = ModelConfig(vocab_size=50, hidden_size=64, num_hidden_layers=5, num_attention_heads=4, recompute="mlp")
    step = StepSettings(rows=3, context_length=32, loss_chunks=0)
    said = {point.in_words() for point in memory_trace(config, step).points}
    layers = {f"the {end} layer at level 0" for end in ("first", "second", "last but one", "last")}
    stages = {f"{layer}, {stage}" for layer in layers for stage in ("attention", "mlp")}
    stages |= {"embeddings", "final norm", "loss"}
    recomputed = {f"backward, recomputing {layer}, mlp" for layer in layers}
    assert said == stages | {f"backward, {stage}" for stage in stages} | recomputed
