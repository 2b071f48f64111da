"""The state of a GPU under load, as ``nvidia-smi`` prints it."""

import sys
import time
from datetime import datetime

import pytest

from benchmarks.gpu import sampler
from benchmarks.gpu.sampler import Sampler, parse, summary

TEXT = """2026/11/28 12:00:00.000, 1980, 310.50, 41, 0x0000000000000000
2026/11/28 12:00:00.100, 1700, 690.00, 58, 0x0000000000000004
2026/11/28 12:00:00.200, [N/A], [N/A], 60, 0x0000000000000024
Unable to read the state of the GPU
2026/11/28 12:00:00.300, 16"""
FAKE = """#!{python}
import sys, time
from datetime import datetime
if "clocks_event" in " ".join(sys.argv):
    sys.exit("Field is not a valid field to query")
assert "--id=GPU-7" in sys.argv
while any(word.startswith("--loop-ms") for word in sys.argv):
    print(datetime.now().strftime("%Y/%m/%d %H:%M:%S.%f"), "1500, 650.0, 60, 0x4", sep=", ", flush=True)
    time.sleep(0.01)
"""


def test_samples_are_read_line_by_line():
    samples = list(parse(TEXT))
    assert [sample.sm_mhz for sample in samples] == [1980, 1700, None]
    assert [sample.watts for sample in samples] == [310.5, 690.0, None]
    assert [sample.reasons for sample in samples] == [0, 4, 0x24]
    assert samples[1].time == datetime(2026, 11, 28, 12, 0, 0, 100_000).timestamp()


def test_a_summary_has_quantiles_and_what_slows_the_clock():
    found = summary(list(parse(TEXT)))
    assert found["samples"] == 3
    assert found["sm_mhz"] == pytest.approx({"p10": 1728, "median": 1840, "p90": 1952})
    assert found["celsius"]["median"] == 58
    assert found["slowed_by"] == pytest.approx({"power limit": 2 / 3, "temperature, by driver": 1 / 3})
    assert summary([]) is None


def test_a_gpu_is_sampled_between_two_times(tmp_path, monkeypatch):
    """With the older name of a field, after the newer one was rejected."""
    program = tmp_path / "nvidia-smi"
    program.write_text(FAKE.format(python=sys.executable))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with Sampler(tmp_path, "GPU-7") as sampled:
        begun = time.time()
        while sampled.summary(begun, time.time()) is None:
            time.sleep(0.01)
    found = sampled.summary(begun, time.time())
    assert (found["sm_mhz"]["median"], found["watts"]["median"]) == (1500, 650)
    assert found["slowed_by"] == {"power limit": 1}
    assert sampled.summary(begun + 3600, begun + 7200) is None


def test_without_the_tools_there_are_no_samples(tmp_path, monkeypatch):
    monkeypatch.setattr(sampler.shutil, "which", lambda name: None)
    with Sampler(tmp_path, "GPU-7") as sampled:
        pass
    assert sampled.summary(0, time.time()) is None
