"""Text from a model, and how likely a model finds a text. Names are loaded when first used (PEP 562)."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_llm.generation.decoding import generate, stream
    from lightning_llm.generation.sampling import Sampling
    from lightning_llm.generation.scoring import Score, score
    from lightning_llm.generation.text import generate_text, stream_text

_PUBLIC = {
    "Sampling": "sampling",
    "Score": "scoring",
    "generate": "decoding",
    "generate_text": "text",
    "score": "scoring",
    "stream": "decoding",
    "stream_text": "text",
}

__all__ = ["Sampling", "Score", "generate", "generate_text", "score", "stream", "stream_text"]


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(import_module(f"lightning_llm.generation.{_PUBLIC[name]}"), name)
    raise AttributeError(f"module 'lightning_llm.generation' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
