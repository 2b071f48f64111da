"""The model that a command is given: a checkpoint, a run directory, or a folder of ``transformers``."""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning_llm.data.tokenizers import Tokenizer
    from lightning_llm.model.transformer import Transformer

KINDS = "a checkpoint, a run directory (takes its best, else its newest), or an exported folder"


def open_model(given: str, device: str) -> tuple["Transformer", "Tokenizer"]:
    """The model, in evaluation mode, and its tokenizer.

    Args:
        given: One of ``KINDS``, or ``last`` or ``best`` of the runs below ``runs``.
        device: Where it goes.

    Raises:
        ValueError: There is no such model, or it cannot be read, or has no tokenizer.
    """
    from lightning_llm.cli.runs import find_checkpoint
    from lightning_llm.data.tokenizers import Tokenizer
    from lightning_llm.interop.reader import is_model_folder, load_model
    from lightning_llm.training.checkpointing import load_transformer

    content: str | None
    if is_model_folder(Path(given)):
        model, content = load_model(Path(given), device)
    else:
        model, content = load_transformer(find_checkpoint(given, Path("runs")), device)
    if content is None:
        raise ValueError(f"{given} holds no tokenizer: give a model that was trained or exported with one")
    return model, Tokenizer.from_str(content)
