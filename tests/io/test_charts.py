"""One style of plots: for a light page, for a dark one, and for both."""

import pytest
from matplotlib import rcParams
from matplotlib.image import imread

from lightning_llm.io.charts import DARK_INK, DPI, INK, PAGE_INK, WIDTH, canvas, chart, legend, svg


def draw(axes, label):
    for axis in axes:
        axis.plot([0, 1], [1, 2], label=label)
    legend(axes[0])


@pytest.mark.parametrize(("dark", "ink", "opacity"), [(False, INK, 1.0), (True, DARK_INK, 0.0)])
def test_a_png_is_for_one_page(tmp_path, dark, ink, opacity):
    with chart(tmp_path / "plot.png", "title", height=2.0, columns=2, dark=dark, metadata={"Title": "x"}) as axes:
        assert axes.shape == (1, 2)
        draw(axes[0], "line")
        assert axes[0, 0].xaxis.label.get_color() == ink
        assert [len(each.get_texts()) for each in axes[0, 0].figure.legends] == [1]  # one label for both axes
    pixels = imread(tmp_path / "plot.png")
    assert pixels.shape[:2] == (2.5 * DPI, round(WIDTH * DPI))
    assert pixels[0, 0, 3] == opacity


def test_an_svg_takes_the_ink_of_its_page_and_is_the_same_again():
    found = svg(draw, "a <b> & $x$", width=4, height=2, columns=2)
    assert found.startswith("<svg")
    assert found.endswith("</svg>")
    assert "currentColor" in found
    assert PAGE_INK not in found
    assert "a &lt;b&gt; &amp; $x$" in found  # text, and no formula
    assert svg(draw, "a <b> & $x$", width=4, height=2, columns=2) == found


def test_a_figure_outlives_its_style():
    before = dict(rcParams)
    with canvas(3, 2, dpi=50, nrows=2, sharex=True) as axes:
        figure = axes.flat[0].figure
    assert dict(rcParams) == before
    figure.canvas.draw()
    assert figure.canvas.get_width_height() == (150, 100)
