"""Trees of a git repository: the user's files now, revisions, and folders to run them in. Standard library and git.

1. :class:`Repository` finds the user's repository.
2. :class:`Trees` has a *store*: an empty repository that borrows the objects of the user's. :meth:`Trees.snapshot` and
   :meth:`Trees.tree_of` return hashes of git trees; :meth:`Trees.patch` and others compare two of them.
3. :meth:`Trees.problems` reports what would make a comparison of two trees wrong.
4. :meth:`Trees.checkout` makes a folder of a tree. :meth:`Trees.clean` brings it back to the tree after a run.

Nothing is written into the user's folder or ``.git``, objects included: ``git status`` would write his index,
``git worktree add`` would run his hooks. No network is used, and none of his hooks or filters run, since a filter may
write (that of git-lfs stores objects). So trees hold files as git stores them. Files of git-lfs are the exception: a
snapshot recognizes an unchanged one by its pointer, and a folder gets the content from his local git-lfs objects.
"""

import hashlib
import itertools
import os
import re
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import NamedTuple
from urllib.parse import quote_from_bytes, unquote_to_bytes

import msgspec

from lightning_llm.io.atomic import atomic_file, atomic_path, open_to_append, remove_path, write_text
from lightning_llm.io.records import read_record, write_record
from lightning_llm.io.units import shown_size
from lightning_llm.io.untrusted import MIB, open_regular, printable, read_bytes, shown

RECORD = "repository.json"
WORKING_TREE = "the working tree"
TIMEOUT_S = 1800  # of one git command: a large repository on a slow network file system
LARGEST_INDEX = 4096 * MIB
MOST_UNTRACKED = 1024 * MIB  # a checkpoint that nobody meant to copy
LARGEST_SEARCHED = MIB  # of files that are searched for the repository's path
MOST_SIGNED = 10_000
COMPILED = {".c", ".cc", ".cpp", ".cu", ".cuh", ".cxx", ".h", ".hpp", ".pyx", ".rs"}
DEPENDENCIES = re.compile(
    r"(pyproject\.toml|setup\.(py|cfg)|requirements[^/]*\.(txt|in)|constraints[^/]*\.txt|environment[^/]*\.ya?ml"
    r"|[^/]*\.lock|[^/]*-lock\.(json|ya?ml)|Pipfile|pixi\.toml)"
)
POINTER = re.compile(
    rb"version https://git-lfs\.github\.com/spec/v1\n(?:.+\n)*?oid sha256:([0-9a-f]{64})\nsize (\d+)\n"
)
LARGEST_POINTER = 1024  # the specification's limit
CACHE = "__pycache__"
GITLINK = "160000"
_INDEX = "lightning-llm-index"  # these two are in the .git of a folder
_FOLDER_RECORD = "lightning-llm.json"

_SAFE = {
    "core.hooksPath": "/dev/null",
    "core.fsmonitor": "false",
    "core.splitIndex": "false",  # its shared part would be written into the user's .git
    "core.untrackedCache": "false",
    "core.safecrlf": "false",
    "core.quotePath": "false",
    "core.looseCompression": "1",
    "gc.auto": "0",
    "maintenance.auto": "false",
    "protocol.allow": "never",
    "submodule.recurse": "false",
    "advice.addEmbeddedRepo": "false",
}
_ISOLATED = {  # without the user's configuration, and with commits that depend on nothing but their tree
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_CONFIG_NOSYSTEM": "1",
    "HOME": os.devnull,  # git before 2.32 does not know GIT_CONFIG_GLOBAL
    "XDG_CONFIG_HOME": os.devnull,
    **{f"GIT_{role}_NAME": "lightning-llm" for role in ("AUTHOR", "COMMITTER")},
    **{f"GIT_{role}_EMAIL": "" for role in ("AUTHOR", "COMMITTER")},
    **{f"GIT_{role}_DATE": "2000-01-01T00:00:00Z" for role in ("AUTHOR", "COMMITTER")},
}
_KEPT = re.compile(r"GIT_(CONFIG_.*|EXEC_PATH|CEILING_DIRECTORIES|DISCOVERY_ACROSS_FILESYSTEM)")


class GitError(ValueError):
    """A git command failed. The message is one line."""


def _git(
    folder: Path,
    *words: str,
    environment: Mapping[str, str] = {},
    config: Mapping[str, str] = {},
    given: bytes = b"",
    is_isolated: bool = False,
) -> bytes:
    """The output of a git command in a folder.

    Args:
        folder: Where it starts.
        words: The command.
        environment: Variables besides those of this process. Git's own are not inherited.
        config: Settings that override all others.
        given: Its standard input.
        is_isolated: Without the user's configuration.
    """
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("GIT_") or _KEPT.match(name)}
    if is_isolated:
        inherited = {name: value for name, value in inherited.items() if not name.startswith("GIT_CONFIG_")} | _ISOLATED
    fixed = {"GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0", "GIT_ALLOW_PROTOCOL": "", "GIT_NO_LAZY_FETCH": "1"}
    fixed |= {"GIT_LFS_SKIP_SMUDGE": "1", "LC_ALL": "C", "LANGUAGE": ""}
    options = [word for name, value in {**_SAFE, **config}.items() for word in ("-c", f"{name}={value}")]
    command = ["git", "-C", str(folder), *options, *words]
    try:
        process = subprocess.run(
            command, env={**inherited, **fixed, **environment}, input=given, capture_output=True, timeout=TIMEOUT_S
        )
    except FileNotFoundError:
        raise GitError("git is not installed, or not on PATH: install it to compare revisions") from None
    except OSError as error:
        raise GitError(f"git {words[0]} did not start: {error.strerror}") from None
    except subprocess.TimeoutExpired:
        raise GitError(f"git {words[0]} took more than {TIMEOUT_S} s in {folder}") from None
    if process.returncode:
        lines = os.fsdecode(process.stderr).splitlines()
        text = "; ".join(line for line in lines if not line.startswith(("hint:", "warning:")))
        raise GitError(f"git {words[0]} failed in {folder}: {printable(text)[:400] or process.returncode}")
    return process.stdout


def _line(output: bytes) -> str:
    return os.fsdecode(output.removesuffix(b"\n"))


def _names(output: bytes) -> list[str]:
    """Names of an output of ``-z``. What is not UTF-8 becomes surrogates."""
    return [os.fsdecode(name) for name in output.split(b"\0") if name]


def _folders_of(paths: Iterable[str]) -> set[str]:
    """All folders above these relative paths."""
    found = set[str]()
    for path in paths:
        parent = os.path.dirname(path)
        while parent and parent not in found:
            found.add(parent)
            parent = os.path.dirname(parent)
    return found


def _joined(names: Iterable[str]) -> bytes:
    return b"".join(os.fsencode(name) + b"\0" for name in names)


def _listed(names: Sequence[str]) -> str:
    """Up to three names, for a message."""
    more = f", and {len(names) - 3} more" if len(names) > 3 else ""
    return printable(", ".join(names[:3])).replace("\n", r"\n") + more


def _filters_of(folder: Path, environment: Mapping[str, str] = {}) -> list[str]:
    """The names of the filters that the configuration of a repository has programs for."""
    pattern = r"^filter\..*\.(clean|smudge|process)$"
    try:
        keys = _names(_git(folder, "config", "-z", "--name-only", "--get-regexp", pattern, environment=environment))
    except GitError:  # none
        return []
    return sorted({key.removeprefix("filter.").rpartition(".")[0] for key in keys})


def _without(filters: Iterable[str]) -> dict[str, str]:
    """The settings that switch filters off."""
    for name in filters:
        if "=" in name:  # git -c would read another key
            raise ValueError(f"the git filter {shown(name)} has a = in its name: rename it in your git configuration")
    switches = {"clean": "", "smudge": "", "process": "", "required": "false"}
    return {f"filter.{name}.{key}": value for name in filters for key, value in switches.items()}


@dataclass(frozen=True)
class Repository:
    """The user's repository.

    Attributes:
        root: The top of its working tree.
        git_dir: Its ``.git``; in a linked worktree, the folder that the ``.git`` file names.
        prefix: The folder below ``root`` where the user stands; empty: he stands in ``root``.
    """

    root: Path
    git_dir: Path
    prefix: str

    @classmethod
    def of(cls, folder: Path) -> "Repository":
        """The repository that a folder is in.

        Raises:
            ValueError: There is none that can be used: no git, no working tree, no commit, or another owner.
        """
        folder = folder.absolute()
        try:
            if _line(_git(folder, "rev-parse", "--is-inside-work-tree")) != "true":
                raise ValueError(f"{folder} is in a bare repository or in .git: go to a folder with its files")
        except GitError as error:
            if "dubious ownership" in str(error):
                advice = f"git config --global --add safe.directory {folder.resolve()}"
                raise ValueError(f"{folder} is in a repository of another user. Run {advice}") from None
            if "not a git repository" in str(error):
                raise ValueError(f"{folder} is in no git repository: go to a checkout of one") from None
            raise
        paths = [_line(_git(folder, "rev-parse", word)) for word in ("--show-toplevel", "--absolute-git-dir")]
        prefix = _line(_git(folder, "rev-parse", "--show-prefix")).removesuffix("/")
        try:
            "\n".join([*paths, prefix]).encode()
        except UnicodeEncodeError:
            raise ValueError(f"the path of {printable(paths[0])} is not UTF-8: rename the folder") from None
        try:
            _git(folder, "rev-parse", "--verify", "--quiet", "HEAD^{commit}")
        except GitError:
            raise ValueError(f"the repository {paths[0]} has no commit: commit the baseline first") from None
        return cls(Path(paths[0]), Path(paths[1]), prefix)


class Problems(NamedTuple):
    """What would make a comparison wrong, one line each.

    Attributes:
        errors: The comparison must not run.
        notes: The user should know.
    """

    errors: list[str]
    notes: list[str]


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


class _Record(msgspec.Struct, kw_only=True):
    version: int = 1
    root: str
    git_dir: str
    prefix: str
    excluded: list[str]


class _FolderRecord(msgspec.Struct, kw_only=True):
    """What a folder was made of. Paths are percent-encoded, since they need not be UTF-8."""

    version: int = 1
    links: list[str]
    lfs: dict[str, tuple[str, int, int]]  # oid, size, mtime in ns


class _Pointer(NamedTuple):
    oid: str
    size: int


class Trees:
    """The store of an experiment: reads the user's repository, and makes folders of its trees.

    Args:
        repository: The user's.
        folder: Where the store is.
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
            folder: Where; it is made.
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
        object_format = _line(trees._his("rev-parse", "--show-object-format"))
        settings = {name: trees._his_config(name) for name in ("core.autocrlf", "core.eol")}
        remove_path(trees.store)
        with atomic_path(trees.store) as store:
            words = ("--quiet", "--bare", "--template=", f"--object-format={object_format}")
            _git(folder, "init", *words, str(store), is_isolated=True)
            for name, value in settings.items():
                if value:
                    _git(store, "config", name, value, is_isolated=True)
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
            gitlinks = self._gitlinks(self._his("ls-files", "--stage", "-z", index=index))
            fields = _names(self._his("diff-files", "--name-status", "-z", "--ignore-submodules=all", index=index))
            touched = {path: status for status, path in zip(fields[::2], fields[1::2], strict=True)}
            new = _names(self._his("ls-files", "--others", "--exclude-standard", "-z", index=index))
            new = [path.rstrip("/") for path in new if not self._is_excluded(path)]
            self._check_sizes(new)
            removed = [path for path, status in touched.items() if status == "D" and not self._is_excluded(path)]
            same = self._unchanged_lfs(index, [path for path, status in touched.items() if status == "M"])
            written = touched.keys() - {*removed, *same}
            present = [path for path in sorted(written) if not self._is_excluded(path)]
            self._his("update-index", "--force-remove", "-z", "--stdin", index=index, given=_joined(removed))
            words = ("update-index", "--add", "--remove", "-z", "--stdin")
            self._his(*words, index=index, given=_joined([*present, *new]))
            self._update_gitlinks(index, gitlinks)
            return _line(self._his("write-tree", index=index))

    def commit_of(self, revision: str) -> str:
        """The hash of the commit that a revision names. Errors as in :meth:`tree_of`."""
        return self._resolve(revision, "commit")

    def tree_of(self, revision: str) -> str:
        """The hash of a revision's tree.

        Raises:
            ValueError: It is not the name of a commit in the user's repository.
        """
        return self._resolve(revision, "tree")

    def _resolve(self, revision: str, kind: str) -> str:
        with suppress(GitError):
            if revision.strip() and not revision.startswith("-") and "\0" not in revision:
                return _line(self._his("rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}^{{{kind}}}"))
        where = f"the repository {self.repository.root}"
        raise ValueError(f"{shown(revision)} is not a revision of {where}: give a commit, a branch or a tag")

    def _his(self, *words: str, index: Path | None = None, given: bytes = b"") -> bytes:
        """A git command in the user's repository. New objects are written into the store."""
        environment = self._where
        config: Mapping[str, str] = {}
        if index is not None:
            environment["GIT_INDEX_FILE"] = str(index)
            environment["GIT_OBJECT_DIRECTORY"] = str(self.store / "objects")
            environment["GIT_ALTERNATE_OBJECT_DIRECTORIES"] = _entry(self._objects)
            config = _without(self._filters)
        return _git(self.repository.root, *words, environment=environment, config=config, given=given)

    def _his_config(self, name: str) -> str:
        try:
            return _line(self._his("config", "--get", name))
        except GitError:  # not set
            return ""

    @cached_property
    def _common(self) -> Path:
        """His ``.git``, of which linked worktrees have a part only."""
        return self.repository.root / _line(self._his("rev-parse", "--git-common-dir"))

    @cached_property
    def _objects(self) -> Path:
        return Path(os.path.realpath(self.repository.root / _line(self._his("rev-parse", "--git-path", "objects"))))

    @cached_property
    def _filters(self) -> list[str]:
        return _filters_of(self.repository.root, self._where)

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
        tagged = [(line[0], line[2:]) for line in _names(self._his("ls-files", "-v", "-z", index=index))]
        unchanged = [path for tag, path in tagged if tag.islower()]
        present = [path for tag, path in tagged if tag in "Ss" and os.path.lexists(self.repository.root / path)]
        for option, paths in (("--no-assume-unchanged", unchanged), ("--no-skip-worktree", present)):
            if paths:
                self._his("update-index", option, "-z", "--stdin", index=index, given=_joined(paths))

    def _is_excluded(self, path: str) -> bool:
        return any(path == folder or path.startswith(f"{folder}/") for folder in self.excluded)

    def _unchanged_lfs(self, index: Path, touched: Sequence[str]) -> list[str]:
        """The files of git-lfs that have their pointer's content. Without a filter, they differ for git."""
        fields = _names(self._his("check-attr", "-z", "--stdin", "filter", index=index, given=_joined(touched)))
        tracked = {path for path, value in zip(fields[::3], fields[2::3], strict=True) if value == "lfs"}
        if not tracked:
            return []
        stages = [line.partition("\t") for line in _names(self._his("ls-files", "--stage", "-z", index=index))]
        pointers = self._read_pointers({path: facts.split()[1] for facts, _, path in stages if path in tracked})
        return [path for path, pointer in pointers.items() if _has_content(self.repository.root / path, pointer)]

    def _check_sizes(self, new: list[str]) -> None:
        sizes = dict[str, int]()
        for path in new:
            with suppress(OSError):
                sizes[path] = os.lstat(self.repository.root / path).st_size
        if sum(sizes.values()) > MOST_UNTRACKED:
            largest = max(sizes, key=lambda path: sizes[path])
            total, limit = shown_size(sum(sizes.values())), shown_size(MOST_UNTRACKED)
            raise ValueError(
                f"untracked files have {total}, at most {limit} are copied: add {_listed([largest])} to .gitignore"
            )

    def _update_gitlinks(self, index: Path, gitlinks: Mapping[str, str]) -> None:
        """Submodules as ``git add`` would record them; it would start git in each, with the user's filters."""
        lines = []
        for path, commit in gitlinks.items():
            folder = self.repository.root / path
            if not os.path.lexists(folder):
                lines.append(f"0 {'0' * len(commit)}\t{path}")
            elif (folder / ".git").exists():
                lines.append(f"{GITLINK} {_line(_git(folder, 'rev-parse', '--verify', 'HEAD^{commit}'))}\t{path}")
        self._his("update-index", "-z", "--index-info", index=index, given=_joined(lines))

    @contextmanager
    def _scratch(self) -> Iterator[Path]:
        with tempfile.TemporaryDirectory(dir=self.folder, prefix=".index.", suffix=".tmp") as scratch:
            yield Path(scratch)

    # ---- the store

    def _ours(self, *words: str, environment: Mapping[str, str] = {}, given: bytes = b"") -> bytes:
        """A git command in the store, without the user's configuration."""
        where = {"GIT_DIR": str(self.store), **environment}
        folder = Path(environment.get("GIT_WORK_TREE", self.store))
        return _git(folder, *words, environment=where, given=given, is_isolated=True)

    def _borrow(self, objects: Path) -> None:
        alternates = self.store / "objects" / "info" / "alternates"
        line = os.fsencode(_entry(objects)) + b"\n"
        if not alternates.exists() or line not in read_bytes(alternates, MIB):
            with open_to_append(alternates) as file:
                file.write(line)

    def _absent(self, entries: Mapping[str, tuple[str, str]]) -> list[str]:
        """The files of a tree whose objects are not there."""
        given = "".join(f"{name}\n" for _, name in entries.values()).encode()
        lines = self._ours("cat-file", "--batch-check", given=given).decode().splitlines()
        return [path for path, line in zip(entries, lines, strict=True) if line.endswith(" missing")]

    def _blobs(self, names: Collection[str], limit: int) -> dict[str, bytes]:
        """The content of objects of at most this size."""
        given = "".join(f"{name}\n" for name in sorted(set(names))).encode()
        sizes = [line.split() for line in self._ours("cat-file", "--batch-check", given=given).decode().splitlines()]
        small = [name for name, kind, *rest in sizes if kind == "blob" and int(rest[0]) <= limit]
        output = self._ours("cat-file", "--batch", given="".join(f"{name}\n" for name in small).encode())
        content, start = dict[str, bytes](), 0
        for name in small:
            end = output.index(b"\n", start) + 1
            size = int(output[start:end].split()[2])
            content[name] = output[end : end + size]
            start = end + size + 1
        return content

    def _read_pointers(self, blobs: Mapping[str, str]) -> dict[str, _Pointer]:
        """The paths, of some with their objects, that are pointers of git-lfs."""
        content = self._blobs(blobs.values(), LARGEST_POINTER)
        matches = {path: POINTER.fullmatch(content.get(name, b"")) for path, name in blobs.items()}
        return {path: _Pointer(match[1].decode(), int(match[2])) for path, match in matches.items() if match}

    def _entries(self, tree: str) -> dict[str, tuple[str, str]]:
        """Mode and object of each file in a tree."""
        lines = [line.partition("\t") for line in _names(self._ours("ls-tree", "-r", "-z", "--full-tree", tree))]
        return {path: (facts.split()[0], facts.split()[2]) for facts, _, path in lines}

    def _pointers(self, entries: Mapping[str, tuple[str, str]]) -> dict[str, _Pointer]:
        attributes = {name for path, (_, name) in entries.items() if PurePosixPath(path).name == ".gitattributes"}
        texts = list(self._blobs(attributes, MIB).values())
        if not any(b"filter=lfs" in text for text in texts) and not self._lfs_folders():
            return {}
        return self._read_pointers({path: name for path, (mode, name) in entries.items() if mode.startswith("100")})

    def _lfs_folders(self) -> list[Path]:
        """Where he has objects of git-lfs: in his ``.git``, and in those of borrowed submodules."""
        borrowed = os.fsdecode(read_bytes(self.store / "objects" / "info" / "alternates", MIB)).splitlines()
        storage = self._his_config("lfs.storage") or "lfs"
        places = [self._common / storage, *(Path(_path_of(line)).parent / "lfs" for line in borrowed)]
        return [place / "objects" for place in places if (place / "objects").is_dir()]

    def _lfs_object(self, pointer: _Pointer) -> Path | None:
        """The file with a pointer's content, if he has it."""
        for folder in self._lfs_folders():
            path = folder / pointer.oid[:2] / pointer.oid[2:4] / pointer.oid
            if path.is_file() and path.stat().st_size == pointer.size:
                return path
        return None

    @staticmethod
    def _gitlinks(stages: bytes) -> dict[str, str]:
        """Path and commit of the submodules in an output of ``ls-files --stage``."""
        lines = [line.partition("\t") for line in _names(stages) if line.startswith(GITLINK)]
        return {path: facts.split()[1] for facts, _, path in lines}

    def _flat(self, tree: str) -> tuple[str, dict[str, tuple[str, bool]]]:
        """The tree with the files of its submodules in place of their commits.

        Returns:
            Its hash, and the submodules that are left out: commit, and whether there is a clone.
        """
        missing = dict[str, tuple[str, bool]]()
        with self._scratch() as scratch:
            environment = {"GIT_INDEX_FILE": str(scratch / "index"), "GIT_WORK_TREE": str(scratch)}
            self._ours("read-tree", tree, environment=environment)
            is_flat = True
            while gitlinks := self._gitlinks(self._ours("ls-files", "--stage", "-z", environment=environment)):
                is_flat = False
                gone = _joined(f"0 {'0' * len(commit)}\t{path}" for path, commit in gitlinks.items())
                self._ours("update-index", "-z", "--index-info", environment=environment, given=gone)
                for path, commit in gitlinks.items():
                    has_clone = self._borrow_submodule(path)
                    try:
                        self._ours("read-tree", f"--prefix={path}/", f"{commit}^{{tree}}", environment=environment)
                    except GitError:
                        missing[path] = (commit, has_clone)
            return (tree if is_flat else _line(self._ours("write-tree", environment=environment))), missing

    def _borrow_submodule(self, path: str) -> bool:
        """Borrow the objects of the user's clone of a submodule. Whether there is one."""
        folder = self.repository.root / path
        objects = self._common / "modules" / path / "objects"  # it stays if he deletes the folder
        if (folder / ".git").exists():
            with suppress(GitError):
                objects = folder / _line(_git(folder, "rev-parse", "--git-path", "objects"))
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
        return _names(self._diff("--name-only", "-z", "--no-renames", old, new))

    def added_files(self, old: str, new: str) -> list[str]:
        """The paths that only the new tree has."""
        return _names(self._diff("--name-only", "-z", "--no-renames", "--diff-filter=A", old, new))

    def _diff(self, *words: str) -> bytes:
        return self._ours("diff-tree", "-r", "--no-ext-diff", "--no-textconv", "--no-color", *words)

    def problems(
        self, old: str, new: str, *, old_name: str, new_name: str, has_setup: bool, command: Sequence[str]
    ) -> Problems:
        """What would make a comparison of two trees wrong.

        Args:
            old: The baseline's tree.
            new: The variant's tree.
            old_name: The baseline's revision, for messages.
            new_name: The variant's; ``WORKING_TREE``: it is a snapshot.
            has_setup: Whether ``--setup`` is given.
            command: The words of the command.
        """
        errors, notes = list[str](), list[str]()
        changed = self.changed_files(old, new)
        sides = {old: old_name, new: new_name}
        if not changed:
            errors.append(f"{new_name} has no difference from {old_name}: change a file, or give --null")
        flats = dict[str, str]()
        for tree, name in sides.items():
            flats[tree], missing = self._flat(tree)
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
        errors += self._changed_submodules(new) if new_name == WORKING_TREE else []
        entries = {tree: self._entries(flat) for tree, flat in flats.items()}
        for tree, name in sides.items():
            absent = self._absent(entries[tree])
            if absent:
                fix = f"git archive {'HEAD' if name == WORKING_TREE else name} > {os.devnull}"
                errors.append(f"a partial clone lacks files of {name} ({_listed(absent)}): run {fix} to download them")
        errors += self._missing_lfs(entries, sides, new)
        prefix = self.repository.prefix
        for tree, name in sides.items():
            if prefix and not any(path.startswith(f"{prefix}/") for path in entries[tree]):
                errors.append(f"{prefix} is a path that is not in the tree of {name}: start in a folder that both have")
        compiled = [path for path in changed if PurePosixPath(path).suffix.lower() in COMPILED]
        if compiled and not has_setup:
            errors.append(
                f"the difference has compiled sources ({_listed(compiled)}): give --setup COMMAND to build them in each"
                " tree, or --setup true if the program compiles them itself"
            )
        dependencies = [path for path in changed if DEPENDENCIES.fullmatch(PurePosixPath(path).name)]
        if dependencies:
            notes.append(f"the change of {_listed(dependencies)} is not installed: both sides run in one environment")
        errors += self._paths_in(command, {path for files in entries.values() for path in files})
        notes += self._paths_in_files(entries[new], changed)
        used = self._used_filters(entries[new])
        if used:
            notes.append(f"the git filter {', '.join(used)} does not run: the trees have such files as git stores them")
        return Problems(errors, notes)

    def _changed_submodules(self, tree: str) -> Iterator[str]:
        for path, (mode, _) in self._entries(tree).items():
            changed = list(self._changes_in(path)) if mode == GITLINK else []
            if changed:
                yield f"submodule {path} has changes ({_listed(changed)}): commit in the submodule first"

    def _changes_in(self, path: str) -> Iterator[str]:
        """The files of a submodule that differ from its commit, and those of the submodules in it."""
        folder = self.repository.root / path
        if not (folder / ".git").exists():
            return
        config = _without(_filters_of(folder))
        words = ("status", "--porcelain", "-z", "--no-renames", "--untracked-files=all", "--ignore-submodules=dirty")
        for line in _names(_git(folder, *words, config=config)):
            if CACHE not in line and not line.endswith(".pyc"):
                yield f"{path}/{line[3:]}"
        for inner in self._gitlinks(_git(folder, "ls-files", "--stage", "-z")):
            yield from self._changes_in(f"{path}/{inner}")

    def _missing_lfs(
        self, entries: Mapping[str, Mapping[str, tuple[str, str]]], sides: Mapping[str, str], new: str
    ) -> Iterator[str]:
        for tree, name in sides.items():
            pointers = self._pointers(entries[tree])
            missing = [path for path, pointer in pointers.items() if self._lfs_object(pointer) is None]
            if missing:
                fix = "git lfs pull" if tree == new else f"git lfs pull, or git lfs fetch origin {name}"
                yield f"{name} has pointers of git-lfs in place of files ({_listed(missing)}): run {fix}"

    def _paths_in(self, command: Sequence[str], tracked: Collection[str]) -> Iterator[str]:
        """The absolute paths in a command that lead to files of the trees. Those of ignored files are fine."""
        root = Path(os.path.realpath(self.repository.root))
        named = {".", *tracked, *_folders_of(tracked)}
        rest = r"/[^\s'\":;,=()]*"
        pattern = rf"(?<![\w.}}])(?:{re.escape(str(root))}(?:{rest}|(?![\w.-]))|{rest})"
        for word in command:
            for text in re.findall(pattern, word):
                path = Path(os.path.realpath(text))
                if path.is_relative_to(root) and path.relative_to(root).as_posix() in named:
                    place = path.relative_to(root).as_posix()
                    better = "{tree}" if place == "." else f"{{tree}}/{place}"
                    yield f"the command names {text}, so both sides would use it: write {better} instead"

    def _paths_in_files(self, entries: Mapping[str, tuple[str, str]], changed: Sequence[str]) -> Iterator[str]:
        names = {path: entries[path][1] for path in changed if path in entries}
        content = self._blobs(names.values(), LARGEST_SEARCHED)
        pattern = re.compile(re.escape(os.fsencode(self.repository.root)) + rb"(?![\w.-])")
        found = [path for path, name in names.items() if pattern.search(content.get(name, b""))]
        if found:
            use = f"contains {self.repository.root}, so both sides would use that folder: write a relative path"
            yield f"the change of {_listed(found)} {use}"

    def _used_filters(self, entries: Mapping[str, tuple[str, str]]) -> list[str]:
        attributes = [name for path, (_, name) in entries.items() if PurePosixPath(path).name == ".gitattributes"]
        text = b"\n".join(self._blobs(attributes, MIB).values())
        named = {os.fsdecode(name) for name in re.findall(rb"\bfilter=(\S+)", text)}
        return sorted(named.intersection(self._filters) - {"lfs"})

    # ---- folders

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
        flat, _ = self._flat(tree)
        entries = self._entries(flat)
        links = self._checked_links(links, entries)
        pointers = {path: it for path, it in self._pointers(entries).items() if self._lfs_object(it) is not None}
        commit = _line(self._ours("commit-tree", "-m", f"Files of tree {tree}", flat))
        with atomic_path(folder.absolute()) as made:
            git_dir = made / ".git"
            object_format = _line(self._ours("rev-parse", "--show-object-format"))
            words = ("--quiet", "--template=", f"--object-format={object_format}")
            _git(self.folder, "init", *words, str(made), is_isolated=True)
            for name in ("objects/info", "info"):
                (git_dir / name).mkdir(exist_ok=True)
            write_text(git_dir / "objects" / "info" / "alternates", _entry(self.store / "objects") + "\n")
            _git(made, "update-ref", "--no-deref", "HEAD", commit, is_isolated=True)
            self._in(made, "read-tree", "--reset", "-u", flat)
            if pointers:
                paths = _joined(pointers)
                self._in(made, "update-index", "--assume-unchanged", "-z", "--stdin", given=paths)
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

    def linkable(self, path: str, tree: str) -> list[str]:
        """The paths to link for one that the user names: of a folder with tracked files, what git ignores in it."""
        has_tracked = any(name.startswith(f"{path}/") for name in self._entries(tree))
        if not has_tracked:
            return [path]
        words = ("ls-files", "--others", "--ignored", "--exclude-standard", "--directory", "-z", "--", f":(top){path}")
        ignored = [name.rstrip("/") for name in _names(self._his(*words))]
        return [name for name in ignored if os.path.basename(name) != CACHE] or [path]

    def check_links(self, links: Sequence[str], tree: str) -> None:
        """Refuse what cannot be linked into a tree.

        Raises:
            ValueError: A path is not there, leads elsewhere, or is tracked.
        """
        self._checked_links(links, self._entries(self._flat(tree)[0]))

    def leftovers(self, folder: Path) -> Leftovers:
        """The difference between a folder of :meth:`checkout` and its tree. The linked paths are no part of it."""
        state = self._state(folder)
        return Leftovers(sorted(state.changed | state.broken), sorted(_new_files(folder, state)))

    def accept(self, folder: Path) -> list[str]:
        """Take the folder as it is for its tree, after ``--setup``. Returns its new files, for :meth:`clean`."""
        folder = folder.absolute()
        state = self._state(folder)
        self._in(folder, "add", "--update", "--", ":(top)")
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
            self._in(folder, "checkout-index", "--force", "-u", "-z", "--stdin", given=_joined(paths))
        for path in state.changed - set(paths):
            oid, size, _ = pointers[_encoded(path)]
            pointers[_encoded(path)] = self._fill(folder / path, _Pointer(oid, size))
        if len(paths) < len(state.changed):
            write_record(folder / ".git" / _FOLDER_RECORD, state.record)
        for path in state.changed:  # bytecode is known by seconds and size, which the changed file may share
            cache = folder / PurePosixPath(path).parent / CACHE
            if cache.is_dir() and not cache.is_symlink():
                remove_path(cache)
        for link in state.broken:
            self._link(folder, link)

    def _in(self, folder: Path, *words: str, given: bytes = b"") -> bytes:
        """A git command of the store in a folder, with an index that the program's own git commands do not write."""
        environment = {"GIT_WORK_TREE": str(folder), "GIT_INDEX_FILE": str(folder / ".git" / _INDEX)}
        return self._ours(*words, environment=environment, given=given)

    def _state(self, folder: Path, kept: Collection[str] = ()) -> "_State":
        folder = folder.absolute()
        record = read_record(folder / ".git" / _FOLDER_RECORD, _FolderRecord)
        links = [_decoded(link) for link in record.links]
        _make_writable(folder)
        tracked = set(_names(self._in(folder, "ls-files", "-z")))
        named = {*tracked, *links, *(path.rstrip("/") for path in kept)}
        parents = _folders_of(named)
        parents |= {path.rstrip("/") for path in kept if path.endswith("/")}
        _open_parents(folder, parents)
        with suppress(GitError):  # that some differ
            self._in(folder, "update-index", "--refresh", "-q")
        changed = set(_names(self._in(folder, "diff-files", "-z", "--name-only", "--ignore-submodules=all")))
        for text, (_, size, time) in record.lfs.items():
            path = _decoded(text)
            status = os.lstat(folder / path) if os.path.lexists(folder / path) else None
            if (
                status is None
                or not stat.S_ISREG(status.st_mode)
                or (status.st_size, status.st_mtime_ns) != (size, time)
            ):
                changed.add(path)
        fine = {link for link in links if _leads_to(folder / link, self.repository.root / link)}
        stays = (tracked - changed) | fine | {path for path in kept if not path.endswith("/")}
        return _State(record, changed, set(links) - fine, stays, parents)

    def _fill(self, path: Path, pointer: _Pointer) -> tuple[str, int, int]:
        """Put the content of git-lfs in a pointer's place; with its facts for the folder's record."""
        mode = stat.S_IMODE(os.lstat(path).st_mode) if os.path.lexists(path) else 0o644
        path.parent.mkdir(parents=True, exist_ok=True)
        source = self._lfs_object(pointer)
        if source is None:
            raise ValueError(f"the git-lfs object {pointer.oid} of {path} is gone: run git lfs pull")
        with atomic_file(path) as file, open_regular(source) as content:
            shutil.copyfileobj(content, file, 16 * MIB)
        os.chmod(path, mode)
        return pointer.oid, pointer.size, os.lstat(path).st_mtime_ns

    def _checked_links(self, links: Sequence[str], entries: Collection[str]) -> list[str]:
        root = self.repository.root
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
                problems.append(f"the tree has {_listed(inside)}: link only files that git ignores")
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
        os.symlink(self.repository.root / link, folder / link)


class _State(NamedTuple):
    """A folder after a run.

    Attributes:
        record: What it was made of.
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
        folder: One of :meth:`Trees.checkout`, or the repository's root.
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
    """Delete a folder of :meth:`Trees.checkout`, whatever permissions a run left in it."""
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


def _has_content(path: Path, pointer: _Pointer) -> bool:
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


def _entry(objects: Path) -> str:
    """A folder of objects as git's lists of them have it."""
    text = str(objects)
    if not re.search(r'[:\n"\\]', text):
        return text
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'


def _path_of(entry: str) -> str:
    """The path of an :func:`_entry`."""
    if not entry.startswith('"'):
        return entry
    return re.sub(r"\\(.)", lambda match: "\n" if match[1] == "n" else match[1], entry[1:-1])


def _encoded(path: str) -> str:
    return quote_from_bytes(os.fsencode(path))


def _decoded(text: str) -> str:
    return os.fsdecode(unquote_to_bytes(text))
