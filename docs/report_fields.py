"""Write docs/reference/report.md: every field of ``report.json`` with its type and its meaning.

    python docs/report_fields.py

Fields and types come from the records in ``lightning_llm.ablate.report.record``, and what they mean from their
docstrings. A field without a line, or a line without a field, is an error.
"""

import dataclasses
import inspect
import re
import types
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from lightning_llm.ablate.ratios import StepCost
from lightning_llm.ablate.report import record
from lightning_llm.statistics.power import FurtherPairs
from lightning_llm.statistics.robust import Robust
from lightning_llm.statistics.verdict import Noise, Verdict
from lightning_llm.statistics.windows import WindowError

PAGE = Path(__file__).parent / "reference" / "report.md"
INTRODUCTION = """# Fields of a report

`report.json` holds one `Report`, and so do `--format json` and
[`Report.to_dict`](ablate.md). Read the file with [`Report.read`](ablate.md): in other programs, note that a field with
its default value may be missing. `null` takes the place of a number that is not known. `python docs/report_fields.py`
writes this page from docstrings.

"""
RECORDS: tuple[type[Any], ...] = (
    *(record.ReportRecord, record.Row, Noise, Robust, record.Pair, FurtherPairs, WindowError, record.Idea),
    *(record.Variant, record.Mean, record.Start, StepCost, record.Design, record.Checks, record.Tuning),
    *(
        record.TunedVariant,
        record.Spent,
        record.Curve,
        record.Sizes,
        record.SizeFacts,
        record.Predicted,
        record.LearnedDrift,
    ),
    *(record.StoredPrediction, record.Outcome, record.StreamFacts, record.StepMemory),
)
NAMES: dict[type, str] = {record.ReportRecord: "Report"}
SIMPLE = {bool: "true or false", int: "whole number", float: "number", str: "text", type(None): "null", Any: "JSON"}


def page() -> str:
    """The whole page: a table for each record."""
    return INTRODUCTION + "\n".join(map(section, RECORDS))


def section(kind: type) -> str:
    """The table of a record.

    Raises:
        ValueError: A field has no line in its docstring, or a line has no field.
    """
    meanings = attributes(kind)
    hints = fields_of(kind)
    if odd := set(meanings) ^ set(hints):
        raise ValueError(f"{kind.__name__}: {', '.join(sorted(odd))} must be a field with a line in the docstring")
    rows = [f"| `{name}` | {in_words(hint)} | {in_markdown(meanings[name])} |" for name, hint in hints.items()]
    summary = in_markdown((inspect.getdoc(kind) or "").partition("\n")[0])
    head = f"## {name_of(kind)}\n\n{summary}\n\n| field | type | meaning |\n| --- | --- | --- |\n"
    return head + "".join(f"{row}\n" for row in rows)


def name_of(kind: type) -> str:
    """The name of a record on the page."""
    return NAMES.get(kind, kind.__name__)


def fields_of(kind: type) -> dict[str, Any]:
    """The types of a record's fields; of a row, its own come before those of its verdict."""
    hints = typing.get_type_hints(kind)
    if not dataclasses.is_dataclass(kind):
        return {field.name: hints[field.name] for field in msgspec.structs.fields(kind)}
    names = [field.name for field in dataclasses.fields(kind)]
    inherited = {field.name for field in dataclasses.fields(Verdict)} if kind is record.Row else set()
    return {name: hints[name] for name in sorted(names, key=inherited.__contains__)}


def attributes(kind: type) -> dict[str, str]:
    """Meaning of each field, from the docstrings of a record and of the classes that it extends."""
    found: dict[str, str] = {}
    for each in reversed(kind.__mro__):
        if not (dataclasses.is_dataclass(each) or issubclass(each, msgspec.Struct)):
            continue
        _, _, text = (inspect.getdoc(each) or "").partition("\nAttributes:\n")
        for name, meaning in re.findall(r"^ {4}(\w+): (.+(?:\n {8,}.+)*)", text, re.M):
            found[name] = " ".join(meaning.split())
    return found


def in_words(hint: Any) -> str:
    """A type as JSON has it, with a link to the table of a record."""
    origin = typing.get_origin(hint)
    inner = typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(map(in_words, inner))
    if origin is typing.Literal:
        return ", ".join(f"`{value}`" for value in inner)
    if origin in (list, Sequence):
        return f"list of {in_words(inner[0])}"
    if origin is tuple:
        return f"{len(inner)} × {in_words(inner[0])}"
    if origin is dict:
        return f"object, by text: {in_words(inner[1])}"
    return SIMPLE[hint] if hint in SIMPLE else f"[{name_of(hint)}](#{name_of(hint).lower()})"


def in_markdown(text: str) -> str:
    """A line of a docstring in Markdown."""
    return text.replace("``", "`").replace("|", "\\|").replace("`None`", "`null`")


def linked() -> Iterator[type[Any]]:
    """Yield every record that a field of another one may hold."""
    for kind in RECORDS:
        for hint in fields_of(kind).values():
            yield from _records_in(hint)


def _records_in(hint: Any) -> Iterator[type]:
    for inner in typing.get_args(hint):
        yield from _records_in(inner)
    if inspect.isclass(hint) and (dataclasses.is_dataclass(hint) or issubclass(hint, msgspec.Struct)):
        yield hint


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
