"""``lightning-llm bench ladder``: the techniques one rung at a time, each measured against the one below.

Every rung trains the same model on the same batch, whole steps, in a process of its own; the processes take turns. The
lowest is what a course notebook writes; ``ladder_rungs.py`` has the others. In the first round the loss curve of each
rung is compared with that of the lowest: with all products in float32, where nothing but rounding may part them, and
then in the rung's own precision. A rung whose losses differ by more than rounding explains ends the bench.
"""

import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.table import Column, Table

from lightning_llm.accounting.counts import step_flops
from lightning_llm.accounting.hardware import find_device
from lightning_llm.bench.harness import MIB, Request, Row, chosen_names, describe_machine
from lightning_llm.bench.ladder_rungs import MORE_ROWS, Settings, lacking, rungs, tolerance
from lightning_llm.bench.peer_process import Shape
from lightning_llm.io.console import Console
from lightning_llm.model.config import ModelConfig

SHAPES: dict[str, list[str]] = {"124m": ["12x12x768x2048x1024x8x50304"]}
DEFAULT_SHAPES = ["4x4x256x704x128x8x4096"]
STEPS = {"cpu": 5, "cuda": 30}  # timed, of each round
_GROWING_SEGMENTS = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}

Found = dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rung(Row):
    """A row of the ladder.

    Attributes:
        rows: Of the batch, of each process.
        ratio_to_first: Tokens per second over those of the lowest rung; ``ratio`` is over those of the rung below.
        mfu: Model FLOP utilisation of the device's dense peak for these products; ``None`` where that is not known.
        losses: Of the first steps, in the rung's own precision.
        loss_difference: The largest from the lowest rung's with all products in float32, in nats.
        loss_tolerance: What rounding may make of it.
        notes: Which rungs were left out, and why.
    """

    rows: int
    ratio_to_first: float
    mfu: float | None
    losses: list[float]
    loss_difference: float
    loss_tolerance: float
    notes: list[str]


def run(asked: Request) -> Iterator[Row]:
    """A row for each shape and rung, from the lowest up."""
    if list(asked.dtypes) != [torch.float32]:
        raise ValueError("dtype: the ladder climbs from float32 to bf16 by itself; leave --dtype out")
    count = torch.cuda.device_count() if asked.device == "cuda" else min(os.cpu_count() or 1, torch.get_num_threads())
    left_out = lacking(asked.device, count)
    ladder = rungs(left_out)
    names = chosen_names(list(ladder), asked.variants)
    chosen = {name: ladder[name] for name in ladder if name in names}
    notes = [f"{name}: left out, {why}" for name, why in left_out.items() if asked.variants is None]
    shapes = [(text, Shape.of(text)) for text in asked.shapes]
    configs = [shape.model_config() for _, shape in shapes]  # the MLP is set by the rung
    for (text, shape), config in zip(shapes, configs, strict=True):
        yield from _Climb(text, shape, config, count, asked).rows(chosen, notes)


@dataclasses.dataclass(frozen=True)
class _Climb:
    text: str
    shape: Shape
    config: ModelConfig
    count: int
    asked: Request

    def rows(self, chosen: Mapping[str, Settings], notes: list[str]) -> Iterator[Rung]:
        batches, why = self._batches(chosen)
        chosen = {name: settings for name, settings in chosen.items() if name in batches}
        results: dict[str, list[Found]] = {name: [] for name in chosen}
        first = next(iter(results))
        shake = list(dict.fromkeys(["float32", *(settings.products for settings in chosen.values())]))
        start = time.perf_counter()
        for turn in range(self.asked.rounds):
            for name, settings in chosen.items():
                job = {"rows": batches[name], "check": turn == 0, "shake": shake if name == first else []}
                job["steps"] = STEPS[self.asked.device]
                results[name].append(self._run(name, settings, job))
                if turn == 0:
                    self._check(name, settings, results[name][0], first, results[first][0])
            if self.asked.budget_s is not None and time.perf_counter() - start > self.asked.budget_s:
                break
        speeds = {name: self._speeds(found, batches[name], chosen[name]) for name, found in results.items()}
        below = first
        for name in chosen:
            yield self._row(name, chosen[name], batches[name], results, speeds, below, [*notes, *why])
            below = name

    def _batches(self, chosen: Mapping[str, Settings]) -> tuple[dict[str, int], list[str]]:
        """Rows of each rung's batch; without the rung of the larger batch, and why, if there is no room for one."""
        batches = dict.fromkeys(chosen, self.shape.rows)
        lean = [name for name, settings in chosen.items() if settings.more_rows]
        if not lean:
            return batches, []
        single = dataclasses.replace(chosen[lean[0]], allocator=False, all_devices=False)
        more = int(self._run(lean[0], single, {"rows": self.shape.rows, "look_for_rows": True})["rows"])
        batches.update(dict.fromkeys(lean, more))
        if more == self.shape.rows and MORE_ROWS in batches:
            del batches[MORE_ROWS]
            return batches, [f"{MORE_ROWS}: left out, the memory that the standard MLP needs has no room for one"]
        return batches, []

    def _run(self, name: str, settings: Settings, job: Found) -> Found:
        """What one rung finds, in a process of its own, or in one for each device."""
        world = self.count if settings.all_devices else 1
        job = {
            "config": self.config.to_dict(),
            "settings": dataclasses.asdict(settings),
            "device": self.asked.device,
            "context": self.shape.context,
            "first_rows": self.shape.rows,
            **job,
        }
        with tempfile.TemporaryDirectory(prefix="bench-ladder-") as folder:
            job |= {"world": world, "meeting": str(Path(folder, "meeting"))}
            return run_processes(name, [{**job, "rank": rank} for rank in range(world)])

    def _check(self, name: str, settings: Settings, found: Found, first: str, lowest: Found) -> None:
        """Compare the losses with those of the lowest rung.

        Raises:
            RuntimeError: They differ by more than rounding explains.
        """
        for which, products in (("exact_losses", "float32"), ("losses", settings.products)):
            shaken = lowest["shaken"][products]
            for step, (loss, other) in enumerate(zip(found[which], lowest["exact_losses"], strict=True), start=1):
                allowed = tolerance(self.shape.layers, other, shaken)
                if not abs(loss - other) <= allowed:
                    raise RuntimeError(
                        f"{self.text}: the loss of {name!r} at step {step} with products in {products} is {loss:.7g}, "
                        f"that of {first!r} {other:.7g}: {abs(loss - other):.2g} apart, rounding explains "
                        f"{allowed:.2g}; its maths is not the same"
                    )

    def _speeds(self, found: Sequence[Found], rows: int, settings: Settings) -> list[float]:
        """Tokens per second of each round, all devices together."""
        tokens = rows * self.shape.context * (self.count if settings.all_devices else 1)
        return [tokens / one["median_s"] for one in found]

    def _row(
        self,
        name: str,
        settings: Settings,
        rows: int,
        results: Mapping[str, Sequence[Found]],
        speeds: Mapping[str, Sequence[float]],
        below: str,
        notes: list[str],
    ) -> Rung:
        found, first = results[name], next(iter(results))
        seconds = sorted(one["median_s"] for one in found)
        checked, lowest = found[0], results[first][0]
        pairs = list(zip(checked["exact_losses"], lowest["exact_losses"], strict=True))
        peak = checked["peak_bytes"]
        speed = statistics.median(speeds[name])
        return Rung(
            bench="ladder",
            variant=name,
            shape=self.text,
            dtype=settings.products,
            device=self.asked.device,
            machine=describe_machine(self.asked.device),
            total_s=statistics.median(seconds),
            total_p20_s=seconds[0],
            total_p80_s=seconds[-1],
            tokens_per_s=speed,
            ratio=_ratio(speeds[name], speeds[below]),
            ratio_to_first=_ratio(speeds[name], speeds[first]),
            peak_bytes=peak,
            resident_bytes=max(one["resident_bytes"] for one in found),
            rows=rows,
            mfu=self._utilisation(settings, speed),
            losses=checked["losses"],
            loss_difference=max(abs(one - other) for one, other in pairs),
            loss_tolerance=tolerance(self.shape.layers, pairs[0][1], lowest["shaken"]["float32"]),
            notes=notes,
        )

    def _utilisation(self, settings: Settings, tokens_per_s: float) -> float | None:
        try:
            peak = find_device(describe_machine(self.asked.device)).flops.get(settings.products)
        except ValueError:  # no peak is known of it, a CPU for one
            return None
        devices = self.count if settings.all_devices else 1
        flops = step_flops(self.config, tokens=1, context_length=self.shape.context).model
        return None if peak is None else flops * tokens_per_s / (peak * devices)


def run_processes(name: str, jobs: Sequence[Found]) -> Found:
    """Start a process for each job, all at once; what the first of them prints.

    Raises:
        RuntimeError: One of them failed; the message has its last word.
    """
    started = []
    for job in jobs:
        growing = job["device"] == "cuda" and job["settings"]["allocator"]
        started.append(
            subprocess.Popen(
                [sys.executable, "-m", "lightning_llm.bench.ladder_process", json.dumps(job, allow_nan=False)],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env={**os.environ, **(_GROWING_SEGMENTS if growing else {})},
            )
        )
    said = [process.communicate() for process in started]
    for process, (_, errors) in zip(started, said, strict=True):
        if process.returncode:
            raise RuntimeError(f"{name} failed: {(errors.strip().splitlines() or ['no word'])[-1]}")
    found: Found = json.loads(said[0][0].splitlines()[-1])
    return found


def _ratio(these: Sequence[float], those: Sequence[float]) -> float:
    """The median over rounds of the ratio within a round."""
    return statistics.median(one / other for one, other in zip(these, those, strict=True))


def print_table(rows: Sequence[Rung], console: Console) -> None:
    """A table for each shape, from the lowest rung up, and what was left out."""
    for shape in dict.fromkeys(row.shape for row in rows):
        group = [row for row in rows if row.shape == shape]
        known = any(row.mfu is not None for row in group)
        table = Table(Column("rung", no_wrap=True), title=shape, box=SIMPLE_HEAD, padding=(0, 0, 0, 1))
        for column in ("rows", "ms", "tokens/s", "below", "first", "peak MiB", "all MiB", *(["MFU %"] * known)):
            table.add_column(column, justify="right")
        for row in group:
            cells = (str(row.rows), f"{1000 * (row.total_s or 0):.1f}", f"{row.tokens_per_s:,.0f}")
            ratios = (f"{row.ratio:.2f}", f"{row.ratio_to_first:.2f}")
            sizes = ("–" if size is None else f"{size / MIB:,.0f}" for size in (row.peak_bytes, row.resident_bytes))
            mfu = ["–" if row.mfu is None else f"{100 * row.mfu:.1f}"] * known
            table.add_row(row.variant, *cells, *ratios, *sizes, *mfu)
        console.print(table)
        worst = max(group, key=lambda row: row.loss_difference / row.loss_tolerance)
        console.print(
            f"same losses over {len(worst.losses)} steps: in float32 at most {worst.loss_difference:.1e} nats apart "
            f"({worst.variant}; rounding explains {worst.loss_tolerance:.1e})"
        )
        for note in group[0].notes:
            console.print(note)
    console.print("below, first: tokens/s over those of the rung below and of the first")
    console.print("peak: tensors of a step beside weights, optimiser and batch; all: resident, libraries' buffers too")


def draw(rows: Sequence[Rung], path: Path, title: str) -> None:
    """Tokens per second of each rung with its gain over the one below, and the memory beside it."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shapes = list(dict.fromkeys(row.shape for row in rows))
    figure, axes = pyplot.subplots(
        len(shapes), 2, figsize=(12, 4.5 * len(shapes)), squeeze=False, sharey="row", layout="constrained"
    )
    for (speed, memory), shape in zip(axes, shapes, strict=True):
        group = [row for row in rows if row.shape == shape]
        names = [row.variant for row in group]
        bars = speed.barh(names, [row.tokens_per_s or 0 for row in group], color="tab:red")
        speed.bar_label(bars, [f"× {row.ratio:.2f}, in all {row.ratio_to_first:.2f}" for row in group], padding=4)
        speed.set(xlabel="tokens per second", title=shape)
        speed.margins(x=0.6)
        for offset, (field, label) in enumerate(
            (("peak_bytes", "a step's tensors"), ("resident_bytes", "resident, weights and libraries included"))
        ):
            sizes = [(getattr(row, field) or 0) / MIB for row in group]
            places = [place + 0.4 * offset - 0.2 for place in range(len(names))]
            memory.barh(places, sizes, height=0.4, label=label)
        memory.set(xlabel="memory, MiB")
        memory.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2, fontsize=8, frameon=False)
        speed.invert_yaxis()
    figure.suptitle(title)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
