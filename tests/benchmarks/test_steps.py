"""The seconds of a call, process groups, and what is written beside a figure: compiled code, the state of a GPU."""

import time

import pytest
import torch
import torch.distributed as dist

from benchmarks import baselines
from benchmarks.baselines import Found
from benchmarks.steps import process_group, seconds_of, state_of_gpu
from lightning_llm.bench.processes import in_fresh_processes
from lightning_llm.bench.workloads import sizes_of

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

    def run(sizes, dtype, device, steps, *, compiled):
        function = torch.compile(doubled, backend="eager", dynamic=False)
        for length in lengths:
            function(torch.ones(length))
        return Found([0.5], [0.25], 2**40, {"sm_mhz": 1980})

    return run


JOB = {"sizes": SIZES, "dtype": "bfloat16", "device": "cpu", "steps": 1, "side": "nanogpt", "compiled": True}
JOB |= {"keep_freed_memory": False}


@pytest.mark.usefixtures("_new_compiler")
def test_a_row_says_what_was_compiled(monkeypatch):
    monkeypatch.setitem(baselines.SIDES, "nanogpt", side([2, 3, 4, 2]))
    found = baselines.measure(JOB)
    assert (found["median_s"], found["shares"]) == (0.5, [0.5])
    ran = {"graphs": 6, "graph_breaks": 3, "recompiles": 4, "attention": "flash", "sm_mhz": 1980}
    assert {name: found["ran"][name] for name in ran} == ran


@pytest.mark.usefixtures("_new_compiler")
def test_compiled_code_that_would_run_eagerly_is_an_error(monkeypatch):
    monkeypatch.setitem(baselines.SIDES, "nanogpt", side(range(2, 3 + torch._dynamo.config.recompile_limit)))
    with pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit):
        baselines.measure(JOB)


def test_the_state_of_a_gpu_is_what_its_driver_tells(monkeypatch):
    def refuses():
        raise RuntimeError("no permission")

    monkeypatch.setattr(torch.cuda, "clock_rate", lambda: 1980)
    monkeypatch.setattr(torch.cuda, "power_draw", lambda: 650_000)
    monkeypatch.setattr(torch.cuda, "temperature", refuses)
    assert state_of_gpu() == {"sm_mhz": 1980, "watts": 650.0}
