"""Causes of a run's bits and speed besides its options: precision, threads, device, random numbers, allocator.

A checkpoint and ``summary.json`` record the first three, the versions of torch and NumPy, and a hash of this package;
a resumed run prints what has changed. ``docs/resume.md`` says when two runs have the same bits.
"""

import ctypes
import functools
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from lightning.pytorch.accelerators import CUDAAccelerator
from lightning.pytorch.profilers.pytorch import RegisterRecordFunction
from lightning.pytorch.strategies import DDPStrategy

from lightning_llm.accounting.hardware import Precision, auto_precision, cpu_features, cpu_name, gpu_features
from lightning_llm.accounting.step_settings import StepSettings
from lightning_llm.checkpoints.loop_state import micro_batches_started
from lightning_llm.model.attention import attention_kernel
from lightning_llm.model.config import ModelConfig
from lightning_llm.model.unmodified import PASSIVE_HOOK_OWNERS
from lightning_llm.ops.sizes import CHUNK_BYTES
from lightning_llm.runs.code import package_digest

# of matmuls, and of parameters where the second part is "true", by the first part of a precision
DTYPE_OF_PRECISION = {"bf16": torch.bfloat16, "16": torch.float16, "32": torch.float32, "64": torch.float64}

PASSIVE_HOOK_OWNERS.add(RegisterRecordFunction)  # of trainer.profiler "pytorch"

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


def environment_of(trainer: Any) -> dict[str, Any]:
    """Precision, threads, device, versions, hash of this package, and further settings on CUDA; plain values."""
    device = trainer.strategy.root_device
    of_gpu: dict[str, Any] = {}
    if device.type == "cuda":
        of_gpu = {"tf32": uses_tf32(trainer), "capture": getattr(trainer, "capture", False)}
        of_gpu["loss_chunk_mib"] = CHUNK_BYTES["cuda"] // 2**20  # decides the last bits of the head's gradient
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()
    versions = {"torch": str(torch.__version__), "numpy": np.__version__, "package": _own_code()}
    settings = {"precision": str(trainer.precision), "threads": torch.get_num_threads(), "device": name}
    return {**settings, **of_gpu, **versions}


def settings_of(trainer: Any, **others: Any) -> StepSettings:
    """The settings of a step that the trainer decides, and ``others``: those of model and data, such as ``rows``."""
    strategy = trainer.strategy
    device = "cuda" if strategy.root_device.type == "cuda" else "cpu"
    views = isinstance(strategy, DDPStrategy) and bool(strategy._ddp_kwargs.get("gradient_as_bucket_view"))
    of_strategy: dict[str, Any] = {"strategy": getattr(strategy, "kind", "ddp"), "gradient_views": views}
    return StepSettings(
        precision=str(trainer.precision), device=device, world_size=trainer.world_size, **of_strategy, **others
    )


def attention_of(trainer: Any, config: Any, context_length: int | None) -> str | None:
    """On CUDA, the kernel of torch that computes full attention; ``None`` where the model or its context is unknown."""
    device = trainer.strategy.root_device
    if device.type != "cuda" or not isinstance(config, ModelConfig) or context_length is None:
        return None
    dtype = DTYPE_OF_PRECISION.get(str(trainer.precision).split("-")[0], torch.float32)
    return attention_kernel(config, context_length, dtype, device)


_own_code = functools.cache(package_digest)  # of the first save: later edits do not change what runs


def uses_tf32(trainer: Any) -> bool:
    """Whether matmuls of float32 may use TF32: ``trainer.tf32``, or torch's setting."""
    option = getattr(trainer, "tf32", None)
    return torch.get_float32_matmul_precision() != "highest" if option is None else bool(option)


def switch_tf32(trainer: Any) -> None:
    """Make ``trainer.tf32``, unless it is null, torch's setting; in every process."""
    if getattr(trainer, "tf32", None) is not None:
        torch.set_float32_matmul_precision("high" if trainer.tf32 else "highest")


def changes_since(saved: Mapping[str, Any], trainer: Any) -> list[str]:
    """One line ``name: old -> new`` for each value of a checkpoint's record that differs now."""
    now = environment_of(trainer)
    return [f"{name}: {saved[name]} -> {now[name]}" for name in now if name in saved and saved[name] != now[name]]


def print_changes(saved: Mapping[str, Any], trainer: Any) -> None:
    """Print each value of a checkpoint's record that differs now."""
    lines = changes_since(saved, trainer)
    if lines and trainer.is_global_zero:
        print("Changed since the checkpoint, so the bits may differ:", *lines, sep="\n  ")


def seed_dropout(trainer: Any, seed: int | None) -> None:
    """Make dropout a function of seed, position and process: a resumed run drops what an uninterrupted one would.

    ``seed`` is that of the initial values; ``None``: that of Lightning's ``seed_everything``, else that of the data.
    """
    others = os.environ.get("PL_GLOBAL_SEED"), getattr(getattr(trainer, "datamodule", None), "seed", None)
    seed = next((int(known) for known in (seed, *others) if known is not None), 0)
    number = hash((seed, micro_batches_started(trainer), trainer.global_rank)) % 2**63
    torch.default_generator.manual_seed(number)  # 2 µs; torch.manual_seed asks all kinds of devices, which takes 200
    if (kind := trainer.strategy.root_device.type) != "cpu":
        (torch.cuda if kind == "cuda" else torch).manual_seed(number)


def keep_freed_memory() -> bool:
    """Ask glibc to keep freed blocks of every size in the process.

    By default glibc returns blocks above 128 KiB (a limit that moves up to 32 MiB) to the kernel, which zeroes them
    at the next allocation. A training step allocates the same large blocks every time. Keeping them changed the speed
    of a step on a 2-core CPU by +1.5% in bf16 and by -6% in float32. The process stays at its largest size.

    Returns:
        Whether it was done; ``False`` if the C library is not glibc.
    """
    if not sys.platform.startswith("linux"):
        return False
    with suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL("libc.so.6").mallopt
        return bool(mallopt(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD) and mallopt(_M_TRIM_THRESHOLD, _NEVER))
    return False
