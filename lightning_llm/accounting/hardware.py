"""Peaks of known devices, and the precision that ``trainer.precision: auto`` means on one.

Peaks are dense matmul FLOPs per second by dtype and bandwidth, each from its maker's data sheet. A device that is not
listed has no peak here: no guess is made from a similar name. Figures with sparsity, which sheets print first, are
twice the dense ones; these are the dense ones.

Memory is what CUDA reports as the total: an "80 GB" H100 has 79.1 GiB. A process that trains does not get all of it for
its tensors, see ``Reserve``.

The precision follows from the hardware's features, never from a measurement, so that the same command takes the same
precision every time, on every rank, in ``fit`` as in ``estimate`` and ``plan``. Matmuls in bf16 run 2 to 4 times as
fast as float32 on a CPU with AVX512-BF16 (AMD Zen 5), 3 to 6 times with AMX.
"""

import dataclasses
import math
import platform
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Literal

from lightning_llm.io.units import shown_size

Precision = Literal["bf16-mixed", "32-true"]

# One of these is enough: Linux's names for CPU features (x86: arch/x86/include/asm/cpufeatures.h; 64-bit Arm:
# Documentation/arch/arm64/elf_hwcaps.rst), and the dtype of ``DEVICES`` for GPUs.
BF16_FEATURES = ("amx_bf16", "avx512_bf16", "bf16", "bfloat16")
CPU_INFO = Path("/proc/cpuinfo")

TERA, GIGA = 1e12, 1e9


@dataclasses.dataclass(frozen=True, kw_only=True)
class Device:
    """One device.

    Attributes:
        name: As ``torch.cuda.get_device_name`` has it.
        flops: Dense FLOPs per second of matmuls with float32 accumulation: ``bfloat16``, ``float16``, ``tf32``,
            ``float32``.
        memory_bytes: What CUDA reports as its total.
        bandwidth: Bytes per second.
        source: Where the figures are from.
    """

    name: str
    flops: Mapping[str, float]
    memory_bytes: float
    bandwidth: float
    source: str

    def peak(self, dtype: str) -> float:
        """FLOPs per second of matmuls in a dtype.

        Raises:
            ValueError: The device has none in the table.
        """
        if dtype not in self.flops:
            instead = "leave trainer.tf32 out" if dtype == "tf32" else "use --precision 32-true"
            raise ValueError(f"{self.name} has no {dtype} peak in the table: {instead}")
        return float(self.flops[dtype])

    def memory_within(self, limit: int) -> int:
        """``limit`` bytes, or all of the device's memory if that is less."""
        return int(min(limit, self.memory_bytes))


_H100 = "NVIDIA H100 Tensor Core GPU data sheet (2024)"
_A100 = "NVIDIA A100 Tensor Core GPU data sheet (2022)"
_V100 = "NVIDIA V100 Tensor Core GPU data sheet (2020)"
_ADA = "NVIDIA Ada GPU Architecture whitepaper (2023), appendix A"
_GA102 = "NVIDIA Ampere GA102 GPU Architecture whitepaper (2021), table 3"

# The bare name of a family is its SXM module with the most memory.
FAMILIES = {"h100": "NVIDIA H100 80GB HBM3", "a100": "NVIDIA A100-SXM4-80GB", "v100": "Tesla V100-SXM2-32GB"}

# name, memory in GiB, bandwidth in GB/s, teraFLOPs per second in float16, bfloat16, tf32 and float32, source. Memory is
# the total in PyTorch's out-of-memory messages, rounded down; drivers and ECC change it a little.
_TABLE: tuple[tuple[str, float, float, float, float | None, float | None, float, str], ...] = (
    ("NVIDIA H200", 139.7, 4800, 989.5, 989.5, 494.5, 67, "NVIDIA H200 data sheet (2024)"),
    ("NVIDIA H100 80GB HBM3", 79.1, 3350, 989.5, 989.5, 494.5, 67, _H100),
    ("NVIDIA H100 PCIe", 79.1, 2000, 756.5, 756.5, 378, 51, "NVIDIA H100 PCIe product brief (2022)"),
    ("NVIDIA H100 NVL", 93.0, 3900, 835.5, 835.5, 417.5, 60, _H100),
    ("NVIDIA A100-SXM4-80GB", 79.1, 2039, 312, 312, 156, 19.5, _A100),
    ("NVIDIA A100 80GB PCIe", 79.1, 1935, 312, 312, 156, 19.5, _A100),
    ("NVIDIA A100-SXM4-40GB", 39.3, 1555, 312, 312, 156, 19.5, _A100),
    ("NVIDIA A100-PCIE-40GB", 39.3, 1555, 312, 312, 156, 19.5, _A100),
    ("NVIDIA L4", 22.0, 300, 121, 121, 60, 30.3, "NVIDIA L4 data sheet (2023)"),
    ("NVIDIA L40S", 44.4, 864, 362.05, 362.05, 183, 91.6, "NVIDIA L40S data sheet (2023)"),
    ("NVIDIA GeForce RTX 4090", 23.5, 1008, 165.2, 165.2, 82.6, 82.6, _ADA),
    ("NVIDIA GeForce RTX 3090", 23.6, 936, 71, 71, 35.6, 35.6, _GA102),
    ("Tesla V100-SXM2-32GB", 31.7, 900, 125, None, None, 15.7, _V100),
    ("Tesla V100-SXM2-16GB", 15.7, 900, 125, None, None, 15.7, _V100),
    ("Tesla T4", 14.5, 320, 65, None, None, 8.1, "NVIDIA T4 data sheet (2019)"),
)
_DTYPES = ("float16", "bfloat16", "tf32", "float32")

DEVICES: dict[str, Device] = {
    name: Device(
        name=name,
        flops={dtype: peak * TERA for dtype, peak in zip(_DTYPES, peaks, strict=True) if peak is not None},
        memory_bytes=memory * 2**30,
        bandwidth=bandwidth * GIGA,
        source=source,
    )
    for name, memory, bandwidth, *peaks, source in _TABLE
}

# Assumed. An H200 with torch 2.11 held 0.77 GiB beside the tensors, and without growing segments its allocator reserved
# 4 to 10% more than the peak (docs/benchmarks/operators-cuda.json).
CUDA_CONTEXT = 600 * 2**20  # the context, and the kernels that were loaded
CUDA_WORKSPACES = 128 * 2**20  # cuBLAS and cuBLASLt: 32 MiB each on Hopper, for the threads of forward and backward
NCCL_BUFFERS = 2**30  # of several processes
FRAGMENTS = 0.05  # of the tensors: the allocator rounds up, and its gaps fit no tensor


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reserve:
    """Memory of a device that a plan leaves free.

    Attributes:
        fixed: Bytes for the context, the libraries and NCCL.
        share: Of the tensors' bytes, for what the allocator cannot use.
    """

    fixed: int = 0
    share: float = 0.0

    def around(self, tensors: int) -> int:
        """Bytes that a device needs for this many bytes of tensors."""
        return tensors + self.fixed + math.ceil(tensors * self.share)

    def __str__(self) -> str:
        """The bytes that are left free, and why."""
        share = f", and {self.share:.0%} of the tensors for the allocator's rounding and gaps; assumed"
        return f"{shown_size(self.fixed)} for context and libraries{share}" if self.share else "as asked for"


def reserve_for(device_type: str, world_size: int = 1, reserve: int | None = None) -> Reserve:
    """Memory that a plan leaves free.

    Args:
        device_type: ``cuda``; on a ``cpu`` it is nothing.
        world_size: Processes.
        reserve: Bytes to leave free instead, whatever the tensors take.
    """
    if reserve is not None:
        return Reserve(fixed=reserve)
    if device_type != "cuda":
        return Reserve()
    return Reserve(fixed=CUDA_CONTEXT + CUDA_WORKSPACES + (NCCL_BUFFERS if world_size > 1 else 0), share=FRAGMENTS)


def find_device(name: str) -> Device:
    """The device of this name, in any case, with or without its maker's name before it.

    Raises:
        ValueError: If it is not listed; the message says which are.
    """
    short_name = name.lower().removeprefix("nvidia ")
    for device in DEVICES.values():
        if device.name.lower().removeprefix("nvidia ") == short_name:
            return device
    raise ValueError(f"device {name!r} is not in the table: there are {', '.join(DEVICES)}; or give its peak yourself")


def device_from_part(part: str) -> Device:
    """The device that a user means by a name of :func:`find_device`, or by a part of one, such as ``h100`` or ``4090``.

    A part is one word or several words in a row. ``H20`` and ``L40`` are no parts: these are other devices than the
    H200 and the L40S. ``FAMILIES`` has what the bare name of a family means.

    Raises:
        ValueError: No device or several devices have this part; the message names them.
    """
    short = re.sub("[^a-z0-9]", "", part.lower())
    names = [FAMILIES[short]] if short in FAMILIES else [name for name in DEVICES if short in _name_parts(name)]
    if len(names) > 1:
        raise ValueError(f"device {part!r} may be {' or '.join(names)}: give a longer part of the name")
    return DEVICES[names[0]] if names else find_device(part)


def _name_parts(name: str) -> set[str]:
    words = re.findall("[a-z0-9]+", name.lower())
    return {"".join(words[first:last]) for last in range(1, len(words) + 1) for first in range(last)}


def matmul_precision(precision: str, *, tf32: bool) -> str:
    """The dtype of matmuls under one of Lightning's precisions, as the table of devices has it."""
    if precision.startswith("bf16"):
        return "bfloat16"
    if precision.startswith("16"):
        return "float16"
    return "tf32" if tf32 else "float32"


def auto_precision(name: str, features: Collection[str]) -> tuple[Precision, str]:
    """The precision for a processor, and the reason in words.

    Args:
        name: What the reason calls the processor.
        features: What it can do, see :func:`cpu_features` and :func:`gpu_features`.
    """
    bf16_feature = next((feature for feature in BF16_FEATURES if feature in features), None)
    if bf16_feature is None:
        return "32-true", f"{name} has no bf16 in hardware"
    return "bf16-mixed", f"{name} has bf16 in hardware: {bf16_feature}"


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
