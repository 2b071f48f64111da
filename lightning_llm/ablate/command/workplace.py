"""Where a run of a command starts: the user's own folder, or a tree of a revision of his repository. No torch.

Trees are in ``OUT/trees/HASH/N``: as many of each revision as there are runs at a time, since two runs never share
one. A tree is used again, after what the run before has left in it was moved away (``ablate.trees.folders``).
"""

import itertools
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType

import msgspec

from lightning_llm.ablate import hooked
from lightning_llm.ablate.command.source import files_below
from lightning_llm.ablate.trees.folders import Folders, link_signature, remove_folder
from lightning_llm.ablate.trees.store import Trees
from lightning_llm.io.atomic import remove_path
from lightning_llm.io.records import read_record, write_record
from lightning_llm.runs.lock import RunLock

TREE = "tree"
KEPT = "kept.json"
IN_USE = "in_use"
LEFT = "left"
MODULES = "modules.txt"
DIGITS = 16  # of its hash, in the name of a tree's folder
MOST_FILES = 20_000  # of a folder that are looked at
PATHS = "PYTHONPATH"
# Compiled by the first run of a tree: neither variant finds what the other has compiled
CACHES = {
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TRITON_CACHE_DIR": "triton",
    "TORCH_EXTENSIONS_DIR": "torch_extensions",
}
Setup = Callable[[Sequence[str], Path, Mapping[str, str], Path], None]


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Where a run starts.

    Attributes:
        folder: Of the command; in a tree, the same folder of it.
        out: Of the experiment.
        run_folder: The run directory.
        is_first: Whether the run has the first seed of its variant.
        reseed: Is added to the seeds that the program sets; ``None``: they are as they are.
        store: Of the trees.
        tree: The hash of its own; empty: it has none.
        links: As of ``Command.links``.
        setup: As of ``Command.setup``.
        sources: As of ``Command.sources``.
    """

    folder: str
    out: str
    run_folder: str
    is_first: bool = False
    reseed: int | None = None
    store: str = ""
    tree: str = ""
    links: tuple[str, ...] = ()
    setup: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()


class _Made(msgspec.Struct, frozen=True, kw_only=True):
    """How a tree was made.

    Attributes:
        kept: The files that its set-up left.
        links: As of :class:`Place`.
        setup: As of :class:`Place`.
    """

    kept: list[str]
    links: tuple[str, ...]
    setup: tuple[str, ...]


class Workplace:
    """The user's own folder, for one run.

    Args:
        place: Which.
        others: The variables that the program gets besides those of its place.

    Attributes:
        folder: That the program starts in.
        top: The top of its tree; without trees the same.
        environment: All variables that the program finds.
    """

    def __init__(self, place: Place, others: Mapping[str, str]) -> None:
        self.place = place
        self.folder = self.top = Path(place.folder)
        self._record = Path(place.run_folder) / MODULES
        hook = {} if place.reseed is None else hooked.environment(others, reseed=place.reseed, modules=self._record)
        self.environment: dict[str, str] = {**others, **hook}
        self._before: Mapping[Path, tuple[int, int]] = {}

    def __enter__(self) -> "Workplace":
        if self.place.is_first:
            self._before = _files(self.folder)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Leave the user's folder as it is."""

    def missed_in(self, line: str) -> str:
        """The file or folder that an error of the program names, and that is in the user's folder only; or nothing."""
        return ""

    def leave(self) -> list[str]:
        """Look at what the run left: what a reader must know of it, one line each.

        Raises:
            ValueError: The run did not use the code that it should have used.
        """
        notes = self._hook_notes()
        after = _files(self.folder) if self.place.is_first else {}
        changed = sorted(str(path) for path in after if after[path] != self._before.get(path))
        if changed:
            written = f"A run writes to its folder ({_listed(changed)})"
            notes.append(f"{written}: the next run finds that; {{run}} is one of its own.")
        return notes

    def _hook_notes(self) -> list[str]:
        return [f"The start-up hook failed: {error}." for error in hooked.errors_in(self._record)]


class TreeWorkplace(Workplace):
    """A tree of a revision, for one run. Arguments as of :class:`Workplace`.

    Args:
        setup: Executes the set-up of a new tree.
    """

    def __init__(self, place: Place, others: Mapping[str, str], setup: Setup) -> None:
        super().__init__(place, others)
        self._trees = Trees.read(Path(place.store))
        self._folders = Folders(self._trees)
        self._setup = setup
        self._lock: RunLock | None = None
        self._signature: Mapping[str, tuple[int, int]] = {}
        self._kept: list[str] = []

    def __enter__(self) -> "TreeWorkplace":
        home = self._trees.folder / self.place.tree[:DIGITS]
        for number in itertools.count():
            self._own = home / str(number)
            self._own.mkdir(parents=True, exist_ok=True)
            try:
                self._lock = RunLock(self._own, wait_s=0.0).acquire()
                break
            except ValueError:  # another run has it
                continue
        try:
            self._prepare()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def _prepare(self) -> None:
        place = self.place
        repository = self._trees.repository
        self.top = self._own / TREE
        self.folder = self.top / repository.prefix
        self.environment = self._environment()
        made = read_record(self._own / KEPT, _Made) if (self._own / KEPT).exists() else None
        if made is not None and (made.links, made.setup) != (place.links, place.setup):  # the command was corrected
            remove_path(self._own / KEPT)
            made = None
        if made is None:
            if self.top.exists():  # or it was killed while it was set up
                remove_folder(self.top)
            self._folders.checkout(place.tree, self.top, place.links)
            if place.setup:
                self._setup(place.setup, self.folder, self.environment, self._own / "setup.txt")
                self._kept = self._folders.accept(self.top)
            write_record(self._own / KEPT, _Made(kept=self._kept, links=place.links, setup=place.setup))
        else:
            self._kept = made.kept
            if (self._own / IN_USE).exists():  # its run was killed
                self._folders.clean(self.top, self._own / LEFT, self._kept)
                remove_folder(self._own / LEFT)
        self._signature = link_signature(self.top, place.links)
        (self._own / IN_USE).touch()

    def _environment(self) -> dict[str, str]:
        """The variables of a program in this tree: its code comes first, and nothing of it is in the user's caches."""
        root = self._trees.repository.root
        given = [path for path in self.environment.get(PATHS, "").split(os.pathsep) if path]
        moved = [str(self.top / Path(path).relative_to(root)) if _is_below(path, root) else path for path in given]
        paths = [*(str(self.top / source) for source in self.place.sources), *moved]
        others = {name: value for name, value in self.environment.items() if name != "PYTHONPYCACHEPREFIX"}
        others |= {name: str(self._own / folder) for name, folder in CACHES.items()}
        others |= {PATHS: os.pathsep.join(dict.fromkeys(paths))} if paths else {}
        if (root / ".venv").is_dir():  # or uv would make one in the tree, and install the tree into it
            others |= {"UV_NO_SYNC": "1", "UV_PROJECT_ENVIRONMENT": str(root / ".venv")}
        reseed = self.place.reseed
        roots = [root, self.top]
        return {**others, **hooked.environment(others, reseed=reseed, modules=self._record, roots=roots)}

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._lock is not None:
            self._lock.release()

    def missed_in(self, line: str) -> str:
        root, prefix = self._trees.repository.root, self._trees.repository.prefix
        for name in re.findall(r"[\w./-]+", line):
            path = Path(os.path.normpath(self.folder / name))
            if not path.is_relative_to(self.top) or not (root / path.relative_to(self.top)).exists():
                continue
            if (missing := _missing_part(self.top, path)) is not None:
                return os.path.relpath(root / missing, root / prefix)
        return ""

    def leave(self) -> list[str]:
        """Bring the tree back to what it was; see :meth:`Workplace.leave`."""
        self._refuse_foreign()
        notes = self._hook_notes()
        signature = link_signature(self.top, self.place.links)
        paths = sorted({*signature, *self._signature})
        linked = [path for path in paths if signature.get(path) != self._signature.get(path)]
        if linked:
            notes.append(f"A run changed what --link leads to ({_listed(linked)}), which all runs share.")
        cleaned = self._folders.clean(self.top, Path(self.place.run_folder) / LEFT, self._kept)
        if cleaned.moved:
            where = f"{LEFT} in the folder of its run"
            notes.append(f"Files that a run leaves in its tree ({_listed(cleaned.moved)}) were moved to {where}.")
        if cleaned.restored:
            notes.append(f"A run changed files that git tracks ({_listed(cleaned.restored)}): they were restored.")
        (self._own / IN_USE).unlink()
        return notes

    @property
    def has_imported(self) -> bool:
        """Whether the program is known to have imported code of its tree."""
        return any(_is_below(path, self.top) for path in hooked.modules_in(self._record))

    def _refuse_foreign(self) -> None:
        """Refuse a run that imported the user's files in place of those of its tree.

        Raises:
            ValueError: It did.
        """
        root = Path(os.path.realpath(self._trees.repository.root))
        own = [Path(self.place.out), self._trees.folder, *(root / link for link in self.place.links)]
        for path in sorted(hooked.modules_in(self._record)):
            is_installed = "site-packages" in path.parts or "dist-packages" in path.parts
            if _is_below(path, root) and not is_installed and not any(_is_below(path, each) for each in own):
                problem = f"the program imported {path}, not the file of its revision"
                raise ValueError(f"{problem}: import it by its place in the repository, or from an editable install")


def workplace_for(place: Place, others: Mapping[str, str], setup: Setup) -> Workplace:
    """The workplace of a run."""
    return TreeWorkplace(place, others, setup) if place.tree else Workplace(place, others)


def remove_trees(store: Path, kept: Collection[str] = ()) -> None:
    """Remove the trees of a store that no run uses, but for those with some hashes."""
    for own in store.glob("*/[0-9]*"):
        if own.parent.name in {tree[:DIGITS] for tree in kept}:
            continue
        try:
            lock = RunLock(own, wait_s=0.0).acquire()
        except (ValueError, OSError):
            continue
        remove_folder(own)
        lock.release()


def _is_below(path: str | Path, folder: Path) -> bool:
    return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder))


def _missing_part(top: Path, path: Path) -> Path | None:
    """The first part of a path that a folder lacks, relative to it; ``None``: it has the whole path."""
    parts = [*reversed(path.relative_to(top).parents), path.relative_to(top)]
    return next((part for part in parts if not (top / part).exists()), None)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (", …" if len(names) > 5 else "")


def _files(top: Path) -> dict[Path, tuple[int, int]]:
    """The first files below a folder, with size and time."""
    found: dict[Path, tuple[int, int]] = {}
    for path in itertools.islice(files_below(top), MOST_FILES):
        with suppress(OSError):  # it is gone
            status = path.lstat()
            found[path.relative_to(top)] = (status.st_size, status.st_mtime_ns)
    return found
