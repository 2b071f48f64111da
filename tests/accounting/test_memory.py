"""The predicted memory of a step against the meter, and parameters against the built model, for any config."""

from contextlib import nullcontext

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightning_llm.accounting import parameters_by_part, step_memory
from lightning_llm.measure.meter import MemoryMeter
from lightning_llm.model.config import ModelConfig
from lightning_llm.ops import sizes
from lightning_llm.ops.attention import _triangle
from lightning_llm.optim import AdamW, clip_grad_norm_, param_groups
from lightning_llm.training.module import LanguageModel

TOLERANCE = 0.005


def second_step(config, *, rows, context_length, precision, loss_chunks, accumulation, document_mask=False):
    """Peak bytes of a step without parameters, batch and optimizer state, in our order; the count of both."""
    module = LanguageModel(config, loss_chunks=loss_chunks)
    module.configure_model()
    if precision == "bf16-true":
        module.to(torch.bfloat16)
    shape = (rows, context_length)
    batches = [
        {name: torch.randint(config.vocab_size, shape) for name in ("input_ids", "targets")}
        | ({"documents": torch.zeros(shape, dtype=torch.int64)} if document_mask else {})
        for _ in range(accumulation)
    ]
    optimizer, parameters = AdamW(param_groups(module)), list(module.parameters())

    def step():
        for batch in batches:
            with torch.autocast("cpu", torch.bfloat16) if precision == "bf16-mixed" else nullcontext():
                loss = module.loss(batch) / accumulation
            loss.backward()
            del loss
        clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    _triangle.cache_clear()  # what another test left there would not be counted
    with MemoryMeter(exclude=[module, *(t for batch in batches for t in batch.values())]) as meter:
        step()
        meter.reset_peak()
        step()
    state = sum(t.nbytes for own in optimizer.state.values() for t in own.values() if isinstance(t, torch.Tensor))
    return meter.peak_bytes - state, state, meter.excluded_bytes - sum(t.nbytes for b in batches for t in b.values())


@st.composite
def configs(draw):
    """Both families, every MLP and level, recomputation, grouped heads, biases."""
    flag, pick = st.booleans(), st.sampled_from
    layers, heads = draw(st.integers(1, 3)), draw(pick([1, 2, 4]))
    mlp = draw(pick(["swiglu", "memory_optimized_swiglu", "memory_optimized_swiglu", "gelu", "gelu_tanh", "relu"]))
    norm = draw(pick(["rmsnorm", "layernorm"]))
    levels = [0, 1, 2] if norm == "rmsnorm" else [0, 1]
    level = st.lists(pick(levels), min_size=layers, max_size=layers)
    own = {
        "position": st.just("none"),
        "qk_norm": flag,
        "intermediate_size": st.integers(64, 400),
        "num_key_value_heads": st.just(heads),
    }
    of_layers = st.lists(st.fixed_dictionaries({}, optional=own), min_size=1, max_size=layers)
    return ModelConfig(
        vocab_size=draw(st.integers(50, 3000)),
        vocab_multiple_of=draw(pick([1, 1, 128])),
        hidden_size=draw(pick([32, 48, 64, 96])),
        intermediate_size=draw(st.integers(64, 400)),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=draw(pick([n for n in (1, 2, 4) if n <= heads])),
        head_dim=draw(pick([8, 16, 32])),
        max_position_embeddings=1024,
        norm=norm,
        position=draw(pick(["rope", "learned", "none"])),
        mlp=mlp,
        checkpoint_level=draw(level) if mlp == "memory_optimized_swiglu" else 0,
        recompute=draw(pick(["none", "none", "mlp", "attention", "block"])),
        qk_norm=draw(flag),
        attention_bias=draw(flag),
        mlp_bias=mlp != "memory_optimized_swiglu" and draw(flag),
        lm_head_bias=draw(flag),
        tie_word_embeddings=draw(flag),
        layers=draw(st.none() | of_layers),
    )


steps = st.fixed_dictionaries(
    {
        "rows": st.integers(1, 4),
        # attention in one block of queries, in several, and the built-in one
        "context_length": st.one_of(st.integers(16, 128), st.integers(129, 300), st.integers(513, 540)),
        "precision": st.sampled_from(["32-true", "bf16-true", "bf16-mixed"]),
        "loss_chunks": st.sampled_from([None, 0, 3]),
        "accumulation": st.integers(1, 3),
        "document_mask": st.sampled_from([False, False, True]),
    }
)


def drawn(examples):
    return settings(max_examples=examples, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


@pytest.mark.slow
@drawn(30)
@given(configs(), steps)
def test_against_the_meter_and_the_model(config, step):
    check(config, step)


SMALL_TILES = {
    "TILE_BYTES": {"cpu": 2**15},
    "LONGEST_BLOCK": 64,
    "SHORTEST_BLOCK": 32,
    "NARROWEST_CHUNK": 64,
    "NORM_BYTES": {"cpu": 2**12},
    "ATTENTION_ROWS": 32,
    "ATTENTION_BYTES": 2**15,
    "CHUNK_BYTES": {"cpu": 2**16},
    "SMALLEST_CHUNK": 32,
    "VOCAB_BLOCK": {"cpu": 256},
    "GROUP_BYTES": 2**14,
}


@pytest.mark.slow
@drawn(4)
@given(configs(), steps)
def test_with_many_tiles(config, step):
    with pytest.MonkeyPatch.context() as patch:
        for name, value in SMALL_TILES.items():
            patch.setattr(sizes, name, value)
        check(config, step)


def test_state_in_bfloat16():
    config = ModelConfig(vocab_size=50, hidden_size=32, num_hidden_layers=1, num_attention_heads=2)
    module = LanguageModel(config)
    module.configure_model()
    optimizer = AdamW(param_groups(module), state_dtype="bfloat16")
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    state = sum(t.nbytes for own in optimizer.state.values() for t in own.values() if isinstance(t, torch.Tensor))
    assert step_memory(config, rows=1, context_length=16, state_itemsize=2).optimizer_state == state


def saved_by_attention(dtype_size, head_dim, kv_heads=2, **options):
    config = ModelConfig(
        vocab_size=50,
        hidden_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
    )
    precision = {2: "bf16-true", 4: "32-true"}[dtype_size]
    step = step_memory(config, rows=2, context_length=128, precision=precision, device="cuda", **options)
    return step.saved["attention"] / (2 * 128 * head_dim * dtype_size)


def test_on_cuda_the_attention_that_runs_is_counted():
    """In sizes of one head: 4 of queries and of the output, 2 of keys and of values; of each row a sum."""
    sums = 4 * 4 / (32 * 2)
    assert saved_by_attention(2, 32) == 8 + 2 * 2 + sums  # flash attention takes grouped keys as they are
    assert saved_by_attention(4, 32) == 8 + 2 * 4 + sums / 2  # the kernel for float32 takes them expanded
    assert saved_by_attention(4, 32, kv_heads=4) == 8 + 2 * 4 + sums / 2
    for size in (2, 4):  # FlexAttention takes them as they are
        assert saved_by_attention(size, 32, document_mask=True) == 8 + 2 * 2 + sums * 2 / size


@pytest.mark.parametrize(("head_dim", "with_kernel", "dtype_size"), [(6, 8, 4), (260, 256, 2)])
def test_on_cuda_an_attention_without_a_kernel_saves_all_probabilities(head_dim, with_kernel, dtype_size):
    of_heads = 4 * 128 / head_dim  # rows of probabilities
    assert saved_by_attention(dtype_size, head_dim) > 12 + of_heads
    assert saved_by_attention(dtype_size, with_kernel) < 18


def check(config, step):
    peak, state, parameter_bytes = second_step(config, **step)
    predicted = step_memory(config, **step)
    assert predicted.step_peak == pytest.approx(peak, rel=TOLERANCE)
    assert predicted.optimizer_state == state
    assert predicted.parameters == parameter_bytes
    itemsize = 2 if step["precision"] == "bf16-true" else 4
    assert sum(parameters_by_part(config).values()) * itemsize == parameter_bytes
