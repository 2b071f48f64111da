"""Two revisions of a repository as the variants of an experiment: looked up, compared, and stored. Needs git."""

import itertools
import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from msgspec.structs import replace

from lightning_llm.ablate.command.spec import Command, Tree
from lightning_llm.ablate.names import BASELINE
from lightning_llm.ablate.plan import DIFFS
from lightning_llm.ablate.trees.folders import Folders
from lightning_llm.ablate.trees.problems import problems
from lightning_llm.ablate.trees.repository import Repository
from lightning_llm.ablate.trees.store import Trees
from lightning_llm.io.atomic import atomic_file, remove_path, write_text
from lightning_llm.io.untrusted import open_regular

LOOKUP_S = 30.0
# Where the modules of editable installs are looked for: paths of .pth files, and the finders of setuptools
_LOOKUP = """
import json, sys
found = [path for path in sys.path if path]
for finder in sys.meta_path:
    mapping = getattr(sys.modules.get(getattr(finder, "__module__", "")), "MAPPING", None)
    found += [path.rpartition("/")[0] for path in mapping.values()] if isinstance(mapping, dict) else []
try:
    from importlib.metadata import version
    torch = version("torch")
except Exception:
    torch = "none"
print(json.dumps([found, f"Python {sys.version.split()[0]}, torch {torch}"]))
"""


def resolved(command: Command, out: Path, excluded: Sequence[Path]) -> tuple[Command, list[str]]:
    """A command whose revisions are looked up, with lines that the user should read.

    Args:
        command: With revisions in its trees.
        out: The folder of the experiment: its store gets objects.
        excluded: Folders that no snapshot has.

    Raises:
        ValueError: There is no such repository or revision, or a comparison would be wrong.
    """
    repository = Repository.of(Path(command.folder))
    store = command.store_in(out)
    is_new = not store.exists()
    missing = [path for path in (out, *out.parents) if not path.exists()]
    try:
        trees = store_of(command, out, excluded)
        found = {name: _looked_up(trees, tree) for name, tree in command.trees.items()}
        given = [_link(repository, link) for link in command.links]
        base = found[BASELINE].hash
        links = tuple(dict.fromkeys(path for link in given for path in trees.linkable(link, base)))
        for tree in found.values():
            Folders(trees).check_links(links, tree.hash)
        notes = list(dict.fromkeys(_compared(trees, command, found)))
    except BaseException:
        if is_new:
            remove_path(store if out not in missing or command.is_shared else out)
        for path in missing:
            with suppress(OSError):  # it is gone, or another experiment has begun there
                path.rmdir()
        raise
    sources, interpreter = looked_up_imports(command, repository.root)
    return replace(command, trees=found, links=links, sources=tuple(sources), interpreter=interpreter), notes


def store_of(command: Command, out: Path, excluded: Sequence[Path]) -> Trees:
    """The store of trees of an experiment, which is made if there is none.

    Raises:
        ValueError: The command's folder is in no repository.
    """
    store = command.store_in(out)
    if store.exists():
        return Trees.read(store)
    repository = Repository.of(Path(command.folder))
    linked = [Path(command.folder, link) for link in command.links]
    return Trees.make(repository, store, [*excluded, repository.root / "runs", *linked])


def _link(repository: Repository, link: str) -> str:
    """A path that the user gives where he stands, relative to the top of the repository."""
    path = Path(os.path.normpath(repository.root / repository.prefix / link))
    return path.relative_to(repository.root).as_posix() if path.is_relative_to(repository.root) else link


def _looked_up(trees: Trees, tree: Tree) -> Tree:
    if tree.hash:
        return tree
    if tree.merged:
        return replace(tree, hash=trees.merged(tree.revision, tree.merged))
    if not tree.revision:
        return replace(tree, hash=trees.snapshot())
    return replace(tree, hash=trees.tree_of(tree.revision), commit=trees.commit_of(tree.revision))


def _compared(trees: Trees, command: Command, found: dict[str, Tree]) -> Iterator[str]:
    """Lines about each variant's difference.

    Raises:
        ValueError: A comparison would be wrong.
    """
    base = found[BASELINE]
    for tree, other in itertools.permutations(found.values(), 2):
        if tree.hash == other.hash and (more := [each for each in tree.merged if each not in other.merged]):
            problem = f"{' and '.join(more)} adds nothing to {other.name}"
            raise ValueError(f"{problem}: give revisions that each change something of their own, or leave one out")
    for tree in found.values():
        if tree == base:  # the baseline, and combinations of factors that are options
            continue
        sides = {"old_name": base.name, "new_name": tree.name}
        words = [*command.words, *command.setup]
        lines = problems(trees, base.hash, tree.hash, **sides, has_setup=bool(command.setup), command=words)
        if lines.errors:
            raise ValueError(lines.errors[0])
        yield from lines.notes


def write_diffs(command: Command, out: Path) -> None:
    """Write what each variant changes, as a patch and as git's summary of it."""
    trees = Trees.read(command.store_in(out))
    base = command.trees[BASELINE]
    (out / DIFFS).mkdir(exist_ok=True)
    for name, tree in command.trees.items():
        if tree.hash != base.hash:
            with atomic_file(out / DIFFS / f"{name}.patch") as file:
                file.write(trees.patch(base.hash, tree.hash))
            write_text(out / DIFFS / f"{name}.stat", trees.stat(base.hash, tree.hash))


def looked_up_imports(command: Command, root: Path) -> tuple[list[str], str]:
    """The folders of a repository that its programs import modules from, because it is installed as editable.

    And the versions of Python and torch that they run with; empty: not known.

    Args:
        command: Its first word, or the interpreter that a script of that name begins with, is asked.
        root: The top of the repository.
    """
    python = _python_of(command.words[0], Path(command.folder))
    if python is None:
        return [], ""
    process = subprocess.run(
        [python, "-c", _LOOKUP], cwd=os.sep, capture_output=True, text=True, timeout=LOOKUP_S, check=False
    )
    paths, interpreter = json.loads(process.stdout) if process.returncode == 0 else ([], "")
    real_root = Path(os.path.realpath(root))
    inside = [Path(os.path.realpath(path)) for path in paths]
    inside = [path for path in inside if path.is_relative_to(real_root) and not _is_environment(path)]
    return list(dict.fromkeys(path.relative_to(real_root).as_posix() for path in inside)), interpreter


def _is_environment(path: Path) -> bool:
    return any((parent / "pyvenv.cfg").exists() for parent in (path, *path.parents))


def _python_of(word: str, folder: Path) -> str | None:
    """The interpreter of a command; ``None``: it is none of Python's, as far as is known."""
    path = str(folder / word) if os.sep in word else shutil.which(word)
    if path is None or Path(path).name.startswith("python"):
        return path
    try:
        with open_regular(path) as file:
            first = file.readline(300).decode("utf-8", errors="replace").strip()
    except OSError:
        return None
    interpreter = first.removeprefix("#!").split(" ")[0] if first.startswith("#!") else ""
    return interpreter if "python" in interpreter and Path(interpreter).is_file() else shutil.which("python")
