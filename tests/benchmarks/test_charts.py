"""The plots of all benches: colors, spreads, and labels that do not overlap."""

from matplotlib.figure import Figure

from benchmarks.charts import COLORS, color, draw_points, in_legend, panels, spread
from benchmarks.rows import Row
from tests.figures import overlaps, texts


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


def test_a_variant_has_one_color_everywhere():
    assert color("ours") == color("ours 1, 4 chunks") == color("fit") == color("ours (compiled)")
    assert len({color(name) for name in ("ours 0", "ours 1", "ours 2", "checkpoint", "standard")}) == 5
    assert color("litgpt (compiled)") == color("litgpt") != color("transformers") != color("standard") == COLORS[""]
    assert in_legend("ours 1, 4 chunks") == "ours, level 1, 4 chunks"
    assert in_legend("ours, 4 chunks") == "ours, 4 chunks"


def test_the_spread_is_that_of_the_row():
    row = Row(tokens_per_s=100, total_s=1.0, total_p20_s=0.8, total_p80_s=1.25, ratio=2.0, ratio_p20=1.5, ratio_p80=3.0)
    assert spread(row, "total_s") == (1.0, 0.8, 1.25)
    assert spread(row, "tokens_per_s") == (100, 80, 125)
    # of one time, the percentiles are itself to the last bit: 3886.2 × 4.5093 / 4.5093 is more than 3886.2
    once = Row(total_s=4.5093, total_p20_s=4.5093, total_p80_s=4.5093, tokens_per_s=3886.2)
    assert spread(once, "tokens_per_s") == (3886.2, 3886.2, 3886.2)
    assert spread(row, "ratio") == (2.0, 1.5, 3.0)
    assert spread(row, "peak_bytes") is None
    assert spread(Row(ratio=2.0), "ratio") == (2.0, 2.0, 2.0)


def test_titles_have_what_differs():
    rows = [Row(shape="a", dtype=dtype) for dtype in ("float32", "bfloat16", "float32")]
    assert {name: len(group) for name, group in panels(rows).items()} == {"float32": 2, "bfloat16": 1}
    assert list(panels(rows[:1])) == [""]


def test_overlaps_are_found(figures, tmp_path):
    figure = Figure()
    figure.text(0.5, 0.5, "one")
    figure.text(0.51, 0.5, "other")
    figure.text(0.99, 0.1, "too long for the figure")
    assert overlaps(figure) == [("one", "other"), "too long for the figure"]
