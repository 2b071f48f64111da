"""The seconds of a call, and process groups of a benchmark."""

import time

import pytest
import torch
import torch.distributed as dist

from benchmarks.steps import process_group, seconds_of
from lightning_llm.bench.processes import in_fresh_processes


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
