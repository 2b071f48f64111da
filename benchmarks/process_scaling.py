"""``python -m benchmarks process-scaling``: tokens per second on 1 to N processes, and a prediction for 8 and 64.

Every process has the same rows, one thread on a CPU or one GPU, and the model in ``DistributedDataParallel`` as
``configs/ddp.yaml`` sets it up. All counts of processes are interleaved within a job: those beyond it wait.

What is predicted, and by which model (Thakur et al. 2005, "Optimization of Collective Communication Operations in
MPICH", section 4.3; ring): an all-reduce of G bytes over n processes takes

    C(n) = 2 (n - 1) α + 2 (n - 1) / n · G / B

with the latency α and the bandwidth B of a link, both from all-reduces of a small and of a large buffer measured here.
DDP hides it behind backward as far as that reaches: step(n) = T + max(0, C(n) - h · backward). T is the step of as many
processes as were measured, without exchange: on one machine they compete for its cores and its memory, which more
machines would not. The hidden share h, from 0 to 1, is what the largest measured count shows. All links are taken to be
as fast as those measured.
"""

import dataclasses
import json
import os
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel

from lightning_llm.bench.harness import MIB, Columns, Request, Row, Sizes, columns, groups, model_config
from lightning_llm.bench.plots import chart, lines
from lightning_llm.training.distributed import leave_groups
from lightning_llm.training.module import LanguageModel

NAMES = ("layers", "hidden", "context", "rows")  # of each process
DEFAULT_SHAPES = ["4x256x256x4"]
PREDICTED = (8, 64)
VOCAB = 4096
WARM_UP, STEPS = 3, 5  # of each count and round
APART = 0  # all processes at once, none of which exchanges anything
SMALL, LARGE = 4, 2**26  # bytes of the all-reduces that latency and bandwidth are taken from
COLUMNS: Columns = {
    **columns("total ms", "tokens/s"),
    "efficiency": ("ratio", 1, ".2f"),
    "MiB on the wire per step, all": ("wire_bytes", 1 / MIB, ".1f"),
}

Found = dict[str, Any]


def run(asked: Request) -> Iterator[Row]:
    """A row for each number of processes; ``variants`` are those numbers, by default powers of two."""
    most = torch.cuda.device_count() if asked.device == "cuda" else (os.cpu_count() or 1)
    counts = _counts(asked.variants, most)
    yield from _rows(_launch(asked.sizes, counts, asked), counts, asked)


def _counts(variants: Sequence[str] | None, most: int) -> list[int]:
    if variants is None:
        return [2**power for power in range(most.bit_length()) if 2**power <= most]
    if wrong := [text for text in variants if not text.isdigit() or not 1 <= int(text) <= most]:
        raise ValueError(f"variants {', '.join(map(repr, wrong))}: numbers of processes from 1 to {most}, as here are")
    return sorted({1, *map(int, variants)})


def _launch(sizes: Sizes, counts: list[int], asked: Request) -> Found:
    """Run all processes; process 0 writes what it found into a file."""
    with tempfile.TemporaryDirectory(prefix="bench-scaling-") as folder:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        result = Path(folder, "found.json")
        job = (sizes, counts, asked.device, asked.dtype, asked.rounds, port, str(result))
        spawn(_process, job, nprocs=counts[-1])  # type: ignore[no-untyped-call]
        found: Found = json.loads(result.read_text(encoding="utf-8"))
        return found


def _process(
    rank: int, sizes: Sizes, counts: list[int], device: str, dtype: str, rounds: int, port: int, result: str
) -> None:
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
    backend = "nccl" if device == "cuda" else "gloo"
    store: Any = dist.TCPStore("127.0.0.1", port, counts[-1], is_master=rank == 0)  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=store, rank=rank, world_size=counts[-1], timeout=timedelta(minutes=10))
    _take_part(rank, sizes, counts, device, dtype, rounds, result)
    dist.barrier()
    leave_groups()


def _take_part(rank: int, sizes: Sizes, counts: list[int], device: str, dtype: str, rounds: int, result: str) -> None:
    groups = {count: dist.new_group(list(range(count))) for count in counts}
    steps = {n: _steps(sizes, groups[n] if n > 1 else None, device, dtype) for n in counts if rank < n}
    apart = _steps(sizes, None, device, dtype)
    taken: dict[int, list[float]] = {count: [] for count in [*counts, APART]}
    wire: dict[int, float] = {}
    for step in (*steps.values(), apart):
        for _ in range(WARM_UP):
            step()
    for _ in range(rounds):
        for count in counts:
            dist.barrier()
            before = _loopback_bytes()
            if rank < count:
                taken[count] += [_timed(steps[count], device) for _ in range(STEPS)]
            dist.barrier()
            wire[count] = (_loopback_bytes() - before) / STEPS
        taken[APART] += [_timed(apart, device) for _ in range(STEPS)]
    links = {}
    for count in counts[1:]:
        if rank < count:
            links[count] = _link(groups[count], device)
        dist.barrier()
    if rank == 0:
        parameters = sum(p.numel() for p in _model(sizes).parameters())
        backward = _backward_seconds(sizes, device, dtype)
        found = {"taken": taken, "wire": wire, "links": links, "gradient_bytes": 4 * parameters, "backward": backward}
        Path(result).write_text(json.dumps(found, allow_nan=False), encoding="utf-8")


def _model(sizes: Sizes) -> LanguageModel:
    torch.manual_seed(0)
    model = LanguageModel(model_config({**sizes, "vocab": VOCAB}))
    model.configure_model()
    return model


class _Loss(torch.nn.Module):
    """What DDP wraps: its forward is the loss."""

    def __init__(self, model: LanguageModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.model.loss(batch)


def _steps(sizes: Sizes, group: Any, device: str, dtype: str) -> Callable[[], None]:
    """A function that makes one optimizer step."""
    loss: torch.nn.Module = _Loss(_model(sizes).to(device))
    optimizer = loss.model.make_optimizer(list(loss.parameters()))  # type: ignore[union-attr, operator]
    if group is not None:
        loss = DistributedDataParallel(loss, process_group=group, gradient_as_bucket_view=True, static_graph=True)
    batch = _batch(sizes, device)

    def step() -> None:
        with torch.autocast(device, torch.bfloat16, enabled=dtype == "bfloat16"):
            value = loss(batch)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()

    return step


def _batch(sizes: Sizes, device: str) -> dict[str, torch.Tensor]:
    ids = torch.randint(VOCAB, (sizes["rows"], sizes["context"]), device=device)
    return {"input_ids": ids, "targets": ids.roll(-1, 1)}


def _backward_seconds(sizes: Sizes, device: str, dtype: str) -> float:
    """Of one process alone, the median of five."""
    model, batch, taken = _model(sizes).to(device), _batch(sizes, device), []
    for _ in range(WARM_UP + STEPS):
        with torch.autocast(device, torch.bfloat16, enabled=dtype == "bfloat16"):
            loss = model.loss(batch)
        taken.append(_timed(loss.backward, device))
    return statistics.median(taken[WARM_UP:])


def _link(group: Any, device: str) -> dict[str, float]:
    """Seconds of an all-reduce of few and of many bytes."""
    seconds = {}
    for size in (SMALL, LARGE):
        buffer = torch.zeros(size // 4, device=device)

        def reduce(buffer: torch.Tensor = buffer) -> None:
            dist.all_reduce(buffer, group=group)

        seconds[str(size)] = statistics.median([_timed(reduce, device) for _ in range(WARM_UP + STEPS)][WARM_UP:])
    return seconds


def _timed(act: Callable[[], object], device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    act()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def _loopback_bytes() -> int:
    """Bytes that went through this machine's loopback, of all processes; 0 where the system does not say."""
    table = Path("/proc/net/dev")
    if not table.is_file():
        return 0
    lines = [line.split(":") for line in table.read_text().splitlines() if ":" in line]
    return next((int(numbers.split()[0]) for name, numbers in lines if name.strip() == "lo"), 0)


def ring_seconds(processes: int, size: float, latency: float, bandwidth: float) -> float:
    """C(n): an all-reduce of ``size`` bytes in a ring."""
    return 2 * (processes - 1) * latency + 2 * (processes - 1) / processes * size / bandwidth


def link_of(processes: int, small_s: float, large_s: float) -> tuple[float, float]:
    """Latency in seconds and bandwidth in bytes per second that explain two measured all-reduces."""
    latency = small_s / (2 * (processes - 1))
    return latency, 2 * (processes - 1) / processes * (LARGE - SMALL) / max(large_s - small_s, 1e-9)


def _rows(found: Found, counts: list[int], asked: Request) -> Iterator[Row]:
    medians = {count: statistics.median(found["taken"][str(count)]) for count in counts}
    tokens = asked.sizes["rows"] * asked.sizes["context"]

    def row(count: int, seconds: float, variant: str, wire: float | None) -> Row:
        made = asked.row(
            variant,
            total_s=seconds,
            tokens_per_s=count * tokens / seconds,
            ratio=medians[1] / seconds,  # efficiency: the work of each process stays the same
            wire_bytes=None if wire is None else int(wire),
        )
        return dataclasses.replace(made, machine=made.machine.partition(",")[0])  # each has one thread

    for count in counts:
        measured_wire = found["wire"][str(count)] if asked.device == "cpu" and count > 1 else None
        yield row(count, medians[count], f"{count}", measured_wire)
    if len(counts) == 1:
        return
    most, size = counts[-1], found["gradient_bytes"]
    latency, bandwidth = link_of(most, *(found["links"][str(most)][str(part)] for part in (SMALL, LARGE)))
    alone = statistics.median(found["taken"][str(APART)])
    shown = max(0.0, medians[most] - alone)
    hidden = max(0.0, ring_seconds(most, size, latency, bandwidth) - shown) / found["backward"]
    for count in PREDICTED:
        if count > most:
            open_s = max(0.0, ring_seconds(count, size, latency, bandwidth) - min(1.0, hidden) * found["backward"])
            wire = 2 * (count - 1) * size  # of all processes together
            yield row(count, alone + open_s, f"{count} (predicted)", wire)


def draw(rows: Sequence[Row], path: Path, title: str) -> None:
    """Tokens per second against processes: measured, predicted, and in proportion."""
    shapes = groups(rows)
    with chart(path, title, columns=len(shapes)) as [axes]:
        for axis, (name, group) in zip(axes, shapes.items(), strict=True):
            points = [(int(row.variant.split()[0]), row.tokens_per_s or 0) for row in group]
            measured = [point for point, row in zip(points, group, strict=True) if row.variant.isdigit()]
            proportion = [(count, points[0][1] * count) for count, _ in points]
            series = {"in proportion": proportion, "predicted": points, "measured": measured}
            lines(axis, series, "processes", "tokens per second")
            axis.set_title(name)
