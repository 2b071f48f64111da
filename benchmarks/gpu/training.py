"""Part b: steps of 124 M and 1.3 B parameters with their MFU, compared with plain torch and with transformers.

Each side trains in a process of its own and is compiled, ours also eagerly; the time of compiling is not counted. All
sides run once, and again where time is left. Then a profile says which kernels a step of ours spends its time in.
"""

import statistics
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch

from benchmarks import baselines
from benchmarks.gpu.runner import GIB, Machine, Part, Task, with_target
from lightning_llm.accounting.counts import step_flops
from lightning_llm.accounting.hardware import find_device
from lightning_llm.bench.harness import describe_machine
from lightning_llm.bench.plots import HIGHER, LOWER, Measure, bar_plot
from lightning_llm.bench.rows import Columns, Row, columns
from lightning_llm.bench.workloads import Sizes, model_config

SHAPES = {"124 M": "12x12x768x2048x1024x32x50304", "1.3 B": "24x16x2048x5504x2048x4x50304"}
TOY = "2x2x32x64x16x2x65"
OURS, NANOGPT, LIGER = "ours (compiled)", "nanogpt (compiled)", "liger (compiled)"
SIDES = (OURS, NANOGPT, LIGER, "ours", "ours (compiled as one)")
MFU = {"124 M": 0.50, "1.3 B": 0.55}
OVER = {"over_nanogpt": (NANOGPT, 1.15), "over_transformers": (LIGER, 1.3)}
TF32 = {"TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1"}  # torch's own variable: TF32 for matmuls, whatever a program sets
KERNELS = 20  # of the profile
PROFILED_STEPS = 5
COLUMNS: Columns = {
    **columns("total ms", "tokens/s"),
    **with_target("MFU %", "mfu", 100, ".1f", "≥"),
    **with_target("× nanogpt", "over_nanogpt", 1, ".2f", "≥"),
    **with_target("× transformers", "over_transformers", 1, ".2f", "≥"),
    "peak GiB": ("peak_bytes", 1 / GIB, ".1f"),
    "slowest kernel": (lambda row: row.kernels and row.kernels[0]["name"][:40], 1, ""),
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
    rounds = {
        number: [
            Task(f"{model}, {side}, round {number}", 50, partial(_step, machine, model, side, number))
            for model in models
            for side in SIDES
        ]
        for number in (1, 2)
    }
    profiles = [Task(f"{model}, profile", 40, partial(_profile, machine, model)) for model in models]
    wide = [
        Task(f"124 M, ours in {name}", 30, partial(_step, machine, "124 M", "ours", 1, "float32", environment))
        for name, environment in (("float32", {}), ("TF32", TF32))
    ]
    return [*rounds[1], *profiles, *wide, *([] if machine.dry_run else rounds[2])]


def derive(rows: Iterable[Row]) -> None:
    """Complete the rows of ours by how many times the tokens per second of the others they are."""
    speeds: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        if row.tokens_per_s and row.dtype == "bfloat16":
            speeds.setdefault((row.model, row.variant), []).append(row.tokens_per_s)
    for row in rows:
        if row.variant == OURS and row.tokens_per_s:
            row.targets = {"mfu": MFU[row.model], **{field: least for field, (_, least) in OVER.items()}}
            for field, (side, _) in OVER.items():
                if theirs := speeds.get((row.model, side)):
                    setattr(row, field, statistics.median(speeds[row.model, OURS]) / statistics.median(theirs))


def _step(
    machine: Machine,
    model: str,
    side: str,
    number: int,
    dtype: str = "bfloat16",
    environment: Mapping[str, str] | None = None,
) -> Iterator[Row]:
    request = machine.request(baselines.BENCH, TOY if machine.dry_run else SHAPES[model], dtype)
    request.sizes["tied"] = model == "124 M"
    fields: dict[str, Any] = {
        "model": model,
        "round": number,
        **({"tf32": bool(environment)} if dtype == "float32" else {}),
    }
    variant = f"{side}, TF32" if environment else side
    if why := baselines.lacking(side, request.device):
        yield request.row(variant, error=why, **fields)
        return
    result = baselines.run_side(side, request, environment)
    tokens = request.sizes["rows"] * request.sizes["context"]
    speed = tokens / result["median_s"]
    share = utilization(request.sizes, speed, machine.device, "tf32" if environment else dtype)
    peak = int(result["peak_bytes"])
    yield request.row(variant, [result["median_s"]], tokens_per_s=speed, mfu=share, peak_bytes=peak, **fields)


def utilization(sizes: Sizes, tokens_per_s: float, device: str, dtype: str) -> float | None:
    """The share of the device's peak that the model's FLOPs take; ``None`` for a device whose peak is not known."""
    try:
        peak = find_device(describe_machine(device)).flops[dtype]
    except (ValueError, KeyError):
        return None
    return step_flops(model_config(sizes), tokens=1, context_length=sizes["context"]).model * tokens_per_s / peak


def _profile(machine: Machine, model: str) -> Iterator[Row]:
    """The kernels in which compiled steps of ours spend most of the device's time, warm-up steps included."""
    request = machine.request(baselines.BENCH, TOY if machine.dry_run else SHAPES[model], "bfloat16")
    request.sizes["tied"] = model == "124 M"
    kinds = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[kinds.CPU if machine.dry_run else kinds.CUDA]) as profile:
        baselines.ours(request.sizes, request.dtype, request.device, PROFILED_STEPS, compiled=not machine.dry_run)
    field = "self_cpu_time_total" if machine.dry_run else "self_device_time_total"
    events = sorted(profile.key_averages(), key=lambda event: -getattr(event, field))
    total = sum(getattr(event, field) for event in events) or 1
    steps = PROFILED_STEPS + baselines.WARM_UP
    kernels = [
        {"name": event.key, "us_per_step": getattr(event, field) / steps, "share": getattr(event, field) / total}
        for event in events[:KERNELS]
    ]
    yield request.row("profile", model=model, kernels=kernels)


PART = Part(
    name="training",
    tasks=tasks,
    columns=COLUMNS,
    draw=draw,
    files=baselines.BENCH.files,
    complete=derive,
)
