"""The memory-optimized SwiGLU: as exact as the plain one in the same dtype, and saving what it says it saves."""

import math

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from lightning_llm.measure.meter import MemoryMeter
from lightning_llm.ops import sizes, swiglu
from lightning_llm.ops.swiglu import memory_optimized_swiglu, swiglu_reference
from tests.ops.judged import assert_as_good_as_plain

LEVELS = [0, 1, 2]
HALVES = [torch.bfloat16, torch.float16]
DTYPES = [torch.float32, *HALVES]
SHAPES = [(5, 123, 77), (2, 3, 64, 96), (1, 16, 24), (20, 32, 160)]  # (…, tokens, hidden, intermediate)


def make_inputs(shape, *, with_norm, dtype=torch.float64):
    """x, gate, up, down and the norm's weight. Weights keep the unit variance of x."""
    torch.manual_seed(0)
    *leading, hidden, width = shape
    shapes = [(*leading, hidden), (width, hidden), (width, hidden), (hidden, width)] + [(hidden,)] * with_norm
    inputs = [torch.randn(s, dtype=torch.float64) for s in shapes]
    inputs[1:4] = [w / math.sqrt(w.shape[1]) for w in inputs[1:4]]
    return [t.to(dtype).requires_grad_() for t in inputs]


def plain(x, gate, up, down, norm=None):
    if norm is not None:
        x = F.rms_norm(x, norm.shape, norm, 1e-6)
    return swiglu_reference(x, gate, up, down)


def memory_optimized(level, **options):
    def function(x, gate, up, down, norm=None):
        return memory_optimized_swiglu(x, gate, up, down, checkpoint_level=level, norm_weight=norm, **options)

    return function


@pytest.fixture(params=["tiles", "one tile", "few tokens"])
def tiles(request, monkeypatch):
    """Several blocks of tokens and chunks of the width; the whole in one tile; or without tiles."""
    monkeypatch.setattr(sizes, "prefers_whole", lambda *_, **__: request.param == "few tokens")
    if request.param == "tiles":
        monkeypatch.setattr(sizes, "TILE_BYTES", {"cpu": 256})
        monkeypatch.setattr(sizes, "NORM_BYTES", {"cpu": 1000})
        for name in ("LONGEST_BLOCK", "SHORTEST_BLOCK"):
            monkeypatch.setattr(sizes, name, 3)
        monkeypatch.setattr(sizes, "NARROWEST_CHUNK", 16)
    return request.param


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_error_is_at_most_twice_the_plain_ones(level, shape, dtype, tiles):
    assert_as_good_as_plain(memory_optimized(level), plain, make_inputs(shape, with_norm=level == 2), dtype)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("autocast", HALVES)
def test_error_under_autocast(level, autocast, tiles):
    assert_as_good_as_plain(
        memory_optimized(level), plain, make_inputs((5, 123, 77), with_norm=level == 2), torch.float32, autocast
    )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("compiled", [False, True])
def test_error_at_level_2_under_autocast_on_a_gpu(compiled, tiles):
    inputs = [t.detach().cuda() for t in make_inputs((5, 123, 77), with_norm=True)]
    torch.compiler.reset()
    function = torch.compile(memory_optimized(2), fullgraph=True) if compiled else memory_optimized(2)
    assert_as_good_as_plain(function, plain, inputs, torch.float32, torch.bfloat16)


@pytest.mark.parametrize("num_chunks", [1, 2, 5, 77])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_error_of_any_number_of_chunks(num_chunks, level, dtype):
    inputs = make_inputs((40, 123, 77), with_norm=level == 2)
    assert_as_good_as_plain(memory_optimized(level, num_chunks=num_chunks), plain, inputs, dtype)


def test_many_chunks_and_blocks_lose_no_bits_in_bf16(monkeypatch):
    monkeypatch.setattr(sizes, "prefers_whole", lambda *_, **__: False)
    # bf16 sums of 512 chunks, or of 128 blocks, would have several times the plain one's error
    inputs = make_inputs((512, 16, 512), with_norm=False)
    assert_as_good_as_plain(memory_optimized(1, num_chunks=512), plain, inputs, torch.bfloat16)
    monkeypatch.setattr(sizes, "LONGEST_BLOCK", 4)
    assert_as_good_as_plain(memory_optimized(1), plain, inputs, torch.bfloat16)


@pytest.mark.parametrize("level", LEVELS)
def test_gradients_by_finite_differences(level, tiles):
    inputs = make_inputs((2, 4, 5, 33), with_norm=level == 2)
    assert torch.autograd.gradcheck(memory_optimized(level), inputs)
    assert torch.autograd.gradcheck(memory_optimized(level, num_chunks=3), inputs)


def test_a_norm_may_stand_in_front_at_every_level():
    inputs = make_inputs((5, 12, 7), with_norm=True)
    for level in (0, 1):
        torch.testing.assert_close(memory_optimized(level)(*inputs), plain(*inputs))
    shifted = memory_optimized_swiglu(*inputs[:4], checkpoint_level=2, norm_weight=inputs[4], norm_eps=10.0)
    torch.testing.assert_close(shifted, swiglu_reference(F.rms_norm(inputs[0], (12,), inputs[4], 10.0), *inputs[1:4]))


# What is saved --------------------------------------------------------------------------------------------------------


def saved_and_peak(level, tokens, dtype=torch.float32, autocast=None, hidden=32, width=96):
    inputs = make_inputs((tokens, hidden, width), with_norm=level == 2, dtype=dtype)
    dy = torch.ones(tokens, hidden, dtype=autocast or dtype)
    with MemoryMeter([*inputs, dy]) as meter:
        with torch.autocast("cpu", autocast, enabled=autocast is not None):
            y = memory_optimized(level)(*inputs)
        saved = meter.live_bytes - y.untyped_storage().nbytes()
        meter.reset_peak()
        y.backward(dy)
    return saved, meter.peak_bytes


@pytest.mark.parametrize(
    ("dtype", "autocast"), [(torch.float32, None), (torch.float32, torch.bfloat16), (HALVES[0], None)]
)
def test_saved_for_backward(dtype, autocast, tiles):
    size = (autocast or dtype).itemsize
    assert saved_and_peak(0, 50, dtype, autocast)[0] == 2 * 50 * 96 * size  # g and u
    assert saved_and_peak(1, 50, dtype, autocast)[0] == 0  # beyond x, which was there before
    assert saved_and_peak(2, 50, dtype, autocast)[0] == 0


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_peak_grows_with_the_tokens_only_by_input_and_output(level, dtype, monkeypatch):
    monkeypatch.setattr(sizes, "LONGEST_BLOCK", 16)
    monkeypatch.setattr(sizes, "SHORTEST_BLOCK", 16)
    monkeypatch.setattr(sizes, "TILE_BYTES", {"cpu": 16 * 16 * 4})
    (_, short), (_, long) = saved_and_peak(level, 128, dtype), saved_and_peak(level, 256, dtype)
    per_token = 2 * 32 + (2 * 96 if level == 0 else 0)  # y and dx; g and u
    assert long - short == 128 * per_token * dtype.itemsize


@pytest.mark.parametrize("level", LEVELS)
def test_nothing_is_saved_without_gradients(level):
    inputs = make_inputs((5, 12, 7), with_norm=level == 2)
    for context in (torch.no_grad(), torch.inference_mode()):
        with context, MemoryMeter(inputs) as meter:
            y = memory_optimized(level)(*inputs)
        assert meter.live_bytes == y.untyped_storage().nbytes()
        assert y.grad_fn is None
    frozen = [t.detach() for t in inputs]
    assert memory_optimized(level)(*frozen).grad_fn is None


class CountMatmuls(TorchDispatchMode):
    """Floating-point operations of matmuls, in units of ``2 · tokens · hidden · intermediate``."""

    def __init__(self, unit):
        super().__init__()
        self.unit, self.flops = unit, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket._qualified_op_name.removeprefix("aten::")
        if name in ("mm", "addmm", "addmm_"):
            left, right = args[-2:]
            self.flops += 2 * left.shape[0] * left.shape[1] * right.shape[1]
        return func(*args, **(kwargs or {}))

    @property
    def matmuls(self):
        return self.flops / self.unit


# By index of the one input that requires a gradient: x, gate, up, down, norm. da is a matmul, too.
ONE_INPUT = {0: 3, 1: 2, 2: 2, 3: 1, 4: 3}


@pytest.mark.parametrize("level", LEVELS)
def test_no_matmul_is_wasted(level, tiles):
    again = 0 if level == 0 else 2
    inputs = make_inputs((10, 12, 32), with_norm=level == 2)
    unit = 2 * 10 * 12 * 32
    with CountMatmuls(unit) as count:
        memory_optimized(level)(*inputs).sum().backward()
    assert count.matmuls == 9 + again
    for wanted in range(len(inputs)):
        some = [t.detach().requires_grad_(i == wanted) for i, t in enumerate(inputs)]
        with CountMatmuls(unit) as count:
            memory_optimized(level)(*some).sum().backward()
        assert count.matmuls == 3 + ONE_INPUT[wanted] + again
        assert [t.grad is not None for t in some] == [i == wanted for i in range(len(inputs))]
        every = torch.autograd.grad(memory_optimized(level)(*inputs).sum(), inputs)[wanted]
        torch.testing.assert_close(some[wanted].grad, every)


# How it may be used ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", LEVELS)
def test_inputs_are_not_written_and_backward_can_be_repeated(level, tiles):
    inputs = make_inputs((7, 12, 40), with_norm=level == 2, dtype=torch.float32)
    copies = [t.detach().clone() for t in inputs]
    y = memory_optimized(level)(*inputs)
    first = torch.autograd.grad(y.sum(), inputs, retain_graph=True)
    second = torch.autograd.grad(y.sum(), inputs)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(inputs, copies, strict=True))


@pytest.mark.parametrize("level", LEVELS)
def test_an_input_may_be_used_twice(level):
    def twice(function):
        def both(x, gate, up, down, *norm):
            return function(function(x, gate, up, down, *norm) + x, gate, up, down, *norm) * x

        return both

    inputs = make_inputs((5, 12, 12), with_norm=level == 2)
    inputs = [inputs[0], *[inputs[1]] * 3, *inputs[4:]]  # the same matrix three times
    ours = torch.autograd.grad(twice(memory_optimized(level))(*inputs).sum(), inputs[:2])
    torch.testing.assert_close(ours, torch.autograd.grad(twice(plain)(*inputs).sum(), inputs[:2]))


@pytest.mark.parametrize("level", LEVELS)
def test_tensors_need_not_be_contiguous(level, tiles):
    inputs = make_inputs((4, 5, 12, 40), with_norm=level == 2)

    def strided(x, gate, up, down, *norm):
        return [x.transpose(0, 1), gate.t().contiguous().t(), up[:, ::2], down.t().contiguous().t(), *norm]

    inputs[2] = torch.randn(40, 24, dtype=torch.float64, requires_grad=True)
    results = []
    for function in (memory_optimized(level), plain):
        y = function(*strided(*inputs))
        results.append([y, *torch.autograd.grad(y.transpose(0, 1)[..., ::2].sum(), inputs)])  # a strided gradient
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("shape", [(0, 12, 7), (2, 0, 12, 7), (3, 12, 0)])
@pytest.mark.parametrize("level", LEVELS)
def test_empty_shapes(level, shape):
    inputs = make_inputs(shape, with_norm=True)
    y = memory_optimized(level)(*inputs)
    assert y.shape == inputs[0].shape
    y.sum().backward()
    assert all(torch.equal(t.grad, torch.zeros_like(t)) for t in inputs)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.usefixtures("tiles")
def test_under_activation_checkpointing(level, reentrant):
    inputs = make_inputs((5, 12, 7), with_norm=level == 2)
    expected = torch.autograd.grad(memory_optimized(level)(*inputs).sum(), inputs)
    checkpoint(memory_optimized(level), *inputs, use_reentrant=reentrant).sum().backward()
    assert all(torch.equal(t.grad, e) for t, e in zip(inputs, expected, strict=True))


@pytest.mark.parametrize("level", LEVELS)
def test_compiled_in_one_graph_it_saves_no_more(level):
    torch.compiler.reset()
    inputs = make_inputs((5, 12, 7), with_norm=level == 2, dtype=torch.float32)

    def function(*tensors):
        return memory_optimized(level)(*tensors) * 2

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = compiled(*inputs)
    allowed = {t.data_ptr() for t in inputs}
    assert sum(t.numel() for t in saved if t.data_ptr() not in allowed) == (2 * 5 * 7 if level == 0 else 0)
    torch.testing.assert_close(y, function(*inputs))
    torch.testing.assert_close(
        torch.autograd.grad(y.sum(), inputs), torch.autograd.grad(function(*inputs).sum(), inputs)
    )
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(compiled(*inputs), function(*inputs))
    frozen = [t.detach().requires_grad_(i == 2) for i, t in enumerate(inputs)]
    compiled(*frozen).sum().backward()
    torch.testing.assert_close(frozen[2].grad, torch.autograd.grad(function(*inputs).sum(), inputs[2])[0])


@pytest.mark.parametrize(
    ("tokens", "hidden", "width", "chunks"),
    [(8192, 2048, 5504, 1), (65536, 768, 2048, None)],  # 1.3 billion parameters, and 124 million
)
def test_compiled_it_decides_on_a_gpu_as_without_the_compiler(tokens, hidden, width, chunks, fake_cuda, monkeypatch):
    found = []
    monkeypatch.setattr(
        swiglu.tiles, "swiglu_backward", lambda dy, x, weights, saved, options, needed: found.append(options) or []
    )
    whole = sizes.prefers_whole(tokens, hidden, width, 2, 4, "cuda", saves=True, has_norm=False)
    assert whole == (chunks == 1)
    for device in ("cuda", "cpu"):
        with fake_cuda():
            dy, x = (torch.empty(tokens, hidden, device=device, dtype=torch.bfloat16) for _ in range(2))
            weights = [torch.empty(width, hidden, device=device)] * 2 + [torch.empty(hidden, width, device=device)]
            saved = [torch.empty(tokens, width, device=device, dtype=torch.bfloat16)] * 2
            swiglu._run_backward(dy, x, *weights, None, saved, [True] * 4 + [False], 1e-6, None, torch.bfloat16)
    assert [options.num_chunks for options in found] == [chunks, None]


def test_what_it_cannot_do_is_said():
    inputs = make_inputs((5, 12, 7), with_norm=False)
    with pytest.raises(RuntimeError, match="cannot be differentiated twice"):
        torch.autograd.grad(memory_optimized(0)(*inputs).sum(), inputs, create_graph=True)
    for transform in (torch.func.grad, torch.func.jacrev):
        with pytest.raises(
            NotImplementedError, match=r"memory_optimized_swiglu does not work .*: use swiglu_reference"
        ):
            transform(lambda x: memory_optimized(0)(x, *inputs[1:]).sum())(inputs[0])
    with pytest.raises(NotImplementedError, match=r"torch\.func"):
        torch.vmap(lambda x: memory_optimized(0)(x, *inputs[1:]))(inputs[0])


# Bad input ------------------------------------------------------------------------------------------------------------

GOOD = {"x": (5, 12), "gate_weight": (7, 12), "up_weight": (7, 12), "down_weight": (12, 7)}


def call(changes=(), options=()):
    tensors = {**{name: torch.randn(shape) for name, shape in GOOD.items()}, **dict(changes)}
    return memory_optimized_swiglu(**tensors, **dict(options))


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({"gate_weight": torch.randn(7, 11)}, {}, r"gate_weight must have shape \(7, 12\) .*\(5, 12\), got \(7, 11\)"),
        ({"gate_weight": torch.randn(12)}, {}, r"gate_weight must be \(intermediate, hidden\).*\(12,\).*\(5, 12\)"),
        ({"up_weight": torch.randn(8, 12)}, {}, r"up_weight must have shape \(7, 12\) .*\(5, 12\), got \(8, 12\)"),
        ({"down_weight": torch.randn(7, 12)}, {}, r"down_weight must have shape \(12, 7\) .*got \(7, 12\)"),
        ({"x": torch.randn(())}, {}, r"x \(\)"),
        ({"norm_weight": torch.randn(11)}, {}, r"norm_weight must have shape \(12,\) .*got \(11,\)"),
        (
            {"up_weight": torch.randn(7, 12).double()},
            {},
            r"up_weight \(7, 12\) is torch.float64, x \(5, 12\) torch.float32",
        ),
        (
            {"x": torch.randn(5, 12).bfloat16()},
            {},
            r"gate_weight \(7, 12\) is torch.float32, x \(5, 12\) torch.bfloat16",
        ),
        ({"x": torch.ones(5, 12, dtype=torch.int64)}, {}, r"x must be of a floating dtype, got torch.int64"),
        (
            {"down_weight": torch.randn(12, 7, device="meta")},
            {},
            r"down_weight \(12, 7\) is on meta, x \(5, 12\) on cpu",
        ),
        ({}, {"checkpoint_level": 3}, "checkpoint_level must be one of 0, 1, 2, got 3"),
        ({}, {"checkpoint_level": -1}, "checkpoint_level must be one of 0, 1, 2, got -1"),
        ({}, {"checkpoint_level": True}, "checkpoint_level must be one of 0, 1, 2, got True"),
        ({}, {"checkpoint_level": 2}, "checkpoint_level 2 .* give norm_weight"),
        ({}, {"num_chunks": 0}, "num_chunks must be a whole number from 1 to 7 .*got 0"),
        ({}, {"num_chunks": 8}, "num_chunks must be a whole number from 1 to 7 .*got 8"),
        ({}, {"num_chunks": 2.0}, "num_chunks must be a whole number from 1 to 7 .*got 2.0"),
    ],
)
def test_bad_input(changes, options, message):
    call()  # good as it stands
    with pytest.raises(ValueError, match=message) as error:
        call(changes, options)
    assert "\n" not in str(error.value)


def test_autocast_casts_what_would_not_fit():
    with torch.autocast("cpu", torch.bfloat16):
        assert call({"x": torch.randn(5, 12).bfloat16()}).dtype == torch.bfloat16
        with pytest.raises(ValueError, match=r"gate_weight \(7, 12\) is torch.float32, x \(5, 12\) torch.float64"):
            call({"x": torch.randn(5, 12).double()})  # autocast leaves float64 alone
