"""``python -m benchmarks baselines``: whole training steps of ours, compared with those of transformers and litgpt.

Every side has a process of its own, and they are interleaved: same shape, same precision, same number of threads.
``ours`` goes through `fit`'s Trainer with all its defaults, freed memory kept; the others run as their users run them.
A side with ``(kept)`` after its name runs with freed memory kept as well, ``ours (given back)`` without. ``(compiled)``
is by ``torch.compile``: the blocks of ours, the whole model of the others as litgpt's trainer does; the time of
compiling is not counted. ``products alone`` is no model: a step's matmuls with weights and nothing else, which no
program can undercut that computes them with torch.
"""

import dataclasses
import importlib.util
from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch

from benchmarks.baseline_process import measure
from lightning_llm.bench.harness import Request, Row, columns
from lightning_llm.bench.plots import bar_plot
from lightning_llm.measure.resident import in_fresh_processes

NAMES = ("layers", "heads", "hidden", "intermediate", "context", "rows", "vocab")
SHAPES = {
    "shakespeare": ["6x6x384x1024x256x64x65"],
    "124m": ["12x12x768x2048x1024x8x50304"],
    "1.3b": ["24x16x2048x5504x2048x4x50304"],
}
DEFAULT_SHAPES = ["shakespeare"]
DTYPES = ("float32", "bfloat16")  # the second by autocast
STEPS = {"cpu": 3, "cuda": 30}  # of each round, after the warm-up
COLUMNS = columns("total ms", "tokens/s", "ratio", "peak MiB")  # the ratio is of time, over ours
draw = bar_plot("tokens_per_s", 1, "tokens per second of whole training steps")


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
    """A row for each side; ``ratio`` is its time over ours."""
    own = ("ours", "products")
    here = [name for name, how in VARIANTS.items() if how.side in own or importlib.util.find_spec(how.side)]
    for name in asked.variants or ():
        if name in VARIANTS and name not in here:
            side = VARIANTS[name].side
            fix = f"{side} is not installed; python -m pip install {side}, or leave it out"
            raise ValueError(f"variants {name!r}: {fix}")
    found = asked.interleaved({name: partial(_run_side, name, asked) for name in asked.chosen(here)})
    tokens, rows = asked.sizes["rows"] * asked.sizes["context"], {}
    for name, results in found.items():
        row = asked.row(name, [one["median_s"] for one in results])
        peak = int(max(one["peak_bytes"] for one in results))
        rows[name] = dataclasses.replace(row, peak_bytes=peak, tokens_per_s=tokens / (row.total_s or 1))
    ours = rows["ours"].total_s if "ours" in rows else None
    yield from (dataclasses.replace(row, ratio=(row.total_s or 0) / ours if ours else None) for row in rows.values())


def _run_side(name: str, asked: Request) -> dict[str, float]:
    job = {"sizes": asked.sizes, "dtype": asked.dtype, "device": asked.device, "steps": STEPS[asked.device]}
    return in_fresh_processes(measure, [{**job, **VARIANTS[name]._asdict()}], name=name)[0]


def notes(rows: Sequence[Row]) -> list[str]:
    """What the ratio is, and the threads of a side."""
    return ["ratio: time over ours", f"{torch.get_num_threads()} threads each"]
