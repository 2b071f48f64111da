"""Shapes as sizes, models of these sizes, and stores of random tokens."""

import pytest

from benchmarks.workloads import HEAD_DIM, llama, make_store, model_config, sizes_of
from lightning_llm.data.token_store import TokenStore
from lightning_llm.model.transformer import Transformer


def test_a_shape_has_a_number_for_each_name():
    assert sizes_of("8x16", ["rows", "hidden"], "1x2") == {"rows": 8, "hidden": 16}
    for text in ("8", "8x16x2", "8x0", "8xa", ""):
        with pytest.raises(ValueError, match="must be rows x hidden, such as 1x2, or small"):
            sizes_of(text, ["rows", "hidden"], "1x2", ["small"])
    with pytest.raises(ValueError, match="shapes '8' are not options of this bench"):
        sizes_of("8", [], "")


def test_heads_are_as_wide_as_usual_where_a_shape_has_none():
    config = model_config({"vocab": 65, "hidden": 4 * HEAD_DIM, "layers": 2, "rows": 3}, mlp="gelu")
    assert (config.num_attention_heads, config.num_hidden_layers, config.mlp) == (4, 2, "gelu")
    assert model_config({"hidden": 32, "heads": 2, "layers": 1}).num_attention_heads == 2


def test_the_model_of_transformers_has_as_many_parameters():
    pytest.importorskip("transformers")
    config = model_config({"vocab": 65, "hidden": 32, "heads": 2, "layers": 2, "intermediate": 64, "context": 16})
    theirs, ours = (sum(p.numel() for p in model.parameters()) for model in (llama(config), Transformer(config)))
    assert theirs == ours


def test_a_store_of_random_tokens_has_both_splits(tmp_path):
    store = TokenStore.open(make_store(tmp_path / "store", vocab=300, tokens=400))
    train, val = store.tokens("train"), store.tokens("val")
    assert (len(train), len(val)) == (400, 100)
    assert train.max() < 300
    assert len(set(train.tolist())) > 150
