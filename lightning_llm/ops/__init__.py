"""Memory-optimized operators: SwiGLU and cross-entropy, each with its plain reference.

The public names are loaded when first used (PEP 562): importing the package costs no torch.
"""

from typing import TYPE_CHECKING

from lightning_llm.lazy import lazy

if TYPE_CHECKING:
    from lightning_llm.ops.losses import cross_entropy as cross_entropy
    from lightning_llm.ops.losses import linear_cross_entropy as linear_cross_entropy
    from lightning_llm.ops.swiglu import memory_optimized_swiglu as memory_optimized_swiglu
    from lightning_llm.ops.swiglu import swiglu_reference as swiglu_reference
else:
    __getattr__, __dir__, __all__ = lazy(__name__)
