"""The system's numbers for a process: not those of its parent."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from lightning_llm.measure import gauges

MIB = 2**20
linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@linux
def test_what_is_held_is_seen_and_what_was_held_is_remembered_until_restarted():
    before = gauges.restart_high_water()
    held = np.ones(64 * MIB, dtype=np.uint8)
    assert gauges.resident_bytes() - before > 60 * MIB
    assert held.any()
    del held
    assert gauges.high_water_bytes() - before > 60 * MIB
    assert gauges.restart_high_water() - before < 30 * MIB


@linux
def test_the_open_file_tells_what_is_resident_now_and_is_closed_with_its_reader():
    opened = set(os.listdir("/proc/self/fd"))
    reader = gauges.ResidentSet()
    before = reader.read()
    held = np.ones(64 * MIB, dtype=np.uint8)
    assert reader.read() - before > 60 * MIB
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


def test_without_proc_it_is_getrusages(monkeypatch, tmp_path):
    monkeypatch.setattr(gauges, "_PROC", tmp_path / "none")
    assert gauges.resident_bytes() == 0
    assert gauges.restart_high_water() == gauges.high_water_bytes() == gauges.quick_high_water_bytes() > MIB
