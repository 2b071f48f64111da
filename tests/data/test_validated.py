"""Which windows a limit stands for: properties of the pure function."""

import copy
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_llm.data.tokenizers import Tokenizer
from lightning_llm.data.validated import ServedWindows, is_whole, text_bytes, validated_windows


@given(st.lists(st.integers(1, 300), min_size=1, max_size=4), st.integers(1, 50), st.integers(1, 16))
def test_windows_are_distinct_and_evenly_spaced(stores, limit, batch):
    found = validated_windows(stores, limit, batch)
    firsts = np.cumsum([0, *stores[:-1]])
    assert all(
        len(own) and own[0] >= 0 and own[-1] < number for own, number in zip(found.of_sources, stores, strict=True)
    )
    places = np.concatenate([own + first for own, first in zip(found.of_sources, firsts, strict=True)])
    assert (np.diff(places) > 0).all()
    expected = min(sum(stores), limit * batch)
    assert expected <= found.count < expected + len(stores)
    if len(stores) == 1:
        gaps = np.diff(places)
        assert found.count == expected
        assert gaps.max(initial=0) - gaps.min(initial=stores[0]) <= 1


@pytest.mark.parametrize(
    ("limit", "count"), [(0.29, 29), (0.01, 1), (0.999, 99), (1.0, 100), (None, 100), (1, 8), (99, 100)]
)
def test_a_limit_is_a_number_of_batches_or_a_share(limit, count):
    assert validated_windows([100], limit, 8).count == count


def test_the_number_one_is_a_batch_and_the_fraction_all():
    assert [is_whole(limit) for limit in (None, 1.0, 1, 0.5, 0)] == [True, True, False, False, False]


@given(st.integers(1, 500), st.integers(1, 20), st.integers(2, 5))
def test_more_windows_contain_fewer(windows, few, times):
    small, large = (set(validated_windows([windows], limit, 1).of_sources[0].tolist()) for limit in (few, few * times))
    assert small <= large or few * times > windows


def test_a_share_of_no_window_is_refused():
    with pytest.raises(
        ValueError, match=r"limit_val_batches 0\.009 of 100 windows .* use at least 1/100, a whole number"
    ):
        validated_windows([100], 0.009, 8)


def test_lightning_sees_all_that_is_served_and_copies_keep_what_was_asked():
    limit = ServedWindows(3)
    for one in (limit, copy.deepcopy(limit), pickle.loads(pickle.dumps(limit))):
        assert (one, one.asked) == (1.0, 3)


@pytest.mark.parametrize("kind", ["bpe", "file"])
def test_the_bytes_of_windows_leave_out_what_is_no_text(kind):
    tokenizer = Tokenizer.train_bpe(["the king of what you say is not my lord"] * 3, 300)
    tokenizer.kind = kind
    text = "the lord of the king"
    ids = np.array(tokenizer.encode(text))
    end = tokenizer.eos_token_id
    first = len(tokenizer.decode(ids[:1]).encode())
    assert text_bytes(tokenizer, [ids], ()) == len(text) - first
    around = np.array([end, *ids, end, end])
    assert text_bytes(tokenizer, [around], (end,)) == len(text)
    assert text_bytes(tokenizer, [ids, around], (end,)) == 2 * len(text) - first
