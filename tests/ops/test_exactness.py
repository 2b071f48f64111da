"""SwiGLU and the two cross-entropies against float64: at most twice the error of the plain form in the same dtype."""

import pytest
import torch
from torch.nn import functional as F

from lightning_llm.ops import cross_entropy, linear_cross_entropy, memory_optimized_swiglu, swiglu_reference

DTYPES = [torch.float32, torch.bfloat16]
SHAPES = [(5, 123, 77, 54), (1, 7, 16, 64), (2, 300, 64, 256)]  # batch, seq, hidden, intermediate


def swiglu_inputs(shape):
    batch, seq, hidden, intermediate = shape
    torch.manual_seed(0)
    sizes = ((batch, seq, hidden), (intermediate, hidden), (intermediate, hidden), (hidden, intermediate))
    return [torch.randn(size, dtype=torch.float64) for size in sizes]


def run(function, inputs, dtype):
    """Output and gradients, from inputs rounded to ``dtype``."""
    leaves = [x.detach().to(dtype, copy=True).requires_grad_() for x in inputs]
    out = function(*leaves)
    torch.manual_seed(1)
    upstream = torch.randn(out.shape, dtype=torch.float64) if out.dim() else torch.ones((), dtype=torch.float64)
    out.backward(upstream.to(out.dtype))
    return [out.detach(), *(leaf.grad for leaf in leaves)]


def assert_as_good_as(ours, plain, inputs, dtype):
    rounded = [x.to(dtype).double() for x in inputs]
    truth = run(plain, rounded, torch.float64)
    for name, got, reference, true in zip(
        ("output", "first", "second", "third", "fourth"),
        run(ours, rounded, dtype),
        run(plain, rounded, dtype),
        truth,
        strict=False,
    ):
        assert got.shape == true.shape
        # a single number may by luck be off by less than its dtype can tell: the last rounding is granted to both
        rounding = torch.finfo(got.dtype).eps / 2 * true.norm()
        assert (got.double() - true).norm() <= 2 * max((reference.double() - true).norm(), rounding), name


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("options", [{"checkpoint_level": 0}, {"checkpoint_level": 1}, {"num_chunks": 3}])
def test_swiglu(shape, dtype, options):
    assert_as_good_as(
        lambda *inputs: memory_optimized_swiglu(*inputs, **options), swiglu_reference, swiglu_inputs(shape), dtype
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_swiglu_with_the_norm_inside(dtype):
    inputs = [*swiglu_inputs((2, 31, 48, 80)), torch.randn(48, dtype=torch.float64)]

    def ours(x, gate, up, down, norm):
        return memory_optimized_swiglu(x, gate, up, down, checkpoint_level=2, norm_weight=norm, norm_eps=1e-6)

    def plain(x, gate, up, down, norm):
        return swiglu_reference(F.rms_norm(x, norm.shape, norm, 1e-6), gate, up, down)

    assert_as_good_as(ours, plain, inputs, dtype)


@pytest.mark.parametrize("level", [0, 1, 2])
def test_swiglu_by_finite_differences(level):
    inputs = [x.requires_grad_() for x in swiglu_inputs((2, 3, 5, 7))]
    norm = torch.rand(5, dtype=torch.float64).add_(0.5).requires_grad_() if level == 2 else None

    def function(x, gate, up, down, norm=None):
        return memory_optimized_swiglu(x, gate, up, down, checkpoint_level=level, num_chunks=2, norm_weight=norm)

    assert torch.autograd.gradcheck(function, inputs if norm is None else [*inputs, norm])


def test_swiglu_under_autocast_gives_gradients_in_the_weights_dtype():
    leaves = [x.float().requires_grad_() for x in swiglu_inputs((1, 9, 16, 32))]
    with torch.autocast("cpu", torch.bfloat16):
        out = memory_optimized_swiglu(*leaves, checkpoint_level=1)
    assert out.dtype == torch.bfloat16
    out.sum().backward()
    assert all(leaf.grad.dtype == torch.float32 for leaf in leaves)


def test_frozen_weights_and_inputs_get_no_gradient():
    x, gate, up, down = (t.float() for t in swiglu_inputs((1, 9, 16, 32)))
    up.requires_grad_()
    memory_optimized_swiglu(x, gate, up, down, checkpoint_level=1).sum().backward()
    assert up.grad is not None
    assert x.grad is gate.grad is down.grad is None


def loss_inputs(tokens=123, hidden=77, vocab=301):
    torch.manual_seed(0)
    hidden_states = torch.randn(tokens, hidden, dtype=torch.float64)
    weight = torch.randn(vocab, hidden, dtype=torch.float64)
    targets = torch.randint(0, vocab, (tokens,))
    targets[::7] = -100
    return hidden_states, weight, targets


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_chunks", [None, 1, 5, 123])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_linear_cross_entropy(dtype, num_chunks, reduction):
    hidden, weight, targets = loss_inputs()

    def ours(h, w):
        return linear_cross_entropy(h, w, targets, num_chunks=num_chunks, reduction=reduction)

    def plain(h, w):
        return F.cross_entropy(
            F.linear(h, w).to(torch.promote_types(h.dtype, torch.float32)), targets, reduction=reduction
        )

    assert_as_good_as(ours, plain, [hidden, weight], dtype)


def test_linear_cross_entropy_by_finite_differences():
    hidden, weight, targets = loss_inputs(7, 5, 11)
    bias = torch.randn(11, dtype=torch.float64, requires_grad=True)
    inputs = (hidden.requires_grad_(), weight.requires_grad_(), bias)
    assert torch.autograd.gradcheck(
        lambda h, w, b: linear_cross_entropy(h, w, targets, bias=b, num_chunks=3, z_loss=0.1), inputs
    )


def test_a_batch_without_targets_costs_nothing():
    hidden, weight, targets = loss_inputs(4, 5, 11)
    hidden.requires_grad_()
    loss = linear_cross_entropy(hidden, weight, torch.full_like(targets, -100))
    loss.backward()
    assert loss == 0
    assert not hidden.grad.any()


def test_tied_weights_add_both_gradients():
    table = torch.randn(11, 5, dtype=torch.float64, requires_grad=True)
    ids, targets = torch.randint(0, 11, (2, 9))

    def loss(linear):
        table.grad = None
        linear(F.embedding(ids, table), table, targets).backward()
        return table.grad

    plain = loss(lambda h, w, t: F.cross_entropy(F.linear(h, w), t))
    torch.testing.assert_close(loss(linear_cross_entropy), plain)


@pytest.mark.parametrize("scale", [1.0, 1e4])
@pytest.mark.parametrize("leading", [(), (6,), (2, 3)])
def test_cross_entropy(scale, leading):
    torch.manual_seed(0)
    logits = scale * torch.randn(*leading, 37, dtype=torch.float64)
    targets = torch.randint(0, 37, leading)

    def plain(z):
        return F.cross_entropy(z.reshape(-1, 37), targets.reshape(-1))

    assert_as_good_as(lambda z: cross_entropy(z, targets), plain, [logits], torch.float32)
    assert cross_entropy(logits.float(), targets).isfinite()


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: cross_entropy(torch.zeros(3, 5), torch.zeros(4, dtype=torch.long)), r"targets must have shape \(3,\)"),
        (
            lambda: linear_cross_entropy(torch.zeros(3, 5), torch.zeros(7, 4), torch.zeros(3, dtype=torch.long)),
            "weight",
        ),
        (lambda: memory_optimized_swiglu(*(torch.zeros(s) for s in ((2, 5), (7, 5), (7, 4), (5, 7)))), "up_weight"),
        (
            lambda: memory_optimized_swiglu(
                *(torch.zeros(s) for s in ((2, 5), (7, 5), (7, 5), (5, 7))), checkpoint_level=7
            ),
            "checkpoint_level",
        ),
        (
            lambda: memory_optimized_swiglu(*(torch.zeros(s) for s in ((2, 5), (7, 5), (7, 5), (5, 7))), num_chunks=0),
            "num_chunks",
        ),
    ],
)
def test_what_does_not_fit_is_named(call, says):
    with pytest.raises(ValueError, match=says):
        call()
