"""Trust in code: what this process may import, and what a file from somebody else may name. No torch.

An import path such as ``my_parts.MLP`` is *custom* if it leads outside this package. Files name custom classes in two
places: configs, and the architecture of a checkpoint. There are two policies:

1. ``fit``, ``check``, ``validate``, ``test``, ``predict`` and ``ablate run`` build what their configs name. They
   **import after printing**: :func:`trust_printed` finds every custom path in a config, wherever the parser would find
   one, and returns the line to print. Whoever trains with a stranger's config has read which code it runs.
2. Everything that reads a checkpoint (``generate``, ``evaluate``, ``export``, ``model.init_from``,
   ``load_from_checkpoint``), and what needs no torch (``estimate``, ``plan``), **refuses** a custom path without
   ``--trust-code``: :func:`refuse_custom`. The option is on the command line alone, where no file can grant it.

Both fill ``TRUSTED``, with what the user types. Nothing else is imported by a path: :func:`trust_and_import` and the
option parser, which gets ``TRUSTED`` and ``OFFERED`` (``cli.parsing``), judge a path by where the object that it
leads to is *defined*. A path through this package to ``subprocess.Popen`` is refused, whatever it begins with.

A module of a trusted path may be in the current folder, which no other import searches: a ``pandas.py`` in a stranger's
folder does not run. From the import of a trusted module on, the folder is the last one on ``sys.path``, since its code
may import others there at any time.

What checkpoints may name otherwise is a closed list at its owner: what a pickle may make (``torch.load`` with
``weights_only``) and the optimizers and schedules that are restored (``checkpoints.recipes``).
"""

import argparse
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import yaml

from lightning_llm.io.config_file import parse_yaml
from lightning_llm.io.untrusted import shown, values_in

OUR_PREFIX = "lightning_llm."
CLASS_PATH, INIT_ARGS = "class_path", "init_args"  # of a class in a config
TRUSTED: set[str] = set()  # custom paths that the user typed, trusts, or was shown
TRUST_CODE = "--trust-code"
# The classes that Lightning and torch have for an option, which short names stand for
ROOMS = ("accelerators", "callbacks", "loggers", "plugins", "profilers", "strategies")
OFFERED = ("lightning_llm", "torch.optim", "lightning.fabric.plugins", *(f"lightning.pytorch.{room}" for room in ROOMS))
MOST_YAML_LEVELS = 3  # texts of YAML inside one another


def path_of(cls: type) -> str:
    """The import path of a class."""
    return f"{cls.__module__}.{cls.__qualname__}"


def is_custom(path: str) -> bool:
    """Whether an import path begins outside this package."""
    return not path.startswith(OUR_PREFIX)


# ---- policy 1: import after printing


def trust_printed(file: object, content: object) -> list[str]:
    """The line to print about what the content of a file imports; none if it imports nothing. From now on, it may."""
    paths = custom_paths(content)
    TRUSTED.update(paths)
    return [f"{file} imports {', '.join(paths)}"] if paths else []


def custom_paths(content: object) -> list[str]:
    """The custom import paths in nested options."""
    return sorted({text for text in texts_in(content) if is_custom(text) and is_import_path(text)})


def texts_in(value: object) -> Iterator[str]:
    """The texts in nested options, and in texts that the parser reads as YAML again; each of them once.

    Raises:
        ValueError: A class is not written as the parser reads it.
    """
    queue, seen = [(value, 0)], dict[Any, object]()  # what was met by its id, which no other value can have meanwhile
    for inner, level in queue:
        key = inner if isinstance(inner, str) else id(inner)
        if key in seen:
            continue
        seen[key] = inner
        if isinstance(inner, str):
            yield inner
            with suppress(yaml.YAMLError, ValueError):
                queue += [(parse_yaml(inner), level + 1)] if level < MOST_YAML_LEVELS else []
        elif isinstance(inner, dict) and not level:
            _check_class(inner)
        queue += [(item, level) for item in values_in(inner)]


def _check_class(options: dict[str, Any]) -> None:
    if not isinstance(options.get("class_path", ""), str):
        raise ValueError(f"class_path must be an import path, got {shown(options['class_path'])}")
    if not isinstance(options.get("init_args"), dict | None):
        where = f" of {options['class_path']}" if "class_path" in options else ""
        raise ValueError(f"init_args{where} must have options by name, got {shown(options['init_args'])}")


def not_found(option: str, path: str) -> ValueError:
    """The error about a path that is none, or whose module is not there; for a file, with the path it stands for."""
    file, is_file, name = path.partition(".py")
    if is_file and name[:1] in ("", ":"):
        module = os.path.relpath(file).lstrip("./").replace("/", ".")
        return ValueError(f"{option} {shown(path)} cannot be imported: give {module}.{name[1:] or 'Class'}")
    problem = "cannot be imported: no module was found by this path; give package.module.Class"
    return ValueError(f"{option} {shown(path)} {problem}")


def is_import_path(text: str) -> bool:
    """Whether a text names something in a module that exists; finding out runs no code of the module."""
    top, *rest = text.split(".")
    try:
        if not rest or not all(map(str.isidentifier, (top, *rest))) or os.path.isfile(text):
            return False
        finders = [finder for finder in sys.meta_path if isinstance(finder, CurrentFolder)]
        return find_spec(top) is not None or any(finder.spec_of(top) is not None for finder in finders)
    except ValueError:  # a module without a specification, such as __main__
        return True


# ---- policy 2: refuse without --trust-code


def add_trust_option(
    parser: argparse.ArgumentParser, text: str = "import and run classes outside lightning_llm that the model names"
) -> None:
    """The option without which no code runs that a checkpoint or a config names."""
    parser.add_argument(TRUST_CODE, action="store_true", help=text)


def refuse_custom(paths: Iterable[str], source: object, *, trust_code: bool) -> None:
    """Refuse a file that names custom code, which nobody has imported yet.

    Args:
        paths: The custom paths in it.
        source: Names the file in errors.
        trust_code: Whether the user trusts it.

    Raises:
        ValueError: It names some, and is not trusted.
    """
    if (paths := dict.fromkeys(paths)) and not trust_code:
        advice = f"nothing was imported. If you trust it, give {TRUST_CODE} (in Python: trust_code=True)"
        raise ValueError(f"{source} names code from outside lightning_llm: {', '.join(paths)}; {advice}")


# ---- importing


def trust_and_import(path: str) -> Any:
    """Import what a path names. The caller trusts it, by one of the policies or as Python code.

    Raises:
        ImportError: There is no such module; or the path goes through this package to what others define.
        AttributeError: The module has no such name.
    """
    module, _, name = path.rpartition(".")
    if is_custom(path):
        TRUSTED.add(path)
    value = getattr(import_module(module), name)
    if not is_custom(path) and is_custom(f"{getattr(value, '__module__', None)}."):
        raise ImportError("it is not defined in lightning_llm")
    return value


def trusted_definitions() -> set[str]:
    """The trusted paths, and where what they lead to is defined, as far as it has been imported by now."""
    definitions = set(TRUSTED)
    for path in TRUSTED:
        top, *names = path.split(".")
        value: Any = sys.modules.get(top)
        for name in names:
            value = getattr(value, name, None)
        while isinstance(value, partial):
            value = value.func
        owner = value if isinstance(getattr(value, "__qualname__", None), str) else type(value)
        if value is not None and isinstance(getattr(owner, "__module__", None), str):
            definitions.add(f"{owner.__module__}.{owner.__qualname__.partition('.<locals>')[0]}")
    return definitions


class CurrentFolder:
    """Finds the modules of ``TRUSTED`` paths that are nowhere else, for Python's import system."""

    def __init__(self) -> None:
        self._folder = os.getcwd()

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find a trusted module in the current folder, see ``importlib.abc.MetaPathFinder``."""
        if path is not None or not any(trusted.startswith(f"{name}.") for trusted in TRUSTED):
            return None
        spec = self.spec_of(name)
        if spec is not None and self._folder not in sys.path:
            sys.path.append(self._folder)
        return spec

    def spec_of(self, name: str) -> ModuleSpec | None:
        """The module of this name in the folder, whether it is trusted or not."""
        return PathFinder.find_spec(name, [self._folder])


def look_in_current_folder() -> None:
    """Let this process find what is trusted in the current folder, after all others: nothing installed is replaced."""
    with suppress(FileNotFoundError):  # it was deleted
        sys.meta_path.append(CurrentFolder())
