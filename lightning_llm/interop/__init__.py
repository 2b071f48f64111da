"""Reads and writes Hugging Face model folders. Names are loaded when first used.

``transformers`` itself is never imported: a folder is a few JSON files and tensors.
"""

from typing import TYPE_CHECKING

from lightning_llm.lazy import lazy

if TYPE_CHECKING:
    from lightning_llm.interop.reader import ModelFolder as ModelFolder
    from lightning_llm.interop.reader import load_model as load_model
    from lightning_llm.interop.reader import read_folder as read_folder
    from lightning_llm.interop.writer import export_model as export_model
else:
    __getattr__, __dir__, __all__ = lazy(__name__)
