"""Memory of deep models from walks of shallow ones, against walking the whole."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_llm.accounting import step_memory
from lightning_llm.accounting.memory import LayeredMemory, step_points
from lightning_llm.model.config import ModelConfig
from tests.accounting.test_memory import drawn


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
    )
    step = {
        "rows": draw(pick([1, 4, 16])),
        "context_length": draw(pick([32, 600])),
        "precision": draw(pick(["32-true", "bf16-true", "bf16-mixed"])),
        "device": draw(pick(["cpu", "cuda"])),
        "loss_chunks": draw(pick([None, 0, 3])),
        "accumulation": draw(pick([1, 2])),
    }
    return config, (deep, shallow, rest), step


@drawn(80)
@given(cases())
def test_to_the_byte(case):
    config, counts, step = case
    whole = step_memory(config, state_per_parameter=0, **step)
    found = LayeredMemory(config, **step).at(counts)
    peak = max(total for total, _ in found.points.values())
    assert (peak, found.parameters, found.gradients) == (whole.peak, whole.parameters, whole.gradients)
    without_gradients = [max(rest for _, rest in points.values()) for points in (found.points, whole.points)]
    assert without_gradients[0] == without_gradients[1]


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
    step = {"rows": 3, "context_length": 32, "state_per_parameter": 0}
    assert max(total for total, _ in step_points(config, **step).points.values()) == step_memory(config, **step).peak
