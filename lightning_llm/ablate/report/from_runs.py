"""The report of found runs: runs in groups, on one text each, and how each group differs from the first.

Runs are grouped by what their configs differ in; those that differ only in their seeds are one group. Losses are
compared in pairs of runs with the same seeds, if the hashes in their summaries say that they used the same batches and
initial values; otherwise, and for time and memory, two groups are independent samples. With another tokenizer, bits per
byte take the place of the loss. No torch.
"""

import dataclasses
import itertools
import math
import os
import re
import statistics
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_llm.ablate.experiment import ALPHA
from lightning_llm.ablate.names import PLAN
from lightning_llm.ablate.plan import RUNS
from lightning_llm.ablate.report.record import NO_VERDICT, VERSION, Mean, Pair, Row, StepMemory, Variant, row_of
from lightning_llm.ablate.report.report import Report
from lightning_llm.data.validated import LIMIT, is_whole
from lightning_llm.runs.event_files import EVENT_FILES, read_curves
from lightning_llm.runs.find import Run, find_runs
from lightning_llm.runs.names import THREADS, descriptions, made_different, option_columns
from lightning_llm.runs.options import SEEDS, identity
from lightning_llm.runs.status import read_summary, unfinished
from lightning_llm.statistics.design import NOT_SHOWN
from lightning_llm.statistics.pairing import BATCHES, INITIAL_VALUES, STEPS, VALIDATION_BATCHES, mismatch
from lightning_llm.statistics.verdict import Sample, Verdict, verdicts
from lightning_llm.training.callbacks.memory_breakdown import POINTS, last_breakdowns
from lightning_llm.training.metrics import BITS, LOSSES, MEMORY, METRICS, PEAK, PEAK_MEMORY, SECONDS, VAL_LOSS

OTHER_WINDOWS = (
    "the runs validated different windows of the text: train all with the same trainer.limit_val_batches, "
    "data.context_length and data.global_batch_size"
)
CAPTURED_ALONE = "times of runs with and without trainer.capture are not compared"
THREADS_DIFFER = "The runs used different numbers of threads, which changes bits and time: each number is a group."
OTHER_TEXT = "Runs on other texts are not compared with one another: each text has its own table."
NO_BITS = "validation loss not compared, since the tokenizers differ and a run has no bits per byte."
Results = Mapping[str, float]
Summaries = Mapping[Path, Mapping[str, Any]]  # the summary.json of each run


@dataclasses.dataclass(frozen=True)
class Group:
    """Runs that differ only in their seeds.

    Attributes:
        name: How it differs from the other groups.
        options: The same by option, as text.
        runs: Run directories.
        num_seeds: How many different seeds there are.
        means: By the keys of ``METRICS``; those that are known for each of the runs.
        by_seed: The runs of each seed, with their results.
        tokenizer: Losses per token of groups with another one cannot be compared.
        parameters: How many the model has; ``None``: not recorded.
        steps: Of its runs, each number once; empty: not recorded.
    """

    name: str
    options: Mapping[str, str]
    runs: Sequence[str]
    num_seeds: int
    means: Mapping[str, Mean]
    by_seed: Mapping[Hashable, Sequence[tuple[Run, Results]]]
    tokenizer: Hashable = None
    parameters: int | None = None
    steps: Sequence[int] = ()

    def values(self, metric: str, seeds: Sequence[Hashable] = ()) -> list[float]:
        """The metric of each seed, or of these: the mean over the runs of that seed."""
        runs = [self.by_seed[seed] for seed in seeds or self.by_seed]
        return [statistics.fmean(results[metric] for _, results in of_seed) for of_seed in runs]


# ---- which runs


def experiment_in(name: str) -> Path | None:
    """The folder of the experiment of ``ablate`` that a word of the command line names."""
    folders = (Path(name), Path(name).parent) if Path(name).name == RUNS else (Path(name),)
    return next((folder for folder in folders if (folder / PLAN).is_file() and (folder / RUNS).is_dir()), None)


def _skipped_experiments(names: Sequence[str]) -> list[str]:
    """The experiments in folders of the command line, whose runs are compared by their plan alone."""
    plans = (plan for name in names for depth in ("*", "*/*") for plan in Path(name).glob(f"{depth}/{PLAN}"))
    return sorted({str(plan.parent) for plan in plans if experiment_in(str(plan.parent))})


def compare_runs(names: Sequence[str], baseline: str | None, delta: float | None, *, must_pair: bool) -> list[Report]:
    """The reports of the finished runs in some folders, one for each text.

    Args:
        names: Folders.
        baseline: Run directory of a run whose group is the first; ``None``: that of the first run.
        delta: The smallest difference of the loss that matters.
        must_pair: Whether losses that cannot be compared in pairs are an error.

    Raises:
        ValueError: No run has finished, the baseline is none of them, or losses cannot be compared in pairs.
    """
    baseline_runs = [] if baseline is None else find_runs([baseline])
    if len(baseline_runs) > 1:
        raise ValueError(f"--baseline {baseline} holds {len(baseline_runs)} runs: give one of them")
    runs = find_runs([*(str(run.path) for run in baseline_runs), *names])
    status = {run.path: unfinished(run.path) for run in runs}
    left_out = [f"{path}: {problem}" for path, problem in status.items() if problem]
    summaries = {path: read_summary(path, (*METRICS, STEPS)) for path, problem in status.items() if not problem}
    finished = [_with_threads(run, summaries[run.path]) for run in runs if run.path in summaries]
    if not finished:
        raise ValueError(f"no run has finished: {', '.join(left_out)}")
    if baseline_runs and (problem := status[baseline_runs[0].path]):
        raise ValueError(f"--baseline {baseline} has not finished: {problem}")
    reports = []
    texts = _by_text(finished, summaries)
    for text, (members, tokenizers) in texts.items():
        results = [(run, metric_values(run.path, summaries[run.path])) for run in members]
        groups = group_runs(results, summaries, tokenizers)
        rows = rows_of_groups(groups, summaries, delta=delta, must_pair=must_pair)
        report = _report(text, groups, rows, delta)
        if any(_is_plain(summaries[run.path]) for run in members):  # its loss has the unit that the module gives it
            report.unit = VAL_LOSS
            report.rows = [dataclasses.replace(row, unit=row.metric) if row.metric == VAL_LOSS else row for row in rows]
        reports.append(report)
    notes = [OTHER_TEXT] if len(reports) > 1 else []
    notes += [THREADS_DIFFER] if len({run.options.get(THREADS) for run in finished} - {None}) > 1 else []
    for run in finished:
        changes = summaries[run.path].get("changed_on_resume", [])
        notes += [f"changed on resume: {run.path}, {change}" for change in changes]
    if experiments := _skipped_experiments(names):
        left_out.append(f"{', '.join(experiments)}: experiments, each of which is compared alone")
    reports[-1].notes += notes + [f"not compared: {line}" for line in left_out]
    return reports


def _report(text: str, groups: Sequence[Group], rows: Sequence[Row], delta: float | None) -> Report:
    others = len(groups) - 1
    compared = {row.metric for row in rows}
    metric = BITS if BITS in compared and VAL_LOSS not in compared else VAL_LOSS
    same_tokenizer = len({group.tokenizer for group in groups}) == 1
    variants = {group.name: _variant(group, has_bits=not same_tokenizer) for group in groups}
    step, memory = last_breakdowns([Path(group.runs[0]) for group in groups if group.runs])
    reports = {group.name: memory.get(Path(group.runs[0])) for group in groups if group.runs}
    sampled = {name: {point: one[point] for point in POINTS} for name, one in reports.items() if one is not None}
    no_bits = [
        f"{group.name}: {NO_BITS}"
        for group in groups[1:]
        if group.tokenizer != groups[0].tokenizer
        and not any(row.variant == group.name for row in rows if row.metric in LOSSES)
    ]
    return Report(
        version=VERSION,
        kind="runs",
        name=text,
        metric=metric,
        unit=METRICS[metric].unit,
        baseline=groups[0].name,
        delta=delta,
        alpha=ALPHA,
        level=1 - ALPHA / max(1, others),
        rows=list(rows),
        variants=variants,
        notes=no_bits + _other_steps(groups),
        memory=StepMemory(step=step, variants=sampled) if sampled else None,
    )


def _other_steps(groups: Sequence[Group]) -> list[str]:
    """Lines about groups whose runs have several numbers of steps; of others, ``Variant.steps`` tells."""
    base, *others = groups
    steps = {group.name: " and ".join(f"{number:,}" for number in group.steps) for group in groups}
    return [
        f"{group.name}: steps are not equal: {steps[group.name]} versus {steps[base.name]}."
        for group in others
        if group.steps and base.steps and group.steps != base.steps and len(group.steps) + len(base.steps) > 2
    ]


def _variant(group: Group, *, has_bits: bool) -> Variant:
    means = {name: mean for name, mean in group.means.items() if has_bits or name != BITS}
    return Variant(
        options=dict(group.options),
        runs=len(group.runs),
        seeds=group.num_seeds,
        folders=list(group.runs),
        means=means,
        steps=group.steps[0] if len(group.steps) == 1 else None,
        parameters=group.parameters,
    )


def _is_plain(summary: Mapping[str, Any]) -> bool:
    """Whether a run was validated by a module that does not know the perplexity, as each ``LanguageModel`` does."""
    return summary.get(VAL_LOSS) is not None and "perplexity" in summary and summary["perplexity"] is None


def _numbers(summary: Mapping[str, Any]) -> dict[str, float]:
    return {key: float(summary[key]) for key in METRICS if summary.get(key) is not None}


def _by_text(runs: Sequence[Run], summaries: Summaries) -> dict[str, tuple[list[Run], dict[Path, Hashable]]]:
    """By text, its runs and their tokenizers. Runs with the same validation batches have both in common."""
    by_batches: dict[str, tuple[str, Hashable]] = {}
    texts: dict[str, tuple[list[Run], dict[Path, Hashable]]] = {}
    for run in runs:
        key = (_text(run.options), _tokenizer(run.options))
        batches = summaries[run.path].get(VALIDATION_BATCHES)
        text, tokenizer = by_batches.setdefault(batches, key) if batches else key
        members, tokenizers = texts.setdefault(text, ([], {}))
        members.append(run)
        tokenizers[run.path] = tokenizer
    return texts


def _text(options: Mapping[str, Any]) -> str:
    """The text that a run was trained on, as far as its options tell; of a mixture, the stores without their shares."""
    if stores := sorted(name for name in options if name.startswith("data.mixture.")):
        return ", ".join(stores)
    for name in ("data", "data.path", "data.store", "data.corpus"):  # data: a class of the user's own
        if (value := options.get(name)) is not None:
            is_path = isinstance(value, str) and name in ("data.path", "data.store")
            return f"{name} {os.path.normpath(value) if is_path else value}"
    return "a text that is not recorded"


def _tokenizer(options: Mapping[str, Any]) -> Hashable:
    tokenizer = options.get("data.tokenizer")
    return identity(tokenizer), identity(options.get("data.vocab_size")) if tokenizer == "bpe" else None


def _parameters_in(summary: Mapping[str, Any]) -> int | None:
    """The number of parameters, by the shapes of the initial values; ``None``: not recorded."""
    shapes = [text.partition(" ")[0] for text in (summary.get(INITIAL_VALUES) or {}).values()]
    return sum(math.prod(map(int, re.findall("[0-9]{1,15}", shape))) for shape in shapes) or None


def _with_threads(run: Run, summary: Mapping[str, Any]) -> Run:
    """The run, and the number of threads as an option where its summary notes one: it changes bits and time."""
    threads = summary.get(THREADS)
    return dataclasses.replace(run, options={**run.options, THREADS: threads}) if run.options and threads else run


def metric_values(run: Path, summary: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a summary, by the keys of ``METRICS``; peak memory else from the curves of the memory profiler."""
    results = _numbers(summary)
    if PEAK_MEMORY not in results and (peak := _peak_in_curves(run)) is not None:
        results[PEAK_MEMORY] = peak
    return results


def group_runs(
    results: Sequence[tuple[Run, Results]],
    summaries: Summaries | None = None,
    tokenizers: Mapping[Path, Hashable] | None = None,
) -> list[Group]:
    """Groups in the order in which their first runs come."""
    runs = [run for run, _ in results]
    columns = option_columns(runs, SEEDS)
    by_options: dict[Hashable, list[int]] = {}
    for number, run in enumerate(runs):
        # without a config nothing is known to be the same
        key = tuple(column[number] for column in columns.values()) if run.options else run.path
        by_options.setdefault(key, []).append(number)
    names = descriptions(runs, leave_out=SEEDS)
    firsts = [numbers[0] for numbers in by_options.values()]
    titles = made_different([names[first] for first in firsts], [runs[first] for first in firsts])
    groups = []
    for title, first, numbers in zip(titles, firsts, by_options.values(), strict=True):
        options = {name: column[first] for name, column in columns.items()} if runs[first].options else {}
        members = [results[number] for number in numbers]
        groups.append(_group(title, options, members, summaries or {}, (tokenizers or {}).get(runs[first].path)))
    return groups


def _group(
    name: str,
    options: Mapping[str, str],
    members: Sequence[tuple[Run, Results]],
    summaries: Summaries,
    tokenizer: Hashable = None,
) -> Group:
    by_seed: dict[Hashable, list[tuple[Run, Results]]] = {}
    for run, results in members:
        by_seed.setdefault(identity(run.seed), []).append((run, results))
    means = {}
    for metric in METRICS:
        if members and all(metric in results for _, results in members):
            values = [statistics.fmean(results[metric] for _, results in runs) for runs in by_seed.values()]
            spread = statistics.stdev(values) if len(values) > 1 else None
            means[metric] = Mean(statistics.fmean(values), spread)
    paths = [str(run.path) for run, _ in members]
    own_summaries = [summaries.get(run.path, {}) for run, _ in members]
    parameters = next(filter(None, map(_parameters_in, own_summaries)), None)
    steps = sorted({int(summary[STEPS]) for summary in own_summaries if summary.get(STEPS)})
    return Group(name, options, paths, len(by_seed), means, by_seed, tokenizer, parameters, steps)


def rows_of_groups(
    groups: Sequence[Group], summaries: Summaries, *, delta: float | None = None, must_pair: bool = False
) -> list[Row]:
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
    if must_pair and not others:
        raise ValueError(f"{baseline.name} has no other group to be compared with; leave out --paired")
    partners = {group.name: _pairs(baseline, group, summaries) for group in others}
    if must_pair:
        for name, (seeds, why) in partners.items():
            if not seeds:
                raise ValueError(f"{name} and {baseline.name} are no pairs: {why}; leave out --paired")
    of_groups: dict[str, list[Row]] = {group.name: [] for group in others}
    reasons = {group.name: validated_otherwise(baseline, group, summaries) for group in others}
    for group in others:
        if reasons[group.name]:
            of_groups[group.name].append(_no_verdict(baseline, group, VAL_LOSS, reasons[group.name], len(others)))
    for metric, about in METRICS.items():
        compared: dict[str, tuple[Group, list[Hashable]]] = {}
        for group in others:
            loss = VAL_LOSS if group.tokenizer == baseline.tokenizer else BITS
            is_wanted = about.is_cost or ((loss == BITS) == (metric == BITS) and not reasons[group.name])
            if not (is_wanted and metric in baseline.means and metric in group.means):
                continue
            if metric == SECONDS and len(_captured(baseline, summaries) | _captured(group, summaries)) > 1:
                of_groups[group.name].append(_no_verdict(baseline, group, metric, CAPTURED_ALONE, len(others)))
            else:
                compared[group.name] = group, [] if about.is_cost else partners[group.name][0]
        sign = -1 if about.higher_is_better else 1
        samples = {
            name: Sample(
                [sign * value for value in baseline.values(metric, seeds)],
                [sign * value for value in group.values(metric, seeds)],
                is_paired=bool(seeds),
                has_seeds=not about.is_cost,
            )
            for name, (group, seeds) in compared.items()
        }
        metric_delta = delta if metric == VAL_LOSS else None  # delta is in nats per token
        for name, found in verdicts(samples, delta=metric_delta, alpha=ALPHA, variants=len(others)).items():
            seeds, why = partners[name]
            note = "" if about.is_cost else why if seeds else f"not paired: {why}"
            found = dataclasses.replace(found, note="; ".join(filter(None, (note, found.note))))
            of_groups[name].append(_row(baseline, compared[name], metric, found, samples[name]))
    return [row for rows in of_groups.values() for row in rows]


def _row(
    baseline: Group, compared: tuple[Group, Sequence[Hashable]], metric: str, found: Verdict, sample: Sample
) -> Row:
    """The row of a group in a metric."""
    group, seeds = compared
    names = [_seed_of(baseline.by_seed[seed][0][0]) for seed in seeds]
    pairs = [Pair(*pair) for pair in zip(names, sample.baseline, sample.variant, strict=True)] if seeds else []
    return row_of(
        found,
        by_seed=pairs,
        higher_is_better=METRICS[metric].higher_is_better,
        variant=group.name,
        baseline=baseline.name,
        metric=metric,
        unit=METRICS[metric].unit,
        baseline_mean=statistics.fmean(map(_float, sample.baseline)),
        mean=statistics.fmean(map(_float, sample.variant)),
        runs_of_sides=None if sample.is_paired else (len(sample.baseline), len(sample.variant)),
    )


def _seed_of(run: Run) -> int | str:
    """The seed of a run, or both of its seeds if those of weights and data differ."""
    seeds = list(dict.fromkeys(seed for seed in run.seed if seed is not None))
    if len(seeds) == 1 and isinstance(seeds[0], int):
        return seeds[0]
    return ", ".join(map(str, seeds)) or "none"


def _float(value: float | None) -> float:
    return math.nan if value is None else value


def validated_otherwise(baseline: Group, group: Group, summaries: Summaries) -> str:
    """Why the losses of two groups are of different validation windows; empty if they are not, as far as it is known.

    Another tokenizer makes other windows of the same text. It is the same text only if all of it was validated.
    """
    runs = [run for of_group in (baseline, group) for of_seed in of_group.by_seed.values() for run, _ in of_seed]
    hashes = {summaries.get(run.path, {}).get(VALIDATION_BATCHES) for run in runs} - {None}
    if baseline.tokenizer == group.tokenizer:
        is_same = len(hashes) < 2
    else:
        is_same = all(is_whole(run.options.get(LIMIT)) for run in runs)
    return "" if is_same else OTHER_WINDOWS


def _captured(group: Group, summaries: Summaries) -> set[bool]:
    """Whether its runs captured the training step; earlier versions could not."""
    runs = [run for of_seed in group.by_seed.values() for run, _ in of_seed]
    return {bool(summaries.get(run.path, {}).get("capture")) for run in runs}


def _no_verdict(baseline: Group, group: Group, metric: str, why: str, others: int) -> Row:
    """In place of a verdict on values that cannot be compared."""
    found = Verdict(
        verdict=NO_VERDICT,
        direction=NOT_SHOWN,
        sentence=NO_VERDICT,
        has_ended=True,
        pairs=0,
        level=1 - ALPHA / others,
        diverged=0,
        baseline_diverged=0,
        note=why,
        warnings=[],
    )
    unit = METRICS[metric].unit
    return row_of(found, variant=group.name, baseline=baseline.name, metric=metric, unit=unit)


def _pairs(baseline: Group, group: Group, summaries: Summaries) -> tuple[list[Hashable], str]:
    """The seeds that both groups have if all their runs are pairs; else none, and why. A note if seeds are left out."""
    seeds = [seed for seed in baseline.by_seed if seed in group.by_seed]
    if not seeds:
        return [], "no seed in common"
    if len(seeds) == 1 and min(baseline.num_seeds, group.num_seeds) > 1:
        return [], "only one seed in common"
    for seed in seeds:
        for (first, _), (second, _) in itertools.product(baseline.by_seed[seed], group.by_seed[seed]):
            excused = () if baseline.tokenizer == group.tokenizer else (BATCHES, VALIDATION_BATCHES)
            if why := mismatch(summaries.get(first.path, {}), summaries.get(second.path, {}), excused):
                return [], f"seed {first.seed[0]}: {why}"
    unpaired = baseline.num_seeds + group.num_seeds - 2 * len(seeds)
    return seeds, f"{unpaired} seed{'s' if unpaired > 1 else ''} without a partner left out" if unpaired else ""


def _peak_in_curves(run: Path) -> float | None:
    if not any(run.glob(EVENT_FILES)):
        return None
    curves = read_curves(run, lambda name: name.startswith(MEMORY) and name.endswith(PEAK))
    return max((value for curve in curves.values() for _, value in curve), default=None)
