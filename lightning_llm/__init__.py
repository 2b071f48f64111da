"""lightning-llm: train decoder-only language models with PyTorch Lightning.

The public names are loaded when first used (PEP 562): importing the package costs no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_llm.data.datamodule import TokenDataModule
    from lightning_llm.model.config import ModelConfig
    from lightning_llm.model.mlp import MemoryOptimizedSwiGLU, SwiGLU
    from lightning_llm.model.transformer import Transformer
    from lightning_llm.training.module import LanguageModel

__version__ = "0.1.0"

_PUBLIC = {
    "LanguageModel": "lightning_llm.training.module",
    "MemoryOptimizedSwiGLU": "lightning_llm.model.mlp",
    "ModelConfig": "lightning_llm.model.config",
    "SwiGLU": "lightning_llm.model.mlp",
    "TokenDataModule": "lightning_llm.data.datamodule",
    "Transformer": "lightning_llm.model.transformer",
}
_PACKAGES = (
    "accounting", "bench", "cli", "data", "generation", "interop", "measure", "model", "ops", "optim", "training"
)  # fmt: skip

__all__ = [
    "LanguageModel",
    "MemoryOptimizedSwiGLU",
    "ModelConfig",
    "SwiGLU",
    "TokenDataModule",
    "Transformer",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(import_module(_PUBLIC[name]), name)
    if name in _PACKAGES:
        return import_module(f"lightning_llm.{name}")
    raise AttributeError(f"module 'lightning_llm' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, *_PACKAGES])
