import itertools
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_llm.data.order import WindowOrder, window_starts

seeds = st.integers(-(2**70), 2**70)


@st.composite
def streams(draw):
    """(num_tokens, context_length) with up to a few hundred windows."""
    context_length = draw(st.integers(1, 50))
    return context_length + 1 + draw(st.integers(0, 300 * context_length)), context_length


@given(streams(), seeds, st.integers(0, 10**9))
def test_epoch_uses_each_target_at_most_once_and_leaves_out_less_than_a_window(stream, seed, epoch):
    num_tokens, context_length = stream
    order = WindowOrder(num_tokens=num_tokens, context_length=context_length, seed=seed)
    starts = order.starts(epoch * order.num_windows, order.num_windows)
    assert starts.dtype == np.int64
    targets = (starts[:, None] + 1 + np.arange(context_length)).ravel()
    assert 1 <= targets.min() <= targets.max() <= num_tokens - 1
    assert len(np.unique(targets)) == len(targets)
    assert 0 <= (num_tokens - 1) - len(targets) < context_length


@given(streams(), seeds, st.integers(1, 40), st.integers(0, 1000))
def test_step_is_a_slice_of_the_run_whatever_ran_before(stream, seed, global_batch_size, step):
    num_tokens, context_length = stream
    order = WindowOrder(num_tokens=num_tokens, context_length=context_length, seed=seed)
    first = max(0, step - 2)
    run = order.starts(first * global_batch_size, 5 * global_batch_size).reshape(5, global_batch_size)
    alone = window_starts(
        step, seed=seed, global_batch_size=global_batch_size, context_length=context_length, num_tokens=num_tokens
    )
    np.testing.assert_array_equal(alone, run[step - first])


@given(streams(), seeds, st.lists(st.integers(1, 60), min_size=1, max_size=5), st.integers(0, 5000))
def test_pieces_of_any_size_make_up_the_same_run(stream, seed, sizes, first):
    num_tokens, context_length = stream
    order = WindowOrder(num_tokens=num_tokens, context_length=context_length, seed=seed)
    ends = list(itertools.accumulate(sizes, initial=first))
    pieces = [order.starts(start, size) for start, size in zip(ends, sizes, strict=False)]
    np.testing.assert_array_equal(np.concatenate(pieces), order.starts(first, sum(sizes)))


def epochs(order, count):
    return order.starts(0, count * order.num_windows).reshape(count, order.num_windows)


def test_epochs_and_seeds_differ_in_order_and_in_what_is_left_out():
    orders = [WindowOrder(num_tokens=100 * 64 + 40, context_length=64, seed=seed) for seed in range(4)]
    runs = np.concatenate([epochs(order, 4) for order in orders])
    assert len({tuple(run // 64) for run in runs}) == 16
    assert len(set(runs.min(axis=1))) > 8  # of 16 offsets out of 40
    assert runs.min() >= 0
    assert runs.max() + 64 <= 100 * 64 + 39


def test_every_offset_occurs():
    order = WindowOrder(num_tokens=3 * 10 + 7, context_length=10, seed=0)
    assert set(epochs(order, 500).min(axis=1)) == set(range(7))


def test_nothing_is_left_out_where_windows_fit_exactly():
    order = WindowOrder(num_tokens=7 * 16 + 1, context_length=16, seed=5)
    for epoch in epochs(order, 3):
        assert sorted(epoch) == list(range(0, 112, 16))


@pytest.mark.parametrize("windows", [2, 3, 5])
def test_every_permutation_of_few_windows_occurs_about_equally_often(windows):
    orders, count = {}, 3000
    for epoch in epochs(WindowOrder(num_tokens=windows + 1, context_length=1, seed=1), count):
        orders[tuple(epoch)] = orders.get(tuple(epoch), 0) + 1
    possible = len(list(itertools.permutations(range(windows))))
    expected = count / possible
    chi_squared = sum((seen - expected) ** 2 / expected for seen in orders.values())
    chi_squared += expected * (possible - len(orders))
    # Mean and standard deviation of the statistic are its degrees of freedom and the root of twice as many.
    assert chi_squared < possible - 1 + 5 * (2 * (possible - 1)) ** 0.5


def test_windows_follow_one_another_without_pattern():
    order = WindowOrder(num_tokens=100_001, context_length=1, seed=3)
    places = order.starts(0, 100_000)
    for lag in (1, 2, 4, 1000):  # the standard deviation of a correlation of n independent pairs is 1 / sqrt(n)
        assert abs(np.corrcoef(places[:-lag], places[lag:])[0, 1]) < 5 / np.sqrt(len(places) - lag)
    steps = np.diff(places)
    assert len(np.unique(steps)) > len(steps) / 2


def test_memory_does_not_grow_with_the_stream():
    tracemalloc.start()
    try:
        order = WindowOrder(num_tokens=10**12, context_length=2048, seed=7)
        starts = order.starts(10**9, 1024)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert order.num_windows == (10**12 - 1) // 2048
    assert 0 <= starts.min() <= starts.max() <= 10**12 - 2049
    assert starts.max() > 10**11
    assert peak < 10**6


def test_order_is_the_same_on_every_machine():
    order = WindowOrder(num_tokens=1000, context_length=7, seed=1337)
    assert order.starts(0, 6).tolist() == [261, 695, 681, 520, 842, 310]
    assert order.starts(10**6, 6).tolist() == [306, 376, 180, 558, 523, 299]


@pytest.mark.parametrize(("num_tokens", "context_length"), [(10, 10), (0, 1), (1, 1)])
def test_stream_shorter_than_a_window_is_refused(num_tokens, context_length):
    with pytest.raises(
        ValueError, match=f"context_length {context_length} is too long for the text: it has {num_tokens} tokens"
    ):
        WindowOrder(num_tokens=num_tokens, context_length=context_length, seed=0)


def test_context_length_of_zero_is_refused():
    with pytest.raises(ValueError, match="context_length must be at least 1, got 0"):
        WindowOrder(num_tokens=10, context_length=0, seed=0)
