"""The code that a run executes: this package, and the modules of the user's own classes. No torch."""

import hashlib
import os
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lightning_llm.io.trust import texts_in

PACKAGE = Path(__file__).parents[1]
INSTALLED = {"site-packages", "dist-packages"}  # where pip and Debian install, in any environment


def package_digest() -> str:
    """16 hex digits of the SHA-256 of the package's source, with the names of its files."""
    digest = hashlib.sha256()
    for name, path in code_in(PACKAGE).items():
        digest.update(name.encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def commit_of_package() -> str | None:
    """The git commit of the package, with a mark if files were changed since; ``None`` if it is not in a clone."""
    if not (PACKAGE.parent / ".git").exists():
        return None
    command = ["git", "-C", str(PACKAGE), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        process = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return process.stdout.strip() or None


def code_of(configs: Mapping[str, Any]) -> dict[str, Path]:
    """The files that runs of these options use, by name: this package, and the user's own modules.

    Modules in the standard library or installed for this interpreter are no part of it.
    """
    snapshot = {f"{PACKAGE.name}/{name}": path for name, path in code_in(PACKAGE).items()}
    texts = (text for options in configs.values() for text in texts_in(options))
    paths = {text for text in texts if "." in text and all(map(str.isidentifier, text.split(".")))}
    for top, rest in sorted({tuple(path.split(".")[:2]) for path in paths}):
        with suppress(ValueError, ImportError):
            spec = find_spec(top)
            if top == PACKAGE.name or spec is None or spec.origin in ("built-in", "frozen"):
                continue
            folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
            if spec.origin is None:  # any folder is a package, if it has no module of that name it is none of a class
                folders = [folder for folder in folders if (folder / rest).with_suffix(".py").is_file()]
            locations = folders or [Path(spec.origin or "")]
            if any(_is_installed(location) for location in locations):
                continue
            for folder in folders:
                snapshot |= {f"{top}/{name}": path for name, path in code_in(folder).items()}
            if not folders and locations[0].suffix == ".py":
                snapshot[locations[0].name] = locations[0]
    is_all_ours = all(name.startswith(f"{PACKAGE.name}/") for name in snapshot)
    return snapshot if is_all_ours else {**_imported_modules(), **snapshot}


def _imported_modules() -> dict[str, Path]:
    """Modules of the current folder that are imported by now: the user's classes may need them."""
    folder = Path.cwd()
    files = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
    paths = {Path(file) for file in files if file and file.endswith(".py")}
    user_files = (path for path in paths if path.is_relative_to(folder) and not _is_installed(path))
    return {path.relative_to(folder).as_posix(): path for path in user_files if not path.is_relative_to(PACKAGE)}


def code_in(folder: Path) -> dict[str, Path]:
    """The Python files below a folder, by their path in it."""
    files = (Path(root, name) for root, _, names in os.walk(folder) for name in names if name.endswith(".py"))
    return {path.relative_to(folder).as_posix(): path for path in sorted(files)}


def _is_installed(location: Path) -> bool:
    if INSTALLED & set(location.resolve().parts):  # perhaps of the interpreter that a virtual environment is made from
        return True
    paths = {sysconfig.get_path(name) for name in ("purelib", "platlib", "stdlib", "platstdlib")}
    return any(location.resolve().is_relative_to(Path(path).resolve()) for path in paths)
