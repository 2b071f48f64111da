"""Every number here is counted by hand: a float32 takes 4 bytes, a bfloat16 2, an int64 8."""

import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_llm import ModelConfig, Transformer
from lightning_llm.measure import MemoryMeter


def test_results_count_until_they_die():
    x = torch.ones(100)
    with MemoryMeter(exclude=[x]) as meter:
        y = x * 2
        z = y + 1
        assert (meter.live_bytes, meter.peak_bytes) == (800, 800)
        del y
        assert (meter.live_bytes, meter.peak_bytes) == (400, 800)
        z = z.exp()  # the old one lives until the new one is there
        assert (meter.live_bytes, meter.peak_bytes) == (400, 800)
        a = z.to(torch.bfloat16)
        b = z.double()
        assert (meter.live_bytes, meter.peak_bytes) == (400 + 200 + 800, 1400)
    del a, b, z
    assert meter.live_bytes == 0  # deaths count after leaving
    assert meter.excluded_bytes == 400


def test_a_storage_counts_once_however_it_is_seen():
    weight = nn.Parameter(torch.zeros(10, 10))
    with MemoryMeter(exclude=[weight]) as meter:
        views = [weight.view(100), weight.t(), weight[0], weight.detach(), weight.expand(2, 10, 10)]
        assert meter.live_bytes == 0
        whole = torch.empty(1000)
        views = [whole[:10], whole.view(10, 100)]
        assert meter.live_bytes == 4000
        del whole, views[1]
        assert meter.live_bytes == 4000  # ten numbers keep a thousand
        views.clear()
        assert meter.live_bytes == 0


def test_in_place_and_out_make_nothing_new():
    with MemoryMeter() as meter:
        x = torch.zeros(10)
        x.add_(1).mul_(2)
        torch.exp(x, out=x)
        torch._foreach_add_([x], 1)
        assert (meter.live_bytes, meter.peak_bytes) == (40, 40)


def test_results_in_lists_count():
    x = torch.zeros(10)
    with MemoryMeter() as meter:
        results = torch._foreach_exp([x, x])
        assert meter.live_bytes == 80
        del results
        parts = torch.zeros(8).split(2)
        assert meter.live_bytes == 32
        del parts


def test_what_was_there_before_is_not_counted_even_if_not_excluded():
    before = torch.zeros(1000)
    with MemoryMeter() as meter:
        view = before[:10]
        copy = view.clone()
        assert meter.live_bytes == 40
        del before, view  # its address may be used again
        after = torch.zeros(1000)
        assert meter.live_bytes == 40 + 4000
    del copy, after
    assert meter.excluded_bytes == 0


def test_modules_are_excluded_with_their_buffers():
    layer = nn.BatchNorm1d(10)  # weight, bias, mean, variance and a counter
    assert MemoryMeter(exclude=[layer]).excluded_bytes == 4 * 40 + 8
    tied = nn.ModuleList([nn.Linear(3, 3, bias=False)] * 2)
    assert MemoryMeter(exclude=[tied, tied[0].weight]).excluded_bytes == 36


def test_tensors_from_python_numbers_count():
    with MemoryMeter() as meter:
        numbers = torch.tensor([1.0, 2.0, 3.0])
        assert meter.live_bytes == 12
        del numbers
        assert meter.live_bytes == 0


def test_growing_and_shrinking_storages():
    with MemoryMeter() as meter:
        x = torch.zeros(10)
        x.resize_(100)
        assert meter.live_bytes == 400
        x.untyped_storage().resize_(0)
        x.detach()  # seen at the next operator
        assert (meter.live_bytes, meter.peak_bytes) == (0, 400)
        x.untyped_storage().resize_(80)
        x.detach()
        assert meter.live_bytes == 80
    del x
    assert meter.live_bytes == 0


def test_sparse_tensors_count_by_their_parts():
    with MemoryMeter() as meter:
        indices, values = torch.tensor([[0, 2]]), torch.tensor([1.0, 2.0])
        sparse = torch.sparse_coo_tensor(indices, values, (3,), check_invariants=False)
        assert meter.live_bytes == 16 + 8
        del sparse


def test_saved_activations_and_the_backward():
    n, k, m = 5, 7, 11
    x, weight = torch.randn(n, k), nn.Parameter(torch.randn(k, m))
    with MemoryMeter(exclude=[x, weight]) as meter:
        with meter.phase("forward") as forward:
            loss = (x @ weight).relu().exp().sum()
        # relu and exp each keep their result; the product is kept by nobody, but lives until relu is done
        kept = 2 * 4 * n * m + 4
        assert forward.end_bytes == meter.live_bytes == kept
        assert forward.peak_bytes == kept
        assert meter.phases["forward"] is forward
        meter.peak_bytes += 1
        meter.reset_peak()
        assert meter.peak_bytes == kept
        with meter.phase("backward") as backward:
            loss.backward()
    # New are the gradient of the loss (4) and its product with exp's result (n m). That result dies before the next
    # product, with relu's, is made.
    assert backward.start_bytes == kept
    assert backward.peak_bytes == meter.peak_bytes == kept + 4 + 4 * n * m
    assert backward.end_bytes == meter.live_bytes == 4 * k * m + 4
    weight.grad = None
    del loss
    assert meter.live_bytes == 0


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        scratch = torch.empty(3, *x.shape)
        scratch[0].copy_(x)
        ctx.save_for_backward(x)
        return scratch[0] * x

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        scratch = torch.empty(5, *x.shape)
        scratch[0].copy_(x)
        return grad * 2 * scratch[0]


def test_inside_a_custom_function():
    x = torch.ones(100, requires_grad=True)
    with MemoryMeter(exclude=[x]) as meter:
        with meter.phase("forward") as forward:
            y = Square.apply(x)
        assert (forward.peak_bytes, forward.end_bytes) == (1200 + 400, 400)
        with meter.phase("backward") as backward:
            y.backward(torch.ones(100))
    assert torch.equal(x.grad, 2 * torch.ones(100))
    # Held: y and the gradient of it. In the last line: scratch, grad · 2, and the result.
    assert backward.peak_bytes == 400 + 400 + 2000 + 400 + 400
    assert backward.end_bytes == 400 + 400  # y and x.grad


def test_checkpoint_keeps_the_input_only_and_recomputes():
    x = torch.ones(100, requires_grad=True)

    def block(x):
        return x.exp().sin().tanh().sigmoid()  # sin keeps its input, which is what exp keeps

    with MemoryMeter(exclude=[x]) as meter:
        plain = block(x)
        assert meter.live_bytes == 3 * 400  # what exp, tanh and sigmoid made; sin's died with tanh
        del plain
        assert meter.live_bytes == 0
        with meter.phase("forward"):
            y = checkpoint(block, x, use_reentrant=False, preserve_rng_state=False)
        assert meter.live_bytes == 400
        with meter.phase("backward") as backward:
            y.backward(x.detach())
    # y, the three again, and a fourth while it is made again
    assert backward.peak_bytes >= 400 + 3 * 400 + 400
    assert backward.end_bytes == 800


def test_autocast_keeps_a_cast_weight_until_it_ends():
    layer, x = nn.Linear(10, 20, bias=False), torch.ones(5, 10)
    with MemoryMeter(exclude=[layer, x]) as meter:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = layer(x)
            # x in bfloat16 (kept for the weight's gradient), the weight in bfloat16 (kept by autocast), the result
            assert meter.live_bytes == 2 * (5 * 10 + 20 * 10 + 5 * 20)
        assert meter.live_bytes == 2 * (5 * 10 + 5 * 20)
        y.sum().backward()
        del y
        assert meter.live_bytes == 4 * 20 * 10  # the gradient in float32


@pytest.mark.parametrize("mlp", ["swiglu", "memory_optimized_swiglu"])
def test_kept_activations_are_what_autograd_says_it_saves(mlp):
    """Against another counter: the hooks that autograd calls for each tensor it saves."""
    config = ModelConfig(vocab_size=11, hidden_size=24, num_hidden_layers=2, num_attention_heads=2, mlp=mlp)
    model, ids = Transformer(config), torch.arange(10).view(2, 5)
    model(ids)  # makes what is kept for all runs, such as the causal mask
    known = {parameter.untyped_storage().data_ptr() for parameter in [*model.parameters(), ids]}
    saved = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with MemoryMeter(exclude=[model, ids]) as meter, torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        hidden = model(ids)
    out = hidden.untyped_storage()
    saved[out.data_ptr()] = out.nbytes()
    assert meter.live_bytes == sum(nbytes for pointer, nbytes in saved.items() if pointer not in known)


def test_phases_nest_and_repeat():
    with MemoryMeter() as meter:
        with meter.phase("outer") as outer:
            first = torch.zeros(10)
            with meter.phase("inner") as inner:
                second = torch.zeros(10)
                assert inner.end_bytes is None
            del second
            third = torch.zeros(5)
        with meter.phase("inner") as again:
            pass
    assert (outer.start_bytes, outer.peak_bytes, outer.end_bytes) == (0, 80, 60)
    assert (inner.start_bytes, inner.peak_bytes, inner.end_bytes) == (40, 80, 80)
    assert (again.start_bytes, again.peak_bytes, again.end_bytes) == (60, 60, 60)
    assert meter.phases == {"outer": outer, "inner": again}
    del first, third


def test_phases_with_the_same_numbers_are_kept_apart():
    with MemoryMeter() as meter, meter.phase("outer") as outer:
        with meter.phase("inner") as inner:
            x = torch.zeros(10)
        y = torch.zeros(10)
    assert (outer.peak_bytes, inner.peak_bytes) == (80, 40)
    del x, y


def test_an_error_ends_a_phase():
    with MemoryMeter() as meter:
        with pytest.raises(ZeroDivisionError), meter.phase("broken") as broken:
            raise ZeroDivisionError
        x = torch.zeros(10)
    assert (broken.peak_bytes, broken.end_bytes) == (0, 0)
    del x


def test_the_compiler_is_not_imported():
    code = (
        "import sys, torch; from lightning_llm.measure import MemoryMeter\n"
        "with MemoryMeter() as meter: x = torch.zeros(10)\n"
        "sys.exit(meter.live_bytes != 40 or 'torch._dynamo' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_entered_again_and_nested():
    with MemoryMeter() as outer:
        first = torch.zeros(10)
        with MemoryMeter() as inner:
            second = torch.zeros(100)
    third = torch.zeros(1000)
    with outer:
        fourth = torch.zeros(10)
    assert (outer.live_bytes, inner.live_bytes) == (40 + 400 + 40, 400)
    del first, second, third, fourth
    assert (outer.live_bytes, inner.live_bytes) == (0, 0)


@pytest.fixture
def one_of_four():
    """A device mesh of four processes, of which three are made up: nothing may be sent."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield init_device_mesh("cpu", (4,))
    dist.destroy_process_group()


def test_sharded_tensors_count_by_their_shard(one_of_four):
    from torch.distributed.tensor import DTensor, Shard

    weight = DTensor.from_local(torch.ones(10, 4), one_of_four, [Shard(0)])
    assert weight.shape == (40, 4)
    with MemoryMeter(exclude=[weight]) as meter:
        assert meter.excluded_bytes == 160
        double = weight + weight
        assert meter.live_bytes == 160
        del double
        assert meter.live_bytes == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_cuda_backward_is_seen_and_agrees_with_the_allocator():
    x = torch.ones(64, 128, device="cuda", requires_grad=True)  # sizes in whole blocks of the allocator
    (x @ x.mT).sum().backward()  # workspaces of the library are made here
    x.grad = None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with MemoryMeter(exclude=[x]) as meter:
        y = x.exp().sin().tanh()
        y.backward(torch.ones_like(y))
    assert meter.live_bytes == torch.cuda.memory_allocated() - before
    assert meter.peak_bytes == torch.cuda.max_memory_allocated() - before
