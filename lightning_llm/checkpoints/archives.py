"""Archives of tensors, as ``torch.save`` writes them: written atomically, read without running code.

Reading always uses ``torch.load(weights_only=True)``: Lightning's default leaves that to an environment variable and,
for a URL, to the pickle (lightning/fabric/utilities/cloud_io.py). torch does not detect flipped bits, so the checksums
of the parts are compared first. What torch has made must consist of plain values and tensors, of exact types.
"""

import errno
import os
import pickle
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor, nn

from lightning_llm.io.atomic import atomic_file
from lightning_llm.io.garbage import no_garbage_collection
from lightning_llm.io.untrusted import DEEPEST, open_regular, shown

Source = str | os.PathLike[str] | IO[bytes]
TENSORS = "/data/"  # in the names of the parts that hold tensors
BEGINNING = b"PK\3\4"  # of files that torch.save has written
SUFFIXES = (".ckpt", ".pt")  # names of checkpoints
FOLDER = 0x10  # MS-DOS's mark in the attributes of a part
BLOCK = 2**20  # bytes that are read at once

_PLAIN = {bool, int, float, str, bytes, torch.dtype, torch.device, type(None)}
_DICTS = {dict, OrderedDict, Counter}
_LISTS = {list, tuple, set, torch.Size}
_TENSORS = {Tensor, nn.Parameter}


class Rejected(Exception):
    """A file is complete, but its content is not safe to load."""


# ---- writing and reading


def write_atomically(content: object, path: str | os.PathLike[str]) -> None:
    """``torch.save`` to a temporary name in the same folder, then rename.

    Raises:
        OSError: The folder cannot be written, or the disk is full; the file at ``path`` is unchanged.
    """
    try:
        with atomic_file(Path(path), durable=True) as file:
            torch.save(content, file)
    except (OSError, RuntimeError) as error:
        # torch reports a failed write as a RuntimeError of its zip writer, with the cause only in the text or context
        cause = error.__context__ if isinstance(error.__context__, OSError) else error
        if not isinstance(cause, OSError) and "PytorchStreamWriter" not in str(error):
            raise
        # torch may hide the reason, which is most likely a full disk
        number = (cause.errno if isinstance(cause, OSError) else None) or errno.ENOSPC
        raise OSError(number, f"cannot save the checkpoint: {os.strerror(number)}", str(path)) from error


@no_garbage_collection()
def read_archive(
    source: Source, map_location: Any | None = None, *, mmap: bool = False, of_tensors: bool = True
) -> dict[str, Any]:
    """The content of a file, without executing anything in it.

    Args:
        source: A path or an open file.
        map_location: Where tensors go, as in ``torch.load``; default: host memory.
        mmap: Leave the tensors in the file until they are used.
        of_tensors: Compare the checksums of the tensors too. False if no tensor will be used.

    Raises:
        ValueError: The file does not exist, is truncated, is not a checkpoint, or holds code.
    """
    name = str(source) if isinstance(source, str | os.PathLike) else "the given file"
    if os.environ.get("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "0") in ("1", "y", "yes", "true"):
        raise ValueError("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD is set and would run code from checkpoints: unset it")
    if isinstance(source, str | os.PathLike) and not Path(source).is_file():  # a pipe or device would never end
        raise ValueError(f"checkpoint {name} {'is not a file' if Path(source).exists() else 'does not exist'}")
    try:
        _check_archive(source, of_tensors)
        content = _loaded(source, map_location, mmap=mmap)
    except Rejected as error:
        raise ValueError(f"checkpoint {name} is rejected: {error}") from error
    except MemoryError:
        raise
    except Exception as error:  # torch builds what the pickle says, such as a view beyond its storage
        if not _may_have_been_one(source):
            raise ValueError(f"{name} is not a checkpoint: give one that lightning-llm fit has saved") from error
        problem = "is truncated or damaged, or not a checkpoint: use an earlier one"
        raise ValueError(f"checkpoint {name} {problem}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{name} is not a checkpoint: it holds {shown(content)}")
    return content


def _may_have_been_one(source: Source) -> bool:
    if isinstance(source, str | os.PathLike) and Path(source).suffix in SUFFIXES:
        return True
    with _opened(source) as file:
        return file.read(len(BEGINNING)) in (BEGINNING, b"")


@no_garbage_collection()
def is_intact_file(path: str | os.PathLike[str]) -> bool:
    """Whether every part of a file matches its checksum and torch can open it.

    The checksums take about 1 s per GB. Opening reads no tensor and takes milliseconds. A file that holds code counts
    as whole; ``read_archive`` rejects it.
    """
    try:
        if not Path(path).is_file():
            return False
        _check_archive(path)
        _loaded(path, mmap=True)
    except Rejected:
        return True
    except Exception:  # whatever the reader makes of a damaged index: no step can be read from such a file
        return False
    return True


def _check_archive(source: Source, of_tensors: bool = True) -> None:
    """Compare the checksum of every part.

    A truncated file lacks the index, which is at the end. torch compresses nothing. It reads by the compressed size,
    and treats a part with the mark of a folder as empty; zipfile ignores both.

    Raises:
        Exception: The file is truncated or damaged: whatever zipfile makes of it.
    """
    with _opened(source) as file, zipfile.ZipFile(file) as archive:
        for entry in archive.infolist():
            is_stored = (entry.compress_type, entry.compress_size) == (zipfile.ZIP_STORED, entry.file_size)
            if not is_stored or entry.external_attr & FOLDER:
                raise zipfile.BadZipFile("a compressed part, or a folder")
            with archive.open(entry) as part:
                while (of_tensors or TENSORS not in entry.filename) and part.read(BLOCK):
                    pass


def _loaded(source: Source, map_location: Any | None = None, *, mmap: bool) -> Any:
    """The content of a file whose checksums agree.

    Raises:
        Rejected: It holds something other than plain values and tensors.
        Exception: The file is damaged: whatever torch makes of it.
    """
    try:
        with _opened(source):  # an open file is where it was afterwards
            content = torch.load(source, map_location=map_location or "cpu", weights_only=True, mmap=mmap)
    except pickle.UnpicklingError as error:
        named: list[str] = []
        with suppress(Exception):  # an operation that torch does not know
            named = sorted(torch.serialization.get_unsafe_globals_in_checkpoint(source))
        made = f"objects that only running its code could make ({shown(', '.join(named))})"
        problem = f"it holds {made}" if named else "its pickle is not one that torch writes"
        raise Rejected(f"{problem}; nothing in it was executed") from error
    _check_types(content)
    return content


def _check_types(content: object) -> None:
    """Check that a file holds plain values and tensors of exact types, without attributes and hooks.

    An attribute ``items`` of an ordered dict would hide its content from every later check. A hook would be called.
    """
    todo: list[tuple[Any, int]] = [(content, 0)]
    while todo:
        value, depth = todo.pop()
        if type(value) in _PLAIN:
            continue
        if depth > DEEPEST:  # later checks call themselves for each level
            raise Rejected(f"it holds values more than {DEEPEST} inside one another")
        kind = type(value)
        if kind not in _DICTS | _LISTS | _TENSORS:
            raise Rejected(f"it holds {kind.__name__}, which is not a plain value")
        attributes = getattr(value, "__dict__", {})
        if attributes.keys() - {"_metadata"}:  # which is of nn.Module.state_dict
            raise Rejected("it holds a value with attributes")
        inner = [*attributes.values()]
        if kind in _TENSORS:
            has_numbers = value.layout is torch.strided and not value.is_meta
            if not has_numbers or value.is_complex() or value.is_quantized or value._backward_hooks:
                raise Rejected("it holds a tensor that is sparse, complex, quantized or without data, or has hooks")
        else:
            inner += [*value.keys(), *value.values()] if kind in _DICTS else value
        todo += [(each, depth + 1) for each in inner]


@contextmanager
def _opened(source: Source) -> Iterator[IO[bytes]]:
    if isinstance(source, str | os.PathLike):
        with open_regular(source) as file:
            yield file
        return
    position = source.tell()
    try:
        yield source
    finally:
        source.seek(position)
