"""Names of a package that are loaded when first used (PEP 562), so that importing the package costs no torch."""

import re
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

_IMPORT = re.compile(r"^    from (lightning_llm[\w.]*) import (\w+|\*)(?: as (\w+))?", re.MULTILINE)


def lazy(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Values for a package's ``__getattr__, __dir__, __all__`` in its ``__init__``. Its modules are attributes too.

    The names are those that its block for type checkers imports. With an import of ``*``, they include all public
    functions and classes that the module defines, and the package does not assign ``__all__``.

    Args:
        package: Its ``__name__``.
    """
    spec: Any = find_spec(package)
    imports = _IMPORT.findall(spec.loader.get_source(package))
    home = {alias: (module, name) for module, name, alias in imports if alias}
    whole = [module for module, name, _ in imports if name == "*"]

    def defined() -> dict[str, Any]:
        members = {name: value for module in whole for name, value in vars(import_module(module)).items()}
        return {name: value for name, value in members.items() if getattr(value, "__module__", "") in whole}

    def find(name: str) -> Any:
        if name in home:
            module, own_name = home[name]
            return getattr(import_module(module), own_name)
        if name == "__all__":
            return exported()
        if not name.startswith("_"):
            if name in (members := defined()):
                return members[name]
            if find_spec(f"{package}.{name}"):
                return import_module(f"{package}.{name}")
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    def exported() -> list[str]:
        return sorted([*home, *(name for name in defined() if not name.startswith("_"))])

    return find, exported, sorted(home)
