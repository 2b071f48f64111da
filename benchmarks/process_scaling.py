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

import os
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks.charts import HIGHER, lines, panels
from benchmarks.harness import Bench, Request, describe_machine
from benchmarks.rows import MIB, Row, columns
from benchmarks.steps import LossModule, plain_step, process_group, seconds_of
from benchmarks.workloads import ShapeSizes, model_config
from lightning_llm.io.charts import chart, legend
from lightning_llm.same.processes import in_fresh_processes
from lightning_llm.training.module import LanguageModel

PREDICTED = (8, 64)
VOCAB = 4096
WARM_UP, STEPS = 3, 5  # of each count and round
APART = 0  # all processes at once, none of which exchanges anything
SMALL, LARGE = 4, 2**26  # bytes of the all-reduces that latency and bandwidth are taken from

Found = dict[str, Any]


def run(request: Request) -> Iterator[Row]:
    """A row for each number of processes; ``variants`` are those numbers, by default powers of two."""
    most = torch.cuda.device_count() if request.device == "cuda" else (os.cpu_count() or 1)
    counts = _counts(request.variants, most)
    with tempfile.TemporaryDirectory(prefix="bench-scaling-") as folder:
        how = (request.sizes, counts, request.device, request.dtype, request.rounds)
        jobs = [(str(Path(folder, "meeting")), rank, *how) for rank in range(counts[-1])]
        of_first = in_fresh_processes(_measured, jobs, name=request.bench)[0]
    yield from _rows(of_first, counts, request)


def _counts(variants: Sequence[str] | None, most: int) -> list[int]:
    if variants is None:
        return [2**power for power in range(most.bit_length()) if 2**power <= most]
    if wrong := [text for text in variants if not text.isdigit() or not 1 <= int(text) <= most]:
        raise ValueError(f"variants {', '.join(map(repr, wrong))}: numbers of processes from 1 to {most}, as here are")
    return sorted({1, *map(int, variants)})


def _measured(job: tuple[str, int, ShapeSizes, list[int], str, str, int]) -> Found:
    """What one of the processes found: all that is returned comes from the first."""
    meeting, rank, sizes, counts, device, dtype, rounds = job
    with process_group(rank, counts[-1], device, meeting):
        groups = {count: dist.new_group(list(range(count))) for count in counts}
        steps = {n: _steps(sizes, groups[n] if n > 1 else None, device, dtype) for n in counts if rank < n}
        steps[APART] = _steps(sizes, None, device, dtype)
        taken: dict[int, list[float]] = {count: [] for count in [*counts, APART]}
        wire: dict[int, float] = {}
        for step in steps.values():
            for _ in range(WARM_UP):
                step()
        for _ in range(rounds):
            for count in [*counts, APART]:
                dist.barrier()
                before = _loopback_bytes()
                if count in steps:
                    taken[count] += [seconds_of(steps[count], device) for _ in range(STEPS)]
                dist.barrier()
                wire[count] = (_loopback_bytes() - before) / STEPS
        links = {}
        for count in counts[1:]:
            if rank < count:
                links[count] = [_all_reduce_seconds(groups[count], size, device) for size in (SMALL, LARGE)]
            dist.barrier()
        if rank:
            return {}
        parameters = sum(p.numel() for p in _model(sizes).parameters())
        backward = _backward_seconds(sizes, device, dtype)
        return {"taken": taken, "wire": wire, "links": links, "gradient_bytes": 4 * parameters, "backward": backward}


def _model(sizes: ShapeSizes) -> LanguageModel:
    torch.manual_seed(0)
    model = LanguageModel(model_config({**sizes, "vocab": VOCAB}))
    model.configure_model()
    return model


def _steps(sizes: ShapeSizes, group: Any, device: str, dtype: str) -> Callable[[], None]:
    """A function that makes one optimizer step."""
    model = _model(sizes).to(device)
    optimizer, batch = model.make_optimizer(list(model.parameters())), _batch(sizes, device)
    loss: torch.nn.Module = LossModule(model.loss, model)
    if group is not None:
        loss = DistributedDataParallel(loss, process_group=group, gradient_as_bucket_view=True, static_graph=True)

    def step() -> None:
        plain_step(partial(loss, batch), model, optimizer, device=device, dtype=dtype, clip=None)
        optimizer.zero_grad()

    return step


def _batch(sizes: ShapeSizes, device: str) -> dict[str, torch.Tensor]:
    ids = torch.randint(VOCAB, (sizes["rows"], sizes["context"]), device=device)
    return {"input_ids": ids, "targets": ids.roll(-1, 1)}


def _backward_seconds(sizes: ShapeSizes, device: str, dtype: str) -> float:
    """Of one process alone, the median of five."""
    model, batch, taken = _model(sizes).to(device), _batch(sizes, device), []
    for _ in range(WARM_UP + STEPS):
        with torch.autocast(device, torch.bfloat16, enabled=dtype == "bfloat16"):
            loss = model.loss(batch)
        taken.append(seconds_of(loss.backward, device))
    return statistics.median(taken[WARM_UP:])


def _all_reduce_seconds(group: Any, size: int, device: str) -> float:
    buffer = torch.zeros(size // 4, device=device)
    reduce = partial(dist.all_reduce, buffer, group=group)
    return statistics.median([seconds_of(reduce, device) for _ in range(WARM_UP + STEPS)][WARM_UP:])


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


def _rows(results: Found, counts: list[int], request: Request) -> Iterator[Row]:
    medians = {count: statistics.median(results["taken"][count]) for count in [*counts, APART]}
    tokens = request.sizes["rows"] * request.sizes["context"]

    def row(count: int, seconds: float, variant: str, wire: float | None) -> Row:
        return request.row(
            variant,
            total_s=seconds,
            tokens_per_s=count * tokens / seconds,
            ratio=medians[1] / seconds,  # efficiency: the work of each process stays the same
            wire_bytes=None if wire is None else int(wire),
            machine=describe_machine(request.device).partition(",")[0],  # each has one thread
        )

    for count in counts:
        wire = results["wire"][count] if request.device == "cpu" and count > 1 else None
        yield row(count, medians[count], f"{count}", wire)
    if len(counts) == 1:
        return
    most, size, alone = counts[-1], results["gradient_bytes"], medians[APART]
    latency, bandwidth = link_of(most, *results["links"][most])
    shown = max(0.0, medians[most] - alone)
    hidden = max(0.0, ring_seconds(most, size, latency, bandwidth) - shown) / results["backward"]
    for count in (count for count in PREDICTED if count > most):
        open_s = max(0.0, ring_seconds(count, size, latency, bandwidth) - min(1.0, hidden) * results["backward"])
        sent = 2 * (count - 1) * size  # by all processes together
        yield row(count, alone + open_s, f"{count} (predicted)", sent)


def draw(rows: Sequence[Row], path: Path, title: str, **options: Any) -> None:
    """Tokens per second against processes, as measured, and in proportion to one process. Predictions are no points."""
    shapes = panels(row for row in rows if row.variant.isdigit())
    with chart(path, title, height=3.2, columns=len(shapes), **options) as [axes]:
        for axis, (name, group) in zip(axes, shapes.items(), strict=True):
            measured = [(int(row.variant), row.tokens_per_s) for row in group]
            series = {"proportional": [(n, n * measured[0][1]) for n, _ in measured], "measured": measured}
            lines(axis, series, "processes", f"tokens/s{HIGHER}" if axis is axes[0] else "")
            axis.set_title(name)
        legend(axes[0], fontsize=9)


BENCH = Bench(
    run=run,
    shapes=["4x256x256x4"],
    sizes=("layers", "hidden", "context", "rows"),  # of each process
    columns={
        **columns("total ms", "tokens/s"),
        "efficiency": ("ratio", 1, ".2f"),
        "MiB on the wire per step, all": ("wire_bytes", 1 / MIB, ".1f"),
    },
    draw=draw,
    files=("lightning_llm/model", "lightning_llm/ops", "lightning_llm/optim"),
)
