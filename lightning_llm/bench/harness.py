"""Rows of measurements: taken by turns, written as JSON, shown as a table, drawn as peak memory against time.

A *case* builds a workload once and says how to run it: ``forward()`` gives something with ``backward()``. Time is the
median of interleaved rounds; memory is what the operator-level meter counts on a CPU and what the allocator reports on
CUDA, without parameters and inputs, gradients included.
"""

import dataclasses
import gc
import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Column, Table
from torch import Tensor, nn

from lightning_llm.measure.meter import MemoryMeter
from lightning_llm.measure.timer import interleave
from lightning_llm.model.config import ModelConfig
from lightning_llm.training.text_files import write_json

MIB = 2**20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One variant of a workload.

    Attributes:
        forward: Runs forward and returns the scalar or tensor to differentiate.
        held: Parameters, modules and inputs: not counted as memory of the workload.
        gradient: What ``backward`` starts from; ``None`` for a scalar loss.
        is_eager: Whether the meter can see what it allocates.
    """

    forward: Callable[[], Tensor]
    held: Sequence[Tensor | nn.Module]
    gradient: Tensor | None = None
    is_eager: bool = True

    def step(self) -> None:
        """Forward and backward, gradients made anew."""
        self.clear()
        torch.autograd.backward(self.forward(), self.gradient)

    def clear(self) -> None:
        """Forget the gradients."""
        for item in self.held:
            for tensor in item.parameters() if isinstance(item, nn.Module) else [item]:
                tensor.grad = None


NAMES = ("layers", "heads", "hidden", "intermediate", "context", "rows", "vocab")


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of a Llama-style model and of a micro-batch."""

    layers: int
    heads: int
    hidden: int
    intermediate: int
    context: int
    rows: int
    vocab: int

    @staticmethod
    def of(text: str) -> "Shape":
        """From numbers with an x between them.

        Raises:
            ValueError: There are not seven of them.
        """
        parts = text.split("x")
        if len(parts) != len(NAMES) or not all(part.isdigit() and int(part) for part in parts):
            raise ValueError(f"shapes {text!r} must be {' x '.join(NAMES)}, such as 6x6x384x1024x256x64x65")
        return Shape(*map(int, parts))

    def fields(self) -> dict[str, Any]:
        """The sizes of the model by the names that its config has here and in transformers."""
        return {
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "max_position_embeddings": self.context,
        }

    def model_config(self, **fields: Any) -> ModelConfig:
        """The model; ``fields`` are those beside its sizes.

        Raises:
            ValueError: The sizes do not fit together.
        """
        return ModelConfig(**{**self.fields(), **fields})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """What a bench is asked for.

    Attributes:
        device: ``cpu`` or ``cuda``.
        dtypes: One or more.
        shapes: In the bench's own words.
        variants: Only these, or all for ``None``.
        rounds: How often each is timed.
        budget_s: Stop timing after so many seconds, however many rounds are done.
    """

    device: str
    dtypes: Sequence[torch.dtype]
    shapes: Sequence[str]
    variants: Sequence[str] | None
    rounds: int
    budget_s: float | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One measurement; what does not apply is ``None``. Seconds and bytes."""

    bench: str
    variant: str
    shape: str
    dtype: str
    device: str
    forward_s: float | None = None
    backward_s: float | None = None
    total_s: float | None = None
    total_p20_s: float | None = None
    total_p80_s: float | None = None
    ratio: float | None = None
    peak_bytes: int | None = None
    saved_bytes: int | None = None
    resident_bytes: int | None = None
    tokens_per_s: float | None = None
    bytes_per_s: float | None = None
    wire_bytes: int | None = None
    torch: str = torch.__version__
    machine: str = ""


def measure(
    bench: str,
    cases: Mapping[str, Case],
    *,
    shape: str,
    dtype: torch.dtype,
    device: str,
    tokens: int,
    rounds: int = 7,
    budget_s: float | None = None,
) -> list[Row]:
    """Measure rivals by turns; the first is what ``ratio`` compares with."""
    memory = {name: measure_memory(case, device) for name, case in cases.items()}
    for case in cases.values():
        case.clear()
    # a whole step right after its forward: what disturbs the one disturbs the other
    runs = {f"{part} {name}": run for name, c in cases.items() for part, run in (("fwd", c.forward), ("both", c.step))}
    timings = interleave(runs, rounds=rounds, warmup=1, device=device, budget_s=budget_s)
    forward, total = ({name: timings[f"{part} {name}"] for name in cases} for part in ("fwd", "both"))
    first = next(iter(cases))
    rows = []
    for name in cases:
        saved, peak = memory[name]
        rows.append(
            Row(
                bench=bench,
                variant=name,
                shape=shape,
                dtype=str(dtype).removeprefix("torch."),
                device=device,
                machine=describe_machine(device),
                forward_s=forward[name].median,
                backward_s=total[name].median - forward[name].median,
                total_s=total[name].median,
                total_p20_s=total[name].p20,
                total_p80_s=total[name].p80,
                ratio=total[name].ratio_to(total[first]),
                peak_bytes=peak,
                saved_bytes=saved,
                tokens_per_s=tokens / total[name].median,
            )
        )
        cases[name].clear()
    return rows


def timed_rows(
    bench: str,
    functions: Mapping[str, Callable[[], object]],
    asked: Request,
    *,
    shape: str,
    dtype: torch.dtype,
    warmup: int,
    tokens: int | None = None,
) -> list[Row]:
    """Time rivals by turns, whole calls; the first is what ``ratio`` compares with, ``tokens`` are those of a call."""
    timings = interleave(functions, rounds=asked.rounds, warmup=warmup, device=asked.device, budget_s=asked.budget_s)
    first = next(iter(timings))
    return [
        Row(
            bench=bench,
            variant=name,
            shape=shape,
            dtype=str(dtype).removeprefix("torch."),
            device=asked.device,
            machine=describe_machine(asked.device),
            total_s=timing.median,
            total_p20_s=timing.p20,
            total_p80_s=timing.p80,
            ratio=timing.ratio_to(timings[first]),
            tokens_per_s=None if tokens is None else tokens / timing.median,
        )
        for name, timing in timings.items()
    ]


def chosen(cases: Mapping[str, Case], variants: Sequence[str] | None) -> dict[str, Case]:
    """Those of the cases that are asked for, in the order asked; all of them for ``None``.

    Raises:
        ValueError: If there is no such variant.
    """
    return {name: cases[name] for name in chosen_names(list(cases), variants)}


def chosen_names(known: Sequence[str], variants: Sequence[str] | None) -> list[str]:
    """As :func:`chosen`, for names alone."""
    if unknown := [name for name in variants or () if name not in known]:
        raise ValueError(f"variants {', '.join(map(repr, unknown))}: there are {', '.join(known)}")
    return list(known if variants is None else variants)


def measure_memory(case: Case, device: str) -> tuple[int | None, int | None]:
    """Bytes alive after forward, and the most alive in the step with its gradients, beyond what the case holds."""
    case.clear()
    gc.collect()
    if device == "cuda":
        case.step()  # compiles, and fills the libraries' own workspaces
        case.clear()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        out = case.forward()
        saved = torch.cuda.memory_allocated() - before
        torch.autograd.backward(out, case.gradient)
        return saved, torch.cuda.max_memory_allocated() - before
    if not case.is_eager:
        return None, None
    with MemoryMeter(exclude=[*case.held, *([] if case.gradient is None else [case.gradient])]) as meter:
        out = case.forward()
        saved = meter.live_bytes
        torch.autograd.backward(out, case.gradient)
        del out
    return saved, meter.peak_bytes


def describe_machine(device: str) -> str:
    """What the numbers were taken on."""
    if device == "cuda":
        return str(torch.cuda.get_device_name())
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        found = [line.partition(":")[2].strip() for line in info.read_text().splitlines() if "model name" in line]
        name = found[0] if found else name
    return f"{name}, {torch.get_num_threads()} threads"


def write_rows(rows: Iterable[Row], path: Path) -> None:
    """One JSON array of objects."""
    write_json(path, [dataclasses.asdict(row) for row in rows], indent=1)


def print_table(rows: Sequence[Row], console: Console) -> None:
    """A table for each shape and dtype."""
    for key in dict.fromkeys((row.shape, row.dtype) for row in rows):
        table = Table(Column("variant", no_wrap=True), title=" ".join(key))
        for column in ("fwd ms", "bwd ms", "both ms", "ratio", "kept MiB", "peak MiB", "ratio"):
            table.add_column(column, justify="right")
        group = [row for row in rows if (row.shape, row.dtype) == key]
        for row in group:
            ratios = (row.ratio, _ratio(row.peak_bytes, group[0].peak_bytes))
            time_ratio, peak_ratio = ("–" if ratio is None else f"{ratio:.2f}" for ratio in ratios)
            table.add_row(
                row.variant,
                *("–" if t is None else f"{1000 * t:.1f}" for t in (row.forward_s, row.backward_s, row.total_s)),
                time_ratio,
                *("–" if b is None else f"{b / MIB:.0f}" for b in (row.saved_bytes, row.peak_bytes)),
                peak_ratio,
            )
        console.print(table)


def _ratio(part: int | None, whole: int | None) -> float | None:
    return part / whole if part is not None and whole else None


def draw(rows: Sequence[Row], path: Path, title: str) -> None:
    """Peak memory against time for each shape and dtype, with the frontier: what nothing else beats in both."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    keys = list(dict.fromkeys((row.shape, row.dtype) for row in rows))
    figure, axes = pyplot.subplots(1, len(keys), figsize=(6.5 * len(keys), 5), squeeze=False, layout="constrained")
    for axis, key in zip(axes[0], keys, strict=True):
        points = [
            (1000 * row.total_s, row.peak_bytes / MIB, row.variant)
            for row in rows
            if (row.shape, row.dtype) == key and row.total_s is not None and row.peak_bytes is not None
        ]
        for time, memory, name in points:
            ours = name.startswith("ours")
            axis.scatter(time, memory, s=55, color="tab:red" if ours else "tab:gray", zorder=3)
            axis.annotate(name, (time, memory), textcoords="offset points", xytext=(6, 4), fontsize=8)
        edge = frontier([(time, memory) for time, memory, _ in points])
        axis.plot(*zip(*edge, strict=True), color="tab:red", alpha=0.4, zorder=2, label="frontier")
        axis.set(xlabel="forward and backward, ms (median)", ylabel="peak memory, MiB", title=" ".join(key))
        axis.set_ylim(bottom=0)
        axis.margins(x=0.2)
        axis.legend()
    figure.suptitle(title)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def frontier(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The points that no other point beats in both coordinates, by the first one."""
    edge: list[tuple[float, float]] = []
    for time, memory in sorted(points):
        if not edge or memory < edge[-1][1]:
            edge.append((time, memory))
    return edge


def draw_bars(values: Mapping[str, float], path: Path, title: str, *, unit: str, log: bool = False) -> None:
    """A horizontal bar for each value."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(7, 3.5), layout="constrained")
    axis.barh(list(values), list(values.values()))
    axis.set(xlabel=unit, xscale="log" if log else "linear")
    axis.invert_yaxis()
    figure.suptitle(title, fontsize=9)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
