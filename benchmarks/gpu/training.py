"""Part b: steps of 124 M and 1.3 B parameters with their MFU, compared with plain torch and with transformers.

Each side trains in a process of its own and is compiled, ours also eagerly; the time of compiling is not counted. All
sides run once and, where time is left, again in the reverse order. Profiles say which kernels a step of ours and of
nanoGPT spends its time in. Of transformers with and without Liger-Kernel the faster counts.
"""

import re
import statistics
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import baselines
from benchmarks.baselines import Stages
from benchmarks.charts import HIGHER, LOWER, Measure, bar_plot
from benchmarks.gpu.runner import Machine, Part, Task, origin_of, with_target
from benchmarks.harness import Request
from benchmarks.rows import Row, columns
from benchmarks.steps import utilization
from benchmarks.workloads import model_config
from lightning_llm.io.units import GIB
from lightning_llm.measure.timer import Timing

SHAPES = {
    "124 M": "12x12x768x2048x1024x32x50304",
    "1.3 B": "24x16x2048x5504x2048x4x50304",
    "1.3 B, 8 rows": "24x16x2048x5504x2048x8x50304",
    **{f"124 M, {rows} rows": f"12x12x768x2048x1024x{rows}x50304" for rows in (8, 12, 64)},
    "Shakespeare": "6x6x384x1024x256x64x65",  # configs/shakespeare-char-gpu.yaml
}
TOY = "2x2x32x64x16x2x65"
OURS, NANOGPT, LIGER = "ours (compiled)", "nanogpt (compiled)", "liger (compiled)"
TRANSFORMERS, EAGER, AS_ONE = "transformers (compiled)", "ours", "ours (compiled as one)"
STANDARD, CAPTURED, CAPTURED_EAGER = "ours, standard MLP (compiled)", "ours (compiled, captured)", "ours (captured)"
# By model, the sides and how many seconds one takes with empty caches of the compiler; and those that come first.
SIDES = {
    "124 M": (OURS, NANOGPT, TRANSFORMERS, LIGER, EAGER, AS_ONE),
    "1.3 B": (OURS, NANOGPT, TRANSFORMERS, LIGER, EAGER),  # of 24 layers, one graph takes minutes to compile
}
SECONDS = {"124 M": 60, "1.3 B": 100}
MUST = {"124 M": (OURS, NANOGPT, TRANSFORMERS, LIGER, EAGER), "1.3 B": (OURS, NANOGPT)}
PHASES = ("forward", "backward", "optimizer")
STAGES = {"cpu": Stages(3, host=2), "cuda": Stages(100, host=5)}
PROFILED = {"cpu": 2, "cuda": 10}
# What a step of ours should reach, by a part of the card's name, model, and field (benchmarks/README.md).
TARGETS: dict[str, dict[str, dict[str, float]]] = {
    "H200": {
        "124 M": {"over_nanogpt": 1.0, "over_transformers": 1.2},
        "1.3 B": {"mfu": 0.53},
        "1.3 B, 8 rows": {"mfu": 0.55},
        "124 M, 8 rows": {"mfu": 0.30},
        "Shakespeare": {"of_2000_s": 30.0},
    },
    "H100": {"124 M": {"mfu": 0.45}, "124 M, 8 rows": {"mfu": 0.30}, "Shakespeare": {"of_2000_s": 30.0}},
}
OVER = {"over_nanogpt": (NANOGPT,), "over_transformers": (TRANSFORMERS, LIGER)}
TF32 = {"TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1"}  # torch's own variable: TF32 for matmuls, whatever a program sets
draw = bar_plot(
    Measure("tokens_per_s", 1, f"tokens/s{HIGHER}"),
    Measure("mfu", 100, f"MFU, %{HIGHER}"),
    Measure("peak_bytes", 1 / GIB, f"peak, GiB{LOWER}"),
    by=("model", "dtype"),
)


def tasks(machine: Machine) -> list[Task]:
    """The measurements, by priority."""
    models = ["124 M"] if machine.dry_run else list(SIDES)
    sides = [(model, side, SECONDS[model], side in MUST[model]) for model in models for side in SIDES[model]]
    first, second = (
        [
            step(machine, model, side, seconds, number=n, must=n == 1 and is_must)
            for model, side, seconds, is_must in sides
        ]
        for n in (1, 2)
    )
    profiles = [
        step(machine, model, side, SECONDS[model], is_profiled=True, must=(model, side) == ("124 M", OURS))
        for model in models
        for side in (OURS, NANOGPT)
    ]
    wide = [Task(f"124 M, ours in {name}", 30, partial(_wide, machine, name == "TF32")) for name in ("float32", "TF32")]
    return [*first, *profiles, *wide, *([] if machine.dry_run else reversed(second))]


def step(
    machine: Machine,
    model: str,
    side: str,
    seconds: float,
    *,
    number: int = 1,
    is_profiled: bool = False,
    timed: int = 0,
    must: bool = False,
) -> Task:
    """The measurement of a side's steps in bfloat16, and with a profile after them.

    Args:
        machine: Where it is measured.
        model: A name of :data:`SHAPES`.
        side: A variant of the benchmark ``baselines``.
        seconds: About how long it takes.
        number: The round.
        is_profiled: Whether some more steps are profiled.
        timed: How many steps are timed. 0: as many as in all.
        must: Whether it comes first.
    """
    stages = STAGES[machine.device]
    stages = stages._replace(
        timed=stages.timed if machine.dry_run else timed or stages.timed,
        profiled=PROFILED[machine.device] if is_profiled else 0,
    )
    name = f"{model}, {side}, {'profile' if is_profiled else f'round {number}'}"
    return Task(name, seconds, partial(_step, machine, model, side, number, stages), must)


def derive(rows: Iterable[Row]) -> None:
    """Complete the rows of ours by how many times the tokens per second of the others they are.

    Only rows of the same GPU, torch, and code are compared.
    """
    rows = list(rows)
    speeds: dict[tuple[Any, ...], list[float]] = {}
    for row in rows:
        if row.tokens_per_s and row.dtype == "bfloat16":
            speeds.setdefault((origin_of(row), row.model, row.variant), []).append(row.tokens_per_s)
    for row in rows:
        if not (row.tokens_per_s and (row.variant or "").startswith("ours") and row.dtype == "bfloat16"):
            continue
        by_model = next((found for card, found in TARGETS.items() if f"NVIDIA {card}" in (row.machine or "")), {})
        row.targets = by_model.get(row.model)
        for field, sides in OVER.items():
            theirs = [speeds.get((origin_of(row), row.model, side)) for side in sides]
            if medians := [statistics.median(found) for found in theirs if found]:
                mine = statistics.median(speeds[origin_of(row), row.model, row.variant])
                setattr(row, field, mine / max(medians))


def request_of(machine: Machine, model: str, dtype: str) -> Request:
    """The sizes of a model of :data:`SHAPES`; in a dry run, a toy's."""
    request = machine.request(baselines.BENCH, TOY if machine.dry_run else SHAPES[model], dtype)
    request.sizes["tied"] = model.startswith("124 M")
    return request


def _step(machine: Machine, model: str, side: str, number: int, stages: Stages) -> Iterator[Row]:
    request = request_of(machine, model, "bfloat16")
    fields: dict[str, Any] = {"model": model, "round": number}
    if why := baselines.lacking(side, request.device):
        yield request.row(side, error=why, is_missing=True, **fields)
        return
    options = {"dropout": 0.2} if model == "Shakespeare" else {}
    job = baselines.job_of(side, request, stages, **options)
    code = CompiledCode(machine, f"{model}, {side}") if job["compiled"] else None
    fields["has_saved_code"] = code.load() if code else None
    row = row_of(machine, request, side, baselines.measure(job), **fields)
    if code:
        code.save()
    row.of_2000_s = row.first_step_s + 2000 * row.total_s if model == "Shakespeare" else None
    yield row


def _wide(machine: Machine, is_tf32: bool) -> Iterator[Row]:
    """A row of ours in float32, with TF32 or without."""
    request = request_of(machine, "124 M", "float32")
    # a fresh process: torch reads the variable when it is loaded
    result = baselines.run_side("ours", request, TF32 if is_tf32 else {})
    kind, fields = "tf32" if is_tf32 else "float32", {"model": "124 M", "round": 1, "tf32": is_tf32}
    yield row_of(machine, request, "ours, TF32" if is_tf32 else "ours", result, kind=kind, **fields)


def row_of(
    machine: Machine, request: Request, variant: str, result: dict[str, Any], kind: str = "", **fields: Any
) -> Row:
    """A row with all that was found; ``kind`` is that of the matmuls, if not the request's dtype."""
    timing, sizes = Timing(tuple(result["seconds"])), request.sizes
    speed = sizes["rows"] * sizes["context"] / timing.median
    share = utilization(model_config(sizes), sizes["context"], speed, machine.device, kind or request.dtype)
    fields |= {name: result[name] for name in ("ran", "first_step_s", "host_seconds", "profile")}
    fields |= {"times_s": result["seconds"], "peak_bytes": int(result["peak_bytes"]), "_window": result["window"]}
    return request.row(variant, timing, tokens_per_s=speed, mfu=share, **fields)


class CompiledCode:
    """Compiled code of a side: saved to a file after a measurement, loaded before the next one on another machine.

    The compiler itself decides what fits the torch, the GPU, and the code.
    """

    def __init__(self, machine: Machine, name: str) -> None:
        file = re.sub(r"\W+", "-", name).strip("-") + ".bin"
        self._saved = [Path(folder, "compiled", file) for folder in (machine.out, machine.inputs) if folder]
        self._target = self._saved[0] if machine.out else None

    def load(self) -> bool:
        """Load it, if it was saved; returns whether it was."""
        path = next((path for path in self._saved if path.is_file()), None)
        if path is None:
            return False
        return torch.compiler.load_cache_artifacts(path.read_bytes()) is not None

    def save(self) -> None:
        """Save what this process has compiled or used."""
        artifacts = torch.compiler.save_cache_artifacts()
        if artifacts is not None and self._target is not None:
            self._target.parent.mkdir(parents=True, exist_ok=True)
            self._target.write_bytes(artifacts[0])


def host_ms(row: Row, phase: str) -> float | None:
    """The median host time of a phase in milliseconds, over steps that began with an empty queue."""
    found = [step[phase] for step in row.host_seconds or [] if phase in step]
    return 1e3 * statistics.median(found) if found else None


PART = Part(
    name="training",
    tasks=tasks,
    columns={
        **columns("total ms", "p20", "p80", "tokens/s"),
        **with_target("MFU %", "mfu", 100, ".1f", "≥"),
        **with_target("× nanogpt", "over_nanogpt", 1, ".2f", "≥"),
        **with_target("× transformers", "over_transformers", 1, ".2f", "≥"),
        "peak GiB": ("peak_bytes", 1 / GIB, ".1f"),
        "MHz": (lambda row: row.gpu and row.gpu.get("sm_mhz", {}).get("median"), 1, ".0f"),
        "W": (lambda row: row.gpu and row.gpu.get("watts", {}).get("median"), 1, ".0f"),
        **{f"host {phase} ms": (partial(host_ms, phase=phase), 1, ".1f") for phase in PHASES},
        "kernels": (lambda row: row.profile and row.profile["kernels_per_step"], 1, ".0f"),
        "busy ms": (lambda row: row.profile and row.profile["busy_us"], 1e-3, ".1f"),
        "idle %": (lambda row: row.profile and row.profile["idle_share"], 100, ".1f"),
        **with_target("2,000 steps s", "of_2000_s", 1, ".1f"),
    },
    draw=draw,
    files=baselines.BENCH.files,
    complete=derive,
)
