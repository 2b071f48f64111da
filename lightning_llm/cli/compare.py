"""``lightning-llm compare RUNS``: compare loss, time and peak memory across runs.

Runs are grouped by what their configs differ in; those that differ only in their seeds are one group. Its spread is the
sample standard deviation over the seeds. A difference between two groups that is below the larger of their spreads is
called smaller than the spread.
"""

import argparse
import dataclasses
import statistics
import sys
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path

from rich.markup import escape
from rich.table import Table

from lightning_llm.checkpoints.run_directory import read_summary, unfinished
from lightning_llm.cli.errors import OneLineParser, tool
from lightning_llm.cli.runs import EVENTS, THREADS, Run, descriptions, find_runs, made_different, option_columns
from lightning_llm.io.atomic import write_json
from lightning_llm.io.console import Console
from lightning_llm.training.callbacks.dashboard import MEMORY, PEAK
from lightning_llm.training.run_options import SEEDS

PEAK_MEMORY = "peak_memory_gib"
METRICS = {  # key in summary.json: what it is, its unit, digits
    "val_loss": ("validation loss", "nats/token", 4),
    "seconds": ("time", "s", 1),
    PEAK_MEMORY: ("peak memory", "GiB", 3),
}
THREADS_DIFFER = "The runs used different numbers of threads, which changes bits and time: each number is a group."
MOST_COLUMNS = 5  # of options; more are combined in one
SMALLER, LARGER, UNKNOWN = "smaller than the spread", "larger than the spread", "spread unknown: one seed each"


@dataclasses.dataclass(frozen=True)
class Measure:
    """One metric over the runs of a group; ``spread`` is ``None`` for fewer than two seeds."""

    mean: float
    spread: float | None

    def text(self, digits: int) -> str:
        """The mean, with the spread if it is known."""
        return f"{self.mean:.{digits}f}" + ("" if self.spread is None else f" ± {self.spread:.{digits}f}")


@dataclasses.dataclass(frozen=True)
class Group:
    """Runs that differ only in their seeds.

    Attributes:
        name: How it differs from the other groups.
        options: The same by option, as text.
        runs: Run directories.
        seeds: How many different seeds there are.
        measures: By the keys of ``METRICS``; those that are known for each of the runs.
    """

    name: str
    options: Mapping[str, str]
    runs: Sequence[str]
    seeds: int
    measures: Mapping[str, Measure]


@dataclasses.dataclass(frozen=True)
class Effect:
    """The difference of a group from the first one, in one metric."""

    metric: str
    difference: float
    spread: float | None
    verdict: str


def _options(parser: OneLineParser) -> None:
    parser.add_argument("runs", nargs="+", metavar="RUNS", help="run directories, or folders that contain runs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the groups and effects to this file too")


@tool(_options)
def run_compare(options: argparse.Namespace) -> None:
    """Compare loss, time and peak memory across finished runs, grouped by the options that differ.

    Means and spreads are over seeds. The first run's group is the baseline. Runs that have not finished are listed.
    """
    runs = find_runs(options.runs)
    status = {run.path: unfinished(run.path) for run in runs}
    left_out = [f"{path}: {words}" for path, words in status.items() if words]
    finished = [with_threads(run) for run in runs if not status[run.path]]
    if not finished:
        raise ValueError(f"no run has finished: {', '.join(left_out)}")
    groups = group_runs([(run, read_results(run.path)) for run in finished])
    if options.json is not None:
        rows = [dataclasses.asdict(group) | {"effects": []} for group in groups]
        for row, group in zip(rows[1:], groups[1:], strict=True):
            row["effects"] = list(map(dataclasses.asdict, effects(group, groups[0])))
        write_json(options.json, rows)
    # a file or a pipe gets lines of any length
    console = Console(markup=True, highlight=False, width=None if sys.stdout.isatty() else 200)
    print_table(groups, console)
    print_effects(groups, console)
    if len({run.options.get(THREADS) for run in finished} - {None}) > 1:
        console.print(f"\n{THREADS_DIFFER}", soft_wrap=True)
    for run in finished:
        for change in read_summary(run.path, METRICS).get("changed_on_resume", []):
            console.print(f"\nchanged on resume: {escape(str(run.path))}, {escape(change)}", soft_wrap=True)
    if left_out:
        console.print()
    for line in left_out:
        console.print(f"not compared: {escape(line)}", soft_wrap=True)


def with_threads(run: Run) -> Run:
    """The run, and the number of threads as an option where its summary notes one: it changes bits and time."""
    threads = read_summary(run.path, METRICS).get(THREADS)
    return dataclasses.replace(run, options={**run.options, THREADS: threads}) if run.options and threads else run


def read_results(run: Path) -> dict[str, float]:
    """What ``summary.json`` says, by the keys of ``METRICS``; peak memory else from the curves of the memory profiler.

    Raises:
        ValueError: It is damaged.
    """
    summary = read_summary(run, METRICS)
    results = {key: float(summary[key]) for key in METRICS if summary.get(key) is not None}
    if PEAK_MEMORY not in results and (peak := _peak_in_curves(run)) is not None:
        results[PEAK_MEMORY] = peak
    return results


def group_runs(results: Sequence[tuple[Run, Mapping[str, float]]]) -> list[Group]:
    """Groups in the order in which their first runs come."""
    runs = [run for run, _ in results]
    columns = option_columns(runs, SEEDS)
    gathered: dict[Hashable, list[int]] = {}
    for number, run in enumerate(runs):
        # without a config nothing is known to be the same
        key = tuple(column[number] for column in columns.values()) if run.options else run.path
        gathered.setdefault(key, []).append(number)
    told = descriptions(runs, leave_out=SEEDS)
    firsts = [numbers[0] for numbers in gathered.values()]
    titles = made_different([told[first] for first in firsts], [runs[first] for first in firsts])
    groups = []
    for title, first, numbers in zip(titles, firsts, gathered.values(), strict=True):
        options = {name: column[first] for name, column in columns.items()} if runs[first].options else {}
        seeds = len({runs[number].seed for number in numbers})
        measures = {}
        for metric in METRICS:
            known = [results[number][1][metric] for number in numbers if metric in results[number][1]]
            if len(known) == len(numbers):
                measures[metric] = Measure(statistics.fmean(known), statistics.stdev(known) if seeds > 1 else None)
        groups.append(Group(title, options, [str(runs[number].path) for number in numbers], seeds, measures))
    return groups


def effects(group: Group, baseline: Group) -> list[Effect]:
    """The differences of ``group`` from ``baseline``, in each metric that both have."""
    found = []
    for metric in METRICS:
        ours, theirs = group.measures.get(metric), baseline.measures.get(metric)
        if ours and theirs:
            difference = ours.mean - theirs.mean
            spread = max((s for s in (ours.spread, theirs.spread) if s is not None), default=None)
            verdict = UNKNOWN if spread is None else SMALLER if abs(difference) < spread else LARGER
            found.append(Effect(metric, difference, spread, verdict))
    return found


def print_table(groups: Sequence[Group], console: Console) -> None:
    """A row for each group."""
    names = list(dict.fromkeys(name for group in groups for name in group.options))
    table = Table(caption="± is the standard deviation over seeds" if any(g.seeds > 1 for g in groups) else None)
    if not 0 < len(names) <= MOST_COLUMNS:
        names = []
    for name in names or ["run"]:
        table.add_column(escape(name), overflow="fold")
    table.add_column("runs", justify="right")
    table.add_column("seeds", justify="right")
    for title, unit, _ in METRICS.values():
        table.add_column(f"{title}, {unit}", justify="right", no_wrap=True)
    for group in groups:
        cells = [group.options.get(name, "–") for name in names] or [group.name]
        values = [found.text(METRICS[key][2]) if (found := group.measures.get(key)) else "–" for key in METRICS]
        table.add_row(*map(escape, cells), str(len(group.runs)), str(group.seeds), *values)
    console.print(table)


def print_effects(groups: Sequence[Group], console: Console) -> None:
    """A line for each metric of each group but the first."""
    for group in groups[1:]:
        console.print(f"\n[bold]{escape(group.name)}[/] versus {escape(groups[0].name)}", soft_wrap=True)
        for effect in effects(group, groups[0]):
            title, unit, digits = METRICS[effect.metric]
            ours, theirs = (each.measures[effect.metric].mean for each in (group, groups[0]))
            change = difference_text(ours, theirs, digits, unit)
            spread = "" if effect.spread is None else f" of {effect.spread:.{digits}f}"
            console.print(f"  {title} {change}: {effect.verdict}{spread}", soft_wrap=True)


def difference_text(value: float, base: float, digits: int, unit: str) -> str:
    """A difference as ``+0.0250 nats/token (+1.2 %)``; without the percentage if the values print as equal."""
    change, before = f"{value - base:+.{digits}f}", f"{base:.{digits}f}"
    if float(change) == 0:
        return f"{0:.{digits}f} {unit}"
    has_share = f"{value:.{digits}f}" != before and float(before) != 0
    return f"{change} {unit}" + (f" ({100 * (value - base) / base:+.1f} %)" if has_share else "")


def _peak_in_curves(run: Path) -> float | None:
    if not any(run.glob(EVENTS)):
        return None
    from tensorboard.backend.event_processing import event_accumulator  # type: ignore[import-untyped]

    events = event_accumulator.EventAccumulator(str(run), size_guidance={event_accumulator.SCALARS: 0})
    events.Reload()
    tags = [tag for tag in events.Tags()["scalars"] if tag.startswith(MEMORY) and tag.endswith(PEAK)]
    return max((event.value for tag in tags for event in events.Scalars(tag)), default=None)
