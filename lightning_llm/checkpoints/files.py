"""Files of tensors: written whole or not at all, read without running code.

A file is written beside its name, flushed to the disk and renamed, so that a kill or a full disk leaves what was there
before. Reading is ``torch.load(weights_only=True)``, always: Lightning's default leaves it to an environment variable
and, for a URL, to the pickle (lightning/fabric/utilities/cloud_io.py).
"""

import os
import shutil
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import torch

from lightning_llm.checkpoints.archive_limits import Refused, check_pickle, check_values, open_index

Source = str | os.PathLike[str] | IO[bytes]
TENSORS = "/data/"  # in the names of the parts that hold tensors
FOLDER = 0x10  # MS-DOS's mark in the attributes of a part
BLOCK = 2**20  # bytes that are read at once


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
        replace_path(temporary, path)
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


def read_archive(
    source: Source, map_location: Any | None = None, *, mmap: bool = False, of_tensors: bool = True
) -> dict[str, Any]:
    """What a file holds, without executing anything in it.

    Args:
        source: A path or an open file.
        map_location: Where tensors go, as in ``torch.load``; default: main memory.
        mmap: Leave the tensors in the file until they are used.
        of_tensors: Compare the checksums of the tensors too. False where no tensor is going to be used.

    Raises:
        ValueError: No such file, a file that is cut short or no checkpoint, or one that holds code.
    """
    name = str(source) if isinstance(source, str | os.PathLike) else "the given file"
    if os.environ.get("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "0") in ("1", "y", "yes", "true"):
        raise ValueError("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD is set and would run code from checkpoints: unset it")
    if isinstance(source, str | os.PathLike) and not Path(source).is_file():  # a pipe or device would never end
        what = "is no file" if Path(source).exists() else "does not exist"
        raise ValueError(f"checkpoint {name} {what}")
    try:
        if not _has_checksums(source, of_tensors):
            raise zipfile.BadZipFile
        content = torch.load(source, map_location=map_location or "cpu", weights_only=True, mmap=mmap)
        check_values(content, _size(source))
    except Refused as error:
        raise ValueError(f"checkpoint {name} is refused: {error}") from error
    except MemoryError:
        raise
    except Exception as error:  # torch builds what the pickle says: a view beyond its storage, a dict without an item
        raise ValueError(f"checkpoint {name} is cut short or damaged, or no checkpoint: use an earlier one") from error
    if not isinstance(content, dict):
        raise ValueError(f"{name} is no checkpoint: it holds a {type(content).__name__}")
    return content


def is_whole_file(path: str | os.PathLike[str]) -> bool:
    """Whether every part of a file has its checksum and torch can open it.

    The checksums take about 1 s per GB. Opening reads no tensor: it takes milliseconds. A file that holds code is
    whole, and one of absurd sizes; ``read_archive`` refuses it.
    """
    try:
        if not Path(path).is_file() or not _has_checksums(path):
            return False
        torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Refused:
        return True
    except Exception:  # whatever the reader makes of a damaged index: no step can be read from such a file
        return False
    return True


def _has_checksums(source: Source, of_tensors: bool = True) -> bool:
    """Whether a file is an archive of which every part has its checksum.

    A file cut short lacks the index, which is at the end. torch itself reads flipped bits without a word, so the
    checksums are compared here. torch compresses nothing. It reads by the compressed size, and takes a part with the
    mark of a folder for empty; zipfile ignores both.
    """
    try:
        with _opened(source) as file, open_index(file) as archive:
            for entry in archive.infolist():
                if entry.compress_type != zipfile.ZIP_STORED or entry.compress_size != entry.file_size:
                    return False
                if entry.external_attr & FOLDER:
                    return False
            for entry in archive.infolist():
                with archive.open(entry) as part:
                    while (of_tensors or TENSORS not in entry.filename) and part.read(BLOCK):
                        pass
            check_pickle(archive)
        return True
    except Refused:
        raise
    except (zipfile.BadZipFile, OSError, EOFError, ValueError):
        return False
    except RuntimeError:  # a flipped bit says that a part is encrypted, or in an unknown format
        return False


@contextmanager
def _opened(source: Source) -> Iterator[IO[bytes]]:
    if isinstance(source, str | os.PathLike):
        with Path(source).open("rb") as file:
            yield file
        return
    position = source.tell()
    try:
        yield source
    finally:
        source.seek(position)


def _size(source: Source) -> int:
    with _opened(source) as file:
        return file.seek(0, os.SEEK_END)


def replace_path(source: Path, target: Path) -> None:
    """Rename a file or folder, over what has the name; then make the renaming outlive a power cut, where possible.

    No system replaces a folder that is not empty: it first steps aside, under a temporary name.
    """
    old = None
    if target.is_dir() or (source.is_dir() and target.exists()):
        old = target.with_name(f".{target.name}.old.tmp")
        remove_path(old)
        os.replace(target, old)
    os.replace(source, target)
    flush_folder(target.parent)
    if old is not None:
        remove_path(old)


def remove_path(path: Path) -> None:
    """Delete a file or folder, if it is there. A folder first gets a temporary name: half of it is no checkpoint."""
    if not path.is_dir():
        path.unlink(missing_ok=True)
        return
    leaving = path
    if not path.name.endswith(".tmp"):
        leaving = path.with_name(f".{path.name}.gone.tmp")
        shutil.rmtree(leaving, ignore_errors=True)
        os.replace(path, leaving)
    shutil.rmtree(leaving)


def link_path(source: Path, target: Path) -> None:
    """A second name for a file or a folder of files, in place of what had it; copies where links are not supported."""
    if source.is_file() and target.is_file() and source.samefile(target):
        return  # renaming one name of a file over another of its names does nothing: the temporary one would stay
    temporary = target.with_name(f".{target.name}.tmp")
    remove_path(temporary)
    try:
        if source.is_dir():
            temporary.mkdir()
            for file in source.iterdir():
                _link_file(file, temporary / file.name)
        else:
            _link_file(source, temporary)
        replace_path(temporary, target)
    except OSError:
        with suppress(OSError):
            remove_path(temporary)
        raise


def flush_folder(folder: Path) -> None:
    """Make what was renamed in a folder outlive a power cut, where the system can."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _link_file(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # a file system without hard links
        shutil.copyfile(source, target)
