"""The second command on a GPU, 9 minutes: more sizes, chunks of the loss, one-process DDP and FSDP2, and resuming."""

import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from unittest.mock import patch

import torch

from benchmarks import loss
from benchmarks.gpu import end_to_end, next_list, training
from benchmarks.gpu.runner import Machine, Part, Task
from benchmarks.gpu.training import CAPTURED, EAGER, LIGER, NANOGPT, OURS, TRANSFORMERS, step
from benchmarks.rows import Row
from benchmarks.steps import LossModule, plain_step, process_group
from benchmarks.workloads import model_config
from lightning_llm.measure.timer import interleave
from lightning_llm.model.transformer import Transformer
from lightning_llm.ops.losses import linear_cross_entropy
from lightning_llm.optim.adamw import AdamW

CHUNK_BYTES = {"128 MiB": 2**27, "512 MiB": 2**29, "2 GiB": 2**31}  # of logits
ROWS = (8, 12, 64)  # of 1,024 tokens; compiled, 32 are in the first command
FSDP = "FSDP2, one process"
RESUME = "resume, deterministic"


def tasks(machine: Machine) -> list[Task]:
    """The measurements, in the order in which they are made."""
    whole = {task.name: task for task in end_to_end.tasks(machine)}
    found = [
        step(machine, "1.3 B", NANOGPT, 70, is_profiled=True),
        *(step(machine, f"124 M, {rows} rows", side, 15) for rows in ROWS for side in (EAGER, OURS)),
        step(machine, "124 M", EAGER, 15),
        step(machine, "124 M, 8 rows", CAPTURED, 20),
        Task("loss chunks", 30, partial(_loss_chunks, machine)),
        *(Task(f"DDP, {_optimized(on)}", 30, partial(_ddp, machine, on)) for on in (True, False)),
        whole[FSDP],
        whole[RESUME],
        step(machine, "124 M", TRANSFORMERS, 45),
        step(machine, "124 M", LIGER, 45),
    ]
    return [task._replace(must=True) for task in found]


def _loss_chunks(machine: Machine) -> Iterator[Row]:
    """Time and peak of the loss of 32 × 1,024 tokens with chunks of several sizes."""
    device, shape = machine.device, "64x32x65" if machine.dry_run else "32768x768x50304"
    tokens, hidden, vocab = (int(size) for size in shape.split("x"))
    kind = torch.bfloat16
    states = torch.randn(tokens, hidden, device=device, dtype=kind, requires_grad=True)
    weight = torch.randn(vocab, hidden, device=device, requires_grad=True)
    targets = torch.randint(vocab, (tokens,), device=device)

    def run(chunks: int) -> None:
        states.grad = weight.grad = None
        with torch.autocast(device, kind):
            value = linear_cross_entropy(states, weight, targets, num_chunks=chunks)
        torch.autograd.backward(value)

    bytes_of_logits = tokens * vocab * kind.itemsize
    functions = {name: partial(run, max(1, -(-bytes_of_logits // size))) for name, size in CHUNK_BYTES.items()}
    peaks: dict[str, int | None] = dict.fromkeys(functions)
    for name, function in functions.items() if device == "cuda" else ():
        function()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        function()
        peaks[name] = torch.cuda.max_memory_allocated() - before
    timings = interleave(functions, rounds=2 if machine.dry_run else 100, device=device, budget_s=20.0)
    for name, timing in timings.items():
        fields = {"shape": shape, "times_s": list(timing.samples), "peak_bytes": peaks[name]}
        yield machine.row(f"loss, chunks of {name}", timing, **fields)


def _optimized(is_on: bool) -> str:
    return f"optimize_ddp {'on' if is_on else 'off'}"


def _ddp(machine: Machine, is_optimized: bool) -> Iterator[Row]:
    """Steps of compiled blocks under DDP with one process, whose blocks Dynamo's DDPOptimizer may cut or not."""
    device, request = machine.device, training.request_of(machine, "124 M", "bfloat16")
    sizes = request.sizes
    steps = 2 if machine.dry_run else 60
    with tempfile.TemporaryDirectory() as folder, process_group(0, 1, device, str(Path(folder, "meeting"))):
        model = Transformer(model_config(sizes))
        model.compile_blocks()
        with patch.object(torch._dynamo.config, "optimize_ddp", is_optimized):  # after compile_blocks, which sets it
            model.to(device).train()
            wrapped = torch.nn.parallel.DistributedDataParallel(
                LossModule(partial(_loss_of, model), model), gradient_as_bucket_view=True
            )
            optimizer = AdamW(model.parameters(), lr=1e-3)

            def one() -> None:
                ids = torch.randint(sizes["vocab"], (sizes["rows"], sizes["context"]), device=device)
                loss_of = partial(wrapped, ids, ids.roll(-1, 1))
                plain_step(loss_of, model, optimizer, device=device, dtype="bfloat16")
                optimizer.zero_grad()

            timing = interleave({"step": one}, rounds=steps, warmup=3, device=device)["step"]
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    fields = {"times_s": list(timing.samples), "ran": {"graphs": graphs}}
    yield request.row(f"DDP, {_optimized(is_optimized)}", timing, **fields)


def _loss_of(model: Transformer, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return linear_cross_entropy(model(ids), model.lm_head.weight, targets)


PART = Part(
    name="second",
    tasks=tasks,
    columns={**end_to_end.PART.columns, **next_list.PART.columns},
    draw=training.draw,
    files=sorted({*training.PART.files, *end_to_end.PART.files, *loss.BENCH.files}),
    complete=training.derive,
)
