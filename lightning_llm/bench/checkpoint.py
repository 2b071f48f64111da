"""``lightning-llm bench checkpoint``: how long a training run stands still while it saves.

A model of about the asked number of parameters, with the state of AdamW, is saved as a run does it: waiting for the
disk, and in the background, where training goes on once the state is copied. ``total_s`` is the time for which
training is held up; ``bytes_per_s`` what reaches the disk per second until it is flushed. Beside it, steps that begin
while the thread writes are timed against steps alone: the same cores, memory and interpreter serve both.
"""

import dataclasses
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lightning_llm.bench.harness import Request, Row, chosen_names, describe_machine, draw_bars
from lightning_llm.model.config import ModelConfig
from lightning_llm.model.transformer import Transformer
from lightning_llm.ops.losses import linear_cross_entropy
from lightning_llm.optim.adamw import AdamW
from lightning_llm.optim.groups import param_groups
from lightning_llm.training.checkpoint_io import AtomicCheckpointIO

SHAPES: dict[str, list[str]] = {}
DEFAULT_SHAPES = ["30"]
VARIANTS = ("waiting", "in the background", "step alone", "step beside the writing")
_HIDDEN, _VOCAB, _BATCH, _SEQ = 512, 4096, 1, 32


@dataclasses.dataclass
class _Run:
    step: Callable[[], None]
    content: Callable[[], dict[str, Any]]
    size: int


def run(asked: Request) -> Iterator[Row]:
    """A row for each way and size of model (``shapes``, in millions of parameters): medians of rounds by turns."""
    variants = chosen_names(VARIANTS, asked.variants)
    for text in asked.shapes:
        if not text.isdigit() or int(text) < 1:
            raise ValueError(f"shapes {text!r} is no number of millions of parameters, such as {DEFAULT_SHAPES[0]}")
        training = _training(int(text), asked.device)
        taken: dict[str, list[float]] = {name: [] for name in VARIANTS}
        ways = {name: AtomicCheckpointIO(asynchronous=name != VARIANTS[0]) for name in VARIANTS[:2]}
        written: dict[str, list[float]] = {name: [] for name in VARIANTS[:2]}
        start = time.perf_counter()
        with tempfile.TemporaryDirectory(prefix="bench-checkpoint-") as folder:
            for turn in range(asked.rounds + 1):
                _round(training, ways, Path(folder) / "x.ckpt", taken, written)
                if turn == 0:  # the first one pays for fresh memory and a fresh file
                    for seconds in (*taken.values(), *written.values()):
                        seconds.clear()
                elif asked.budget_s is not None and time.perf_counter() - start > asked.budget_s:
                    break
        medians = {name: statistics.median(seconds) for name, seconds in taken.items() if seconds}
        for name in (name for name in variants if name in medians):
            first = VARIANTS[0] if name in written else VARIANTS[2]
            yield Row(
                bench="checkpoint",
                variant=name,
                shape=f"{text} M parameters",
                dtype="float32",
                device=asked.device,
                machine=describe_machine(asked.device),
                total_s=medians[name],
                total_p20_s=min(taken[name]),
                total_p80_s=max(taken[name]),
                ratio=medians[name] / medians[first],
                saved_bytes=training.size if name in written else None,
                bytes_per_s=training.size / statistics.median(written[name]) if name in written else None,
            )


def _round(
    run: _Run,
    ways: dict[str, AtomicCheckpointIO],
    path: Path,
    taken: dict[str, list[float]],
    written: dict[str, list[float]],
) -> None:
    for name, files in ways.items():
        begun = time.perf_counter()
        files.save_checkpoint(run.content(), path)
        taken[name].append(time.perf_counter() - begun)
        ended: list[float] = []
        files.then(partial(_note_time, ended))
        while not ended:
            taken[VARIANTS[3]].append(_seconds(run.step))
        files.wait()
        written[name].append(ended[0] - begun)
    taken[VARIANTS[2]] += [_seconds(run.step) for _ in range(3)]


def _note_time(ended: list[float]) -> None:
    ended.append(time.perf_counter())


def _seconds(step: Callable[[], None]) -> float:
    before = time.perf_counter()
    step()
    return time.perf_counter() - before


def _training(millions: int, device: str) -> _Run:
    layer = 12 * _HIDDEN**2
    layers = max(1, round((millions * 1e6 - 2 * _VOCAB * _HIDDEN) / layer))
    config = ModelConfig(
        vocab_size=_VOCAB,
        hidden_size=_HIDDEN,
        num_hidden_layers=layers,
        num_attention_heads=8,
        max_position_embeddings=_SEQ,
    )
    torch.manual_seed(0)
    model: nn.Module = Transformer(config).to(device)
    optimizer = AdamW(param_groups(model))
    ids = torch.randint(0, _VOCAB, (_BATCH, _SEQ), device=device)

    def step() -> None:
        optimizer.zero_grad()
        linear_cross_entropy(model(ids), model.lm_head.weight, ids).backward()  # type: ignore[no-untyped-call, union-attr, arg-type]
        optimizer.step()
        if device == "cuda":
            torch.cuda.synchronize()

    def content() -> dict[str, Any]:
        return {"state_dict": model.state_dict(), "optimizer_states": [optimizer.state_dict()]}

    step()
    tensors = [*model.parameters(), *(v for s in optimizer.state.values() for v in s.values() if torch.is_tensor(v))]
    return _Run(step, content, sum(tensor.numel() * tensor.element_size() for tensor in tensors))


def draw(rows: Sequence[Row], path: Path, title: str) -> None:
    """A bar of milliseconds for each way."""
    values = {row.variant: 1000 * (row.total_s or 0) for row in rows}
    draw_bars(values, path, title, unit="ms that training is held up, and ms per step")
