"""How busy the device is: the FLOPs of a step against the device's peak."""

import dataclasses
from typing import Any

import torch
from lightning.pytorch import Trainer

from lightning_llm.accounting.counts import StepFlops, step_flops
from lightning_llm.accounting.hardware import TERA, find_device


@dataclasses.dataclass(frozen=True)
class Utilisation:
    """What is needed to turn seconds per step into MFU and HFU.

    Attributes:
        flops: Of one optimiser step, over all devices; ``None`` where unknown.
        peak: FLOP per second of all devices; ``None`` where unknown.
        note: What the peak is, with its source, or why there is none.
    """

    flops: StepFlops | None
    peak: float | None
    note: str

    def percent(self, seconds: float) -> dict[str, float]:
        """``mfu_percent`` and ``hfu_percent`` of a step that took so long; nothing where they are not known."""
        if self.flops is None or self.peak is None:
            return {}
        done = {"mfu_percent": self.flops.model, "hfu_percent": self.flops.hardware}
        return {name: 100 * flops / (seconds * self.peak) for name, flops in done.items()}


def utilisation_of(trainer: Trainer, architecture: Any, peak_tflops: float | None) -> Utilisation:
    """The utilisation of a run.

    Args:
        trainer: With its data module set up.
        architecture: The model's config.
        peak_tflops: Of one device, in 10^12 FLOP per second; ``None`` looks the device up.
    """
    data = getattr(trainer, "datamodule", None)
    try:
        flops = step_flops(architecture, tokens=data.tokens_per_step, context_length=data.context_length)  # type: ignore[union-attr]
    except (AttributeError, ValueError) as error:  # the user's own data or MLP
        return Utilisation(None, None, f"no MFU: {error}")
    if peak_tflops is not None:
        return Utilisation(flops, peak_tflops * TERA * trainer.world_size, f"peak {peak_tflops:g} TFLOP/s, as given")
    kind = trainer.strategy.root_device.type
    if kind != "cuda":
        return Utilisation(
            flops, None, f"no MFU: no peak is known for this {kind}; give peak_tflops to the TrainingLog callback"
        )
    try:
        device = find_device(torch.cuda.get_device_name(trainer.strategy.root_device))
        peak = device.flops[dtype := _products(str(trainer.precision))]
    except ValueError as error:
        return Utilisation(flops, None, f"no MFU: {error}")
    except KeyError:
        return Utilisation(flops, None, f"no MFU: {device.name} has no {dtype} products")
    note = f"peak {peak / TERA:g} TFLOP/s in {dtype} ({device.source})"
    return Utilisation(flops, peak * trainer.world_size, note)


def _products(precision: str) -> str:
    """The dtype of the matrix products under one of Lightning's precisions."""
    if precision.startswith("bf16"):
        return "bfloat16"
    if precision.startswith("16"):
        return "float16"
    return "float32" if torch.get_float32_matmul_precision() == "highest" else "tf32"
