"""Part b: steps of 124 M and 1.3 B parameters with their MFU, compared with plain torch and with transformers.

Each side trains in a process of its own and is compiled, ours also eagerly; the time of compiling is not counted. All
sides run once and, where time is left, again in the reverse order. A profile says which kernels a step of ours spends
its time in. Of transformers with and without Liger-Kernel the faster counts.
"""

import re
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch
from lightning.pytorch import Callback

from benchmarks import baselines
from benchmarks.gpu.runner import Machine, Part, Task, with_target
from benchmarks.steps import utilization
from lightning_llm.bench.harness import Request
from lightning_llm.bench.plots import HIGHER, LOWER, Measure, bar_plot
from lightning_llm.bench.rows import Row, columns
from lightning_llm.bench.workloads import model_config
from lightning_llm.io.units import GIB
from lightning_llm.measure.timer import now

SHAPES = {"124 M": "12x12x768x2048x1024x32x50304", "1.3 B": "24x16x2048x5504x2048x4x50304"}
TOY = "2x2x32x64x16x2x65"
OURS, NANOGPT, LIGER = "ours (compiled)", "nanogpt (compiled)", "liger (compiled)"
TRANSFORMERS, EAGER, AS_ONE = "transformers (compiled)", "ours", "ours (compiled as one)"
# By model, the sides and how many seconds one takes with empty caches of the compiler; and those that come first.
SIDES = {
    "124 M": (OURS, NANOGPT, TRANSFORMERS, LIGER, EAGER, AS_ONE),
    "1.3 B": (OURS, NANOGPT, TRANSFORMERS, LIGER, EAGER),  # of 24 layers, one graph takes minutes to compile
}
SECONDS = {"124 M": 60, "1.3 B": 100}
MUST = {"124 M": (OURS, NANOGPT, TRANSFORMERS, LIGER, EAGER), "1.3 B": (OURS, NANOGPT)}
MFU = {"124 M": 0.50, "1.3 B": 0.55}
OVER = {"over_nanogpt": ((NANOGPT,), 1.15), "over_transformers": ((TRANSFORMERS, LIGER), 1.3)}
TF32 = {"TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1"}  # torch's own variable: TF32 for matmuls, whatever a program sets
KERNELS = 20  # of the profile
PROFILED_STEPS = 5
# Kinds of kernels by what their names contain; the first that fits counts.
KINDS = {
    "attention": "flash|fmha|sdpa|attention",
    "ours": "^_gate_|^_losses_of_rows",
    "matmul": "gemm|nvjet|cutlass|cublas",
    "optimizer": "multi_tensor|adam",
    "copy": "memcpy|memset|copy_kernel",
    "elementwise": "triton|elementwise|reduce|norm",
}
draw = bar_plot(
    Measure("tokens_per_s", 1, f"tokens/s{HIGHER}"),
    Measure("mfu", 100, f"MFU, %{HIGHER}"),
    Measure("peak_bytes", 1 / GIB, f"peak, GiB{LOWER}"),
    by=("model", "dtype"),
)


def tasks(machine: Machine) -> list[Task]:
    """The measurements, by priority."""
    models = list(SHAPES)[:1] if machine.dry_run else SHAPES
    sides = [(model, side, SECONDS[model], side in MUST[model]) for model in models for side in SIDES[model]]
    first, second = (
        [
            Task(f"{model}, {side}, round {n}", seconds, partial(_step, machine, model, side, n), n == 1 and is_must)
            for model, side, seconds, is_must in sides
        ]
        for n in (1, 2)
    )
    profiles = [Task(f"{model}, profile", 40, partial(_profile, machine, model), model == "124 M") for model in models]
    step = partial(_step, machine, "124 M", "ours", 1)
    wide = [Task(f"124 M, ours in {name}", 30, partial(step, name == "TF32")) for name in ("float32", "TF32")]
    return [*first, *profiles, *wide, *([] if machine.dry_run else reversed(second))]


def derive(rows: Iterable[Row]) -> None:
    """Complete the rows of ours by how many times the tokens per second of the others they are."""
    speeds: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        if row.tokens_per_s and row.dtype == "bfloat16":
            speeds.setdefault((row.model, row.variant), []).append(row.tokens_per_s)
    for row in rows:
        if row.variant == OURS and row.tokens_per_s:
            row.targets = {"mfu": MFU[row.model], **{field: least for field, (_, least) in OVER.items()}}
            for field, (sides, _) in OVER.items():
                if theirs := [statistics.median(found) for side in sides if (found := speeds.get((row.model, side)))]:
                    setattr(row, field, statistics.median(speeds[row.model, OURS]) / max(theirs))


def _request(machine: Machine, model: str, dtype: str) -> Request:
    request = machine.request(baselines.BENCH, TOY if machine.dry_run else SHAPES[model], dtype)
    request.sizes["tied"] = model == "124 M"
    return request


def _step(machine: Machine, model: str, side: str, number: int, tf32: bool | None = None) -> Iterator[Row]:
    """A row of a side in bfloat16, or in float32 with TF32 or without."""
    request = _request(machine, model, "bfloat16" if tf32 is None else "float32")
    fields: dict[str, Any] = {"model": model, "round": number, **({} if tf32 is None else {"tf32": tf32})}
    variant = f"{side}, TF32" if tf32 else side
    if why := baselines.lacking(side, request.device):
        yield request.row(variant, error=why, is_missing=True, **fields)
        return
    result, context = baselines.run_side(side, request, TF32 if tf32 else {}), request.sizes["context"]
    speed, kind = request.sizes["rows"] * context / result["median_s"], "tf32" if tf32 else request.dtype
    share = utilization(model_config(request.sizes), context, speed, machine.device, kind)
    fields |= {"mfu": share, "peak_bytes": int(result["peak_bytes"]), "ran": result["ran"]}
    yield request.row(variant, [result["median_s"]], tokens_per_s=speed, **fields)


class _Profiled(Callback):
    """Profiles the steps after the warm-up, and measures how long they take together."""

    def __init__(self, device: str) -> None:
        kinds = torch.profiler.ProfilerActivity
        self.profile = torch.profiler.profile(activities=[kinds.CUDA if device == "cuda" else kinds.CPU])
        self.seconds, self._device, self._left = 0.0, device, baselines.WARM_UP[device] + PROFILED_STEPS

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        self._left -= 1
        if self._left == PROFILED_STEPS:
            self.profile.start()
            self.seconds = -now(self._device)
        elif self._left == 0:
            self.seconds += now(self._device)
            self.profile.stop()


def _profile(machine: Machine, model: str) -> Iterator[Row]:
    """The kernels in which compiled steps of ours spend most of the device's time, also by kind, and its idle share."""
    request = _request(machine, model, "bfloat16")
    profiled = _Profiled(request.device)
    options: dict[str, Any] = {"compiled": not machine.dry_run, "callbacks": [profiled]}
    baselines.ours(request.sizes, request.dtype, request.device, PROFILED_STEPS, **options)
    field = f"self_{'cpu' if machine.dry_run else 'device'}_time_total"
    spent = {event.key: getattr(event, field) / PROFILED_STEPS for event in profiled.profile.key_averages()}  # µs
    total, step_us = sum(spent.values()) or 1, 1e6 * profiled.seconds / PROFILED_STEPS
    by_kind = Counter[str]()
    for name, us in spent.items():
        by_kind[kind_of(name)] += us
    slowest = sorted(spent.items(), key=lambda item: -item[1])[:KERNELS]
    kernels = [{"name": name, "us_per_step": us, "share": us / total} for name, us in slowest]
    idle = None if machine.dry_run else 1 - total / step_us
    yield request.row("profile", model=model, kernels=kernels, us_by_kind=by_kind, step_us=step_us, idle_share=idle)


def kind_of(kernel: str) -> str:
    """The kind of a kernel, by its name."""
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, kernel, re.IGNORECASE)), "other")


PART = Part(
    name="training",
    tasks=tasks,
    columns={
        **columns("total ms", "tokens/s"),
        **with_target("MFU %", "mfu", 100, ".1f", "≥"),
        **with_target("× nanogpt", "over_nanogpt", 1, ".2f", "≥"),
        **with_target("× transformers", "over_transformers", 1, ".2f", "≥"),
        "peak GiB": ("peak_bytes", 1 / GIB, ".1f"),
        "idle %": ("idle_share", 100, ".1f"),
        "slowest kernel": (lambda row: row.kernels and row.kernels[0]["name"][:40], 1, ""),
    },
    draw=draw,
    files=baselines.BENCH.files,
    complete=derive,
)
