"""Rows of measurements: taken interleaved, written as JSON, shown as tables; ``plots`` draws them.

A bench is a module with ``run(asked)``, which yields the rows of one shape and dtype. ``NAMES`` are the sizes in a
shape (or ``parse`` reads it), ``DEFAULT_SHAPES`` those that are measured by default. It may have ``SHAPES``, named sets
of them; ``DTYPES`` and ``DEVICES``, if it does not take all; ``COLUMNS`` of its table, or ``print_table``; ``notes``
below the table; ``draw``; ``ALLOCATOR``, if its variants set their own; and ``verdict``, which raises an error after
the rows are written.

A *case* builds a workload once and says how to run it: ``forward()`` gives something with ``backward()``. Time is the
median of interleaved rounds. Memory is what the operator-level meter counts on a CPU and what the allocator reports on
CUDA, without parameters and inputs, gradients included.
"""

import contextlib
import dataclasses
import gc
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import date, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from rich.box import SIMPLE_HEAD
from rich.table import Column, Table
from torch import Tensor, nn

from lightning_llm.accounting.hardware import cpu_name
from lightning_llm.data.token_store import dtype_for
from lightning_llm.data.token_store_writer import TokenStoreWriter
from lightning_llm.data.tokenizers import Tokenizer
from lightning_llm.interop.hf_mapping import mapping_for
from lightning_llm.io.atomic import write_json
from lightning_llm.io.console import Console
from lightning_llm.io.untrusted import number_in, read_json
from lightning_llm.measure.meter import MemoryMeter, tensors_in
from lightning_llm.measure.timer import Timing, interleave
from lightning_llm.model.config import ModelConfig
from lightning_llm.training.distributed import leave_groups

MIB = 2**20
HEAD_DIM = 64  # where a shape has no number of heads
FIELDS = {
    **{"vocab": "vocab_size", "hidden": "hidden_size", "intermediate": "intermediate_size"},
    **{"layers": "num_hidden_layers", "heads": "num_attention_heads", "kv_heads": "num_key_value_heads"},
    **{"context": "max_position_embeddings", "tied": "tie_word_embeddings"},
}
Sizes = dict[str, int]
Found = TypeVar("Found")
MEASURED = (  # the fields of every row
    *("forward_s", "backward_s", "total_s", "total_p20_s", "total_p80_s", "ratio", "ratio_p20", "ratio_p80"),
    *("peak_bytes", "saved_bytes", "resident_bytes", "tokens_per_s", "bytes_per_s", "wire_bytes"),
)
# By heading: a field of a row, or a function of it; what it is multiplied by; its format.
Columns = dict[str, tuple[str | Callable[["Row"], Any], float, str]]
KNOWN: Columns = {
    **{f"{part} ms": (f"{part}_s", 1e3, ".1f") for part in ("forward", "backward", "total")},
    **{"p20": ("total_p20_s", 1e3, ".2f"), "p80": ("total_p80_s", 1e3, ".2f"), "ms": ("total_s", 1e3, ".2f")},
    **{"least": ("total_p20_s", 1e3, ".2f"), "most": ("total_p80_s", 1e3, ".2f"), "s": ("total_s", 1, ".2f")},
    **{"ratio": ("ratio", 1, ".2f"), "peak ratio": ("peak_ratio", 1, ".2f"), "tokens/s": ("tokens_per_s", 1, ",.0f")},
    **{f"{kind} MiB": (f"{kind}_bytes", 1 / MIB, ",.0f") for kind in ("saved", "peak", "resident")},
}


def columns(*names: str) -> Columns:
    """Columns that several benches have."""
    return {name: KNOWN[name] for name in names}


COLUMNS = columns("forward ms", "backward ms", "total ms", "ratio", "saved MiB", "peak MiB", "peak ratio")


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
        """Forget the gradients."""
        for item in self.held:
            for tensor in item.parameters() if isinstance(item, nn.Module) else [item]:
                tensor.grad = None


class Row(SimpleNamespace):
    """One measurement, in seconds and bytes; what does not apply is ``None``.

    Fields with a leading underscore are for table and plot alone, and not written.
    """

    def __getattr__(self, name: str) -> Any:
        """``None``: the row has no field of that name."""
        if name.startswith("__"):
            raise AttributeError(name)
        return None


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

    def chosen(self, known: Iterable[str]) -> list[str]:
        """The names that are asked for, in the order asked; by default all.

        Raises:
            ValueError: There is no such variant.
        """
        known = list(known)
        if unknown := [name for name in self.variants or () if name not in known]:
            raise ValueError(f"variants {', '.join(map(repr, unknown))}: there are {', '.join(known)}")
        return list(known if self.variants is None else self.variants)

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

    def interleaved(self, functions: Mapping[str, Callable[[], Found]], rounds: int = 0) -> dict[str, list[Found]]:
        """What each function returns in each round, until the rounds (those asked for) or the budget are spent."""
        found: dict[str, list[Found]] = {name: [] for name in functions}
        start = time.perf_counter()
        for _ in range(rounds or self.rounds):
            for name, function in functions.items():
                found[name].append(function())
            if self.budget_s is not None and time.perf_counter() - start > self.budget_s:
                break
        return found


def sizes_of(text: str, names: Sequence[str], example: str, known: Iterable[str] = ()) -> Sizes:
    """The sizes of a shape, numbers with an x between them.

    Args:
        text: Such as ``4096x768x50257``.
        names: Of the sizes.
        example: A shape, for the error.
        known: Names of sets of shapes, for the error.

    Raises:
        ValueError: It is no such shape.
    """
    parts = text.split("x") if text else []
    if len(parts) != len(names) or not all(map(number_in, parts)):
        named = "".join(f", or {name}" for name in known)
        wanted = f"must be {' x '.join(names)}, such as {example}{named}" if names else "are not options of this bench"
        raise ValueError(f"shapes {text!r} {wanted}")
    return dict(zip(names, map(int, parts), strict=True))


def model_config(sizes: Sizes, **fields: Any) -> ModelConfig:
    """A Llama-style model of these sizes; ``fields`` are its further options."""
    sizes = {"heads": max(1, sizes["hidden"] // HEAD_DIM), **sizes}
    named: dict[str, Any] = {field: sizes[name] for name, field in FIELDS.items() if name in sizes}
    return ModelConfig(**named, **fields)


def llama(config: ModelConfig, **options: Any) -> Any:
    """``LlamaForCausalLM`` of the installed transformers, of the same sizes."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**mapping_for(config).to_fields(config), **options))


def make_store(path: Path, *, vocab: int, tokens: int) -> str:
    """Make a token store of random ids, a quarter of which are the validation split too; returns its path."""
    ids = np.random.default_rng(0).integers(0, vocab, tokens).astype(dtype_for(vocab))
    tokenizer, source = Tokenizer.train_byte().to_str(), {"fingerprint": "random"}
    with TokenStoreWriter(path, vocab_size=vocab, tokenizer=tokenizer, source=source) as writer:
        for split, part in (("train", ids), ("val", ids[: tokens // 4])):
            writer.write(split, part, text_bytes=len(part), documents=1)
    return str(path)


def measure(cases: Mapping[str, Case], asked: Request, *, tokens: int) -> Iterator[Row]:
    """Time and memory of the chosen cases, interleaved; the first is what the ratios compare with.

    All shapes and dtypes share a budget evenly.
    """
    cases = {name: cases[name] for name in asked.chosen(cases)}
    memory = {name: measure_memory(case, asked.device) for name, case in cases.items()}
    for case in cases.values():
        case.clear()
    # a whole step right after its forward: what disturbs the one disturbs the other
    runs = {f"{part} {name}": run for name, c in cases.items() for part, run in (("fwd", c.forward), ("both", c.step))}
    share = None if asked.budget_s is None else asked.budget_s / asked.parts
    timings = interleave(runs, rounds=asked.rounds, warmup=1, device=asked.device, budget_s=share)
    first = next(iter(cases))
    for name, (saved, peak) in memory.items():
        forward, total, first_peak = timings[f"fwd {name}"].median, timings[f"both {name}"], memory[first][1]
        yield asked.row(
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
    functions: Mapping[str, Callable[[], object]], asked: Request, *, warmup: int, tokens: int | None = None
) -> list[Row]:
    """Time whole calls, interleaved; the first is what ``ratio`` compares with, ``tokens`` are those of a call."""
    timings = interleave(functions, rounds=asked.rounds, warmup=warmup, device=asked.device, budget_s=asked.budget_s)
    first = next(iter(timings.values()))
    return [
        asked.row(name, timing, **ratios(timing.samples, first.samples), tokens_per_s=tokens and tokens / timing.median)
        for name, timing in timings.items()
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
    return _memory_of(case.forward, lambda out: torch.autograd.backward(out, case.gradient), held, device)


def step_peak_bytes(step: Callable[[], object], model: nn.Module, optimizer: Any, batch: Sequence[Tensor]) -> int:
    """The most that a training step holds beyond weights, optimizer state and batch."""
    held: list[Tensor | nn.Module] = [model, *batch, *tensors_in(optimizer.state)]
    return _memory_of(lambda: None, lambda _: step(), held, batch[0].device.type)[1]


def _memory_of(
    first: Callable[[], Found], then: Callable[[Found], object], held: Sequence[Tensor | nn.Module], device: str
) -> tuple[int, int]:
    """Bytes alive between two calls, and the most alive in both, beyond what is held."""
    if device == "cuda":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()  # libraries' buffers too, which are no part of a step
        torch.cuda.reset_peak_memory_stats()
        out = first()
        saved = torch.cuda.memory_allocated() - before
        then(out)
        return saved, torch.cuda.max_memory_allocated() - before
    with MemoryMeter(exclude=held) as meter:
        out = first()
        saved = meter.live_bytes
        then(out)
    return saved, int(meter.peak_bytes)


@contextlib.contextmanager
def process_group(rank: int, world: int, device: str, meeting: str) -> Iterator[None]:
    """One of ``world`` processes, with a GPU or a thread each, which find each other by the file ``meeting``."""
    if device == "cuda":
        torch.cuda.set_device(rank)
    else:
        torch.set_num_threads(1)
    store = dist.FileStore(meeting, world)  # type: ignore[attr-defined]
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timedelta(minutes=10))
    yield
    dist.barrier()
    leave_groups()


def describe_machine(device: str) -> str:
    """What the numbers were taken on."""
    if device == "cuda":
        return str(torch.cuda.get_device_name())
    return f"{cpu_name()}, {torch.get_num_threads()} threads"


def ratios(samples: Sequence[float], first: Sequence[float]) -> dict[str, float]:
    """Median, 20th and 80th percentile of the ratios within each round, as fields of a row."""
    found = np.quantile(np.divide(samples, first), (0.5, 0.2, 0.8))
    return dict(zip(("ratio", "ratio_p20", "ratio_p80"), map(float, found), strict=True))


def write_rows(
    rows: Iterable[Row], path: Path, command: str, files: Sequence[str] = (), commit: str | None = None
) -> None:
    """Write rows with their origin, as JSON.

    Args:
        rows: What was measured.
        path: Of the file.
        command: That measured it.
        files: The code that it measured, from the root of a clone; by default all of the package.
        commit: Of the code, where git cannot tell: in a copy of a clone, or on a machine without git.
    """
    root = Path(__file__).parents[2]
    git = ["git", "-C", str(root), "log", "-1", "--format=%H"]
    if (root / ".git").exists() and shutil.which("git"):
        commit = subprocess.run(git, capture_output=True, text=True).stdout.strip() or commit
    record = {"command": command, "date": date.today().isoformat(), "commit": commit}
    written = [{k: v for k, v in vars(row).items() if not k.startswith("_")} for row in rows]
    write_json(path, {**record, "files": list(files) or ["lightning_llm"], "rows": written}, indent=1)


def read_rows(path: Path) -> list[Row]:
    """The rows of a file."""
    return [Row(**row) for row in read_json(path, 1 << 30, nan_is_null=True)["rows"]]


def groups(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """The rows of each shape and dtype that were asked for."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row._group, []).append(row)
    return found


def print_table(rows: Iterable[Row], console: Console, shown: Columns) -> None:
    """A table for each shape and dtype; a column without any value is left out."""
    for title, group in groups(rows).items():
        table = Table(Column("variant", no_wrap=True), title=title, box=SIMPLE_HEAD, padding=(0, 0, 0, 1))
        cells = {heading: [_cell(row, *column) for row in group] for heading, column in shown.items()}
        filled = {heading: found for heading, found in cells.items() if set(found) != {"–"}}
        for heading in filled:
            table.add_column(heading, justify="right")
        for row, found in zip(group, zip(*filled.values(), strict=True), strict=True):
            table.add_row(row.variant, *found)
        console.print(table)


def _cell(row: Row, what: str | Callable[[Row], Any], factor: float, spec: str) -> str:
    value = what(row) if callable(what) else getattr(row, what)
    return "–" if value is None else format(value * factor, spec)
