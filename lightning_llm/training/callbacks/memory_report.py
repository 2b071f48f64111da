"""A metered step as plain values, as a table and as a plot; and what is written when memory has run out.

The plot has stacked timelines, by category above and by module below, one column for each step. The report of a failure
says what was live, and which settings would lower the peak, by the accounting.
"""

import colorsys
import contextlib
import dataclasses
import io
import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from lightning.pytorch import LightningModule, Trainer
from rich.table import Column, Table

from lightning_llm.accounting.counts import Sizes, hidden_matrix_parameters, parts_to_measure, step_flops
from lightning_llm.accounting.memory import StepMemory, step_memory
from lightning_llm.io.atomic import atomic_file
from lightning_llm.io.console import Console
from lightning_llm.io.untrusted import number_in
from lightning_llm.measure.attribution import AttributedMeter
from lightning_llm.measure.timeline import CATEGORIES, StepPoint, Timeline
from lightning_llm.model.config import SWIGLUS, ModelConfig
from lightning_llm.training.measured_parts import EXTENDED, measure_parts

MIB, GIB = 2**20, 2**30
REST = "all others"
NAMES = {"optimizer_state": "optimizer state", "activations": "saved activations"}
COLORS = {
    **{"parameters": "#4c566a", "gradients": "#8f6fb0", "optimizer_state": "#9aa5b8", "inputs": "#2f9e8f"},
    **{"activations": "#e07b39", "temporary": "#f2c14e", "other": "#d0d0d0"},
}
GROUPINGS = {"by_kind": "by category", "by_module": "by module"}  # the keys of a report, in words
# A hue for each part of a layer, lighter from layer to layer; other modules have one of the other hues.
HUES = {"mlp": 0.06, "self_attn": 0.58, "input_layernorm": 0.33, "post_attention_layernorm": 0.42}
OTHER_HUES = (0.93, 0.75, 0.14, 0.50, 0.84, 0.25)
HALVING_COSTS = 0.02  # assumed: the same arithmetic in smaller pieces, and gradients added up
NOT_WORTH_NAMING = 0.005  # of the peak
EXACT, OPTIMIZED = "same results to rounding", "memory_optimized_swiglu"
ACCOUNTED = {"saved": "activations", "optimizer state": "optimizer_state"}  # the report's names for the accounting's
Report = dict[str, Any]


def step_report(timeline: Timeline, top: int) -> Report:
    """Peak, what forward saved, phases and timeline of the ``top`` modules that hold most at the peak; in bytes."""
    peak, saved = timeline.peak, timeline.saved
    names, samples = list(peak.by_module())[:top], []
    for point in timeline.samples():
        sizes = point.by_module()
        told = {name: sizes.get(name, 0) for name in names}
        told[REST] = point.total_bytes - sum(told.values())
        samples.append({"operator": point.operator, "by_kind": point.by_category(), "by_module": told})
    return {
        "peak": point_report(peak),
        "kept": saved and point_report(saved),
        "phases": timeline.phases(),
        "timeline": {"marks": timeline.marks, "operators": timeline.operators, "samples": samples},
    }


def table_of(point: Mapping[str, Any], title: str, top: int) -> Table:
    """Categories across, modules down, in MiB; the ``top`` modules that hold most have a row of their own."""
    cells = {(row["module"], row["kind"]): row["bytes"] for row in point["table"]}
    categories = [category for category in CATEGORIES if point["by_kind"].get(category)]
    modules = list(point["by_module"])
    table = Table(Column("MiB", no_wrap=True), title=title)
    for column in (*categories, "all"):
        table.add_column(NAMES.get(column, column), justify="right")
    rows = {name: [name] for name in modules[:top]} | ({REST: modules[top:]} if len(modules) > top else {})
    for title, names in (rows | {"all": modules}).items():
        if title == "all":
            table.add_section()
        sizes = [sum(cells.get((name, category), 0) for name in names) for category in categories]
        table.add_row(title, *(mib(size) for size in [*sizes, sum(sizes)]))
    return table


def mib(size: float) -> str:
    """``12.3``; a decimal more for small ones, nothing for zero."""
    if not size:
        return ""
    digits = 1 if abs(size) >= MIB else min(4, 1 - math.floor(math.log10(abs(size) / MIB)))
    return f"{size / MIB:,.{digits}f}"


def point_report(point: StepPoint) -> Report:
    """What is live at a point in the step: total, by category, by module, and as a table."""
    return {
        "bytes": point.total_bytes,
        "phase": point.phase,
        "operator": point.operator,
        "by_kind": point.by_category(),
        "by_module": point.by_module(),
        "table": [{"kind": kind, "module": name, "bytes": n} for (kind, name), n in Counter(point.table).most_common()],
    }


def draw(reports: Mapping[str, Report], title: str) -> Any:
    """A ``matplotlib.figure.Figure`` with a canvas of its own, and a column for each report, by its title."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(max(9.5, 8 * len(reports)), 8.5), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(2, len(reports), sharex="col", sharey=True, squeeze=False)
    highest = max(report["peak"]["bytes"] for report in reports.values())
    unit, name = (GIB, "GiB") if highest >= GIB else (MIB, "MiB")
    modules = _modules(reports)
    colors = {**COLORS, **_module_colors(modules)}
    samples = [sample for report in reports.values() for sample in report["timeline"]["samples"]]
    shown = {
        grouping: [key for key in keys if key == REST or any(sample[grouping].get(key) for sample in samples)]
        for grouping, keys in zip(GROUPINGS, (CATEGORIES, modules), strict=True)
    }
    for column, (label, report) in enumerate(reports.items()):
        peak = report["peak"]
        for axis, (grouping, keys) in zip(axes[:, column], shown.items(), strict=True):
            _stack(axis, report, grouping, keys, colors, unit)
            _mark_phases(axis, report["timeline"], highest / unit)
            if column == 0:
                axis.set_ylabel(f"live {GROUPINGS[grouping]}, {name} (lower is better)")
            if column == len(reports) - 1:
                handles, labels = axis.get_legend_handles_labels()
                axis.legend(handles[::-1], labels[::-1], loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
        axes[0, column].set_title(f"{label}\npeak {peak['bytes'] / unit:,.1f} {name} in {peak['phase']}", fontsize=10)
        axes[1, column].set_xlabel("operators run since the step began")
    axes[0, 0].set_ylim(0, 1.12 * highest / unit)
    figure.suptitle(title)
    return figure


def save(figure: Any, path: Path) -> None:
    """As PNG."""
    with atomic_file(path) as file:
        figure.savefig(file, format="png")


def pixels(figure: Any) -> Any:
    """(height, width, 3), uint8: what TensorBoard takes as an image."""
    figure.canvas.draw()
    return np.asarray(figure.canvas.buffer_rgba())[..., :3].copy()


def _stack(axis: Any, report: Report, grouping: str, keys: Sequence[str], colors: Mapping[str, Any], unit: int) -> None:
    samples = sorted(report["timeline"]["samples"], key=lambda one: (one["operator"], sum(one[grouping].values())))
    highest = {sample["operator"]: sample for sample in samples}  # of several within one operator
    x = [*highest, report["timeline"]["operators"]]
    rows = [[sample[grouping].get(key, 0) / unit for sample in [*highest.values(), samples[-1]]] for key in keys]
    labels, shades = [NAMES.get(key, key) for key in keys], [colors[key] for key in keys]
    axis.stackplot(x, *rows, labels=labels, colors=shades, step="mid")  # each is the peak of the operators around it
    operator, height = report["peak"]["operator"], report["peak"]["bytes"] / unit
    axis.plot([operator], [height], marker=7, color="black", markersize=7, clip_on=False)  # its tip is there
    axis.set_xlim(0, x[-1])


def _mark_phases(axis: Any, timeline: Mapping[str, Any], highest: float) -> None:
    for operator, phase in timeline["marks"]:
        at_end = operator > 0.85 * timeline["operators"]  # the optimizer takes few operators: labeled on the left
        axis.axvline(operator, color="black", linewidth=0.7, alpha=0.6)
        axis.text(operator, 1.11 * highest, f" {phase} ", fontsize=8, va="top", ha="right" if at_end else "left")


def _modules(reports: Mapping[str, Report]) -> list[str]:
    """What the timelines distinguish, in the order of the model, the rest first."""
    samples = [report["timeline"]["samples"][0]["by_module"] for report in reports.values()]
    return [REST, *sorted({name for sample in samples for name in sample if name != REST}, key=_order)]


def _order(name: str) -> tuple[str, list[int], str]:
    parts = name.split(".")
    numbers = [number for number in map(number_in, parts) if number is not None]
    return parts[-1] if len(parts) > 1 else f"~{name}", numbers, name


def _module_colors(modules: Sequence[str]) -> dict[str, Any]:
    groups: dict[str, list[str]] = {}
    for name in modules:
        groups.setdefault(name.rpartition(".")[2], []).append(name)
    others, colors = itertools.cycle(OTHER_HUES), {}
    for part, names in groups.items():
        hue = HUES.get(part) or next(others)
        for place, name in enumerate(names):
            colors[name] = colorsys.hls_to_rgb(hue, 0.42 + 0.38 * place / max(1, len(names) - 1), 0.65)
    return {**colors, REST: "#d0d0d0"}


class Run(NamedTuple):
    """What a step's memory depends on: the model, and ``settings`` as ``step_memory`` takes them."""

    config: ModelConfig
    optimizer: str
    settings: dict[str, Any]

    def change(self, architecture: dict[str, Any] | None = None, **settings: Any) -> "Run":
        """The run with other options; a ValueError for a combination that the model refuses."""
        config = dataclasses.replace(self.config, **architecture or {})
        return self._replace(config=config, settings=self.settings | settings)

    def memory(self) -> StepMemory:
        """Of a step, without optimizer state."""
        return step_memory(self.config, state_per_parameter=0, **self.settings)

    def work(self) -> int:
        """FLOPs of a step, recomputation included, per row."""
        length, measured = self.settings["context_length"], self.settings["measured"]
        return step_flops(self.config, tokens=length, context_length=length, measured=measured).hardware


class Saving(NamedTuple):
    """A setting, the bytes by which it lowers the peak, its extra arithmetic as a fraction of the step's, a remark."""

    setting: str
    estimated_bytes_saved: int
    estimated_extra_work: float
    note: str


class Estimate(NamedTuple):
    """The peak of the step as it is (a report), what each setting would save, and what the estimate leaves out."""

    current: Report
    savings: list[Saving]
    remarks: list[str]


def describe_failure(
    trainer: Trainer,
    pl_module: LightningModule,
    batch: Any,
    *,
    metered: AttributedMeter | None,
    counters: dict[str, int],
    step: int,
    top: int,
) -> tuple[str, Report]:
    """The report as text and as plain values; settings are judged only for a ``LanguageModel``.

    ``metered`` is the meter of the step, if the step was sampled; ``counters`` are bytes by phase, from the gauge.
    """
    report: Report = {"step": step, "rank": trainer.global_rank, "counters": counters}
    where, meter, source, title = "", metered, "measured", "Live at the peak of the step, measured"
    if meter is None:
        meter = AttributedMeter(pl_module, trainer.optimizers, batch)
        meter.close()
        source = "held: counted; activations and temporary: not metered in this step"
        title = "Live for certain: what is held between steps (this step was not sampled)"
    elif meter.failed_in is not None:
        where = f", in {meter.failed_in[0]} ({meter.failed_in[1]})"
        report["failed_in"] = list(meter.failed_in)
    report |= {"source": source, **step_report(meter.timeline(), top)}
    blocks: list[Any] = [f"Out of memory in step {step} of rank {trainer.global_rank}{where}."]
    if highest := max(counters.values(), default=0):
        counter = "allocator" if trainer.strategy.root_device.type == "cuda" else "system"
        blocks.append(f"Peak in use, by the {counter}: {mib(highest)} MiB.")
    blocks.append(table_of(report["peak"], title, top))
    run = _run_of(trainer, pl_module, batch)
    if run and (found := estimate(run)):
        if metered is None:
            title = "At the peak of a whole step, estimated, without optimizer state"
            blocks.append(table_of(found.current["peak"], title, top))
            report["estimated"] = found.current
        savings = cheapest(found.savings)
        report["settings"] = [saving._asdict() for saving in savings]
        blocks += [*found.remarks, *_advice(savings)]
    console = Console(file=(out := io.StringIO()), width=110, highlight=False)
    for block in blocks:
        console.print(block, soft_wrap=isinstance(block, str))
    return out.getvalue().rstrip(), report


def estimate(run: Run) -> Estimate | None:
    """The step's peak by the accounting, and what settings would save; ``None`` for what it does not cover."""
    remarks, unknown = [], parts_to_measure(run.config)
    try:
        if run.config.dropout and run.settings["device"] == "cpu":
            run = run.change({"dropout": 0.0})
            remarks.append("The estimate leaves dropout out.")
        if unknown:
            measured = measure_parts(run.config, run.settings["precision"], run.settings["context_length"])
            run = run.change(measured=measured)
            remarks.append(EXTENDED.format(", ".join(unknown.values())))
        memory, work = run.memory(), run.work()
    except (ValueError, RuntimeError):
        return None
    savings = []
    for setting, architecture, changes, note in candidates(run):
        with contextlib.suppress(ValueError):  # a combination that the model refuses
            changed = run.change(architecture, **changes)
            saved = memory.peak - changed.memory().peak
            if saved > NOT_WORTH_NAMING * memory.peak:
                extra = HALVING_COSTS if "rows" in changes else changed.work() / work - 1
                savings.append(Saving(setting, saved, extra, note))
    if run.optimizer == "AdamW" and not unknown:
        savings.append(_muon(run.config, run.settings["rows"] * work))
    table = {(ACCOUNTED.get(name, name), part or "model"): size for (name, part), size in memory.at_peak.items()}
    saved_table = {("activations", part): size for part, size in memory.saved.items()}
    points = {"peak": StepPoint(0, memory.peak_point, table), "kept": StepPoint(0, "backward", saved_table)}
    return Estimate({name: point_report(point) for name, point in points.items()}, savings, remarks)


def cheapest(savings: Sequence[Saving], most: int = 3) -> list[Saving]:
    """Least arithmetic per byte first, among those that cost none the largest; of each option the cheapest value."""

    def price(saving: Saving) -> tuple[float, int]:
        size = saving.estimated_bytes_saved
        return max(0.0, saving.estimated_extra_work) / size, -size

    options: dict[str, Saving] = {}
    for saving in sorted(savings, key=price):
        options.setdefault(saving.setting.rpartition(" ")[0], saving)
    return list(options.values())[:most]


def candidates(run: Run) -> Iterator[tuple[str, dict[str, Any], dict[str, Any], str]]:
    """Settings to try, each with its changes to the architecture and to the settings of the step, and a remark."""
    config, rows, chunks, exact = run.config, run.settings["rows"], run.settings["loss_chunks"], EXACT
    halved = {"rows": rows // 2, "accumulation": 2 * run.settings["accumulation"]}
    tokens = rows * run.settings["context_length"]
    if rows > 1:
        yield f"data.micro_batch_size {rows // 2}", {}, halved, "same global batch, accumulated"
    if chunks == 0:
        yield "model.loss_chunks null", {}, {"loss_chunks": None}, exact
    elif chunks is not None or tokens > 512:
        more = max(2 * (chunks or 1), tokens // 256)
        yield f"model.loss_chunks {more}", {}, {"loss_chunks": more}, exact
    if config.mlp in SWIGLUS:
        is_optimized = config.mlp == OPTIMIZED
        option = "checkpoint_level" if is_optimized else f"mlp {OPTIMIZED} with checkpoint_level"
        for level in range(min(config.checkpoint_levels) + 1 if is_optimized else 0, 3):
            yield f"model.architecture.{option} {level}", {"mlp": OPTIMIZED, "checkpoint_level": level}, {}, exact
    if config.recompute == "none":
        for part in ("attention", "block"):
            yield f"model.architecture.recompute {part}", {"recompute": part}, {}, exact
    if run.settings["precision"] == "32-true":
        yield "trainer.precision bf16-mixed", {}, {"precision": "bf16-mixed"}, "changes the numerics"


def _muon(config: ModelConfig, work: int) -> Saving:
    """One moment instead of two for the matrices inside the layers, for the arithmetic of the orthogonalization."""
    shapes = [(min(shape), max(shape)) for shape in Sizes.of(config).matrices().values()]
    extra = sum(5 * (4 * low**2 * high + 2 * low**3) for low, high in shapes)  # five Newton-Schulz steps
    note, setting = "changes the training, tune the learning rate", "model.optimizer lightning_llm.optim.MuonAdamW"
    return Saving(setting, 4 * hidden_matrix_parameters(config), config.num_hidden_layers * extra / work, note)


def _advice(savings: list[Saving]) -> list[str]:
    if not savings:
        return ["No setting of the model or the batch would save memory."]
    lines = ["The cheapest settings to change, by estimate (least arithmetic per byte first):"]
    for place, (setting, size, extra, note) in enumerate(savings, 1):
        price = f"{extra:+.1%} arithmetic" if extra else "no more arithmetic"
        lines.append(f"  {place}. {setting}: saves {mib(size)} MiB, {price}; {note}")
    return lines


def _run_of(trainer: Trainer, pl_module: LightningModule, batch: Any) -> Run | None:
    config, ids = getattr(pl_module, "architecture", None), batch.get("input_ids") if isinstance(batch, dict) else None
    if not isinstance(config, ModelConfig) or ids is None or ids.dim() != 2:
        return None
    precision = str(trainer.precision)
    settings = {
        **{"rows": ids.shape[0], "context_length": ids.shape[1], "document_mask": "documents" in batch, "measured": {}},
        "accumulation": trainer.accumulate_grad_batches,
        "loss_chunks": getattr(pl_module, "loss_chunks", None),
        "precision": f"bf{precision}" if precision.startswith("16") else precision,
        "device": "cuda" if trainer.strategy.root_device.type == "cuda" else "cpu",
    }
    return Run(config, type(trainer.optimizers[0]).__name__ if trainer.optimizers else "", settings)
