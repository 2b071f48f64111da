"""The plots of the pages: of the committed rows, embedded, and without labels that overlap."""

import itertools
import re

import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text
from PIL import Image

from benchmarks import cost, optimizer, overhead, plots, process_scaling, start_up, tables
from lightning_llm.bench import generate
from lightning_llm.bench.plots import COLORS, color, draw_points, panels, shown, spread
from lightning_llm.bench.rows import Row, read_rows
from tests.docs.markdown import PAGES, ROOT

DOCS = ROOT / "docs"


@pytest.fixture
def figures(monkeypatch):
    """The figures that were saved."""
    found = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *args, **kw: (found.append(self), save(self, *args, **kw)))
    return found


def texts(figure):
    figure.draw_without_rendering()
    found = [text for text in figure.findobj(Text) if text.get_visible() and text.get_text().strip()]
    ticks = [tick for axis in figure.axes for tick in (*axis.xaxis.get_major_ticks(), *axis.yaxis.get_major_ticks())]
    unseen = set()
    for axis in figure.axes:
        for of, (low, high) in ((axis.xaxis, sorted(axis.get_xlim())), (axis.yaxis, sorted(axis.get_ylim()))):
            for tick in of.get_major_ticks():
                if not low <= tick.get_loc() <= high or not tick.label1.get_visible():
                    unseen |= {tick.label1, tick.label2}
    return [text for text in found if text not in unseen | {tick.label2 for tick in ticks}]


def overlaps(figure):
    """Pairs of texts that cover one another by more than a pixel, and texts that leave the figure."""
    boxes = [(text.get_text(), text.get_window_extent()) for text in texts(figure)]
    pairs = [
        (one, other)
        for (one, box), (other, its) in itertools.combinations(boxes, 2)
        if min(box.x1, its.x1) - max(box.x0, its.x0) > 1 and min(box.y1, its.y1) - max(box.y0, its.y0) > 1
    ]
    width, height = figure.bbox.width, figure.bbox.height
    outside = [name for name, box in boxes if box.x0 < -1 or box.y0 < -1 or box.x1 > width + 1 or box.y1 > height + 1]
    return pairs + outside


@pytest.mark.parametrize("name", plots.PLOTS)
def test_a_plot_is_that_of_its_rows(name):
    picture = Image.open(DOCS / name)
    again = "python -m benchmarks.tables --plots draws it again"
    assert picture.text["Description"] == plots.fingerprint(plots.rows_of(plots.PLOTS[name])), again
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
        for axis in figure.axes:  # log axes have no zero to begin at
            assert axis.get_xscale() == "log" or axis.get_xlim()[0] == 0
        labels = {axis.get_xlabel() for axis in figure.axes} | {axis.get_ylabel() for axis in figure.axes}
        assert any("is better" in label for label in labels), name


@pytest.mark.parametrize("bench", [optimizer, overhead, process_scaling, generate], ids=lambda bench: bench.__name__)
def test_labels_of_users_plots_do_not_overlap(bench, figures, tmp_path):
    source = DOCS / "benchmarks" / f"{bench.__name__.rpartition('.')[2].replace('_', '-')}-cpu.json"
    if not source.is_file():
        pytest.skip(f"no {source.name}")
    bench.BENCH.draw(read_rows(source), tmp_path / "x.png", "a title: some machine, 2 threads, default allocator")
    assert overlaps(figures[0]) == []


def test_points_close_together_keep_their_names_apart(figures, tmp_path):
    places = {"standard": (1, 100), "checkpoint": (1.22, 54), "ours 0": (1.04, 55), "ours 1": (1.24, 24)}
    places |= {"ours 2": (1.27, 25), "norm + standard": (1.03, 107)}
    rows = [
        Row(variant=name, shape="s", dtype=dtype, total_s=time, total_p20_s=0.98 * time, total_p80_s=1.1 * time)
        for dtype in ("float32", "bfloat16")
        for name, (time, _) in places.items()
    ]
    for row in rows:
        row.ratio, row.peak_bytes = row.total_s, places[row.variant][1] * 2**20
    for is_relative in (False, True):
        draw_points(rows, tmp_path / "x.png", "a title", is_relative=is_relative)
        assert overlaps(figures[-1]) == []
    names = {text.get_text() for text in texts(figures[-1])}
    assert {"ours, level 1", "ours, level 2 with norm", "checkpoint", "float32"} <= names


def test_overlaps_are_found(figures, tmp_path):
    figure = Figure()
    figure.text(0.5, 0.5, "one")
    figure.text(0.51, 0.5, "other")
    figure.text(0.99, 0.1, "too long for the figure")
    assert overlaps(figure) == [("one", "other"), "too long for the figure"]


def test_starts_are_drawn_below_the_sizes(figures, tmp_path):
    rows = read_rows(DOCS / "benchmarks" / "cost-cpu.json")
    start = Row(axis="startup", variant="store there", parts_s=dict.fromkeys(start_up.PARTS, 1.0))
    cost.draw([*rows, start], tmp_path / "x.png", "a title")
    cost.draw([start], tmp_path / "y.png", "a title")
    assert [len(figure.axes) for figure in figures] == [11, 1]
    assert [overlaps(figure) for figure in figures] == [[], []]


def test_a_variant_has_one_color_everywhere():
    assert color("ours") == color("ours 1, 4 chunks") == color("fit") == color("ours (compiled)")
    assert len({color(name) for name in ("ours 0", "ours 1", "ours 2", "checkpoint", "standard")}) == 5
    assert color("litgpt (compiled)") == color("litgpt") != color("transformers") != color("standard") == COLORS[""]
    assert shown("ours 1, 4 chunks") == "ours, level 1, 4 chunks"
    assert shown("ours, 4 chunks") == "ours, 4 chunks"


def test_the_spread_is_that_of_the_row():
    row = Row(tokens_per_s=100, total_s=1.0, total_p20_s=0.8, total_p80_s=1.25, ratio=2.0, ratio_p20=1.5, ratio_p80=3.0)
    assert spread(row, "total_s") == (1.0, 0.8, 1.25)
    assert spread(row, "tokens_per_s") == (100, 80, 125)
    assert spread(row, "ratio") == (2.0, 1.5, 3.0)
    assert spread(row, "peak_bytes") is None
    assert spread(Row(ratio=2.0), "ratio") == (2.0, 2.0, 2.0)


def test_titles_have_what_differs():
    rows = [Row(shape="a", dtype=dtype) for dtype in ("float32", "bfloat16", "float32")]
    assert {name: len(group) for name, group in panels(rows).items()} == {"float32": 2, "bfloat16": 1}
    assert list(panels(rows[:1])) == [""]


def test_the_command_draws(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    monkeypatch.setattr(plots, "draw_all", lambda: iter([tmp_path / "a.png"]))
    assert tables.main(["--plots"]) == 0
    assert capsys.readouterr().out == "a.png\n"
