"""The report of a stream: its ideas with their verdicts, in words, as JSON, and on a page. No torch."""

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from lightning_llm.ablate import page
from lightning_llm.ablate.report import unit_of_metric
from lightning_llm.ablate.stream import (
    ADOPTED,
    OUT_OF_PAIRS,
    REJECTED,
    STOPPED,
    Mean,
    Stream,
    Verdict,
    gain_of,
    pairs_of,
)
from lightning_llm.ablate.words import bounds, pairs_in_words, parameter_excess, signed
from lightning_llm.io.charts import COLORS, GRAY, legend
from lightning_llm.io.shell import shell_path
from lightning_llm.io.units import shown_duration
from lightning_llm.io.untrusted import printable

WORDS = 60  # characters of a reason in a table
HEAD = ("idea", "verdict", "pairs", "difference", "95% interval")
MORE = ("e-value", "threshold", "runs", "time of runs")  # on the page
_COLORS = {ADOPTED: COLORS[2], REJECTED: GRAY, OUT_OF_PAIRS: COLORS[3], STOPPED: COLORS[4]}
_INTERVALS = (
    "A difference is idea minus baseline, so a negative one is better. An interval is that of a t test on the pairs "
    "that count; since an idea stops when its pairs say so, it describes these pairs and is no test. Pairs that "
    "confirm an idea are fresh and of a fixed number, and their interval is a test."
)


def lines_of(verdict: Verdict) -> list[str]:
    """A verdict in words, for the screen: what was decided comes first."""
    unit = verdict.unit or unit_of_metric(verdict.metric)
    lines = [f"{verdict.name}: {verdict.verdict} (place {verdict.place} of the stream): {verdict.reason}."]
    lines += [f"Because: {printable(verdict.because)}"] if verdict.because else []
    lines.append(f"Difference {_difference(verdict)} {unit} after {pairs_in_words(verdict.pairs)}.")
    if (confirmed := verdict.confirmation) is not None:
        lines.append(f"On {confirmed.pairs} fresh pairs: {_difference(confirmed)} {unit}.")
    lines.append(f"E-value {verdict.e_value:.3g}, threshold {verdict.threshold:.3g}.")
    lines += _costs(verdict)
    time = shown_duration(verdict.run_seconds)
    return [*lines, f"{verdict.runs} runs were trained, {time} together."]


def _difference(mean: Mean | Verdict) -> str:
    if mean.difference is None:
        return "–"
    within = "" if mean.interval is None else f" (95% interval {bounds(mean.interval)})"
    return f"{signed(mean.difference)}{within}"


def _costs(verdict: Verdict) -> list[str]:
    """The cost of the idea: its parameters if they differ, and its steps."""
    base_count, count = verdict.parameters
    base_steps, steps = verdict.steps
    costs = [f"Same {verdict.match}"] if verdict.unit != verdict.metric else []  # of a command, nothing is known
    if parameter_excess(count, base_count):
        costs.append(f"{count:,} parameters instead of {base_count:,}")
    if steps != base_steps:
        costs.append(f"{steps:,} steps instead of {base_steps:,}")
    return [f"{'; '.join(costs)}."] if costs else []


def rows_of(stream: Stream) -> list[list[str]]:
    """The ideas for a table, under ``HEAD`` and ``MORE``."""
    rows = []
    for verdict in stream.verdicts:
        interval = "–" if verdict.interval is None else bounds(verdict.interval)
        difference = "–" if verdict.difference is None else signed(verdict.difference)
        numbers = (f"{verdict.e_value:.3g}", f"{verdict.threshold:.3g}", str(verdict.runs))
        because = (
            f" – {textwrap.shorten(printable(verdict.because), WORDS, placeholder='…')}" if verdict.because else ""
        )
        title = f"{verdict.place}. {verdict.name}{because}"
        cells = (verdict.verdict, str(verdict.pairs), difference, interval)
        rows.append([title, *cells, *numbers, shown_duration(verdict.run_seconds)])
    return rows


def summary_of(stream: Stream) -> list[str]:
    """The stream in sentences."""
    adopted = stream.adopted
    rule = stream.rule
    names = ", ".join(f"{verdict.place}. {verdict.name}" for verdict in adopted) or "none"
    count = len(stream.verdicts)
    ideas = f"{count} idea{'s' * (count != 1)}"
    lines = [f"{ideas}, adopted: {names}; {shown_duration(stream.run_seconds)} of runs."]
    if stream.unfinished is not None:
        command = f"lightning-llm ablate try {shell_path(stream.out)}"
        lines.append(f"{stream.unfinished.name} has no verdict yet: {command} continues it.")
    if stream.is_final:
        return [*lines, "It is final: report.json has the losses of all pairs, and no idea can be tried any more."]
    threshold = rule.threshold(stream.place, len(adopted))
    lines += [f"An idea at place {stream.place} has to reach an e-value of {threshold:.3g} within {rule.most} pairs."]
    about = "If differences are about normal, the expected share of useless ideas among the adopted ones is at most"
    return [*lines, f"{about} {100 * rule.alpha:g}%."]


def stream_report(stream: Stream) -> dict[str, Any]:
    """The ideas of a stream and its settings, as ``report.json`` holds them; of a final one, with all losses."""
    ideas = [msgspec.to_builtins(verdict) for verdict in stream.verdicts]
    if stream.is_final:
        ideas = [idea | pairs_of(stream, verdict) for idea, verdict in zip(ideas, stream.verdicts, strict=True)]
    return {
        "out": str(stream.out),
        "alpha": stream.record.alpha,
        "most": stream.record.most,
        "environment": stream.record.environment,
        "configs": list(stream.record.asked.baseline),
        "options": stream.record.asked.options,
        "adopted": [verdict.place for verdict in stream.adopted],
        "gain": sum(gain_of(verdict) for verdict in stream.adopted),
        "run_seconds": stream.run_seconds,
        "is_final": stream.is_final,
        "ideas": ideas,
    }


def write_stream_report(stream: Stream) -> Path:
    """Write ``report.json`` and ``report.html``; the page."""
    report = stream_report(stream)
    reasons = [
        [f"{idea['place']}. {idea['name']}", idea["because"] or "–", idea["verdict"], idea["reason"]]
        for idea in report["ideas"]
    ]
    sections = [f"<h1>{page.text(stream.out.name)}</h1>", page.paragraphs(summary_of(stream))]
    if reasons:
        sections += ["<h2>The baseline, and what was tried</h2>", page.plot(draw, report, height=3.6)]
        caption = (
            "The line is the baseline: each step is the difference of the fresh pairs that confirmed an idea. A dot is "
            "an idea, with its 95% interval, beside the baseline that it was compared with."
        )
        sections += [f"<figcaption>{page.text(caption)}</figcaption>"]
        sections += ["<h2>Ideas</h2>", page.table(("idea", "because", "verdict", "reason"), reasons)]
        sections += ["<h2>Numbers</h2>", page.table((*HEAD, *MORE), rows_of(stream)), page.paragraphs([_INTERVALS])]
    facts = "; ".join(f"{name} {value}" for name, value in report["environment"].items())
    sections.append(f'<p class="soft">{page.text(facts)}</p>')
    return page.write(stream.out, report, f"{stream.out.name}: stream of ideas", sections)


def draw(axes: Sequence[Any], report: Mapping[str, Any]) -> None:
    """The staircase of the baseline, and each idea's difference from the baseline that it met."""
    axis = axes[0]
    level = 0.0
    ideas = report["ideas"]
    levels = [level]
    for idea in ideas:
        if idea["difference"] is not None:
            low, high = idea["interval"] or [idea["difference"]] * 2
            ends = [[idea["difference"] - low], [high - idea["difference"]]]
            color = _COLORS[idea["verdict"]]
            at = level + idea["difference"]
            axis.errorbar(idea["place"], at, yerr=ends, fmt="o", ms=4, capsize=2, lw=1, color=color)
        level += idea["confirmation"]["difference"] if idea["verdict"] == ADOPTED else 0.0
        levels.append(level)
    edges = [idea["place"] - 0.5 for idea in ideas] + [len(ideas) + 0.5, len(ideas) + 1]
    axis.step(edges, [*levels, level], where="post", color=COLORS[0], lw=1.5)
    for verdict in dict.fromkeys(idea["verdict"] for idea in ideas):
        axis.plot([], [], "o", ms=4, color=_COLORS[verdict], label=verdict)
    axis.plot([], [], color=COLORS[0], label="baseline")
    unit = next((idea["unit"] for idea in ideas if idea["unit"]), "nats/token")
    change = "change of val_loss, nats/token" if unit == "nats/token" else f"change of {printable(unit)}"
    axis.set(xlabel="place in the stream", ylabel=change)
    axis.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
    axis.grid(axis="y")
    legend(axis)
