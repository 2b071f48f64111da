"""The seconds of a call, process groups, the stages of a measurement, and what compiled code ran."""

import time

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import SingleDeviceStrategy

from benchmarks import baselines
from benchmarks.baselines import Found, Stages
from benchmarks.steps import process_group, seconds_of
from benchmarks.workloads import sizes_of
from lightning_llm.same.processes import in_fresh_processes

TINY = "1x2x32x64x32x2x65"
SIZES = sizes_of(TINY, baselines.BENCH.sizes, TINY)


def test_the_seconds_of_a_call_are_those_of_the_clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    assert seconds_of(lambda: now.append(now.pop() + 3.0)) == 3.0


def _sum(job):
    rank, meeting = job
    with process_group(rank, 2, "cpu", meeting):
        value = torch.tensor([float(rank + 1)])
        dist.all_reduce(value)
    return value.item(), dist.is_initialized()


@pytest.mark.slow
def test_a_group_finds_its_members_and_ends(tmp_path):
    jobs = [(rank, str(tmp_path / "meeting")) for rank in range(2)]
    assert in_fresh_processes(_sum, jobs, name="sum") == [(3.0, False)] * 2


@pytest.fixture
def _new_compiler():
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    torch._dynamo.utils.clear_compilation_metrics()
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=False):
        yield
    torch.compiler.reset()


def side(lengths):
    """A side whose code is compiled for each length, with a break in the middle."""

    def doubled(x):
        y = 2 * x
        torch._dynamo.graph_break()
        return y + 1

    def run(sizes, dtype, device, stages, *, compiled):
        function = torch.compile(doubled, backend="eager", dynamic=False)
        for length in lengths:
            function(torch.ones(length))
        return Found([0.5], [0.25], 2**40, (1.0, 2.0), 0.1, [], None)

    return run


JOB = {"sizes": SIZES, "dtype": "bfloat16", "device": "cpu", "stages": [1], "side": "nanogpt", "compiled": True}
JOB |= {"keep_freed_memory": False, "fields": {}}


@pytest.mark.usefixtures("_new_compiler")
def test_a_row_says_what_was_compiled(monkeypatch):
    monkeypatch.setitem(baselines.SIDES, "nanogpt", side([2, 3, 4, 2]))
    found = baselines.measure(JOB)
    assert (found["seconds"], found["shares"]) == ([0.5], [0.5])
    ran = {"graphs": 6, "graph_breaks": 3, "recompiles": 4, "attention": "flash"}
    assert {name: found["ran"][name] for name in ran} == ran


@pytest.mark.usefixtures("_new_compiler")
def test_compiled_code_that_would_run_eagerly_is_an_error(monkeypatch):
    monkeypatch.setitem(baselines.SIDES, "nanogpt", side(range(2, 3 + torch._dynamo.config.recompile_limit)))
    with pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit):
        baselines.measure(JOB)


@pytest.mark.parametrize("name", ["nanogpt", "ours"])
def test_steps_are_timed_then_launched_from_an_empty_queue_then_profiled(name, monkeypatch):
    """Each stage has its steps, and ours reads a window of its own for each row of each step."""
    tokens = []
    make_store = baselines.make_store
    monkeypatch.setattr(
        baselines, "make_store", lambda path, **sizes: tokens.append(sizes["tokens"]) or make_store(path, **sizes)
    )
    monkeypatch.setattr(SingleDeviceStrategy, "teardown", lambda self: pytest.fail("the model moves to the CPU"))
    found = baselines.SIDES[name](SIZES, "bfloat16", "cpu", Stages(timed=3, host=2, profiled=2))
    assert len(found.seconds) == len(found.matmul_seconds) == 3
    assert [set(step) for step in found.host_seconds] == [{"forward", "backward", "optimizer"}] * 2
    begun, ended = found.window
    assert sum(found.seconds) <= ended - begun < time.time()
    assert found.first_step_s > 0
    assert sum(kernel["count"] for kernel in found.profile["kernels"]) == found.profile["kernels_per_step"]
    steps = baselines.WARM_UP["cpu"] + 3 + 2 + 2
    assert tokens == ([steps * SIZES["rows"] * (SIZES["context"] + 1)] if name == "ours" else [])


def test_a_side_without_more_stages_is_not_profiled():
    found = baselines.plain_loop("nanogpt", SIZES, "float32", "cpu", Stages(1))
    assert (len(found.seconds), found.host_seconds, found.profile) == (1, [], None)
