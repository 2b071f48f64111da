"""The code of a command without trees: what must not change while an experiment runs. No torch."""

import os
from collections.abc import Iterator
from pathlib import Path

from lightning_llm.ablate.command.settings import Command

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
    for path in _python_files(folder):
        below[path.relative_to(folder).as_posix()] = path
        if len(below) > MOST:
            return files
    return {**below, **files}


def _is_code(path: Path) -> bool:
    return path.is_file() and path.stat().st_size <= LARGEST


def _python_files(top: Path) -> Iterator[Path]:
    for folder, folders, names in os.walk(top):
        hidden = [name for name in folders if name in PASSED_OVER or name.startswith(".")]
        others = [name for name in folders if Path(folder, name, "pyvenv.cfg").exists()]
        experiments = [name for name in folders if Path(folder, name, "plan.json").exists()]
        streams = [name for name in folders if Path(folder, name, "stream.json").exists()]
        folders[:] = sorted({*folders} - {*hidden, *others, *experiments, *streams})
        for name in sorted(names):
            if name.endswith(".py") and _is_code(path := Path(folder, name)):
                yield path
