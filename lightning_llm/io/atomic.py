"""Files and folders that appear complete or not at all, and JSON that every reader accepts. Needs no torch."""

import json
import math
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from lightning_llm.io.untrusted import descriptor_of


@contextmanager
def atomic_path(path: Path, *, durable: bool = False) -> Iterator[Path]:
    """A temporary name for a file or folder, which gets the name ``path`` once it is complete.

    Missing folders are made. After an error, what was at ``path`` before is unchanged. A link at ``path`` is replaced.
    Nobody can guess the temporary name and put a link there. It begins with a dot and ends with ``.tmp``, by which a
    later process recognizes what a kill has left.

    Args:
        path: Its name at the end.
        durable: Replace a folder that is not empty, and flush the name to the disk, so that it survives a power cut.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        yield temporary
        (replace_path if durable else os.replace)(temporary, path)
    except BaseException as error:
        with suppress(OSError):
            remove_path(temporary)
        if isinstance(error, OSError) and error.filename is not None:  # nobody knows the temporary name
            error.filename = os.fsdecode(error.filename).replace(str(temporary), str(path))
        raise


@contextmanager
def atomic_file(path: Path, *, durable: bool = False) -> Iterator[IO[bytes]]:
    """A file to write to, under a temporary name until it is complete; ``durable`` flushes its content too."""
    with atomic_path(path, durable=durable) as temporary, temporary.open("xb") as file:
        yield file
        if durable:
            file.flush()
            os.fsync(file.fileno())


def open_to_append(path: Path) -> IO[bytes]:
    """A file to append to, made if it is missing. A link is rejected: it could lead to another folder."""
    return open(descriptor_of(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW), "ab")


def write_text(path: Path, content: str) -> None:
    """Write a text file atomically, as UTF-8."""
    with atomic_file(path) as file:
        file.write(content.encode())


def write_json(path: Path, content: object, *, indent: int | None = 2) -> None:
    """Write :func:`json_text` atomically."""
    write_text(path, json_text(content, indent=indent) + "\n")


def json_text(content: object, *, indent: int | None = None) -> str:
    """Standard JSON: numbers that are NaN or infinite become null."""
    return json.dumps(_finite(content), indent=indent, allow_nan=False)


def _finite(content: object) -> object:
    if isinstance(content, float):
        return content if math.isfinite(content) else None
    if isinstance(content, Mapping):
        return {name: _finite(value) for name, value in content.items()}
    if isinstance(content, list | tuple):
        return [_finite(value) for value in content]
    return content


def replace_path(source: Path, target: Path) -> None:
    """Rename a file or folder to ``target``, replacing what is there, and flush the folder to the disk.

    No system replaces a folder that is not empty, so the old folder first gets a temporary name. A rename follows no
    link, so that this name may be the same each time: the next call deletes what a kill has left.
    """
    old = None
    if target.is_dir() or (source.is_dir() and os.path.lexists(target)):
        old = target.with_name(f".{target.name}.old.tmp")
        remove_path(old)
        os.replace(target, old)
    os.replace(source, target)
    flush_folder(target.parent)
    if old is not None:
        remove_path(old)


def remove_path(path: Path) -> None:
    """Delete a file or folder if it exists. A folder first gets a temporary name, since half of it is worthless."""
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
        return
    if not path.name.endswith(".tmp"):
        leaving = path.with_name(f".{path.name}.gone.tmp")
        remove_path(leaving)  # a kill may have left it
        path = path.rename(leaving)
    shutil.rmtree(path)


def link_path(source: Path, target: Path) -> None:
    """Replace ``target`` with a hard link to a file, or a folder of hard links; copies if links are not supported.

    Symbolic links in the folder are left out, since they could lead to a file elsewhere.
    """
    if source.is_file() and target.is_file() and source.samefile(target):
        return  # renaming one name of a file over another of its names does nothing: the temporary one would stay
    with atomic_path(target, durable=True) as temporary:
        if source.is_dir():
            shutil.copytree(source, temporary, copy_function=_link_file, ignore=_symbolic_links)
        else:
            _link_file(source, temporary)


def existing_parent(path: Path) -> Path:
    """The path itself, or the first of the folders above it that exists."""
    return next(place for place in (path, *path.absolute().parents) if place.exists())


def flush_folder(folder: Path) -> None:
    """Make renames in a folder survive a power cut, if the system can."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _symbolic_links(folder: str, names: list[str]) -> list[str]:
    return [name for name in names if (Path(folder) / name).is_symlink()]


def _link_file(source: str | Path, target: str | Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # a file system without hard links
        shutil.copyfile(source, target)
