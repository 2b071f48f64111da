"""The formulas against torch's own counter, over real training steps."""

import itertools

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from lightning_llm import LanguageModel, ModelConfig
from lightning_llm.accounting import step_flops
from lightning_llm.accounting.counts import parameter_terms

SIZES = {
    "vocab_size": 101, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 10, "max_position_embeddings": 32,
}  # fmt: skip
ROWS, CONTEXT = 5, 24


def in_place_product(_, left, right, *args, **kwargs):
    """``addmm_``, which torch's counter does not know."""
    return 2 * left[0] * left[1] * right[1]


def counted(config, **options):
    torch.manual_seed(0)
    model = LanguageModel(config, **options)
    model.configure_model()
    ids = torch.randint(0, config.vocab_size, (ROWS, CONTEXT))
    with FlopCounterMode(display=False, custom_mapping={torch.ops.aten.addmm_: in_place_product}) as counter:
        loss = model.loss({"input_ids": ids, "targets": ids})
        in_forward = counter.get_total_flops()
        loss.backward()
    return in_forward, counter.get_total_flops()


KINDS = [("swiglu", 0), ("gelu", 0), ("memory_optimized_swiglu", 0), ("memory_optimized_swiglu", [1, 2, 0])]


@pytest.mark.parametrize(("kind", "recompute"), [*itertools.product(KINDS, ["none", "mlp", "attention", "block"])])
def test_against_the_counter(kind, recompute):
    mlp, level = kind
    config = ModelConfig(**SIZES, mlp=mlp, checkpoint_level=level, recompute=recompute)
    flops = step_flops(config, tokens=ROWS * CONTEXT, context_length=CONTEXT)
    in_forward, total = counted(config, loss_chunks=0)
    assert flops.forward == sum(flops.by_part.values()) == in_forward
    assert flops.hardware == total
    assert flops.model == 3 * flops.forward


@pytest.mark.parametrize("options", [{"tie_word_embeddings": True}, {"position": "learned"}, {"norm": "layernorm"}])
def test_chunked_loss_and_other_shapes(options):
    config = ModelConfig(**SIZES, **options)
    flops = step_flops(config, tokens=ROWS * CONTEXT, context_length=CONTEXT)
    assert flops.hardware == counted(config)[1]


def test_layers_that_differ_count_what_each_would_in_a_model_of_its_own():
    sizes = {"vocab_size": 50, "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 4}
    step, own = {"tokens": 40, "context_length": 20}, {"mlp": "relu", "intermediate_size": 40, "num_key_value_heads": 2}
    mixed, usual, other = (
        step_flops(ModelConfig(**sizes, **options), **step) for options in ({"layers": [own, {}, {}, {}]}, {}, own)
    )
    for part in ("attention_projections", "mlp"):
        assert 4 * mixed.by_part[part] == 3 * usual.by_part[part] + other.by_part[part]
    terms = parameter_terms(ModelConfig(**sizes, layers=[own, {}, {}, {}]))["mlp"]
    assert terms == {"L1·h·i·2": 32 * 40 * 2, "L2·h·i·3": 3 * 32 * 128 * 3}


def test_what_cannot_be_counted_is_said():
    with pytest.raises(ValueError, match="vocab_size is null"):
        step_flops(ModelConfig(), tokens=1, context_length=1)
    with pytest.raises(ValueError, match=r"mlp 'my\.own\.MLP' has no formula"):
        step_flops(ModelConfig(**{**SIZES, "mlp": "my.own.MLP"}), tokens=1, context_length=1)
