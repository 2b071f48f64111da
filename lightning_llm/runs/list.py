"""The runs in some folders as a list, and which of them may be removed because nothing in them is of use. No torch.

A run is removable if it has ended without a result and without a checkpoint; one that diverged in an experiment is a
result. Nothing else is ever removed: no folder
whose lock is held, none without ``config.yaml``, none that holds another run, and none behind a link. Only the kernel
knows who holds a lock, so the lock is taken before a folder is removed.
"""

import dataclasses
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from lightning_llm.io.atomic import remove_path
from lightning_llm.runs.directory import CHECKPOINTS, CONFIG, SUMMARY
from lightning_llm.runs.find import PLAN, find_runs, identity_of, run_folders
from lightning_llm.runs.lock import RunLock, is_locked
from lightning_llm.runs.names import distinctions
from lightning_llm.runs.status import DIVERGED, FINISHED, read_summary, run_state


@dataclasses.dataclass(frozen=True)
class ListedRun:
    """A run directory, as it is listed.

    Attributes:
        run: Its path.
        state: In words.
        step: The last optimizer step that is known.
        val_loss: The last validation loss, in nats per token.
        bytes: On the disk; a file with several names counts once.
        age_s: Seconds since a file in it was last written.
        removable: Whether ``runs clean`` removes it.
        differs: The options that are not the same in all runs of its folder.
    """

    run: str
    state: str
    step: int | None
    val_loss: float | None
    bytes: int
    age_s: float
    removable: bool
    differs: str = ""


def list_runs(names: Iterable[str]) -> list[ListedRun]:
    """The runs that the words of a command line name, each once. Errors as in :func:`runs.find.run_folders`."""
    rows: dict[object, ListedRun] = {}
    for name in names:
        for path in run_folders(name):
            rows.setdefault(identity_of(path), look_at(path, Path(name)))
    return list(rows.values())


def look_at(path: Path, folder: Path) -> ListedRun:
    """Entry of a run in the list.

    Args:
        path: Its directory.
        folder: The folder that the user has named, in which it was found.
    """
    state = run_state(path)
    entries = list(_entries(path))
    is_held = is_locked(path)
    loss = state.val_loss
    if state.description == FINISHED:
        with suppress(ValueError, OSError):  # a damaged summary
            loss = read_summary(path, ("val_loss",)).get("val_loss", loss)
    files = {(entry.st_dev, entry.st_ino): entry for _, entry in entries}.values()
    newest_s = max((entry.st_mtime for entry in files), default=0.0)
    is_inside = path.resolve() == folder.resolve() / path.relative_to(folder)  # and not behind a link
    return ListedRun(
        run=str(path),
        state="trains" if is_held else state.description,
        step=state.step,
        val_loss=loss,
        bytes=sum(512 * entry.st_blocks for entry in files),
        age_s=max(0.0, time.time() - newest_s),
        removable=is_held is False and is_inside and is_useless(path),
    )


def with_differences(rows: list[ListedRun]) -> list[ListedRun]:
    """The runs, each with the options that are not the same in all runs of its folder."""
    differing: dict[int, str] = {}
    folders = [Path(row.run).resolve().parent for row in rows]
    for folder in set(folders):
        numbers = [number for number, parent in enumerate(folders) if parent == folder]
        with suppress(ValueError, OSError):  # a damaged config: nothing is known
            runs = find_runs([rows[number].run for number in numbers]) if len(numbers) > 1 else []
            if len(runs) == len(numbers):
                differing |= zip(numbers, distinctions(runs), strict=True)
    return [dataclasses.replace(row, differs=differing.get(number, "")) for number, row in enumerate(rows)]


def is_useless(run: Path) -> bool:
    """Whether a run has ended without a result and without a checkpoint."""
    has_config = (run / CONFIG).is_file()
    state = run_state(run)
    if state.description.startswith(DIVERGED) and (run.resolve().parents[1] / PLAN).is_file():
        return False  # a result of an experiment: its verdict counts it
    return has_config and state.has_ended and not any(_is_worth_keeping(path, run) for path, _ in _entries(run))


def _entries(run: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Every file and folder in a run, links not followed.

    A folder that cannot be read counts as a checkpoint: there may be one in it.
    """
    unreadable: list[Path] = []
    for folder, folders, files in os.walk(run, onerror=lambda error: unreadable.append(Path(str(error.filename)))):
        for name in (*folders, *files):
            with suppress(FileNotFoundError):  # a run in training deletes its old ones
                yield Path(folder, name), os.lstat(Path(folder, name))
    for path in unreadable:
        with suppress(OSError):
            yield path / "unknown.ckpt", os.lstat(path)


def _is_worth_keeping(path: Path, run: Path) -> bool:
    """Whether a file is a result, a checkpoint (not one that is half written), or of another run in this folder."""
    names = path.relative_to(run).parts
    is_saved = ".ckpt" in path.name or (names[0] == CHECKPOINTS and len(names) > 1)
    return (is_saved and not path.name.startswith(".")) or (path.name in (CONFIG, SUMMARY) and names != (CONFIG,))


def remove(run: Path) -> None:
    """Remove a run while holding its lock, so that no process can resume it meanwhile.

    Raises:
        ValueError: A process trains in it now, or has since it was listed.
        OSError: It cannot be removed.
    """
    lock = RunLock(run).acquire()
    try:
        if not is_useless(run):
            raise ValueError(f"{run} was resumed since it was listed: it is kept")
        remove_path(run)
    finally:
        lock.release()
