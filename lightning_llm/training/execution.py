"""What decides a run's bits and speed besides its options: precision, threads, device, random numbers, allocator.

A checkpoint and ``summary.json`` record the first three; a resumed run prints what has changed. ``docs/resume.md`` says
when two runs have the same bits.
"""

import ctypes
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch
from lightning.pytorch.accelerators import CUDAAccelerator

from lightning_llm.accounting.hardware import Precision, auto_precision, cpu_features, cpu_name, gpu_features
from lightning_llm.checkpoints.loop_state import micro_batches_started

# from malloc.h
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_NEVER = 2**31 - 1
_LARGEST_MMAP_THRESHOLD = 2**30


def choose_precision(accelerator: Any) -> tuple[Precision, str]:
    """The precision that ``auto`` means on this machine, and the reason.

    Args:
        accelerator: ``trainer.accelerator``.
    """
    if accelerator in ("auto", "gpu", "cuda") and CUDAAccelerator.is_available():
        if hasattr(sys, "ps1") and torch.cuda.device_count() > 1:
            return "bf16-mixed", "the GPUs were not queried: a notebook that has used one cannot start processes"
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


def print_changes(saved: Mapping[str, Any], trainer: Any) -> None:
    """Print each value of a checkpoint's record that differs now."""
    now = record(trainer)
    lines = [f"  {name}: {saved[name]} -> {now[name]}" for name in now if name in saved and saved[name] != now[name]]
    if lines and trainer.is_global_zero:
        print("Changed since the checkpoint, so the bits will differ:", *lines, sep="\n")


def seed_dropout(trainer: Any) -> None:
    """Make dropout a function of seed, position and process: a resumed run drops what an uninterrupted one would."""
    seed = int(getattr(getattr(trainer, "datamodule", None), "seed", None) or 0)
    torch.manual_seed(hash((seed, micro_batches_started(trainer), trainer.global_rank)) % 2**63)


def keep_freed_memory() -> bool:
    """Ask glibc to keep freed blocks of every size in the process.

    By default glibc returns blocks above 128 KiB (a limit that moves up to 32 MiB) to the kernel, which zeroes them
    at the next allocation. A training step allocates the same large blocks every time. Keeping them changed the speed
    of a step on a 2-core CPU by +1.5 % in bf16 and by -6 % in float32. The process stays at its largest size.

    Returns:
        Whether it was done; ``False`` if the C library is not glibc.
    """
    if not sys.platform.startswith("linux"):
        return False
    with suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL("libc.so.6").mallopt
        return bool(mallopt(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD) and mallopt(_M_TRIM_THRESHOLD, _NEVER))
    return False
