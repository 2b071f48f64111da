"""What decides a run's bits besides its options: precision, number of threads, kind of processor.

A checkpoint and ``summary.json`` record it; a resumed run prints what has changed. ``docs/resume.md`` defines the same
bits.
"""

import sys
from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch.accelerators import CUDAAccelerator

from lightning_llm.accounting.hardware import Precision, auto_precision, cpu_features, cpu_name, gpu_features


def choose_precision(accelerator: Any) -> tuple[Precision, str]:
    """The precision that ``auto`` means on this machine, and the reason.

    Args:
        accelerator: ``trainer.accelerator``.
    """
    if accelerator in ("auto", "gpu", "cuda") and CUDAAccelerator.is_available():
        if hasattr(sys, "ps1") and torch.cuda.device_count() > 1:
            return "bf16-mixed", "the GPUs were not asked: a notebook that has used one cannot start processes"
        if torch.version.hip is not None:
            has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
            return auto_precision(torch.cuda.get_device_name(), {"bfloat16"} if has_bf16 else ())
        return auto_precision(torch.cuda.get_device_name(), gpu_features(torch.cuda.get_device_capability()))
    if accelerator not in ("auto", "cpu") or torch.backends.mps.is_available():
        return "32-true", "bf16 is not measured on this kind of device"
    return auto_precision("the CPU", cpu_features())


def record(trainer: Any) -> dict[str, Any]:
    """Precision, threads and device of a run, as plain values."""
    device = trainer.strategy.root_device
    return {
        "precision": str(trainer.precision),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name(),
    }


def changes(saved: Mapping[str, Any], trainer: Any) -> list[str]:
    """A line ``name: old -> new`` for each recorded value that is another one now."""
    now = record(trainer)
    return [f"{name}: {saved[name]} -> {now[name]}" for name in now if name in saved and saved[name] != now[name]]
