"""The report of an experiment as one HTML page: inline SVG and CSS, no script, no network, light and dark.

Plots are drawn in one ink that the page replaces with its own color of text, so one SVG serves both.
"""

from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

import numpy as np

from lightning_llm.ablate.experiment import BASELINE
from lightning_llm.ablate.ratios import ratio_in_words
from lightning_llm.ablate.report import Curves
from lightning_llm.ablate.words import (
    MIB,
    bounds,
    cost_lines,
    labeled,
    level,
    milliseconds,
    noise_lines,
    percent,
    signed,
    tuning_lines,
    verdict_lines,
)
from lightning_llm.io import charts
from lightning_llm.io.charts import COLORS, GRAY, PAGE_INK
from lightning_llm.io.untrusted import printable
from lightning_llm.statistics.estimates import student

WIDTH = 9.2  # of a plot, in inches
STYLE = """
:root { color-scheme: light dark; --ink: #24292f; --page: #ffffff; --line: #d0d7de; --soft: #57606a; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --page: #0d1117; --line: #30363d; --soft: #9198a1; } }
body { color: var(--ink); background: var(--page); font: 16px/1.5 system-ui, sans-serif; max-width: 60rem;
  margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; margin-bottom: 0; } h2 { font-size: 1.15rem; margin-top: 2.2rem; }
p { margin: 0.4rem 0; } .soft, figcaption { color: var(--soft); font-size: 0.9rem; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-size: 0.9rem; }
th, td { text-align: right; padding: 0.25rem 0.7rem; border-bottom: 1px solid var(--line); }
th { vertical-align: bottom; font-weight: 600; } th:first-child, td:first-child { text-align: left; }
figure { margin: 0.5rem 0; } svg { max-width: 100%; height: auto; }
"""


def page_of(report: Mapping[str, Any], curves: Curves) -> str:
    """The page of a report.

    Args:
        report: As of ``report_of``.
        curves: Of its runs.
    """
    title = _text(f"{report['name']}: ablation report")
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    head = f'<meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{policy}">'
    head += f'<meta name="viewport" content="width=device-width"><title>{title}</title><style>{STYLE}</style>'
    body = "\n".join(_parts(report, curves))
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n{body}\n</body></html>\n'


def _parts(report: Mapping[str, Any], curves: Curves) -> list[str]:
    looks = ", ".join(map(str, report["looks"]))
    delta = "no delta" if report["delta"] is None else f"delta {report['delta']:g} {report['unit']}"
    facts = f"{report['metric']} of {report['validation']}, at the last step; {delta}; alpha {report['alpha']:g}"
    unfinished = "" if report["has_ended"] else "<p><strong>The experiment has not ended.</strong></p>"
    parts = [f"<h1>{_text(report['name'])}</h1>", f'<p class="soft">{_text(facts)}; looks at {looks} pairs</p>']
    parts += [unfinished, "<h2>Differences from the baseline</h2>", _plot(_forest, report, height=_rows(report))]
    parts += [_verdict_table(report), _paragraphs(verdict_lines(report)), "<h2>Noise</h2>"]
    parts += [_paragraphs(noise_lines(report)), _pairs_table(report)]
    if report["tuning"] and report["tuning"]["sides"]:
        parts += ["<h2>Tuning curves</h2>", _plot(_tuning_curves, report, height=3.4)]
    parts.append(_paragraphs(tuning_lines(report)))
    if BASELINE in curves.steps:
        parts += [
            "<h2>Validation loss during training</h2>",
            _plot(_loss_curves, report, curves, height=3.6, columns=2),
        ]
        parts.append(
            "<figcaption>Left: mean over the seeds of all sides, with a band of one standard deviation. Right: paired "
            "differences from the baseline at equal shares of the run, with their 95 % interval at each point by "
            "itself.</figcaption>"
        )
    parts.append("<h2>Cost</h2>")
    if report["cost"]["sides"]:
        parts.append(_plot(_cost_plot, report, height=3.4, columns=2))
    parts.append(_cost_table(report, curves))
    parts.append("<figcaption>A variant's loss is the baseline's mean plus the paired difference.</figcaption>")
    return [*parts, _paragraphs(cost_lines(report)), _last(report)]


def _last(report: Mapping[str, Any]) -> str:
    known = {name: value for name, value in report["environment"].items() if value is not None}
    known |= {"commit": report["commit"]} if report["commit"] else {}
    where = "; ".join(f"{name} {value}" for name, value in known.items())
    seen = [f"{name} has used seeds {', '.join(map(str, seeds))}" for name, seeds in report["seen"].items()]
    fresh = [f"Not independent of earlier experiments with this baseline: {'; '.join(seen)}."] if seen else []
    return f'{_paragraphs(fresh)}<p class="soft">{_text(where)}</p><p class="soft">Plan {report["plan"]}</p>'


# ---- tables


def _verdict_table(report: Mapping[str, Any]) -> str:
    each, together = (percent(report["interval"][name]) for name in ("each", "together"))
    head = ["variant", "pairs", f"difference, {report['unit']}", f"interval, {each} (all together {together})"]
    head += ["p adjusted", "direction", "size against delta", "verdict"]
    rows = [
        [
            name,
            row["pairs"],
            signed(row["difference"]),
            bounds(row["interval"]),
            _digits(row["p_adjusted"]),
            row["direction"],
            row["size"] or "–",
            row["verdict"],
        ]
        for name, row in labeled(report)
    ]
    return _table(head, rows)


def _pairs_table(report: Mapping[str, Any]) -> str:
    """The losses that everything above is computed from."""
    rows = [
        [name, each["seed"], *(_digits(each[side], 6) for side in ("baseline", "variant")), signed(_apart(each))]
        for name, row in [*labeled(report), *_null(report)]
        for each in row["by_seed"]
    ]
    head = ["variant", "seed", f"baseline's {report['metric']}", f"variant's {report['metric']}", "difference"]
    return f"<details><summary>The pairs</summary>{_table(head, rows)}</details>" if rows else ""


def _null(report: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    return [("null", report["aa"]["null"])] if report["aa"]["null"] else []


def _apart(pair: Mapping[str, Any]) -> float | None:
    is_known = pair["baseline"] is not None and pair["variant"] is not None
    return pair["variant"] - pair["baseline"] if is_known else None


def _cost_table(report: Mapping[str, Any], curves: Curves) -> str:
    head = ["side", report["metric"], "sd over seeds", "steps", "parameters", "FLOPs per token"]
    head += ["ms per step (p20 to p80)", "× baseline", "peak MiB", "loss difference at equal time"]
    rows = []
    for name, row in {BASELINE: report["baseline"], **report["variants"]}.items():
        side = report["cost"]["sides"].get(name)
        cells = [name, _digits(level(report, name), 5), _digits(row["sd_over_seeds"]), *_counts(row)]
        cells += ["–"] * 3 if side is None else [
            "{} ({} to {})".format(*(milliseconds(side[f"step{part}_s"]) for part in ("", "_p20", "_p80"))),
            ratio_in_words(side),
            "–" if side["peak_bytes"] is None else f"{side['peak_bytes'] / MIB:.4g}",
        ]  # fmt: skip
        timed = None if name == BASELINE else curves.at_equal_time(name, report["cost"]["sides"], report["delta"])
        rows.append([*cells, signed(timed)])
    return _table(head, rows)


def _counts(row: Mapping[str, Any]) -> list[str]:
    return ["–" if row[field] is None else f"{row[field]:,.0f}" for field in ("steps", "parameters", "flops_per_token")]


def _digits(value: float | None, digits: int = 3) -> str:
    return "–" if value is None else f"{value:.{digits}g}"


def _table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    first = "".join(f"<th>{_text(each)}</th>" for each in head)
    rest = "".join(f"<tr>{''.join(f'<td>{_text(cell)}</td>' for cell in row)}</tr>\n" for row in rows)
    return f'<div class="wide"><table><thead><tr>{first}</tr></thead>\n<tbody>{rest}</tbody></table></div>'


def _paragraphs(lines: Sequence[str]) -> str:
    return "\n".join(f"<p>{_text(line)}</p>" for line in lines)


def _text(value: object) -> str:
    return escape(printable(str(value)))


# ---- plots


def _plot(draw: Callable[..., None], *content: Any, height: float, columns: int = 1) -> str:
    return f"<figure>{charts.svg(draw, *content, width=WIDTH, height=height, columns=columns)}</figure>"


def _colors(report: Mapping[str, Any]) -> dict[str, str]:
    return {BASELINE: GRAY} | {name: COLORS[n % len(COLORS)] for n, name in enumerate(report["variants"])}


def _rows(report: Mapping[str, Any]) -> float:
    return 1.3 + 0.55 * len(labeled(report))


def _forest(axes: Sequence[Any], report: Mapping[str, Any]) -> None:
    axis, colors, rows = axes[0], _colors(report), labeled(report)
    if report["delta"] is not None:
        axis.axvspan(-report["delta"], report["delta"], color=GRAY, alpha=0.2, lw=0)
    axis.axvline(0, color=PAGE_INK, lw=0.8)
    for place, (name, row) in enumerate(rows):
        if row["difference"] is None:
            words = row["note"] or row["verdict"]
            axis.annotate(words, (0, place), (6, 0), textcoords="offset points", va="center")
            continue
        low, high = row["interval"] or [row["difference"]] * 2
        ends = [[row["difference"] - low], [high - row["difference"]]]
        is_tuned = name not in colors
        look = {"color": colors[name.removesuffix(", tuned") if is_tuned else name]}
        look |= {"mfc": "none"} if is_tuned else {}
        axis.errorbar(row["difference"], place, xerr=ends, fmt="o", ms=7, capsize=4, **look)
        dots = [apart for each in row["by_seed"] if (apart := _apart(each)) is not None]
        axis.plot(dots, [place + 0.22] * len(dots), "o", ms=4.5, alpha=0.7, color=look["color"], mew=0)
        at = (row["difference"], place)
        axis.annotate(row["sentence"], at, (0, 9), textcoords="offset points", ha="center", fontsize=8.5)
    axis.set_yticks(range(len(rows)), [printable(name) for name, _ in rows])
    axis.set(ylim=(len(rows) - 0.4, -0.8))
    zone = "" if report["delta"] is None else f"; shaded: ±{report['delta']:g}"
    axis.set_xlabel(f"difference of {report['metric']}, {report['unit']} (negative is better; dots: pairs){zone}")
    axis.grid(axis="x")


def _loss_curves(axes: Sequence[Any], report: Mapping[str, Any], curves: Curves) -> None:
    common = set.intersection(*(set(curves.seeds[name]) for name in _colors(report) if name in curves.seeds))
    for name, color in _colors(report).items():
        if name not in curves.steps:
            continue
        steps, seeds = curves.steps[name], curves.seeds[name]
        losses = curves.losses[name][[n for n, seed in enumerate(seeds) if seed in common or not common]]
        middle, spread = losses.mean(axis=0), losses.std(axis=0, ddof=1) if len(losses) > 1 else 0.0
        axes[0].plot(steps, middle, color=color, lw=1.5, label=printable(name), marker="." if len(steps) < 20 else "")
        axes[0].fill_between(steps, middle - spread, middle + spread, color=color, alpha=0.2, lw=0)
        if name != BASELINE:
            _difference(axes[1], *curves.differences(name), color)
    axes[0].set(xlabel="step", ylabel="validation loss, nats/token")
    axes[1].axhline(0, color=GRAY, lw=1)
    axes[1].set(xlabel="step of the baseline", ylabel="difference, nats/token")
    for axis in axes:
        axis.grid()
    charts.legend(axes[0])


def _difference(axis: Any, steps: Sequence[int], differences: Any, color: str) -> None:
    if not len(differences):
        return
    middle = differences.mean(axis=0)
    axis.plot(steps, middle, color=color, lw=1.5, marker="." if len(steps) < 20 else "")
    if (pairs := len(differences)) > 1:
        half = student(0.05, pairs - 1) * differences.std(axis=0, ddof=1) / np.sqrt(pairs)
        axis.fill_between(steps, middle - half, middle + half, color=color, alpha=0.2, lw=0)


def _tuning_curves(axes: Sequence[Any], report: Mapping[str, Any]) -> None:
    axis, colors = axes[0], _colors(report)
    for name, side in report["tuning"]["sides"].items():
        points = [each for each in zip(side["values"], side["losses"], strict=True) if each[1] is not None]
        axis.plot(*zip(*points, strict=True), "o-", color=colors[name], label=printable(name)) if points else None
        if side["best"] is not None:
            axis.axvline(side["best"], color=colors[name], ls=":", lw=1.2)
    axis.set(xscale="log", ylabel=f"mean {report['metric']}, {report['unit']}")
    values = sorted({value for side in report["tuning"]["sides"].values() for value in side["values"]})
    axis.set_xticks(values, [f"{value:g}" for value in values])
    axis.minorticks_off()
    axis.set_xlabel(f"{report['tuning']['option']} (dotted: the tuned value)")
    axis.grid()
    charts.legend(axis)


def _cost_plot(axes: Sequence[Any], report: Mapping[str, Any]) -> None:
    colors, sides = _colors(report), {BASELINE: report["baseline"], **report["variants"]}
    for name, side in report["cost"]["sides"].items():
        row, loss, look = sides[name], level(report, name), {"fmt": "o", "ms": 7, "capsize": 3, "color": colors[name]}
        ends = [side["step_s"] - side["step_p20_s"], side["step_p80_s"] - side["step_s"]]
        values: list[Any] = [(side["training_s"], [[row["steps"] * end] for end in ends])]
        values += [] if side["peak_bytes"] is None else [(side["peak_bytes"] / MIB, None)]
        for axis, (x, spread) in zip(axes, values if loss is not None else (), strict=False):
            axis.errorbar(x, loss, yerr=row["sd_over_seeds"], xerr=spread, label=printable(name), **look)
    axes[0].set(
        xlabel="training time alone, s (20th to 80th percentile)", ylabel=f"{report['metric']}, {report['unit']}"
    )
    axes[1].set(xlabel="peak memory of a step, MiB", ylabel=f"{report['metric']}, {report['unit']}")
    for axis in axes:
        axis.grid()
    charts.legend(axes[0])
