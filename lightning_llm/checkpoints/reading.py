"""Checkpoints, in one file or in a folder of shards: read, validated, and turned into a model.

``checkpoints.archives`` reads files, ``checkpoints.sharded`` folders. A run writes its checkpoints through
``training.checkpoint_io``, when ``training.callbacks.run_checkpoints`` says. Lightning is not imported: a trained model
can be loaded without it.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from lightning_llm.checkpoints import archives, sharded
from lightning_llm.checkpoints.archives import Source
from lightning_llm.checkpoints.compatibility import check_described, check_fits
from lightning_llm.checkpoints.schema import (
    ARCHITECTURE,
    FORMAT,
    LIGHTNING,
    RESUME,
    RESUME_PLAIN,
    WEIGHTS,
    check_content,
    trained_tokenizer,
)
from lightning_llm.io.untrusted import prefixed
from lightning_llm.model.config import config_of_file
from lightning_llm.model.transformer import Transformer
from lightning_llm.model.weights import only_finite


def read_checkpoint(
    source: Source, map_location: Any | None = None, *, mmap: bool = False, needs: tuple[str, ...] = ()
) -> dict[str, Any]:
    """The content of a checkpoint, read without executing anything in it, and compared with the schema.

    Args:
        source: A path of a file or of a folder of shards, or an open file.
        map_location: Where tensors go, as in ``torch.load``; default: host memory.
        mmap: Leave the tensors in the file until they are used; those of a folder become ``sharded.LazyShardedTensor``.
        needs: Required fields, see ``checkpoints.schema``.

    Raises:
        ValueError: The path does not exist or is a URL, or the file is truncated, is not a checkpoint, or holds code.
    """
    if not isinstance(source, str | os.PathLike):
        content = archives.read_archive(source, map_location, mmap=mmap)
        where = "in the given file"
    else:
        if "://" in str(source):
            raise ValueError(f"checkpoint {source} is a URL: download it and give the file")
        read = sharded.read_sharded if sharded.is_folder(Path(source)) else archives.read_archive
        content = read(Path(source), map_location, mmap=mmap)
        where = str(source)
    return _validated(content, where, needs)


def read_outline(path: Path, needs: tuple[str, ...] = ()) -> dict[str, Any]:
    """Read like :func:`read_checkpoint`, in milliseconds; the tensors in the result must not be used."""
    path = sharded.main_file(path) if sharded.is_folder(path) else path
    return _validated(archives.read_archive(path, mmap=True, of_tensors=False), path, needs, of_tensors=False)


def _validated(
    content: dict[str, Any], where: object, needs: tuple[str, ...] = (), *, of_tensors: bool = True
) -> dict[str, Any]:
    check_content(content, where, needs, of_tensors=of_tensors)
    return content


def check_run_checkpoint(
    path: str | os.PathLike[str], *, is_described: bool = True, is_plain: bool = False
) -> dict[str, Any]:
    """Check that a run can resume from a file, without reading its tensors.

    Args:
        path: The checkpoint.
        is_described: Whether its architecture describes all its weights, and it holds the state of token data: not if
            model or data are of the user's own classes.
        is_plain: Whether the model is no ``LanguageModel``, which has no architecture.

    Returns:
        The part under ``FORMAT``, which ``LanguageModel`` adds to Lightning's; empty without it.

    Raises:
        ValueError: As :func:`read_checkpoint`, or the file is not the checkpoint of a run.
    """
    needs = RESUME_PLAIN if is_plain else (*RESUME, "TokenDataModule") if is_described else RESUME
    content = read_checkpoint(path, mmap=True, needs=needs)
    if is_described and not is_plain:
        check_described(content, path)
    return dict(content.get(FORMAT, {}))


def load_transformer(
    path: str | os.PathLike[str], device: str | torch.device = "cpu", *, trust_code: bool = False
) -> tuple[Transformer, str | None]:
    """The model in a checkpoint of a training run, in evaluation mode, and its tokenizer.

    Args:
        path: A file that ``lightning-llm fit`` has written.
        device: Where the model goes.
        trust_code: Whether its parts may be classes from outside this package.

    Returns:
        The model, and the content of its ``tokenizer.json``, if it has one.

    Raises:
        ValueError: As :func:`read_checkpoint`, or the file is not the checkpoint of a run, has a newer format, names
            code that is not trusted, or has weights that are NaN or infinite.
    """
    content = read_checkpoint(path, needs=WEIGHTS)
    prefix = "transformer."
    weights = {name[len(prefix) :]: value for name, value in content["state_dict"].items() if name.startswith(prefix)}
    with torch.device("meta"):
        model = Transformer(config_of_file(content["hyper_parameters"]["architecture"], path, trust_code=trust_code))
    check_fits({"state_dict": weights}, model.state_dict(), path)
    model.load_state_dict(dict(only_finite(weights.items(), path)), assign=True)
    model.tie_weights()
    return model.to(device).eval(), trained_tokenizer(content[FORMAT])


@contextmanager
def only_checkpoints(path: Source, *, trust_code: bool) -> Iterator[None]:
    """Check a model's checkpoint before Lightning reads it. Errors of loading become a ValueError of one line."""
    content = read_checkpoint(path, mmap=isinstance(path, str | os.PathLike), needs=(*LIGHTNING, ARCHITECTURE))
    config_of_file(content["hyper_parameters"]["architecture"], path, trust_code=trust_code)
    with prefixed(f"checkpoint {path} is of another model", RuntimeError, TypeError):  # torch's; Python's, of arguments
        yield


def is_intact(path: Path) -> bool:
    """Whether every part of a checkpoint exists and matches its checksum, and torch can open it (about 1 s per GB)."""
    return sharded.is_intact_folder(path) if sharded.is_folder(path) else archives.is_intact_file(path)
