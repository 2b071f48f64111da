"""What a run should cost, from its config alone: parameters, FLOPs, device peaks. Imports no torch.

The public names are loaded when first used (PEP 562).
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_llm.accounting.flops import StepFlops, step_flops
    from lightning_llm.accounting.hardware import DEVICES, Device, find_device

_PUBLIC = {
    "DEVICES": "lightning_llm.accounting.hardware",
    "Device": "lightning_llm.accounting.hardware",
    "StepFlops": "lightning_llm.accounting.flops",
    "find_device": "lightning_llm.accounting.hardware",
    "step_flops": "lightning_llm.accounting.flops",
}

__all__ = ["DEVICES", "Device", "StepFlops", "find_device", "step_flops"]


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module 'lightning_llm.accounting' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
