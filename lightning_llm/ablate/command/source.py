"""The code of a command without trees: what must not change while an experiment runs. No torch."""

import os
from collections.abc import Iterator
from pathlib import Path

from lightning_llm.ablate.command.spec import Command
from lightning_llm.ablate.names import PLAN, STREAM

LARGEST = 1 << 20  # of a file
MOST = 2_000  # files
PASSED_OVER = {".git", "__pycache__", "node_modules", "runs", "site-packages"}


def code_of(command: Command) -> dict[str, Path]:
    """The files that a command names, and the Python files below its folder, by their path in it.

    A folder with very many, such as a home, gives those that are named alone.
    """
    if command.trees:
        return {}
    folder = Path(command.folder)
    words = [Path(word) for part in command.words for word in part.split()]  # of ``sh -c "..."`` too
    named = [path for path in words if not path.is_absolute() and ".." not in path.parts and _is_code(folder / path)]
    files = {path.as_posix(): folder / path for path in named}
    below: dict[str, Path] = {}
    for path in files_below(folder):
        if path.suffix != ".py" or not _is_code(path):
            continue
        below[path.relative_to(folder).as_posix()] = path
        if len(below) > MOST:
            return files
    return {**below, **files}


def _is_code(path: Path) -> bool:
    return path.is_file() and path.stat().st_size <= LARGEST


def files_below(top: Path) -> Iterator[Path]:
    """The files below a folder, without those of git, of environments, and of experiments."""
    for folder, folders, names in os.walk(top):
        folders[:] = sorted(name for name in folders if not _is_passed_over(Path(folder, name)))
        yield from (Path(folder, name) for name in sorted(names))


def _is_passed_over(folder: Path) -> bool:
    is_hidden = folder.name in PASSED_OVER or folder.name.startswith(".")
    return is_hidden or any((folder / name).exists() for name in ("pyvenv.cfg", PLAN, STREAM))
