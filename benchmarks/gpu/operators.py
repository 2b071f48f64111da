"""Part a: tests that need a GPU, the operators compared with others, and predicted peaks of memory with measured ones.

The five shapes are those of the course notebook, whose own figures for the largest one stand beside ours. A peak counts
parameters, input and gradients, as the notebook's does.
"""

import re
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch
from torch.nn import functional as F

from benchmarks import baselines, loss, swiglu
from benchmarks.charts import LOWER, Measure, bar_plot
from benchmarks.commands import ROOT, finish
from benchmarks.gpu.runner import Machine, Part, Task, with_target
from benchmarks.harness import measure
from benchmarks.rows import Row, columns
from benchmarks.workloads import model_config
from lightning_llm.accounting.memory import step_memory
from lightning_llm.io.units import GIB

MLPS = ("standard", "notebook 0", "notebook 1", "checkpoint", "ours 0", "ours 1", "norm + standard", "ours 2", "liger")
LOSSES = ("plain", "ours", "torch", "liger")
LARGEST = "4x1024x4096x16384x5"
ROUNDS = 100
MUST_PEAKS = 6  # so many of the configs below
MARKED = re.compile(r"mark\.gpu|needs_cuda")  # in a file with tests for a GPU
NO_LIGER = "liger-kernel is not installed, or there is no CUDA"
# The largest shape in float32 on the notebook's GPU: peak as it prints it, seconds forward and backward.
COURSE = {"ours 0": (14.391, 0.993 + 2.016), "ours 1": (11.391, 0.994 + 2.668)}
TARGETS = {
    "ours 0": {"whole_peak_bytes": 11.3 * GIB, "ratio": 1.00},
    "ours 1": {"whole_peak_bytes": 9.2 * GIB, "ratio": 1.22},
}
LOSS_TARGETS = {"peak_ratio": 0.12, "ratio": 1.0}
_124M, _1_3B = "12x12x768x2048x1024x8x50304", "24x16x2048x5504x2048x4x50304"
_OPTIMIZED = {"mlp": "memory_optimized_swiglu"}
_GPT2 = {"norm": "layernorm", "position": "learned", "mlp": "gelu_tanh"}
# Configs whose predicted peak is compared with the allocator's: sizes, precision, options of the model.
CONFIGS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "level 0": (_124M, "bf16-mixed", _OPTIMIZED),
    "standard MLP": (_124M, "bf16-mixed", {"mlp": "swiglu"}),
    "1.3 B, level 0": (_1_3B, "bf16-mixed", _OPTIMIZED),
    "1.3 B, level 2": (_1_3B, "bf16-mixed", {**_OPTIMIZED, "checkpoint_level": 2}),
    "level 1": (_124M, "bf16-mixed", {**_OPTIMIZED, "checkpoint_level": 1}),
    "level 2": (_124M, "bf16-mixed", {**_OPTIMIZED, "checkpoint_level": 2}),
    "float32": (_124M, "32-true", _OPTIMIZED),
    "float32, standard MLP": (_124M, "32-true", {"mlp": "swiglu"}),
    "bf16-true": (_124M, "bf16-true", _OPTIMIZED),
    "bf16-true, level 2": (_124M, "bf16-true", {**_OPTIMIZED, "checkpoint_level": 2}),
    **{f"recompute {part}": (_124M, "bf16-mixed", {"recompute": part}) for part in ("mlp", "attention", "block")},
    "tied head": (_124M, "bf16-mixed", {"tie_word_embeddings": True}),
    "grouped queries": (_124M, "bf16-mixed", {"num_key_value_heads": 4}),
    "QK-norm": (_124M, "bf16-mixed", {"qk_norm": True}),
    "GPT-2": (_124M, "bf16-mixed", _GPT2),
    "context 4096": ("12x12x768x2048x4096x2x50304", "bf16-mixed", _OPTIMIZED),
    "64 rows of 256": ("12x12x768x2048x256x64x50304", "bf16-mixed", _OPTIMIZED),
    "vocabulary 128256": ("12x12x768x2048x1024x8x128256", "bf16-mixed", _OPTIMIZED),
}
_draw = bar_plot(
    Measure("total_s", 1e3, f"ms, forward and backward{LOWER}"),
    Measure("whole_peak_bytes", 1 / GIB, f"peak memory, GiB{LOWER}"),
)


def draw(rows: Sequence[Row], path: Path, title: str) -> None:
    """Time and peak of MLPs and losses."""
    if shown := [row for row in rows if row.whole_peak_bytes]:
        _draw(shown, path, title)


def tasks(machine: Machine) -> list[Task]:
    """The measurements, by priority."""
    shapes = ["2x8x16x32x2"] if machine.dry_run else swiglu.BENCH.named_shapes["notebook"][::-1]
    vocabularies = ["16x8x40"] if machine.dry_run else [*loss.BENCH.shapes, *loss.BENCH.named_shapes["llama-3-8b"]]
    losses = list(product(vocabularies, ("float32", "bfloat16")))

    def mlps(dtype: str, largest_s: float) -> Iterator[Task]:
        for shape in shapes:
            seconds, run = largest_s if shape == LARGEST else 15, partial(_mlps, machine, shape, dtype)
            yield Task(f"MLP {shape} {dtype}", seconds, run, must=shape == LARGEST)

    return [
        Task("gpu tests", 200, partial(gpu_tests, machine, ""), must=True),
        *mlps("float32", 75),
        *(Task(f"loss {shape} {dtype}", 18, partial(_losses, machine, shape, dtype), True) for shape, dtype in losses),
        *(
            Task(f"peak: {name}", 30 if "1.3" in name else 12, partial(_peak, machine, name), must=number < MUST_PEAKS)
            for number, name in enumerate(CONFIGS)
        ),
        *mlps("bfloat16", 20),
    ]


def gpu_tests(machine: Machine, chosen: str) -> Iterator[Row]:
    """The outcome of every chosen test that is marked ``gpu``; in a dry run of one file, whose tests are skipped.

    ``chosen`` is an expression of pytest's ``-k``, if the command does not give another one; empty: all.
    """
    chosen = chosen if machine.tests is None else machine.tests
    if not find_spec("pytest"):
        yield machine.row("gpu tests", error="pytest is not installed", is_missing=True)
        return
    files = [path for path in sorted((ROOT / "tests").rglob("test_*.py")) if MARKED.search(path.read_text("utf-8"))]
    with tempfile.TemporaryDirectory(prefix="bench-gpu-") as folder:
        report = Path(folder, "report.xml")
        options = ["-q", "-m", "gpu", "-o", "addopts=--import-mode=importlib", "-p", "no:cacheprovider"]
        if find_spec("xdist") and not machine.dry_run:  # most of them compile: 105 s instead of 295 on 16 cores
            options += ["-p", "xdist", "-n", "10", "--dist", "worksteal"]
        if chosen and not machine.dry_run:
            options += ["-k", chosen]
        words = ["pytest", *options, f"--junitxml={report}", *map(str, files[-1:] if machine.dry_run else files)]
        try:
            finish(*words, folder=ROOT, PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")  # a machine may have any plugins
        except RuntimeError:
            if not report.is_file():  # else a test has failed
                raise
        for case in ElementTree.parse(report).iter("testcase"):
            told = next((child for child in case if child.tag in ("failure", "error", "skipped")), None)
            outcome, message = ("passed", "") if told is None else (told.tag, told.get("message") or told.tag)
            error = message.splitlines()[0] if outcome in ("failure", "error") else None
            name, seconds = f"{case.get('classname')}.{case.get('name')}", float(case.get("time") or 0)
            yield machine.row(name, [seconds], outcome=outcome, error=error)


def _has_liger(machine: Machine) -> bool:
    return machine.device == "cuda" and bool(find_spec("liger_kernel"))


def _mlps(machine: Machine, shape: str, dtype: str) -> Iterator[Row]:
    chosen = [name for name in MLPS if name != "liger" or _has_liger(machine)]
    budget_s = 60.0 if (shape, dtype) == (LARGEST, "float32") else 12.0  # where a round may take 5 s
    request = machine.request(swiglu.BENCH, shape, dtype, variants=chosen, rounds=ROUNDS, budget_s=budget_s)
    batch, seq, hidden, intermediate, layers = request.sizes.values()
    held = 3 * layers * hidden * intermediate + 2 * batch * seq * hidden  # parameters, input and its gradient's start
    for row in swiglu.run(request):
        row.whole_peak_bytes = row.peak_bytes + held * getattr(torch, dtype).itemsize
        if (shape, dtype) == (LARGEST, "float32") and row.variant in COURSE:
            row.targets = TARGETS[row.variant]
            row.course_peak_gb, row.course_s = COURSE[row.variant]
        yield row
    if "liger" not in chosen:
        yield request.row("liger", error=NO_LIGER, is_missing=True)


def _losses(machine: Machine, shape: str, dtype: str) -> Iterator[Row]:
    missing = {} if _has_liger(machine) else {"liger": NO_LIGER}
    if not hasattr(F, "linear_cross_entropy"):
        missing["torch"] = f"torch {torch.__version__} has none"
    chosen = [name for name in LOSSES if name not in missing]
    request = machine.request(loss.BENCH, shape, dtype, variants=chosen, rounds=ROUNDS, budget_s=12.0)
    tokens, hidden, vocab = request.sizes.values()
    held = (tokens + vocab) * hidden * getattr(torch, dtype).itemsize + 8 * tokens
    for row in measure(loss.cases(request.sizes, getattr(torch, dtype), request.device), request, tokens=tokens):
        row.whole_peak_bytes = row.peak_bytes + held
        row.targets = LOSS_TARGETS if row.variant == "ours" else None
        yield row
    for name, reason in missing.items():
        yield request.row(name, error=reason, is_missing=True)


def _peak(machine: Machine, name: str) -> Iterator[Row]:
    """The peak of a training step by the allocator and as the accounting predicts it, and what the device holds."""
    shape, precision, fields = CONFIGS[name]
    request = machine.request(baselines.BENCH, "2x2x32x64x16x2x65" if machine.dry_run else shape, precision)
    sizes, device = request.sizes, request.device
    fields = {**fields, **({"num_key_value_heads": 1} if machine.dry_run and "num_key_value_heads" in fields else {})}
    told: dict[str, Any] = {"rows": sizes["rows"], "context_length": sizes["context"]}
    predicted = step_memory(model_config(sizes, **fields), precision=precision, device=device, **told).peak
    before = 0
    if device == "cuda":
        square = torch.ones(64, 64, device=device, requires_grad=True)
        (square @ square).sum().backward()  # type: ignore[no-untyped-call]  # libraries make their workspaces
        del square
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
    found = baselines.ours(sizes, precision, device, baselines.Stages(1), **fields)
    row = request.row(name, found.seconds, predicted_bytes=predicted, targets={"prediction_error": 0.05})
    if device == "cuda":
        row.peak_bytes, row.reserved_bytes = found.peak_bytes - before, torch.cuda.max_memory_reserved()
        row.prediction_error = abs(predicted / row.peak_bytes - 1)
        free, total = torch.cuda.mem_get_info()
        row.device_bytes, row.device_total_bytes = total - free, total
    yield row


PART = Part(
    name="operators",
    tasks=tasks,
    columns={
        **columns("total ms"),
        **with_target("ratio", "ratio", 1, ".2f"),
        **with_target("peak GiB", "whole_peak_bytes", 1 / GIB, ".2f"),
        **with_target("peak ratio", "peak_ratio", 1, ".2f"),
        "course GB": ("course_peak_gb", 1, ".2f"),
        "course ms": ("course_s", 1e3, ",.0f"),
        "predicted GiB": ("predicted_bytes", 1 / GIB, ".2f"),
        **with_target("off %", "prediction_error", 100, ".1f"),
        "reserved GiB": ("reserved_bytes", 1 / GIB, ".2f"),
        "device GiB": ("device_bytes", 1 / GIB, ".2f"),
        "outcome": ("outcome", 1, ""),
    },
    draw=draw,
    files=("lightning_llm/ops", "lightning_llm/accounting", "lightning_llm/model"),
)
