import math
from statistics import NormalDist

import pytest
import torch

from lightning_llm.optim.rounding import round_stochastically_, rounding_noise

ALL_NOISE = torch.arange(2**16, dtype=torch.int32)
LARGEST = torch.finfo(torch.bfloat16).max
NANS = [0x7F800001, 0x7FC00000, 0x7FFF0001, 0x7FFFFFFF, -1, -0x10000, -0x7FFFFF, -0x400000]  # bits as int32, both signs


def round_stochastically(values, noise):
    """The formula, not in place: the upper 16 bits after the noise is added."""
    rounded = (values.view(torch.int32) + noise).bitwise_and(-(2**16)).view(torch.float32)
    return torch.where(values.isnan(), values, rounded).to(torch.bfloat16)


def in_place(values, noise):
    values = values.clone()
    round_stochastically_(values, noise)
    rounded = values.to(torch.bfloat16)
    assert torch.equal(rounded.float().nan_to_num(1.5), values.nan_to_num(1.5))  # nothing was left for to() to round
    return rounded


either = pytest.mark.parametrize("rounded", [round_stochastically, in_place])


def bits(tensor):
    return tensor.view(torch.int16)


@either
@pytest.mark.parametrize("value", [1.0039, -1.0039, 3.14159, -2.7e-30, 1e-40, 7.3e37, 0.99999, -65535.7])
def test_the_mean_over_all_noise_is_the_value_exactly(rounded, value):
    values = torch.full((2**16,), value)
    out = rounded(values, ALL_NOISE).double()
    assert len(out.unique()) == 2
    assert out.min() < values[0] < out.max()
    between = out.unique().to(torch.bfloat16)
    assert torch.nextafter(between[0], between[1]) == between[1]
    assert out.mean() == values[0].double()


@either
@pytest.mark.parametrize("noise", [0, 1, 2**15, 2**16 - 1])
def test_what_bfloat16_holds_stays(rounded, noise):
    every = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.bfloat16)  # ±0, subnormal, ±inf, NaN among them
    assert {0.0, -0.0, math.inf, -math.inf, LARGEST, -LARGEST} <= set(every[~every.isnan()].tolist())
    out = rounded(every.float(), torch.full(every.shape, noise, dtype=torch.int32))
    number = ~every.isnan()
    assert torch.equal(bits(out)[number], bits(every)[number])  # the bits: -0 is not 0
    assert out[~number].isnan().all()


@either
@pytest.mark.parametrize("pattern", NANS)
def test_nan_stays_nan_whatever_its_bits(rounded, pattern):
    values = torch.full((2**16,), pattern, dtype=torch.int32).view(torch.float32)
    assert values.isnan().all()
    assert rounded(values, ALL_NOISE).isnan().all()


@either
@pytest.mark.parametrize("sign", [1, -1])
def test_above_the_largest_the_neighbour_is_infinity(rounded, sign):
    step = 2.0**128 - LARGEST  # as if the next one could be held
    for value in (LARGEST, LARGEST + step / 4, LARGEST + step / 2, torch.finfo(torch.float32).max):
        out = rounded(torch.full((2**16,), sign * value), ALL_NOISE)
        assert set(out.tolist()) <= {sign * LARGEST, sign * math.inf}
        assert out.isinf().sum() == (value - LARGEST) / step * 2**16


def test_in_place_has_the_bits_of_the_reference():
    generator = torch.Generator().manual_seed(0)
    values = torch.randint(-(2**31), 2**31, (5, 123, 77), generator=generator).to(torch.int32).view(torch.float32)
    noise = torch.randint(0, 2**16, values.shape, generator=generator).to(torch.int32)
    ours, theirs = in_place(values, noise), round_stochastically(values, noise)
    assert torch.equal(ours.isnan(), theirs.isnan())
    assert torch.equal(bits(ours.nan_to_num(1.5)), bits(theirs.nan_to_num(1.5)))


def hashed(index, step):
    """The noise in Python's own whole numbers."""
    key = step * 0x9E3779B97F4A7C15 % 2**64
    key = (key ^ key >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    key = (key ^ key >> 27) * 0x94D049BB133111EB % 2**64
    key ^= key >> 31

    def shifted(word):  # the sign fills
        return word ^ (word >> 15 | (0xFFFE0000 if word >> 31 else 0))

    word = shifted((index * 0x2C1B3C6D + key) % 2**32)
    word = shifted((word * 0x297A2D39 + (key >> 32)) % 2**32)
    word = word * 0x7FEB352D % 2**32
    return (word ^ word >> 16) & 0xFFFF, word >> 16


@pytest.mark.parametrize("start", [0, 12345, 2**31 - 20, 2**32 - 20, 10**12])
@pytest.mark.parametrize("step", [1, 2, 10**6])
def test_noise_is_a_hash_of_index_and_step(start, step):
    first, second = rounding_noise([(start, 40)], step=step)
    assert list(zip(first.tolist(), second.tolist(), strict=True)) == [hashed(start + i, step) for i in range(40)]


def test_noise_does_not_depend_on_where_it_is_cut():
    whole = rounding_noise([(100, 1000)], step=7)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    cut = rounding_noise([(100, 1), (101, 398), (499, 0), (499, 601)], step=7)
    apart = [rounding_noise([(start, 500)], step=7) for start in (100, 600)]
    assert torch.equal(torch.get_rng_state(), before)
    for i in range(2):
        assert torch.equal(whole[i], cut[i])
        assert torch.equal(whole[i], torch.cat([part[i] for part in apart]))


def quantile(tests):
    """Of the normal distribution: exceeded in any of so many tests, on either side, once in 10,000 times."""
    return NormalDist().inv_cdf(1 - 1e-4 / (2 * tests))


def test_noise_is_uniform():
    count = 2**21
    for noise in rounding_noise([(0, count)], step=1):
        assert (noise.min(), noise.max()) == (0, 2**16 - 1)
        seen = torch.bincount(noise.long(), minlength=2**16).double()
        expected = count / 2**16
        chi_square, freedom = ((seen - expected) ** 2 / expected).sum().item(), 2**16 - 1
        assert abs(chi_square - freedom) < quantile(2) * math.sqrt(2 * freedom)
        pairs = torch.bincount((noise[:-1] >> 10) * 64 + (noise[1:] >> 10), minlength=4096).double()
        expected = (count - 1) / 4096
        chi_square = ((pairs - expected) ** 2 / expected).sum().item()
        assert abs(chi_square - 4095) < quantile(2) * math.sqrt(2 * 4095)


def test_streams_steps_and_indices_are_independent():
    """Correlations of n independent pairs are normal with standard deviation 1 / √n."""
    count, lags = 2**18, (1, 2, 3, 64, 128, 1024, 65536)
    first, second, later, last = (
        noise.float().sub(32767.5).div(2**16 / math.sqrt(12))
        for step in (41, 42)
        for noise in rounding_noise([(0, count)], step=step)
    )
    pairs = [(a, b) for i, a in enumerate((first, second, later, last)) for b in (first, second, later, last)[:i]]
    pairs += [(a[lag:], b[:-lag]) for lag in lags for a, b in [(first, first), (second, second), (first, second)]]
    pairs += [(a[lag:], b[:-lag]) for lag in lags for a, b in [(first, later), (second, last), (second, first)]]
    for a, b in pairs:
        assert abs((a * b).mean().item()) < quantile(len(pairs)) / math.sqrt(len(a))


def test_one_index_has_independent_noise_at_its_steps():
    steps, count = 1000, 32
    noises = [torch.cat(rounding_noise([(17, count)], step=step)) for step in range(1, steps + 1)]
    noise = torch.stack(noises).double().sub(32767.5).div(2**16 / math.sqrt(12))
    bound = quantile(2 * count + 4 * count + count * (2 * count - 1)) / math.sqrt(steps - 8)
    assert noise.mean(0).abs().max() < bound
    for lag in (1, 2, 4, 8):
        assert (noise[lag:] * noise[:-lag]).mean(0).abs().max() < bound
    between = noise.T @ noise / steps
    assert between.fill_diagonal_(0).abs().max() < bound
