"""``lightning-llm runs`` lists runs with their state; ``lightning-llm runs clean`` removes those that are of no use.

A run is removable if it has ended without a result and without a checkpoint. Nothing else is ever removed: no folder
whose lock is held, none without ``config.yaml``, none that holds another run, and none behind a link. Only the kernel
knows who holds a lock, so the lock is taken before a folder is removed. No torch.
"""

import argparse
import dataclasses
import os
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from lightning_llm.cli.errors import OneLineParser, tool
from lightning_llm.io.atomic import remove_path, write_json
from lightning_llm.io.console import Console, folded, room
from lightning_llm.io.units import shown_duration, shown_size
from lightning_llm.runs.directory import (
    CHECKPOINTS,
    CONFIG,
    FINISHED,
    SUMMARY,
    RunLock,
    is_locked,
    read_summary,
    state_of,
)
from lightning_llm.runs.names import find_runs, option_columns, run_folders

ROOT = "runs"
CLEAN = "clean"
RULE = "ended without a result and without a checkpoint"


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


def _options(parser: OneLineParser) -> None:
    add = parser.add_argument
    parser.usage = "lightning-llm runs [clean] [RUNS …] [--yes] [--json FILE]"
    runs = (
        f"run directories, or folders that contain some (default: {ROOT}); after the word {CLEAN}: where to remove runs"
    )
    add("runs", nargs="*", metavar="RUNS", help=runs)
    add("--yes", action="store_true", help=f"with {CLEAN}: remove them; without it, they are only listed")
    add("--json", type=Path, metavar="FILE", help="write the list to this file too")


@tool(_options)
def run_runs(options: argparse.Namespace) -> None:
    """List runs with state, validation loss, size on disk and age; `clean` removes those that are of no use."""
    is_cleaning = options.runs[:1] == [CLEAN]
    if options.yes and not is_cleaning:
        raise ValueError(f"--yes belongs to lightning-llm runs {CLEAN}: leave it out to list runs")
    found: dict[Path, ListedRun] = {}
    for name in options.runs[is_cleaning:] or [ROOT]:
        for path in run_folders(name):
            found.setdefault(path.resolve(), look_at(path, Path(name)))
    rows = list(found.values()) if is_cleaning else _with_differences(list(found.values()))
    if options.json is not None:
        write_json(options.json, list(map(dataclasses.asdict, rows)))
    if is_cleaning:
        clean([row for row in rows if row.removable], is_real=options.yes)
    else:
        print_list(rows)


def look_at(path: Path, folder: Path) -> ListedRun:
    """What is known of a run.

    Args:
        path: Its directory.
        folder: The folder that the user has named, in which it was found.
    """
    state, entries = state_of(path), list(_entries(path))
    is_held, loss = is_locked(path), state.val_loss
    if state.words == FINISHED:
        with suppress(ValueError, OSError):  # a damaged summary
            loss = read_summary(path, ("val_loss",)).get("val_loss", loss)
    files = {(entry.st_dev, entry.st_ino): entry for _, entry in entries}.values()
    written = max((entry.st_mtime for entry in files), default=0.0)
    is_inside = path.resolve() == folder.resolve() / path.relative_to(folder)  # and not behind a link
    return ListedRun(
        run=str(path),
        state="trains" if is_held else state.words,
        step=state.step,
        val_loss=loss,
        bytes=sum(512 * entry.st_blocks for entry in files),
        age_s=max(0.0, time.time() - written),
        removable=is_held is False and is_inside and is_useless(path),
    )


def _with_differences(rows: list[ListedRun]) -> list[ListedRun]:
    """The runs, each with the options that are not the same in all runs of its folder."""
    found: dict[int, str] = {}
    folders = [Path(row.run).resolve().parent for row in rows]
    for folder in set(folders):
        places = [place for place, its in enumerate(folders) if its == folder]
        with suppress(ValueError, OSError):  # a damaged config: nothing is known
            runs = find_runs([rows[place].run for place in places]) if len(places) > 1 else []
            columns = option_columns(runs, ()) if len(runs) == len(places) else {}
            for number, place in enumerate(places):
                found[place] = ", ".join(f"{name}={column[number]}" for name, column in columns.items())
    return [dataclasses.replace(row, differs=found.get(place, "")) for place, row in enumerate(rows)]


def is_useless(run: Path) -> bool:
    """Whether a run has ended without a result and without a checkpoint."""
    has_config, state = (run / CONFIG).is_file(), state_of(run)
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


def print_list(rows: list[ListedRun]) -> None:
    """A row for each run, with what differs from others in its folder, and how to remove those that are of no use."""
    # a file or a pipe gets lines of any length
    console = Console(markup=True, highlight=False, width=None if sys.stdout.isatty() else 200)
    table, texts = Table(box=SIMPLE_HEAD, pad_edge=False), list[list[str]]()
    titles = ("step", "val loss", "size", "age", "removable")
    for row in rows:
        step, loss = (
            "–" if row.step is None else f"{row.step:,}",
            "–" if row.val_loss is None else f"{row.val_loss:.4f}",
        )
        texts.append([step, loss, shown_size(row.bytes), shown_duration(row.age_s), "yes" if row.removable else ""])
    count = len(titles) if any(row.removable for row in rows) else len(titles) - 1
    columns = [[title, *(text[place] for text in texts)] for place, title in enumerate(titles[:count])]
    state = min(12, max((len(row.state) for row in rows), default=0))
    left = room(console.width, [*columns, ["x" * max(len("state"), state)]])
    table.add_column("run")
    table.add_column("state")
    for title in titles[:count]:
        table.add_column(title, justify="right", no_wrap=True)
    for row, text in zip(rows, texts, strict=True):
        name = "\n".join(folded(words, left) for words in (row.run, row.differs) if words)
        table.add_row(escape(name), escape(row.state), *text[:count])
    console.print(table)
    console.print(f"{_counted(rows)} on disk", soft_wrap=True)
    if removable := [row for row in rows if row.removable]:
        console.print(f"{_counted(removable)} removable ({RULE}): lightning-llm runs {CLEAN}", soft_wrap=True)


def clean(rows: list[ListedRun], *, is_real: bool) -> None:
    """Remove runs, or print what would be removed."""
    if not rows:
        print(f"no run is removable: none has {RULE}")
        return
    for row in rows:
        if is_real:
            remove(Path(row.run).resolve())
        print(f"{'removed' if is_real else 'would remove'} {row.run}: {row.state}, {shown_size(row.bytes)}")
    print(f"{_counted(rows)} {'removed' if is_real else 'would be removed: add --yes to remove them'}")


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


def _counted(rows: list[ListedRun]) -> str:
    return f"{len(rows)} {'run' if len(rows) == 1 else 'runs'}, {shown_size(sum(row.bytes for row in rows))}"
