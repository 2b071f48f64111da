"""Live tensor bytes and times, measured: what is, where ``accounting`` says what should be.

The public names are loaded when first used (PEP 562).
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_llm.measure.meter import MemoryMeter, Phase
    from lightning_llm.measure.timer import Timing, interleave

_PUBLIC = {
    "MemoryMeter": "lightning_llm.measure.meter",
    "Phase": "lightning_llm.measure.meter",
    "Timing": "lightning_llm.measure.timer",
    "interleave": "lightning_llm.measure.timer",
}

__all__ = ["MemoryMeter", "Phase", "Timing", "interleave"]


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module 'lightning_llm.measure' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
