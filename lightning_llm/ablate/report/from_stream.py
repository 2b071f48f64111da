"""The report of a stream of ideas: a row for each idea, and one for the fresh pairs that confirmed it. No torch."""

from collections.abc import Sequence
from typing import Any

from lightning_llm.ablate.names import BASELINE, NEGATED
from lightning_llm.ablate.report import words
from lightning_llm.ablate.report.record import VERSION, Idea, Pair, Row, StreamFacts, Variant, row_of
from lightning_llm.ablate.report.report import Report
from lightning_llm.ablate.stream import Confirmation, Mean, Stream, gain_of, pairs_of
from lightning_llm.ablate.stream import Verdict as IdeaVerdict
from lightning_llm.ablate.words import pairs_in_words, parameter_excess, signed
from lightning_llm.io.units import shown_duration
from lightning_llm.io.untrusted import printable
from lightning_llm.statistics.design import BETTER, NOT_SHOWN
from lightning_llm.statistics.verdict import Verdict
from lightning_llm.training.metrics import VAL_LOSS, unit_of_metric

RULE = "screen and confirm, LOND"
LEVEL = 0.95  # of each interval


def stream_report(stream: Stream) -> Report:
    """The ideas of a stream and its settings; of a final one, with the values of all pairs."""
    first = next(iter(stream.verdicts), None)
    name = VAL_LOSS if first is None else first.metric
    metric = name.removeprefix(NEGATED)
    higher_is_better = metric != name
    unit = unit_of_metric(metric) if first is None else first.unit
    rows = [row for verdict in stream.verdicts for row in rows_of_idea(stream, verdict)]
    names = dict.fromkeys(verdict.name for verdict in stream.verdicts)
    unfinished = stream.unfinished
    return Report(
        version=VERSION,
        kind="stream",
        name=stream.out.name,
        folder=str(stream.out),
        metric=metric,
        unit=unit,
        higher_is_better=higher_is_better,
        alpha=stream.record.alpha,
        level=LEVEL,
        has_ended=unfinished is None,
        rows=rows,
        variants={BASELINE: Variant(), **{name: Variant() for name in names}},
        stream=StreamFacts(
            rule=RULE,
            looks=list(stream.record.looks),
            minimal_gain=stream.record.minimal_gain,
            configs=list(stream.record.asked.baseline),
            fit_options=list(stream.record.asked.options),
            adopted=[verdict.place for verdict in stream.adopted],
            gain=(-1 if higher_is_better else 1) * sum(gain_of(verdict) for verdict in stream.adopted),
            run_seconds=stream.run_seconds,
            is_final=stream.is_final,
            unfinished="" if unfinished is None else unfinished.name,
            next_level=None if stream.is_final else stream.next_level,
            pair_sd=stream.pair_sd,
        ),
        environment=dict(stream.record.environment),
    )


def rows_of_idea(stream: Stream | None, verdict: IdeaVerdict) -> list[Row]:
    """The row of an idea, and that of its confirming pairs.

    Args:
        stream: The idea's, if its pairs may be shown because it is final.
        verdict: Of the idea.
    """
    metric = verdict.metric.removeprefix(NEGATED)
    by_seed: dict[str, list[dict[str, Any]]] = {}
    if stream is not None and stream.is_final:
        by_seed = pairs_of(stream, verdict)
    idea = Idea(
        place=verdict.place,
        because=verdict.because,
        options=verdict.options,
        level=verdict.level,
        p=None if verdict.confirmation is None else verdict.confirmation.p,
        runs=verdict.runs,
        run_seconds=verdict.run_seconds,
        plan=verdict.plan,
        match=verdict.match,
    )
    about: dict[str, Any] = {
        "variant": verdict.name,
        "metric": metric,
        "unit": verdict.unit,
        "higher_is_better": metric != verdict.metric,
        "idea": idea,
    }
    found = _verdict_of(verdict, verdict.screen)
    rows = [row_of(found, by_seed=_pairs(by_seed.get("by_seed", [])), **about)]
    if verdict.confirmation is not None:
        fresh = _verdict_of(verdict, verdict.confirmation)
        pairs = _pairs(by_seed.get("confirming_by_seed", []))
        rows.append(row_of(fresh, by_seed=pairs, **about, kind="confirmation"))
    return rows


def _pairs(values: Sequence[dict[str, Any]]) -> list[Pair]:
    return [Pair(pair["seed"], pair["baseline"], pair["variant"]) for pair in values]


def _verdict_of(verdict: IdeaVerdict, mean: Mean) -> Verdict:
    """A mean of a stream in the fields of a verdict."""
    return Verdict(
        verdict=verdict.verdict,
        direction=BETTER if verdict.is_adopted else NOT_SHOWN,
        sentence=verdict.reason,
        has_ended=True,
        pairs=mean.pairs,
        difference=mean.difference,
        interval=mean.interval,
        level=LEVEL,
        sd=mean.sd,
        diverged=0,
        baseline_diverged=0,
        note="",
        warnings=[],
    )


def idea_lines(verdict: IdeaVerdict) -> list[str]:
    """A verdict in words, for the terminal: what was decided comes first."""
    row, *fresh = rows_of_idea(None, verdict)
    lines = [f"{verdict.name}: {verdict.verdict} (place {verdict.place} of the stream): {row.sentence}."]
    lines += [f"Because: {printable(verdict.because)}"] if verdict.because else []
    lines.append(f"Screen: difference {_difference(row)} {row.unit} after {pairs_in_words(row.pairs)}.")
    lines += [f"Gain, on {each.pairs} fresh pairs: {_difference(each)} {each.unit}." for each in fresh]
    if verdict.is_adopted and verdict.confirmation is not None:
        lines.append(_spread_of_gain(verdict.confirmation, fresh[0]))
    lines += _costs(verdict)
    return [*lines, f"{verdict.runs} runs were trained, {shown_duration(verdict.run_seconds)} together."]


def _spread_of_gain(fresh: Confirmation, row: Row) -> str:
    """The median and the least improvement of the fresh pairs: no test of a dozen sees a disaster that is rare."""
    assert fresh.median is not None
    assert fresh.worst is not None
    sign = -1 if row.higher_is_better else 1
    median, worst = (signed(sign * value, words.digits_of(row)) for value in (fresh.median, fresh.worst))
    return f"Of the fresh pairs, the median is {median}, and the one with the least improvement {worst}."


def _difference(row: Row) -> str:
    if row.difference is None:
        return "–"
    within = "" if row.interval is None else f" (95% interval {words.interval_of(row)})"
    return f"{words.difference_of(row)}{within}"


def _costs(verdict: IdeaVerdict) -> list[str]:
    """The cost of the idea: its parameters if they differ, and its steps."""
    base_count, count = verdict.parameters
    base_steps, steps = verdict.steps
    is_command = verdict.unit == verdict.metric.removeprefix(NEGATED)  # of a command, nothing is known
    costs = [] if is_command else [f"Same {verdict.match}"]
    if parameter_excess(count, base_count):
        costs.append(f"{count:,} parameters instead of {base_count:,}")
    if steps != base_steps:
        costs.append(f"{steps:,} steps instead of {base_steps:,}")
    return [f"{'; '.join(costs)}."] if costs else []
