import math
import re
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from lightning_llm.measure import MemoryMeter
from lightning_llm.optim import AdamW, adamw
from tests.conftest import needs_cuda
from tests.optim.conftest import SHAPES, reload, start

OPTIONS = {"lr": 3e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


@pytest.fixture
def small_chunks(monkeypatch):
    """Chunks of 1000 float32 numbers: the larger tensors are cut, the smaller ones gathered."""
    monkeypatch.setattr(adamw, "_CHUNK_BYTES", {"cpu": 4000})


def gradients(params, step):
    """The same for every optimiser, rounded to the parameter's dtype; of awkward sizes."""
    generator = torch.Generator().manual_seed(1 + step)
    scale = 10.0 ** (step % 7 - 4)
    return [torch.randn(p.shape, generator=generator).mul(scale).to(p.dtype).to(torch.float64) for p in params]


def run(optimizer, params, steps, first=0):
    for step in range(first, first + steps):
        for param, grad in zip(params, gradients(params, step), strict=True):
            param.grad = grad.to(param.dtype)
        for group in optimizer.param_groups:
            group["lr"] = OPTIONS["lr"] * (1 + math.cos(step))
        optimizer.step()
    return params


def truth(params, steps):
    """Algorithm 2 of Loshchilov and Hutter 2019, line by line, in float64."""
    beta1, beta2 = OPTIONS["betas"]
    theta = [param.detach().double() for param in params]
    m, v = ([torch.zeros_like(x) for x in theta] for _ in range(2))
    for step in range(steps):
        lr, t = OPTIONS["lr"] * (1 + math.cos(step)), step + 1
        for i, g in enumerate(gradients(params, step)):
            m[i] = beta1 * m[i] + (1 - beta1) * g
            v[i] = beta2 * v[i] + (1 - beta2) * g**2
            m_hat, v_hat = m[i] / (1 - beta1**t), v[i] / (1 - beta2**t)
            decay = lr * OPTIONS["weight_decay"] * theta[i]
            theta[i] = theta[i] - lr * m_hat / (v_hat.sqrt() + OPTIONS["eps"]) - decay
    return theta


def error(params, expected):
    differences = torch.cat([(p.detach().double() - e).flatten() for p, e in zip(params, expected, strict=True)])
    return differences.square().mean().sqrt().item(), differences.abs().max().item()


@pytest.mark.slow
@pytest.mark.parametrize("fused", [False, None])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_error_after_1000_steps_is_that_of_torch(fused, dtype, small_chunks):
    expected = truth(start(dtype), 1000)
    ours, theirs = start(dtype), start(dtype)
    run(AdamW(ours, **OPTIONS, fused=fused), ours, 1000)
    run(torch.optim.AdamW(theirs, **OPTIONS, foreach=False), theirs, 1000)
    for our_error, their_error in zip(error(ours, expected), error(theirs, expected), strict=True):
        assert 0 < our_error <= 2 * their_error


def test_fused_is_bitwise_torchs_fused_one():
    ours, theirs = start(), start()
    run(AdamW(ours, **OPTIONS), ours, 20)
    run(torch.optim.AdamW(theirs, **OPTIONS, fused=True), theirs, 20)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("first", [AdamW, torch.optim.AdamW])
@pytest.mark.parametrize("second", [AdamW, torch.optim.AdamW])
def test_state_goes_from_one_to_the_other(first, second):
    whole, halves = start(), start()
    run(AdamW(whole, **OPTIONS, fused=True), whole, 10)
    before = first(halves, **OPTIONS, fused=True)
    run(before, halves, 5)
    after = second(halves, lr=99.0, fused=True)
    after.load_state_dict(reload(before.state_dict()))
    run(after, halves, 5, first=5)
    assert all(torch.equal(a, b) for a, b in zip(whole, halves, strict=True))


def test_state_has_torchs_names_and_a_plain_step():
    params = start(shapes=[(3, 2)])
    optimizer = AdamW(params)
    run(optimizer, params, 2)
    state = optimizer.state_dict()["state"][0]
    assert sorted(state) == ["exp_avg", "exp_avg_sq", "step"]
    assert state["step"] == 2
    assert type(state["step"]) is int
    loaded = AdamW(params)
    group = {"lr": 0.1, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "params": [0]}  # without "fused"
    loaded.load_state_dict({"state": {0: state | {"step": torch.tensor(7.0)}}, "param_groups": [group]})
    assert type(loaded.state[params[0]]["step"]) is int
    loaded.step()
    assert loaded.state[params[0]]["step"] == 8


def test_defaults_of_the_signature():
    assert AdamW(start()).defaults == {
        "lr": 1e-3,
        "betas": (0.9, 0.95),
        "eps": 1e-8,
        "weight_decay": 0.1,
        "fused": None,
        "state_dtype": None,
        "param_rounding": "nearest",
    }


@pytest.mark.parametrize("fused", [False, True])
def test_parameters_without_gradient_rest_and_count_their_own_steps(fused):
    ours, theirs = start(), start()
    pair = ((AdamW(ours, **OPTIONS, fused=fused), ours), (torch.optim.AdamW(theirs, **OPTIONS, fused=fused), theirs))
    for optimizer, params in pair:
        for step in range(6):
            for i, grad in enumerate(gradients(params, step)):
                params[i].grad = grad.to(params[i].dtype) if (step + i) % 3 else None
            before = [param.detach().clone() for param in params]
            optimizer.step()
            for i, param in enumerate(params):
                assert torch.equal(param, before[i]) == (not (step + i) % 3)
    steps = [[int(optimizer.state[p]["step"]) for p in params] for optimizer, params in pair]
    assert steps[0] == steps[1] == [4] * len(SHAPES)
    if fused:
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_groups_have_their_own_options():
    params = start(shapes=[(4, 4), (4, 4)])
    groups = [{"params": params[:1]}, {"params": params[1:], "weight_decay": 0.0, "lr": 0.5}]
    optimizer = AdamW(groups, lr=0.25, weight_decay=0.5)
    before = [param.detach().clone() for param in params]
    for param in params:
        param.grad = torch.zeros_like(param)
    optimizer.step()
    assert torch.equal(params[0], before[0] * (1 - 0.25 * 0.5))
    assert torch.equal(params[1], before[1])


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_cuda)])
def test_kinds_of_tensors_mix(device):
    dtypes = [torch.float32, torch.bfloat16, torch.float64, torch.float32]
    mixed = [nn.Parameter(torch.ones(4, 3, device=device, dtype=dtype)) for dtype in dtypes]
    alone = [nn.Parameter(param.detach().clone()) for param in mixed]
    together, apart = AdamW(mixed), [AdamW([param]) for param in alone]
    for step in range(3):
        for one, other, grad in zip(mixed, alone, gradients(mixed, step), strict=True):
            one.grad = grad.to(one)
            other.grad = grad.to(other)
        for optimizer in (together, *apart):
            optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(mixed, alone, strict=True))


def laid_out(kind, tensor):
    if kind == "transposed":
        return tensor.t().contiguous().t()
    if kind == "strided":
        return torch.stack([tensor, tensor], dim=-1)[..., 0]
    return tensor.clone()


@pytest.mark.parametrize("fused", [False, None, True])
@pytest.mark.parametrize("of_param", ["plain", "transposed", "strided"])
@pytest.mark.parametrize("of_grad", ["plain", "transposed", "strided"])
def test_memory_layouts_do_not_matter(fused, of_param, of_grad, small_chunks):
    ours, theirs = (start(shapes=[(40, 33)]) for _ in range(2))
    ours[0].data = laid_out(of_param, ours[0].data)
    expected = truth(ours, 5)
    optimizer = AdamW(ours, **OPTIONS, fused=fused)
    for step in range(5):
        ours[0].grad = laid_out(of_grad, gradients(ours, step)[0].float())
        optimizer.param_groups[0]["lr"] = OPTIONS["lr"] * (1 + math.cos(step))
        optimizer.step()
    run(torch.optim.AdamW(theirs, **OPTIONS, foreach=False), theirs, 5)
    for our_error, their_error in zip(error(ours, expected), error(theirs, expected), strict=True):
        assert our_error <= 2 * their_error


@pytest.mark.parametrize(("fused", "bound"), [(False, 2**20), (True, 4)])
def test_temporaries_are_bounded(fused, bound):
    params = start(shapes=[(1000, 1000), *[(300, 300)] * 9, (7,)])
    optimizer = AdamW(params, fused=fused)
    run(optimizer, params, 1)  # makes the state
    with MemoryMeter(exclude=params) as meter:
        optimizer.step()
    assert bound / 2 < meter.peak_bytes <= bound
    assert meter.live_bytes == 0


def test_closure_runs_with_gradients_and_its_loss_is_returned():
    param = nn.Parameter(torch.tensor([1.0, -2.0]))
    optimizer = AdamW([param], lr=0.1, weight_decay=0.0)

    def closure():
        optimizer.zero_grad()
        loss = param.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure) == 5.0
    # The first step of Adam is lr against the sign of the gradient.
    assert torch.equal(param.detach().sign(), torch.tensor([1.0, -1.0]))
    assert optimizer.step(closure) < 5.0
    assert optimizer.step() is None


def sharded_and_whole(rank):
    """One of two processes: updates a whole tensor and a sharded one, whose gradients are placed in three ways."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    for fused, state_dtype in ((False, None), (None, None), (None, "bfloat16")):
        whole = start(shapes=[(7, 16)])  # rows of whole vectors: torch's fused kernel rounds its last few otherwise
        sharded = [nn.Parameter(distribute_tensor(whole[0].detach().clone(), mesh, [Shard(0)]))]
        optimizers = [AdamW(params, fused=fused, state_dtype=state_dtype) for params in (whole, sharded)]
        for step, placement in enumerate([Shard(0), Replicate(), Shard(1)]):
            grad = gradients(whole, step)[0].float()
            whole[0].grad = grad
            sharded[0].grad = distribute_tensor(grad, mesh, [placement])
            for optimizer in optimizers:
                optimizer.step()
        assert optimizers[1].state[sharded[0]]["exp_avg"].to_local().shape[0] == (4, 3)[rank]
        assert torch.equal(sharded[0].full_tensor(), whole[0])
        ours, theirs = (
            optimizer.state[params[0]] for optimizer, params in zip(optimizers, (whole, sharded), strict=True)
        )
        for average in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(theirs[average].full_tensor(), ours[average])


def test_sharded_parameters_are_updated_in_their_shards(two_processes):
    two_processes(sharded_and_whole)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"lr": -1.0, "betas": (0.9, 1.0), "eps": -1.0, "weight_decay": math.nan},
            "lr must be a number of at least 0, got -1.0; eps must be a number of at least 0, got -1.0; "
            "weight_decay must be a number of at least 0, got nan; "
            "betas must be two numbers of at least 0 and below 1, got (0.9, 1.0)",
        ),
        ({"lr": torch.tensor(0.1)}, "lr must be a number of at least 0, got tensor(0.1000)"),
        (
            {"lr": math.nan, "eps": math.inf, "betas": (math.nan, math.inf)},
            "lr must be a number of at least 0, got nan; eps must be a number of at least 0, got inf; "
            "betas must be two numbers of at least 0 and below 1, got (nan, inf)",
        ),
        ({"betas": (0.9,)}, "betas must be two numbers of at least 0 and below 1, got (0.9,)"),
    ],
)
def test_bad_options_are_reported_at_once(options, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        AdamW(start(), **options)
    with pytest.raises(ValueError, match="must be"):
        AdamW([{"params": start(), **options}])


def test_complex_parameters_are_refused():
    with pytest.raises(ValueError, match=r"params must be real, got a tensor of torch\.complex64"):
        AdamW([nn.Parameter(torch.zeros(2, dtype=torch.complex64))])


def test_sparse_gradients_are_refused_before_anything_changes():
    dense, embedding = nn.Parameter(torch.ones(2)), nn.Embedding(4, 2, sparse=True)
    optimizer = AdamW([dense, *embedding.parameters()])
    dense.grad = torch.ones(2)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match=r"gradients must be dense, got torch\.sparse_coo of shape \(4, 2\)"):
        optimizer.step()
    assert torch.equal(dense.detach(), torch.ones(2))
    assert not optimizer.state


def test_fused_is_refused_where_there_is_no_kernel():
    param = nn.Parameter(torch.ones(2, device="meta"))
    param.grad = torch.ones_like(param)
    AdamW([param]).step()
    with pytest.raises(ValueError, match="fused=True needs parameters on cpu or cuda, got meta"):
        AdamW([param], fused=True).step()


def test_state_of_other_optimisers_is_refused():
    params = start(shapes=[(2,)])

    def saved(optimizer):
        run(optimizer, params, 1)
        return optimizer.state_dict()

    for optimizer, message in [
        (torch.optim.SGD(params, momentum=0.9), "has no betas, eps: it was saved by another optimizer"),
        (torch.optim.AdamW(params, amsgrad=True), "saved with amsgrad=True"),
        (torch.optim.AdamW(params, maximize=True), "saved with maximize=True"),
        (torch.optim.Adam(params, weight_decay=0.1), "saved with decoupled_weight_decay=False"),
        (torch.optim.Adamax(params), "holds exp_avg, exp_inf, step: AdamW's is exp_avg, exp_avg_sq, step"),
    ]:
        with pytest.raises(ValueError, match=message):
            AdamW(params).load_state_dict(saved(optimizer))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("fused", [False, None])
def test_no_step_waits_for_the_device(fused):
    params = [nn.Parameter(param.detach().cuda()) for param in start()]
    for param in params:
        param.grad = torch.randn_like(param)
    optimizer = AdamW(params, fused=fused)
    try:
        torch.cuda.set_sync_debug_mode("error")
        optimizer.step()
        optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_dtensor_in_place_is_not_redistributed():
    moved = []
    tensor = SimpleNamespace(placements=("S0",), redistribute=lambda placements: moved.append(placements) or "moved")
    assert adamw.placed_like(SimpleNamespace(placements=("S0",)), tensor) is tensor
    assert adamw.placed_like(SimpleNamespace(placements=("R",)), tensor) == "moved"
    assert moved == [("R",)]
