"""AdamW with its averages in bfloat16."""

import math

import pytest
import torch
from torch import nn

from lightning_llm.measure import MemoryMeter
from lightning_llm.optim import AdamW, MuonAdamW, adamw, rounding
from tests.optim.conftest import SHAPES, reload, start

OPTIONS = {"lr": 3e-3, "betas": (0.9, 0.999), "weight_decay": 0.1}
BF16 = {**OPTIONS, "state_dtype": "bfloat16"}


def run(optimizer, params, steps, first=0):
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed(1 + step)
        for param in params:
            param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)
        optimizer.step()
    return optimizer


def everything(optimizer, params):
    state = [optimizer.state[param] for param in params]
    return [tensor for param, own in zip(params, state, strict=True) for tensor in (param, *averages(own))]


def averages(own):
    return own["exp_avg"], own["exp_avg_sq"]


def assert_same(ours, theirs):
    assert [tensor.dtype for tensor in ours] == [tensor.dtype for tensor in theirs]
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def bytes_of_state(optimizer):
    return sum(average.nbytes for own in optimizer.state.values() for average in averages(own))


def test_the_state_has_half_the_bytes():
    whole, half = start(), start()
    numbers = sum(param.numel() for param in whole)
    assert bytes_of_state(run(AdamW(whole, **OPTIONS), whole, 2)) == 8 * numbers
    assert bytes_of_state(run(AdamW(half, **BF16), half, 2)) == 4 * numbers


@pytest.mark.parametrize("fused", [False, None])
def test_the_first_step_is_that_of_float32_and_its_state_a_neighbour(fused):
    ours, theirs = start(), start()
    first = run(AdamW(ours, **BF16, fused=fused), ours, 1)
    second = run(AdamW(theirs, **OPTIONS, fused=fused), theirs, 1)
    rounded_up = []
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a, b)
        for rounded, exact in zip(averages(first.state[a]), averages(second.state[b]), strict=True):
            down = (exact.view(torch.int32) & -(2**16)).view(torch.float32)
            up = (down.view(torch.int32) + 2**16).view(torch.float32)
            assert ((rounded == down) | (rounded == up)).all()
            rounded_up.append((rounded == up).flatten())
    up = torch.cat(rounded_up)
    assert abs(up.float().mean() - 0.5) < 5 * 0.5 / math.sqrt(len(up))  # the share of the way is uniform here


@pytest.mark.parametrize("fused", [False, None])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_chunks_and_groups_do_not_matter(monkeypatch, fused, dtype):
    results, options = [], {**BF16, "param_rounding": "stochastic"}
    for size, groups in [(2**20, 1), (4096, 1), (1024, 2), (2**20, len(SHAPES))]:  # cut at whole vectors
        monkeypatch.setattr(adamw, "_CHUNK_BYTES", {"cpu": size})
        params = start(dtype)
        cut = math.ceil(len(params) / groups)
        groups_of = [{"params": params[i : i + cut]} for i in range(0, len(params), cut)]
        optimizer = AdamW(groups_of, **options, fused=fused)
        results.append(everything(run(optimizer, params, 4), params))
    for other in results[1:]:
        assert_same(results[0], other)


@pytest.mark.parametrize("transposed", ["param", "grad"])
def test_memory_layouts_do_not_matter(monkeypatch, transposed):
    monkeypatch.setattr(adamw, "_CHUNK_BYTES", {"cpu": 4000})
    plain, other = start(shapes=[(40, 133)]), start(shapes=[(40, 133)])
    if transposed == "param":
        other[0].data = other[0].data.t().contiguous().t()
    optimizers = [AdamW(params, **BF16, fused=False) for params in (plain, other)]
    for step in range(4):
        grad = torch.randn(40, 133, generator=torch.Generator().manual_seed(step))
        plain[0].grad = grad
        other[0].grad = grad.t().contiguous().t() if transposed == "grad" else grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    # Sums of products may round otherwise where vectors cannot be used; the noise must be that of the same numbers.
    for ours, theirs in zip(everything(optimizers[0], plain), everything(optimizers[1], other), strict=True):
        assert (ours == theirs).float().mean() > 0.99


def test_a_resting_parameter_does_not_shift_the_noise_of_others():
    both, one = start(), start()
    first, second = AdamW(both, **BF16), AdamW(one, **BF16)
    for step in range(3):
        for params in (both, one):
            generator = torch.Generator().manual_seed(step)
            for param in params:
                param.grad = torch.randn(param.shape, generator=generator)
        one[0].grad = one[2].grad = None
        first.step()
        second.step()
    assert_same(everything(first, both[3:]), everything(second, one[3:]))


def test_no_generator_is_read_or_moved():
    results = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        params = start()
        optimizer = AdamW(params, **BF16)
        before = torch.get_rng_state()
        run(optimizer, params, 3)
        assert torch.equal(torch.get_rng_state(), before)
        results.append(everything(optimizer, params))
    assert_same(*results)


def to_nearest(values, noise):
    values.copy_(values.to(torch.bfloat16))


def test_the_second_average_shrinks_where_rounding_to_nearest_freezes_it(monkeypatch):
    beta2, count, steps = 0.999, 10_000, 300

    def second_average():
        param = nn.Parameter(torch.zeros(count))
        optimizer = AdamW([param], betas=(0.9, beta2), state_dtype="bfloat16")
        for step in range(1 + steps):
            param.grad = torch.full((count,), 0.0 if step else 40.0)
            optimizer.step()
        return optimizer.state[param]["exp_avg_sq"].double()

    first = 1600 * (1 - beta2)
    expected = first * beta2**steps
    digit = 2.0**-7  # between 1 and 2, where it all happens
    assert 1 < expected < first < 2
    # Each rounding has a variance of at most digit² / 4, and the average over count is independent.
    bound = 5 * digit / 2 * math.sqrt(steps / count)
    assert abs(second_average().mean().item() - expected) < bound
    monkeypatch.setattr(rounding, "round_stochastically_", to_nearest)
    frozen = second_average()
    assert (frozen - first).abs().max() <= digit / 2


def test_parameters_stay_closer_to_those_of_float32_than_by_rounding_to_nearest(monkeypatch):
    def after(**options):
        params = start(shapes=[(100, 100)])
        optimizer = AdamW(params, **OPTIONS, **options)
        for step in range(600):  # gradients that shrink, as they do in training
            generator = torch.Generator().manual_seed(step)
            params[0].grad = torch.randn(100, 100, generator=generator) * 0.99**step
            optimizer.step()
        return params[0].detach().double(), optimizer.state[params[0]]["exp_avg_sq"].double()

    exact, ours = after(), after(state_dtype="bfloat16")
    monkeypatch.setattr(rounding, "round_stochastically_", to_nearest)
    nearest = after(state_dtype="bfloat16")
    for truth, stochastic, rounded in zip(exact, ours, nearest, strict=True):
        assert 0 < (stochastic - truth).norm() < (rounded - truth).norm()


@pytest.mark.parametrize("fused", [False, None])
@pytest.mark.parametrize("transposed", [False, True])
def test_temporaries_are_bounded_by_the_chunk(fused, transposed):
    params = start(shapes=[(1000, 1000), *[(300, 300)] * 9, (7,)])
    if transposed:
        params[0].data = params[0].data.t()
    optimizer = run(AdamW(params, **BF16, fused=fused), params, 1)  # makes the state
    with MemoryMeter(exclude=params) as meter:
        optimizer.step()
    chunk = adamw._CHUNK_BYTES["cpu"]
    assert 3 * chunk < meter.peak_bytes <= 6 * chunk < 8 * 1000 * 1000
    assert meter.live_bytes == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fused", [False, None])
def test_resuming_from_a_file_is_exact(dtype, fused):
    whole, halves = start(dtype), start(dtype)
    first = run(AdamW(whole, **BF16, fused=fused), whole, 10)
    before = run(AdamW(halves, **BF16, fused=fused), halves, 5)
    after = AdamW(halves, **BF16, fused=fused)
    after.load_state_dict(reload(before.state_dict()))
    assert_same(everything(before, halves), everything(after, halves))
    run(after, halves, 5, first=5)
    assert_same(everything(first, whole), everything(after, halves))


@pytest.mark.parametrize("saving", [AdamW, torch.optim.AdamW])
def test_a_float32_state_is_rounded_to_the_nearest_when_loaded_and_comes_back(saving):
    params = start()
    wide = run(saving(params, **OPTIONS), params, 3)
    narrow = AdamW(params, **BF16)
    narrow.load_state_dict(reload(wide.state_dict()))
    again = saving(params, **OPTIONS)
    again.load_state_dict(reload(narrow.state_dict()))
    for param in params:
        for a, b, c in zip(*(averages(optimizer.state[param]) for optimizer in (wide, narrow, again)), strict=True):
            assert torch.equal(b, a.to(torch.bfloat16))
            assert b.dtype == torch.bfloat16
            assert torch.equal(c, b.float())
            assert c.dtype == torch.float32
    assert narrow.param_groups[0]["state_dtype"] == "bfloat16"
    assert again.param_groups[0].get("state_dtype") in (None, "bfloat16" if saving is torch.optim.AdamW else None)
    run(narrow, params, 1)
    run(again, params, 1)


def test_the_adamw_half_of_muon_takes_it_and_keeps_it_when_loaded():
    def optimizer(params, **options):
        groups = [{"params": params[:1], "algorithm": "muon"}, {"params": params[1:], "algorithm": "adamw"}]
        return MuonAdamW(groups, lr=0.01, **options)

    shapes = [(12, 20), (7, 5), (5,)]
    whole, halves, alone = start(shapes=shapes), start(shapes=shapes), start(shapes=shapes)
    first = run(optimizer(whole, state_dtype="bfloat16"), whole, 6)
    before = run(optimizer(halves, state_dtype="bfloat16"), halves, 3)
    after = optimizer(halves, state_dtype="bfloat16")
    after.load_state_dict(reload(before.state_dict()))
    run(after, halves, 3, first=3)
    assert first.state[whole[0]]["momentum_buffer"].dtype == torch.float32
    assert first.state[whole[1]]["exp_avg"].dtype == torch.bfloat16
    assert torch.equal(whole[0], halves[0])
    assert_same(everything(first, whole[1:]), everything(after, halves[1:]))
    adamw_alone = run(AdamW(alone, lr=0.01, state_dtype="bfloat16"), alone, 6)  # the offsets count Muon's numbers too
    assert_same(everything(first, whole[1:]), everything(adamw_alone, alone[1:]))


@pytest.mark.parametrize("value", ["float16", "float32", torch.bfloat16])
def test_other_dtypes_are_refused(value):
    for made in (lambda: AdamW(start(), state_dtype=value), lambda: AdamW([{"params": start(), "state_dtype": value}])):
        with pytest.raises(ValueError, match=r"state_dtype must be None \(the parameter's\) or 'bfloat16', got"):
            made()


def rounded(params, kind, rounding, lr=1e-4):
    options = {"lr": lr, "weight_decay": 0.0, "param_rounding": rounding}
    if kind == "adamw":
        return AdamW(params, **options)
    return MuonAdamW([{"params": params, "algorithm": "muon"}], newton_schulz_dtype="float32", **options)


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_updates_below_half_a_digit_of_bfloat16_parameters_count_in_the_mean(kind):
    grad = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))

    def change(dtype, rounding):
        param = nn.Parameter(torch.full((64, 64), 1.5, dtype=dtype))  # a digit is 2^-7
        optimizer = rounded([param], kind, rounding)
        for _ in range(60):
            param.grad = grad.to(dtype)
            optimizer.step()
        return param.detach().double() - 1.5

    exact = change(torch.float32, "nearest")
    assert torch.equal(change(torch.float32, "stochastic"), exact)  # nothing to round
    assert not change(torch.bfloat16, "nearest").any()
    found = change(torch.bfloat16, "stochastic")
    assert float((found * exact).sum() / exact.square().sum()) == pytest.approx(1, abs=0.2)


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_rounded_parameters_resume_to_the_same_bits_and_older_states_load(kind):
    shapes = [(12, 20), (20, 12), (12, 20)]
    whole, halves = start(torch.bfloat16, shapes), start(torch.bfloat16, shapes)
    run(rounded(whole, kind, "stochastic", 0.01), whole, 6)
    before = run(rounded(halves, kind, "stochastic", 0.01), halves, 3)
    saved = reload(before.state_dict())
    for group in saved["param_groups"]:
        del group["param_rounding"]  # as before there was the option
    after = rounded(halves, kind, "stochastic", 0.01)
    after.load_state_dict(saved)
    run(after, halves, 3, first=3)
    assert_same(whole, halves)
    nearest = start(torch.bfloat16, shapes)
    run(rounded(nearest, kind, "nearest", 0.01), nearest, 6)
    assert not torch.equal(whole[0], nearest[0])
    with pytest.raises(ValueError, match="param_rounding must be nearest or stochastic, got 'up'"):
        rounded(whole, kind, "up")


def test_parameters_are_rounded_by_other_noise_than_their_averages(monkeypatch):
    steps, noise = [], rounding.rounding_noise
    monkeypatch.setattr(
        rounding, "rounding_noise", lambda *args, step, **o: steps.append(step) or noise(*args, step=step, **o)
    )
    params = start(torch.bfloat16, shapes=[(5, 7)])
    run(rounded(params, "adamw", "stochastic"), params, 2)
    assert sorted(steps) == [-2, -1, 1, 2]


def test_equal_parameters_are_rounded_by_noise_of_their_own():
    params = [nn.Parameter(torch.ones(1000)) for _ in range(3)]
    groups = [{"params": params[:2]}, {"params": params[2:]}]
    optimizer = AdamW(groups, **BF16)
    for param in params:
        param.grad = torch.full((1000,), 1 / 3)
    optimizer.step()
    first, *others = (optimizer.state[param] for param in params)
    up = averages(first)[0] > averages(first)[0].min()
    for other in others:
        ups = averages(other)[0] > averages(other)[0].min()
        # of two independent draws with the same probability p, 2 p (1 - p) differ: five standard errors around it
        share = up.float().mean()
        expected = float(2 * share * (1 - share))
        assert float((up != ups).float().mean()) == pytest.approx(expected, abs=5 * math.sqrt(expected / 1000))
