"""The transformer and its parts, in plain torch. Names are loaded when first used."""

from typing import TYPE_CHECKING

from lightning_llm.lazy import lazy

if TYPE_CHECKING:
    from lightning_llm.model.config import ModelConfig as ModelConfig
    from lightning_llm.model.kv_cache import KVCache as KVCache
    from lightning_llm.model.mlp import MLP as MLP
    from lightning_llm.model.mlp import MemoryOptimizedSwiGLU as MemoryOptimizedSwiGLU
    from lightning_llm.model.mlp import SwiGLU as SwiGLU
    from lightning_llm.model.transformer import Transformer as Transformer
else:
    __getattr__, __dir__, __all__ = lazy(__name__)
