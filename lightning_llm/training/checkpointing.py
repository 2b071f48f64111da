"""Checkpoints: written whole or not at all, read without running code.

A file is written beside its name, flushed to the disk and renamed, so that a kill or a full disk leaves what was there
before. Reading is ``torch.load(weights_only=True)``, always: Lightning's default leaves it to an environment variable
and, for a URL, to the pickle (lightning/fabric/utilities/cloud_io.py).

No Lightning is imported here: a trained model is read back without it.
"""

import os
import pickle
import re
import zipfile
import zlib
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_llm.model.config import ModelConfig
from lightning_llm.model.transformer import Transformer

FORMAT = "lightning_llm"  # the key of a checkpoint's own part
FORMAT_VERSION = 1
BEST = "best.ckpt"
_STEP = re.compile(r"step-(\d+)\.ckpt")
Source = str | os.PathLike[str] | IO[bytes]


def write_atomically(content: object, path: str | os.PathLike[str]) -> None:
    """``torch.save`` to a temporary name in the same folder, then rename.

    Raises:
        OSError: The folder cannot be written, or the disk is full; the file at ``path`` is as it was.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        _flush_folder(path.parent)
    except BaseException as error:
        with suppress(OSError):
            temporary.unlink()
        # torch reports a failed write as a RuntimeError of its zip writer, with the cause only in the text or context
        cause = error.__context__ if isinstance(error.__context__, OSError) else error
        if isinstance(cause, OSError) or (isinstance(error, RuntimeError) and "PytorchStreamWriter" in str(error)):
            reason = cause.strerror if isinstance(cause, OSError) and cause.strerror else "the disk is full"
            message = f"cannot save the checkpoint: {reason}; earlier checkpoints are untouched"
            raise OSError(cause.errno if isinstance(cause, OSError) else None, message, str(path)) from error
        raise


def read_checkpoint(source: Source, map_location: Any | None = None, *, mmap: bool = False) -> dict[str, Any]:
    """What a checkpoint holds, without executing anything in it.

    Args:
        source: A path or an open file.
        map_location: Where tensors go, as in ``torch.load``; default: main memory.
        mmap: Leave the tensors in the file until they are used.

    Raises:
        ValueError: No such file, a URL, a file that is cut short or no checkpoint, or one that holds code.
    """
    name = str(source) if isinstance(source, str | os.PathLike) else "the given file"
    if "://" in name:
        raise ValueError(f"checkpoint {name} is a URL: download it and give the file")
    if os.environ.get("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "0") in ("1", "y", "yes", "true"):
        raise ValueError("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD is set and would run code from checkpoints: unset it")
    if isinstance(source, str | os.PathLike) and not Path(source).is_file():
        raise ValueError(f"checkpoint {name} does not exist")
    if not is_whole(source):
        raise ValueError(f"checkpoint {name} is cut short or damaged, or no checkpoint: use an earlier one")
    try:
        content = torch.load(source, map_location=map_location or "cpu", weights_only=True, mmap=mmap)
    except pickle.UnpicklingError as error:
        if "GLOBAL" in str(error):  # torch's word for a name that unpickling would import and call
            raise ValueError(
                f"checkpoint {name} is refused: it holds objects that only running its code could make; "
                "nothing in it was executed"
            ) from error
        raise ValueError(f"{name} is no checkpoint, or a damaged one") from error
    except (RuntimeError, EOFError, KeyError, ValueError, OSError) as error:
        raise ValueError(f"checkpoint {name} is cut short or damaged: use an earlier one") from error
    if not isinstance(content, dict):
        raise ValueError(f"{name} is no checkpoint: it holds a {type(content).__name__}")
    return content


def check_run_checkpoint(path: str | os.PathLike[str]) -> None:
    """Refuse a file that a run cannot go on from, without reading its tensors.

    Raises:
        ValueError: As :func:`read_checkpoint`, or the file is no checkpoint of a run.
    """
    content = read_checkpoint(path, mmap=True)
    own, loops = content.get(FORMAT), content.get("loops")
    if not isinstance(own, dict) or not isinstance(loops, dict) or "optimizer_states" not in content:
        raise ValueError(f"checkpoint {path} was not written by lightning-llm fit: nothing to go on from")
    if own["format_version"] > FORMAT_VERSION:
        raise ValueError(
            f"checkpoint {path} has format {own['format_version']}, this version reads up to {FORMAT_VERSION}: upgrade"
        )


def load_transformer(path: str | os.PathLike[str], device: str | torch.device = "cpu") -> tuple[Transformer, str]:
    """The model in a checkpoint of a training run, in evaluation mode, and its tokenizer.

    Args:
        path: A file that ``lightning-llm fit`` has written.
        device: Where the model goes.

    Returns:
        The model, and the content of its ``tokenizer.json``.

    Raises:
        ValueError: As :func:`read_checkpoint`, or the file is no checkpoint of a run, or of a newer format.
    """
    content = read_checkpoint(path)
    own = content.get(FORMAT)
    if not isinstance(own, dict) or "state_dict" not in content:
        raise ValueError(f"checkpoint {path} was not written by lightning-llm fit")
    if own["format_version"] > FORMAT_VERSION:
        raise ValueError(
            f"checkpoint {path} has format {own['format_version']}, this version reads up to {FORMAT_VERSION}: upgrade"
        )
    prefix = "transformer."
    weights = {name[len(prefix) :]: value for name, value in content["state_dict"].items() if name.startswith(prefix)}
    with torch.device("meta"):
        model = Transformer(ModelConfig(**content["hyper_parameters"]["architecture"]))
    model.load_state_dict(weights, assign=True)
    model.tie_weights()
    return model.to(device).eval(), own["tokenizer"]


def is_whole(source: Source) -> bool:
    """Whether a file is an archive of which every part has its checksum.

    A file cut short lacks the index, which stands at the end. torch itself reads flipped bits without a word, so the
    checksums are compared here, which reads the file once more (about 1 s per GB).
    """
    position = None if isinstance(source, str | os.PathLike) else source.tell()
    try:
        with zipfile.ZipFile(source) as archive:
            return archive.testzip() is None
    except (zipfile.BadZipFile, OSError, EOFError, ValueError, zlib.error):
        return False
    except NotImplementedError:  # what zipfile says where a flipped bit names a compression that there is not
        return False
    finally:
        if position is not None:
            source.seek(position)  # type: ignore[union-attr]


def _flush_folder(folder: Path) -> None:
    """Make a renaming outlive a power cut, where the system can."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def save_checkpoint(model: nn.Module, optimizer: Optimizer, iteration: int, out: Source) -> None:
    """Save the state of a plain training loop.

    Args:
        model: Its parameters and buffers are saved.
        optimizer: Its state is saved.
        iteration: Number of steps done.
        out: A path, written atomically, or a file open for writing.
    """
    content = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "iteration": iteration}
    if isinstance(out, str | os.PathLike):
        write_atomically(content, out)
    else:
        torch.save(content, out)


def load_checkpoint(src: Source, model: nn.Module, optimizer: Optimizer) -> int:
    """Restore what :func:`save_checkpoint` saved, in place.

    Args:
        src: A path, or a file open for reading.
        model: Gets the parameters and buffers.
        optimizer: Gets the state.

    Returns:
        The number of steps done.

    Raises:
        ValueError: As :func:`read_checkpoint`, or the file is of another model.
    """
    content = read_checkpoint(src)
    missing = {"model", "optimizer", "iteration"} - content.keys()
    if missing:
        raise ValueError(f"the checkpoint lacks {', '.join(sorted(missing))}: it was not written by save_checkpoint")
    try:
        model.load_state_dict(content["model"])
        optimizer.load_state_dict(content["optimizer"])
    except RuntimeError as error:
        raise ValueError(f"the checkpoint is of another model: {' '.join(str(error).split())}") from error
    return int(content["iteration"])


def step_of(path: Path) -> int:
    """The optimiser step in a checkpoint's name, or -1."""
    match = _STEP.fullmatch(path.name)
    return int(match[1]) if match else -1


def step_files(folder: Path) -> list[Path]:
    """The numbered checkpoints in a folder, oldest first."""
    return sorted((path for path in folder.glob("step-*.ckpt") if step_of(path) >= 0), key=step_of)
