"""Memory-optimised operators: SwiGLU and cross-entropy, each beside its plain reference.

The public names are loaded when first used (PEP 562): importing the package costs no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_llm.ops.losses import cross_entropy, linear_cross_entropy
    from lightning_llm.ops.swiglu import memory_optimized_swiglu, swiglu_reference

_PUBLIC = {
    "cross_entropy": "lightning_llm.ops.losses",
    "linear_cross_entropy": "lightning_llm.ops.losses",
    "memory_optimized_swiglu": "lightning_llm.ops.swiglu",
    "swiglu_reference": "lightning_llm.ops.swiglu",
}

__all__ = ["cross_entropy", "linear_cross_entropy", "memory_optimized_swiglu", "swiglu_reference"]


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module 'lightning_llm.ops' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
