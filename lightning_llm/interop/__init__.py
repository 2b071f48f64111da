"""To and from a folder as ``transformers`` reads and writes it. Names are loaded when first used.

``transformers`` itself is never imported: a folder of it is a few JSON files beside tensors.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_llm.interop.reader import ModelFolder, load_model, read_folder
    from lightning_llm.interop.writer import export_model

_PUBLIC = {"ModelFolder": "reader", "export_model": "writer", "load_model": "reader", "read_folder": "reader"}

__all__ = ["ModelFolder", "export_model", "load_model", "read_folder"]


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(import_module(f"lightning_llm.interop.{_PUBLIC[name]}"), name)
    raise AttributeError(f"module 'lightning_llm.interop' has no attribute {name!r}")
