"""``lightning-llm bench peers``: whole training steps of ours beside those of transformers and litgpt.

Every side has a process of its own and they take turns, round by round: same shape, same precision, same number of
threads. ``ours`` goes through `fit`'s Trainer with all its defaults, freed memory kept; the others run as their users
run them. With ``(kept)`` behind its name a side runs with freed memory kept as well, ``ours (given back)`` without.
``(compiled)`` is by ``torch.compile``: the blocks of ours, the whole model of the others as litgpt's trainer does; what
compiling takes is not counted. ``products alone`` is no model: a step's products with weights and nothing else, which
no program can undercut that makes them with torch.
"""

import importlib.util
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console
from rich.table import Table

from lightning_llm.bench.harness import Request, Row, Shape, chosen_names, describe_machine, draw_bars

SHAPES = {
    "shakespeare": ["6x6x384x1024x256x64x65"],
    "124m": ["12x12x768x2048x1024x8x50304"],
    "1.3b": ["24x16x2048x5504x2048x4x50304"],
}
DEFAULT_SHAPES = ["shakespeare"]
STEPS = {"cpu": 3, "cuda": 30}  # of each round, after the warm-up


class Variant(NamedTuple):
    """How a side runs."""

    side: str
    keep_freed_memory: bool = False
    compiled: bool = False


VARIANTS = {
    "transformers": Variant("transformers"),
    "litgpt": Variant("litgpt"),
    "ours": Variant("ours", keep_freed_memory=True),
    "transformers (kept)": Variant("transformers", keep_freed_memory=True),
    "litgpt (kept)": Variant("litgpt", keep_freed_memory=True),
    "ours (given back)": Variant("ours"),
    "transformers (compiled)": Variant("transformers", compiled=True),
    "litgpt (compiled)": Variant("litgpt", compiled=True),
    "ours (compiled)": Variant("ours", keep_freed_memory=True, compiled=True),
    "products alone": Variant("products", keep_freed_memory=True),
}


def run(asked: Request) -> Iterator[Row]:
    """A row for each side, shape and dtype; ``ratio`` is its time over ours."""
    own = ("ours", "products")
    here = [name for name, how in VARIANTS.items() if how.side in own or importlib.util.find_spec(how.side)]
    for name in asked.variants or ():
        if name in VARIANTS and name not in here:
            side = VARIANTS[name].side
            raise ValueError(
                f"variants {name!r}: {side} is not installed; python -m pip install {side}, or leave it out"
            )
    variants = chosen_names(here, asked.variants)
    for shape in asked.shapes:
        sizes = Shape.of(shape)
        for dtype in asked.dtypes:
            yield from _measure(variants, shape, sizes, str(dtype).removeprefix("torch."), asked)


def _measure(variants: Sequence[str], shape: str, sizes: Shape, dtype: str, asked: Request) -> Iterator[Row]:
    if dtype not in ("float32", "bfloat16"):
        raise ValueError(f"dtype {dtype}: peers are compared in float32 and in bfloat16 (autocast)")
    found: dict[str, list[dict[str, float]]] = {name: [] for name in variants}
    start = time.perf_counter()
    for _ in range(asked.rounds):
        for name, results in found.items():
            results.append(_run_side(name, shape, dtype, asked.device))
        if asked.budget_s is not None and time.perf_counter() - start > asked.budget_s:
            break
    medians = {name: statistics.median(one["median_s"] for one in results) for name, results in found.items()}
    for name, results in found.items():
        times = [one["median_s"] for one in results]
        yield Row(
            bench="peers",
            variant=name,
            shape=shape,
            dtype=dtype,
            device=asked.device,
            machine=describe_machine(asked.device),
            total_s=medians[name],
            total_p20_s=min(times),
            total_p80_s=max(times),
            ratio=medians[name] / medians["ours"] if "ours" in medians else None,
            peak_bytes=int(max(one["peak_bytes"] for one in results)),
            tokens_per_s=sizes.rows * sizes.context / medians[name],
        )


def _run_side(name: str, shape: str, dtype: str, device: str) -> dict[str, float]:
    job = {"shape": shape, "dtype": dtype, "device": device, "steps": STEPS[device], **VARIANTS[name]._asdict()}
    command = [sys.executable, "-m", "benchmarks.baseline_process", json.dumps(job, allow_nan=False)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{name} failed: {(done.stderr.strip().splitlines() or ['no word'])[-1]}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def print_table(rows: Sequence[Row], console: Console) -> None:
    """Tokens per second and memory of each side."""
    for key in dict.fromkeys((row.shape, row.dtype) for row in rows):
        table = Table(title=" ".join(key))
        table.add_column("side", no_wrap=True)
        for column in ("ms a step", "tokens/s", "time over ours", "peak MiB"):
            table.add_column(column, justify="right")
        for row in rows:
            if (row.shape, row.dtype) == key:
                ratio = "–" if row.ratio is None else f"{row.ratio:.2f}"
                cells = (f"{1000 * (row.total_s or 0):.0f}", f"{row.tokens_per_s:,.0f}", ratio)
                table.add_row(row.variant, *cells, f"{(row.peak_bytes or 0) / 2**20:,.0f}")
        console.print(table)
    console.print(f"{torch.get_num_threads()} threads each")


def draw(rows: Sequence[Row], path: Path, title: str) -> None:
    """A bar of tokens per second for each side."""
    values = {f"{row.variant}, {row.dtype}": row.tokens_per_s or 0 for row in rows}
    draw_bars(values, path, title, unit="tokens per second of whole training steps")
