"""The training curve and the speed, at almost no cost per step.

Between two log steps the only work is readings of the clock. The losses wait, on the device, and are added in their
order at the next log step. ``self.log`` in every step would cost 0.75 ms (measured with Lightning 2.6 on a 2-core CPU),
and reading the loss in every step would make the host wait for a GPU.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_llm.accounting.counts import StepFlops, step_flops
from lightning_llm.accounting.hardware import TERA, find_device, matmul_precision
from lightning_llm.checkpoints.loop_state import is_log_step, loss_in, step_is_complete
from lightning_llm.data.datamodule import data_attribute
from lightning_llm.measure.timer import PhaseClock
from lightning_llm.training import metrics
from lightning_llm.training.environment import uses_tf32
from lightning_llm.training.step_loss import LossDenominator, StepLoss

_BETWEEN = "between"  # the end of one micro-batch and the beginning of the next
_PARTS = ("forward", "backward", "optimizer")
_WAITING = 1024  # losses that wait at most


class Utilization(NamedTuple):
    """Conversion of seconds per step into MFU and HFU.

    Attributes:
        flops: Of one optimizer step, over all devices; ``None`` if unknown.
        peak: FLOP per second of all devices; ``None`` if unknown.
        note: The peak and its source, or why there is none.
    """

    flops: StepFlops | None
    peak: float | None
    note: str

    def percent(self, seconds: float) -> dict[str, float]:
        """MFU and HFU of a step of this duration, by the names of their curves; empty if they are not known."""
        if self.flops is None or self.peak is None:
            return {}
        done = {metrics.MFU: self.flops.model, metrics.HFU: self.flops.hardware}
        return {name: 100 * flops / (seconds * self.peak) for name, flops in done.items()}


class TrainingLog(Callback):
    """Every ``trainer.log_every_n_steps`` optimizer steps: loss, learning rate (also by group), gradient norm, speed.

    ``train_loss`` is the mean over all targets of the steps since the last entry, by their weights if they have some.
    ``throughput/…``: ``tokens_per_second`` of all processes, ``step_s``, ``data_stall_percent`` (share of the time
    spent waiting for data), ``mfu_percent`` and ``hfu_percent`` (model and hardware FLOPs against the device's peak,
    Chowdhery et al. 2022, "PaLM", appendix B).
    ``time/…_s``: seconds per step in ``data``, ``forward``, ``backward``, ``optimizer`` (with clipping) and ``other``
    (callbacks, logging, Lightning). Validation and saving checkpoints are not counted. The x axis is the number of
    optimizer steps.

    Args:
        peak_tflops: Peak of one device in 10^12 FLOP per second, for MFU and HFU. Null: from the table of devices;
            for a device that is not in it, there is no MFU.

    Attributes:
        utilization: The peak for MFU and HFU, or why there are none; known from the start of training on.
    """

    def __init__(self, peak_tflops: float | None = None) -> None:
        if peak_tflops is not None and not peak_tflops > 0:
            raise ValueError(f"peak_tflops must be above 0, got {peak_tflops}")
        self.peak_tflops = peak_tflops
        self.utilization: Utilization | None = None
        self._sums: torch.Tensor | None = None  # of the loss over targets, and of the targets, of this process
        self._waiting: list[tuple[torch.Tensor, LossDenominator]] = []  # losses to add to them
        self._saved: torch.Tensor | None = None  # in the checkpoint, of all processes
        self._tokens = 0
        self._timed_steps = 0
        self._waited = 0.0
        self._has_saved = False
        self._clock = PhaseClock()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock; the loss continues from the sum in the checkpoint."""
        if self._saved is not None:
            self._sums = self._saved.to(pl_module.device) / trainer.world_size
            self._saved = None
        self.utilization = utilization_of(trainer, getattr(pl_module, "architecture", None), self.peak_tflops)
        self._clock = PhaseClock(pl_module.device)
        self._tokens = 0
        self._timed_steps = 0
        self._waited = 0.0
        self._clock.start()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._has_saved:
            self._clock.start()
        else:
            self._clock.mark(_BETWEEN)
        self._has_saved = False

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: torch.Tensor) -> None:
        self._clock.mark("forward")

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._clock.mark("backward")

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Note the loss; log at log steps."""
        self._clock.mark("optimizer")
        if (loss := loss_in(outputs)) is not None:  # already divided by the number of micro-batches in a step
            step_loss = getattr(pl_module, "step_loss", None)
            denominator = step_loss.denominator if isinstance(step_loss, StepLoss) else None
            of_micro_batch = LossDenominator(trainer.accumulate_grad_batches, torch.ones_like(loss))
            self._waiting.append((loss, denominator or of_micro_batch))
            if len(self._waiting) >= _WAITING:
                self._add_waiting()
        ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
        self._tokens += ids.numel() if isinstance(ids, torch.Tensor) else 0
        if step_is_complete(trainer):
            self._timed_steps += 1
            if is_log_step(trainer):
                self._write(trainer, pl_module)
            elif not trainer.log_every_n_steps:  # type: ignore[attr-defined]
                self._clock.drop()  # nothing will read it

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._clock.mark(_BETWEEN)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._clock.start()

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Save the current sums, so that a resumed run has the same curve as an uninterrupted one."""
        self._has_saved = True
        self._add_waiting()
        if self._sums is not None:
            loss, count = self._over_processes(trainer, self._sums)
            checkpoint["callbacks"][self.state_key] = {"loss": loss.clone(), "count": count.clone()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the sums; those of an earlier version are not of targets, and are left out."""
        if "count" in state_dict:
            self._saved = torch.stack([state_dict[name].reshape(()) for name in ("loss", "count")])

    def _write(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._add_waiting()
        values: dict[str, float] = {}
        if self._sums is not None and metrics.TRAIN_LOSS not in trainer.logged_metrics:  # else the module has logged it
            loss, count = self._over_processes(trainer, self._sums).tolist()  # here the host has waited for the device
            values[metrics.TRAIN_LOSS] = loss / (count or 1)
        values |= _learning_rates(trainer.optimizers[0].param_groups)
        if (grad_norm := getattr(pl_module, "grad_norm", None)) is not None:
            values[metrics.GRAD_NORM] = grad_norm.item()
        if (added := getattr(pl_module, "auxiliary_loss", None)) is not None:
            values[metrics.AUXILIARY_LOSS] = added.item()
        speed = self._speed(trainer)
        self._sums = None
        self._tokens = 0
        self._timed_steps = 0
        # For the progress bar and other callbacks. `log_dict` would end in the same dict, 1.8 ms later.
        watched = {**values, **{name: speed[name] for name in (metrics.TOKENS_PER_SECOND,) if name in speed}}
        trainer.callback_metrics.update({name: torch.tensor(value) for name, value in watched.items()})
        for logger in trainer.loggers:
            logger.log_metrics({**values, **speed}, step=trainer.global_step)

    def _add_waiting(self) -> None:
        for loss, (scale, count) in self._waiting:
            sums = torch.stack([loss.to(count.dtype) * scale, count])
            self._sums = sums if self._sums is None else self._sums + sums
        self._waiting.clear()

    @staticmethod
    def _over_processes(trainer: Trainer, sums: torch.Tensor) -> torch.Tensor:
        total: torch.Tensor = trainer.strategy.reduce(sums.clone(), reduce_op="sum") if trainer.world_size > 1 else sums
        return total

    def _speed(self, trainer: Trainer) -> dict[str, float]:
        """``throughput/…`` and ``time/…`` since the last entry."""
        assert self.utilization is not None
        seconds = self._clock.take()
        total = sum(seconds.values())
        steps = self._timed_steps
        waited = float(getattr(trainer.train_dataloader, "waited_s", 0.0))
        between = seconds.get(_BETWEEN, 0.0)
        data = min(waited - self._waited, between)
        self._waited = waited
        parts = {"data": data, **{part: seconds.get(part, 0.0) for part in _PARTS}, "other": between - data}
        return {
            **({metrics.TOKENS_PER_SECOND: self._tokens * trainer.world_size / total} if self._tokens else {}),
            metrics.STEP_SECONDS: total / steps,
            metrics.DATA_STALL: 100 * data / total,
            **self.utilization.percent(total / steps),
            **{f"{metrics.TIME_OF_PHASE}{part}_s": value / steps for part, value in parts.items()},
        }


def _learning_rates(groups: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The rate of a group without a factor, and if others have one, of each group by its name."""
    usual = next((group for group in groups if "lr_factor" not in group), groups[0])
    by_group = {f"{metrics.LEARNING_RATE}/{group.get('name')}": group["lr"] for group in groups}
    is_one = all("lr_factor" not in group for group in groups)
    return {metrics.LEARNING_RATE: usual["lr"], **({} if is_one else by_group)}


def utilization_of(trainer: Trainer, architecture: Any, peak_tflops: float | None) -> Utilization:
    """The utilization of a run.

    Args:
        trainer: With its data module set up.
        architecture: The model's config.
        peak_tflops: Of one device, in 10^12 FLOP per second; ``None`` looks the device up.
    """
    data = getattr(trainer, "datamodule", None)
    flops = None
    tokens, context_length = (data_attribute(data, name) for name in ("tokens_per_step", "context_length"))
    try:
        if tokens is None or context_length is None:
            raise ValueError("the data do not have tokens_per_step and context_length")
        flops = step_flops(architecture, tokens=tokens, context_length=context_length)
        peak, note = _peak_of(trainer, peak_tflops)
    except (AttributeError, ValueError) as error:  # the user's own data or MLP, or no peak
        return Utilization(flops, None, f"no MFU: {error}")
    return Utilization(flops, peak * trainer.world_size, note)


def _peak_of(trainer: Trainer, peak_tflops: float | None) -> tuple[float, str]:
    """FLOP per second of one device, and its source; a ValueError says why there is none."""
    if peak_tflops is not None:
        return peak_tflops * TERA, f"peak {peak_tflops:g} TFLOP/s, as given"
    device = trainer.strategy.root_device
    dtype = matmul_precision(str(trainer.precision), tf32=uses_tf32(trainer))
    if device.type != "cuda":
        raise ValueError(f"no peak is known for this {device.type}; give peak_tflops to the TrainingLog callback")
    spec = find_device(torch.cuda.get_device_name(device))
    if dtype not in spec.flops:
        raise ValueError(f"{spec.name} has no {dtype} matrix multiplications")
    return spec.flops[dtype], f"peak {spec.flops[dtype] / TERA:g} TFLOP/s in {dtype} ({spec.source})"
