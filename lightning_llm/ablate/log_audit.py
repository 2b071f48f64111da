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

CODE = ("commit", "hash", "sha", "revision", "group", "id", "name")  # columns that name the code of a run
PLACE = ("trial", "experiment", "step", "iteration", "index", "run", "seed", "#", "")
STATUS = ("status", "decision", "kept", "keep", "result")
DESCRIPTION = ("description", "idea", "change", "notes", "message")
KEPT = {"keep", "kept", "accept", "accepted", "adopted", "yes", "true", "1"}
FAILED = {"crash", "crashed", "fail", "failed", "error", "oom", "timeout", "diverged", "nan"}
COMPARED = re.compile(r"\b(seeds?|eval\w*|val\w*|metrics?)\b", re.IGNORECASE)  # what a fair try leaves as it is
MOST_NAMED = 5
RUNS = 5  # of the first and of the last kept code, which the advice asks for


@dataclasses.dataclass(frozen=True)
class Try:
    """A run of a log.

    Attributes:
        name: Of its code, else its place.
        value: The metric; ``None``: it failed.
        is_kept: Whether it was kept.
        description: Of the change; empty: none.
    """

    name: str
    value: float | None
    is_kept: bool
    description: str = ""


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
class Audit:
    """What a log can show. Printing it prints sentences.

    Attributes:
        source: The file.
        metric: Its name.
        higher_is_better: Whether higher values are better.
        tries: Runs after the first one that have a value.
        failed: Runs without one.
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
        reruns: Names of code that ran several times.
        suspects: Descriptions that speak of the seed or of the evaluation.
        has_status: Whether the log says what was kept.
        has_code: Whether it names the code of each run.
        missing: Numbers of runs that the log leaves out.
    """

    source: str
    metric: str
    higher_is_better: bool
    tries: int
    failed: int
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
    reruns: list[str]
    suspects: list[str]
    has_status: bool
    has_code: bool
    missing: int

    def __str__(self) -> str:
        return "\n".join(lines_of(self))

    __repr__ = __str__

    def to_dict(self) -> dict[str, Any]:
        """All numbers, for JSON."""
        return dataclasses.asdict(self)

    def shown_steps(self, sd: float) -> list[Step]:
        """The steps that are shown at a standard deviation of one run, over all tries together."""
        least = chance.shown_from(self.tries, sd)
        return [step for step in self.steps if step.gain >= least]


def audit(file: str | Path, *, metric: str | None = None, noise: float | None = None) -> Audit:
    """Audit the log of a keep-if-better loop.

    Args:
        file: CSV, TSV, or JSON lines, with a row for each run in their order.
        metric: The column of the metric; ``None``: the only one with numbers. With a minus before it, higher is better.
        noise: Standard deviation of one run, if it is known; ``None``: that of code that ran several times.

    Raises:
        ValueError: The table has no such column, a cell is no number, or fewer than two runs have a value.
        OSError: The file cannot be read.
    """
    if noise is not None and not (math.isfinite(noise) and noise > 0):
        raise ValueError(f"noise (--noise) must be above 0, got {noise}")
    table = read_table(Path(file))
    name = _metric_column(table, metric)
    sign = -1.0 if metric is not None and metric.startswith(NEGATED) else 1.0
    runs, has_status = _runs(table, name, sign)
    known = [run for run in runs if run.value is not None]
    if len(known) < 2:
        count = "no run" if not known else "one run"
        raise ValueError(f"{table.source} has {count} with a value in {shown(name)}: an audit needs two or more")
    found = _audit(table.source, name, sign, runs, noise, has_status=has_status)
    return dataclasses.replace(found, has_code=_column(table, CODE) is not None, missing=_missing(table))


def _missing(table: Table) -> int:
    """How many numbers of runs are left out, if the log numbers them."""
    place = _column(table, PLACE)
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
    place = table.columns.index(column)
    for row in table.rows:
        try:
            number_of(row[place])
        except ValueError:
            if text_of(row[place]):
                return False
    return True


def _column(table: Table, names: Sequence[str]) -> int | None:
    by_word = {name.lower(): place for place, name in reversed(list(enumerate(table.columns)))}
    return next((by_word[name] for name in names if name in by_word), None)


def _runs(table: Table, metric: str, sign: float) -> tuple[list[Try], bool]:
    """The runs in their order, with values of which lower is better; whether the log says what was kept."""
    value_at = table.columns.index(metric)
    code, status, description = (_column(table, names) for names in (CODE, STATUS, DESCRIPTION))
    place_at = _column(table, PLACE)
    runs: list[Try] = []
    for number, (place, row) in enumerate(zip(table.places, table.rows, strict=True), 1):
        said = "" if status is None else text_of(row[status]).lower()
        value = None if said in FAILED else _value(table, row[value_at], place, metric, sign)
        is_kept = said in KEPT and value is not None
        own = "" if code is None else text_of(row[code])
        named = own or (f"run {text_of(row[place_at])}" if place_at is not None else f"run {number}")
        runs.append(Try(named, value, is_kept, "" if description is None else text_of(row[description])))
    return runs, status is not None


def _value(table: Table, cell: object, place: str, metric: str, sign: float) -> float | None:
    """A value of which lower is better; ``None``: the run failed. Logs write 0 for a run that crashed."""
    if not text_of(cell):
        return None
    try:
        value = number_of(cell)
    except ValueError as error:
        raise ValueError(f"{table.source}, {place}, column {shown(metric)}: {error}") from None
    return None if math.isnan(value) or value == 0 else sign * value


def _audit(
    source: str, metric: str, sign: float, runs: Sequence[Try], noise: float | None, *, has_status: bool
) -> Audit:
    groups: dict[str, list[float]] = {}
    for run in runs:
        if run.value is not None:
            groups.setdefault(run.name, []).append(run.value)
    reruns = [name for name, values in groups.items() if len(values) > 1]
    seen: set[str] = set()
    tries = []  # a code that ran again is no new try
    for run in runs:
        if run.value is not None and run.name not in seen:
            tries.append((run, run.value))
            seen.add(run.name)
    (first, best), *later = tries
    first_value, best_name = best, first.name
    steps: list[Step] = []
    keeps = unlike_rule = 0
    for run, value in later:
        is_kept = run.is_kept if has_status else value < best
        keeps += is_kept
        unlike_rule += is_kept != (value < best)
        if is_kept and value < best:
            steps.append(Step(run.name, best - value))
            best, best_name = value, run.name
    if not later:
        raise ValueError(f"{source} has runs of one code alone ({shown(first.name)}): there is no try to audit")
    return Audit(
        source=source,
        metric=metric,
        higher_is_better=sign < 0,
        tries=len(later),
        failed=sum(run.value is None for run in runs),
        keeps=keeps,
        unlike_rule=unlike_rule,
        first=sign * first_value,
        last=sign * best,
        first_name=first.name,
        last_name=best_name,
        gain=first_value - best,
        chance_keeps=chance.chance_keeps(len(later), keeps),
        chance_gain=chance.chance_gain(len(later)),
        noise=chance.noise_of(list(groups.values())) if noise is None else Noise(noise),
        steps=steps,
        reruns=reruns,
        suspects=[run.description for run in runs if COMPARED.search(run.description)],
        has_status=has_status,
        has_code=False,
        missing=0,
    )


# ---- in words


def lines_of(found: Audit) -> list[str]:
    """What a log shows, and what it does not, in sentences."""
    parts = (_tries_lines, _keeps_lines, _gain_lines, _doubt_lines, _advice_lines)
    return [line for part in parts for line in part(found)]


def _tries_lines(found: Audit) -> Iterator[str]:
    failed = f"; {found.failed} runs failed" if found.failed > 1 else "; 1 run failed" if found.failed else ""
    better = "higher" if found.higher_is_better else "lower"
    yield (
        f"{found.source}: {found.metric}, {better} is better; a first run and {_count(found.tries, 'try', 'tries')}, "
        f"{found.keeps} kept{failed}."
    )
    if not found.has_status:
        yield "The log does not say what was kept: a try counts as kept if it is better than all before it."
    if found.missing:
        missing = _count(found.missing, "number is", "numbers are")
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
        p = "below 0.0001" if by_chance.p < 1e-4 else f"{by_chance.p:.2g}"
        yield f"So chance alone does not explain the log (p {p}); which keeps are true, the log does not say."
        counts = [count for count in (2, 5, 10, 20) if count < keeps]
        bounds = [f"{chance.false_keeps_beside(count, found.tries):.0f} beside {count}" for count in counts]
        if bounds:
            yield (
                "A true gain sets a new bar of average luck, so chance keeps more after it. Up to so many false keeps "
                f"are expected beside so many true gains: {', '.join(bounds)}."
            )
    else:
        yield "So the number of keeps is one that chance alone may give."


def _gain_lines(found: Audit) -> Iterator[str]:
    by_chance = found.chance_gain
    yield (
        f"From {found.first:g} to {found.last:g}, an apparent gain of {found.gain:.4g}. The last value is the best of "
        f"several runs, and so too good: {_count(found.tries, 'useless try gives', 'useless tries give')} an apparent "
        f"gain of {by_chance.mean:.1f} standard deviations of one run ({by_chance.low:.1f} to {by_chance.high:.1f} in "
        f"90% of logs), if runs are about normal."
    )
    if found.noise is None:
        yield (
            "No code ran twice, so this standard deviation is not known, and nothing about a single step can be "
            "tested. If you know it: --noise SD."
        )
        return
    noise = found.noise
    if noise.interval is None:
        yield f"Noise, as given: {noise.sd:.4g}. It is taken to be that of all code in the log."
        yield from _at_noise(found, noise.sd)
        return
    low, high = noise.interval
    repeated = _count(len(found.reruns), "code that ran several times", "codes that ran several times")
    within = f"(95% interval {low:.4g} to {high:.4g})"
    yield f"Noise, from {repeated}: {noise.sd:.4g} {within}, taken to be that of all code."
    for sd in (low, noise.sd, high):
        yield from _at_noise(found, sd)


def _at_noise(found: Audit, sd: float) -> Iterator[str]:
    p = chance.p_of_gain(found.gain / sd, found.tries)
    shown_p = "below 0.0001" if p < 1e-4 else f"{p:.2g}"
    rest = found.gain - sd * found.chance_gain.mean
    shown_steps = found.shown_steps(sd)
    least = chance.shown_from(found.tries, sd)
    named = ", ".join(f"{printable(step.name)} ({step.gain:.4g})" for step in shown_steps[:MOST_NAMED])
    more = f" and {len(shown_steps) - MOST_NAMED} more" if len(shown_steps) > MOST_NAMED else ""
    steps = f"these single steps are shown: {named}{more}" if shown_steps else "no single step is shown"
    yield (
        f"With a standard deviation of {sd:.4g}: useless tries reach the gain with p {shown_p}; the gain less what "
        f"chance gives is {rest:.4g}; a single step is shown from {least:.4g} on, and {steps}."
    )


def _doubt_lines(found: Audit) -> Iterator[str]:
    if found.suspects:
        texts = "; ".join(shown(text) for text in found.suspects[:MOST_NAMED])
        count = _count(len(found.suspects), "description speaks", "descriptions speak")
        yield f"{count} of the seed or of the evaluation, which a fair try leaves as they are: {texts}."
    if found.noise is not None and found.steps:
        yield "A step that is shown is smaller in truth than it looks, since it was kept for being large."


def _advice_lines(found: Audit) -> Iterator[str]:
    first, last = found.first_name, found.last_name
    if last == first:
        return
    error = math.sqrt(2 / RUNS)
    yield (
        f"Cheap and conclusive: {RUNS} new runs each of the first and of the last kept code, {printable(first)} and "
        f"{printable(last)}. Their difference has no bias, and an error of {error:.2f} standard deviations of one run."
    )
    revisions = "FIRST LAST"
    if found.has_code and not any(name.startswith("-") for name in (first, last)):
        revisions = f"{shlex.quote(printable(first))} {shlex.quote(printable(last))}"
    yield (
        "In the repository, with a command that takes a seed: lightning-llm ablate run "
        f"--command '… {{seed}}' --revisions {revisions} --pairs {RUNS}"
    )


def _count(number: int, one: str, several: str) -> str:
    return f"{number} {one if number == 1 else several}"
