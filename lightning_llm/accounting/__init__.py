"""What a run should cost, from its config alone: parameters, FLOPs, memory, device peaks. Imports no torch.

The public names are loaded when first used (PEP 562).
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_llm.accounting.flops import StepFlops, step_flops
    from lightning_llm.accounting.hardware import DEVICES, Device, find_device
    from lightning_llm.accounting.memory import StepMemory, largest_batch, step_memory
    from lightning_llm.accounting.parameters import parameters_by_part

_PUBLIC = {
    "DEVICES": "lightning_llm.accounting.hardware",
    "Device": "lightning_llm.accounting.hardware",
    "StepFlops": "lightning_llm.accounting.flops",
    "StepMemory": "lightning_llm.accounting.memory",
    "find_device": "lightning_llm.accounting.hardware",
    "largest_batch": "lightning_llm.accounting.memory",
    "parameters_by_part": "lightning_llm.accounting.parameters",
    "step_flops": "lightning_llm.accounting.flops",
    "step_memory": "lightning_llm.accounting.memory",
}

__all__ = [
    "DEVICES",
    "Device",
    "StepFlops",
    "StepMemory",
    "find_device",
    "largest_batch",
    "parameters_by_part",
    "step_flops",
    "step_memory",
]


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module 'lightning_llm.accounting' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
