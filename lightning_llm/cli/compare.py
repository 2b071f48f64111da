"""``lightning-llm compare RUNS``: compare loss, time and peak memory across runs.

Each text has its own table. Each group of runs is compared with the first one, or that of ``--baseline``, by the rule
of ``statistics.verdict``; ``comparison`` says which runs are a group, and how two of them differ.
"""

import argparse
import dataclasses
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.box import HEAVY_HEAD, SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from lightning_llm.ablate import comparison
from lightning_llm.ablate.comparison import BITS, METRICS, Effect, Group
from lightning_llm.ablate.words import UNEQUAL, pairs_in_words, saved_in_words
from lightning_llm.cli.tool import OneLineParser, tool
from lightning_llm.io.atomic import write_json
from lightning_llm.io.console import Console, folded, room
from lightning_llm.runs.names import THREADS, find_runs
from lightning_llm.runs.status import read_summary, unfinished
from lightning_llm.statistics.pairing import STEPS
from lightning_llm.statistics.verdict import Verdict

THREADS_DIFFER = "The runs used different numbers of threads, which changes bits and time: each number is a group."
MOST_COLUMNS = 5  # of options; more are combined in one
MOST_LINES = 3  # of a name in a narrow table; longer ones stand below it
NO_BITS = "validation loss: not compared, since the tokenizers differ and a run has no bits per byte"
OTHER_TEXT = "Runs on other texts are not compared with one another: each text has its own table."
ONE_RUN = "A difference of one run has no interval: lightning-llm ablate compares several seeds, until a verdict."
ADJUSTED = "Intervals and p are adjusted for {} comparisons: all intervals hold together with a probability of 95%."


def _options(parser: OneLineParser) -> None:
    parser.add_argument("runs", nargs="+", metavar="RUNS", help="run directories, or folders that contain runs")
    text = "smallest difference of validation loss that matters; without one that large, the verdict is `equivalent`"
    about = "compare the others with this run's group (default: the first run's)"
    parser.add_argument("--baseline", metavar="RUN", help=about)
    parser.add_argument("--delta", type=float, metavar="NATS", help=text)
    parser.add_argument("--paired", action="store_true", help="fail unless all groups can be compared in pairs of runs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the groups and effects to this file too")


@tool(_options)
def run_compare(options: argparse.Namespace) -> None:
    """Compare loss, time and peak memory across finished runs, grouped by the options that differ.

    The first run's group is the baseline. Each other group on the same text gets a difference with its 95% interval,
    and a verdict: better, worse, equivalent or undecided. Runs with the same seeds are compared in pairs. Runs that
    have not finished are listed. The folder of an experiment gives the pairs and numbers of its report.
    """
    # a file or a pipe gets lines of any length
    console = Console(markup=True, highlight=False, width=None if sys.stdout.isatty() else 200)
    if (experiment := next(filter(None, map(comparison.experiment_in, options.runs)), None)) is not None:
        if len(options.runs) > 1 or options.baseline or options.delta is not None:
            problem = "its plan has the baseline and delta: compare it alone, without --baseline and --delta"
            raise ValueError(f"{experiment} is an experiment, and {problem}")
        show({"": comparison.compare_experiment(experiment)}, options.json, console)
        command = f"lightning-llm ablate report {escape(str(experiment))}"
        console.print(f"\nThe rest of the report: {command}", soft_wrap=True)
        return
    baseline = [] if options.baseline is None else find_runs([options.baseline])
    if len(baseline) > 1:
        raise ValueError(f"--baseline {options.baseline} holds {len(baseline)} runs: give one of them")
    runs = find_runs([*(str(run.path) for run in baseline), *options.runs])
    status = {run.path: unfinished(run.path) for run in runs}
    left_out = [f"{path}: {words}" for path, words in status.items() if words]
    finished = [comparison.with_threads(run) for run in runs if not status[run.path]]
    if not finished:
        raise ValueError(f"no run has finished: {', '.join(left_out)}")
    if baseline and (words := status[baseline[0].path]):
        raise ValueError(f"--baseline {options.baseline} has not finished: {words}")
    summaries = {run.path: read_summary(run.path, (*METRICS, STEPS)) for run in finished}
    sections = {}
    for text, (members, tokenizers) in comparison.by_text(finished, summaries).items():
        results = [(run, comparison.read_results(run.path)) for run in members]
        groups = comparison.group_runs(results, summaries, tokenizers)
        sections[text] = groups, comparison.effects(groups, summaries, delta=options.delta, must_pair=options.paired)
    show(sections, options.json, console)
    if len({run.options.get(THREADS) for run in finished} - {None}) > 1:
        console.print(f"\n{THREADS_DIFFER}", soft_wrap=True)
    for run in finished:
        for change in summaries[run.path].get("changed_on_resume", []):
            console.print(f"\nchanged on resume: {escape(str(run.path))}, {escape(change)}", soft_wrap=True)
    if skipped := comparison.skipped_experiments(options.runs):
        left_out.append(f"{', '.join(skipped)}: experiments, each of which is compared alone")
    if left_out:
        console.print()
    for line in left_out:
        console.print(f"not compared: {escape(line)}", soft_wrap=True)


def show(
    sections: Mapping[str, tuple[Sequence[Group], Sequence[Sequence[Effect]]]], json: Path | None, console: Console
) -> None:
    """Print the groups and effects of each text, and write them to a file if one is given."""
    if json is not None:
        rows = [each for groups, found in sections.values() for each in zip(groups, [[], *found], strict=True)]
        write_json(json, [_row(group, its) for group, its in rows])
    for text, (groups, found) in sections.items():
        if len(sections) > 1:
            console.print(f"\nOn {escape(text)}:", soft_wrap=True)
        print_table(groups, console)
        print_effects(groups, found, console)
    if len(sections) > 1:
        console.print(f"\n{OTHER_TEXT}", soft_wrap=True)


def _row(group: Group, found: Sequence[Effect]) -> dict[str, Any]:
    names = [field.name for field in dataclasses.fields(group) if field.name not in ("by_seed", "tokenizer")]
    row = {name: getattr(group, name) for name in names}
    row["measures"] = {name: dataclasses.asdict(measure) for name, measure in group.measures.items()}
    row["effects"] = [
        {"metric": each.metric, **dataclasses.asdict(each.found), "note": _joined(each.note, each.found.note)}
        for each in found
    ]
    return row


def _joined(*notes: str) -> str:
    return "; ".join(filter(None, notes))


def print_table(groups: Sequence[Group], console: Console) -> None:
    """A row for each group: with a column for each option, else with its name, else with a number for the name."""
    names = list(dict.fromkeys(name for group in groups for name in group.options))
    wide = _table(groups, names if 0 < len(names) <= MOST_COLUMNS else [], console.width)
    is_wide = console.measure(wide, options=console.options.update(width=10_000)).maximum <= console.width
    console.print(wide if is_wide else _table(groups, [], console.width, is_narrow=True))


def _table(groups: Sequence[Group], names: Sequence[str], width: int, *, is_narrow: bool = False) -> Table:
    notes = ["± is the standard deviation over seeds"] if any(group.seeds > 1 for group in groups) else []
    table = Table(box=SIMPLE_HEAD if is_narrow else HEAVY_HEAD, pad_edge=not is_narrow, caption_justify="left")
    has_seeds = not is_narrow or any(group.seeds != len(group.runs) for group in groups)
    shown = [key for key in METRICS if key != BITS or len({group.tokenizer for group in groups}) > 1]
    rows = []
    for group in groups:
        values = [found.text(METRICS[key][2]) if (found := group.measures.get(key)) else "–" for key in shown]
        rows.append([str(len(group.runs)), *([str(group.seeds)] if has_seeds else []), *values])
    titles = ["runs", *(["seeds"] if has_seeds else [])]
    titles += [f"{METRICS[key][0]},{chr(10) if is_narrow else ' '}{METRICS[key][1]}" for key in shown]
    lines = [[*title.split("\n"), *(row[place] for row in rows)] for place, title in enumerate(titles)]
    labels = [group.name for group in groups]
    if is_narrow:
        left = room(width, lines)
        labels = [folded(label, left) for label in labels]
    if any(label.count("\n") >= MOST_LINES for label in labels):
        notes = [*(f"{number}: {group.name}" for number, group in enumerate(groups, 1)), *notes]
        labels = [str(number) for number, _ in enumerate(groups, 1)]
    table.caption = escape("\n".join(notes)) or None
    for name in names or ["run"]:
        table.add_column(escape(name), overflow="fold")
    for title in titles:
        table.add_column(title, justify="right", no_wrap=True)
    for group, label, row in zip(groups, labels, rows, strict=True):
        cells = [group.options.get(name, "–") for name in names] or [label]
        table.add_row(*map(escape, cells), *row)
    return table


def print_effects(groups: Sequence[Group], found: Sequence[Sequence[Effect]], console: Console) -> None:
    """A line for each metric of each group but the first."""
    for group, its in zip(groups[1:], found, strict=True):
        ours, theirs = (escape(each.named_against(other)) for each, other in ((group, groups[0]), (groups[0], group)))
        console.print(f"\n[bold]{ours}[/] versus {theirs}", soft_wrap=True)
        if group.tokenizer != groups[0].tokenizer and not any(effect.metric == BITS for effect in its):
            console.print(f"  {NO_BITS}", soft_wrap=True)
        for effect in its:
            console.print(f"  {escape(effect_text(effect))}", soft_wrap=True)
        own, base = group.parameters, groups[0].parameters
        if own and base and abs(own - base) > UNEQUAL * base:
            words = f"{own:,} versus {base:,} ({100 * (own / base - 1):+.1f}%)"
            console.print(f"  parameters are not equal: {words}", soft_wrap=True)
        if group.steps and groups[0].steps and group.steps != groups[0].steps:
            ours, theirs = (", ".join(map(str, each.steps)) for each in (group, groups[0]))
            console.print(f"  steps are not equal: {ours} versus {theirs}", soft_wrap=True)
    verdicts = [effect.found for its in found for effect in its]
    if any(each.difference is not None and each.interval is None for each in verdicts):
        console.print(f"\n{ONE_RUN}", soft_wrap=True)
    if len(found) > 1 and sum(each.interval is not None for each in verdicts) > 1:
        console.print(f"\n{ADJUSTED.format(len(found))}", soft_wrap=True)


def effect_text(effect: Effect) -> str:
    """Such as ``validation loss -0.0250 nats/token (-1.2%): better; 95% interval …, p 0.01, 6 pairs, …``."""
    (title, unit, digits), found = METRICS[effect.metric], effect.found
    if found.difference is None:
        return f"{title}: {found.verdict}; {_joined(effect.note, found.note)}"
    parts: list[str] = []
    if found.interval is not None and found.p_adjusted is not None:
        low, high = (f"{bound:+.{digits}f}" for bound in found.interval)
        parts.append(f"{100 * found.level:.4g}% interval {low} to {high}, p {found.p_adjusted:.2g}")
    if found.pairs:
        parts.append(pairs_in_words(found.pairs))
    if found.correlation is not None:
        parts.append(f"correlation {found.correlation:.2f}")
    if (noise := found.noise) and noise.seeds_saved is not None and noise.seeds_saved_interval is not None:
        parts.append(saved_in_words(noise.seeds_saved, noise.seeds_saved_interval))
    change = difference_text(effect.base + found.difference, effect.base, digits, unit)
    words = _joined(_in_words(found), ", ".join(parts), effect.note, found.note, *found.warnings)
    return f"{title} {change}: {words}"


def _in_words(found: Verdict) -> str:
    """The verdict, and where there is a delta also both answers."""
    if found.size is None or found.sentence.startswith(found.verdict):
        return found.verdict if found.size is None else found.sentence
    return f"{found.verdict}: {found.sentence}"


def difference_text(value: float, base: float, digits: int, unit: str) -> str:
    """A difference as ``+0.0250 nats/token (+1.2%)``; without the percentage if the values print as equal."""
    change, before = f"{value - base:+.{digits}f}", f"{base:.{digits}f}"
    if float(change) == 0:
        return f"{0:.{digits}f} {unit}"
    has_share = f"{value:.{digits}f}" != before and float(before) != 0
    return f"{change} {unit}" + (f" ({100 * (value - base) / base:+.1f}%)" if has_share else "")
