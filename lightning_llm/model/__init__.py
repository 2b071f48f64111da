"""The transformer and its parts, in plain torch. Names are loaded when first used."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_llm.model.config import ModelConfig
    from lightning_llm.model.kv_cache import KVCache
    from lightning_llm.model.mlp import MLP, MemoryOptimizedSwiGLU, SwiGLU
    from lightning_llm.model.transformer import Transformer

_PUBLIC = {
    "KVCache": "kv_cache",
    "MLP": "mlp",
    "MemoryOptimizedSwiGLU": "mlp",
    "ModelConfig": "config",
    "SwiGLU": "mlp",
    "Transformer": "transformer",
}

__all__ = ["MLP", "KVCache", "MemoryOptimizedSwiGLU", "ModelConfig", "SwiGLU", "Transformer"]


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(import_module(f"lightning_llm.model.{_PUBLIC[name]}"), name)
    raise AttributeError(f"module 'lightning_llm.model' has no attribute {name!r}")
