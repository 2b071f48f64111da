"""The plots of the pages: of the committed rows, embedded, and without labels that overlap."""

import re

import numpy as np
import pytest
from matplotlib.colors import to_rgba
from PIL import Image

from benchmarks import cost, optimizer, overhead, plots, process_scaling, start_up, tables
from lightning_llm.bench import generate
from lightning_llm.bench.plots import color
from lightning_llm.bench.rows import Row, read_rows
from tests.docs.markdown import PAGES, ROOT
from tests.figures import overlaps

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


def test_labels_do_not_overlap(figures, tmp_path, capsys):
    assert [path.relative_to(tmp_path).as_posix() for path in plots.draw_all(tmp_path)] == list(plots.PLOTS)
    for name, figure in zip(plots.PLOTS, figures, strict=True):
        assert overlaps(figure) == [], name
        for axis in figure.axes:  # log axes have no zero to begin at, and differences go both ways
            assert axis.yaxis.label.get_window_extent().height <= 1.02 * axis.bbox.height, name
            is_amount = axis.get_xscale() != "log" and not axis.get_xlabel().startswith("difference")
            assert not is_amount or axis.get_xlim()[0] == 0
        labels = {axis.get_xlabel() for axis in figure.axes} | {axis.get_ylabel() for axis in figure.axes}
        assert any("is better" in label for label in labels), name


def test_the_line_at_0_leaves_room_for_words(figures, tmp_path):
    plot = plots.PLOTS["images/verdicts.png"]
    plot.draw(plots.content_of(*plots.sources_of(plot)), tmp_path / "x.png", plot.title)
    axis = figures[0].axes[0]
    line = next(each for each in axis.collections if np.ptp(each.get_paths()[0].vertices[:, 0]) == 0)
    pieces = [axis.transData.transform(path.vertices) for path in line.get_paths()]
    words = next(text for text in axis.texts if text.get_text().startswith("neither")).get_window_extent()
    assert words.x0 < pieces[0][0, 0] < words.x1
    assert len(pieces) == 2
    assert all(piece[:, 1].max() < words.y0 or piece[:, 1].min() > words.y1 for piece in pieces)


def test_bars_of_ours_are_red_and_all_axes_have_their_dtype(figures, tmp_path):
    for name in ("baselines", "techniques"):
        plot = plots.PLOTS[f"benchmarks/{name}-cpu.png"]
        plot.draw(plots.content_of(*plots.sources_of(plot)), tmp_path / "x.png", plot.title)
    baselines, techniques = figures
    assert [axis.get_title() for axis in baselines.axes] == ["bfloat16", "bfloat16", "float32", "float32"]
    names = [label.get_text() for label in techniques.axes[0].get_yticklabels()]
    red = [bar.get_facecolor() == to_rgba(color("ours")) for bar in techniques.axes[0].patches]
    assert [name for name, is_ours in zip(names, red, strict=True) if is_ours] == names[4:7]
    assert names[4:7] == ["own operators", "chunked loss", "memory-optimized MLP"]


@pytest.mark.parametrize("bench", [optimizer, overhead, process_scaling, generate], ids=lambda bench: bench.__name__)
def test_labels_of_users_plots_do_not_overlap(bench, figures, tmp_path):
    source = DOCS / "benchmarks" / f"{bench.__name__.rpartition('.')[2].replace('_', '-')}-cpu.json"
    if not source.is_file():
        pytest.skip(f"no {source.name}")
    bench.BENCH.draw(read_rows(source), tmp_path / "x.png", "a title: some machine, 2 threads, default allocator")
    assert overlaps(figures[0]) == []


def test_starts_are_drawn_below_the_sizes(figures, tmp_path):
    rows = read_rows(DOCS / "benchmarks" / "cost-cpu.json")
    start = Row(axis="startup", variant="store there", parts_s=dict.fromkeys(start_up.PARTS, 1.0))
    cost.draw([*rows, start], tmp_path / "x.png", "a title")
    cost.draw([start], tmp_path / "y.png", "a title")
    assert [len(figure.axes) for figure in figures] == [11, 1]
    assert [overlaps(figure) for figure in figures] == [[], []]


def test_the_command_draws(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    monkeypatch.setattr(plots, "draw_all", lambda: iter([tmp_path / "a.png"]))
    assert tables.main(["--plots"]) == 0
    assert capsys.readouterr().out == "a.png\n"
