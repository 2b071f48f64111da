"""Names of a package that are loaded when first used (PEP 562), so that importing the package costs no torch."""

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any


def lazy(package: str, **modules: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """What a package's ``__init__`` assigns to ``__getattr__, __dir__, __all__``. Its modules are attributes too.

    Args:
        package: Its ``__name__``.
        modules: Names to export, by module: its path below ``lightning_llm``, with ``__`` for each dot.
    """
    home = {name: module.replace("__", ".") for module, names in modules.items() for name in names.split()}

    def find(name: str) -> Any:
        if name in home:
            return getattr(import_module(f"lightning_llm.{home[name]}"), name)
        if not name.startswith("_") and find_spec(f"{package}.{name}"):
            return import_module(f"{package}.{name}")
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return find, lambda: sorted(home), sorted(home)
