"""Peaks of known devices: dense matrix products per second by dtype, memory, bandwidth, each from its maker's sheet.

A device that is not listed has no peak here: no guess is made from a similar name. Figures with sparsity, which sheets
print first, are twice the dense ones; these are the dense ones.
"""

import dataclasses
import re
from collections.abc import Mapping

TERA, GIGA = 1e12, 1e9
UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
UNITS |= {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Device:
    """One device.

    Attributes:
        name: As ``torch.cuda.get_device_name`` has it.
        flops: Dense FLOP per second of matrix products with float32 accumulation: ``bfloat16``, ``float16``, ``tf32``,
            ``float32``.
        memory_bytes: As sold (GB of 10^9 bytes).
        bandwidth: Bytes per second.
        source: Where the figures are from.
    """

    name: str
    flops: Mapping[str, float]
    memory_bytes: float
    bandwidth: float
    source: str


def _device(
    name: str,
    memory_gb: float,
    bandwidth_gb: float,
    source: str,
    *,
    half: float,
    tf32: float | None,
    single: float,
    bf16: bool = True,
) -> Device:
    tera = {"float16": half, **({"bfloat16": half} if bf16 else {}), **({"tf32": tf32} if tf32 else {})}
    return Device(
        name=name,
        flops={dtype: value * TERA for dtype, value in {**tera, "float32": single}.items()},
        memory_bytes=memory_gb * GIGA,
        bandwidth=bandwidth_gb * GIGA,
        source=source,
    )


_H100 = "NVIDIA H100 Tensor Core GPU data sheet (2024)"
_A100 = "NVIDIA A100 Tensor Core GPU data sheet (2022)"
_V100 = "NVIDIA V100 Tensor Core GPU data sheet (2020)"
_ADA = "NVIDIA Ada GPU Architecture whitepaper (2023), appendix A"
_GA102 = "NVIDIA Ampere GA102 GPU Architecture whitepaper (2021), table 3"

DEVICES: dict[str, Device] = {
    device.name: device
    for device in (
        _device("NVIDIA H200", 141, 4800, "NVIDIA H200 data sheet (2024)", half=989.5, tf32=494.5, single=67),
        _device("NVIDIA H100 80GB HBM3", 80, 3350, _H100, half=989.5, tf32=494.5, single=67),
        _device("NVIDIA H100 PCIe", 80, 2000, "NVIDIA H100 PCIe product brief (2022)", half=756.5, tf32=378, single=51),
        _device("NVIDIA H100 NVL", 94, 3900, _H100, half=835.5, tf32=417.5, single=60),
        _device("NVIDIA A100-SXM4-80GB", 80, 2039, _A100, half=312, tf32=156, single=19.5),
        _device("NVIDIA A100 80GB PCIe", 80, 1935, _A100, half=312, tf32=156, single=19.5),
        _device("NVIDIA A100-SXM4-40GB", 40, 1555, _A100, half=312, tf32=156, single=19.5),
        _device("NVIDIA A100-PCIE-40GB", 40, 1555, _A100, half=312, tf32=156, single=19.5),
        _device("NVIDIA L4", 24, 300, "NVIDIA L4 data sheet (2023)", half=121, tf32=60, single=30.3),
        _device("NVIDIA L40S", 48, 864, "NVIDIA L40S data sheet (2023)", half=362.05, tf32=183, single=91.6),
        _device("NVIDIA GeForce RTX 4090", 24, 1008, _ADA, half=165.2, tf32=82.6, single=82.6),
        _device("NVIDIA GeForce RTX 3090", 24, 936, _GA102, half=71, tf32=35.6, single=35.6),
        *(
            _device(f"Tesla V100-SXM2-{gb}GB", gb, 900, _V100, half=125, tf32=None, single=15.7, bf16=False)
            for gb in (32, 16)
        ),
        _device("Tesla T4", 16, 320, "NVIDIA T4 data sheet (2019)", half=65, tf32=None, single=8.1, bf16=False),
    )
}


def find_device(name: str) -> Device:
    """The device of this name, in any case, with or without its maker's name in front.

    Raises:
        ValueError: If it is not listed; the message says which are.
    """
    wanted = name.lower().removeprefix("nvidia ")
    for device in DEVICES.values():
        if device.name.lower().removeprefix("nvidia ") == wanted:
            return device
    raise ValueError(f"device {name!r} is not in the table: there are {', '.join(DEVICES)}; or give its peak yourself")


def byte_size(words: str) -> int:
    """``80GiB`` as bytes.

    Raises:
        ValueError: No number, or a unit that is not known.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?) *([A-Za-z]*)", words.strip())
    if found is None or found[2] not in UNITS:
        raise ValueError(
            f"{words!r} is no size: give a number with one of {', '.join(u for u in UNITS if u)}, such as 80GiB"
        )
    return int(float(found[1]) * UNITS[found[2]])


def shown_size(size: float) -> str:
    """Bytes in GiB, or in MiB below one; with its sign if it is a difference."""
    unit, name = (2**30, "GiB") if abs(size) >= 2**30 else (2**20, "MiB")
    return f"{size / unit:,.2f} {name}"
