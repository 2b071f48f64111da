"""``python -m benchmarks techniques``: the techniques of a fast training step, each measured against the previous one.

A technique is added to all those before it. Every one trains the same model on the same batch, whole steps, in a
process of its own; they are interleaved. The first is what a course notebook writes. In the first round the loss curve
of each is compared with that of the first: with all matmuls in float32, where only rounding may separate them, and then
in its own precision. A technique whose losses differ by more than rounding explains ends the bench.
"""

import dataclasses
import math
import os
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.charts import HIGHER, LOWER, Measure, bar_plot
from benchmarks.harness import Bench, Request
from benchmarks.rows import MIB, Row, columns, groups, ratios
from benchmarks.steps import utilization
from benchmarks.technique_process import UNIT_ROUNDOFF, Settings, measure, most_apart
from benchmarks.workloads import model_config
from lightning_llm.model.config import ModelConfig
from lightning_llm.same.processes import in_fresh_processes

STEPS = {"cpu": 5, "cuda": 30}  # timed, of each round
ROUNDINGS_PER_BLOCK = 20  # results written one after another: 2 norms, 7 matmuls, rotation, softmax, gate, sums
ROUNDINGS_OF_HEAD = 5  # the last norm, logits, maximum, sum, logarithm
_GROWING_SEGMENTS = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}

MORE_ROWS = "larger batch"
CHANGES: dict[str, dict[str, Any]] = {
    "per-head loops": {},
    "all heads at once": {"operators": "torch"},
    "TF32": {"precision": "tf32"},
    "bf16": {"precision": "bfloat16"},
    "fused optimizer": {"optimizer": "fused"},
    "own operators": {"operators": "ours"},
    "chunked loss": {"chunked_loss": True},
    "memory-optimized MLP": {"mlp": "memory_optimized_swiglu"},
    MORE_ROWS: {"more_rows": True},
    "compiled blocks": {"compiled": True},
    "CUDA graphs": {"cuda_graph": True},
    "allocator settings": {"allocator": True},
    "all devices": {"all_devices": True, "cuda_graph": False},  # NCCL inside a recorded graph is not measured
}
NEEDS_CUDA = ("TF32", "CUDA graphs")
Found = dict[str, Any]


def lacking(device: str, count: int) -> dict[str, str]:
    """The techniques that ``count`` devices of this kind do not have, and why."""
    reasons = {} if device == "cuda" else dict.fromkeys(NEEDS_CUDA, "it needs CUDA")
    if count < 2:
        reasons["all devices"] = f"there is one {'GPU' if device == 'cuda' else 'core'}"
    return reasons


def techniques(left_out: Mapping[str, str]) -> dict[str, Settings]:
    """The settings of each remaining technique, in order."""
    settings, by_name = Settings(), {}
    for name, change in CHANGES.items():
        if name not in left_out:
            settings = by_name[name] = dataclasses.replace(settings, **change)
    return by_name


def tolerance(layers: int, loss: float, shaken: float) -> float:
    """How far the losses of two techniques may be apart at any step, in nats.

    One rounding of all weights moves the loss by ``shaken`` (measured: the largest over the steps), and the loss itself
    is rounded to float32. A step rounds ``n`` times in a row, forward and twice that backward; as independent
    roundings do, they add up to √n of one. Two techniques round independently (√2); three standard deviations. All
    weights were rounded up or down by chance, to the matmuls' precision.
    """
    roundings = 3 * (ROUNDINGS_PER_BLOCK * layers + ROUNDINGS_OF_HEAD)
    return 3 * math.sqrt(2 * roundings) * max(shaken, UNIT_ROUNDOFF["float32"] * abs(loss))


def run(request: Request) -> Iterator[Row]:
    """A row for each technique, in order.

    ``ratio`` is of tokens per second over those of the previous one, ``ratio_to_first`` over those of the first.
    ``mfu`` is the share of the device's dense peak for these matmuls that the model's FLOPs take, if that is known.
    ``loss_difference`` is the largest from the first with all matmuls in float32, in nats.
    """
    count = torch.cuda.device_count() if request.device == "cuda" else min(os.cpu_count() or 1, torch.get_num_threads())
    left_out = lacking(request.device, count)
    settings = techniques(left_out)
    chosen = {name: settings[name] for name in settings if name in request.chosen(settings)}
    why = [f"{name}: left out, {why}" for name, why in left_out.items() if request.variants is None]
    config = model_config(request.sizes)  # the MLP is set by the technique
    yield from _Comparison(request, config, count).rows(chosen, why)


@dataclasses.dataclass(frozen=True)
class _Comparison:
    request: Request
    config: ModelConfig
    count: int

    def rows(self, chosen: Mapping[str, Settings], notes: list[str]) -> Iterator[Row]:
        batches, why = self._batches(chosen)
        chosen = {name: settings for name, settings in chosen.items() if name in batches}
        first, checked = next(iter(chosen)), dict[str, Found]()
        shake = list(dict.fromkeys(["float32", *(settings.precision for settings in chosen.values())]))

        def train(name: str) -> Found:
            is_new = name not in checked
            job = {"rows": batches[name], "check": is_new, "shake": shake if name == first else []}
            result = self._run(name, chosen[name], {**job, "steps": STEPS[self.request.device]})
            if is_new:
                checked[name] = result
                self._check(name, chosen[name], result, first, checked[first])
            return result

        results = self.request.interleaved({name: partial(train, name) for name in chosen})
        context, device = self.request.sizes["context"], self.request.device
        speeds = dict[str, list[float]]()  # tokens per second of each round
        losses, previous = checked[first]["exact_losses"], first
        for name, settings in chosen.items():
            tokens = batches[name] * context * self._devices(settings)
            speeds[name] = [tokens / one["median_s"] for one in results[name]]
            speed = statistics.median(speeds[name])
            yield self.request.row(
                name,
                [one["median_s"] for one in results[name]],
                dtype=settings.precision,
                tokens_per_s=speed,
                ratio=ratios(speeds[name], speeds[previous])["ratio"],
                peak_bytes=checked[name]["peak_bytes"],
                resident_bytes=max(one["resident_bytes"] for one in results[name]),
                rows=batches[name],
                ratio_to_first=ratios(speeds[name], speeds[first])["ratio"],
                mfu=utilization(self.config, context, speed / self._devices(settings), device, settings.precision),
                losses=checked[name]["losses"],
                loss_difference=most_apart(checked[name]["exact_losses"], losses),
                loss_tolerance=tolerance(self.config.num_hidden_layers, losses[0], checked[first]["shaken"]["float32"]),
                notes=[*notes, *why],
            )
            previous = name

    def _batches(self, chosen: Mapping[str, Settings]) -> tuple[dict[str, int], list[str]]:
        """Rows of each batch; without the technique of the larger batch, and why, if there is no room for one."""
        more = rows = self.request.sizes["rows"]
        if lean := next((name for name, settings in chosen.items() if settings.more_rows), None):
            single = dataclasses.replace(chosen[lean], allocator=False, all_devices=False)
            more = int(self._run(lean, single, {"rows": rows, "look_for_rows": True})["rows"])
        batches = {name: more if settings.more_rows else rows for name, settings in chosen.items()}
        if more > rows or not batches.pop(MORE_ROWS, 0):
            return batches, []
        return batches, [f"{MORE_ROWS}: left out: the memory of the standard MLP has no room for one"]

    def _run(self, name: str, settings: Settings, job: Found) -> Found:
        """What one technique finds, in a process of its own, or in one for each device."""
        world, sizes, device = self._devices(settings), self.request.sizes, self.request.device
        environment = _GROWING_SEGMENTS if device == "cuda" and settings.allocator else {}
        with tempfile.TemporaryDirectory(prefix="bench-techniques-") as folder:
            job = {**job, "config": self.config, "settings": settings, "device": device, "world": world}
            job |= {"context": sizes["context"], "first_rows": sizes["rows"], "meeting": str(Path(folder, "meeting"))}
            jobs = [{**job, "rank": rank} for rank in range(world)]
            return in_fresh_processes(measure, jobs, name=name, environment=environment)[0]

    def _check(self, name: str, settings: Settings, result: Found, first: str, lowest: Found) -> None:
        """Compare the losses with those of the first technique.

        Raises:
            RuntimeError: They differ by more than rounding explains.
        """
        for which, precision in (("exact_losses", "float32"), ("losses", settings.precision)):
            for step, (loss, other) in enumerate(zip(result[which], lowest["exact_losses"], strict=True), start=1):
                allowed = tolerance(self.config.num_hidden_layers, other, lowest["shaken"][precision])
                if not abs(loss - other) <= allowed:
                    raise RuntimeError(
                        f"{self.request.shape}: the loss of {name!r} at step {step} with matmuls in {precision} is "
                        f"{loss:.7g}, that of {first!r} {other:.7g}: {abs(loss - other):.2g} apart, rounding explains "
                        f"{allowed:.2g}; it does not compute the same"
                    )

    def _devices(self, settings: Settings) -> int:
        return self.count if settings.all_devices else 1


def notes(rows: Sequence[Row]) -> Iterator[str]:
    """What was compared and left out, and what the columns mean."""
    for group in groups(rows).values():
        worst = max(group, key=lambda row: float(row.loss_difference / row.loss_tolerance))
        yield (
            f"same losses over {len(worst.losses)} steps: in float32 at most {worst.loss_difference:.1e} nats apart "
            f"({worst.variant}; rounding explains {worst.loss_tolerance:.1e})"
        )
        yield from group[0].notes
    yield "previous, first: tokens/s over those of the previous technique and of the first"
    yield "peak: tensors of a step without weights, optimizer state and batch; all: resident, libraries' buffers too"


BENCH = Bench(
    run=run,
    shapes=["4x4x256x704x128x8x4096"],
    sizes=("layers", "heads", "hidden", "intermediate", "context", "rows", "vocab"),
    named_shapes={"124m": ["12x12x768x2048x1024x8x50304"]},
    dtypes=("float32",),  # the techniques change to bf16 themselves
    columns={
        "rows": ("rows", 1, "d"),
        **columns("total ms", "tokens/s"),
        "previous": ("ratio", 1, ".2f"),
        "first": ("ratio_to_first", 1, ".2f"),
        **columns("peak MiB"),
        "all MiB": ("resident_bytes", 1 / MIB, ",.0f"),
        "MFU %": ("mfu", 100, ".1f"),
    },
    notes=notes,
    draw=bar_plot(
        Measure("tokens_per_s", 1, f"tokens/s{HIGHER}", note=lambda row: f"× {row.ratio_to_first:.2f}"),
        Measure("peak_bytes", 1 / MIB, f"peak of a step's tensors, MiB{LOWER}"),
        by=("shape",),
    ),
    allocator="default allocator until the technique that sets it",
    files=("lightning_llm/model", "lightning_llm/ops", "lightning_llm/optim"),
)
