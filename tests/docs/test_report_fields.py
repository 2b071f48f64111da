"""The page of the fields of a report: what the script writes, with a table for every record that a report may hold."""

import runpy

import msgspec
import pytest

from lightning_llm.ablate.report.record import ReportRecord, Row
from tests.docs.markdown import ROOT


@pytest.fixture(scope="module")
def script():
    return runpy.run_path(str(ROOT / "docs" / "report_fields.py"), run_name="report_fields")


def test_the_page_is_current(script):
    page = script["page"]()
    assert script["PAGE"].read_text(encoding="utf-8") == page, "write it again: python docs/report_fields.py"
    for kind in (ReportRecord, Row):
        assert all(f"\n| `{name}` | " in page for name in script["fields_of"](kind))


def test_every_record_of_a_report_has_a_table(script):
    assert set(script["linked"]()) | {ReportRecord} == set(script["RECORDS"])


class Undocumented(msgspec.Struct):
    """A record.

    Attributes:
        named: It has a line.
    """

    named: int
    forgotten: str | None = None


class LeftOver(msgspec.Struct):
    """A record.

    Attributes:
        named: It has a line,
            on two lines.
        gone: There is no such field.
    """

    named: int


def test_a_field_without_a_line_and_a_line_without_a_field_are_errors(script):
    with pytest.raises(ValueError, match="Undocumented: forgotten must be a field with a line"):
        script["section"](Undocumented)
    with pytest.raises(ValueError, match="LeftOver: gone must be a field with a line"):
        script["section"](LeftOver)
    assert script["attributes"](LeftOver)["named"] == "It has a line, on two lines."


@pytest.mark.parametrize(
    ("hint", "words"),
    [
        (float | None, "number or null"),
        (tuple[int, int], "2 × whole number"),
        (dict[str, Row], "object, by text: [Row](#row)"),
        (list[str], "list of text"),
    ],
)
def test_types_are_those_of_json(script, hint, words):
    assert script["in_words"](hint) == words
