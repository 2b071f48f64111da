"""Several sources in one order: shares, no token twice, and a function of nothing but seed and place."""

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_llm.data.mixture import MixtureOrder, _floor_sum, first_tokens, source_slices
from lightning_llm.data.order import WindowOrder

shares = st.one_of(st.just(0.0), st.floats(0.01, 10))
sources = st.lists(st.tuples(st.integers(20, 200), shares), min_size=1, max_size=5)
sources = sources.filter(lambda given_sources: any(weight for _, weight in given_sources))


def mixture(sizes, weights, *, context_length=4, seed=0):
    orders = [
        WindowOrder(num_tokens=size, context_length=context_length, seed=seed + 77 * k) for k, size in enumerate(sizes)
    ]
    return MixtureOrder(orders, sizes, weights, seed=seed), orders


@given(st.integers(0, 60), st.integers(1, 50), st.integers(0, 99), st.integers(-99, 99))
def test_sum_of_floors(count, modulus, step, start):
    assert _floor_sum(count, modulus, step, start) == sum((step * i + start) // modulus for i in range(count))


@given(sources, st.integers(0, 2**40), st.integers(0, 2**63), st.integers(1, 40))
def test_any_stretch_is_the_same_whatever_was_asked_before(given_sources, first, seed, count):
    order, _ = mixture(*zip(*given_sources, strict=True), seed=seed)
    whole = order.starts(first, count)
    parts = [order.starts(first + place, 1) for place in range(count)]
    assert whole.tolist() == np.concatenate(parts).tolist()


@given(sources, st.integers(0, 2**63))
@settings(max_examples=50)
def test_each_source_is_read_in_its_own_order(given_sources, seed):
    sizes, weights = zip(*given_sources, strict=True)
    order, alone = mixture(sizes, weights, seed=seed)
    firsts, starts = first_tokens(sizes), order.starts(0, 300)
    for number, here in enumerate(source_slices(starts, firsts)):
        assert len(here) == order.earlier(number, 300)
        if len(here):
            assert (starts[here] - firsts[number]).tolist() == alone[number].starts(0, len(here)).tolist()


@given(sources, st.integers(0, 2**50), st.integers(0, 2**63))
def test_every_stretch_has_each_sources_share(given_sources, first, seed):
    sizes, weights = zip(*given_sources, strict=True)
    order, _ = mixture(sizes, weights, seed=seed)
    count = 1000
    found = [len(here) for here in source_slices(order.starts(first, count), first_tokens(sizes))]
    # a golden-ratio sequence misses the length of an arc by O(log n) points; drawing would miss it by about 16
    for number, weight in zip(found, weights, strict=True):
        assert abs(number - count * weight / sum(weights)) < 2 * math.log2(count) / 3


def test_within_an_epoch_of_a_source_no_target_is_used_twice():
    order, _ = mixture([4 * 50 + 3, 4 * 20 + 1], [3, 1])
    starts = order.starts(0, 66)  # 3/4 of them from the first source: just under its 50 windows; 1/4 of the other's 20
    targets = Counter((start + 1 + k) for start in starts.tolist() for k in range(4))
    assert max(targets.values()) == 1
    assert 4 * 50 + 3 not in targets  # the first token of the second source is nobody's target


def test_seeds_and_equally_long_sources_differ():
    order, _ = mixture([400, 400], [1, 1])
    other, _ = mixture([400, 400], [1, 1], seed=1)
    assert order.starts(0, 50).tolist() != other.starts(0, 50).tolist()
    parts = source_slices(order.starts(0, 50), first_tokens([400, 400]))
    first, second = (order.starts(0, 50)[part] % 400 for part in parts)
    assert first.tolist()[:20] != second.tolist()[:20]


def test_memory_does_not_grow_with_the_streams():
    order, _ = mixture([10**12, 10**11], [1, 1], context_length=2048)
    starts = order.starts(10**9, 100)
    assert starts.shape == (100,)
    assert 0 <= starts.min() <= starts.max() < 1.1 * 10**12


@pytest.mark.parametrize("sequence", [0, 1, 7, 10**15])
def test_counts_of_earlier_sequences_add_up(sequence):
    order, _ = mixture([100, 100, 100], [0.2, 0.3, 0.5])
    assert sum(order.earlier(number, sequence) for number in range(3)) == sequence
