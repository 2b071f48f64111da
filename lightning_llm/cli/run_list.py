"""``lightning-llm runs`` lists runs with their state; ``lightning-llm runs clean`` removes useless ones."""

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Column, Table

from lightning_llm.cli.subcommand import OneLineParser, subcommand
from lightning_llm.io.atomic import write_json
from lightning_llm.io.console import Console, folded, room
from lightning_llm.io.shell import shell_path
from lightning_llm.io.units import shown_duration, shown_size
from lightning_llm.runs.list import ListedRun, list_runs, remove, with_differences

ROOT = "runs"
CLEAN = "clean"
RULE = "ended without a result and without a checkpoint"


def _options(parser: OneLineParser) -> None:
    add = parser.add_argument
    parser.usage = "lightning-llm runs [clean] [RUNS …] [--yes] [--json FILE]"
    runs = (
        f"run directories, or folders that contain runs (default: {ROOT}); after {CLEAN}: where to remove useless runs"
    )
    add("runs", nargs="*", metavar="RUNS", help=runs)
    add("--yes", action="store_true", help=f"with {CLEAN}: remove them; without it, they are only listed")
    add("--json", type=Path, metavar="FILE", help="also write the list to this file")


@subcommand(_options)
def run_runs(options: argparse.Namespace) -> None:
    """List runs with state, validation loss, size on disk, and age; `clean` removes useless ones."""
    is_cleaning = options.runs[:1] == [CLEAN]
    if options.yes and not is_cleaning:
        raise ValueError(f"--yes belongs to lightning-llm runs {CLEAN}: leave it out to list runs")
    rows = list_runs(options.runs[is_cleaning:] or [ROOT])
    rows = rows if is_cleaning else with_differences(rows)
    if options.json is not None:
        write_json(options.json, list(map(dataclasses.asdict, rows)))
    if is_cleaning:
        clean([row for row in rows if row.removable], is_real=options.yes)
    else:
        print_list(rows, options.runs)


def print_list(rows: list[ListedRun], folders: Sequence[str]) -> None:
    """A row for each run, with what differs from others in its folder, and how to remove those that are of no use.

    Args:
        rows: The runs.
        folders: In which the user has looked for them.
    """
    # a file or a pipe gets lines of any length
    console = Console(markup=True, highlight=False, width=None if sys.stdout.isatty() else 200)
    removable = [row for row in rows if row.removable]
    columns = {
        "step": ["–" if row.step is None else f"{row.step:,}" for row in rows],
        "val loss": ["–" if row.val_loss is None else f"{row.val_loss:.4f}" for row in rows],
        "size": [shown_size(row.bytes) for row in rows],
        "age": [shown_duration(row.age_s) for row in rows],
        **({"removable": ["yes" if row.removable else "" for row in rows]} if removable else {}),
    }
    state = min(12, max((len(row.state) for row in rows), default=len("state")))
    widths = [[title, *column] for title, column in columns.items()]
    left = room(console.width, [*widths, ["x" * state]])
    names = ["\n".join(folded(text, left) for text in (row.run, row.differs) if text) for row in rows]
    longest = max((len(line) for name in names for line in name.split("\n")), default=0)
    state = room(console.width, [*widths, ["x" * min(longest, left)]])
    table = Table(Column("run", overflow="fold"), Column("state", max_width=state), box=SIMPLE_HEAD, pad_edge=False)
    for title in columns:
        table.add_column(title, justify="right", no_wrap=True)
    for name, row, *cells in zip(names, rows, *columns.values(), strict=True):
        table.add_row(escape(name), escape(row.state), *cells)
    console.print(table)
    console.print(f"{_counted(rows)} on disk", soft_wrap=True)
    if removable:
        command = " ".join(["lightning-llm runs", CLEAN, *map(shell_path, folders)])
        console.print(f"{_counted(removable)} removable ({RULE}): {escape(command)}", soft_wrap=True)


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


def _counted(rows: list[ListedRun]) -> str:
    return f"{len(rows)} {'run' if len(rows) == 1 else 'runs'}, {shown_size(sum(row.bytes for row in rows))}"
