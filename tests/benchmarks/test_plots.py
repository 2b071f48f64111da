"""The plots of the pages: of the committed rows, embedded, and without labels that overlap."""

import re

import pytest
from PIL import Image

from benchmarks import plots
from tests.docs.markdown import PAGES, ROOT

DOCS = ROOT / "docs"


@pytest.mark.parametrize("name", plots.PLOTS)
def test_a_plot_is_that_of_its_rows(name):
    picture = Image.open(DOCS / name)
    again = "python -m benchmarks.tables --plots draws it again"
    assert picture.text["Description"] == plots.fingerprint(*plots.sources_of(plots.PLOTS[name])), again
    assert picture.width == 1660


def test_each_plot_is_embedded_and_drawn_by_the_command():
    embedded = set()
    for page in PAGES:
        found = re.findall(r"""(?:!\[[^\]]*\]\(|(?:src|srcset)=")([^)"]+\.png)""", page.read_text(encoding="utf-8"))
        embedded |= {(page.parent / target).resolve() for target in found}
    there = {*(DOCS / "benchmarks").glob("*.png"), *(DOCS / "images").glob("*.png")}
    assert there == embedded
    drawn = {DOCS / name for name in plots.PLOTS}
    assert {path for path in there if not path.name.startswith("dashboard-")} == drawn
