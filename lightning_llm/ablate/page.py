"""The report of an experiment as one HTML page: inline SVG and CSS, no script, no network, light and dark."""

from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import quote

from lightning_llm.ablate import plots, words
from lightning_llm.ablate.curves import Curves, curves_of
from lightning_llm.ablate.names import BASELINE
from lightning_llm.ablate.plan import REPORT
from lightning_llm.ablate.ratios import ratio_in_words
from lightning_llm.ablate.report import report_of
from lightning_llm.ablate.results import Loaded
from lightning_llm.io.atomic import write_json, write_text
from lightning_llm.io.charts import svg
from lightning_llm.io.units import MIB
from lightning_llm.io.untrusted import printable

PAGE = "report.html"
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
table.text td, table.text th { text-align: left; } pre { font-size: 0.85rem; overflow-x: auto; }
figure { margin: 0.5rem 0; } svg { max-width: 100%; height: auto; }
"""


def write_report(loaded: Loaded) -> tuple[dict[str, Any], Path]:
    """Write ``report.json`` and the page to the experiment's folder; the report, and where the page is."""
    report = report_of(loaded)
    sections = sections_of(report, curves_of(loaded))
    return report, write(loaded.plan.out, report, f"{report['name']}: ablation report", sections)


def write(out: Path, report: Mapping[str, Any], title: str, sections: Sequence[str]) -> Path:
    """Write ``report.json`` and ``report.html`` to a folder; where the page is.

    Args:
        out: The folder.
        report: As JSON takes it.
        title: Of the page.
        sections: HTML.
    """
    page = out / PAGE
    write_json(out / REPORT, report)
    write_text(page, _document(title, sections))
    return page


def _document(title: str, sections: Sequence[str]) -> str:
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    head = f'<meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{policy}">'
    head += f'<meta name="viewport" content="width=device-width"><title>{text(title)}</title><style>{STYLE}</style>'
    body = "\n".join(sections)
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n{body}\n</body></html>\n'


def sections_of(report: Mapping[str, Any], curves: Curves) -> list[str]:
    """The page of a report of ``report_of``, with the curves of its runs."""
    height = 1.3 + 0.55 * len(words.labeled(report))
    facts = f"{words.metric_of(report)}, at the last step; alpha {report['alpha']:g}"
    facts = f"{facts}; {words.tested_in_words(report['tested_after'])}"
    unfinished = "" if report["has_ended"] else "<p><strong>The experiment has not ended.</strong></p>"
    sections = [f"<h1>{text(report['name'])}</h1>", f'<p class="soft">{text(facts)}</p>']
    sections += [table(["variant", "what it is"], list(words.compared(report).items()), kind="text")]
    sections += [_diff(name, stat) for name, stat in report.get("diffs", {}).items()]
    sections += [paragraphs(words.design_lines(report))]
    sections += [unfinished, "<h2>Differences from the baseline</h2>", plot(plots.forest, report, height=height)]
    sections += [_verdict_table(report), paragraphs(words.verdict_lines(report)), "<h2>Noise</h2>"]
    sections += [paragraphs(words.noise_lines(report)), _pairs_table(report)]
    if report["tuning"] and report["tuning"]["variants"]:
        sections += ["<h2>Tuning curves</h2>", plot(plots.tuning_curves, report, height=3.4)]
    sections.append(paragraphs(words.tuning_lines(report)))
    if BASELINE in curves.steps:
        curves_plot = plot(plots.loss_curves, report, curves, height=3.6, columns=2)
        left = "Left: mean over the seeds that all variants have, with a band of one standard deviation."
        right = "Right: paired differences from the baseline at equal shares of the run, with their 95% interval"
        caption = f"<figcaption>{left} {right} at each point by itself.</figcaption>"
        title = report["metric"] if "command" in report else "Validation loss"
        sections += [f"<h2>{text(title)} during training</h2>", curves_plot, caption]
    sections.append("<h2>Cost</h2>")
    if report["cost"]["variants"]:
        sections.append(plot(plots.costs, report, height=3.4, columns=2))
    sections.append(_measured_table(report) if "measured" in report else _cost_table(report, curves))
    what = text(report["metric"]) if "command" in report else "loss"
    sections.append(f"<figcaption>A variant's {what} is the baseline's mean plus the paired difference.</figcaption>")
    return [*sections, paragraphs(words.cost_lines(report)), _footer(report)]


def _footer(report: Mapping[str, Any]) -> str:
    facts = {name: value for name, value in report["environment"].items() if value is not None}
    facts |= {"lightning-llm": report["commit"]} if report["commit"] else {}
    environment = "; ".join(f"{name} {value}" for name, value in facts.items())
    return f'<p class="soft">{text(environment)}</p><p class="soft">Plan {report["plan"]}</p>'


# ---- tables


def _verdict_table(report: Mapping[str, Any]) -> str:
    interval = f"interval, {words.percent(report['interval']['each'])}"
    interval += f" (simultaneous: {words.percent(share)})" if (share := words.together(report)) else ""
    head = ["variant", "pairs", f"difference, {report['unit']}", interval, "p adjusted", "verdict"]
    head += ["direction", "size against delta"]
    rows = [
        [name, *words.cells(row), *([row["direction"], row["size"] or "–"] if words.is_tested(row) else "––")]
        for name, row in words.labeled(report)
    ]
    return table(head, rows)


def _pairs_table(report: Mapping[str, Any]) -> str:
    """The losses that everything above is computed from."""
    roles = "baseline", "variant"
    rows = [
        [name, pair["seed"], *(_digits(pair[role], 6) for role in roles), words.signed(words.difference_of(pair))]
        for name, row in [*words.labeled(report), ("null", report["aa"]["null"])]
        if row is not None
        for pair in row["by_seed"]
    ]
    head = ["variant", "seed", f"baseline's {report['metric']}", f"variant's {report['metric']}", "difference"]
    return f"<details><summary>The pairs</summary>{table(head, rows)}</details>" if rows else ""


def _cost_table(report: Mapping[str, Any], curves: Curves) -> str:
    head = ["variant", report["metric"], "sd over seeds", "steps", "parameters", "FLOPs per token"]
    head += ["ms per step (p20 to p80)", "× baseline", "peak MiB", "loss difference at equal time"]
    rows = []
    for name, row in {BASELINE: report["baseline"], **report["variants"]}.items():
        variant = report["cost"]["variants"].get(name)
        cells = [name, _digits(words.mean_loss(report, name), 5), _digits(row["sd_over_seeds"]), *_counts(row)]
        cells += ["–"] * 3 if variant is None else [
            "{} ({} to {})".format(*(words.milliseconds(variant[f"step{end}_s"]) for end in ("", "_p20", "_p80"))),
            ratio_in_words(variant),
            "–" if variant["peak_bytes"] is None else f"{variant['peak_bytes'] / MIB:.4g}",
        ]  # fmt: skip
        timed = None if name == BASELINE else curves.at_equal_time(name, report["cost"]["variants"], report["delta"])
        rows.append([*cells, words.signed(timed)])
    return table(head, rows)


def _measured_table(report: Mapping[str, Any]) -> str:
    """Time and memory of the runs of a command."""
    head = ["variant", report["metric"], "sd over seeds", "seconds of a run", "peak GiB"]
    rows = []
    for name, row in {BASELINE: report["baseline"], **report["variants"]}.items():
        measured = report["measured"][name]
        cells = [_digits(measured["seconds"], 4), _digits(measured["peak_memory_gib"])]
        rows.append([name, _digits(words.mean_loss(report, name), 5), _digits(row["sd_over_seeds"]), *cells])
    return table(head, rows)


def _diff(name: str, stat: str) -> str:
    """Git's summary of the changes in a revision, and a link to all of them."""
    link = f"diffs/{quote(name)}.patch"
    return f'<p>{text(name)}: <a href="{escape(link)}">the whole diff</a></p><pre>{text(stat)}</pre>'


def _counts(row: Mapping[str, Any]) -> list[str]:
    return ["–" if row[field] is None else f"{row[field]:,.0f}" for field in ("steps", "parameters", "flops_per_token")]


def _digits(value: float | None, digits: int = 3) -> str:
    return "–" if value is None else f"{value:.{digits}g}"


def plot(draw: Callable[..., None], *content: Any, height: float, columns: int = 1) -> str:
    """A figure with what ``draw`` draws, as inline SVG for a light and a dark page."""
    return f"<figure>{svg(draw, *content, width=WIDTH, height=height, columns=columns)}</figure>"


def table(head: Sequence[str], rows: Sequence[Sequence[object]], kind: str = "") -> str:
    """Titles above rows; a wide one scrolls by itself. Columns are flush right, and left in one of kind ``text``."""
    header = "".join(f"<th>{text(title)}</th>" for title in head)
    body = "".join(f"<tr>{''.join(f'<td>{text(cell)}</td>' for cell in row)}</tr>\n" for row in rows)
    style = f' class="{kind}"' if kind else ""
    return f'<div class="wide"><table{style}><thead><tr>{header}</tr></thead>\n<tbody>{body}</tbody></table></div>'


def paragraphs(lines: Sequence[str]) -> str:
    """One for each line."""
    return "\n".join(f"<p>{text(line)}</p>" for line in lines)


def text(value: object) -> str:
    """Printable text without markup."""
    return escape(printable(str(value)))
