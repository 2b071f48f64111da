"""The report of an experiment as one HTML page: inline SVG and CSS, no script, no network, light and dark.

Plots are drawn in one ink that the page replaces with its own color of text, so one SVG serves both.
"""

import io
import re
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

import numpy as np

from lightning_llm.ablate.experiment import BASELINE, CLOSE
from lightning_llm.ablate.report import Curves
from lightning_llm.ablate.statistics import student
from lightning_llm.accounting.hardware import shown_duration
from lightning_llm.io.untrusted import printable

MIB = 2**20
MOST_COMPANY = 0.2  # cores that other programs may use during a measurement "alone"
INK, GRAY = "#010203", "#8c8c8c"  # the ink becomes the page's
COLORS = ("#3b82c4", "#d5443a", "#5a9e3d", "#d08200", "#8e6fc1", "#2a9d8f", "#b84a9c", "#a0744b")  # seen on both pages
WORDS = {
    "better": "better",
    "worse": "worse",
    "equivalent": "no difference larger than delta",
    "undecided": "undecided",
}
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
    parts += [_verdict_table(report), _paragraphs(noise_lines(report))]
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
    return f'<p class="soft">Plan {report["plan"]}</p>'


# ---- words, on the screen too


def noise_lines(report: Mapping[str, Any]) -> list[str]:
    """How noisy the runs are, and what pairing did, one line for each fact."""
    aa, lines = report["aa"], []
    if aa["replay_difference"] is not None:
        again = f"{aa['replay_difference']:.3g} apart" if aa["replay_difference"] else "equal to the bit"
        if aa["replay_difference"] and report["accelerator"] == "cpu":
            again += ", although a CPU should repeat each bit: do not trust small differences"
        lines.append(f"The baseline's seed 0 again: {again}.")
    if aa["null_sd"] is not None:
        what = "differences of the null variant, which only draws other MLPs, have a standard deviation of"
        lines.append(f"Noise: {what} {aa['null_sd']:.4g} {report['unit']}.")
    for name, row in report["variants"].items():
        words = [] if row["correlation"] is None else [f"correlation of the pairs {row['correlation']:.2f}"]
        if row["seeds_saved"] is not None:
            many = f"{abs(row['seeds_saved'])} seed{'s' * (abs(row['seeds_saved']) != 1)}"
            words.append(f"pairing {'cost' if row['seeds_saved'] < 0 else 'saved'} {many} per side")
        if flip := row.get("sign_flip"):
            reach = "" if flip["smallest"] <= report["alpha"] else f", which cannot fall below {flip['smallest']:.2g}"
            words.append(f"sign-flip p {flip['p']:.2g}{reach}")
        if words:
            lines.append(f"{name}: {', '.join(words)}.")
    lines += [f"{run} diverged: {reason}." for run, reason in report["diverged_runs"].items()]
    return lines


def tuning_lines(report: Mapping[str, Any]) -> list[str]:
    """The optimum of each side, whether it is inside the grid, and what tuning took."""
    tuning = report["tuning"]
    if tuning is None or not tuning["sides"]:
        return [] if tuning is None else [f"Tuning of {tuning['option']} has not ended."]
    words = []
    for name, side in tuning["sides"].items():
        edge = "" if side["is_bracketed"] else ", not bracketed: at the edge of the grid"
        best = "none, each value diverged" if side["best"] is None else f"{side['best']:g}"
        words.append(f"{name} {best} (untuned {side['untuned']:g}{edge})")
    took = f"{tuning['runs']} runs took {shown_duration(tuning['run_seconds'])}"
    return [f"Tuned {tuning['option']}: {', '.join(words)}; {took}."]


def labeled(report: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """The variants, each followed by itself with both sides tuned."""
    rows = ((name, row, row["tuned"]) for name, row in report["variants"].items())
    return [each for name, row, tuned in rows for each in ((name, row), (f"{name}, tuned", tuned)) if each[1]]


def cost_lines(report: Mapping[str, Any]) -> list[str]:
    """What was matched, how closely, and what the experiment took."""
    lines, solved = [], f" by {report['solved']}" if report["solved"] else ""
    closest = [_matched(name, row) for name, row in report["variants"].items() if row["ratio"] is not None]
    if report["match"] == "time":
        sides = report["cost"]["sides"]
        base = sides.get(BASELINE, {}).get("training_s")
        known = {name: side["training_s"] / base for name, side in sides.items() if base and name != BASELINE}
        closest = [f"{name} {ratio:.3g}" for name, ratio in known.items()]
    ratios = f": {', '.join(closest)} × the baseline's" if closest else ""
    lines.append(f"Matched: {report['match']}{solved}{ratios}.")
    known = {name: row["parameters"] for name, row in report["variants"].items() if row["parameters"]}
    sizes = {name: each / report["baseline"]["parameters"] for name, each in known.items()}
    if unequal := [f"{name} {ratio:.3g}" for name, ratio in sizes.items() if abs(ratio - 1) > CLOSE]:
        lines.append(f"Parameters are not equal: {', '.join(unequal)} × the baseline's.")
    cost = report["cost"]
    if cost["sides"]:
        many = f"{cost['rounds']} interleaved steps, {cost['threads']} thread{'s' * (cost['threads'] != 1)}"
        times = [_in_short(name, side) for name, side in cost["sides"].items()]
        where = f"{_company(cost)} on {cost['machine']}, {cost['date']}"
        lines.append(f"Time and memory of a step: {'; '.join(times)}. {many}, {where}.")
    lines.append(f"{cost['runs']} runs took {shown_duration(cost['run_seconds'])} of training on a shared machine.")
    return lines


def _matched(name: str, row: Mapping[str, Any]) -> str:
    return f"{name} {row['ratio']:.4g}" if row["solved"] is None else f"{name} {row['solved']}, {row['ratio']:.4g}"


def _company(cost: Mapping[str, Any]) -> str:
    """Whether other programs computed during the measurement."""
    others = cost["other_cores"]
    if others is None:
        return "nothing else of the experiment ran"
    return "alone" if others < MOST_COMPANY else f"while other programs used {others:.1f} cores"


def _level(report: Mapping[str, Any], name: str) -> float | None:
    """The baseline's mean, and that plus the paired difference for a variant, which may have other seeds."""
    mean: float | None = report["baseline"]["mean"]
    if name == BASELINE or mean is None:
        return mean
    difference = report["variants"][name]["difference"]
    return None if difference is None else mean + difference


def _in_short(name: str, side: Mapping[str, Any]) -> str:
    time = f"{_ms(side['step_s'])} ms" if name == BASELINE else f"{side['ratio']:.3f} × the time"
    return f"{name} {time}" + ("" if side["peak_bytes"] is None else f", {side['peak_bytes'] / MIB:.4g} MiB")


def verdict_in_words(row: Mapping[str, Any]) -> str:
    """The verdict, and what a reader must know about it."""
    more = f": about {row['further_pairs']} more pairs" if row["further_pairs"] else ""
    return f"{WORDS[row['verdict']]}{more}" + (f" ({row['note']})" if row["note"] else "")


def signed(value: float | None) -> str:
    """A difference with four digits."""
    return "–" if value is None else f"{value:+.4f}"


def bounds(interval: Sequence[float] | None) -> str:
    """An interval."""
    return "–" if interval is None else f"{signed(interval[0])} to {signed(interval[1])}"


# ---- tables


def _verdict_table(report: Mapping[str, Any]) -> str:
    head = ["variant", "pairs", f"difference, {report['unit']}", "interval", "p", "p adjusted", "sd", "verdict"]
    rows = [
        [
            name,
            row["pairs"],
            signed(row["difference"]),
            bounds(row["interval"]),
            *(_digits(row[field]) for field in ("p", "p_adjusted", "sd")),
            verdict_in_words(row),
        ]
        for name, row in labeled(report)
    ]
    return _table(head, rows)


def _cost_table(report: Mapping[str, Any], curves: Curves) -> str:
    head = ["side", report["metric"], "sd over seeds", "steps", "parameters", "FLOPs per token"]
    head += ["ms per step (p20 to p80)", "× baseline", "peak MiB", "loss difference at equal time"]
    rows = []
    for name, row in {BASELINE: report["baseline"], **report["variants"]}.items():
        side = report["cost"]["sides"].get(name)
        cells = [name, _digits(_level(report, name), 5), _digits(row["sd_over_seeds"]), *_counts(row)]
        cells += ["–"] * 3 if side is None else [
            f"{_ms(side['step_s'])} ({_ms(side['step_p20_s'])} to {_ms(side['step_p80_s'])})",
            f"{side['ratio']:.3f}",
            "–" if side["peak_bytes"] is None else f"{side['peak_bytes'] / MIB:.4g}",
        ]  # fmt: skip
        rows.append([*cells, signed(None if name == BASELINE else curves.at_equal_time(name, report["cost"]["sides"]))])
    return _table(head, rows)


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.0f}" if seconds >= 0.1 else f"{1e3 * seconds:.3g}"


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
    """An SVG whose ink is the page's; texts stay texts."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    inks = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
    style: Any = dict.fromkeys(inks, INK) | {"font.size": 9.5, "font.family": "sans-serif", "axes.titlesize": 10}
    style |= {"axes.facecolor": "none", "legend.frameon": False, "grid.alpha": 0.25, "grid.color": GRAY}
    style |= {"svg.fonttype": "none", "svg.hashsalt": "ablate", "text.parse_math": False}
    style |= {"axes.spines.top": False, "axes.spines.right": False}
    with rc_context(style):
        figure = Figure((9.2, height), layout="constrained", facecolor="none")
        FigureCanvasSVG(figure)
        draw(figure.subplots(1, columns, squeeze=False)[0], *content)
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata={"Date": None})
    drawn = re.sub(r"<metadata>.*?</metadata>", "", file.getvalue(), flags=re.DOTALL).replace(INK, "currentColor")
    drawn = re.sub(r'<g id="[^"]*"', "<g", drawn)  # those of several plots are the same
    return f"<figure>{drawn[drawn.index('<svg') :].strip()}</figure>"


def _colors(report: Mapping[str, Any]) -> dict[str, str]:
    return {BASELINE: GRAY} | {name: COLORS[n % len(COLORS)] for n, name in enumerate(report["variants"])}


def _rows(report: Mapping[str, Any]) -> float:
    return 1.3 + 0.45 * len(labeled(report))


def _forest(axes: Sequence[Any], report: Mapping[str, Any]) -> None:
    axis, colors, rows = axes[0], _colors(report), labeled(report)
    if report["delta"] is not None:
        axis.axvspan(-report["delta"], report["delta"], color=GRAY, alpha=0.2, lw=0)
    axis.axvline(0, color=INK, lw=0.8)
    for place, (name, row) in enumerate(rows):
        if row["difference"] is None:
            axis.annotate(verdict_in_words(row), (0, place), (6, 0), textcoords="offset points", va="center")
            continue
        low, high = row["interval"] or [row["difference"]] * 2
        ends = [[row["difference"] - low], [high - row["difference"]]]
        is_tuned = name not in colors
        look = {"color": colors[name.removesuffix(", tuned") if is_tuned else name]}
        look |= {"mfc": "none"} if is_tuned else {}
        axis.errorbar(row["difference"], place, xerr=ends, fmt="o", ms=7, capsize=4, **look)
        word = WORDS[row["verdict"]]
        axis.annotate(word, (row["difference"], place), (0, 9), textcoords="offset points", ha="center", fontsize=8.5)
    axis.set_yticks(range(len(rows)), [printable(name) for name, _ in rows])
    axis.set(ylim=(len(rows) - 0.4, -0.8))
    zone = "" if report["delta"] is None else f"; shaded: ±{report['delta']:g}"
    axis.set_xlabel(f"difference of {report['metric']}, {report['unit']} (negative is better){zone}")
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
    axes[0].figure.legend(loc="outside lower center", ncols=6)


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
    axis.figure.legend(loc="outside lower center", ncols=6)


def _cost_plot(axes: Sequence[Any], report: Mapping[str, Any]) -> None:
    colors, sides = _colors(report), {BASELINE: report["baseline"], **report["variants"]}
    for name, side in report["cost"]["sides"].items():
        row, level, look = sides[name], _level(report, name), {"fmt": "o", "ms": 7, "capsize": 3, "color": colors[name]}
        ends = [side["step_s"] - side["step_p20_s"], side["step_p80_s"] - side["step_s"]]
        values: list[Any] = [(side["training_s"], [[row["steps"] * end] for end in ends])]
        values += [] if side["peak_bytes"] is None else [(side["peak_bytes"] / MIB, None)]
        for axis, (x, spread) in zip(axes, values if level is not None else (), strict=False):
            axis.errorbar(x, level, yerr=row["sd_over_seeds"], xerr=spread, label=printable(name), **look)
    axes[0].set(
        xlabel="training time alone, s (20th to 80th percentile)", ylabel=f"{report['metric']}, {report['unit']}"
    )
    axes[1].set(xlabel="peak memory of a step, MiB", ylabel=f"{report['metric']}, {report['unit']}")
    for axis in axes:
        axis.grid()
    handles, labels = axes[0].get_legend_handles_labels()
    axes[0].figure.legend(handles, labels, loc="outside lower center", ncols=6)
