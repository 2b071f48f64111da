"""Audit of the log of a keep-if-better loop: what its keeps and its gain can show, and what they cannot. No torch.

A log is a table with one row per run, in the order of the runs: a column with the metric, and if there are such columns
the code that ran (``commit``), whether it was kept (``status``), and a ``description``. ``statistics.audit`` has the
formulas.
"""

import dataclasses
import math
import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lightning_llm.ablate.names import NEGATED
from lightning_llm.ablate.table import Table, listed, number_of, read_table, text_of
from lightning_llm.io.untrusted import printable, shown
from lightning_llm.statistics import audit as chance
from lightning_llm.statistics.audit import ChanceGain, ChanceKeeps, Noise

REVISION = ("commit", "hash", "sha", "revision")
CODE = (*REVISION, "group", "id", "name")  # columns that name the code of a run
NO_CODE = {"", "-", "--", "?", "n/a", "na", "nan", "none", "null"}  # what logs write there for want of a name
NO_COMMIT = re.compile("0{4,}")
PLACE = ("trial", "experiment", "step", "iteration", "index", "run", "seed", "#", "")
STATUS = ("status", "decision", "kept", "keep", "result")
DESCRIPTION = ("description", "idea", "change", "notes", "message")
KEPT = {"keep", "kept", "accept", "accepted", "adopted", "yes", "true", "1"}
DISCARDED = {"discard", "discarded", "drop", "dropped", "reject", "rejected", "revert", "reverted", "no", "false", "0"}
FAILED = {"crash", "crashed", "fail", "failed", "error", "oom", "timeout", "diverged", "nan"}
# What a fair try leaves as it is. Not every word with "val": "value embeddings" are a part of the model.
COMPARED = re.compile(
    r"(?<![a-z])((re)?seed\w*|(evals?|evaluat\w*|metrics?)(?![a-z])|validation|val[ _-](set|split|tokens|batch|steps))",
    re.IGNORECASE,
)
MOST_TRIES = 10_000  # the exact distribution of keeps takes a second
MOST_NAMED = 5
RUNS = 5  # of the first and of the last kept code, which the advice asks for
FIRST_SEED = 1000  # of these runs: seeds that the loop most likely did not use
PLAIN = re.compile(r"\w+(\.\w+)*")


@dataclasses.dataclass(frozen=True)
class Try:
    """A run of a log.

    Attributes:
        name: Of its code, else its place.
        code: What names its code; empty: nothing.
        value: The metric; ``None``: it failed.
        status: In small letters; empty: none.
        description: Of the change; empty: none.
        is_zero: Whether it counts as failed only because its value is 0.
    """

    name: str
    code: str
    value: float | None
    status: str = ""
    description: str = ""
    is_zero: bool = False

    @property
    def is_kept(self) -> bool:
        """Whether the log says so."""
        return self.value is not None and self.status in KEPT


@dataclasses.dataclass(frozen=True)
class Step:
    """A kept try that was better than the best before.

    Attributes:
        name: Of the try.
        gain: Best value before less its own, in the metric's unit.
    """

    name: str
    gain: float


@dataclasses.dataclass(frozen=True)
class AtNoise:
    """Findings of an audit at one standard deviation of one run.

    Attributes:
        sd: The standard deviation.
        p_of_gain: Probability that useless tries give at least the gain of the log.
        remaining_gain: The gain less the mean of what useless tries give.
        shown_from: The smallest step that is shown, over all tries together (Bonferroni, 5%).
        shown: The steps that are shown.
        p_of_steps: A bound on the p of each step of the log, not adjusted for the number of tries.
    """

    sd: float
    p_of_gain: float
    remaining_gain: float
    shown_from: float
    shown: list[Step]
    p_of_steps: list[float]


@dataclasses.dataclass(frozen=True)
class Audit:
    """Findings of an audit of a log. Printing it prints sentences.

    Attributes:
        source: The file.
        metric: Its name.
        higher_is_better: Whether higher values are better.
        tries: Runs after the first one that have a value, without those that repeat a code.
        failed: Runs without one.
        zeros: Runs that count as failed because their value is 0, though their status is no failure.
        keeps: Tries that were kept.
        unlike_rule: Tries that the rule "keep if better than the best" would have decided otherwise.
        first: Value of the first run.
        last: Best value that was kept.
        first_name: Of the first run.
        last_name: Of the run with the best value that was kept.
        gain: How much better the last is than the first, above 0 if it is.
        chance_keeps: Keeps of useless tries.
        chance_gain: Gain of useless tries, in standard deviations of one run.
        noise: Of one run; ``None``: not known.
        steps: Kept tries that were better than the best before.
        names_code: Whether the log names the code of its runs; if not, none is known to have run several times.
        reruns: Names of code that ran several times.
        unlike_reruns: Those whose rows have different descriptions.
        suspects: Descriptions that speak of the seed or of the evaluation.
        has_status: Whether the log says what was kept.
        other_statuses: Statuses that are neither a keep, a discard, nor a failure. They count as not kept.
        revisions: Of the first run, and of the run with the best value that was kept; ``None``: they are not known.
        missing: Numbers of runs that the log leaves out.
    """

    source: str
    metric: str
    higher_is_better: bool
    tries: int
    failed: int
    zeros: int
    keeps: int
    unlike_rule: int
    first: float
    last: float
    first_name: str
    last_name: str
    gain: float
    chance_keeps: ChanceKeeps
    chance_gain: ChanceGain
    noise: Noise | None
    steps: list[Step]
    names_code: bool
    reruns: list[str]
    unlike_reruns: list[str]
    suspects: list[str]
    has_status: bool
    other_statuses: list[str]
    revisions: tuple[str, str] | None
    missing: int

    def __str__(self) -> str:
        return printable("\n".join(lines_of(self)))

    __repr__ = __str__

    def to_dict(self) -> dict[str, Any]:
        """All numbers, for JSON."""
        return dataclasses.asdict(self) | {"at_noise": [dataclasses.asdict(self.at_noise(sd)) for sd in self.sds]}

    @property
    def sds(self) -> list[float]:
        """Standard deviations of one run to look at: the estimate and both ends of its interval; none if not known."""
        if self.noise is None:
            return []
        if self.noise.interval is None:
            return [self.noise.sd]
        low, high = self.noise.interval
        return [low, self.noise.sd, high]

    def at_noise(self, sd: float) -> AtNoise:
        """Findings at a standard deviation of one run.

        Args:
            sd: In the metric's unit, above 0.
        """
        least = chance.shown_from(self.tries, sd)
        return AtNoise(
            sd=sd,
            p_of_gain=chance.p_of_gain(self.gain / sd, self.tries),
            remaining_gain=self.gain - sd * self.chance_gain.mean,
            shown_from=least,
            shown=[step for step in self.steps if step.gain >= least],
            p_of_steps=[chance.p_of_step(step.gain, sd) for step in self.steps],
        )


def audit(file: str | Path, *, metric: str | None = None, noise: float | None = None) -> Audit:
    """Audit the log of a keep-if-better loop.

    Args:
        file: CSV, TSV, or JSON lines, with a row for each run in their order.
        metric: The column of the metric; ``None``: the only one with numbers. With a minus before it, higher is better.
        noise: Standard deviation of one run, if it is known; ``None``: that of code that ran several times.

    Raises:
        ValueError: The table has no such column, a cell is no number, no status is known, fewer than two runs have a
            value, or more than 10,000.
        OSError: The file cannot be read.
    """
    if noise is not None and not (math.isfinite(noise) and noise > 0):
        raise ValueError(f"noise (--noise) must be above 0, got {noise}")
    table = read_table(Path(file))
    name = _metric_column(table, metric)
    sign = -1.0 if metric is not None and metric.startswith(NEGATED) else 1.0
    runs = _runs(table, name, sign)
    if _column(table, STATUS, name) is not None:
        _check_statuses(table, runs)
    known = sum(run.value is not None for run in runs)
    if known < 2:
        count = "one run" if known else "no run"
        raise ValueError(f"{table.source} has {count} with a value in {shown(name)}: an audit needs two or more")
    if known > MOST_TRIES:
        raise ValueError(f"{table.source} has {known} runs with a value, expected at most {MOST_TRIES}")
    return _audit(table, name, sign, runs, noise)


def _check_statuses(table: Table, runs: Sequence[Try]) -> None:
    """Check that the column of the status has a word that is known."""
    statuses = list(dict.fromkeys(run.status for run in runs))
    if not any(status in KEPT | DISCARDED | FAILED for status in statuses):
        found = listed(status or "empty cells" for status in statuses)
        raise ValueError(f"{table.source} has no status that is known, but {found}: expected keep, discard, or crash")


def _missing(table: Table, metric: str) -> int:
    """How many numbers of runs are left out, if the log numbers them."""
    place = _column(table, PLACE, metric)
    if place is None:
        return 0
    texts = [text_of(row[place]) for row in table.rows]
    if not all(text.isascii() and text.isdecimal() for text in texts) or len({*texts}) < len(texts):
        return 0
    numbers = [int(text) for text in texts]
    return max(numbers) - min(numbers) + 1 - len(numbers)


def _metric_column(table: Table, metric: str | None) -> str:
    """The column with the metric."""
    known = {*CODE, *PLACE, *STATUS, *DESCRIPTION}
    others = [name for name in table.columns if name.lower() not in known and _has_numbers(table, name)]
    if metric is None:
        if len(others) == 1:
            return others[0]
        if not others:
            raise ValueError(f"{table.source} has no column with a metric: its columns are {listed(table.columns)}")
        advice = f"give metric (--metric) as one of {listed(others)}, with a minus before it if higher is better"
        raise ValueError(f"{table.source} has several columns with numbers: {advice}")
    name = metric.removeprefix(NEGATED)
    if name not in table.columns:
        accepted = listed(others) or "the columns with numbers, and there is none"
        raise ValueError(f"metric (--metric) must be one of {accepted}: {table.source} has no column {shown(name)}")
    return name


def _has_numbers(table: Table, column: str) -> bool:
    """Whether most cells of a column that are not empty are numbers: one that is none is a mistake with a line."""
    place = table.columns.index(column)
    cells = [row[place] for row in table.rows if text_of(row[place])]
    return 2 * sum(map(_is_number, cells)) >= len(cells)


def _is_number(cell: object) -> bool:
    try:
        number_of(cell)
    except ValueError:
        return False
    return True


def _column(table: Table, names: Sequence[str], metric: str) -> int | None:
    """The place of the first of these columns that the table has; the metric's column is none of them."""
    by_word = {name.lower(): place for place, name in reversed(list(enumerate(table.columns))) if name != metric}
    return next((by_word[name] for name in names if name in by_word), None)


def _runs(table: Table, metric: str, sign: float) -> list[Try]:
    """The runs in their order, with values of which lower is better."""
    value_at = table.columns.index(metric)
    columns = [_column(table, names, metric) for names in (CODE, STATUS, DESCRIPTION, PLACE)]
    runs: list[Try] = []
    for number, (place, row) in enumerate(zip(table.places, table.rows, strict=True), 1):
        code, status, description, numbered = ("" if at is None else text_of(row[at]) for at in columns)
        status = status.lower()
        if code.lower() in NO_CODE or NO_COMMIT.fullmatch(code):
            code = ""
        value = None if status in FAILED else _value(table, row[value_at], place, metric)
        is_zero = value == 0  # logs write 0 for a run that crashed
        signed = None if value is None or is_zero else sign * value
        name = code or f"run {numbered or number}"
        runs.append(Try(name, code, signed, status, description, is_zero))
    return runs


def _value(table: Table, cell: object, place: str, metric: str) -> float | None:
    """The number in a cell; ``None``: the run failed."""
    if not text_of(cell):
        return None
    try:
        value = number_of(cell)
    except ValueError as error:
        raise ValueError(f"{table.source}, {place}, column {shown(metric)}: {error}") from None
    return None if math.isnan(value) else value


def _audit(table: Table, metric: str, sign: float, runs: Sequence[Try], noise: float | None) -> Audit:
    has_status = _column(table, STATUS, metric) is not None
    has_revisions = _column(table, REVISION, metric) is not None
    groups: dict[str, list[Try]] = {}
    tries: list[tuple[Try, float]] = []  # a code that ran again is no new try
    for run in runs:
        if run.value is None:
            continue
        if run.code not in groups:
            tries.append((run, run.value))
        if run.code:
            groups.setdefault(run.code, []).append(run)
    repeated = {name: group for name, group in groups.items() if len(group) > 1}
    (first, best), *later = tries
    if not later:
        raise ValueError(f"{table.source} has runs of one code alone ({shown(first.name)}): there is no try to audit")
    first_value = best
    last = first
    steps: list[Step] = []
    keeps = unlike_rule = 0
    for run, value in later:
        is_kept = run.is_kept if has_status else value < best
        keeps += is_kept
        unlike_rule += is_kept != (value < best)
        if is_kept and value < best:
            steps.append(Step(run.name, best - value))
            best = value
            last = run
    values = [[run.value for run in group if run.value is not None] for group in repeated.values()]
    known = KEPT | DISCARDED | FAILED | {""}
    return Audit(
        source=table.source,
        metric=metric,
        higher_is_better=sign < 0,
        tries=len(later),
        failed=sum(run.value is None for run in runs),
        zeros=sum(run.is_zero for run in runs),
        keeps=keeps,
        unlike_rule=unlike_rule,
        first=sign * first_value,
        last=sign * best,
        first_name=first.name,
        last_name=last.name,
        gain=first_value - best,
        chance_keeps=chance.chance_keeps(len(later), keeps),
        chance_gain=chance.chance_gain(len(later)),
        noise=chance.noise_of(values) if noise is None else Noise(noise),
        steps=steps,
        names_code=bool(groups),
        reruns=list(repeated),
        unlike_reruns=[name for name, group in repeated.items() if len({run.description for run in group}) > 1],
        suspects=[run.description for run in runs if COMPARED.search(run.description)],
        has_status=has_status,
        other_statuses=list(dict.fromkeys(run.status for run in runs if run.status not in known)),
        revisions=(first.code, last.code) if has_revisions and first.code and last.code else None,
        missing=_missing(table, metric),
    )


# ---- in words


def lines_of(found: Audit) -> list[str]:
    """Findings in sentences, with their limits."""
    parts = (_tries_lines, _keeps_lines, _gain_lines, _doubt_lines, _advice_lines)
    return [line for part in parts for line in part(found)]


def _tries_lines(found: Audit) -> Iterator[str]:
    failed = f"; {_count(found.failed, 'run', 'runs')} failed" if found.failed else ""
    better = "higher" if found.higher_is_better else "lower"
    yield (
        f"{found.source}: {found.metric}, {better} is better; a first run and {_count(found.tries, 'try', 'tries')}, "
        f"{found.keeps} kept{failed}."
    )
    if not found.has_status:
        yield "The log does not say what was kept: a try counts as kept if it is better than all before it."
    if found.other_statuses:
        yield f"These statuses count as not kept: {listed(found.other_statuses)}."
    if found.zeros:
        yield f"{_count(found.zeros, 'value is', 'values are')} 0 without the status of a failure, and counted as one."
    if found.missing:
        missing = _count(found.missing, "number of a run is", "numbers of runs are")
        yield f"{missing} missing, so there were more tries than the log shows, and chance keeps more than said here."
    if found.unlike_rule:
        others = _count(found.unlike_rule, "try was", "tries were")
        yield f"{others} decided otherwise than by being better than the best before, so chance may keep more."


def _keeps_lines(found: Audit) -> Iterator[str]:
    keeps, by_chance = found.keeps, found.chance_keeps
    yield (
        f"{_count(keeps, 'keep', 'keeps')}; without any true gain, {_count(found.tries, 'try gives', 'tries give')} "
        f"{by_chance.mean:.1f} on average, and at most {by_chance.most} in 95% of logs, if the bar is the best run and "
        f"is never measured again. Where the baseline is trained again for each try, chance keeps half of them."
    )
    if keeps > by_chance.most:
        explained = "So chance alone does not explain the keeps"
        if found.unlike_rule or found.missing:
            explained = "If every try is there and followed that rule, chance alone does not explain the keeps"
        yield f"{explained} (p {_p(by_chance.p)}); which ones are true, the log does not say."
        counts = [count for count in (2, 5, 10, 20) if count < keeps]
        bounds = [f"{chance.false_keeps_beside(count, found.tries):.0f} with {count}" for count in counts]
        if bounds:
            yield (
                "A true gain sets a new bar of average luck, so chance keeps more after it. The expected number of "
                f"false keeps is at most {bounds[0]} true gains{''.join(f', {bound}' for bound in bounds[1:])}."
            )
    else:
        yield "So chance alone may give this number of keeps."


def _gain_lines(found: Audit) -> Iterator[str]:
    by_chance = found.chance_gain
    if not found.steps:
        yield "No try that is better than the first run was kept, so there is no gain."
        return
    yield (
        f"From {found.first:g} to {found.last:g}, an apparent gain of {found.gain:.4g}. The last value is the best of "
        f"several runs, and so too good: {_count(found.tries, 'useless try gives', 'useless tries give')} an apparent "
        f"gain of {by_chance.mean:.1f} standard deviations of one run ({by_chance.low:.1f} to {by_chance.high:.1f} in "
        f"90% of logs), if runs are about normal."
    )
    noise = found.noise
    if noise is None:
        why = "No code ran twice" if found.names_code else "The log does not name the code of its runs"
        if found.reruns:
            why = f"All runs of {listed(found.reruns)} have the same value, perhaps with the same seed"
        yield (
            f"{why}, so this standard deviation is not known, and nothing about a single step can be tested. If you "
            "know it: --noise SD."
        )
        return
    if noise.interval is None:
        yield f"Noise, as given: {noise.sd:.4g}. It is taken to be that of all code in the log."
    else:
        low, high = noise.interval
        repeated = listed(found.reruns)
        if len(found.reruns) > MOST_NAMED:
            repeated = f"{len(found.reruns)} codes that ran several times"
        yield (
            f"Noise, from the runs of {repeated}: {noise.sd:.4g} (95% interval {low:.4g} to {high:.4g}), "
            "taken to be that of all code. If they had the same seed, the noise between seeds is missing from it."
        )
        if found.unlike_reruns:
            yield (
                f"The rows of {listed(found.unlike_reruns)} have different descriptions. If they are different "
                "changes, and not runs of the same code, this noise is wrong: give --noise SD."
            )
    levels = [found.at_noise(sd) for sd in found.sds]
    for level in levels:
        yield _at_noise(level)
    if any(level.shown for level in levels):
        yield "A step that is kept for being large looks larger than it is, on average, even if it is shown."


def _at_noise(level: AtNoise) -> str:
    named = ", ".join(f"{step.name} ({step.gain:.4g})" for step in level.shown[:MOST_NAMED])
    more = f" and {len(level.shown) - MOST_NAMED} more" if len(level.shown) > MOST_NAMED else ""
    steps = f"these single steps are shown: {named}{more}" if level.shown else "no single step is shown"
    return (
        f"With a standard deviation of {level.sd:.4g}: useless tries reach the gain with p {_p(level.p_of_gain)}; the "
        f"gain less what chance gives on average is {level.remaining_gain:.4g}; a single step is shown from "
        f"{level.shown_from:.4g} on, and {steps}."
    )


def _doubt_lines(found: Audit) -> Iterator[str]:
    if found.suspects:
        texts = "; ".join(shown(text) for text in found.suspects[:MOST_NAMED])
        more = f"; and {len(found.suspects) - MOST_NAMED} more" if len(found.suspects) > MOST_NAMED else ""
        count = _count(len(found.suspects), "description speaks", "descriptions speak")
        yield f"{count} of the seed or of the evaluation, which a fair try leaves as they are: {texts}{more}."


def _advice_lines(found: Audit) -> Iterator[str]:
    if not found.steps:
        return
    error = math.sqrt(2 / RUNS)
    yield (
        f"A cheap answer: {RUNS} new runs each of the first and of the last kept code, {found.first_name} and "
        f"{found.last_name}, with new seeds. Their difference is not selected, so it has no such bias, and a standard "
        f"error of {error:.2f} standard deviations of one run. It replaces the gain in the log."
    )
    revisions = "FIRST LAST"
    if found.revisions is not None and not any(name.startswith("-") for name in found.revisions):
        revisions = " ".join(shlex.quote(printable(name)) for name in found.revisions)
    metric = found.metric if PLAIN.fullmatch(found.metric) else "METRIC"
    yield (
        "In the repository, with your own command and pattern of the metric in its output: lightning-llm ablate run "
        f"--command 'python train.py --seed={{seed}}' --read '{metric}: {{number}}' "
        f"--metric {NEGATED * found.higher_is_better}{metric} --revisions {revisions} --pairs {RUNS} "
        f"--first-seed {FIRST_SEED}"
    )


def _p(p: float) -> str:
    return "below 0.0001" if p < 1e-4 else f"{p:.2g}"


def _count(number: int, one: str, several: str) -> str:
    return f"{number} {one if number == 1 else several}"
