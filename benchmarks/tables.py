"""Tables and figures of the documentation, written from the rows in ``docs/benchmarks``.

    python -m benchmarks.tables            write them again
    python -m benchmarks.tables --check    exit with status 1 if that would change something
    python -m benchmarks.tables --plots    draw the plots again
    python -m benchmarks.tables --stale    list the files of rows whose code has changed since they were measured

``docs/figures.yaml`` says where they come from, page by page; the pages are plain Markdown. A figure is found by the
text around it, where each number is replaced by a file of rows, a variant, and an f-string over the fields of its row:

    - level 1 takes «swiglu-float32-cpu, ours 1: {ratio:.2f}» times as long

A table is found by the names of its columns, each with an f-string over the fields of a row; of several with the same
columns, the first entry is the first table of the page:

    - rows: swiglu-float32-cpu swiglu-bfloat16-cpu
      columns:
        variant: '{variant}'
        peak, MiB: '{peak_bytes / MiB:,.0f} ({peak_bytes / first.peak_bytes:.2f})'

An experiment of ``lightning-llm ablate`` has a row for each side, a stream one for each idea, and several sizes one for
each variant, with the name of the report as ``report``, and its outcome of the stored prediction; their fields are
those of ``report.json`` (docs/reference/report.md).

``first`` is the first row of the same shape and dtype, ``of("ours")`` the row of that variant there. ``each:`` with an
expression makes one row for each of its values, ``if:`` leaves rows out.
"""

import argparse
import json
import math
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import yaml

from benchmarks import plots
from benchmarks.charts import panels
from benchmarks.known_steps import place_of
from benchmarks.rows import MEASURED, Row, read_rows
from lightning_llm.ablate.report.record import Row as ReportRow
from lightning_llm.ablate.report.report import Report
from lightning_llm.io.units import UNITS
from lightning_llm.statistics.extrapolation import Drift, SpreadBySize, answer, predict
from lightning_llm.statistics.known_steps import STEPS

ROOT = Path(__file__).parents[1]
ROWS, REPORTS = ROOT / "docs" / "benchmarks", ROOT / "docs" / "experiments"
SOURCES = ROOT / "docs" / "figures.yaml"
CONFIGS = "configs/*.yaml"
NUMBER = r"([\d.,]*\d)"
SOURCE = re.compile(r"«(?P<file>[\w-]+)(, (?P<variant>[^»]+?))?: (?P<cell>\{[^»]+\})»")
# in a comment of YAML: "1.70 nats [runs-cpu, shakespeare-char.yaml: {val_loss:.2f}]"
YAML_FIGURE = re.compile(
    r"(?P<old>[\d.,]*\d)(?P<mark>[^\d\n\[]*\[(?P<file>[\w-]+)(, (?P<variant>[^:\]]+))?: (?P<cell>\{[^\]]+\})\])"
)


def rows_of(name: str) -> list[Row]:
    """The rows of ``docs/benchmarks/NAME.json``, or the variants of the experiment that ``docs/experiments`` has."""
    paths = [folder / f"{name}.json" for folder in (ROWS, REPORTS)]
    path = next((path for path in paths if path.is_file()), None)
    if path is None:
        raise ValueError(f"there is no {paths[0].relative_to(ROOT)}")
    rows = read_rows(path) if path.parent == ROWS else _variants(Report.read(path))
    fields = dict.fromkeys(name for row in rows for name in vars(row))
    return [Row(**{**fields, **vars(row)}) for row in rows]


def _variants(report: Report) -> list[Row]:
    """A row for the baseline and for each variant, with the fields of its row and of its variant in the report.

    ``tuned`` is the row with both sides tuned, ``secondary`` the rows of other metrics by their names, ``rates`` what
    was tuned. Of a stream a row for each idea, with that of its fresh pairs as ``confirmed``; of several sizes one for
    each variant.
    """
    results = [row for row in report.rows if row.kind == "result"]
    if report.sizes is not None:
        names = [name for name in report.variants if name != report.baseline]
        return [_of_sizes(report, name, [row for row in results if row.variant == name]) for name in names]
    if report.stream is not None:
        fresh = {row.idea.place: msgspec.to_builtins(row) for row in report.of_kind("confirmation") if row.idea}
        ideas = [(row, row.idea) for row in results if row.idea is not None]
        return [_row(row.variant, row, idea, {"confirmed": fresh.get(idea.place)}) for row, idea in ideas]
    null_sd = next((row.sd for row in report.of_kind("null")), None)
    tuned = {} if report.tuning is None else report.tuning.variants
    found = []
    for name, variant in report.variants.items():
        of_variant = [row for row in report.rows if row.variant == name]
        kinds = {row.kind: msgspec.to_builtins(row) for row in of_variant if row.kind in ("result", "tuned")}
        own = variant.means.get(report.metric)
        sides = {"mean": own and own.value, "sd_over_seeds": own and own.sd, "null_sd": null_sd}
        secondary = {row.metric: msgspec.to_builtins(row) for row in of_variant if row.kind == "secondary"}
        more = {
            "tuned": kinds.get("tuned"),
            "secondary": secondary or None,
            "rates": msgspec.to_builtins(tuned.get(name)),
        }
        found.append(_row(name, variant, sides, kinds.get("result", {}), more))
    return found


def _row(name: str, *parts: Any) -> Row:
    """A row with the fields of several records; of two with the same field, the later one's."""
    fields: dict[str, Any] = {}
    for part in parts:
        fields |= msgspec.to_builtins(part)
    return Row(**{**fields, "variant": name, "shape": None, "dtype": None})


def _of_sizes(report: Report, name: str, rows: Sequence[ReportRow]) -> Row:
    """A variant at several sizes: its rows as ``sizes``, what is predicted of it, and its outcome of a prediction."""
    assert report.sizes is not None
    target = report.sizes.predicted.get(name)
    outcomes = [stored.variants[name] for stored in report.sizes.predictions if name in stored.variants]
    sizes = {"sizes": [msgspec.to_builtins(row) for row in rows]}
    about = {"report": report.name, "present": _by_present_method(report, rows)}
    return _row(name, target or {}, sizes, about, outcomes[-1] if outcomes else {})


def _by_present_method(report: Report, rows: Sequence[ReportRow]) -> dict[str, Any] | None:
    """The interval and the answer that the present method gives for stored sizes; ``None``: there is no target.

    The drift is that of all stored ladders, and the spread that of the ladder's own runs.
    """
    assert report.sizes is not None
    if report.sizes.target_compute is None:
        return None
    places = [place for place in map(place_of, rows) if place is not None]
    target = math.log(report.sizes.target_compute, 4)
    predicted = predict(places, SpreadBySize.of(places), Drift.of(STEPS), target, places[-1].pairs)
    direction = {"better": -1, "worse": 1}.get(rows[-1].direction, 0)
    return {
        "difference": predicted.mean,
        "interval": predicted.interval,
        "answer": answer(predicted.interval, direction, report.delta),
    }


def _value(expression: str, row: Row, group: Sequence[Row]) -> Any:
    """An expression of our own pages: over the fields of a row, ``first``, ``of(variant)`` and the units."""
    variants = {other.variant: other for other in group}
    functions = {"int": int, "max": max, "min": min, "of": lambda name: variants.get(name, Row())}
    names = {**dict.fromkeys(MEASURED), **UNITS, **functions, **vars(row)}
    return eval(expression, {"__builtins__": {}, **names, "row": row, "group": group, "first": group[0]})


def cell(template: str, row: Row, group: Sequence[Row]) -> str:
    """One cell; a dash for a value that was not measured."""
    try:
        text: str = _value(f"f{template!r}", row, group)
    except TypeError:  # None in a calculation or a format
        return "–"
    return "–" if text == "None" else text


def table(source: dict[str, Any]) -> str:
    """A table in Markdown by its entry in ``docs/figures.yaml``: ``rows``, ``columns``, perhaps ``each`` and ``if``."""
    rows = [row for name in source["rows"].split() for row in rows_of(name)]
    if "if" in source:
        rows = [row for row in rows if _value(source["if"], row, [row])]
    body: dict[Any, list[str]] = {}
    for group in panels(rows).values():
        for row in group:
            key = _value(source["each"], row, group) if "each" in source else len(body)
            if key not in body:
                body[key] = [cell(template, row, group) for template in source["columns"].values()]
    return _head(source) + "".join(f"| {' | '.join(cells)} |\n" for cells in body.values())


def _head(source: dict[str, Any]) -> str:
    columns = source["columns"]
    return f"| {' | '.join(columns)} |\n| {' | '.join(['---'] * len(columns))} |\n"


def figure(file: str, variant: str | None, template: str) -> str:
    """One number: of the row of a variant, or of the first row."""
    for group in panels(rows_of(file)).values():
        for row in group:
            names = (None, row.variant, f"{row.variant}, {row.dtype}", f"{row.variant}, {row.shape}")
            if variant in names:
                return cell(template, row, group)
    raise ValueError(f"{file} has no row {variant}")


def _with_tables(text: str, sources: Sequence[dict[str, Any]]) -> str:
    """A page with its tables as the rows have them.

    Raises:
        ValueError: The page has more or fewer tables with these columns than there are sources.
    """
    for head in dict.fromkeys(map(_head, sources)):
        written = [table(source) for source in sources if _head(source) == head]
        start, *rest = re.split(rf"^{re.escape(head)}(?:\|.*\n)*", text, flags=re.M)
        if len(rest) != len(written):
            columns = head.partition("\n")[0]
            raise ValueError(f"{len(rest)} tables, but {len(written)} sources, with the columns {columns}")
        text = start + "".join(new + text for new, text in zip(written, rest, strict=True))
    return text


def _with_figures(text: str, source: str) -> str:
    """A page with the figures of one sentence as the rows have them.

    Raises:
        ValueError: The page does not have that sentence, or has it several times.
    """
    sources = list(SOURCE.finditer(source))
    pattern = "".join(
        NUMBER if piece == "«»" else r"\s+" if piece.isspace() else re.escape(piece)
        for piece in re.split(r"(«»|\s+)", SOURCE.sub("«»", source))
    )
    sentences = list(re.finditer(pattern, text))
    if len(sentences) != 1:
        raise ValueError(f"{len(sentences)} sentences, instead of one, read: {SOURCE.sub('…', source)}")
    for group, m in reversed(list(enumerate(sources, 1))):
        start, end = sentences[0].span(group)
        text = text[:start] + figure(m["file"], m["variant"], m["cell"]) + text[end:]
    return text


def rewritten(text: str, source: dict[str, Any]) -> str:
    """A page with its tables and figures as the rows have them, by its entry in ``docs/figures.yaml``."""
    text = _with_tables(text, source.get("tables", ()))
    for sentence in source.get("figures", ()):
        text = _with_figures(text, sentence)
    return YAML_FIGURE.sub(lambda m: figure(m["file"], m["variant"], m["cell"]) + m["mark"], text)


def pages() -> Iterator[tuple[Path, dict[str, Any]]]:
    """The files that have tables and figures, each with its entry in ``docs/figures.yaml``."""
    for name, source in yaml.safe_load(SOURCES.read_text(encoding="utf-8")).items():
        yield ROOT / name, source
    for path in sorted(ROOT.glob(CONFIGS)):
        yield path, {}


def stale() -> Iterator[str]:
    """A line for each file of rows whose code has changed since its commit, or that does not name one."""
    for path in sorted(ROWS.glob("*.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        if not record["commit"]:
            yield f"{path.name}: names no commit"
            continue
        command = ["git", "log", "--oneline", f"{record['commit']}..HEAD", "--", *record["files"]]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            yield f"{path.name}: commit {record['commit']} is unknown here"
        elif done.stdout:
            yield f"{path.name}: {record['date']}, {len(done.stdout.splitlines())} commits to its code since"


def main(argv: Sequence[str] | None = None) -> int:
    """Write the pages again, or only say what would change; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tables", description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit with status 1 if a page would change")
    parser.add_argument("--stale", action="store_true", help="list the files of rows that are older than their code")
    parser.add_argument("--plots", action="store_true", help="draw the plots again, instead of the tables")
    options = parser.parse_args(argv)
    if options.plots or options.stale:
        for line in stale() if options.stale else (path.relative_to(ROOT) for path in plots.draw_all()):
            print(line)
        return 0
    changed = []
    for path, source in pages():
        before, name = path.read_text(encoding="utf-8"), str(path.relative_to(ROOT))
        try:
            after = rewritten(before, source)
        except ValueError as error:
            print(f"{name}: {error}", file=sys.stderr)
            return 2
        if after != before:
            changed.append(name)
            if not options.check:
                path.write_text(after, encoding="utf-8")
    print("\n".join(changed) or "nothing has changed")
    return int(options.check and bool(changed))


if __name__ == "__main__":
    sys.exit(main())
