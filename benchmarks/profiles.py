"""The kernels of profiled steps: how many, how long each takes, and how long the GPU waits between them."""

import json
import re
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

ON_DEVICE = {"cuda": ("kernel", "gpu_memcpy", "gpu_memset"), "cpu": ("cpu_op",)}  # categories of events
BY_HOST = ("cuda_runtime", "cuda_driver")
# Kinds of kernels by what their names contain; the first that fits counts.
KINDS = {
    "attention": "flash|fmha|sdpa|attention",
    "ours": "^_gate_|^_losses_of_rows",
    "matmul": "gemm|nvjet|cutlass|cublas",
    "optimizer": "multi_tensor|adam",
    "copy": "memcpy|memset|copy_kernel",
    "elementwise": "triton|elementwise|reduce|norm",
}


class Profile:
    """Profiles steps between ``start`` and ``stop``; does nothing for no steps. On a CPU, operators are the kernels."""

    def __init__(self, device: str, steps: int) -> None:
        self._device, self._steps = device, steps
        self._profile: Any = None
        self._found: dict[str, Any] | None = None

    def start(self) -> None:
        """The profiled steps follow."""
        if self._steps:
            kinds = torch.profiler.ProfilerActivity
            self._profile = torch.profiler.profile(activities=[kinds.CUDA if self._device == "cuda" else kinds.CPU])
            self._profile.start()

    def stop(self) -> None:
        """The profiled steps have been launched."""
        if self._profile is not None:
            self._profile.stop()  # waits for the device
            with tempfile.TemporaryDirectory(prefix="bench-profile-") as folder:
                path = Path(folder, "trace.json")
                self._profile.export_chrome_trace(str(path))
                # not by the reader of untrusted files: its limit is about 2,500 kernels in each of ten steps
                events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
            self._found = summary(events, self._steps, self._device)

    def found(self) -> dict[str, Any] | None:
        """The :func:`summary`; ``None`` if nothing was profiled."""
        return self._found


def summary(events: Iterable[Mapping[str, Any]], steps: int, device: str = "cuda") -> dict[str, Any]:
    """Kernels, launches and gaps of one step, from the events of a trace.

    Args:
        events: Of a trace in Chrome's format, with times in microseconds.
        steps: How many steps it has.
        device: Whose events count as kernels.

    Returns:
        ``kernels``: by name, slowest first, the launches of a step and their microseconds. ``us_by_kind``: those of
        each kind. ``kernels_per_step``: how many run. ``launches_per_step``: how often the host launched something; a
        CUDA graph counts once. ``busy_us``: how long any kernel runs. ``idle_share``: the share of time without a
        kernel, in the later half of the trace, because the queue is empty when the first step begins.
    """
    events = list(events)
    kernels = [event for event in events if event.get("cat") in ON_DEVICE[device] and "dur" in event]
    launches = [event for event in events if event.get("cat") in BY_HOST and "Launch" in event["name"]]
    counts, spent, by_kind = Counter[str](), Counter[str](), Counter[str]()
    for event in kernels:
        counts[event["name"]] += 1
        spent[event["name"]] += event["dur"] / steps
        by_kind[kind_of(event["name"])] += event["dur"] / steps
    spans = sorted((event["ts"], event["ts"] + event["dur"]) for event in kernels)
    busy, _ = _busy_and_idle(spans)
    middle = (spans[0][0] + max(end for _, end in spans)) / 2 if spans else 0.0
    late_busy, late_idle = _busy_and_idle([span for span in spans if span[0] >= middle])
    return {
        "kernels": [{"name": name, "count": counts[name] / steps, "us": us} for name, us in spent.most_common()],
        "us_by_kind": dict(by_kind),
        "kernels_per_step": len(kernels) / steps,
        "launches_per_step": len(launches) / steps,
        "busy_us": busy / steps,
        "idle_share": late_idle / (late_busy + late_idle) if late_busy else None,
    }


def _busy_and_idle(spans: Iterable[tuple[float, float]]) -> tuple[float, float]:
    """How long any of some sorted spans lasts, and how long none does between the first and the last."""
    busy = idle = 0.0
    reached: float | None = None
    for begin, end in spans:
        if reached is None:
            reached = begin
        idle += max(0.0, begin - reached)
        busy += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return busy, idle


def kind_of(kernel: str) -> str:
    """The kind of a kernel, by its name."""
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, kernel, re.IGNORECASE)), "other")
