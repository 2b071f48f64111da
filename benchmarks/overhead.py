"""``python -m benchmarks overhead``: what a training step costs outside forward, backward, clipping and the optimizer.

A tiny model is trained by a plain loop (``raw``), by Lightning's Trainer in several set-ups, and by ours with all that
`fit` does (``fit``). The time outside the four parts is measured within each run, since the difference of whole steps
would be noise.
"""

import contextlib
import logging
import os
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from torch import Tensor

from benchmarks.charts import LOWER, Measure, bar_plot
from benchmarks.harness import Bench, Request
from benchmarks.rows import Row, columns, ratios
from benchmarks.steps import plain_step
from benchmarks.workloads import make_store
from lightning_llm.data.batches import sample_batch
from lightning_llm.data.datamodule import TokenDataModule
from lightning_llm.data.token_store import TokenStore
from lightning_llm.measure.timer import now
from lightning_llm.model.config import ModelConfig
from lightning_llm.optim.adamw import AdamW
from lightning_llm.optim.clipping import clip_grad_norm_
from lightning_llm.training.callbacks.rank_consistency import RankConsistencyCheck
from lightning_llm.training.callbacks.resume_diff import ResumeDiff
from lightning_llm.training.module import LanguageModel
from lightning_llm.training.trainer import Trainer

_FEW = {"enable_model_summary": False, "enable_checkpointing": False}
LIGHTNING: dict[str, dict[str, Any]] = {  # the options of its own Trainer
    "barebones": {"barebones": True},
    "Lightning, bar and log": _FEW,
    "Lightning, neither": {**_FEW, "logger": False, "enable_progress_bar": False},
}
VARIANTS = ("raw", *LIGHTNING, "fit")
WARM_UP = 50  # steps
_CONTEXT, _ROWS = 32, 8
_CONFIG = ModelConfig(vocab_size=256, hidden_size=64, num_hidden_layers=2, num_attention_heads=2)


def run(request: Request) -> Iterator[Row]:
    """A row for each set-up: medians over interleaved runs."""
    steps, variants = request.sizes["steps"], request.chosen(VARIANTS)
    taken = request.interleaved({name: partial(_overhead, name, steps, request.device) for name in variants})
    for name, seconds in taken.items():
        yield request.row(name, seconds, shape=f"{steps} steps", **ratios(seconds, next(iter(taken.values()))))


def _overhead(variant: str, steps: int, device: str) -> float:
    """Seconds per step outside of the four parts."""
    with tempfile.TemporaryDirectory(prefix="bench-overhead-") as folder, open(os.devnull, "w") as nowhere:
        store = make_store(Path(folder, "store"), vocab=256, tokens=100_000)
        if variant == "raw":
            return _raw_overhead(store, steps, device)
        data = TokenDataModule(store=store, context_length=_CONTEXT, global_batch_size=_ROWS)
        model = _Timed(logs=variant == "Lightning, bar and log")
        for noisy in ("lightning.pytorch", "lightning.fabric"):
            logging.getLogger(noisy).setLevel(logging.ERROR)
        with contextlib.redirect_stderr(nowhere), contextlib.redirect_stdout(nowhere):
            _trainer(variant, folder, WARM_UP + steps, device).fit(model, datamodule=data)
        return (model.whole_s - model.inside_s) / steps


def _raw_overhead(store: str, steps: int, device: str) -> float:
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
        loss = partial(model.loss, {"input_ids": ids, "targets": targets})
        plain_step(loss, model, optimizer, device=device, clip=clip_grad_norm_)
        started = now(device)
        optimizer.zero_grad()
    return (outside + now(device) - started) / steps


def _trainer(variant: str, folder: str, steps: int, device: str) -> pl.Trainer:
    options: dict[str, Any] = {"max_steps": steps, "accelerator": device, "devices": 1, "limit_val_batches": 0}
    options |= {"default_root_dir": folder, "gradient_clip_val": 1.0}
    if variant in LIGHTNING:
        return pl.Trainer(**options, **LIGHTNING[variant])
    # as the command adds them; the last two stand for those that report and write config.yaml, neither in a step
    added = [RankConsistencyCheck(), ResumeDiff({}), pl.Callback(), pl.Callback()]
    return Trainer(**options, enable_model_summary=False, precision="32-true", callbacks=added)


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
        step = made["optimizer"].step
        made["optimizer"].step = lambda closure: self._timed(step, lambda: self._timed(closure, sign=-1))
        return made

    def _timed(self, function: Callable[..., Any], *args: Any, sign: int = 1, **kwargs: Any) -> Any:
        before = now(self.device.type)
        result = function(*args, **kwargs)
        self.inside_s += sign * (now(self.device.type) - before)  # of a closure in the step: it counts on its own
        return result


BENCH = Bench(
    run=run,
    shapes=["300"],
    sizes=("steps",),
    dtypes=("float32",),
    columns=columns("ms", "least", "most"),
    notes=lambda rows: ["time of a step outside forward, backward, clipping and optimizer"],
    draw=bar_plot(Measure("total_s", 1e3, f"ms per step outside forward, backward, clipping and optimizer{LOWER}")),
    files=("lightning_llm/training", "lightning_llm/data/batches.py"),
)
