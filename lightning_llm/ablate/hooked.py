"""Environment of a program that runs with the start-up hook ``hook/sitecustomize.py``, and the record that it leaves.

The hook is in every Python process that the program starts with this environment, unless it is told to ignore
``PYTHONPATH`` (``python -E``, ``-I``) or to import no ``site`` (``-S``). The record misses processes that were killed,
and those that ``multiprocessing`` has forked.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from lightning_llm.ablate.hook.sitecustomize import MODULES, RESEED, ROOTS
from lightning_llm.io.untrusted import MIB, printable, read_bytes

HOOK = Path(__file__).with_name("hook")
SEARCHED = "PYTHONPATH"
LARGEST = 64 * MIB  # of a record: a line has about 100 bytes, and each process writes some hundred of them
_ERROR = "error: "


def environment(
    others: Mapping[str, str], *, reseed: int | None = None, modules: Path | None = None, roots: Sequence[Path] = ()
) -> dict[str, str]:
    """The variables that a program with the hook gets besides others.

    Args:
        others: All that it would get without the hook: its ``PYTHONPATH`` is read.
        reseed: Is added to every seed that the program sets; ``None`` or 0: its numbers are unchanged.
        modules: The record, in a folder that exists; ``None``: there is none.
        roots: Folders; a file that the program imports from below one of them gets into the record.

    Raises:
        ValueError: ``reseed`` is negative, or the path of a folder contains a colon, which separates them.
    """
    if reseed is not None and reseed < 0:
        raise ValueError(f"reseed is {reseed}, expected a number from 0: give a seed that is not negative")
    folders = [str(root.resolve()) for root in roots]
    for folder in (*folders, str(HOOK)):
        if os.pathsep in folder:
            raise ValueError(f"{folder} contains {os.pathsep!r}, which separates folders in {SEARCHED}: rename it")
    searched = [folder for folder in others.get(SEARCHED, "").split(os.pathsep) if folder != str(HOOK)]
    return {
        SEARCHED: os.pathsep.join([str(HOOK), *(searched if others.get(SEARCHED) else ())]),
        RESEED: str(reseed or 0),
        MODULES: str(modules.resolve()) if modules else "",
        ROOTS: os.pathsep.join(folders),
    }


def modules_in(record: Path) -> set[Path]:
    """The files that the program has imported, without links; none if there is no record."""
    return {Path(line) for line in _lines(record) if not line.startswith(_ERROR)}


def errors_in(record: Path) -> list[str]:
    """The errors of the hook, one line each: the program ran on, but perhaps not as the hook should have let it."""
    lines = [line for line in _lines(record) if line.startswith(_ERROR)]
    return [printable(line.removeprefix(_ERROR)) for line in dict.fromkeys(lines)]


def _lines(record: Path) -> list[str]:
    try:
        content = read_bytes(record, LARGEST)
    except FileNotFoundError:
        return []
    return [os.fsdecode(line) for line in content.split(b"\n") if line]
