"""``python -m benchmarks checkpoint``: how long a training run stands still while it saves.

A model of about the asked number of parameters, with the state of AdamW, is saved as a run does it: waiting for the
disk, and in the background, where training continues once the state is copied. ``total_s`` is the time for which
training is held up; ``bytes_per_s`` what reaches the disk per second until it is flushed. Steps that begin while the
thread writes are timed too, and compared with steps alone: the same cores, memory and interpreter serve both.
"""

import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.charts import LOWER, Measure, bar_plot
from benchmarks.harness import Bench, Request
from benchmarks.rows import Row, columns, ratios
from benchmarks.steps import seconds_of
from benchmarks.workloads import model_config
from lightning_llm.measure.meter import tensors_in
from lightning_llm.measure.timer import now
from lightning_llm.model.transformer import Transformer
from lightning_llm.ops.losses import linear_cross_entropy
from lightning_llm.optim.adamw import AdamW
from lightning_llm.optim.groups import param_groups
from lightning_llm.training.checkpoint_io import AtomicCheckpointIO

VARIANTS = ("waiting", "in the background", "step alone", "step during the write")
_HIDDEN, _VOCAB, _BATCH, _SEQ = 512, 4096, 1, 32
Taken = defaultdict[str, list[float]]
Ways = dict[str, AtomicCheckpointIO]
Step = Callable[[], None]
Content = Callable[[], dict[str, Any]]


def run(request: Request) -> Iterator[Row]:
    """A row for each way: medians of interleaved rounds."""
    variants, (millions,) = request.chosen(VARIANTS), request.sizes.values()
    step, content = _training(millions, request.device)
    size = sum(tensor.nbytes for tensor in tensors_in(content()))
    taken, written = Taken(list), Taken(list)
    ways = {name: AtomicCheckpointIO(asynchronous=name != VARIANTS[0]) for name in VARIANTS[:2]}
    with tempfile.TemporaryDirectory(prefix="bench-checkpoint-") as folder:
        save = partial(_round, step, content, ways, Path(folder) / "x.ckpt")
        save(Taken(list), Taken(list))  # the first one pays for fresh memory and a fresh file
        request.interleaved({"": partial(save, taken, written)})
    for name in (name for name in variants if name in taken):
        first = statistics.median(taken[VARIANTS[0] if name in written else VARIANTS[2]])
        compared = ratios(taken[name], [first] * len(taken[name]))  # a round has more steps than saves
        row = request.row(name, taken[name], shape=f"{millions} M parameters", **compared)
        if name in written:
            row.saved_bytes, row.bytes_per_s = size, size / statistics.median(written[name])
        yield row


def _round(step: Step, content: Content, ways: Ways, path: Path, taken: Taken, written: Taken) -> None:
    ended: list[float] = []
    for name, files in ways.items():
        begun = time.perf_counter()
        files.save_checkpoint(content(), path)
        taken[name].append(time.perf_counter() - begun)
        ended.clear()
        files.then(lambda: ended.append(time.perf_counter()))
        while not ended:
            taken[VARIANTS[3]].append(seconds_of(step))
        files.wait()
        written[name].append(ended[0] - begun)
    taken[VARIANTS[2]] += [seconds_of(step) for _ in range(3)]


def _training(millions: int, device: str) -> tuple[Step, Content]:
    layers = max(1, round((millions * 1e6 - 2 * _VOCAB * _HIDDEN) / (12 * _HIDDEN**2)))
    config = model_config({"vocab": _VOCAB, "hidden": _HIDDEN, "layers": layers, "heads": 8, "context": _SEQ})
    torch.manual_seed(0)
    model: nn.Module = Transformer(config).to(device)
    optimizer = AdamW(param_groups(model))
    ids = torch.randint(0, _VOCAB, (_BATCH, _SEQ), device=device)

    def step() -> None:
        optimizer.zero_grad()
        linear_cross_entropy(model(ids), model.lm_head.weight, ids).backward()  # type: ignore[no-untyped-call, union-attr, arg-type]
        optimizer.step()
        now(device)

    def content() -> dict[str, Any]:
        return {"state_dict": model.state_dict(), "optimizer_states": [optimizer.state_dict()]}

    step()
    return step, content


BENCH = Bench(
    run=run,
    shapes=["30"],
    sizes=("millions of parameters",),
    dtypes=("float32",),
    columns={**columns("ms", "least", "most", "ratio", "saved MiB"), "MB/s to disk": ("bytes_per_s", 1e-6, ".0f")},
    draw=bar_plot(Measure("total_s", 1e3, f"ms that training is held up, and ms per step{LOWER}")),
    files=("lightning_llm/checkpoints", "lightning_llm/training/checkpoint_io.py"),
)
