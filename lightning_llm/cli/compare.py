"""``lightning-llm compare RUNS``: compare loss, time and peak memory across runs.

Runs are grouped by what their configs differ in; those that differ only in their seeds are one group. Each group is
compared with the first one by the rule of ``ablate.verdict``. The losses are compared in pairs of runs with the same
seeds, if the hashes in their summaries say that they used the same batches and initial values; otherwise, and for time
and memory, the two groups are independent samples.
"""

import argparse
import dataclasses
import itertools
import statistics
import sys
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from lightning_llm.ablate.pairing import mismatch
from lightning_llm.ablate.verdict import Sample, Verdict, verdicts
from lightning_llm.checkpoints.run_directory import read_summary, unfinished
from lightning_llm.cli.errors import OneLineParser, tool
from lightning_llm.cli.runs import EVENTS, THREADS, Run, descriptions, find_runs, made_different, option_columns
from lightning_llm.io.atomic import write_json
from lightning_llm.io.console import Console
from lightning_llm.training.run_options import MEMORY, PEAK, SEEDS, identity

LOSS, PEAK_MEMORY = "val_loss", "peak_memory_gib"
METRICS = {  # key in summary.json: what it is, its unit, digits
    LOSS: ("validation loss", "nats/token", 4),
    "seconds": ("time", "s", 1),
    PEAK_MEMORY: ("peak memory", "GiB", 3),
}
THREADS_DIFFER = "The runs used different numbers of threads, which changes bits and time: each number is a group."
MOST_COLUMNS = 5  # of options; more are combined in one
ADJUSTED = "Intervals and p are adjusted for {} comparisons: all intervals hold together with a probability of 95 %."

Results = Mapping[str, float]


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
        by_seed: The runs of each seed, with their results.
    """

    name: str
    options: Mapping[str, str]
    runs: Sequence[str]
    seeds: int
    measures: Mapping[str, Measure]
    by_seed: Mapping[Hashable, Sequence[tuple[Run, Results]]]

    def values(self, metric: str, seeds: Sequence[Hashable] = ()) -> list[float]:
        """The metric of each seed, or of these: the mean over the runs of that seed."""
        runs = [self.by_seed[seed] for seed in seeds or self.by_seed]
        return [statistics.fmean(results[metric] for _, results in each) for each in runs]


@dataclasses.dataclass(frozen=True)
class Effect:
    """The difference of a group from the first one, in one metric.

    Attributes:
        metric: One of ``METRICS``.
        base: Mean of the first group's values.
        found: What they say.
        note: Why runs are not paired, or which are left out.
    """

    metric: str
    base: float
    found: Verdict
    note: str = ""


def _options(parser: OneLineParser) -> None:
    parser.add_argument("runs", nargs="+", metavar="RUNS", help="run directories, or folders that contain runs")
    text = "smallest difference of validation loss that matters; without one that large, the verdict is `equivalent`"
    parser.add_argument("--delta", type=float, metavar="NATS", help=text)
    parser.add_argument("--paired", action="store_true", help="fail unless all groups can be compared in pairs of runs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the groups and effects to this file too")


@tool(_options)
def run_compare(options: argparse.Namespace) -> None:
    """Compare loss, time and peak memory across finished runs, grouped by the options that differ.

    The first run's group is the baseline. Each other group gets a difference with its 95 % interval, and a verdict:
    better, worse, equivalent or undecided. Runs with the same seeds are compared in pairs. Runs that have not finished
    are listed.
    """
    runs = find_runs(options.runs)
    status = {run.path: unfinished(run.path) for run in runs}
    left_out = [f"{path}: {words}" for path, words in status.items() if words]
    finished = [with_threads(run) for run in runs if not status[run.path]]
    if not finished:
        raise ValueError(f"no run has finished: {', '.join(left_out)}")
    summaries = {run.path: read_summary(run.path, METRICS) for run in finished}
    groups = group_runs([(run, read_results(run.path)) for run in finished])
    found = effects(groups, summaries, delta=options.delta, must_pair=options.paired)
    if options.json is not None:
        write_json(options.json, [_row(group, each) for group, each in zip(groups, [[], *found], strict=True)])
    # a file or a pipe gets lines of any length
    console = Console(markup=True, highlight=False, width=None if sys.stdout.isatty() else 200)
    print_table(groups, console)
    print_effects(groups, found, console)
    if len({run.options.get(THREADS) for run in finished} - {None}) > 1:
        console.print(f"\n{THREADS_DIFFER}", soft_wrap=True)
    for run in finished:
        for change in summaries[run.path].get("changed_on_resume", []):
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


def group_runs(results: Sequence[tuple[Run, Results]]) -> list[Group]:
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
        by_seed: dict[Hashable, list[tuple[Run, Results]]] = {}
        for number in numbers:
            by_seed.setdefault(identity(runs[number].seed), []).append(results[number])
        seeds = len(by_seed)
        measures = {}
        for metric in METRICS:
            known = [results[number][1][metric] for number in numbers if metric in results[number][1]]
            if len(known) == len(numbers):
                measures[metric] = Measure(statistics.fmean(known), statistics.stdev(known) if seeds > 1 else None)
        paths = [str(runs[number].path) for number in numbers]
        groups.append(Group(title, options, paths, seeds, measures, by_seed))
    return groups


def effects(
    groups: Sequence[Group],
    summaries: Mapping[Path, Mapping[str, Any]],
    *,
    delta: float | None = None,
    must_pair: bool = False,
) -> list[list[Effect]]:
    """The differences of each group but the first from the first, in each metric that both have.

    Args:
        groups: The first is the baseline.
        summaries: The ``summary.json`` of each run.
        delta: The smallest difference of the loss that matters.
        must_pair: Whether losses that cannot be compared in pairs are an error.

    Raises:
        ValueError: They cannot.
    """
    baseline, *others = groups
    partners = [_pairs(baseline, group, summaries) for group in others]
    if must_pair:
        for group, (seeds, why) in zip(others, partners, strict=True):
            if not seeds:
                raise ValueError(f"{group.name} and {baseline.name} are no pairs: {why}; leave out --paired")
    found: list[list[Effect]] = [[] for _ in others]
    for metric in METRICS:
        samples, bases = {}, {}
        for number, group in enumerate(others):
            if metric in baseline.measures and metric in group.measures:
                seeds = partners[number][0] if metric == LOSS else []
                sides = baseline.values(metric, seeds), group.values(metric, seeds)
                samples[str(number)], bases[str(number)] = Sample(*sides, is_paired=bool(seeds)), sides[0]
        for name, verdict in verdicts(samples, delta=delta if metric == LOSS else None).items():
            seeds, why = partners[int(name)]
            note = "" if metric != LOSS else why if seeds else f"not paired: {why}"
            found[int(name)].append(Effect(metric, statistics.fmean(bases[name]), verdict, note))
    return found


def _pairs(baseline: Group, group: Group, summaries: Mapping[Path, Mapping[str, Any]]) -> tuple[list[Hashable], str]:
    """The seeds that both groups have if all their runs are pairs; else none, and why. A note if seeds are left out."""
    seeds = [seed for seed in baseline.by_seed if seed in group.by_seed]
    if not seeds:
        return [], "no seed in common"
    if len(seeds) == 1 and min(baseline.seeds, group.seeds) > 1:
        return [], "only one seed in common"
    for seed in seeds:
        for (first, _), (second, _) in itertools.product(baseline.by_seed[seed], group.by_seed[seed]):
            if why := mismatch(summaries.get(first.path, {}), summaries.get(second.path, {})):
                return [], f"seed {first.seed[0]}: {why}"
    alone = baseline.seeds + group.seeds - 2 * len(seeds)
    return seeds, f"{alone} seed{'s' if alone > 1 else ''} without a partner left out" if alone else ""


def _row(group: Group, found: Sequence[Effect]) -> dict[str, Any]:
    row = {field.name: getattr(group, field.name) for field in dataclasses.fields(group) if field.name != "by_seed"}
    row["measures"] = {name: dataclasses.asdict(measure) for name, measure in group.measures.items()}
    row["effects"] = [
        {"metric": each.metric, **dataclasses.asdict(each.found), "note": _joined(each.note, each.found.note)}
        for each in found
    ]
    return row


def _joined(*notes: str) -> str:
    return "; ".join(filter(None, notes))


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


def print_effects(groups: Sequence[Group], found: Sequence[Sequence[Effect]], console: Console) -> None:
    """A line for each metric of each group but the first."""
    for group, its in zip(groups[1:], found, strict=True):
        console.print(f"\n[bold]{escape(group.name)}[/] versus {escape(groups[0].name)}", soft_wrap=True)
        for effect in its:
            console.print(f"  {escape(effect_text(effect))}", soft_wrap=True)
    if len(found) > 1:
        console.print(f"\n{ADJUSTED.format(len(found))}", soft_wrap=True)


def effect_text(effect: Effect) -> str:
    """Such as ``validation loss -0.0250 nats/token (-1.2 %): better; 95 % interval …, p 0.01, 6 pairs, …``."""
    (title, unit, digits), found = METRICS[effect.metric], effect.found
    if found.difference is None:
        return f"{title}: {found.verdict}; {_joined(effect.note, found.note)}"
    parts: list[str] = []
    if found.interval is not None and found.p_adjusted is not None:
        low, high = (f"{bound:+.{digits}f}" for bound in found.interval)
        parts.append(f"{100 * found.level:.4g} % interval {low} to {high}, p {found.p_adjusted:.2g}")
    if found.pairs:
        parts.append(f"{found.pairs} pair{'s' if found.pairs > 1 else ''}")
    if found.correlation is not None:
        parts.append(f"correlation {found.correlation:.2f}")
    if found.noise is not None and found.noise.seeds_saved_interval is not None:
        fewest, most = found.noise.seeds_saved_interval
        parts.append(f"pairing saved {found.noise.seeds_saved} ({fewest} to {most}) seeds per side")
    change = difference_text(effect.base + found.difference, effect.base, digits, unit)
    words = _joined(_in_words(found), ", ".join(parts), effect.note, found.note, *found.warnings)
    return f"{title} {change}: {words}"


def _in_words(found: Verdict) -> str:
    """The verdict, and where there is a delta also both answers."""
    if found.size is None or found.sentence.startswith(found.verdict):
        return found.verdict if found.size is None else found.sentence
    return f"{found.verdict}: {found.sentence}"


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
