"""Tiny models saves the parts of a config; their weights and batch show what is wrong."""

import torch

from lightning_llm.data.batches import IGNORED
from lightning_llm.model.config import ModelConfig
from lightning_llm.ops import sizes
from lightning_llm.same.tiny_model import (
    CONTEXT,
    HIDDEN,
    ROWS,
    VOCAB,
    WIDTH,
    WINDOW,
    make_batch,
    moved,
    plain_config,
    random_weights,
    tiny_config,
)


def test_float32_runs_in_tiles():
    for saves, has_norm in ((True, False), (False, False), (False, True)):
        shape = ROWS * CONTEXT, HIDDEN, WIDTH, 4, 4, "cpu"
        assert not sizes.prefers_whole(*shape, saves=saves, has_norm=has_norm)


def test_tiny_configs_keep_what_they_can():
    config = tiny_config(ModelConfig(num_attention_heads=32, num_key_value_heads=4, hidden_size=1024, dropout=0.5))
    assert (config.num_attention_heads, config.num_key_value_heads, config.vocab_size) == (8, 1, VOCAB)
    assert config.dropout == 0
    levels = tiny_config(ModelConfig(num_hidden_layers=5, checkpoint_level=[2, 1, 0, 0, 0]))
    assert levels.checkpoint_levels == [2, 1, 0]
    own = {"attention": {"class_path": "sliding_window", "init_args": {"window": 900}}, "intermediate_size": 5000}
    sizes = {"num_hidden_layers": 8, "num_attention_heads": 10, "num_key_value_heads": 2}
    config = ModelConfig(hidden_size=640, layers=[own, {}, {"num_key_value_heads": 10}, {"position": "none"}], **sizes)
    tiny = tiny_config(config)
    assert tiny.attention_windows == [WINDOW, None, None, None]
    assert [of_layer.num_key_value_heads for of_layer in tiny.layer_configs] == [1, 1, 5, 1]
    assert {of_layer.intermediate_size for of_layer in tiny.layer_configs} == {WIDTH}


def test_the_plain_form_fuses_and_recomputes_nothing():
    config = plain_config(ModelConfig(checkpoint_level=2, recompute="block", qk_norm=True))
    assert (config.mlp, config.checkpoint_level, config.recompute, config.qk_norm) == ("swiglu", 0, "none", True)
    assert plain_config(ModelConfig(mlp="gelu")).mlp == "gelu"
    layers = [{"mlp": "memory_optimized_swiglu"}, {"mlp": "relu2"}, {}]
    assert [each.mlp for each in plain_config(ModelConfig(layers=layers)).layer_configs[:3]] == [
        "swiglu",
        "relu2",
        "swiglu",
    ]


def test_weights_are_numbers_of_bfloat16_of_unit_variance_and_padding_stays_zero():
    config = tiny_config(ModelConfig(vocab_multiple_of=64, tie_word_embeddings=True, position="learned"))
    weights = random_weights(config)
    assert all(torch.equal(value, value.bfloat16().float()) for value in weights.values())
    assert 0.9 < float(weights["layers.1.mlp.down_proj.weight"].std()) * WIDTH**0.5 < 1.1
    assert 0 < float((weights["norm.weight"] - 1).abs().mean()) < 0.2
    assert torch.equal(weights["lm_head.weight"], weights["embed_tokens.weight"])
    assert not weights["lm_head.weight"][VOCAB:].any()
    assert weights["lm_head.weight"][:VOCAB].any(dim=1).all()


def test_moved_weights_differ_by_a_unit():
    weights = random_weights(tiny_config(ModelConfig()))
    one, other = (moved(weights, sample, 1e-9)["layers.0.mlp.up_proj.weight"] for sample in (0, 1))
    right = weights["layers.0.mlp.up_proj.weight"].double()
    assert 0.5e-9 < float((one - right).norm() / right.norm()) < 2e-9
    assert not torch.equal(one, other)


def test_rows_have_different_numbers_of_targets():
    batch = make_batch(documents=True)
    counts = (batch["targets"] != IGNORED).sum(dim=1).tolist()
    assert len(set(counts)) == ROWS
    assert batch["documents"].max() > 0
    assert "documents" not in make_batch(documents=False)
