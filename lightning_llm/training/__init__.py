"""Training: the LightningModule, its metrics, checkpoints and callbacks. Names are loaded when first used."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_llm.training.checkpointing import load_checkpoint, save_checkpoint
    from lightning_llm.training.metrics import LanguageModelMetrics
    from lightning_llm.training.module import LanguageModel

_PUBLIC = {
    "LanguageModel": "module",
    "LanguageModelMetrics": "metrics",
    "load_checkpoint": "checkpointing",
    "save_checkpoint": "checkpointing",
}

__all__ = ["LanguageModel", "LanguageModelMetrics", "load_checkpoint", "save_checkpoint"]


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(import_module(f"lightning_llm.training.{_PUBLIC[name]}"), name)
    raise AttributeError(f"module 'lightning_llm.training' has no attribute {name!r}")
