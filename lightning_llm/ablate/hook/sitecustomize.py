"""Start-up hook of programs that an experiment compares: moves their seeds, and records which files they import.

Python imports this module when it starts, as its folder is the first one on ``PYTHONPATH``. It is executed by the
program's own Python, from 3.9 on, and imports nothing that the program could have a module of the same name for.
``ablate/hooked.py`` sets its variables:

- ``LIGHTNING_LLM_RESEED``: this number is added to every seed that the program sets; 0: nothing is changed.
- ``LIGHTNING_LLM_MODULES``: the record, a file that is appended to. At exit it gets one line for each imported file.
- ``LIGHTNING_LLM_ROOTS``: only files below these folders are recorded.

An error of the hook never reaches the program. It is a line of the record.

**Seeds.** Each library has few methods that all its other functions call to set a seed. These methods are replaced, so
no seed is moved twice:

- ``random.Random.seed``. A text or bytes get the number appended, and the hash of a float is moved.
- ``MT19937._legacy_seeding`` of NumPy, for ``seed`` and ``RandomState``. Seeds have 32 bits: after the largest one
  comes 0. A sequence gets the number appended.
- ``SeedSequence.generate_state`` of NumPy, for ``default_rng``, ``PCG64``, and others. The attribute ``entropy`` is
  still the program's.
- ``torch.Generator.manual_seed``, for all devices. After the largest seed of 64 bits comes 0. A generator that the
  program makes without a seed has the same one in each run.

``None`` is random as before. A seed that PyTorch's data loaders derive from a moved one is left alone. A seed that the
program itself derives from one is moved again; it still differs for each number that is added.
"""

from __future__ import annotations

import atexit
import os
import sys

TYPE_CHECKING = False  # importing typing would take 5 ms
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType
    from typing import Any

RESEED = "LIGHTNING_LLM_RESEED"
MODULES = "LIGHTNING_LLM_MODULES"
ROOTS = "LIGHTNING_LLM_ROOTS"
_HERE = os.path.dirname(__file__)
_RECORD = os.environ.get(MODULES, "")
_HASHES_ANY = sys.version_info < (3, 11)  # random.seed, whatever it gets


def _write(lines: list[str]) -> None:
    """Append to the record, in one piece: other processes of the program may do so too."""
    if _RECORD and lines:
        record = os.open(_RECORD, os.O_WRONLY | os.O_APPEND | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o666)
        try:
            os.write(record, os.fsencode("".join(f"{line}\n" for line in lines)))
        finally:
            os.close(record)


def _write_error(place: str, error: object) -> None:
    try:  # noqa: SIM105 - contextlib may be a module of the program
        _write([f"error: {place}: {' '.join(f'{type(error).__name__}: {error}'.split())}"])
    except Exception:
        pass


# ---- imported files


def _record_modules(roots: list[str]) -> None:
    folders = tuple(os.path.join(os.path.realpath(root), "") for root in roots)
    files = set()
    for module in list(sys.modules.values()):
        try:
            names = vars(module)  # of a lazy module, getattr may import something
        except TypeError:  # not a module, but something that was put in its place
            continue
        file = names.get("__file__")
        if file is None and names.get("__name__") == "__main__":  # a script: at exit its __file__ is gone
            file = getattr(names.get("__loader__"), "path", None)
        if isinstance(file, str) and os.path.dirname(file) != _HERE:
            path = os.path.realpath(file)
            if path.startswith(folders):
                files.add(path)
    _write(sorted(files))


def _at_exit(roots: list[str], waits: bool) -> None:
    try:
        _record_modules(roots)
        for name in _waiting if waits else ():
            if hasattr(sys.modules.get(name), _waiting[name][1]):
                _write_error(name, ImportError("another import hook came first, and no seeds were moved"))
    except Exception as error:
        _write_error("exit", error)


# ---- seeds


def _is_derived() -> bool:
    """Whether a data loader of PyTorch sets the seed; functions of ``random`` and ``torch`` between are passed by."""
    frame: Any = sys._getframe(3)
    while frame is not None:
        name = frame.f_globals.get("__name__") or ""
        if name.startswith("torch.utils.data."):
            return bool(name != "torch.utils.data.distributed")  # whose seed is an argument
        if name != "random" and not name.startswith("torch."):
            return False
        frame = frame.f_back
    return False


def _moved(move: Callable[[Any], Any], seed: Any) -> Any:
    try:
        return seed if seed is None or _is_derived() else move(seed)
    except Exception as error:
        _write_error("seed", error)
        return seed


def _hook_random(random: ModuleType, number: int) -> None:
    original = random.Random.seed

    def move(seed: Any) -> Any:
        if isinstance(seed, int):
            return seed + number
        if isinstance(seed, str):
            return f"{seed} + {number}"
        if isinstance(seed, (bytes, bytearray)):
            return bytes(seed) + b" + %d" % number
        if isinstance(seed, float) or _HASHES_ANY:
            return hash(seed) + number
        return seed  # an error of the program

    def seed(self: Any, a: Any = None, version: int = 2) -> None:
        original(self, _moved(move, a), version)

    random.Random.seed = seed
    random.seed = random.seed.__self__.seed  # type: ignore[attr-defined]  # the original was bound to the shared object


def _hook_numpy(random: ModuleType, number: int) -> None:
    def move(seed: Any) -> Any:
        if hasattr(seed, "squeeze"):  # as NumPy does it
            seed = seed.squeeze()
        try:
            index = seed.__index__()
        except (AttributeError, TypeError):
            return [*seed, number % 2**32]
        return (index + number) % 2**32 if 0 <= index < 2**32 else seed

    def move_entropy(entropy: Any) -> Any:
        try:
            return entropy.__index__() + number
        except (AttributeError, TypeError):
            return [*entropy, number]

    def legacy_seeding(original: Any) -> Any:
        def _legacy_seeding(self: Any, seed: Any) -> Any:
            return original(self, _moved(move, seed))

        return _legacy_seeding

    def state(original: Any) -> Any:
        def generate_state(self: Any, *args: Any, **options: Any) -> Any:
            entropy = _moved(move_entropy, self.entropy)
            other = random.SeedSequence(entropy, spawn_key=self.spawn_key, pool_size=self.pool_size)
            return original(other, *args, **options)

        return generate_state

    _replace(random.MT19937, "_legacy_seeding", legacy_seeding)
    _replace(random.SeedSequence, "generate_state", state)


def _hook_torch(torch: ModuleType, number: int) -> None:
    def move(seed: Any) -> Any:
        index = seed.__index__()
        moved = index + number
        return seed if not -(2**63) <= index < 2**64 else moved if moved < 2**64 else moved - 2**64

    def manual_seed(original: Any) -> Any:
        def manual_seed(self: Any, seed: Any, /) -> Any:
            return original(self, _moved(move, seed))

        return manual_seed

    _replace(torch.Generator, "manual_seed", manual_seed)


def _replace(cls: type, name: str, make: Callable[[Any], Any]) -> None:
    """Replace a method of a class that is written in C: its attributes cannot be set, but its dict can be changed."""
    import ctypes
    import gc

    (attributes,) = gc.get_referents(vars(cls))
    method = make(attributes[name])
    attributes[name] = method
    ctypes.pythonapi.PyType_Modified(ctypes.py_object(cls))  # or Python would use the method that it has cached
    if getattr(cls, name) is not method:
        raise RuntimeError(f"{cls.__name__}.{name} cannot be replaced")


# By module: what changes it, and an attribute that a module of the program with the same name would lack.
_waiting = {
    "random": (_hook_random, "SystemRandom"),
    "numpy.random": (_hook_numpy, "SeedSequence"),
    "torch": (_hook_torch, "Generator"),
}


class _Finder:
    """Finds no module, but changes those that are waited for once they have been imported. Then it is removed.

    Args:
        number: What is added to seeds.
    """

    def __init__(self, number: int) -> None:
        self.number = number

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name not in _waiting:
            return None
        for finder in sys.meta_path:
            find_spec = None if finder is self else getattr(finder, "find_spec", None)
            spec = find_spec and find_spec(name, path, target)
            if spec is not None:
                try:
                    self._follow(spec.loader, name)
                except Exception as error:
                    _write_error(name, error)
                return spec
        return None

    def _follow(self, loader: Any, name: str) -> None:
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            if module.__name__ == name:  # a loader of a ZIP file has several modules
                vars(loader).pop("exec_module", None)
                self.change(module, name)

        loader.exec_module = exec_module

    def change(self, module: ModuleType, name: str) -> None:
        change, attribute = _waiting.pop(name, (None, ""))
        try:
            if not _waiting:
                sys.meta_path.remove(self)
            if change is not None and hasattr(module, attribute):
                change(module, self.number)
        except Exception as error:
            _write_error(name, error)


# ---- start


def _start() -> None:
    roots = os.environ.get(ROOTS, "")
    text = os.environ.get(RESEED, "") or "0"
    is_number = text.isascii() and text.isdecimal()
    is_moving = is_number and int(text) > 0
    if is_moving:
        finder = _Finder(int(text))
        sys.meta_path.insert(0, finder)
        for name in list(_waiting):
            if name in sys.modules:
                finder.change(sys.modules[name], name)
    if _RECORD:
        atexit.register(_at_exit, roots.split(os.pathsep) if roots else [], is_moving)
    if not is_number:
        raise ValueError(f"{RESEED}={text}, expected a whole number from 0")


def _chain() -> None:
    """Import the module of this name that Python would import without the hook."""
    sys.path[:] = [folder for folder in sys.path if folder != _HERE]
    this = sys.modules.pop(__name__)
    try:
        __import__(__name__)
    except ImportError as error:
        if error.name != __name__:
            raise
        sys.modules[__name__] = this


if __name__ == "sitecustomize":
    try:
        _start()
    except Exception as error:
        _write_error("start", error)
    _chain()
