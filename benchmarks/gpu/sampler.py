"""Clock, power, temperature, and what slows the clock of a GPU, ten times per second, as ``nvidia-smi`` prints them.

A process of its own reads them, so that it never holds the lock of the Python that is measured.
"""

import contextlib
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

INTERVAL_MS = 100
FIRST_SAMPLE_S = 5.0  # without one by then, there will be none
# By bit, as in NVML: https://docs.nvidia.com/deploy/nvml-api/group__nvmlClocksEventReasons.html
REASONS = {
    **{0x1: "idle", 0x2: "set clocks", 0x4: "power limit", 0x8: "hardware slowdown", 0x10: "sync boost"},
    **{0x20: "temperature, by driver", 0x40: "temperature, by hardware", 0x80: "power brake", 0x100: "display clocks"},
}
FIELDS = "timestamp,clocks.sm,power.draw,temperature.gpu"
REASON_FIELDS = ("clocks_event_reasons.active", "clocks_throttle_reasons.active")  # the second before driver 535


class Sample(NamedTuple):
    """A reading at a time in seconds since 1970; what the driver does not tell is ``None``."""

    time: float
    sm_mhz: float | None
    watts: float | None
    celsius: float | None
    reasons: int | None


class Sampler:
    """Samples one GPU into a file, from ``with`` until its end; has no samples without NVIDIA's tools.

    Args:
        folder: For the file.
        gpu: As ``nvidia-smi --id`` takes it.
    """

    def __init__(self, folder: Path, gpu: str) -> None:
        self._path, self._gpu = folder / "samples.csv", gpu

    def __enter__(self) -> "Sampler":
        self._process: subprocess.Popen[bytes] | None = None
        program = shutil.which("nvidia-smi")
        if program is not None:
            start = [program, f"--id={self._gpu}", "--format=csv,noheader,nounits"]
            known = (name for name in REASON_FIELDS if _succeeds([*start, f"--query-gpu={name}"]))
            query = ",".join([FIELDS, *list(known)[:1]])
            with self._path.open("wb") as file:
                command = [*start, f"--query-gpu={query}", f"--loop-ms={INTERVAL_MS}"]
                self._process = subprocess.Popen(command, stdout=file, stderr=subprocess.DEVNULL)
            end = time.monotonic() + FIRST_SAMPLE_S
            while not self._path.stat().st_size and self._process.poll() is None and time.monotonic() < end:
                time.sleep(0.01)
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait()

    def summary(self, begin: float, end: float) -> dict[str, Any] | None:
        """The :func:`summary` of the samples between two times."""
        if not self._path.is_file():
            return None
        text = self._path.read_text(encoding="utf-8", errors="replace")
        return summary([sample for sample in parse(text) if begin <= sample.time <= end])


def _succeeds(command: Sequence[str]) -> bool:
    with contextlib.suppress(subprocess.TimeoutExpired):
        return subprocess.run(command, capture_output=True, timeout=FIRST_SAMPLE_S).returncode == 0
    return False


def parse(text: str) -> Iterator[Sample]:
    """The samples in the output of ``nvidia-smi``; a line that is no sample, such as one cut off, is left out."""
    for line in text.splitlines():
        words = [word.strip() for word in line.split(",")]
        if len(words) not in (4, 5):
            continue
        try:
            taken = datetime.strptime(words[0], "%Y/%m/%d %H:%M:%S.%f").timestamp()
        except ValueError:
            continue
        clock, watts, celsius = (_number(word) for word in words[1:4])
        try:
            reasons = int(words[4], 16) if len(words) == 5 else None
        except ValueError:
            reasons = None
        yield Sample(taken, clock, watts, celsius, reasons)


def _number(word: str) -> float | None:
    """A number, or ``None`` for a text such as ``[N/A]``."""
    try:
        return float(word)
    except ValueError:
        return None


def summary(samples: Sequence[Sample]) -> dict[str, Any] | None:
    """Median, 10th and 90th percentile of each reading, and in which share of the samples the clock was slowed by what.

    ``None`` without samples.
    """
    if not samples:
        return None
    found: dict[str, Any] = {"samples": len(samples)}
    for name in ("sm_mhz", "watts", "celsius"):
        values = [value for sample in samples if (value := getattr(sample, name)) is not None]
        if values:
            found[name] = dict(
                zip(("p10", "median", "p90"), map(float, np.quantile(values, (0.1, 0.5, 0.9))), strict=True)
            )
    told = [sample.reasons for sample in samples if sample.reasons is not None]
    if told:
        counts = Counter(name for reasons in told for bit, name in REASONS.items() if reasons & bit)
        found["slowed_by"] = {name: count / len(told) for name, count in counts.items()}
    return found
