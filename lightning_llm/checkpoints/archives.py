"""Archives of tensors, as ``torch.save`` writes them: written atomically, read without running code.

Reading always uses ``torch.load(weights_only=True)``: Lightning's default leaves that to an environment variable and,
for a URL, to the pickle (lightning/fabric/utilities/cloud_io.py).

A small file can cost hours or all memory: by parts that overlap, lists that contain each other, a tensor of 10^12
elements over one number. So the index is compared with the form that torch gives it, and ``checkpoints.pickles`` checks
the values before and after torch makes them.
"""

import errno
import os
import re
import struct
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import torch

from lightning_llm.checkpoints.pickles import MOST_PICKLE_BYTES, Rejected, check_pickle, check_values
from lightning_llm.io.atomic import atomic_file
from lightning_llm.io.garbage import no_garbage_collection
from lightning_llm.io.untrusted import open_regular, shown

Source = str | os.PathLike[str] | IO[bytes]
TENSORS = "/data/"  # in the names of the parts that hold tensors
BEGINNING, SUFFIXES = b"PK\3\4", (".ckpt", ".pt")  # of files that torch.save has written; names of checkpoints
FOLDER = 0x10  # MS-DOS's mark in the attributes of a part
UNICODE_PATH = 0x7075  # a second name, which Python 3.12 takes and torch does not
BLOCK = 2**20  # bytes that are read at once

MOST_INDEX_BYTES = 2**24  # about 200,000 tensors

_ENTRY = re.compile(r"(\w[\w.-]*)/(data\.pkl|data/\d+|version|byteorder|\.[\w/]+)", re.ASCII)


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
        content = torch.load(source, map_location=map_location or "cpu", weights_only=True, mmap=mmap)
        with _opened(source) as file:
            check_values(content, file.seek(0, os.SEEK_END))
    except Rejected as error:
        raise ValueError(f"checkpoint {name} is rejected: {error}") from error
    except MemoryError:
        raise
    except Exception as error:  # torch builds what the pickle says: a view beyond its storage, a dict without an item
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

    The checksums take about 1 s per GB. Opening reads no tensor and takes milliseconds. A file that holds code, or
    absurd sizes, counts as whole; ``read_archive`` rejects it.
    """
    try:
        if not Path(path).is_file():
            return False
        _check_archive(path)
        torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Rejected:
        return True
    except Exception:  # whatever the reader makes of a damaged index: no step can be read from such a file
        return False
    return True


def _check_archive(source: Source, of_tensors: bool = True) -> None:
    """Check the index, the checksum of every part, and the pickle.

    A truncated file lacks the index, which is at the end. torch itself does not detect flipped bits, so the checksums
    are compared here. torch compresses nothing. It reads by the compressed size, and treats a part with the mark of a
    folder as empty; zipfile ignores both.

    Raises:
        Rejected: See :func:`check_pickle`.
        Exception: The file is truncated or damaged: whatever zipfile makes of it.
    """
    with _opened(source) as file, open_index(file) as archive:
        for entry in archive.infolist():
            is_stored = (entry.compress_type, entry.compress_size) == (zipfile.ZIP_STORED, entry.file_size)
            if not is_stored or entry.external_attr & FOLDER:
                raise zipfile.BadZipFile("a compressed part, or a folder")
            with archive.open(entry) as part:
                while (of_tensors or TENSORS not in entry.orig_filename) and part.read(BLOCK):
                    pass
        parts = {part.orig_filename.partition("/")[2]: part for part in archive.infolist()}
        with archive.open(parts["data.pkl"]) as pickled:
            check_pickle(pickled.read(MOST_PICKLE_BYTES + 1), {name: part.file_size for name, part in parts.items()})


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


# ---- limits


def open_index(file: IO[bytes]) -> zipfile.ZipFile:
    """Open a file that has the form that ``torch.save`` gives it.

    Raises:
        zipfile.BadZipFile: It has another form: data after or before the index, parts with unknown or repeated names,
            parts that together are larger than the file, an oversized index.
    """
    start = file.read(len(BEGINNING))
    end = file.seek(0, os.SEEK_END)
    file.seek(max(0, end - 98))
    tail = file.read()  # the end of the index: a record and a pointer of 64-bit archives (76 bytes), one of all (22)
    if start != BEGINNING or tail[-22:-18] != b"PK\5\6":
        raise zipfile.BadZipFile("not an archive, or truncated")
    size, first = struct.unpack("<LL", tail[-10:-2])
    is_long = tail[-42:-38] == b"PK\6\7"
    if is_long:
        size, first = struct.unpack("<QQ", tail[-58:-42])
    if first + size + (98 if is_long else 22) != end or size > MOST_INDEX_BYTES:
        raise zipfile.BadZipFile("an index of another size")
    archive = zipfile.ZipFile(file)
    parts = archive.infolist()
    names = [_ENTRY.fullmatch(part.orig_filename) for part in parts]
    distinct = {name[0].lower() for name in names if name}  # torch's reader ignores case
    if len(distinct) < len(parts) or len({name[1] for name in names if name}) != 1:
        raise zipfile.BadZipFile("parts with other names")
    if any(part.filename != part.orig_filename or UNICODE_PATH in _fields(part.extra) for part in parts):
        raise zipfile.BadZipFile("parts with two names")
    if sum(part.file_size for part in parts) > end:
        raise zipfile.BadZipFile("parts that overlap")
    return archive


def _fields(extra: bytes) -> Iterator[int]:
    """The kinds of the extra fields of a part."""
    while len(extra) >= 4:
        field, size = struct.unpack_from("<HH", extra)
        yield field
        extra = extra[4 + size :]
