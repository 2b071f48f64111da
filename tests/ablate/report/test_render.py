"""The renderer of reports: terminal, page, notebook, Markdown, LaTeX, CSV, and files with figures."""

import csv
import dataclasses
import io
import json
import re

import msgspec
import pytest

from lightning_llm.__main__ import main
from lightning_llm.ablate import verdict
from lightning_llm.ablate.report.from_experiment import report_of
from lightning_llm.ablate.report.render import CSV_COLUMNS, page, print_table
from lightning_llm.ablate.report.report import Report, print_reports
from lightning_llm.ablate.report.sections import Table
from lightning_llm.ablate.results import load_experiment
from lightning_llm.io.console import Console
from lightning_llm.statistics.windows import WindowError
from tests.ablate.conftest import work
from tests.ablate.report.test_from_experiment import cells_of
from tests.ablate.test_curves import PACES, curves_with

BASE = [3.0, 3.1, 3.2, 3.3, 3.4]
HOSTILE = "<b>$x$&\x1b[31m|\u202e"
SHOWN = r"<b>$x$&\x1b[31m|\u202e"


@pytest.fixture(scope="module")
def hostile():
    """A report whose names HTML, LaTeX, Markdown, or a terminal would read."""
    shifted = [value + 0.1 + 0.01 * (n % 2) for n, value in enumerate(BASE)]
    return verdict({"<i>base": BASE, HOSTILE: shifted, "plain": BASE[::-1]}, baseline="<i>base", delta=0.05)


def printed(show, *content, width=120):
    file = io.StringIO()
    show(*content, Console(file=file, width=width))
    return file.getvalue()


def test_the_page_needs_nothing_else_and_escapes_names(done):
    assert main(["ablate", "report", str(done.out)]) == 0
    html = (done.out / "report.html").read_text()
    assert html.count("<svg") == 3
    assert html.count("&lt;b&gt;$x$&amp;") >= 4  # the tables and all plots
    assert "<b>" not in html
    assert "<script" not in html
    used = re.findall(r"(?:href|src|url)\s*[=(]\s*[\"']?([^\"')]+)", html)
    assert {link[0] for link in used} == {"#"}  # inside the page
    assert "prefers-color-scheme: dark" in html
    assert "currentColor" in html
    assert main(["ablate", "report", str(done.out)]) == 0
    assert (done.out / "report.html").read_text() == html


def test_the_page_compares_with_the_delta_of_the_experiment(done):
    report = report_of(load_experiment(done.out))
    curves = curves_with(20, 60, 100)  # off by about 0.008
    report.curves = curves.summaries(("baseline", "a"), PACES, report.delta)
    assert "<td>1</td><td>–</td></tr>" in cells_of(page(report), "a")
    report.curves = curves.summaries(("baseline", "a"), PACES, 0.1)
    assert "<td>1</td><td>-0." in cells_of(page(report), "a")


def test_a_written_report_is_json_a_page_and_figures(done):
    report = report_of(load_experiment(done.out))
    assert report.write(done.out) == done.out / "report.html"
    assert Report.read(done.out) == report
    files = sorted(path.name for path in (done.out / "figures").iterdir())
    assert files == [f"{name}.{kind}" for name in ("cost", "curves", "differences") for kind in ("png", "svg")]
    for path in (done.out / "figures").iterdir():
        assert path.read_bytes().startswith(b"\x89PNG" if path.suffix == ".png" else b"<?xml")


def test_a_page_and_a_fragment_show_hostile_names_as_text(hostile):
    whole, fragment = page(hostile), hostile._repr_html_()
    for html in (whole, fragment):
        assert r"&lt;b&gt;$x$&amp;\x1b[31m|\u202e" in html
        assert "&lt;i&gt;base" in html
        assert "<b>" not in html
        assert "<i>" not in html
        assert "\x1b" not in html
        assert "\u202e" not in html
        assert html.count("<svg") == 1
    assert whole.startswith("<!doctype html>")
    assert fragment.startswith('<div class="lightning-llm-report">')
    assert "<html" not in fragment
    assert "<body" not in fragment
    assert "<details><summary>Noise</summary>" in fragment
    assert not re.search(r"^\s*(body|table|p|h1)\s*{", fragment, re.MULTILINE)  # its style is its own


def test_text_shows_hostile_names_as_escapes(hostile):
    assert SHOWN in str(hostile)
    assert not {"\x1b", "\u202e"} & {*str(hostile)}
    assert str(hostile) == repr(hostile) == hostile.to_text("text")


def test_text_in_a_notebook_is_one_text(monkeypatch, capsys):
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)  # there, rich shows each line as an output of its own
    report = verdict({"baseline": BASE, "other": BASE[::-1]})
    assert "other" in str(report)
    report.show()
    assert "pairs   difference" in capsys.readouterr().out


def test_markdown_has_the_table_and_the_sentences(hostile):
    lines = hostile.to_markdown().splitlines()
    head, rule, row, plain = (line for line in lines if line.startswith("|"))
    assert head == "| variant | pairs | difference | 97.5% interval | p adj. | verdict |"
    assert rule == "| --- | --- | --- | --- | --- | --- |"
    assert row.startswith(r"| &lt;b>$x$&amp;\\x1b[31m\|\\u202e | 5 | +0.1040 | +0.0")
    assert row.endswith(" | worse |")
    assert plain.startswith("| plain | 5 | ")
    assert any(line.startswith("- plain: ") for line in lines)
    assert "<b>" not in hostile.to_markdown()


def test_the_error_over_windows_has_a_column_where_it_is_known(hostile):
    first, *others = hostile.rows
    rows = [dataclasses.replace(first, window_error=WindowError(0.01, 0.00123, 8)), *others]
    report = msgspec.structs.replace(hostile, rows=rows)
    head, _, row, plain = (line for line in report.to_markdown().splitlines() if line.startswith("|"))
    assert head == "| variant | pairs | difference | 97.5% interval | window error | p adj. | verdict |"
    assert row.split(" | ")[4] == "0.0012"
    assert plain.split(" | ")[4] == "–"


def test_latex_is_a_table_whose_names_are_escaped(hostile):
    lines = hostile.to_latex().splitlines()
    assert (lines[0], lines[1], lines[-1]) == (r"\begin{tabular}{lrrrrl}", r"\toprule", r"\end{tabular}")
    row = lines[4]
    assert row.startswith(r"$<$b$>$\$x\$\&\textbackslash{}x1b[31m|\textbackslash{}u202e & 5 & $+0.1040$ & $+0.0")
    assert row.endswith(r" & worse \\")


def test_csv_has_all_rows_with_all_digits(done):
    report = report_of(load_experiment(done.out))
    head, *rows = csv.reader(io.StringIO(report.to_csv()))
    assert tuple(head) == CSV_COLUMNS
    assert len(rows) == len(report.rows) == 4
    for cells, row in zip(rows, report.rows, strict=True):
        found = dict(zip(head, cells, strict=True))
        assert (found["variant"], found["kind"], found["verdict"]) == (row.variant, row.kind, row.verdict)
        assert found["difference"] == ("" if row.difference is None else repr(row.difference))
        ends = ("", "") if row.interval is None else tuple(map(repr, row.interval))
        assert (found["low"], found["high"]) == ends
    first = dict(zip(head, rows[0], strict=True))
    assert (first["steps"], first["step_s"], first["peak_bytes"]) == ("6", "0.5", str(2**20))


def test_csv_has_no_control_characters(hostile):
    assert SHOWN in hostile.to_csv()
    assert not {"\x1b", "\u202e"} & {*hostile.to_csv()}


def test_json_is_the_whole_report(hostile, tmp_path):
    path = tmp_path / "a.json"
    path.write_text(hostile.to_json())
    assert Report.read(path) == hostile
    assert json.loads(hostile.to_json()) == hostile.to_dict()


def test_several_reports_are_one_json(hostile, capsys):
    print_reports([hostile, hostile], "json", Console())
    assert json.loads(capsys.readouterr().out) == [hostile.to_dict()] * 2
    print_reports([hostile], "json", Console())
    assert json.loads(capsys.readouterr().out) == hostile.to_dict()
    print_reports([hostile, hostile], "csv", Console())
    assert capsys.readouterr().out == f"{hostile.to_csv()}\n\n{hostile.to_csv()}\n"


def test_only_the_first_column_is_folded():
    rows = [("model.architecture.intermediate_size=1024", "worse", "+0.0123")]
    said = printed(print_table, Table(("variant", "verdict", "difference"), rows), width=48)
    assert "…" not in said
    assert "+0.0123" in said
    assert "".join(line[:24].strip() for line in said.splitlines()[3:]).startswith(rows[0][0])


def test_a_narrow_terminal_leaves_out_optional_columns():
    table = Table(("group", "loss", "recall"), [("a long name", "2.5000", "1.5000")], optional=["recall"])
    assert "recall" in printed(print_table, table, width=60)
    assert "recall" not in printed(print_table, table, width=30)
    assert "2.5000" in printed(print_table, table, width=30)


@pytest.mark.parametrize("name", ["a", "model.architecture.intermediate_size=1024"])
def test_no_verdict_is_cut_on_80_columns(experiment, name):
    plan = experiment({name: {"effect": 0.0}, "b": {"effect": 0.02}})
    work(plan.out)
    said = printed(report_of(load_experiment(plan.out)).show, width=80)
    assert "…" not in said
    assert "undecided" in said
    assert " worse" in said
