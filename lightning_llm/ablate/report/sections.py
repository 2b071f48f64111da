"""A report as sections of paragraphs, tables, and figures: the same ones for the terminal, a page, and a notebook.

The first section is what was found. ``render.py`` prints all of them.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any
from urllib.parse import quote

import msgspec

from lightning_llm.ablate.ratios import ratio_in_words
from lightning_llm.ablate.report import figures, words
from lightning_llm.ablate.report.record import EFFECTS, ReportRecord, Row, Variant
from lightning_llm.ablate.words import milliseconds, percent, signed, tested_in_words
from lightning_llm.io.units import MIB, shown_duration
from lightning_llm.training.callbacks.memory_breakdown import POINTS, difference
from lightning_llm.training.metrics import METRICS, RECALL

WIDEST = 28  # characters of a column of memory; longer names stand above the table
TENSORS_ONLY = (
    "These tables count the tensors of one step. The peak memory in the table of groups is that of the process, or of "
    "the GPU's allocator, over the whole run."
)
SPREAD = "± is the standard deviation over seeds."
P_ADJUSTED, WINDOW_ERROR = "p adj.", "window error"
REPORT, PAGE, FIGURES = "report.json", "report.html", "figures"


@dataclasses.dataclass(frozen=True)
class Table:
    """Titles above rows of cells.

    Attributes:
        head: The titles.
        rows: The cells.
        is_text: Whether columns are flush left; numbers are flush right.
        is_detail: Whether only a page has it.
        fold: Title of the fold that hides it on a page; empty: it is not hidden.
        optional: Titles of columns that a narrow terminal leaves out.
        folded: Titles of further columns whose cells it shows in lines that end at their commas.
        names: All names that the first column may have, so that several tables number them alike.
    """

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    is_text: bool = False
    is_detail: bool = False
    fold: str = ""
    optional: Sequence[str] = ()
    folded: Sequence[str] = ()
    names: Sequence[str] = ()


@dataclasses.dataclass(frozen=True)
class Figure:
    """Figure that ``draw`` draws on a row of axes.

    Attributes:
        name: Of its files.
        draw: Takes the axes.
        height: In inches.
        columns: Number of axes.
        caption: Below it.
    """

    name: str
    draw: Callable[[Sequence[Any]], None]
    height: float
    columns: int = 1
    caption: str = ""


@dataclasses.dataclass(frozen=True)
class Diff:
    """Git's summary of what a revision changes, and the file with all of it."""

    name: str
    summary: str
    path: str


@dataclasses.dataclass(frozen=True)
class Caption:
    """A paragraph that explains a table; only a page has it."""

    text: str


Part = str | Table | Figure | Diff | Caption


@dataclasses.dataclass(frozen=True)
class Section:
    """Parts under a title; the paragraphs are texts."""

    title: str
    parts: Sequence[Part]


@dataclasses.dataclass(frozen=True)
class Document:
    """A report as it is shown.

    Attributes:
        title: Of the report.
        about: Below the title: what is compared, and how.
        found: What was found.
        sections: What else there is to know.
        footer: Environment and plan.
    """

    title: str
    about: Sequence[Part]
    found: Section
    sections: Sequence[Section]
    footer: Sequence[str]

    @property
    def figures(self) -> list[Figure]:
        """All figures."""
        return [part for section in (self.found, *self.sections) for part in section.parts if isinstance(part, Figure)]


def document_of(report: ReportRecord) -> Document:
    """The sections of a report."""
    make = {"sizes": _of_sizes, "stream": _of_stream, "runs": _of_runs}.get(report.kind, _of_experiment)
    return make(report)


def verdict_table(report: ReportRecord, rows: Sequence[Row]) -> Table:
    """The table of comparisons, with a column for each thing in which rows differ."""
    has_sizes = any(row.size is not None for row in rows)
    are_pairs = all(row.runs_of_sides is None for row in rows)
    has_multiplier = any(row.multiplier is not None for row in rows)
    has_p = any(row.p_adjusted is not None for row in rows) or not any(row.is_tested for row in rows)
    head = ["variant", *(["size"] if has_sizes else [])]
    head += ["pairs" if are_pairs else "runs", "difference", f"{percent(report.level)} interval"]
    has_windows = any(row.window_error is not None for row in rows)
    head += [*([WINDOW_ERROR] if has_windows else []), *([P_ADJUSTED] if has_p else [])]
    head += [*(["e-value"] if report.is_batch else []), "verdict"]
    head += ["× compute"] if has_multiplier else []
    cells = []
    for row in rows:
        titles = [words.title_of(report, row), *([row.size or "–"] if has_sizes else [])]
        times = "–" if row.multiplier is None else f"{row.multiplier:.2f}"
        own = _cells(row, has_p=has_p, has_windows=has_windows)
        own[-1:] = words.adoption_cells(row, has_ended=report.has_ended) if report.is_batch else own[-1:]
        cells.append([*titles, *own, *([times] if has_multiplier else [])])
    return Table(head, cells, optional=[WINDOW_ERROR])


def _cells(row: Row, *, has_p: bool, has_windows: bool = False) -> list[str]:
    """Pairs, difference, interval, the error over windows and adjusted p if there are any, and verdict."""
    if not row.is_tested:
        return ["–"] * (4 + has_windows + has_p)
    count = str(row.pairs) if row.runs_of_sides is None else " and ".join(map(str, row.runs_of_sides))
    others = []
    if has_windows:
        error = row.window_error
        others.append("–" if error is None else f"{error.mean:.{words.digits_of(row)}f}")
    if has_p:
        others.append(words.p_of(row))
    return [count, words.difference_of(row), words.interval_of(row), *others, words.SHORT.get(row.verdict, row.verdict)]


def _pairs_table(report: ReportRecord) -> list[Part]:
    """The values that everything else is computed from."""
    rows = [
        [
            _title_of_pairs(row),
            str(pair.seed),
            _digits(pair.baseline, 6),
            _digits(pair.variant, 6),
            signed(pair.difference, words.digits_of(row)),
        ]
        for row in report.rows
        for pair in row.by_seed
    ]
    metrics = {row.metric for row in report.rows if row.by_seed}
    metric = "value" if len(metrics) > 1 else report.metric
    head = ["variant", "seed", f"baseline's {metric}", f"variant's {metric}", "difference"]
    return [Table(head, rows, is_detail=True, fold="The pairs")] if rows else []


def _title_of_pairs(row: Row) -> str:
    if row.kind in EFFECTS:
        return f"{row.label} ({words.OF_EFFECT[row.kind]})"
    return row.label if row.size is None else f"{row.label}, {row.size}"


def _footer(report: ReportRecord) -> list[str]:
    facts = {name: value for name, value in report.environment.items() if value is not None}
    design = report.design
    if design is not None and design.commit:
        facts["lightning-llm"] = design.commit
    environment = "; ".join(f"{name} {value}" for name, value in facts.items())
    return [*([environment] if environment else []), *([f"Plan {design.plan}"] if design is not None else [])]


def _differences_figure(report: ReportRecord) -> Figure:
    height = 1.3 + 0.55 * sum(row.metric == report.metric for row in report.results)
    return Figure("differences", partial(figures.differences, report=report), height)


# ---- an experiment, and a table of losses


def _of_experiment(report: ReportRecord) -> Document:
    design = report.design
    about: list[Part] = []
    if design is not None:
        tested = f"; {tested_in_words(design.tested_after)}" if design.tested_after else ""
        about = [f"{words.about(report)}, at the last step; alpha {report.alpha:g}{tested}; plan {design.plan[:12]}"]
        about += [] if report.has_ended else [words.UNFINISHED]
        about.append(Table(["variant", "what it is"], [[*row] for row in _what(report)], is_text=True))
        about += [Diff(name, stat, f"diffs/{quote(name)}.patch") for name, stat in design.diffs.items()]
    about += words.design_lines(report)
    all_hold = [words.simultaneous(report.together)] if report.together else []
    all_hold += words.batch_lines(report) if report.is_batch else []
    table = verdict_table(report, report.results)
    found = Section(
        "Differences from the baseline",
        [_differences_figure(report), table, *all_hold, *words.verdict_lines(report)],
    )
    each: list[Section] = []
    if report.effects:
        each = [Section("Each combination against the baseline", found.parts)]
        found = _of_effects(report)
    noise = Section("Noise", [*words.noise_lines(report), *_pairs_table(report)])
    sections = [*each, noise, *_tuning(report), *_curves(report), *_cost(report)]
    return Document(report.name, about, found, [section for section in sections if section.parts], _footer(report))


def _of_effects(report: ReportRecord) -> Section:
    """Whether factors add up: the effects in a figure, a table, and sentences."""
    rows = report.effects
    figure = Figure("effects", partial(figures.effects, report=report), 1.3 + 0.55 * len(rows))
    head = ["effect", "what it is", "pairs", "difference", "interval", P_ADJUSTED, "verdict"]
    cells = []
    for row in rows:
        count, difference, interval, *others = _cells(row, has_p=True)
        if row.interval is not None and row.level is not None:  # each kind of effect has its own
            interval = f"{interval} ({percent(row.level)})"
        cells.append([row.label, words.OF_EFFECT[row.kind], count, difference, interval, *others])
    table = Table(head, cells, optional=("what it is", P_ADJUSTED))
    return Section("Do they add up?", [figure, table, *words.effect_lines(report)])


def _what(report: ReportRecord) -> list[tuple[str, str]]:
    return [(name, variant.what) for name, variant in report.variants.items()]


def _tuning(report: ReportRecord) -> list[Section]:
    if report.tuning is None:
        return []
    drawn = [Figure("tuning", partial(figures.tuning, report=report), 3.4)] if report.tuning.variants else []
    return [Section("Tuning curves", [*drawn, *words.tuning_lines(report)])]


def _curves(report: ReportRecord) -> list[Section]:
    if report.baseline not in report.curves:
        return []
    caption = (
        "Left: mean over the seeds that all variants have, with a band of one standard deviation. Right: paired "
        "differences from the baseline at equal shares of the run, with their 95% interval at each point by itself."
    )
    title = report.metric if report.design is not None and report.design.command else "Validation loss"
    figure = Figure("curves", partial(figures.curves, report=report), 3.6, columns=2, caption=caption)
    return [Section(f"{title} during training", [figure])]


def _cost(report: ReportRecord) -> list[Section]:
    if report.spent is None or report.design is None:
        return []
    parts: list[Part] = []
    if any(variant.step is not None for variant in report.variants.values()):
        parts.append(Figure("cost", partial(figures.costs, report=report), 3.4, columns=2))
    parts.append(_run_table(report) if report.design.command else _step_table(report))
    what = report.metric if report.design.command else "loss"
    parts.append(Caption(f"A variant's {what} is the baseline's mean plus the paired difference."))
    return [Section("Cost", [*parts, *words.cost_lines(report)])]


def _step_table(report: ReportRecord) -> Table:
    head = ["variant", report.metric, "sd over seeds", "steps", "parameters", "FLOPs per token"]
    head += ["ms per step (p20 to p80)", "× baseline", "peak MiB", "loss difference at equal time"]
    rows = []
    for name, variant in report.variants.items():
        own = variant.means.get(report.metric)
        counts = [variant.steps, variant.parameters, variant.flops_per_token]
        cells = [name, _digits(report.mean_of(name), 5), _digits(None if own is None else own.sd)]
        cells += ["–" if count is None else f"{count:,.0f}" for count in counts]
        step = variant.step
        if step is None:
            cells += ["–"] * 3
        else:
            times = [milliseconds(seconds) for seconds in (step.step_s, step.step_p20_s, step.step_p80_s)]
            cells += ["{} ({} to {})".format(*times), ratio_in_words(step)]
            cells += ["–" if step.peak_bytes is None else f"{step.peak_bytes / MIB:.4g}"]
        curve = report.curves.get(name)
        rows.append([*cells, signed(None if curve is None else curve.at_equal_time)])
    return Table(head, rows, is_detail=True)


def _run_table(report: ReportRecord) -> Table:
    """Time and memory of the runs of a command."""
    head = ["variant", report.metric, "sd over seeds", "seconds of a run", "peak GiB"]
    rows = []
    for name, variant in report.variants.items():
        own = variant.means.get(report.metric)
        cells = [_digits(variant.run_seconds, 4), _digits(variant.run_memory_gib)]
        rows.append([name, _digits(report.mean_of(name), 5), _digits(None if own is None else own.sd), *cells])
    return Table(head, rows, is_detail=True)


def _digits(value: float | None, digits: int = 3) -> str:
    return "–" if value is None else f"{value:.{digits}g}"


# ---- sizes


def _of_sizes(report: ReportRecord) -> Document:
    facts = report.sizes
    assert facts is not None
    about: list[Part] = [f"{words.about(report)}, {facts.pairs} pairs at each size, alpha {report.alpha:g} per size"]
    about += [] if report.has_ended else [words.UNFINISHED]
    about += words.design_lines(report)
    times = (
        "× compute: how many times the baseline's compute would give the variant's loss, by the slope of the "
        "baseline's own losses between the sizes, which is taken as exact. FLOPs are counted, with head and attention."
    )
    figure = Figure("sizes", partial(figures.sizes, report=report), 4.2)
    results = list(report.of_kind("result"))
    found = Section(
        "Does it hold at larger scale?",
        [figure, verdict_table(report, results), Caption(times), *words.size_lines(report)],
    )
    more = [[row.variant, row.size or "–", *_of_size(row), row.sentence] for row in results]
    head = ["variant", "size", "FLOPs of a run", "× compute, interval", "in words"]
    details = Section("Differences at each size", [Table(head, more, is_detail=True), *_pairs_table(report)])
    head = ["size", "FLOPs of a run", "parameters", "steps", f"baseline's {report.metric}", "report"]
    rows = [
        [
            size,
            f"{each.compute:.2e}",
            *("–" if count is None else f"{count:,}" for count in (each.parameters, each.steps)),
            "–" if each.mean is None else f"{each.mean:.4f}",
            f"sizes/{size}/{PAGE}",
        ]
        for size, each in facts.sizes.items()
    ]
    return Document(
        report.name, about, found, [details, Section("Sizes", [Table(head, rows, is_detail=True)])], _footer(report)
    )


def _of_size(row: Row) -> list[str]:
    ends = "–" if row.multiplier_interval is None else "{:.2f} to {:.2f}".format(*row.multiplier_interval)
    return ["–" if row.compute is None else f"{row.compute:.2e}", ends]


# ---- a stream


def _of_stream(report: ReportRecord) -> Document:
    ideas = list(report.of_kind("result"))
    parts: list[Part] = []
    if ideas:
        caption = (
            "The line is the baseline: each step is the difference of the fresh pairs that confirmed an idea. A dot is "
            "an idea, with its 95% interval, beside the baseline that it was compared with."
        )
        parts = [Figure("baseline", partial(figures.staircase, report=report), 3.6, caption=caption)]
        parts.append(_ideas_table(ideas, _confirmed(report)))
    found = Section("The baseline, and what was tried", [*parts, *words.stream_lines(report)])
    sections = []
    if ideas:
        reasons = [[_title(row), _because(row), row.verdict, row.sentence] for row in ideas]
        table = Table(["idea", "because", "verdict", "reason"], reasons, is_text=True, is_detail=True)
        numbers = [_evidence_table(report), *_pairs_table(report), words.ABOUT_STREAM]
        sections = [Section("Ideas", [table]), Section("Numbers", numbers)]
    about = f"{report.metric}; {words.direction_line(report)}"
    return Document(report.name, [about], found, sections, _footer(report))


def _because(row: Row) -> str:
    return "–" if row.idea is None or not row.idea.because else row.idea.because


def _title(row: Row) -> str:
    return row.variant if row.idea is None else f"{row.idea.place}. {row.variant}"


def _confirmed(report: ReportRecord) -> dict[int, Row]:
    """The rows of fresh pairs by the place of their idea."""
    return {row.idea.place: row for row in report.of_kind("confirmation") if row.idea is not None}


def _ideas_table(ideas: Sequence[Row], confirmed: Mapping[int, Row]) -> Table:
    """The ideas; the difference of one that was confirmed is that of its fresh pairs."""
    head = ["idea", "verdict", "pairs", "difference", "95% interval"]
    rows = []
    for idea in ideas:
        row = confirmed.get(idea.idea.place, idea) if idea.idea is not None else idea
        pairs = f"{row.pairs} fresh" if row is not idea else str(row.pairs)
        rows.append([words.idea_title(idea), row.verdict, pairs, words.difference_of(row), words.interval_of(row)])
    return Table(head, rows)


def _evidence_table(report: ReportRecord) -> Table:
    """The evidence for each idea, what it needed, and what it took."""
    is_earlier = any(row.idea is not None and row.idea.e_value is not None for row in report.rows)
    evidence = ["e-value", "threshold"] if is_earlier else ["p", "level"]
    head = ["idea", "pairs of the screen", "difference", "interval", *evidence, "runs", "time of runs"]
    rows = []
    for row in report.of_kind("result"):
        idea = row.idea
        if idea is None:
            continue
        found, needed = (idea.e_value, idea.threshold) if is_earlier else (idea.p, idea.level)
        cells = [str(row.pairs), words.difference_of(row), words.interval_of(row)]
        cells += ["–" if number is None else f"{number:.3g}" for number in (found, needed)]
        rows.append([words.idea_title(row), *cells, str(idea.runs), shown_duration(idea.run_seconds)])
    return Table(head, rows, is_detail=True)


# ---- found runs


def _of_runs(report: ReportRecord) -> Document:
    base = report.variants[report.baseline]
    others = {name: variant for name, variant in report.variants.items() if name != report.baseline}
    titles = {
        name: f"{_named(name, own, base)} versus {_named(report.baseline, base, own)}" for name, own in others.items()
    }
    lines = [line for name, own in others.items() for line in words.inequality_lines(titles[name], own, base)]
    rows = list(report.of_kind("result"))
    if any(row.difference is not None and row.sd is None for row in rows):
        lines.append(words.ONE_RUN)
    in_words = msgspec.structs.replace(report, rows=[_titled(row, titles[row.variant]) for row in report.rows])
    values = [_titled(row, words.title_of(in_words, row)) for row in in_words.rows]
    parts: list[Part] = []
    if rows:
        has_intervals = any(row.interval is not None and row.metric == report.metric for row in rows)
        drawn = [_differences_figure(report)] if has_intervals else []
        several = len(others) > 1 and sum(row.interval is not None for row in rows) > 1
        adjusted = f"Intervals and p are adjusted for {len(others)} comparisons."
        all_hold = [f"{adjusted} {words.simultaneous(1 - report.alpha)}"] if several else []
        parts = [*drawn, _runs_table(report, rows), *all_hold, *words.verdict_lines(in_words), *lines]
    found = Section("Differences from the first group", [*parts, *report.notes])
    about: list[Part] = [_groups_table(report)]
    means = [mean for own in report.variants.values() for mean in own.means.values()]
    about += [SPREAD] if any(mean.sd is not None for mean in means) else []
    about += [f"The first group is the baseline; {words.direction_line(report)}"] if others else []
    noise = Section(
        "Noise", [*words.noise_lines(in_words), *_pairs_table(msgspec.structs.replace(report, rows=values))]
    )
    sections = [section for section in (noise, _memory(report)) if section.parts]
    return Document(f"Runs on {report.name}", about, found, sections, _footer(report))


def _named(name: str, own: Variant, other: Variant) -> str:
    """The part of a group's name that differs from another group, if that is less than the whole name."""
    names = [option for option, value in own.options.items() if value != other.options.get(option)]
    is_less = 0 < len(names) < len(own.options) and other.options.keys() == own.options.keys()
    return ", ".join(f"{option}={own.options[option]}" for option in names) if is_less else name


def _titled(row: Row, title: str) -> Row:
    """The row under another name."""
    return dataclasses.replace(row, variant=title)


def _runs_table(report: ReportRecord, rows: Sequence[Row]) -> Table:
    """The comparisons with their metrics; a narrow terminal leaves out what the sentences have too."""
    table = verdict_table(report, rows)
    cells = [[row.variant, _metric(row), *each[1:]] for row, each in zip(rows, table.rows, strict=True)]
    head = ["group", "metric", *table.head[1:]]
    optional = [title for title in ("pairs", "runs", P_ADJUSTED) if title in head]
    return Table(head, cells, optional=optional, folded=["metric"], names=list(report.variants))


def _metric(row: Row) -> str:
    metric = METRICS.get(row.metric)
    return row.metric if metric is None or row.unit == row.metric else f"{metric.title}, {row.unit}"


def _memory(report: ReportRecord) -> Section:
    """The memory of a sampled step of each group's first run, by category and module."""
    if report.memory is None or len(report.memory.variants) < 2:
        return Section("Memory", [])
    names = list(report.memory.variants)
    if len(names) == 2:
        first, second = (report.variants[name] for name in names)
        names = [_named(names[0], first, second), _named(names[1], second, first)]
    is_short = len(names) == 2 and max(map(len, names)) <= WIDEST
    titles = names if is_short else [str(number) for number in range(1, len(names) + 1)]
    parts: list[Part] = [] if is_short else [f"{number}: {name}" for number, name in zip(titles, names, strict=True)]
    for point, title in POINTS.items():
        of_point = [of_group[point] for of_group in report.memory.variants.values()]
        head, rows = difference(dict(zip(titles, of_point, strict=True)))
        parts += [f"{title.format(report.memory.step)}:", Table(head, rows)]
    return Section("Memory of a step", [*parts, TENSORS_ONLY])


def _groups_table(report: ReportRecord) -> Table:
    known = [name for name in METRICS if any(name in variant.means for variant in report.variants.values())]
    several = any(variant.seeds != variant.runs for variant in report.variants.values())
    units = {name: METRICS[name].unit for name in known} | {report.metric: report.unit}
    titles = {name: name if units[name] == name else f"{METRICS[name].title},\n{units[name]}" for name in known}
    head = ["runs", *(["seeds"] if several else []), *titles.values()]
    rows = []
    for name, variant in report.variants.items():
        cells = [str(variant.runs), *([str(variant.seeds)] if several else [])]
        for metric in known:
            mean = variant.means.get(metric)
            digits = METRICS[metric].digits
            spread = "" if mean is None or mean.sd is None else f" ± {mean.sd:.{digits}f}"
            cells.append("–" if mean is None else f"{mean.value:.{digits}f}{spread}")
        rows.append([name, *cells])
    optional = [titles[name] for name in known if name in RECALL]
    return Table(["group", *head], rows, optional=optional, names=list(report.variants))
