"""The system's numbers for a process: not those of its parent."""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from lightning_llm.measure import gauges

MIB = 2**20
linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def status(field):
    """Of this process, in bytes. A loaded system takes file pages of idle libraries away, but no anonymous ones."""
    return 1024 * int(re.search(rf"^{field}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)[1])


@linux
def test_what_is_held_is_seen_and_what_was_held_is_remembered_until_restarted():
    gauges.restart_high_water()
    before = status("RssAnon")
    held = np.ones(64 * MIB, dtype=np.uint8)
    assert status("RssAnon") - before > 60 * MIB
    resident = gauges.resident_bytes()
    assert resident == pytest.approx(status("VmRSS"), abs=2 * MIB)
    assert held.any()
    del held
    assert gauges.high_water_bytes() > resident - 2 * MIB
    assert gauges.restart_high_water() < resident - 30 * MIB


@linux
def test_the_open_file_tells_what_is_resident_now_and_is_closed_with_its_reader():
    opened = set(os.listdir("/proc/self/fd"))
    reader = gauges.ResidentSet()
    held = np.ones(64 * MIB, dtype=np.uint8)
    assert reader.read() > 60 * MIB
    assert reader.read() == pytest.approx(gauges.resident_bytes(), abs=MIB)
    assert held.any()
    del reader
    assert set(os.listdir("/proc/self/fd")) <= opened


@linux
def test_a_large_parent_does_not_show():
    held = np.ones(512 * MIB, dtype=np.uint8)
    code = "from lightning_llm.measure import gauges as r; print(r.high_water_bytes(), r.quick_high_water_bytes())"
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=root)
    assert held.any()
    assert int(done.stdout.split()[0]) < 256 * MIB


def test_the_allocators_own_mark_is_read_and_left_alone(monkeypatch):
    counters = {"current": 10, "peak": 10}
    monkeypatch.setattr(
        torch.cuda, "memory_stats_as_nested_dict", lambda device: {"allocated_bytes": {"all": dict(counters)}}
    )
    for name in ("reset_peak_memory_stats", "reset_max_memory_allocated", "reset_accumulated_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda *args: pytest.fail("the mark is the user's"))
    gauge = gauges.AllocatorGauge(torch.device("cuda"))
    found = []
    for current, peak in (
        (30, 50),
        (20, 50),
        (60, 60),
        (15, 15),
        (15, 40),
    ):  # the user resets it in the fourth interval
        counters.update(current=current, peak=peak)
        found.append(tuple(gauge.read()))
    assert found == [(30, 50), (20, 30), (60, 60), (15, 60), (15, 40)]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_the_users_peak_on_cuda_outlives_readings():
    others = torch.cuda.memory_allocated()  # of tests before this one
    torch.cuda.reset_peak_memory_stats()
    held = torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
    peak = torch.cuda.max_memory_allocated()
    gauge = gauges.AllocatorGauge(torch.device("cuda"))
    del held
    readings = [gauge.read() for _ in range(3)]
    assert torch.cuda.max_memory_allocated() == peak >= others + 64 * MIB
    assert readings[0].peak_bytes == peak
    assert readings[0].live_bytes == readings[1].peak_bytes == others


def test_without_proc_it_is_getrusages(monkeypatch, tmp_path):
    monkeypatch.setattr(gauges, "_PROC", tmp_path / "none")
    assert gauges.resident_bytes() == 0
    assert gauges.restart_high_water() == gauges.high_water_bytes() == gauges.quick_high_water_bytes() > MIB
