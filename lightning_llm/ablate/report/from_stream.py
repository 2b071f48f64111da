"""The report of a stream of ideas: a row for each idea, and one for the fresh pairs that confirmed it. No torch."""

from collections.abc import Sequence
from typing import Any

from lightning_llm.ablate.names import BASELINE, NEGATED
from lightning_llm.ablate.report import words
from lightning_llm.ablate.report.record import VERSION, Idea, Pair, Row, StreamFacts, Variant, row_of
from lightning_llm.ablate.report.report import Report
from lightning_llm.ablate.stream import Mean, Stream, gain_of, pairs_of
from lightning_llm.ablate.stream import Verdict as IdeaVerdict
from lightning_llm.ablate.words import bounds, pairs_in_words, parameter_excess
from lightning_llm.io.units import shown_duration
from lightning_llm.io.untrusted import printable
from lightning_llm.statistics.design import BETTER, NOT_SHOWN
from lightning_llm.statistics.verdict import Verdict
from lightning_llm.training.metrics import VAL_LOSS, unit_of_metric

RULE = "e-LOND"
LEVEL = 0.95  # of each interval


def stream_report(stream: Stream) -> Report:
    """The ideas of a stream and its settings; of a final one, with the values of all pairs."""
    first = next(iter(stream.verdicts), None)
    name = VAL_LOSS if first is None else first.metric
    metric = name.removeprefix(NEGATED)
    higher_is_better = metric != name
    unit = unit_of_metric(metric) if first is None or first.unit in ("", name) else first.unit
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
            most=stream.record.most,
            configs=list(stream.record.asked.baseline),
            fit_options=list(stream.record.asked.options),
            adopted=[verdict.place for verdict in stream.adopted],
            gain=(-1 if higher_is_better else 1) * sum(gain_of(verdict) for verdict in stream.adopted),
            run_seconds=stream.run_seconds,
            is_final=stream.is_final,
            unfinished="" if unfinished is None else unfinished.name,
            next_threshold=None if stream.is_final else float(stream.rule.threshold(stream.place, len(stream.adopted))),
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
        e_value=verdict.e_value,
        threshold=verdict.threshold,
        runs=verdict.runs,
        run_seconds=verdict.run_seconds,
        plan=verdict.plan,
        match=verdict.match,
    )
    about: dict[str, Any] = {
        "variant": verdict.name,
        "metric": metric,
        "unit": unit_of_metric(metric) if verdict.unit in ("", verdict.metric) else verdict.unit,
        "higher_is_better": metric != verdict.metric,
        "idea": idea,
    }
    reason = _reason(verdict)
    found = _verdict_of(verdict.verdict, reason, verdict, is_adopted=verdict.is_adopted)
    rows = [row_of(found, by_seed=_pairs(by_seed.get("by_seed", [])), **about)]
    if verdict.confirmation is not None:
        fresh = _verdict_of(verdict.verdict, reason, verdict.confirmation, is_adopted=verdict.is_adopted)
        pairs = _pairs(by_seed.get("confirming_by_seed", []))
        rows.append(row_of(fresh, by_seed=pairs, **about, kind="confirmation"))
    return rows


def _reason(verdict: IdeaVerdict) -> str:
    """Why an idea has its verdict, with the interval in the metric's own values."""
    fresh = verdict.confirmation
    if not verdict.metric.startswith(NEGATED) or fresh is None or fresh.interval is None:
        return verdict.reason
    low, high = fresh.interval
    reason = verdict.reason.replace(bounds(fresh.interval), bounds((-high, -low)))
    return reason.replace("lies below 0", "lies above 0")


def _pairs(values: Sequence[dict[str, Any]]) -> list[Pair]:
    return [Pair(pair["seed"], pair["baseline"], pair["variant"]) for pair in values]


def _verdict_of(word: str, reason: str, mean: Mean | IdeaVerdict, *, is_adopted: bool) -> Verdict:
    """A mean of a stream in the fields of a verdict."""
    return Verdict(
        verdict=word,
        direction=BETTER if is_adopted else NOT_SHOWN,
        sentence=reason,
        has_ended=True,
        pairs=mean.pairs,
        difference=mean.difference,
        interval=mean.interval,
        level=LEVEL,
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
    lines.append(f"Difference {_difference(row)} {row.unit} after {pairs_in_words(row.pairs)}.")
    lines += [f"On {each.pairs} fresh pairs: {_difference(each)} {each.unit}." for each in fresh]
    lines.append(f"E-value {verdict.e_value:.3g}, threshold {verdict.threshold:.3g}.")
    lines += _costs(verdict)
    return [*lines, f"{verdict.runs} runs were trained, {shown_duration(verdict.run_seconds)} together."]


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
