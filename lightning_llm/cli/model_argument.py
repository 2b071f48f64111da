"""The model that a command is given: a checkpoint, a run directory, or a folder of ``transformers``."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning_llm.data.tokenizers import Tokenizer
    from lightning_llm.model.transformer import Transformer

KINDS = "a checkpoint, a run directory (takes its best, else its newest), or an exported folder"


def open_model(given: str, device: str, *, trust_code: bool = False) -> tuple["Transformer", "Tokenizer"]:
    """The model, in evaluation mode, and its tokenizer.

    Args:
        given: One of ``KINDS``, or ``last`` or ``best`` of the runs below ``runs``.
        device: Where it goes.
        trust_code: As of ``add_trust``.

    Raises:
        ValueError: There is no such model or device, or the model cannot be read, is not trusted, or has no tokenizer.
    """
    check_device(device)
    from lightning_llm.checkpoints.reading import load_transformer
    from lightning_llm.cli.runs import find_checkpoint
    from lightning_llm.data.tokenizers import Tokenizer
    from lightning_llm.interop.reader import is_model_folder, load_model

    content: str | None
    if is_model_folder(Path(given)):
        model, content = load_model(Path(given), device)
    else:
        model, content = load_transformer(find_checkpoint(given, Path("runs")), device, trust_code=trust_code)
    if content is None:
        raise ValueError(f"{given} holds no tokenizer: give a model that was trained or exported with one")
    return model, Tokenizer.from_str(content)


def add_trust(parser: argparse.ArgumentParser) -> None:
    """The option without which no code runs that a checkpoint names."""
    parser.add_argument(
        "--trust-code", action="store_true", help="import and run classes outside lightning_llm that the model names"
    )


def check_device(given: str) -> None:
    """Refuse a device that this machine lacks, before anything is read.

    Raises:
        ValueError: It is unknown, or not there.
    """
    import torch

    try:
        device = torch.device(given)
    except RuntimeError as error:
        raise ValueError(f"device {given!r} is unknown: choose cpu, cuda or mps") from error
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= count:
            raise ValueError(f"device {given}: this machine has {count} CUDA devices for this torch: choose cpu")
    elif device.type == "mps" and not torch.backends.mps.is_available():
        raise ValueError(f"device {given}: this machine has none for this torch: choose cpu")
    elif device.type not in ("cpu", "mps"):
        raise ValueError(f"device {given!r} is not supported: choose cpu, cuda or mps")
