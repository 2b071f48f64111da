"""``lightning-llm bench overhead``: what a training step costs beside forward, backward, clipping and the optimiser.

A tiny model is trained by a plain loop (``raw``), by Lightning's Trainer in several set-ups, and by ours with all that
`fit` does (``fit``). What lies outside of the four parts is measured within each run, since the difference of whole
steps would be noise.
"""

import contextlib
import logging
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from rich.table import Column, Table
from torch import Tensor

from lightning_llm.bench.harness import Request, Row, chosen_names, describe_machine, draw_bars
from lightning_llm.data.datamodule import TokenDataModule
from lightning_llm.data.sampling import sample_batch
from lightning_llm.data.token_store import TokenStore
from lightning_llm.data.token_store_writer import TokenStoreWriter
from lightning_llm.data.tokenizers import Tokenizer
from lightning_llm.io.console import Console
from lightning_llm.model.config import ModelConfig
from lightning_llm.optim.adamw import AdamW
from lightning_llm.optim.clipping import clip_grad_norm_
from lightning_llm.training.callbacks.consistency import RankConsistencyCheck, ResumeDiff
from lightning_llm.training.module import LanguageModel
from lightning_llm.training.trainer import Trainer

SHAPES: dict[str, list[str]] = {}
DEFAULT_SHAPES = ["300"]
VARIANTS = ("raw", "barebones", "Lightning, bar and log", "Lightning, neither", "fit")
WARM_UP = 50  # steps
_CONTEXT, _ROWS = 32, 8
_CONFIG = ModelConfig(vocab_size=256, hidden_size=64, num_hidden_layers=2, num_attention_heads=2)


def run(asked: Request) -> Iterator[Row]:
    """A row for each set-up and number of steps (``shapes``): medians over runs that take turns."""
    variants = chosen_names(VARIANTS, asked.variants)
    for text in asked.shapes:
        if not text.isdigit() or int(text) < 1:
            raise ValueError(f"shapes {text!r} is no number of steps, such as {DEFAULT_SHAPES[0]}")
        taken: dict[str, list[float]] = {name: [] for name in variants}
        start = time.perf_counter()
        for _ in range(asked.rounds):
            for name, seconds in taken.items():
                seconds.append(_overhead(name, int(text), asked.device))
            if asked.budget_s is not None and time.perf_counter() - start > asked.budget_s:
                break
        medians = {name: statistics.median(seconds) for name, seconds in taken.items()}
        for name, median in medians.items():
            yield Row(
                bench="overhead",
                variant=name,
                shape=f"{text} steps",
                dtype="float32",
                device=asked.device,
                machine=describe_machine(asked.device),
                total_s=median,
                total_p20_s=min(taken[name]),
                total_p80_s=max(taken[name]),
                ratio=median / next(iter(medians.values())),
            )


def _overhead(variant: str, steps: int, device: str) -> float:
    """Seconds per step outside of the four parts."""
    with tempfile.TemporaryDirectory(prefix="bench-overhead-") as name, open(os.devnull, "w") as nowhere:
        folder = Path(name)
        _make_store(folder / "store")
        if variant == "raw":
            return _raw_overhead(folder / "store", steps, device)
        data = TokenDataModule(store=str(folder / "store"), context_length=_CONTEXT, global_batch_size=_ROWS)
        model = _Timed(logs=variant == "Lightning, bar and log")
        options = {
            "max_steps": WARM_UP + steps,
            "accelerator": device,
            "devices": 1,
            "limit_val_batches": 0,
            "gradient_clip_val": 1.0,
        }
        for noisy in ("lightning.pytorch", "lightning.fabric"):
            logging.getLogger(noisy).setLevel(logging.ERROR)
        with contextlib.redirect_stderr(nowhere), contextlib.redirect_stdout(nowhere):
            _trainer(variant, folder, options).fit(model, datamodule=data)
        return (model.whole_s - model.inside_s) / steps


def _raw_overhead(store: Path, steps: int, device: str) -> float:
    """The same of a loop that draws windows from the store and does the four parts."""
    tokens, model = TokenStore.open(store).tokens("train"), LanguageModel(_CONFIG)
    model.configure_model()
    model.to(device)
    optimizer = AdamW(model.parameters(), lr=1e-3)
    outside, started = 0.0, now(device)
    for step in range(WARM_UP + steps):
        if step == WARM_UP:
            outside, started = 0.0, now(device)
        ids, targets = sample_batch(tokens, _ROWS, _CONTEXT, device)
        outside += now(device) - started
        loss = model.loss({"input_ids": ids, "targets": targets})
        torch.autograd.backward(loss)
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        started = now(device)
        optimizer.zero_grad()
    return (outside + now(device) - started) / steps


def now(device: str) -> float:
    """The time at which all that was asked of the device is done: what it still computes belongs to the four parts."""
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def _trainer(variant: str, folder: Path, options: dict[str, Any]) -> pl.Trainer:
    plain = {**options, "default_root_dir": folder, "enable_model_summary": False}
    if variant == "barebones":
        return pl.Trainer(**{**options, "barebones": True})
    if variant == "Lightning, neither":
        return pl.Trainer(**plain, logger=False, enable_progress_bar=False, enable_checkpointing=False)
    if variant == "Lightning, bar and log":
        return pl.Trainer(**plain, enable_checkpointing=False)
    # as the command adds them; the last two stand for those that report and write config.yaml, neither in a step
    added = [RankConsistencyCheck(), ResumeDiff({}), pl.Callback(), pl.Callback()]
    return Trainer(**{**plain, "default_root_dir": str(folder), "precision": "32-true", "callbacks": added})


def _make_store(path: Path) -> None:
    ids = np.random.default_rng(0).integers(0, 256, 100_000, dtype=np.uint16)
    tokenizer = Tokenizer.train_byte().to_str()
    with TokenStoreWriter(path, vocab_size=256, tokenizer=tokenizer, source={"fingerprint": "random"}) as writer:
        for split, part in (("train", ids), ("val", ids[:1000])):
            writer.write(split, part, text_bytes=len(part), documents=1)


class _Timed(LanguageModel):
    """Knows how long it was busy with the four parts, and how long the steps after the warm-up took."""

    def __init__(self, *, logs: bool) -> None:
        super().__init__(_CONFIG)
        self.logs = logs
        self.inside_s = self.whole_s = self._started = 0.0

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.global_step == WARM_UP and not self._started:
            self.inside_s, self._started = 0.0, now(self.device.type)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.whole_s = now(self.device.type) - self._started  # the last time counts: saving at the end does not

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self._timed(super().training_step, batch, batch_idx)
        if self.logs:
            self.log("loss", loss, prog_bar=True)
        return loss

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        self._timed(super().backward, loss, *args, **kwargs)

    def configure_gradient_clipping(self, *args: Any, **kwargs: Any) -> None:
        self._timed(super().configure_gradient_clipping, *args, **kwargs)

    def configure_optimizers(self) -> Any:
        made: Any = super().configure_optimizers()
        optimizer = made["optimizer"]
        step = optimizer.step

        def timed_step(closure: Callable[[], Any]) -> Any:
            waited = 0.0

            def timed_closure() -> Any:
                nonlocal waited
                before = now(self.device.type)
                result = closure()
                waited = now(self.device.type) - before
                return result

            before = now(self.device.type)
            result = step(timed_closure)
            self.inside_s += now(self.device.type) - before - waited
            return result

        optimizer.step = timed_step
        return made

    def _timed(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        before = now(self.device.type)
        result = function(*args, **kwargs)
        self.inside_s += now(self.device.type) - before
        return result


def print_table(rows: Sequence[Row], console: Console) -> None:
    """Milliseconds per step of each set-up."""
    for shape in dict.fromkeys(row.shape for row in rows):
        table = Table(Column("set-up", no_wrap=True), title=f"{shape}: what a step costs beside its four parts")
        for column in ("ms", "least", "most"):
            table.add_column(column, justify="right")
        for row in rows:
            if row.shape == shape:
                times = (row.total_s, row.total_p20_s, row.total_p80_s)
                table.add_row(row.variant, *(f"{1000 * (t or 0):.2f}" for t in times))
        console.print(table)


def draw(rows: Sequence[Row], path: Path, title: str) -> None:
    """A bar of milliseconds for each set-up."""
    values = {row.variant: 1000 * (row.total_s or 0) for row in rows}
    draw_bars(values, path, title, unit="ms per step beside forward, backward, clipping and optimiser")
