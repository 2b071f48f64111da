"""The precision that ``trainer.precision: auto`` means: decided by what the hardware says, never by a measurement.

A pure function of a processor's features, so that the same command takes the same precision every time, on every rank,
in ``fit`` as in ``estimate`` and ``plan``. Matrix multiplications in bf16 run 2 to 4 times as fast as float32 on a CPU
with AVX512-BF16 (AMD Zen 5), 3 to 6 times with AMX.
"""

import platform
from collections.abc import Collection
from pathlib import Path
from typing import Literal

Precision = Literal["bf16-mixed", "32-true"]

# One of these is enough: Linux's names for CPU features (x86: arch/x86/include/asm/cpufeatures.h; 64-bit Arm:
# Documentation/arch/arm64/elf_hwcaps.rst), and the dtype of ``accounting.hardware`` for GPUs.
BF16_FEATURES = ("amx_bf16", "avx512_bf16", "bf16", "bfloat16")
CPU_INFO = Path("/proc/cpuinfo")


def auto_precision(name: str, features: Collection[str]) -> tuple[Precision, str]:
    """The precision for a processor, and the reason in words.

    Args:
        name: What the reason calls the processor.
        features: What it can do, see :func:`cpu_features` and :func:`gpu_features`.
    """
    found = next((feature for feature in BF16_FEATURES if feature in features), None)
    if found is None:
        return "32-true", f"{name} has no bf16 in hardware"
    return "bf16-mixed", f"{name} has bf16 in hardware: {found}"


def cpu_features() -> frozenset[str]:
    """Features of this machine's CPU in Linux's names; empty on other systems, whose bf16 is not measured."""
    return frozenset(_cpu_info("flags", "Features").split())


def cpu_name() -> str:
    """The model of this machine's CPU, or its architecture where the system does not tell the model."""
    return _cpu_info("model name") or platform.processor() or platform.machine()


def gpu_features(capability: tuple[int, int]) -> frozenset[str]:
    """Features of an NVIDIA GPU of a compute capability: bf16 since 8.0 (CUDA C++ Programming Guide, section 17)."""
    return frozenset({"bfloat16"} if capability >= (8, 0) else ())


def _cpu_info(*names: str) -> str:
    """The first value under one of these names in ``/proc/cpuinfo``; empty if there is none."""
    try:
        lines = CPU_INFO.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    pairs = (line.partition(":")[::2] for line in lines)
    return next((value.strip() for name, value in pairs if name.strip() in names), "")
