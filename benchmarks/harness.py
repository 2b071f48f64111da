"""What a bench is, what it is asked for, and how it measures: interleaved, with time and memory of each case.

A bench is a module with a ``BENCH``. ``rows`` are what it yields, ``workloads`` and ``processes`` help it, ``plots``
draws.

A *case* builds a workload once and says how to run it: ``forward()`` gives something with ``backward()``. Time is the
median of interleaved rounds. Memory is what the operator-level meter counts on a CPU and what the allocator reports on
CUDA, without parameters and inputs, gradients included.
"""

import dataclasses
import gc
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from benchmarks.charts import draw_points
from benchmarks.rows import COLUMNS, MEASURED, Columns, Row, print_table, ratios
from benchmarks.workloads import sizes_of
from lightning_llm.accounting.hardware import cpu_name
from lightning_llm.io.console import Console
from lightning_llm.measure.meter import memory_of, tensors_in
from lightning_llm.measure.timer import Timing, interleave

Result = TypeVar("Result")
WARM_UP_S = 0.5  # of a GPU, whose clocks rise with the load


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bench:
    """One bench, as the command line runs it.

    Attributes:
        run: Yields the rows of one shape and dtype.
        shapes: Those that are measured by default.
        sizes: Names of the sizes in a shape.
        named_shapes: Sets of shapes that have a name.
        parse: Reads a shape, if it is not a list of sizes.
        devices: Those that it takes; by default all.
        dtypes: Those that it takes; by default all.
        columns: Of its table.
        show: Prints the rows, if a table is not enough.
        notes: Lines below the table.
        draw: Draws the plot: of these rows, to this file, with this title.
        allocator: What its variants do with freed memory, if they set that themselves.
        files: The code that it measures, from the root of a clone; by default all of the package.
        check: Raises an error, after the rows are written, if they are not what they must be.
    """

    run: Callable[["Request"], Iterable[Row]]
    shapes: Sequence[str]
    sizes: Sequence[str] = ()
    named_shapes: Mapping[str, Sequence[str]] = dataclasses.field(default_factory=dict)
    parse: Callable[[str], Any] | None = None
    devices: Sequence[str] = ()
    dtypes: Sequence[str] = ()
    columns: Columns = dataclasses.field(default_factory=lambda: COLUMNS)
    show: Callable[[Sequence[Row], Console], None] | None = None
    notes: Callable[[Sequence[Row]], Iterable[str]] = lambda rows: ()
    draw: Callable[[Sequence[Row], Path, str], None] = draw_points
    allocator: str = ""
    files: Sequence[str] = ()
    check: Callable[[Sequence[Row]], None] = lambda rows: None

    @property
    def name(self) -> str:
        """As the command line calls it."""
        return self.run.__module__.rpartition(".")[2].replace("_", "-")

    def read_shapes(self, names: Sequence[str] | None) -> dict[str, Any]:
        """What it reads from the shapes of these names, by default its own; a name may stand for a set of shapes.

        Raises:
            ValueError: It is no shape of this bench.
        """
        shapes = [shape for name in names or self.shapes for shape in self.named_shapes.get(name, [name])]
        read = self.parse or partial(sizes_of, names=self.sizes, example=self.shapes[0], set_names=self.named_shapes)
        return {shape: read(shape) for shape in shapes}

    def print_table(self, rows: Sequence[Row], console: Console) -> None:
        """Print the rows, and the notes below them."""
        if self.show is None:
            print_table(rows, console, self.columns)
        else:
            self.show(rows, console)
        for note in self.notes(rows):
            console.print(note, highlight=False)


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
        """Forward and backward, with new gradients."""
        self.clear()
        torch.autograd.backward(self.forward(), self.gradient)

    def clear(self) -> None:
        """Forget the gradients of all that is held."""
        for item in self.held:
            for tensor in item.parameters() if isinstance(item, nn.Module) else [item]:
                tensor.grad = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """What a bench is asked to measure.

    Attributes:
        bench: Its name.
        shape: As typed.
        sizes: What the bench reads from the shape.
        dtype: ``float32``, ``bfloat16`` or ``float16``.
        device: ``cpu`` or ``cuda``.
        variants: Only these, or all for ``None``.
        rounds: How often each is timed.
        budget_s: Stop timing after so many seconds, regardless of the rounds.
        parts: How many shapes and dtypes are asked for.
        options: Of the command line.
        status: A line about the progress; ``None`` where nobody reads it.
    """

    bench: str
    shape: str
    sizes: Any
    dtype: str = "float32"
    device: str = "cpu"
    variants: Sequence[str] | None = None
    rounds: int = 7
    budget_s: float | None = None
    parts: int = 1
    options: Any = None
    status: Any = None

    def chosen(self, names: Iterable[str]) -> list[str]:
        """The names that are asked for, in the order asked; by default all.

        Raises:
            ValueError: There is no such variant.
        """
        names = list(names)
        if unknown := [name for name in self.variants or () if name not in names]:
            raise ValueError(f"variants {', '.join(map(repr, unknown))}: there are {', '.join(names)}")
        return list(names if self.variants is None else self.variants)

    def row(self, variant: str, samples: Timing | Sequence[float] = (), **fields: Any) -> Row:
        """A row of this shape; with the median of times in seconds, and their quantiles (a timing) or extremes."""
        if isinstance(samples, Timing):
            fields |= {"total_s": samples.median, "total_p20_s": samples.p20, "total_p80_s": samples.p80}
        elif samples:
            middle = statistics.median(samples)
            fields |= {"total_s": middle, "total_p20_s": min(samples), "total_p80_s": max(samples)}
        own: dict[str, Any] = {"bench": self.bench, "variant": variant, "shape": self.shape, "dtype": self.dtype}
        own |= {"device": self.device, **dict.fromkeys(MEASURED), "torch": torch.__version__}
        own |= {"machine": describe_machine(self.device), "_group": f"{self.shape} {self.dtype}"}
        return Row(**{**own, **fields})

    def interleaved(self, functions: Mapping[str, Callable[[], Result]], rounds: int = 0) -> dict[str, list[Result]]:
        """What each function returns in each round, until the rounds (those asked for) or the budget are spent."""
        results: dict[str, list[Result]] = {name: [] for name in functions}
        start = time.perf_counter()
        for _ in range(rounds or self.rounds):
            for name, function in functions.items():
                results[name].append(function())
            if self.budget_s is not None and time.perf_counter() - start > self.budget_s:
                break
        return results


def measure(cases: Mapping[str, Case], request: Request, *, tokens: int) -> Iterator[Row]:
    """Time and memory of the chosen cases, interleaved; the first is what the ratios compare with.

    All shapes and dtypes share a budget evenly.
    """
    cases = {name: cases[name] for name in request.chosen(cases)}
    memory = {name: measure_memory(case, request.device) for name, case in cases.items()}
    for case in cases.values():
        case.clear()
    # a whole step right after its forward: what disturbs the one disturbs the other
    runs: dict[str, Callable[[], object]] = {}
    for name, case in cases.items():
        runs |= {f"fwd {name}": case.forward, f"both {name}": case.step}
    if request.device == "cuda":
        interleave(runs, rounds=10_000, warmup=0, device="cuda", budget_s=WARM_UP_S)
    share = None if request.budget_s is None else request.budget_s / request.parts
    timings = interleave(runs, rounds=request.rounds, warmup=1, device=request.device, budget_s=share)
    first, (_, first_peak) = next(iter(memory.items()))
    for name, (saved, peak) in memory.items():
        forward = timings[f"fwd {name}"].median
        total = timings[f"both {name}"]
        yield request.row(
            name,
            total,
            forward_s=forward,
            backward_s=total.median - forward,
            **ratios(total.samples, timings[f"both {first}"].samples),
            peak_bytes=peak,
            saved_bytes=saved,
            tokens_per_s=tokens / total.median,
            peak_ratio=peak / first_peak if peak and first_peak else None,
        )
        cases[name].clear()


def timed_rows(
    functions: Mapping[str, Callable[[], object]], request: Request, *, warmup: int, tokens: int | None = None
) -> list[Row]:
    """Time whole calls, interleaved; the first is what ``ratio`` compares with, ``tokens`` are those of a call."""
    timings = interleave(
        functions, rounds=request.rounds, warmup=warmup, device=request.device, budget_s=request.budget_s
    )
    first = next(iter(timings.values()))
    return [
        request.row(name, times, **ratios(times.samples, first.samples), tokens_per_s=tokens and tokens / times.median)
        for name, times in timings.items()
    ]


def measure_memory(case: Case, device: str) -> tuple[int | None, int | None]:
    """Bytes alive after forward, and the most alive in the step with its gradients, beyond what the case holds."""
    case.clear()
    gc.collect()
    if device == "cuda":
        case.step()  # compiles, and fills the libraries' own workspaces
        case.clear()
    elif not case.is_eager:
        return None, None
    held: list[Tensor | nn.Module] = [*case.held, *([] if case.gradient is None else [case.gradient])]
    return memory_of(case.forward, lambda out: torch.autograd.backward(out, case.gradient), held, device)


def step_peak_bytes(step: Callable[[], object], model: nn.Module, optimizer: Any, batch: Sequence[Tensor]) -> int:
    """The most that a training step holds beyond weights, optimizer state and batch."""
    held: list[Tensor | nn.Module] = [model, *batch, *tensors_in(optimizer.state)]
    return memory_of(lambda: None, lambda _: step(), held, batch[0].device.type)[1]


def describe_machine(device: str) -> str:
    """What the numbers were taken on."""
    if device == "cuda":
        return str(torch.cuda.get_device_name())
    return f"{cpu_name()}, {torch.get_num_threads()} threads"
