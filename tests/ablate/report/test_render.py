"""The renderer of reports: terminal, page, notebook, Markdown, LaTeX, CSV, and files with figures."""

import re

from lightning_llm.ablate.page import sections_of
from tests.ablate.test_report import row_of

from lightning_llm.__main__ import main
from lightning_llm.ablate.report import report_of
from lightning_llm.ablate.results import load_experiment
from tests.ablate.test_curves import PACES, curves_with


def test_the_page_needs_nothing_else_and_escapes_names(done):
    assert main(["ablate", "report", str(done.out)]) == 0
    page = (done.out / "report.html").read_text()
    assert page.count("<svg") == 3
    assert page.count("&lt;b&gt;$x$&amp;") >= 4  # the tables and all plots
    assert "<b>" not in page
    assert "<script" not in page
    used = re.findall(r"(?:href|src|url)\s*[=(]\s*[\"']?([^\"')]+)", page)
    assert {link[0] for link in used} == {"#"}  # inside the page
    assert "prefers-color-scheme: dark" in page
    assert "currentColor" in page
    before = page
    assert main(["ablate", "report", str(done.out)]) == 0
    assert (done.out / "report.html").read_text() == before


def test_the_page_compares_with_the_delta_of_the_experiment(done):
    report = report_of(load_experiment(done.out))
    for name, pace in PACES.items():
        report["cost"]["variants"][name] |= pace | dict.fromkeys(("step_p20_s", "step_p80_s"), pace["step_s"])
    curves = curves_with(20, 60, 100)  # off by about 0.008
    assert "<td>1</td><td>–</td></tr>" in row_of("".join(sections_of(report, curves)), "a")
    assert "<td>1</td><td>-0." in row_of("".join(sections_of(report | {"delta": 0.1}, curves)), "a")
