"""Names of a package that are loaded when first used (PEP 562), so that importing the package costs no torch."""

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any


def lazy(package: str, **modules: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """What a package's ``__init__`` assigns to ``__getattr__, __dir__, __all__``. Its modules are attributes too.

    Args:
        package: Its ``__name__``.
        modules: Names to export, by module: its path below ``lightning_llm``, with ``__`` for each dot. A name after
            ``*`` is a table of the module, whose keys are exported. Such a package does not assign ``__all__``, which
            is then found like other names.
    """
    home = {name: module.replace("__", ".") for module, names in modules.items() for name in names.split()}
    tables = [name for name in home if name.startswith("*")]
    fixed = sorted(home.keys() - set(tables))

    def value(module: str, name: str) -> Any:
        return getattr(import_module(f"lightning_llm.{module}"), name)

    def members(table: str) -> dict[str, Any]:
        found: dict[str, Any] = value(home[table], table[1:])
        return found

    def names() -> list[str]:
        return sorted([*fixed, *(name for table in tables for name in members(table))])

    def find(name: str) -> Any:
        if name in home:
            return value(home[name], name)
        if name == "__all__":
            return names()
        for table in tables:
            if name in members(table):
                return members(table)[name]
        if not name.startswith("_") and find_spec(f"{package}.{name}"):
            return import_module(f"{package}.{name}")
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return find, names, fixed
