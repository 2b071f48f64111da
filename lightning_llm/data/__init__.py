"""Text to token stores, token stores to batches. Names load when first used; only those that need torch import it."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_llm.data.datamodule import TokenDataModule
    from lightning_llm.data.find_store import find_or_prepare
    from lightning_llm.data.order import WindowOrder, window_starts
    from lightning_llm.data.prepare import prepare_store
    from lightning_llm.data.sampling import sample_batch
    from lightning_llm.data.token_store import TokenStore
    from lightning_llm.data.tokenizers import Tokenizer

_PUBLIC = {
    "TokenDataModule": "lightning_llm.data.datamodule",
    "TokenStore": "lightning_llm.data.token_store",
    "Tokenizer": "lightning_llm.data.tokenizers",
    "WindowOrder": "lightning_llm.data.order",
    "find_or_prepare": "lightning_llm.data.find_store",
    "prepare_store": "lightning_llm.data.prepare",
    "sample_batch": "lightning_llm.data.sampling",
    "window_starts": "lightning_llm.data.order",
}

__all__ = [
    "TokenDataModule",
    "TokenStore",
    "Tokenizer",
    "WindowOrder",
    "find_or_prepare",
    "prepare_store",
    "sample_batch",
    "window_starts",
]


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module 'lightning_llm.data' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
