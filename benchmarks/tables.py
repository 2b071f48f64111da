"""Tables and figures of the documentation, written from the rows in ``docs/benchmarks``.

    python -m benchmarks.tables            write them again
    python -m benchmarks.tables --check    exit with status 1 if that would change something
    python -m benchmarks.tables --plots    draw the plots again
    python -m benchmarks.tables --stale    list the files of rows whose code has changed since they were measured

A table stands between two comments. The first one says where its rows come from and what its columns are, each an
f-string over the fields of a row:

    <!-- table: swiglu-float32-cpu swiglu-bfloat16-cpu
    variant: {variant}
    peak, MiB: {peak_bytes / MiB:,.0f} ({peak_bytes / first.peak_bytes:.2f})
    -->
    …
    <!-- end of table -->

An experiment of ``lightning-llm ablate`` has a row for each side; its fields are those of ``report.json``.

``first`` is the first row of the same shape and dtype, ``of("ours")`` the row of that variant there. A line ``each:``
with an expression makes one row for each of its values, a line ``if:`` leaves rows out. A figure in a sentence is
followed by its comment: ``0.24<!-- swiglu-float32-cpu, ours 1: {ratio:.2f} -->``; the number before it is replaced.
"""

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks import plots
from lightning_llm.bench.harness import MEASURED, Row, read_rows

ROOT = Path(__file__).parents[1]
ROWS, REPORTS = ROOT / "docs" / "benchmarks", ROOT / "docs" / "experiments"
PAGES = ("README.md", "docs/*.md", "configs/*.yaml")
TABLE = re.compile(
    r"(?P<head><!-- table: (?P<files>[^\n]+)\n(?P<lines>.*?)\n-->\n).*?(?P<end><!-- end of table -->)", re.S
)
FIGURE = re.compile(
    r"(?P<old>[\d.,]*\d)(?P<mark><!-- (?P<file>[\w-]+)(, (?P<variant>[^:>]+))?: (?P<cell>\{[^>]+\}) -->)"
)
# in a comment of YAML: "1.70 nats [runs-cpu, shakespeare-char.yaml: {val_loss:.2f}]"
YAML_FIGURE = re.compile(
    r"(?P<old>[\d.,]*\d)(?P<mark>[^\d\n\[]*\[(?P<file>[\w-]+)(, (?P<variant>[^:\]]+))?: (?P<cell>\{[^\]]+\})\])"
)
UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def rows_of(name: str) -> list[Row]:
    """The rows of ``docs/benchmarks/NAME.json``, or the sides of the experiment that ``docs/experiments`` has.

    Raises:
        ValueError: There is no such file.
    """
    paths = [folder / f"{name}.json" for folder in (ROWS, REPORTS)]
    path = next((path for path in paths if path.is_file()), None)
    if path is None:
        raise ValueError(f"there is no {paths[0].relative_to(ROOT)}")
    rows = read_rows(path) if path.parent == ROWS else _sides(json.loads(path.read_text(encoding="utf-8")))
    fields = dict.fromkeys(name for row in rows for name in vars(row))
    return [Row(**{**fields, **vars(row)}) for row in rows]


def _sides(report: dict[str, Any]) -> list[Row]:
    """A row for the baseline and for each variant, with its cost as ``step`` and its tuning as ``rates``."""
    steps, rates = report["cost"]["sides"], (report["tuning"] or {}).get("sides", {})
    sides = {"baseline": report["baseline"] | {"null_sd": report["aa"]["null_sd"]}, **report["variants"]}
    return [
        Row(variant=name, step=steps.get(name), rates=rates.get(name), **side, shape=None, dtype=None)
        for name, side in sides.items()
    ]


def _value(expression: str, row: Row, group: Sequence[Row]) -> Any:
    """An expression of our own pages: over the fields of a row, ``first``, ``of(variant)`` and the units."""
    variants = {other.variant: other for other in group}
    names = {
        **dict.fromkeys(MEASURED),
        **UNITS,
        "int": int,
        "max": max,
        "min": min,
        **vars(row),
        "row": row,
        "group": group,
    }
    names |= {"first": group[0], "of": lambda name: variants.get(name, Row())}
    return eval(expression, {"__builtins__": {}, **names})


def cell(template: str, row: Row, group: Sequence[Row]) -> str:
    """One cell; a dash for a value that was not measured."""
    try:
        text: str = _value(f"f{template!r}", row, group)
    except TypeError:  # None in a calculation or a format
        return "–"
    return "–" if text == "None" else text


def _groups(rows: Sequence[Row]) -> dict[Any, list[Row]]:
    found: dict[Any, list[Row]] = {}
    for row in rows:
        found.setdefault((row.shape, row.dtype), []).append(row)
    return found


def table(files: str, lines: str) -> str:
    """A table in Markdown.

    Args:
        files: Names of files of rows.
        lines: A line for each column, as in the module's docstring.
    """
    rows = [row for name in files.split() for row in rows_of(name)]
    given = [line.partition(": ")[::2] for line in lines.splitlines()]
    settings = {name: expression for name, expression in given if name in ("each", "if")}
    columns = {heading: template for heading, template in given if heading not in settings}
    if "if" in settings:
        rows = [row for row in rows if _value(settings["if"], row, [row])]
    body: list[list[str]] = []
    seen: set[Any] = set()
    for group in _groups(rows).values():
        for row in group:
            key = _value(settings["each"], row, group) if "each" in settings else len(seen)
            if key not in seen:
                body.append([cell(template, row, group) for template in columns.values()])
            seen.add(key)
    written = [list(columns), ["---"] * len(columns), *body]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in written)


def figure(file: str, variant: str | None, template: str) -> str:
    """One number: of the row of a variant, or of the first row."""
    for group in _groups(rows_of(file)).values():
        for row in group:
            if variant is None or variant in (
                row.variant,
                f"{row.variant}, {row.dtype}",
                f"{row.variant}, {row.shape}",
            ):
                return cell(template, row, group)
    raise ValueError(f"{file} has no row {variant}")


def rewritten(text: str) -> str:
    """A page with its tables and figures as the rows have them."""
    text = TABLE.sub(lambda m: m["head"] + table(m["files"], m["lines"]) + m["end"], text)
    for pattern in (FIGURE, YAML_FIGURE):
        text = pattern.sub(lambda m: figure(m["file"], m["variant"], m["cell"]) + m["mark"], text)
    return text


def pages() -> Iterator[Path]:
    """The files that may have tables and figures."""
    for pattern in PAGES:
        yield from sorted(ROOT.glob(pattern))


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
    if options.plots:
        for path in plots.draw_all():
            print(path.relative_to(ROOT))
        return 0
    if options.stale:
        for line in stale():
            print(line)
        return 0
    changed = []
    for path in pages():
        before = path.read_text(encoding="utf-8")
        try:
            after = rewritten(before)
        except ValueError as error:
            print(f"{path.relative_to(ROOT)}: {error}", file=sys.stderr)
            return 2
        if after != before:
            changed.append(str(path.relative_to(ROOT)))
            if not options.check:
                path.write_text(after, encoding="utf-8")
    print("\n".join(changed) or "nothing has changed")
    return int(options.check and bool(changed))


if __name__ == "__main__":
    sys.exit(main())
