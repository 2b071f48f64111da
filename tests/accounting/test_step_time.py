"""The predicted time of a step: by hand where it can be, and in the right order everywhere."""

import dataclasses

import pytest

from lightning_llm.accounting import find_device, parameters_by_part, step_flops
from lightning_llm.accounting.parts import KNOWN_NORMS
from lightning_llm.accounting.step_settings import StepSettings
from lightning_llm.accounting.step_time import (
    ATTENTION_SHARE,
    BANDWIDTH_SHARE,
    GENERIC,
    LAYER_SECONDS,
    CostModel,
    step_time,
)
from lightning_llm.model.config import ModelConfig

CONFIG = ModelConfig(vocab_size=1000, hidden_size=512, num_hidden_layers=4, num_attention_heads=8)
COST_MODEL = CostModel(device=find_device("H200"))
STEP = {"rows": 8, "accumulation": 2, "context_length": 256, "device": "cuda"}


def predicted(config=CONFIG, cost_model=COST_MODEL, **changes):
    return step_time(config, cost_model, StepSettings(**{**STEP, **changes}))


def test_products_are_flops_over_the_share_of_the_peak():
    flops = step_flops(CONFIG, tokens=2 * 8 * 256, context_length=256)
    scores = 3 * flops.by_part["attention_scores"]
    expected = ((flops.model - scores) / 0.5 + scores / ATTENTION_SHARE) / 67e12
    assert predicted(cost_model=CostModel(device=find_device("H200"), matmul_share=0.5)).matmuls == pytest.approx(
        expected
    )


def test_tf32_has_its_own_peak_and_leaves_bf16_alone():
    fast = dataclasses.replace(COST_MODEL, tf32=True)
    assert predicted().matmuls / predicted(cost_model=fast).matmuls == pytest.approx(494.5 / 67)
    assert predicted(precision="bf16-mixed") == predicted(cost_model=fast, precision="bf16-mixed")
    old = CostModel(device=find_device("Tesla T4"), tf32=True)
    with pytest.raises(ValueError, match=r"Tesla T4 has no tf32 peak in the table: leave trainer\.tf32 out"):
        predicted(cost_model=old)


def test_each_norm_of_a_block_counts_where_it_is_recomputed():
    def norms(block, recompute="none", field="traffic"):
        """How many norms of a layer move data, or do again where they are recomputed."""
        config = dataclasses.replace(CONFIG, block=block, recompute=recompute)
        plain = dataclasses.replace(config, block="pre")
        seconds = getattr(predicted(config), field) - getattr(predicted(plain), field)
        passes, per_pass = KNOWN_NORMS["rmsnorm"].passes, 2 * 8 * 256 * 512 * 4 * 4 / (4800e9 * BANDWIDTH_SHARE)
        return seconds / per_pass / (passes[0] if field == "recomputed" else sum(passes))

    assert norms("sandwich") == pytest.approx(2)  # four, where pre has two
    assert norms("post") == pytest.approx(0)
    for recompute, in_sandwich, in_post in (("attention", 1, -1), ("mlp", 1, -1), ("block", 2, 0)):
        assert norms("sandwich", recompute, "recomputed") == pytest.approx(in_sandwich)
        assert norms("post", recompute, "recomputed") == pytest.approx(in_post)


def test_norms_of_queries_and_keys_count():
    def seconds(field, **options):
        config = dataclasses.replace(CONFIG, num_key_value_heads=2, **options)
        return getattr(predicted(config), field)

    width, passes = 512 + 2 * 64, KNOWN_NORMS["rmsnorm"].passes
    per_pass = 2 * 8 * 256 * width * 4 * 4 / (4800e9 * BANDWIDTH_SHARE)  # of all tokens, bytes, and layers
    assert seconds("traffic", qk_norm=True) - seconds("traffic") == pytest.approx(sum(passes) * per_pass)
    again = {"recompute": "attention"}
    more = seconds("recomputed", qk_norm=True, **again) - seconds("recomputed", **again)
    assert more == pytest.approx(passes[0] * per_pass)


def test_the_optimiser_moves_parameters_gradients_and_both_averages():
    n = sum(parameters_by_part(CONFIG).values())
    rate = 4800e9 * BANDWIDTH_SHARE
    assert predicted().optimizer == pytest.approx(n * (5 * 4 + 2 * 2 * 4) / rate)
    assert predicted(state_itemsize=2).optimizer == pytest.approx(n * (5 * 4 + 2 * 2 * 2) / rate)
    sharded = predicted(strategy="fsdp2", world_size=4).optimizer
    assert sharded == pytest.approx(predicted().optimizer / 4, rel=1e-5)


def test_launches_are_counted_for_each_layer_and_micro_batch():
    assert predicted().launches == pytest.approx(4 * 2 * LAYER_SECONDS["cuda"])
    assert predicted(rows=16, accumulation=1).launches == pytest.approx(4 * LAYER_SECONDS["cuda"])


def test_ddp_sends_each_gradient_twice_round_the_ring_and_fsdp_more():
    n = sum(parameters_by_part(CONFIG).values())
    ddp = predicted(world_size=8).communication
    assert ddp == pytest.approx(2 * 7 / 8 * 4 * n / COST_MODEL.link_bandwidth)
    assert predicted(world_size=8, accumulation=1, rows=16).communication == pytest.approx(ddp)
    assert predicted(world_size=8, strategy="fsdp2").communication > ddp
    assert predicted().communication == 0


@pytest.mark.parametrize(
    ("cheap", "dear"),
    [
        ({}, {"recompute": "attention"}),
        ({"recompute": "attention"}, {"recompute": "block"}),
        ({}, {"checkpoint_level": 1}),
        ({"checkpoint_level": 1}, {"checkpoint_level": 2}),
        ({"checkpoint_level": [1, 0, 0, 0]}, {"checkpoint_level": [1, 1, 0, 0]}),
    ],
)
def test_what_is_done_again_takes_longer(cheap, dear):
    first, second = (predicted(dataclasses.replace(CONFIG, **change)) for change in (cheap, dear))
    assert second.seconds > first.seconds
    assert second.matmuls == first.matmuls


def test_whole_logits_and_small_micro_batches_take_longer():
    assert predicted(loss_chunks=0).seconds > predicted().seconds
    assert predicted(rows=4, accumulation=4).seconds > predicted().seconds > predicted(rows=16, accumulation=1).seconds


def test_bf16_is_refused_where_the_device_has_no_peak_for_it():
    old = CostModel(device=find_device("Tesla V100-SXM2-32GB"))
    with pytest.raises(ValueError, match="has no bfloat16 peak in the table: use --precision 32-true"):
        predicted(cost_model=old, precision="bf16-mixed")
    assert predicted(cost_model=CostModel(device=GENERIC["cpu"]), device="cpu").seconds > predicted().seconds
