"""Holds the architecture: who may import whom, where torch and lightning may not be, what a file may be called.

Everything is read from the source with ``ast``; nothing is imported. Each rule is a function from a package's folder to
a list of faults, so that it can be shown to fail on a small tree that breaks it.
"""

import ast
import dataclasses
import functools
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "lightning_llm"
BENCHMARKS = PACKAGE.parent / "benchmarks"  # may import all of the package, which imports nothing of it

# From the ground up. A module imports from layers below its own, and from its own layer only inside its folder. It
# belongs to its longest entry: a folder's bare name stands for every file of the folder that has no entry of its own.
LAYERS = (
    ("lazy", "io", "ops.sizes", "ops.traced"),
    (
        *("model.config", "model.layers", "model.parts", "model.references", "model.mup", "model.rope_scaling"),
        *("optim.catalog", "optim.schedules", "accounting.hardware", "measure", "statistics"),
    ),
    ("io.console", "io.progress"),
    (
        *(f"accounting.{name}" for name in ("counts", "parts", "step_settings", "sizing")),
        "ops",
        "data",
    ),  # data: corpora, tokenizers, token_store, order
    ("data.prepare", "data.find_store", "model"),  # model: norm, kv_cache, weights, position, context, build
    ("model.attention", "model.mlp", "model.experts", "model.block", "model.loss"),
    (
        "model.transformer",
        "model.attentions",
        "model.initial_scales",
        "model.token_order",
        "optim",
        "checkpoints.archives",
    ),
    ("generation", "interop", "data.datamodule", "accounting"),
    ("checkpoints",),
    ("runs",),
    ("training",),
    ("same", "ablate"),
    ("cli",),
    ("experiment",),
    ("__main__",),
)
LIGHTNING = ("lightning", "pytorch_lightning", "lightning_fabric")
TORCH = ("torch", "torchmetrics", "transformers", "triton", *LIGHTNING)  # whoever imports one of these imports torch
# Neither themselves, wherever the import stands, nor by what they import when they are imported.
NEVER = (
    *((room, LIGHTNING) for room in ("model", "ops", "optim", "generation", "interop", "accounting", "measure")),
    *(
        (room, TORCH)
        for room in (
            *(
                "model.config",
                "model.layers",
                "model.parts",
                "model.references",
                "model.mup",
                "model.rope_scaling",
                "optim.catalog",
                "optim.schedules",
                "ops.sizes",
                "ops.traced",
            ),
            *(f"accounting.{name}" for name in ("counts", "hardware", "parts", "step_settings", "sizing")),
            "statistics",
        )
    ),
)
LAZY_NAMES = "lightning_llm.lazy"  # which imports none of the modules that it names
OUTSIDE = ("benchmarks", "tests")
GRAB_BAGS = ("utils", "common", "helpers")


@dataclasses.dataclass(frozen=True)
class Import:
    """One imported module, by absolute name, and whether the import happens when the importing file is imported."""

    target: str
    line: int
    is_eager: bool


class Tree:
    """The modules of a package and their imports. Names inside the package go without the package's own name."""

    def __init__(self, folder: Path) -> None:
        self.root = folder.name
        self.paths = {_module_name(path.relative_to(folder)): path for path in sorted(folder.rglob("*.py"))}
        self.packages = {name for name, path in self.paths.items() if path.name == "__init__.py"}
        sources = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in self.paths.items()}
        self._reexported = {
            (package, alias.asname or alias.name): self._absolute(node, package)
            for package in self.packages
            for node in ast.walk(sources[package])
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        }
        # dict.fromkeys: one line may import several names of one module
        self.imports = {name: list(dict.fromkeys(self._imports(name, source))) for name, source in sources.items()}

    def inside(self, target: str) -> str | None:
        """The name of a module without the package's own, or None if it is not of this package."""
        root, _, rest = target.partition(".")
        return rest if root == self.root else None

    def is_lazy(self, name: str) -> bool:
        return name in self.packages

    def _imports(self, name: str, source: ast.Module) -> Iterator[Import]:
        for node, is_eager in _walk(source, is_eager=True):
            if isinstance(node, ast.Import):
                yield from (Import(alias.name, node.lineno, is_eager) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                base = self._absolute(node, name)
                yield from (Import(self._resolve(base, alias.name), node.lineno, is_eager) for alias in node.names)
            elif isinstance(node, ast.Call) and (name_in_string := _imported_by_string(node)):
                yield Import(name_in_string, node.lineno, is_eager)

    def _absolute(self, node: ast.ImportFrom, name: str) -> str:
        if not node.level:
            return node.module or ""
        parts = [self.root, *name.split(".")] if name else [self.root]
        keep = len(parts) - node.level + (1 if name in self.packages else 0)
        return ".".join([*parts[:keep], *([node.module] if node.module else [])])

    def _resolve(self, base: str, name: str) -> str:
        """``from base import name``: a module, or what a package's ``__init__`` says the name comes from, or base."""
        inside = self.inside(base)
        if inside is None:
            return base
        if f"{inside}.{name}".lstrip(".") in self.paths or (inside, name) == ("", "__version__"):
            return f"{base}.{name}"
        return self._reexported.get((inside, name), base)


tree_of = functools.lru_cache(maxsize=4)(Tree)  # six rules read one package, which no test changes


def _module_name(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _walk(node: ast.AST, *, is_eager: bool) -> Iterator[tuple[ast.AST, bool]]:
    for child in ast.iter_child_nodes(node):
        runs = is_eager and not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        if isinstance(node, ast.If) and _is_type_checking(node.test) and child in node.body:
            runs = False
        yield child, runs
        yield from _walk(child, is_eager=runs)


def _is_type_checking(test: ast.expr) -> bool:
    return "TYPE_CHECKING" in (getattr(test, "id", None), getattr(test, "attr", None))


def _imported_by_string(node: ast.Call) -> str | None:
    called = getattr(node.func, "id", None) or getattr(node.func, "attr", None)
    if called in ("import_module", "__import__") and node.args and isinstance(node.args[0], ast.Constant):
        return str(node.args[0].value)
    return None


def _belongs(name: str, room: str) -> bool:
    return name == room or name.startswith(f"{room}.")


def _layer(name: str) -> int | None:
    entries = [(len(room), level) for level, rooms in enumerate(LAYERS) for room in rooms if _belongs(name, room)]
    return max(entries)[1] if entries else None


def _layer_of_target(tree: Tree, target: str) -> int | None:
    """A package hands out all that is in it, so that importing it whole is importing its topmost file."""
    if target not in tree.packages:
        return _layer(target)
    levels = [level for level, rooms in enumerate(LAYERS) for room in rooms if _belongs(room, target)]
    return max(levels, default=_layer(target))


def layer_faults(folder: Path) -> list[str]:
    tree = tree_of(folder)
    faults = [f"{name} has no place in LAYERS" for name in tree.paths if name and _layer(name) is None]
    for name, imports in tree.imports.items():
        here = _layer(name)
        if tree.is_lazy(name) or here is None:
            continue
        for found in imports:
            target = tree.inside(found.target)
            if target is None or target == name:
                continue
            if target in ("", "__version__"):  # of the package's own names only the version is no module's
                if not target:
                    faults.append(f"{name}:{found.line} imports the package itself: name the module")
                continue
            there = _layer_of_target(tree, target)
            if there is not None and there > here:
                faults.append(f"{name}:{found.line} imports {target}, which lies above it")
            elif there == here and name.split(".")[0] != target.split(".")[0]:
                faults.append(f"{name}:{found.line} imports {target}, another room of its layer")
    return faults


def cycle_faults(folder: Path) -> list[str]:
    tree = tree_of(folder)
    edges = {
        name: sorted({target for found in imports if (target := tree.inside(found.target)) in tree.paths})
        for name, imports in tree.imports.items()
        if not tree.is_lazy(name)
    }
    faults: list[str] = []
    done: set[str] = set()

    def visit(name: str, path: list[str]) -> None:
        if name in path:
            cycle = path[path.index(name) :]
            first = cycle.index(min(cycle))
            faults.append("cycle: " + " -> ".join([*cycle[first:], *cycle[: first + 1]]))
        elif name not in done:
            for target in edges.get(name, ()):
                visit(target, [*path, name])
            done.add(name)

    for name in edges:
        visit(name, [])
    return faults


def _loads(tree: Tree, name: str) -> dict[str, list[str]]:
    """Every module from outside that importing ``name`` imports, with the chain of modules that leads to it."""
    found: dict[str, list[str]] = {}
    seen: set[str] = set()
    waiting = [(name, [name])]
    while waiting:
        module, chain = waiting.pop()
        if module in seen or module not in tree.paths:
            continue
        seen.add(module)
        parents = [".".join(module.split(".")[:depth]) for depth in range(len(module.split(".")))]
        waiting += [(parent, chain) for parent in parents]
        for item in tree.imports[module]:
            if item.is_eager:
                target = tree.inside(item.target)
                if target is None:
                    found.setdefault(item.target, chain)
                else:
                    waiting.append((target, [*chain, target]))
    return found


def never_faults(folder: Path) -> list[str]:
    tree = tree_of(folder)
    faults = []
    for room, forbidden in NEVER:
        for name in (name for name in tree.paths if _belongs(name, room)):
            faults += [
                f"{name}:{item.line} imports {item.target}"
                for item in tree.imports[name]
                if item.target.split(".")[0] in forbidden
            ]
            faults += [
                f"{name} loads {target} by way of {' -> '.join(chain)}"
                for target, chain in _loads(tree, name).items()
                if target.split(".")[0] in forbidden and len(chain) > 1
            ]
    return faults


def start_faults(folder: Path) -> list[str]:
    """``__init__`` files name things and load nothing; the command line's front door costs no torch."""
    tree = tree_of(folder)
    faults = [
        f"{name or tree.root}/__init__.py:{item.line} imports {item.target}: load it when it is first used"
        for name in sorted(tree.packages)
        for item in tree.imports[name]
        if item.is_eager and item.target.split(".")[0] not in sys.stdlib_module_names and item.target != LAZY_NAMES
    ]
    if "__main__" in tree.paths:
        faults += [
            f"__main__ loads {target} by way of {' -> '.join(chain)}"
            for target, chain in _loads(tree, "__main__").items()
            if target.split(".")[0] in TORCH
        ]
    return faults


def outside_faults(folder: Path) -> list[str]:
    """The package is installed without what stands beside it in a clone."""
    return [
        f"{name}:{item.line} imports {item.target}, which is not installed with the package"
        for name, imports in tree_of(folder).imports.items()
        for item in imports
        if item.target.split(".")[0] in OUTSIDE
    ]


def file_faults(folder: Path) -> list[str]:
    faults = []
    for path in sorted(folder.rglob("*.py")):
        place = path.relative_to(folder)
        if any(part in GRAB_BAGS for part in place.with_suffix("").parts):
            faults.append(f"{place} is a grab-bag by its name")
    return faults


RULES = (layer_faults, cycle_faults, never_faults, start_faults, outside_faults, file_faults)


@pytest.mark.parametrize("rule", RULES)
def test_package_keeps_the_rule(rule):
    assert len(list(PACKAGE.rglob("*.py"))) > 10  # the path is right
    assert not rule(PACKAGE), "\n".join(rule(PACKAGE))


@pytest.mark.parametrize("rule", [cycle_faults, file_faults])
def test_benchmarks_keep_the_rule(rule):
    assert len(list(BENCHMARKS.glob("*.py"))) > 10
    assert not rule(BENCHMARKS), "\n".join(rule(BENCHMARKS))


def _plant(folder: Path, files: dict[str, str]) -> Path:
    """A small package ``house``; every folder gets an ``__init__.py``."""
    root = folder / "house"
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    for inside in [root, *(path for path in root.rglob("*") if path.is_dir())]:
        (inside / "__init__.py").touch()
    return root


LAZY = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from {0} import {1}\n"
SOUND = {
    "__init__.py": LAZY.format("house.training.module", "LanguageModel"),
    "ops/__init__.py": LAZY.format("house.ops.swiglu", "swiglu"),
    "ops/swiglu.py": "import torch\nfrom house.ops import kernels\n",
    "ops/kernels.py": "import torch\n",
    "model/config.py": "import math\n",
    "model/norm.py": "import torch\nfrom house.model.config import ModelConfig\n",
    "model/mlp.py": "from house.ops import swiglu\nfrom .norm import Norm\n",
    "model/transformer.py": "from house.model import mlp, norm\n",
    "accounting/memory.py": "from house.accounting.hardware import peak\nfrom house.model.config import ModelConfig\n",
    "accounting/hardware.py": "",
    "training/module.py": "import lightning\nfrom house.model.transformer import Transformer\n",
    "training/callbacks/memory_profiler.py": "from house.training.module import LanguageModel\n",
    "__main__.py": "import sys\ndef main():\n    from house import LanguageModel, __version__\n",
}


def test_sound_tree_has_no_faults(tmp_path):
    house = _plant(tmp_path, SOUND)
    assert [fault for rule in RULES for fault in rule(house)] == []


def _faults(tmp_path: Path, rule: Iterable, files: dict[str, str]) -> list[str]:
    return rule(_plant(tmp_path, {**SOUND, **files}))


@pytest.mark.parametrize(
    ("rule", "files", "expected"),
    [
        # upwards: inside a function, for type checkers only, relatively by a public name, by a string
        (layer_faults, {"ops/a.py": "def f():\n    import house.cli"}, "ops.a:2 imports cli, which lies above it"),
        (layer_faults, {"ops/a.py": LAZY.format("house.same.x", "Y")}, "ops.a:3 imports same.x, which lies above it"),
        (layer_faults, {"ops/a.py": "from ..model.mlp import M"}, "ops.a:1 imports model.mlp, which lies above it"),
        (
            layer_faults,
            {"ops/a.py": "import importlib\nimportlib.import_module('house.model')"},
            "ops.a:2 imports model, which lies above it",
        ),
        (
            layer_faults,
            {"accounting/counts.py": "from house.ops import swiglu"},
            "accounting.counts:1 imports ops.swiglu, another room of its layer",
        ),
        (
            cycle_faults,
            {"ops/kernels.py": "def f():\n    from house.ops.swiglu import g"},
            "cycle: ops.kernels -> ops.swiglu -> ops.kernels",
        ),
        (
            never_faults,
            {"interop/hf.py": "from house import LanguageModel"},
            "interop.hf loads lightning by way of interop.hf -> training.module",
        ),
        (
            start_faults,
            {"__main__.py": "from house.model.norm import f"},
            "__main__ loads torch by way of __main__ -> model.norm",
        ),
        (
            outside_faults,
            {"ops/a.py": "def f():\n    from benchmarks.faults import g"},
            "ops.a:2 imports benchmarks.faults, which is not installed with the package",
        ),
        (file_faults, {"data/utils/a.py": ""}, "data/utils/a.py is a grab-bag by its name"),
    ],
)
def test_broken_tree_is_found(tmp_path, rule, files, expected):
    assert expected in _faults(tmp_path, rule, files)


def test_longest_entry_decides_the_layer():
    assert _layer("model.config") == _layer("io.untrusted") + 1 == 1
    assert _layer("model.configuration") == _layer("model.norm") == _layer("model") < _layer("model.mlp")
    assert _layer("data.order") == _layer("data.new") < _layer("data.prepare") < _layer("data.datamodule")
    assert _layer("accounting.hardware") < _layer("accounting.memory")
    assert _layer("modelling") is None


def test_the_diagram_of_the_guide_shows_the_layers():
    guide = (PACKAGE.parent / "CONTRIBUTING.md").read_text(encoding="utf-8")
    diagram = guide.split("A file imports only from folders below its own.")[1].split("```")[1]
    rows = [line[:62].split() for line in diagram.splitlines()[1:]]  # the rest of a line says what is in these folders
    drawn = " ".join(" ".join(row) for row in rows).split("│")
    assert [set(layer.split()) for layer in drawn] == [set(layer) for layer in reversed(LAYERS)]
