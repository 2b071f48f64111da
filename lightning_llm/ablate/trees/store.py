"""The store of an experiment: trees of the user's files now and of his revisions, and what differs between two.

:class:`Trees` has a *store*: an empty repository that borrows the objects of the user's. :meth:`Trees.snapshot` and
:meth:`Trees.tree_of` return hashes of git trees; :meth:`Trees.patch` and others compare two of them.

Nothing is written into the user's folder or ``.git``, objects included: ``git status`` would write his index,
``git worktree add`` would run his hooks. No network is used, and none of his hooks or filters run, since a filter may
write (the filter of git-lfs stores objects). So trees hold files as git stores them. Files of git-lfs are the
exception: a snapshot recognizes an unchanged one by its pointer, and a folder gets the content from his local git-lfs
objects.
"""

import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import msgspec

from lightning_llm.ablate.trees.git import (
    GITLINK,
    GitError,
    alternate,
    filters_of,
    git,
    gitlinks_in,
    joined,
    listed,
    names_in,
    path_of,
    switched_off,
    text_of,
)
from lightning_llm.ablate.trees.repository import Repository
from lightning_llm.io.atomic import atomic_file, atomic_path, open_to_append, remove_path, write_text
from lightning_llm.io.records import read_record, write_record
from lightning_llm.io.units import shown_size
from lightning_llm.io.untrusted import MIB, open_regular, printable, read_bytes, shown

RECORD = "repository.json"
LARGEST_INDEX = 4096 * MIB
MOST_UNTRACKED = 1024 * MIB  # a checkpoint that nobody meant to copy
POINTER = re.compile(
    rb"version https://git-lfs\.github\.com/spec/v1\n(?:.+\n)*?oid sha256:([0-9a-f]{64})\nsize (\d+)\n"
)
LARGEST_POINTER = 1024  # the specification's limit
CACHE = "__pycache__"
Entries = Mapping[str, tuple[str, str]]  # mode and object of each file of a tree, by path


class _Record(msgspec.Struct, kw_only=True):
    version: int = 1
    root: str
    git_dir: str
    prefix: str
    excluded: list[str]


class Pointer(NamedTuple):
    """The file that git has in place of one of git-lfs.

    Attributes:
        oid: The SHA-256 of the content.
        size: The size of the content in bytes.
    """

    oid: str
    size: int


class Trees:
    """The store of an experiment: reads the user's repository, and has its trees.

    Args:
        repository: The user's.
        folder: The folder that the store is in.
        excluded: Folders below the repository's root that no snapshot has, relative to it.
    """

    def __init__(self, repository: Repository, folder: Path, excluded: Sequence[str]) -> None:
        self.repository = repository
        self.folder = folder.absolute()
        self.excluded = tuple(excluded)
        self.store = self.folder / "store"

    @classmethod
    def make(cls, repository: Repository, folder: Path, excluded: Sequence[Path]) -> "Trees":
        """Make the store. A complete one is replaced.

        ``git init`` and a list of borrowed folders, not ``git clone --shared``: a clone of a shallow repository copies
        it, and one of many references is slow.

        Args:
            repository: The user's.
            folder: The folder to make it in, which is made too.
            excluded: Folders that no snapshot has, such as that of the experiment. Others than those below the root
                are ignored.
        """
        paths = [Path(os.path.realpath(path)) for path in excluded]
        inside = [
            path.relative_to(repository.root).as_posix() for path in paths if path.is_relative_to(repository.root)
        ]
        trees = cls(repository, folder, inside)
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / ".gitignore", "*\n")  # or the user's next `git add -A` adds folders as submodules
        object_format = text_of(trees._in_repository("rev-parse", "--show-object-format"))
        settings = {name: trees._setting(name) for name in ("core.autocrlf", "core.eol")}
        remove_path(trees.store)
        with atomic_path(trees.store) as store:
            words = ("--quiet", "--bare", "--template=", f"--object-format={object_format}")
            git(folder, "init", *words, str(store), is_isolated=True)
            for name, value in settings.items():
                if value:
                    git(store, "config", name, value, is_isolated=True)
            (store / "objects" / "info").mkdir(exist_ok=True)
            (store / "info").mkdir(exist_ok=True)
            attributes = trees._common / "info" / "attributes"
            if attributes.is_file():
                with atomic_file(store / "info" / "attributes") as file:
                    file.write(read_bytes(attributes, MIB))
        trees._borrow(trees._objects)
        record = _Record(
            root=str(repository.root), git_dir=str(repository.git_dir), prefix=repository.prefix, excluded=inside
        )
        write_record(folder / RECORD, record)
        return trees

    @classmethod
    def read(cls, folder: Path) -> "Trees":
        """The store that :meth:`make` made in a folder.

        Raises:
            ValueError: The user's repository is no longer where it was.
            OSError: There is no store.
        """
        record = read_record(folder / RECORD, _Record)
        repository = Repository(Path(record.root), Path(record.git_dir), record.prefix)
        if not (repository.root.is_dir() and repository.git_dir.is_dir()):
            raise ValueError(f"{repository.root} is no longer the git repository of {folder}: put it back")
        return cls(repository, folder, record.excluded)

    # ---- the user's repository

    def snapshot(self) -> str:
        """The hash of a git tree of the user's files now: tracked ones, and new ones that git does not ignore.

        Changes of files that are marked ``assume-unchanged`` or ``skip-worktree`` count: a program would read them.

        Raises:
            ValueError: New files are too large, or git cannot read a file.
        """
        with self._scratch() as scratch:
            index = scratch / "index"
            self._copy_index(index)
            self._trust_no_marks(index)
            gitlinks = gitlinks_in(self._in_repository("ls-files", "--stage", "-z", index=index))
            fields = names_in(
                self._in_repository("diff-files", "--name-status", "-z", "--ignore-submodules=all", index=index)
            )
            touched = {path: status for status, path in zip(fields[::2], fields[1::2], strict=True)}
            new = names_in(self._in_repository("ls-files", "--others", "--exclude-standard", "-z", index=index))
            new = [path.rstrip("/") for path in new if not self._is_excluded(path)]
            self._check_sizes(new)
            removed = [path for path, status in touched.items() if status == "D" and not self._is_excluded(path)]
            same = self._unchanged_lfs(index, [path for path, status in touched.items() if status == "M"])
            written = touched.keys() - {*removed, *same}
            present = [path for path in sorted(written) if not self._is_excluded(path)]
            self._in_repository("update-index", "--force-remove", "-z", "--stdin", index=index, given=joined(removed))
            words = ("update-index", "--add", "--remove", "-z", "--stdin")
            self._in_repository(*words, index=index, given=joined([*present, *new]))
            self._update_gitlinks(index, gitlinks)
            return text_of(self._in_repository("write-tree", index=index))

    def commit_of(self, revision: str) -> str:
        """The hash of the commit that a revision names. Errors as in :meth:`tree_of`."""
        return self._resolve(revision, "commit")

    def tree_of(self, revision: str) -> str:
        """The hash of a revision's tree.

        Raises:
            ValueError: It is not the name of a commit in the user's repository.
        """
        return self._resolve(revision, "tree")

    def merged(self, revision: str, others: Sequence[str]) -> str:
        """The hash of the tree of a revision into which others are merged, one after the other.

        Each is merged as ``git merge`` would, from the last commit that both have in common, but without the merge
        drivers of the user's configuration, which are programs.

        Raises:
            ValueError: One of them is not the name of a commit, or two of them change the same lines.
        """
        shallow = self._common / "shallow"
        if shallow.is_file():  # where the history of a shallow clone ends
            write_text(self.store / "shallow", read_bytes(shallow, LARGEST_INDEX).decode())
        commit = self.commit_of(revision)
        tree = self.tree_of(revision)
        for place, other in enumerate(others):
            its_commit = self.commit_of(other)
            try:
                words = ("--write-tree", "--name-only", "--no-messages", "-z")
                tree = names_in(self.in_store("merge-tree", *words, commit, its_commit))[0]
            except GitError as error:
                if error.status != 1:
                    problem = f"{shown(other)} cannot be merged with {shown(revision)}, which takes git 2.38 or later"
                    raise ValueError(f"{problem}: {error}") from None
                files = listed(names_in(error.output)[1:]) or "the same folder"
                before = " and ".join(map(shown, others[:place] or (revision,)))
                advice = "change one of them so that git can merge both, or leave one out"
                raise ValueError(f"{shown(other)} conflicts with {before} in {files}: {advice}") from None
            message = f"{other} merged"
            commit = text_of(self.in_store("commit-tree", "-p", commit, "-p", its_commit, "-m", message, tree))
        return tree

    def _resolve(self, revision: str, kind: str) -> str:
        with suppress(GitError):
            if revision.strip() and not revision.startswith("-") and "\0" not in revision:
                return text_of(
                    self._in_repository("rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}^{{{kind}}}")
                )
        where = f"the repository {self.repository.root}"
        raise ValueError(f"{shown(revision)} is not a revision of {where}: give a commit, a branch or a tag")

    def _in_repository(self, *words: str, index: Path | None = None, given: bytes = b"") -> bytes:
        """A git command in the user's repository. New objects are written into the store."""
        environment = self._where
        config: Mapping[str, str] = {}
        if index is not None:
            environment["GIT_INDEX_FILE"] = str(index)
            environment["GIT_OBJECT_DIRECTORY"] = str(self.store / "objects")
            environment["GIT_ALTERNATE_OBJECT_DIRECTORIES"] = alternate(self._objects)
            config = switched_off(self.filters)
        return git(self.repository.root, *words, environment=environment, config=config, given=given)

    def _setting(self, name: str) -> str:
        try:
            return text_of(self._in_repository("config", "--get", name))
        except GitError:  # not set
            return ""

    @cached_property
    def _common(self) -> Path:
        """His ``.git``, of which linked worktrees have a part only."""
        return self.repository.root / text_of(self._in_repository("rev-parse", "--git-common-dir"))

    @cached_property
    def _objects(self) -> Path:
        return Path(
            os.path.realpath(self.repository.root / text_of(self._in_repository("rev-parse", "--git-path", "objects")))
        )

    @cached_property
    def filters(self) -> list[str]:
        """The names of the filters in the user's configuration, none of which run."""
        return filters_of(self.repository.root, self._where)

    @property
    def _where(self) -> dict[str, str]:
        return {"GIT_DIR": str(self.repository.git_dir), "GIT_WORK_TREE": str(self.repository.root)}

    def _copy_index(self, index: Path) -> None:
        """Copy his index with its time, by which git knows which files may have changed since it was written."""
        source = self.repository.git_dir / "index"
        with suppress(FileNotFoundError), open_regular(source, LARGEST_INDEX) as file, index.open("xb") as copy:
            status = os.fstat(file.fileno())
            shutil.copyfileobj(file, copy)
            copy.flush()
            os.utime(copy.fileno(), ns=(status.st_atime_ns, status.st_mtime_ns))

    def _trust_no_marks(self, index: Path) -> None:
        tagged = [(line[0], line[2:]) for line in names_in(self._in_repository("ls-files", "-v", "-z", index=index))]
        unchanged = [path for tag, path in tagged if tag.islower()]
        present = [path for tag, path in tagged if tag in "Ss" and os.path.lexists(self.repository.root / path)]
        for option, paths in (("--no-assume-unchanged", unchanged), ("--no-skip-worktree", present)):
            if paths:
                self._in_repository("update-index", option, "-z", "--stdin", index=index, given=joined(paths))

    def _is_excluded(self, path: str) -> bool:
        return any(path == folder or path.startswith(f"{folder}/") for folder in self.excluded)

    def _unchanged_lfs(self, index: Path, touched: Sequence[str]) -> list[str]:
        """The files of git-lfs that have their pointer's content. Without a filter, they differ for git."""
        fields = names_in(
            self._in_repository("check-attr", "-z", "--stdin", "filter", index=index, given=joined(touched))
        )
        tracked = {path for path, value in zip(fields[::3], fields[2::3], strict=True) if value == "lfs"}
        if not tracked:
            return []
        stages = [
            line.partition("\t") for line in names_in(self._in_repository("ls-files", "--stage", "-z", index=index))
        ]
        pointers = self._read_pointers({path: facts.split()[1] for facts, _, path in stages if path in tracked})
        return [path for path, pointer in pointers.items() if _has_content(self.repository.root / path, pointer)]

    def _check_sizes(self, new: list[str]) -> None:
        sizes = dict[str, int]()
        for path in new:
            with suppress(OSError):
                sizes[path] = os.lstat(self.repository.root / path).st_size
        if sum(sizes.values()) > MOST_UNTRACKED:
            largest = max(sizes, key=lambda path: sizes[path])
            total = shown_size(sum(sizes.values()))
            limit = shown_size(MOST_UNTRACKED)
            raise ValueError(
                f"untracked files have {total}, at most {limit} are copied: add {listed([largest])} to .gitignore"
            )

    def _update_gitlinks(self, index: Path, gitlinks: Mapping[str, str]) -> None:
        """Submodules as ``git add`` would record them; it would start git in each, with the user's filters."""
        lines = []
        for path, commit in gitlinks.items():
            folder = self.repository.root / path
            if not os.path.lexists(folder):
                lines.append(f"0 {'0' * len(commit)}\t{path}")
            elif (folder / ".git").exists():
                lines.append(f"{GITLINK} {text_of(git(folder, 'rev-parse', '--verify', 'HEAD^{commit}'))}\t{path}")
        self._in_repository("update-index", "-z", "--index-info", index=index, given=joined(lines))

    @contextmanager
    def _scratch(self) -> Iterator[Path]:
        with tempfile.TemporaryDirectory(dir=self.folder, prefix=".index.", suffix=".tmp") as scratch:
            yield Path(scratch)

    # ---- the store

    def in_store(self, *words: str, environment: Mapping[str, str] = {}, given: bytes = b"") -> bytes:
        """A git command in the store, without the user's configuration."""
        where = {"GIT_DIR": str(self.store), **environment}
        folder = Path(environment.get("GIT_WORK_TREE", self.store))
        return git(folder, *words, environment=where, given=given, is_isolated=True)

    def _borrow(self, objects: Path) -> None:
        alternates = self.store / "objects" / "info" / "alternates"
        line = os.fsencode(alternate(objects)) + b"\n"
        if not alternates.exists() or line not in read_bytes(alternates, MIB):
            with open_to_append(alternates) as file:
                file.write(line)

    def absent(self, entries: Entries) -> list[str]:
        """The files of a tree whose objects are missing."""
        given = "".join(f"{name}\n" for _, name in entries.values()).encode()
        lines = self.in_store("cat-file", "--batch-check", given=given).decode().splitlines()
        return [path for path, line in zip(entries, lines, strict=True) if line.endswith(" missing")]

    def blobs(self, names: Collection[str], limit: int) -> dict[str, bytes]:
        """The content of objects of at most ``limit`` bytes, by name; larger ones are left out."""
        given = "".join(f"{name}\n" for name in sorted(set(names))).encode()
        sizes = [line.split() for line in self.in_store("cat-file", "--batch-check", given=given).decode().splitlines()]
        small = [name for name, kind, *rest in sizes if kind == "blob" and int(rest[0]) <= limit]
        output = self.in_store("cat-file", "--batch", given="".join(f"{name}\n" for name in small).encode())
        content = dict[str, bytes]()
        start = 0
        for name in small:
            end = output.index(b"\n", start) + 1
            size = int(output[start:end].split()[2])
            content[name] = output[end : end + size]
            start = end + size + 1
        return content

    def _read_pointers(self, blobs: Mapping[str, str]) -> dict[str, Pointer]:
        """The paths, of some with their objects, that are pointers of git-lfs."""
        content = self.blobs(blobs.values(), LARGEST_POINTER)
        matches = {path: POINTER.fullmatch(content.get(name, b"")) for path, name in blobs.items()}
        return {path: Pointer(match[1].decode(), int(match[2])) for path, match in matches.items() if match}

    def entries(self, tree: str) -> dict[str, tuple[str, str]]:
        """Mode and object of each file in a tree."""
        lines = [line.partition("\t") for line in names_in(self.in_store("ls-tree", "-r", "-z", "--full-tree", tree))]
        return {path: (facts.split()[0], facts.split()[2]) for facts, _, path in lines}

    def pointers(self, entries: Entries) -> dict[str, Pointer]:
        """The files of a tree that are pointers of git-lfs, by path."""
        attributes = {name for path, (_, name) in entries.items() if PurePosixPath(path).name == ".gitattributes"}
        texts = list(self.blobs(attributes, MIB).values())
        if not any(b"filter=lfs" in text for text in texts) and not self._lfs_folders():
            return {}
        return self._read_pointers({path: name for path, (mode, name) in entries.items() if mode.startswith("100")})

    def _lfs_folders(self) -> list[Path]:
        """The folders of his git-lfs objects: in his ``.git``, and in those of borrowed submodules."""
        borrowed = os.fsdecode(read_bytes(self.store / "objects" / "info" / "alternates", MIB)).splitlines()
        storage = self._setting("lfs.storage") or "lfs"
        places = [self._common / storage, *(Path(path_of(line)).parent / "lfs" for line in borrowed)]
        return [place / "objects" for place in places if (place / "objects").is_dir()]

    def lfs_object(self, pointer: Pointer) -> Path | None:
        """The file with a pointer's content, if he has it."""
        for folder in self._lfs_folders():
            path = folder / pointer.oid[:2] / pointer.oid[2:4] / pointer.oid
            if path.is_file() and path.stat().st_size == pointer.size:
                return path
        return None

    def flat(self, tree: str) -> tuple[str, dict[str, tuple[str, bool]]]:
        """The tree with the files of its submodules in place of their commits.

        Returns:
            Its hash, and the submodules that are left out: commit, and whether there is a clone.
        """
        missing = dict[str, tuple[str, bool]]()
        with self._scratch() as scratch:
            environment = {"GIT_INDEX_FILE": str(scratch / "index"), "GIT_WORK_TREE": str(scratch)}
            self.in_store("read-tree", tree, environment=environment)
            is_flat = True
            while gitlinks := gitlinks_in(self.in_store("ls-files", "--stage", "-z", environment=environment)):
                is_flat = False
                gone = joined(f"0 {'0' * len(commit)}\t{path}" for path, commit in gitlinks.items())
                self.in_store("update-index", "-z", "--index-info", environment=environment, given=gone)
                for path, commit in gitlinks.items():
                    has_clone = self._borrow_submodule(path)
                    try:
                        self.in_store("read-tree", f"--prefix={path}/", f"{commit}^{{tree}}", environment=environment)
                    except GitError:
                        missing[path] = (commit, has_clone)
            return (tree if is_flat else text_of(self.in_store("write-tree", environment=environment))), missing

    def _borrow_submodule(self, path: str) -> bool:
        """Borrow the objects of the user's clone of a submodule. Whether there is one."""
        folder = self.repository.root / path
        objects = self._common / "modules" / path / "objects"  # it stays if he deletes the folder
        if (folder / ".git").exists():
            with suppress(GitError):
                objects = folder / text_of(git(folder, "rev-parse", "--git-path", "objects"))
        if not objects.is_dir():
            return False
        self._borrow(Path(os.path.realpath(objects)))
        return True

    # ---- two trees

    def patch(self, old: str, new: str) -> bytes:
        """The difference, for ``git apply``; bytes, since files need not be UTF-8."""
        return self._diff("--patch", "--binary", "--full-index", "--no-renames", old, new)

    def stat(self, old: str, new: str) -> str:
        """The difference as ``git diff --stat`` prints it."""
        return printable(self._diff("--stat=100", "--find-renames", old, new).decode(errors="replace"))

    def changed_files(self, old: str, new: str) -> list[str]:
        """The paths that differ, deleted ones included."""
        return names_in(self._diff("--name-only", "-z", "--no-renames", old, new))

    def added_files(self, old: str, new: str) -> list[str]:
        """The paths that only the new tree has."""
        return names_in(self._diff("--name-only", "-z", "--no-renames", "--diff-filter=A", old, new))

    def _diff(self, *words: str) -> bytes:
        return self.in_store("diff-tree", "-r", "--no-ext-diff", "--no-textconv", "--no-color", *words)

    # ---- links

    def linkable(self, path: str, tree: str) -> list[str]:
        """The paths to link for one that the user names: of a folder with tracked files, what git ignores in it."""
        has_tracked = any(name.startswith(f"{path}/") for name in self.entries(tree))
        if not has_tracked:
            return [path]
        words = ("ls-files", "--others", "--ignored", "--exclude-standard", "--directory", "-z", "--", f":(top){path}")
        ignored = [name.rstrip("/") for name in names_in(self._in_repository(*words))]
        return [name for name in ignored if os.path.basename(name) != CACHE] or [path]


def _has_content(path: Path, pointer: Pointer) -> bool:
    """Whether a file has the content that a pointer of git-lfs names."""
    try:
        if os.lstat(path).st_size != pointer.size:
            return False
        digest = hashlib.sha256()
        with open_regular(path) as file:
            while block := file.read(MIB):
                digest.update(block)
    except (OSError, ValueError):
        return False
    return digest.hexdigest() == pointer.oid
