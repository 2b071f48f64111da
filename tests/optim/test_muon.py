import io
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_llm.accounting import hardware
from lightning_llm.optim import AdamW, MuonAdamW, muon, param_groups

SHAPES = [(12, 20), (20, 12), (7, 7), (12, 20), (5, 1)]  # wide, tall, square, a twin, a column


def start(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]


def gradients(params, step):
    generator = torch.Generator().manual_seed(1 + step)
    return [torch.randn(p.shape, generator=generator).to(p.dtype) for p in params]


def run(optimizer, params, steps, first=0):
    for step in range(first, first + steps):
        for param, grad in zip(params, gradients(params, step), strict=True):
            param.grad = grad
        optimizer.step()
    return params


def groups(params):
    return [{"params": params, "algorithm": "muon"}]


OPTIONS = {"lr": 0.01, "weight_decay": 0.1, "momentum": 0.9}


def truth(params, steps):
    """Muon in float64 as written down by Jordan et al. 2024 with the scale of Liu et al. 2025, one matrix at a time."""
    weights, momenta = [p.detach().double() for p in params], [torch.zeros_like(p, dtype=torch.float64) for p in params]
    for step in range(steps):
        for i, g in enumerate(gradients(params, step)):
            g = g.double()
            momenta[i] = 0.9 * momenta[i] + 0.1 * g
            x = 0.1 * g + 0.9 * momenta[i]
            x = x / x.norm()
            for _ in range(5):
                x = 3.4445 * x - 4.7750 * x @ x.T @ x + 2.0315 * x @ x.T @ x @ x.T @ x
            scale = 0.2 * math.sqrt(max(x.shape))
            weights[i] = weights[i] * (1 - 0.01 * 0.1) - 0.01 * scale * x
    return weights


def error(params, expected):
    return sum((p.detach().double() - e).square().sum().item() for p, e in zip(params, expected, strict=True)) ** 0.5


@pytest.mark.parametrize("stack_bytes", [1, 2**22])
def test_error_is_at_most_twice_that_of_torchs_muon(stack_bytes, monkeypatch):
    monkeypatch.setattr(muon, "_STACK_BYTES", {"cpu": stack_bytes})
    expected = truth(start(), 20)
    ours, theirs = start(), start()
    run(MuonAdamW(groups(ours), **OPTIONS), ours, 20)
    run(torch.optim.Muon(theirs, **OPTIONS, adjust_lr_fn="match_rms_adamw"), theirs, 20)
    assert 0 < error(ours, expected) <= 2 * error(theirs, expected)


def test_float32_products_are_exact_to_float32():
    expected = truth(start(), 20)
    in_bfloat16, in_float32 = start(), start()
    run(MuonAdamW(groups(in_bfloat16), **OPTIONS, newton_schulz_dtype="bfloat16"), in_bfloat16, 20)
    run(MuonAdamW(groups(in_float32), **OPTIONS, newton_schulz_dtype="float32"), in_float32, 20)
    # bfloat16 keeps 8 bits, float32 24.
    assert error(in_float32, expected) < error(in_bfloat16, expected) / 2**8


@pytest.mark.parametrize(("features", "dtype"), [("avx2", "float32"), ("avx2 avx512_bf16", "bfloat16")])
def test_default_dtype_is_the_one_that_the_cpu_multiplies(features, dtype, tmp_path, monkeypatch):
    monkeypatch.setattr(hardware, "CPU_INFO", tmp_path / "cpuinfo")
    hardware.CPU_INFO.write_text(f"flags : {features}\n", encoding="utf-8")
    muon.fastest_dtype.cache_clear()
    by_default = run(MuonAdamW(groups(params := start()), **OPTIONS), params, 2)
    muon.fastest_dtype.cache_clear()
    asked = run(MuonAdamW(groups(params := start()), **OPTIONS, newton_schulz_dtype=dtype), params, 2)
    assert all(map(torch.equal, by_default, asked))


@pytest.mark.parametrize("shape", [(1, 6, 6), (3, 5, 123), (2, 77, 20)])
def test_newton_schulz_keeps_vectors_and_evens_values(shape):
    matrices = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 100
    u, values, vt = torch.linalg.svd(matrices, full_matrices=False)
    assert (values / values.norm(dim=-1, keepdim=True)).min() > 0.003  # what the bounds are promised for
    out = muon.newton_schulz(matrices, dtype=torch.float64)
    inner = u.mT @ out @ vt.mT
    new_values = inner.diagonal(dim1=-2, dim2=-1)
    assert 0.68 < new_values.min() <= new_values.max() < 1.21
    rest = inner - torch.diag_embed(new_values)
    assert rest.norm() <= 1e-12 * inner.norm()


def test_newton_schulz_of_zero_is_zero():
    assert torch.equal(muon.newton_schulz(torch.zeros(2, 3, 4)), torch.zeros(2, 3, 4))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_tokens = nn.Embedding(7, 4)
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 4)
        self.lm_head = nn.Linear(4, 7)

    def forward(self, ids):
        return self.lm_head(self.down(self.up(self.embed_tokens(ids))))


def test_groups_of_a_model_go_to_their_algorithms():
    torch.manual_seed(0)
    model, twin = Model(), Model()
    twin.load_state_dict(model.state_dict())
    optimizer = MuonAdamW(param_groups(model), lr=0.01)
    other = AdamW(param_groups(twin), lr=0.01)
    for _ in range(3):
        for net, by in ((model, optimizer), (twin, other)):
            by.zero_grad()
            torch.manual_seed(1)  # gradients that do not depend on the weights
            for param in net.parameters():
                param.grad = torch.randn_like(param)
            by.step()
    hidden = {"up.weight", "down.weight"}
    names = {param: name for name, param in model.named_parameters()}
    assert {names[p] for p, state in optimizer.state.items() if set(state) == {"momentum_buffer"}} == hidden
    for (name, ours), theirs in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert torch.equal(ours, theirs) == (name not in hidden)


def test_one_learning_rate_makes_steps_of_one_size():
    torch.manual_seed(0)
    change = {}
    for algorithm in ("muon", "adamw"):
        param = nn.Parameter(torch.zeros(64, 256))
        optimizer = MuonAdamW([{"params": [param], "algorithm": algorithm}], lr=1.0, weight_decay=0.0)
        for _ in range(50):
            before = param.detach().clone()
            param.grad = torch.randn_like(param)
            optimizer.step()
        change[algorithm] = (param.detach() - before).square().mean().sqrt().item()
    # Liu et al. 2025, section 2.2: AdamW's are between 0.2 and 0.4 in practice.
    assert 0.5 < change["muon"] / change["adamw"] < 2


def test_matrices_without_gradient_rest():
    params = start()
    before = [param.detach().clone() for param in params]
    optimizer = MuonAdamW(groups(params))
    params[1].grad = torch.ones_like(params[1])
    optimizer.step()
    assert [torch.equal(a, b) for a, b in zip(params, before, strict=True)] == [True, False, True, True, True]


def test_zero_gradient_leaves_only_the_decay():
    params = start()
    before = [param.detach().clone() for param in params]
    optimizer = MuonAdamW(groups(params), lr=0.5, weight_decay=0.25)
    for param in params:
        param.grad = torch.zeros_like(param)
    optimizer.step()
    assert all(torch.equal(a, b * (1 - 0.125)) for a, b in zip(params, before, strict=True))


def test_closure():
    param = nn.Parameter(torch.eye(2))
    optimizer = MuonAdamW(groups([param]), lr=0.1)

    def closure():
        optimizer.zero_grad()
        loss = param.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure) == 2.0
    assert optimizer.step(closure) < 2.0
    assert optimizer.step() is None


def test_state_goes_through_a_file():
    def mixed(params):
        matrices, rest = params[:3], params[3:]
        return MuonAdamW(
            [{"params": matrices, "name": "hidden_matrices"}, {"params": rest, "name": "vectors"}], **OPTIONS
        )

    whole, halves = start(), start()
    run(mixed(whole), whole, 6)
    before, file = mixed(halves), io.BytesIO()
    run(before, halves, 3)
    torch.save(before.state_dict(), file)
    file.seek(0)
    after = mixed(halves)
    after.load_state_dict(torch.load(file, weights_only=True))
    run(after, halves, 3, first=3)
    assert all(torch.equal(a, b) for a, b in zip(whole, halves, strict=True))


def test_state_of_other_optimisers_is_refused():
    params = start()
    optimizer = MuonAdamW(groups(params))
    with pytest.raises(ValueError, match=r"has groups with the algorithms \[None\], this optimizer has \['muon'\]"):
        optimizer.load_state_dict(AdamW(params).state_dict())
    with pytest.raises(ValueError, match="has no betas: it was saved by another optimizer"):
        optimizer.load_state_dict(torch.optim.Muon(params).state_dict())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"algorithm": None}, "a parameter group has algorithm None, accepted are 'muon' and 'adamw'"),
        ({"params": [nn.Parameter(torch.ones(3))]}, r"Muon takes matrices, got a parameter of shape \(3,\)"),
        ({"params": [nn.Parameter(torch.ones(3, 2, dtype=torch.complex64))]}, "params must be real"),
        ({"lr": -1.0}, "lr must be a number of at least 0"),
        (
            {"momentum": 1.0, "newton_schulz_steps": 0, "newton_schulz_dtype": "float16"},
            "momentum must be at least 0 and below 1, got 1.0; newton_schulz_steps must be a whole number of at least "
            "1, got 0; newton_schulz_dtype must be None, bfloat16 or float32, got 'float16'",
        ),
    ],
)
def test_bad_groups(changes, message):
    with pytest.raises(ValueError, match=message):
        MuonAdamW([{**groups(start())[0], **changes}])


def test_a_group_that_is_refused_is_not_kept():
    optimizer = MuonAdamW(groups(start()))
    kept = list(optimizer.param_groups)
    vector = nn.Parameter(torch.ones(3))
    with pytest.raises(ValueError, match="Muon takes matrices"):
        optimizer.add_param_group({"params": [vector], "algorithm": "muon"})
    assert optimizer.param_groups == kept
    optimizer.add_param_group({"params": [vector], "algorithm": "adamw"})
    assert optimizer.param_groups[-1]["params"] == [vector]


def test_plain_parameters_are_refused():
    with pytest.raises(ValueError, match=r"make the groups with lightning_llm\.optim\.param_groups\(model\)"):
        MuonAdamW(start())


@pytest.fixture
def mesh():
    """A device mesh of this process alone."""
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.parametrize("shape", [(4, 2), (3, 5)])
def test_sharded_matrices_are_updated_as_whole_ones_are(mesh, shape):
    from torch.distributed.tensor import Shard, distribute_tensor

    torch.manual_seed(0)
    start, grad = torch.randn(shape), torch.randn(shape)
    whole, sharded = nn.Parameter(start.clone()), nn.Parameter(distribute_tensor(start, mesh, [Shard(0)]))
    whole.grad, sharded.grad = grad.clone(), distribute_tensor(grad, mesh, [Shard(0)])
    for param in (whole, sharded):
        MuonAdamW(groups([param])).step()
    assert not torch.equal(whole, start)
    torch.testing.assert_close(sharded.full_tensor(), whole)


def test_sparse_gradients_are_refused_before_anything_changes():
    params = start()
    optimizer = MuonAdamW(groups(params))
    params[0].grad = torch.ones_like(params[0])
    params[1].grad = torch.ones_like(params[1]).to_sparse()
    before = params[0].detach().clone()
    with pytest.raises(ValueError, match="gradients must be dense"):
        optimizer.step()
    assert torch.equal(params[0], before)
