"""``lightning-llm compare RUNS``: compare loss, time and peak memory across runs.

Each text has its own table. Each group of runs is compared with the first one, or that of ``--baseline``, by the rule
of ``statistics.verdict``; ``comparison`` says which runs are a group, and how two of them differ. Where
``MemoryProfiler`` sampled the same step, its memory is compared by category and module.
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
from lightning_llm.ablate.comparison import METRICS, Comparison, Effect, Group
from lightning_llm.ablate.words import pairs_in_words, parameter_excess, saved_in_words, simultaneous
from lightning_llm.cli.subcommand import OneLineParser, subcommand
from lightning_llm.io.atomic import write_json
from lightning_llm.io.console import Console, folded, room
from lightning_llm.statistics.verdict import Verdict
from lightning_llm.training.callbacks.memory_breakdown import POINTS, Breakdown, difference, last_breakdowns
from lightning_llm.training.metrics import BITS, RECALL, VAL_LOSS

MOST_COLUMNS = 5  # of options; more are combined in one
MOST_LINES = 3  # of a name in a narrow table; longer ones stand below it
NO_BITS = "validation loss: not compared, since the tokenizers differ and a run has no bits per byte"
OTHER_TEXT = "Runs on other texts are not compared with one another: each text has its own table."
ONE_RUN = "A difference of one run has no interval: lightning-llm ablate compares several seeds, until a verdict."
TENSORS_ONLY = (
    "These tables count the tensors of one step. The peak memory above is that of the process, or of the GPU's "
    "allocator, over the whole run."
)
ADJUSTED = "Intervals and p are adjusted for {} comparisons. {}"
Memory = tuple[int, Mapping[str, Breakdown]]  # a step, and its report of each group, by the group's name


def _options(parser: OneLineParser) -> None:
    parser.add_argument("runs", nargs="+", metavar="RUNS", help="run directories, or folders that contain runs")
    text = "smallest difference in validation loss that matters; sets when the verdict is `equivalent`"
    about = "compare the other groups with this run's group (default: the first run's)"
    parser.add_argument("--baseline", metavar="RUN", help=about)
    parser.add_argument("--delta", type=float, metavar="NATS", help=text)
    parser.add_argument("--paired", action="store_true", help="fail unless all groups can be compared in pairs of runs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the groups and effects to this file")


@subcommand(_options)
def run_compare(options: argparse.Namespace) -> None:
    """Compare loss, time, and peak memory across finished runs, grouped by the options that differ.

    The first run's group is the baseline. Each other group on the same text gets a difference with its 95% interval,
    and a verdict: better, worse, equivalent, or undecided. Runs with the same seeds are compared in pairs. Runs that
    have not finished are listed. Where MemoryProfiler sampled the same step of two groups, its memory is compared by
    category and module. For the folder of an experiment, the pairs and numbers of its report are printed.
    """
    # a file or a pipe gets lines of any length
    console = Console(markup=True, highlight=False, width=None if sys.stdout.isatty() else 200)
    if (experiment := next(filter(None, map(comparison.experiment_in, options.runs)), None)) is not None:
        if len(options.runs) > 1 or options.baseline or options.delta is not None:
            problem = "its plan has the baseline and delta: compare it alone, without --baseline and --delta"
            raise ValueError(f"{experiment} is an experiment, and {problem}")
        compared = comparison.compare_experiment(experiment)
    else:
        words = options.runs, options.baseline, options.delta
        compared = comparison.compare_runs(*words, must_pair=options.paired)
    show(compared, options.json, console)


def show(compared: Comparison, json: Path | None, console: Console) -> None:
    """Print the groups and effects of each text, and write them to a file if one is given."""
    sections = compared.sections
    memory = {text: _memory(groups) for text, (groups, _) in sections.items()}
    if json is not None:
        rows = [
            _row(text, group, own, memory[text])
            for text, (groups, effects) in sections.items()
            for group, own in zip(groups, [[], *effects], strict=True)
        ]
        write_json(json, rows)
    for text, (groups, effects) in sections.items():
        if len(sections) > 1:
            console.print(f"\nOn {escape(text)}:", soft_wrap=True)
        print_table(groups, console)
        print_effects(groups, effects, console)
        print_memory(groups, memory[text], console)
    for note in [*([OTHER_TEXT] if len(sections) > 1 else []), *compared.notes]:
        console.print(f"\n{escape(note)}", soft_wrap=True)


def _row(text: str, group: Group, effects: Sequence[Effect], memory: Memory) -> dict[str, Any]:
    step, reports = memory
    report = reports.get(group.name)
    row = dataclasses.asdict(dataclasses.replace(group, by_seed={}))
    del row["by_seed"], row["tokenizer"]
    row["text"] = text or None
    row["memory"] = None if report is None else {"step": step, **{point: report[point] for point in POINTS}}
    row["effects"] = []
    for effect in effects:
        note = _joined(effect.note, effect.verdict.note)
        row["effects"].append({"metric": effect.metric, **dataclasses.asdict(effect.verdict), "note": note})
    return row


def _joined(*notes: str) -> str:
    return "; ".join(filter(None, notes))


def print_table(groups: Sequence[Group], console: Console) -> None:
    """A row for each group: with a column for each option, else with its name, else with a number for the name."""
    names = list(dict.fromkeys(name for group in groups for name in group.options))
    for left_out in ((), RECALL):  # the parts of the loss if there is room for them
        wide = _table(groups, names if 0 < len(names) <= MOST_COLUMNS else [], console.width, left_out)
        if console.measure(wide, options=console.options.update(width=10_000)).maximum <= console.width:
            console.print(wide)
            return
    console.print(_table(groups, [], console.width, RECALL, is_narrow=True))


def _table(
    groups: Sequence[Group], names: Sequence[str], width: int, left_out: Sequence[str], *, is_narrow: bool = False
) -> Table:
    notes = ["± is the standard deviation over seeds"] if any(group.num_seeds > 1 for group in groups) else []
    table = Table(box=SIMPLE_HEAD if is_narrow else HEAVY_HEAD, pad_edge=not is_narrow, caption_justify="left")
    has_seeds = not is_narrow or any(group.num_seeds != len(group.runs) for group in groups)
    if len({group.tokenizer for group in groups}) == 1:
        left_out = [*left_out, BITS]
    known = {key for key in METRICS if key not in RECALL or any(key in group.measures for group in groups)}
    shown = [key for key in METRICS if key not in left_out and key in known]
    rows = []
    for group in groups:
        measured = [(group.measures.get(key), METRICS[key]) for key in shown]
        values = ["–" if measure is None else measure.text(digits) for measure, (_, _, digits) in measured]
        rows.append([str(len(group.runs)), *([str(group.num_seeds)] if has_seeds else []), *values])
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


def print_effects(groups: Sequence[Group], effects: Sequence[Sequence[Effect]], console: Console) -> None:
    """A line for each metric of each group but the first."""
    base = groups[0]
    for group, its in zip(groups[1:], effects, strict=True):
        names = escape(group.named_against(base)), escape(base.named_against(group))
        lines = [f"[bold]{names[0]}[/] versus {names[1]}"]
        if group.tokenizer != base.tokenizer and not any(effect.metric in (BITS, VAL_LOSS) for effect in its):
            lines.append(NO_BITS)
        lines += [escape(effect_text(effect)) for effect in its]
        if share := parameter_excess(group.parameters, base.parameters):
            counts = f"{group.parameters:,} versus {base.parameters:,}"
            lines.append(f"parameters are not equal: {counts} ({share:+.1%})")
        if group.steps and base.steps and group.steps != base.steps:
            steps = " versus ".join(", ".join(map(str, one.steps)) for one in (group, base))
            lines.append(f"steps are not equal: {steps}")
        console.print("\n" + "\n  ".join(lines), soft_wrap=True)
    verdicts = [effect.verdict for its in effects for effect in its]
    if any(verdict.difference is not None and verdict.sd is None for verdict in verdicts):
        console.print(f"\n{ONE_RUN}", soft_wrap=True)
    levels = [verdict.level for verdict in verdicts if verdict.interval is not None]
    if len(effects) > 1 and len(levels) > 1:
        together = 1 - len(effects) * (1 - levels[0])  # Bonferroni, as in ``statistics.verdict``
        console.print(f"\n{ADJUSTED.format(len(effects), simultaneous(together))}", soft_wrap=True)


def _memory(groups: Sequence[Group]) -> Memory:
    first_runs = {group.name: Path(group.runs[0]) for group in groups if group.runs}
    step, reports = last_breakdowns(list(first_runs.values()))
    return step, {name: reports[run] for name, run in first_runs.items() if run in reports}


def print_memory(groups: Sequence[Group], memory: Memory, console: Console) -> None:
    """The memory of a sampled step of each group's first run, by category and module, if two have one."""
    step, reports = memory
    if len(reports) < 2:
        return
    base, *others = (group for group in groups if group.name in reports)
    names = [base.named_against(others[0]), others[0].named_against(base)]
    if len(others) > 1:  # names of that many would not fit in a table
        names = [str(number) for number in range(1, len(others) + 2)]
        legend = [f"{number}: {group.name}" for number, group in zip(names, [base, *others], strict=True)]
        console.print(escape("\n".join(["", *legend])), soft_wrap=True)
    found = {name: reports[group.name] for name, group in zip(names, [base, *others], strict=True)}
    for point in POINTS:
        console.print()
        console.print(difference(found, point, step))
    console.print(TENSORS_ONLY, soft_wrap=True)


def effect_text(effect: Effect) -> str:
    """Such as ``validation loss -0.0250 nats/token (-1.2%): better; 95% interval …, p 0.01, 6 pairs, …``."""
    title, unit, digits = METRICS[effect.metric]
    verdict = effect.verdict
    if verdict.difference is None:
        return f"{title}: {verdict.verdict}; {_joined(effect.note, verdict.note)}"
    parts: list[str] = []
    if verdict.interval is not None and verdict.p_adjusted is not None:
        low, high = (f"{bound:+.{digits}f}" for bound in verdict.interval)
        parts.append(f"{100 * verdict.level:.4g}% interval {low} to {high}, p {verdict.p_adjusted:.2g}")
    if verdict.pairs:
        parts.append(pairs_in_words(verdict.pairs))
    if verdict.correlation is not None:
        parts.append(f"correlation {verdict.correlation:.2f}")
    if (noise := verdict.noise) and noise.seeds_saved is not None and noise.seeds_saved_interval is not None:
        parts.append(saved_in_words(noise.seeds_saved, noise.seeds_saved_interval))
    change = difference_text(effect.base + verdict.difference, effect.base, digits, unit)
    words = _joined(_in_words(verdict), ", ".join(parts), effect.note, verdict.note, *verdict.warnings)
    return f"{title} {change}: {words}"


def _in_words(verdict: Verdict) -> str:
    """The verdict, and where there is a delta also both answers."""
    if verdict.size is None or verdict.sentence.startswith(verdict.verdict):
        return verdict.verdict if verdict.size is None else verdict.sentence
    return f"{verdict.verdict}: {verdict.sentence}"


def difference_text(value: float, base: float, digits: int, unit: str) -> str:
    """A difference as ``+0.0250 nats/token (+1.2%)``; without the percentage if the values print as equal."""
    change = f"{value - base:+.{digits}f}"
    before = f"{base:.{digits}f}"
    if float(change) == 0:
        return f"{0:.{digits}f} {unit}"
    has_share = f"{value:.{digits}f}" != before and float(before) != 0
    return f"{change} {unit}" + (f" ({100 * (value - base) / base:+.1f}%)" if has_share else "")
