"""Folders of trees, to run programs in: make one, and bring it back to its tree after a run."""

import itertools
import os
import re
import shutil
import stat
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import NamedTuple
from urllib.parse import quote_from_bytes, unquote_to_bytes

import msgspec

from lightning_llm.ablate.trees.git import GitError, alternate, folders_of, git, joined, listed, names_in, text_of
from lightning_llm.ablate.trees.store import CACHE, LARGEST_INDEX, Pointer, Trees
from lightning_llm.io.atomic import atomic_file, atomic_path, remove_path, write_text
from lightning_llm.io.records import read_record, write_record
from lightning_llm.io.untrusted import MIB, open_regular, read_bytes, shown

MOST_SIGNED = 10_000
_INDEX = "lightning-llm-index"  # these two are in the .git of a folder
_FOLDER_RECORD = "lightning-llm.json"


class Leftovers(NamedTuple):
    """The difference between a folder and its tree, as paths in the folder.

    Attributes:
        changed: Tracked files whose content, mode or type differs, or that are missing; links that lead elsewhere.
        new: Files that the tree does not have; an empty new folder ends with a slash.
    """

    changed: list[str]
    new: list[str]


class Cleaned(NamedTuple):
    """How a folder was brought back to its tree.

    Attributes:
        into: Where files were moved; ``None``: none were.
        moved: New files and whole new folders that are there now.
        restored: Tracked files and links that were restored. What the run made of them was moved too.
        deleted: FIFOs, sockets and devices.
    """

    into: Path | None
    moved: list[str]
    restored: list[str]
    deleted: list[str]


class _FolderRecord(msgspec.Struct, kw_only=True):
    """Links and git-lfs files of a folder. Paths are percent-encoded, since they need not be UTF-8."""

    version: int = 1
    links: list[str]
    lfs: dict[str, tuple[str, int, int]]  # oid, size, mtime in ns


class Folders:
    """Folders of the trees in a store.

    Args:
        trees: The store.
    """

    def __init__(self, trees: Trees) -> None:
        self.trees = trees

    def checkout(self, tree: str, folder: Path, links: Sequence[str] = ()) -> None:
        """Make a folder of a tree, with the files of its submodules. It appears complete or not at all.

        It is a repository of its own with one commit: git commands of the program neither see nor write the user's.

        Args:
            tree: The hash.
            folder: It must not exist.
            links: Paths relative to the repository's root. Each becomes a link to the user's file or folder.

        Raises:
            ValueError: A link cannot be made, or objects are missing.
        """
        if os.path.lexists(folder):
            raise ValueError(f"{folder} exists already: remove it first")
        flat, _ = self.trees.flat(tree)
        entries = self.trees.entries(flat)
        links = self._checked_links(links, entries)
        pointers = {
            path: it for path, it in self.trees.pointers(entries).items() if self.trees.lfs_object(it) is not None
        }
        commit = text_of(self.trees.in_store("commit-tree", "-m", f"Files of tree {tree}", flat))
        with atomic_path(folder.absolute()) as made:
            git_dir = made / ".git"
            object_format = text_of(self.trees.in_store("rev-parse", "--show-object-format"))
            words = ("--quiet", "--template=", f"--object-format={object_format}")
            git(self.trees.folder, "init", *words, str(made), is_isolated=True)
            for name in ("objects/info", "info"):
                (git_dir / name).mkdir(exist_ok=True)
            write_text(git_dir / "objects" / "info" / "alternates", alternate(self.trees.store / "objects") + "\n")
            git(made, "update-ref", "--no-deref", "HEAD", commit, is_isolated=True)
            self._git_in(made, "read-tree", "--reset", "-u", flat)
            if pointers:
                paths = joined(pointers)
                self._git_in(made, "update-index", "--assume-unchanged", "-z", "--stdin", given=paths)
            record = _FolderRecord(links=[_encoded(link) for link in links], lfs={})
            for path, pointer in pointers.items():
                record.lfs[_encoded(path)] = self._fill(made / path, pointer)
            for link in links:
                self._link(made, link)
            with atomic_file(git_dir / "info" / "exclude") as file:
                file.write(
                    b"".join(b"/" + re.sub(rb"([\\*?\[\] #!])", rb"\\\1", os.fsencode(link)) + b"\n" for link in links)
                )
            with atomic_file(git_dir / "index") as file:  # of the program's own git commands
                file.write(read_bytes(git_dir / _INDEX, LARGEST_INDEX))
            write_record(git_dir / _FOLDER_RECORD, record)

    def check_links(self, links: Sequence[str], tree: str) -> None:
        """Refuse what cannot be linked into a tree.

        Raises:
            ValueError: A path is not there, leads elsewhere, or is tracked.
        """
        self._checked_links(links, self.trees.entries(self.trees.flat(tree)[0]))

    def leftovers(self, folder: Path) -> Leftovers:
        """The difference between a folder of :meth:`checkout` and its tree. The linked paths are no part of it."""
        state = self._state(folder)
        return Leftovers(sorted(state.changed | state.broken), sorted(_new_files(folder, state)))

    def accept(self, folder: Path) -> list[str]:
        """Take the folder as it is for its tree, after ``--setup``. Returns its new files, for :meth:`clean`."""
        folder = folder.absolute()
        state = self._state(folder)
        self._git_in(folder, "add", "--update", "--", ":(top)")
        return sorted(_new_files(folder, state))

    def clean(self, folder: Path, into: Path, kept: Collection[str] = ()) -> Cleaned:
        """Bring a folder of :meth:`checkout` back to its tree after a run. No link is followed.

        New files are moved, ignored ones included. Tracked files are restored, and what the run made of them is moved.
        Python's bytecode caches stay. A process that still writes there must have ended.

        Args:
            folder: The folder.
            into: Where files are moved, with their relative paths. It is made if there are any; if the name is taken,
                a number is added.
            kept: New files that stay, as :meth:`accept` returned them.
        """
        folder, into = folder.absolute(), into.absolute()
        state = self._state(folder, kept)
        names = itertools.chain([into], (into.with_name(f"{into.name}.{number}") for number in itertools.count(1)))
        into = next(name for name in names if not os.path.lexists(name))
        moved, deleted = list[str](), list[str]()
        for path in _surplus(folder, state):
            source = folder / path
            if _is_special(source):
                source.unlink()
                deleted.append(path)
                continue
            if source.is_dir() and not source.is_symlink():
                deleted += [os.path.relpath(special, folder) for special in _open_up(source)]
            (into / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.move(source, into / path)
            moved.append(path)
        self._restore(folder, state)
        restored = state.changed | state.broken
        return Cleaned(into if moved else None, sorted(set(moved) - restored), sorted(restored), sorted(deleted))

    def _restore(self, folder: Path, state: "_State") -> None:
        pointers = state.record.lfs
        paths = sorted(path for path in state.changed if _encoded(path) not in pointers)
        if paths:
            self._git_in(folder, "checkout-index", "--force", "-u", "-z", "--stdin", given=joined(paths))
        for path in state.changed - set(paths):
            oid, size, _ = pointers[_encoded(path)]
            pointers[_encoded(path)] = self._fill(folder / path, Pointer(oid, size))
        if len(paths) < len(state.changed):
            write_record(folder / ".git" / _FOLDER_RECORD, state.record)
        for path in state.changed:  # bytecode is known by seconds and size, which the changed file may share
            cache = folder / PurePosixPath(path).parent / CACHE
            if cache.is_dir() and not cache.is_symlink():
                remove_path(cache)
        for link in state.broken:
            self._link(folder, link)

    def _git_in(self, folder: Path, *words: str, given: bytes = b"") -> bytes:
        """A git command of the store in a folder, with an index that the program's own git commands do not write."""
        environment = {"GIT_WORK_TREE": str(folder), "GIT_INDEX_FILE": str(folder / ".git" / _INDEX)}
        return self.trees.in_store(*words, environment=environment, given=given)

    def _state(self, folder: Path, kept: Collection[str] = ()) -> "_State":
        folder = folder.absolute()
        record = read_record(folder / ".git" / _FOLDER_RECORD, _FolderRecord)
        links = [_decoded(link) for link in record.links]
        _make_writable(folder)
        tracked = set(names_in(self._git_in(folder, "ls-files", "-z")))
        named = {*tracked, *links, *(path.rstrip("/") for path in kept)}
        parents = folders_of(named)
        parents |= {path.rstrip("/") for path in kept if path.endswith("/")}
        _open_parents(folder, parents)
        with suppress(GitError):  # that some differ
            self._git_in(folder, "update-index", "--refresh", "-q")
        changed = set(names_in(self._git_in(folder, "diff-files", "-z", "--name-only", "--ignore-submodules=all")))
        for text, (_, size, time) in record.lfs.items():
            path = _decoded(text)
            status = os.lstat(folder / path) if os.path.lexists(folder / path) else None
            if (
                status is None
                or not stat.S_ISREG(status.st_mode)
                or (status.st_size, status.st_mtime_ns) != (size, time)
            ):
                changed.add(path)
        fine = {link for link in links if _leads_to(folder / link, self.trees.repository.root / link)}
        stays = (tracked - changed) | fine | {path for path in kept if not path.endswith("/")}
        return _State(record, changed, set(links) - fine, stays, parents)

    def _fill(self, path: Path, pointer: Pointer) -> tuple[str, int, int]:
        """Put the content of git-lfs in a pointer's place; with its facts for the folder's record."""
        mode = stat.S_IMODE(os.lstat(path).st_mode) if os.path.lexists(path) else 0o644
        path.parent.mkdir(parents=True, exist_ok=True)
        source = self.trees.lfs_object(pointer)
        if source is None:
            raise ValueError(f"the git-lfs object {pointer.oid} of {path} is gone: run git lfs pull")
        with atomic_file(path) as file, open_regular(source) as content:
            shutil.copyfileobj(content, file, 16 * MIB)
        os.chmod(path, mode)
        return pointer.oid, pointer.size, os.lstat(path).st_mtime_ns

    def _checked_links(self, links: Sequence[str], entries: Collection[str]) -> list[str]:
        root = self.trees.repository.root
        paths = dict[PurePosixPath, str]()
        for link in links:
            path = PurePosixPath(os.path.normpath(link))
            path = path.relative_to(root) if path.is_relative_to(root) else path
            if path.is_absolute() or path.parts[:1] in ((), ("..",), (".git",)):
                raise ValueError(f"--link got {shown(link)}, expected a path in {root}, relative to it")
            paths[path] = link
        for path, link in paths.items():
            inside = [name for name in entries if name == str(path) or name.startswith(f"{path}/")]
            problems = [f"{root / path} does not exist"] if not (root / path).exists() else []
            if inside:
                problems.append(f"the tree has {listed(inside)}: link only files that git ignores")
            for parent in path.parents[:-1]:
                if (root / parent).is_symlink() or str(parent) in entries:
                    problems.append(f"{parent} is a link or a file: link {parent} itself")
                if parent in paths:
                    problems.append(f"--link {parent} has it already")
            if problems:
                raise ValueError(f"--link got {shown(link)}, but {problems[0]}")
        return [str(path) for path in paths]

    def _link(self, folder: Path, link: str) -> None:
        (folder / link).parent.mkdir(parents=True, exist_ok=True)
        os.symlink(self.trees.repository.root / link, folder / link)


class _State(NamedTuple):
    """A folder after a run.

    Attributes:
        record: The record that was written when it was made.
        changed: Tracked files that differ.
        broken: Links that are missing or that lead elsewhere.
        stays: Files that belong there as they are.
        parents: The folders of all files that belong there.
    """

    record: _FolderRecord
    changed: set[str]
    broken: set[str]
    stays: set[str]
    parents: set[str]


def link_signature(folder: Path, links: Sequence[str]) -> dict[str, tuple[int, int]]:
    """Size and time of each linked file, by which a caller sees which ones a run has changed.

    Args:
        folder: One of :meth:`Folders.checkout`, or the repository's root.
        links: Relative paths. Of folders, all files below them count, up to 10,000 in all; no further link is followed.

    Returns:
        Size in bytes and mtime in ns, by path relative to ``folder``.
    """
    found = dict[str, tuple[int, int]]()
    for link in links:
        top = os.path.realpath(folder / link)
        for parent, folders, files in [("", [], [""])] if not os.path.isdir(top) else os.walk(top):
            folders.sort()
            for name in sorted(files):
                if len(found) == MOST_SIGNED:
                    return found
                path = os.path.join(parent, name) if name else top
                with suppress(OSError):  # removed meanwhile
                    status = os.lstat(path)
                    place = os.path.normpath(os.path.join(link, os.path.relpath(path, top)))
                    found[place] = (status.st_size, status.st_mtime_ns)
    return found


def remove_folder(folder: Path) -> None:
    """Delete a folder of :meth:`Folders.checkout`, whatever permissions a run left in it."""
    if folder.is_dir() and not folder.is_symlink():
        _open_up(folder)
    remove_path(folder)


def _surplus(folder: Path, state: _State, below: str = "") -> Iterator[str]:
    """The files and whole folders that do not belong in a folder, and tracked files that differ."""
    for entry in sorted(os.scandir(folder / below), key=lambda entry: entry.name):
        path = f"{below}{entry.name}"
        if path == ".git" or path in state.stays:
            continue
        is_folder = entry.is_dir(follow_symlinks=False)
        if is_folder and path in state.parents:
            yield from _surplus(folder, state, f"{path}/")
        elif path in state.changed or not (entry.name.endswith(".pyc") or (is_folder and entry.name == CACHE)):
            yield path


def _new_files(folder: Path, state: _State) -> Iterator[str]:
    """The files of :func:`_surplus` that are not tracked, each one; empty folders end with a slash."""
    for path in _surplus(folder, state):
        if path in state.changed or path in state.broken:
            continue
        top = folder / path
        if top.is_symlink() or not top.is_dir():
            yield path
            continue
        _make_writable(top)
        for parent, folders, files in os.walk(top):
            inner = [Path(parent, name) for name in folders]
            for each in inner:
                _make_writable(each)
            folders[:] = [each.name for each in inner if each.name != CACHE]
            names = [*files, *(each.name for each in inner if each.is_symlink())]
            place = os.path.relpath(parent, folder)
            yield from (f"{place}/{name}" for name in names)
            if not names and not folders:
                yield f"{place}/"


def _open_parents(folder: Path, parents: Collection[str], below: str = "") -> None:
    """Make the folders of a tree writable again; git could not look into them."""
    _make_writable(folder / below)
    for entry in list(os.scandir(folder / below)):
        path = f"{below}{entry.name}"
        if path in parents and entry.is_dir(follow_symlinks=False):
            _open_parents(folder, parents, f"{path}/")


def _open_up(folder: Path) -> list[Path]:
    """Make every folder below one writable, and delete what is neither file, folder nor link. The deleted paths."""
    deleted = []
    _make_writable(folder)
    for parent, folders, files in os.walk(folder):
        for name in folders:
            _make_writable(Path(parent, name))
        for special in filter(_is_special, (Path(parent, name) for name in files)):
            special.unlink()
            deleted.append(special)
    return deleted


def _make_writable(folder: Path) -> None:
    mode = os.lstat(folder).st_mode
    if stat.S_ISDIR(mode) and mode & stat.S_IRWXU != stat.S_IRWXU:
        os.chmod(folder, stat.S_IMODE(mode) | stat.S_IRWXU)


def _is_special(path: Path) -> bool:
    mode = os.lstat(path).st_mode
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode) or stat.S_ISLNK(mode))


def _leads_to(link: Path, target: Path) -> bool:
    return link.is_symlink() and os.readlink(link) == str(target)


def _encoded(path: str) -> str:
    return quote_from_bytes(os.fsencode(path))


def _decoded(text: str) -> str:
    return os.fsdecode(unquote_to_bytes(text))
