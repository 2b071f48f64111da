"""Where the memory of training goes: a few counters in every step, every storage in sampled ones, all on a failure."""

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn
from torch.optim import Optimizer

from lightning_llm.checkpoints.loop_state import is_log_step
from lightning_llm.io import charts
from lightning_llm.io.atomic import atomic_path, existing_parent, write_json, write_text
from lightning_llm.io.options import raise_all
from lightning_llm.io.units import GIB
from lightning_llm.measure.attribution import AttributedMeter, is_out_of_memory
from lightning_llm.measure.gauges import gauge_for
from lightning_llm.runs.directory import run_dir_of
from lightning_llm.training import metrics
from lightning_llm.training.callbacks.dashboard import tensorboard_writers
from lightning_llm.training.callbacks.memory_advice import describe_failure
from lightning_llm.training.callbacks.memory_breakdown import FOLDER, Breakdown, draw, pixels, step_breakdown
from lightning_llm.training.distributed import host_group

HISTORY = 200_000  # allocations that the snapshot records, with the stack of each

PhaseBytes = dict[str, int]  # such as those of forward_peak


class MemoryProfiler(Callback):
    """Peak and live bytes by phase in every step, by category and module in sampled steps, and a report on failure.

    Every step costs a few counters (``measure.gauges``), the highest of which since the last entry are logged with
    ``trainer.log_every_n_steps`` as ``memory/forward_peak_gib``, ``memory/forward_live_gib`` and so on for
    ``backward``, ``optimizer`` and ``validation``; live is what is in use at the end of the phase. With several
    processes the maximum is logged, and files of rank N are in ``memory/rank-N``.

    A sampled step runs under the operator-level meter, which takes about 20 µs an operator and changes no result. It
    leaves ``memory/step-N.json`` and ``memory/step-N.png`` in the run directory, the plot in TensorBoard, and
    ``memory/at_peak/<category>_gib``. What ``torch.compile`` made is not metered, since it would run as other code: the
    JSON then says ``"compiled": true`` and holds the counters.

    Args:
        every_n_steps: Sample every N-th optimizer step. Null: none.
        snapshot_at: Write ``memory/step-N.pickle`` for PyTorch's memory viewer after this step; needs CUDA.
        top: How many modules the plot and the tables distinguish.

    Raises:
        ValueError: For options out of range, all of them at once.
    """

    def __init__(self, every_n_steps: int | None = None, snapshot_at: int | None = None, top: int = 10) -> None:
        self.every_n_steps = every_n_steps
        self.snapshot_at = snapshot_at
        self.top = top
        problems = []
        for name, or_null in (("every_n_steps", " or null"), ("snapshot_at", " or null"), ("top", "")):
            number = getattr(self, name)
            is_left_out = number is None and or_null
            if not is_left_out and (type(number) is not int or number < 1):
                problems.append(f"MemoryProfiler.{name} must be a whole number of at least 1{or_null}, got {number!r}")
        raise_all(problems)
        self._gauge: Any = None
        self._highest: PhaseBytes = {}  # since the last entry
        self._highest_of_run = 0
        self._of_step: PhaseBytes = {}  # in the current step
        self._meter: AttributedMeter | None = None
        self._step = -1  # the current step, counted from 1
        self._is_sampled = self._is_compiled = False
        self._batch: Any = None
        self._folder = Path()
        self._writes = True
        self._group: Any = None

    @property
    def highest_gib(self) -> float:
        """The most that was in use in this run so far, by the counters of every step."""
        return self._highest_of_run / GIB

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse what cannot be done.

        Raises:
            ValueError: The log directory cannot be written to, or a snapshot is asked for without CUDA.
        """
        if stage != "fit":
            return
        run = run_dir_of(trainer)
        folder = Path() if run is None else run / FOLDER
        self._folder = folder / f"rank-{trainer.global_rank}" if trainer.global_rank else folder
        self._writes = run is not None
        device = trainer.strategy.root_device
        errors = []
        parent = existing_parent(self._folder)
        if self._writes and not (parent.is_dir() and os.access(parent, os.W_OK | os.X_OK)):
            errors.append(f"MemoryProfiler cannot write to {folder}: set another log directory")
        if self.snapshot_at is not None and device.type != "cuda":
            errors.append(
                f"MemoryProfiler.snapshot_at {self.snapshot_at}: the snapshot is CUDA's, this run is on {device.type}: "
                "leave it at null; every_n_steps works on any device"
            )
        raise_all(errors)
        self._gauge = gauge_for(device)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin; processes meet in host memory, which no device waits for."""
        self._is_compiled = is_compiled(pl_module)
        self._group = host_group(trainer.strategy)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """A micro-batch begins: maybe one of a new step."""
        self._batch = batch
        if self._step != trainer.global_step + 1:
            self._step = trainer.global_step + 1
            self._of_step = {}
            self._is_sampled = self._writes and self.every_n_steps is not None and self._step % self.every_n_steps == 0
            if self._step == self.snapshot_at and self._writes:
                torch.cuda.memory._record_memory_history(max_entries=HISTORY, stacks="python")
        self._gauge.read()
        if self._is_sampled and not self._is_compiled:
            self._begin_sample(trainer, pl_module, batch)

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: torch.Tensor) -> None:
        self._record("forward")
        if self._meter is not None:
            self._meter.begin("backward")

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._record("backward")

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        if self._meter is not None:
            self._meter.begin("optimizer")

    def on_train_batch_end(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        self._batch = None
        if trainer.global_step < self._step:
            return
        self._record("optimizer")
        if self._step == self.snapshot_at and self._writes:
            self._write_snapshot(f"step-{self._step}")
            torch.cuda.memory._record_memory_history(enabled=None)
        if self._is_sampled:
            self._end_sample(trainer)
        if is_log_step(trainer):
            self._log_highest(trainer)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Validation begins. A sampled step that it interrupts is given up."""
        self._leave_meter()
        if self._gauge is not None:
            self._gauge.read()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._gauge is not None and not trainer.sanity_checking:
            self._record("validation")

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._highest:
            self._log_highest(trainer)

    def _record(self, phase: str) -> None:
        live, peak = self._gauge.read()
        for name, size in ((f"{phase}_peak", peak), (f"{phase}_live", live)):
            self._highest[name] = max(self._highest.get(name, 0), size)
            self._highest_of_run = max(self._highest_of_run, size)
            self._of_step[name] = max(self._of_step.get(name, 0), size)

    def _log_highest(self, trainer: Trainer) -> None:
        self._log(trainer, self._highest, metrics.MEMORY)
        self._highest = {}

    def _log(self, trainer: Trainer, sizes: PhaseBytes, prefix: str) -> None:
        """The maximum over processes, from rank 0."""
        if self._group is not None:
            numbers = torch.tensor(list(sizes.values()), dtype=torch.int64)
            dist.all_reduce(numbers, op=dist.ReduceOp.MAX, group=self._group)
            sizes = dict(zip(sizes, numbers.tolist(), strict=True))
        values = {f"{prefix}{name}_gib": size / GIB for name, size in sizes.items()}
        for logger in trainer.loggers:
            logger.log_metrics(values, step=trainer.global_step)

    def _begin_sample(self, trainer: Trainer, pl_module: LightningModule, batch: Any) -> None:
        if self._meter is not None:
            self._meter.add_inputs(batch)
            self._meter.begin("forward")
            return
        device = trainer.strategy.root_device
        unseen = 0
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            unseen = torch.cuda.memory_allocated(device)
        self._meter = AttributedMeter(pl_module, trainer.optimizers, batch, unseen)
        self._meter.begin("forward")
        self._meter.__enter__()  # type: ignore[no-untyped-call]

    def _leave_meter(self) -> AttributedMeter | None:
        meter, self._meter = self._meter, None
        if meter is not None:
            meter.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            meter.close()
        return meter

    def _end_sample(self, trainer: Trainer) -> None:
        report: Breakdown = {
            "step": self._step,
            "rank": trainer.global_rank,
            "device": str(trainer.strategy.root_device),
            "compiled": self._is_compiled,
            "counters": {"source": self._gauge.source, **{f"{name}_bytes": n for name, n in self._of_step.items()}},
        }
        meter = self._leave_meter()
        if meter is not None:
            report |= step_breakdown(meter.timeline(), self.top)
        write_json(self._folder / f"step-{self._step}.json", report)
        if meter is None:
            return
        self._log(trainer, report["peak"]["by_kind"], metrics.MEMORY_AT_PEAK)
        figure = draw({f"step {self._step}": report}, f"memory of one training step, rank {trainer.global_rank}")
        charts.save(figure, self._folder / f"step-{self._step}.png")
        for writer in tensorboard_writers(trainer):
            writer.add_image("memory", pixels(figure), self._step, dataformats="HWC")

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Take the meter away; where memory ran out, say where it went before the process ends."""
        failed = self._leave_meter()
        batch = self._batch
        self._batch = None
        if self._gauge is None or not is_out_of_memory(exception):
            return
        self._record("failure")
        try:
            text, report = describe_failure(
                trainer, pl_module, batch, metered=failed, counters=self._of_step, step=self._step, top=self.top
            )
            print(text, file=sys.stderr, flush=True)
            if not self._writes:
                return
            write_json(self._folder / "out-of-memory.json", report)
            write_text(self._folder / "out-of-memory.txt", text + "\n")
            if trainer.strategy.root_device.type == "cuda":
                self._write_snapshot("out-of-memory")
        except Exception as error:  # the failure itself must come through
            print(f"MemoryProfiler could not finish its report: {error!r}", file=sys.stderr, flush=True)

    def _write_snapshot(self, name: str) -> None:
        with atomic_path(self._folder / f"{name}.pickle") as path:
            torch.cuda.memory._dump_snapshot(str(path))  # type: ignore[no-untyped-call]


def is_compiled(module: nn.Module) -> bool:
    """Whether a part of it, or the whole, was given to ``torch.compile``."""
    if getattr(module, "_compiler_ctx", None) is not None:  # Lightning's record of torch.compile(LightningModule)
        return True
    return any(
        part._compiled_call_impl is not None
        or type(part).__name__ == "OptimizedModule"
        or getattr(part, "is_compiled", False)  # a block, or the transformer
        for part in module.modules()
    )
