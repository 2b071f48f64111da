"""Problems that make a comparison of two trees wrong."""

import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from lightning_llm.ablate.trees.git import (
    GITLINK,
    filters_of,
    folders_of,
    git,
    gitlinks_in,
    listed,
    names_in,
    switched_off,
)
from lightning_llm.ablate.trees.store import CACHE, Entries, Trees
from lightning_llm.io.untrusted import MIB

WORKING_TREE = "the working tree"
LARGEST_SEARCHED = MIB  # of files that are searched for the repository's path
COMPILED = {".c", ".cc", ".cpp", ".cu", ".cuh", ".cxx", ".h", ".hpp", ".pyx", ".rs"}
DEPENDENCIES = re.compile(
    r"(pyproject\.toml|setup\.(py|cfg)|requirements[^/]*\.(txt|in)|constraints[^/]*\.txt|environment[^/]*\.ya?ml"
    r"|[^/]*\.lock|[^/]*-lock\.(json|ya?ml)|Pipfile|pixi\.toml)"
)


class Problems(NamedTuple):
    """Lines about what makes a comparison wrong.

    Attributes:
        errors: The comparison must not run.
        notes: The user should know.
    """

    errors: list[str]
    notes: list[str]


def problems(
    trees: Trees, old: str, new: str, *, old_name: str, new_name: str, has_setup: bool, command: Sequence[str]
) -> Problems:
    """Look for everything that would make a comparison of two trees wrong.

    Args:
        trees: The store that has both.
        old: The baseline's tree.
        new: The variant's tree.
        old_name: The baseline's revision, for messages.
        new_name: The variant's; ``WORKING_TREE``: it is a snapshot.
        has_setup: Whether ``--setup`` is given.
        command: The words of the command.
    """
    errors, notes = list[str](), list[str]()
    changed = trees.changed_files(old, new)
    sides = {old: old_name, new: new_name}
    if not changed:
        errors.append(f"{new_name} has no difference from {old_name}: change a file, or give --null")
    flats = dict[str, str]()
    for tree, name in sides.items():
        flats[tree], missing = trees.flat(tree)
        for path, (commit, has_clone) in missing.items():
            if has_clone:
                fix = f"run git -C {path} fetch"
                errors.append(f"submodule {path} of {name}: its clone does not have commit {commit[:12]}, {fix}")
            elif path in changed:
                fix = f"run git submodule update --init {path}"
                errors.append(f"submodule {path} differs and is not initialized: {fix}")
            else:
                line = f"submodule {path} is not initialized: the trees do not have its folder"
                notes += [] if line in notes else [line]
    errors += _changed_submodules(trees, new) if new_name == WORKING_TREE else []
    entries = {tree: trees.entries(flat) for tree, flat in flats.items()}
    for tree, name in sides.items():
        absent = trees.absent(entries[tree])
        if absent:
            fix = f"git archive {'HEAD' if name == WORKING_TREE else name} > {os.devnull}"
            errors.append(f"a partial clone lacks files of {name} ({listed(absent)}): run {fix} to download them")
    errors += _missing_lfs(trees, entries, sides, new)
    prefix = trees.repository.prefix
    for tree, name in sides.items():
        if prefix and not any(path.startswith(f"{prefix}/") for path in entries[tree]):
            errors.append(f"{prefix} is a path that is not in the tree of {name}: start in a folder that both have")
    compiled = [path for path in changed if PurePosixPath(path).suffix.lower() in COMPILED]
    if compiled and not has_setup:
        errors.append(
            f"the difference has compiled sources ({listed(compiled)}): give --setup COMMAND to build them in each"
            " tree, or --setup true if the program compiles them itself"
        )
    dependencies = [path for path in changed if DEPENDENCIES.fullmatch(PurePosixPath(path).name)]
    if dependencies:
        notes.append(f"the change of {listed(dependencies)} is not installed: both sides run in one environment")
    errors += _paths_in(trees, command, {path for files in entries.values() for path in files})
    notes += _paths_in_files(trees, entries[new], changed)
    used = _used_filters(trees, entries[new])
    if used:
        notes.append(f"the git filter {', '.join(used)} does not run: the trees have such files as git stores them")
    return Problems(errors, notes)


def _changed_submodules(trees: Trees, tree: str) -> Iterator[str]:
    for path, (mode, _) in trees.entries(tree).items():
        changed = list(_changes_in(trees, path)) if mode == GITLINK else []
        if changed:
            yield f"submodule {path} has changes ({listed(changed)}): commit in the submodule first"


def _changes_in(trees: Trees, path: str) -> Iterator[str]:
    """The files of a submodule that differ from its commit, and those of the submodules in it."""
    folder = trees.repository.root / path
    if not (folder / ".git").exists():
        return
    config = switched_off(filters_of(folder))
    words = ("status", "--porcelain", "-z", "--no-renames", "--untracked-files=all", "--ignore-submodules=dirty")
    for line in names_in(git(folder, *words, config=config)):
        if CACHE not in line and not line.endswith(".pyc"):
            yield f"{path}/{line[3:]}"
    for inner in gitlinks_in(git(folder, "ls-files", "--stage", "-z")):
        yield from _changes_in(trees, f"{path}/{inner}")


def _missing_lfs(trees: Trees, entries: Mapping[str, Entries], sides: Mapping[str, str], new: str) -> Iterator[str]:
    for tree, name in sides.items():
        pointers = trees.pointers(entries[tree])
        missing = [path for path, pointer in pointers.items() if trees.lfs_object(pointer) is None]
        if missing:
            fix = "git lfs pull" if tree == new else f"git lfs pull, or git lfs fetch origin {name}"
            yield f"{name} has pointers of git-lfs in place of files ({listed(missing)}): run {fix}"


def _paths_in(trees: Trees, command: Sequence[str], tracked: Collection[str]) -> Iterator[str]:
    """The absolute paths in a command that lead to files of the trees. Those of ignored files are fine."""
    root = Path(os.path.realpath(trees.repository.root))
    named = {".", *tracked, *folders_of(tracked)}
    rest = r"/[^\s'\":;,=()]*"
    pattern = rf"(?<![\w.}}])(?:{re.escape(str(root))}(?:{rest}|(?![\w.-]))|{rest})"
    for word in command:
        for text in re.findall(pattern, word):
            path = Path(os.path.realpath(text))
            if path.is_relative_to(root) and path.relative_to(root).as_posix() in named:
                place = path.relative_to(root).as_posix()
                better = "{tree}" if place == "." else f"{{tree}}/{place}"
                yield f"the command names {text}, so both sides would use it: write {better} instead"


def _paths_in_files(trees: Trees, entries: Entries, changed: Sequence[str]) -> Iterator[str]:
    names = {path: entries[path][1] for path in changed if path in entries}
    content = trees.blobs(names.values(), LARGEST_SEARCHED)
    pattern = re.compile(re.escape(os.fsencode(trees.repository.root)) + rb"(?![\w.-])")
    found = [path for path, name in names.items() if pattern.search(content.get(name, b""))]
    if found:
        use = f"contains {trees.repository.root}, so both sides would use that folder: write a relative path"
        yield f"the change of {listed(found)} {use}"


def _used_filters(trees: Trees, entries: Entries) -> list[str]:
    attributes = [name for path, (_, name) in entries.items() if PurePosixPath(path).name == ".gitattributes"]
    text = b"\n".join(trees.blobs(attributes, MIB).values())
    named = {os.fsdecode(name) for name in re.findall(rb"\bfilter=(\S+)", text)}
    return sorted(named.intersection(trees.filters) - {"lfs"})
