"""The cache: kv_heads only, each row at a place of its own, and a model that reads through it in any pieces."""

import pytest
import torch

from lightning_llm import ModelConfig, Transformer
from lightning_llm.model.kv_cache import KVCache

CONFIG = ModelConfig(
    vocab_size=31, hidden_size=48, num_hidden_layers=3, num_attention_heads=6, num_key_value_heads=2,
    max_position_embeddings=20, initializer_range=0.3,
)  # fmt: skip


def cache_of(rows, room=20):
    return KVCache(CONFIG, rows, room, torch.device("cpu"), torch.float64)


def held(cache):
    return [store for stores in cache._stores for store in stores.values()]


def test_it_holds_the_key_and_value_heads_and_nothing_else():
    cache = cache_of(4)
    Transformer(CONFIG).double()(torch.zeros(4, 3, dtype=torch.long), cache=cache)
    assert sum(store.numel() for store in held(cache)) == 3 * 2 * 4 * 2 * 20 * 8


@pytest.mark.parametrize("position", ["rope", "learned", "none"])
@pytest.mark.parametrize("cuts", [(1,) * 12, (12,), (5, 1, 4, 2)])
def test_any_pieces_give_the_hidden_states_of_the_whole(position, cuts):
    torch.manual_seed(0)
    model = Transformer(ModelConfig(**{**CONFIG.to_dict(), "position": position})).double().eval()
    ids, cache = torch.randint(31, (2, 12)), cache_of(2)
    pieces = [model(piece, cache=cache) for piece in ids.split(cuts, dim=1)]
    assert cache.lengths == [12, 12]
    assert torch.allclose(torch.cat(pieces, dim=1), model(ids), rtol=1e-12, atol=1e-12)


def test_rows_of_unequal_length_write_and_look_where_they_are():
    cache = cache_of(2)
    for layer in range(3):
        cache.append(layer, torch.full((2, 2, 5, 8), 1.0), torch.full((2, 2, 5, 8), 2.0))
    cache.set_lengths([5, 2])
    assert cache.positions(1).tolist() == [[5], [2]]
    assert cache.mask(1)[:, 0, 0].tolist() == [[True] * 6, [True] * 3 + [False] * 3]
    keys, values = cache.append(1, torch.full((2, 2, 1, 8), 7.0), torch.full((2, 2, 1, 8), 8.0))
    assert keys[:, 0, :, 0].tolist() == [[1, 1, 1, 1, 1, 7], [1, 1, 7, 1, 1, 0]]
    assert values[:, 1, :, 3].tolist() == [[2, 2, 2, 2, 2, 8], [2, 2, 8, 2, 2, 0]]
    cache.advance(1)
    assert cache.lengths == [6, 3]
    keys, _ = cache.append(1, torch.full((2, 2, 1, 8), 9.0), torch.full((2, 2, 1, 8), 9.0))
    assert keys[1, 0, :, 0].tolist() == [1, 1, 7, 9, 1, 0, 0]


def test_a_row_shares_the_memory_and_counts_for_itself():
    cache = cache_of(2)
    row = cache.row(1)
    row.append(0, torch.ones(1, 2, 3, 8), torch.ones(1, 2, 3, 8))
    row.advance(3)
    assert (row.lengths, cache.lengths) == ([3], [0, 0])
    assert [store[1].sum() for store in held(cache)] == [store.sum() for store in held(cache)] == 2 * [2 * 3 * 8]


def test_a_layer_may_hold_anything_by_name():
    cache = cache_of(2)
    cache.extend(1, "latent", torch.full((2, 1, 4, 3), 5.0))
    cache.set_lengths([4, 1])
    latents = cache.extend(1, "latent", torch.full((2, 1, 1, 3), 6.0))
    assert latents[:, 0, :, 0].tolist() == [[5, 5, 5, 5, 6], [5, 6, 5, 5, 0]]
    assert [store.shape for store in held(cache)] == [(2, 1, 20, 3)]


def test_a_state_is_of_any_length_and_zero_for_an_empty_row():
    cache = cache_of(2)
    assert cache.is_token(3) is None
    cache.state(1, "state", (3,), torch.float32).fill_(5.0)
    cache.set_lengths([4, 0])
    assert cache.state(1, "state", (3,), torch.float32).tolist() == [[5] * 3, [0] * 3]
    assert cache.row(0).state(1, "state", (3,), torch.float32).tolist() == [[0] * 3]  # it begins again
    cache.expect([3, 1])
    assert cache.is_token(3).tolist() == [[True] * 3, [True, False, False]]
    cache.advance(3)
    assert cache.is_token(3) is None


def test_what_does_not_fit_is_refused():
    cache = cache_of(2, room=4)
    with pytest.raises(ValueError, match="the cache holds 4 positions, asked to hold 5"):
        cache.append(0, torch.ones(2, 2, 5, 8), torch.ones(2, 2, 5, 8))
    cache.set_lengths([3, 1])
    with pytest.raises(ValueError, match="rows of unequal length take one new position at a time, got 2"):
        Transformer(CONFIG).double()(torch.zeros(2, 2, dtype=torch.long), cache=cache)
