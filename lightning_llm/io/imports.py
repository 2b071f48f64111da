"""Imports by a path such as ``my_parts.MLP``: only what was named, which alone may be in the current folder. No torch.

``NAMED`` has the paths outside this package that the user typed, trusts, or was shown. A module of such a path may be
in the current folder. From its import on, the folder is the last one on ``sys.path``: its code may import others there
at any time. No other import looks there: a ``pandas.py`` in a stranger's folder does not run.
"""

import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from types import ModuleType
from typing import Any

PACKAGE = "lightning_llm."
NAMED: set[str] = set()


class CurrentFolder:
    """Finds the modules of ``NAMED`` paths that are nowhere else, for Python's import system."""

    def __init__(self) -> None:
        self._folder = os.getcwd()

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """As of ``importlib.abc.MetaPathFinder``."""
        if path is not None or not any(each.startswith(f"{name}.") for each in NAMED):
            return None
        found = self.offers(name)
        if found is not None and self._folder not in sys.path:
            sys.path.append(self._folder)
        return found

    def offers(self, name: str) -> ModuleSpec | None:
        """The module of this name in the folder, whether it was named or not."""
        return PathFinder.find_spec(name, [self._folder])


def look_in_current_folder() -> None:
    """Let this process find what is named in the current folder, after all others: nothing installed is replaced."""
    with suppress(FileNotFoundError):  # it was deleted
        sys.meta_path.append(CurrentFolder())


def is_foreign(path: str) -> bool:
    """Whether an import path is outside this package."""
    return not path.startswith(PACKAGE)


def is_import_path(text: str) -> bool:
    """Whether a text names something in a module that exists; finding out runs no code of the module."""
    top, *rest = text.split(".")
    try:
        if not rest or not all(map(str.isidentifier, (top, *rest))) or os.path.isfile(text):
            return False
        folders = [each for each in sys.meta_path if isinstance(each, CurrentFolder)]
        return find_spec(top) is not None or any(each.offers(top) is not None for each in folders)
    except ValueError:  # a module without a specification, such as __main__
        return True


def imported(path: str) -> Any:
    """Import what a path names, which is trusted.

    Raises:
        ImportError: There is no such module; or the path goes through this package to what others define.
        AttributeError: The module has no such name.
    """
    module, _, name = path.rpartition(".")
    if is_foreign(path):
        NAMED.add(path)
    found = getattr(import_module(module), name)
    if not is_foreign(path) and is_foreign(f"{getattr(found, '__module__', None)}."):
        raise ImportError("it is not defined in lightning_llm")
    return found


def definitions() -> set[str]:
    """Where what ``NAMED`` paths lead to is defined, as far as they have been imported by now."""
    found = set()
    for path in NAMED:
        top, *names = path.split(".")
        value: Any = sys.modules.get(top)
        for name in names:
            value = getattr(value, name, None)
        while isinstance(value, partial):
            value = value.func
        owner = value if isinstance(getattr(value, "__qualname__", None), str) else type(value)
        if value is not None and isinstance(getattr(owner, "__module__", None), str):
            found.add(f"{owner.__module__}.{owner.__qualname__.partition('.<locals>')[0]}")
    return found
