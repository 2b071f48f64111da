"""The standard error of a difference over validation windows."""

import numpy as np
import pytest

from lightning_llm.statistics.windows import FEWEST_BLOCKS, window_error

RNG = np.random.default_rng(0)


def record(nats, tokens, windows=None):
    return {"step": 1, "windows": windows or [8] * len(nats), "tokens": list(tokens), "nats": list(nats)}


def pair(difference, tokens, level=3.0):
    """A baseline whose blocks differ much from each other, and a variant that differs little from it."""
    base = np.array(tokens) * level + RNG.normal(size=len(tokens)) * 100
    return record(base, tokens), record(base + difference, tokens)


def test_with_equal_blocks_it_is_the_standard_error_of_a_mean():
    losses = RNG.normal(size=20)
    found = window_error([pair(losses * 64, [64] * 20)])
    assert found.pair == pytest.approx(losses.std(ddof=1) / np.sqrt(20))
    assert (found.mean, found.blocks) == (found.pair, 20)


def test_a_difference_in_every_token_has_no_error_however_the_blocks_differ():
    tokens = RNG.integers(1, 64, size=9)
    found = window_error([pair(0.25 * tokens, tokens)])
    assert found.pair == found.mean == pytest.approx(0, abs=1e-12)


def test_simulated_texts_spread_as_the_error_says():
    """2,000 texts of 40 blocks, the last one short. A part of each block is of the text, and a part of the seed."""
    tokens = np.array([64] * 39 + [24])
    common = RNG.normal(size=(2000, 40)) * np.sqrt(tokens) * 2  # of the text: all seeds have it
    seeds = RNG.normal(size=(3, 2000, 40)) * np.sqrt(tokens)
    sums = 0.1 * tokens + common + seeds  # (seeds, texts, blocks)
    ratios = sums.sum(axis=2) / tokens.sum()
    found = [window_error([pair(each, tokens) for each in sums[:, text]]) for text in range(2000)]
    spread_of_pairs, spread_of_means = ratios.std(axis=1).mean(), ratios.mean(axis=0).std()
    # 2,000 texts give a spread to 1.6 %; the bias of the estimate with 40 blocks is below 1 %
    assert np.mean([each.pair for each in found]) == pytest.approx(spread_of_pairs, rel=0.06)
    assert np.mean([each.mean for each in found]) == pytest.approx(spread_of_means, rel=0.06)
    assert spread_of_means > 0.85 * spread_of_pairs  # more seeds do not help against the text


def test_seeds_are_averaged_before_the_spread():
    noise, tokens = RNG.normal(size=12), [64] * 12
    found = window_error([pair(noise, tokens), pair(-noise, tokens)])
    assert found.mean == pytest.approx(0, abs=1e-12)
    assert found.pair == pytest.approx(noise.std(ddof=1) / 64 / np.sqrt(12))


def test_other_blocks_or_too_few_say_nothing():
    tokens, nats = [64] * FEWEST_BLOCKS, RNG.normal(size=FEWEST_BLOCKS)
    known = pair(nats, tokens)
    assert window_error([known]) is not None
    assert window_error([]) is None
    assert window_error([pair(nats[1:], tokens[1:])]) is None
    shorter = record(nats, [*tokens[1:], 63])
    assert window_error([(known[0], shorter)]) is None
    assert window_error([(record(nats, tokens, [7, *[8] * (FEWEST_BLOCKS - 1)]), known[1])]) is None
    assert window_error([known, (shorter, shorter)]) is None
