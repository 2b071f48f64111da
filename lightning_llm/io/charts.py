"""Every plot of the package in one style: its canvas, letters and colors, as a PNG or as an SVG within a page.

A PNG is for a light page or for a dark one. An SVG is for both: its ink becomes the page's color of text. matplotlib is
imported when a plot is drawn.
"""

import contextlib
import io
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from lightning_llm.io.atomic import atomic_file

WIDTH, DPI = 8.3, 200  # inches; at 100 pixels per inch that of a README, twice as sharp
INK, DARK_INK = "#24292f", "#e6edf3"  # lines and letters on a light and on a dark page
PAGE_INK = "#010203"  # of an SVG: nothing else has this color
GRAY = "#8c8c8c"
# All can be seen on both pages.
COLORS = ("#3b82c4", "#d5443a", "#5a9e3d", "#d08200", "#8e6fc1", "#2a9d8f", "#b84a9c", "#a0744b")
_INKED = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
_STYLE: dict[str, Any] = {
    "font.size": 9.5,
    "axes.titlesize": 10,
    "axes.facecolor": "none",
    "legend.frameon": False,
    "grid.alpha": 0.3,
}
_ON_A_PAGE: dict[str, Any] = {
    **{"svg.fonttype": "none", "svg.hashsalt": "ablate", "text.parse_math": False},  # texts stay as they are
    **{"axes.spines.top": False, "axes.spines.right": False, "grid.alpha": 0.25, "grid.color": GRAY},
}


@contextlib.contextmanager
def canvas(
    width: float,
    height: float,
    *,
    ink: str = INK,
    background: str = "white",
    dpi: float = DPI,
    style: dict[str, Any] | None = None,
    **options: Any,
) -> Iterator[Any]:
    """Axes in rows and columns, of a figure with a canvas of its own; ``axes.flat[0].figure`` outlives the block.

    Args:
        width: Of the figure, in inches.
        height: Of the figure, in inches.
        ink: Color of lines and letters.
        background: Behind the axes.
        dpi: Pixels per inch.
        style: More of matplotlib's ``rcParams``.
        options: Of ``Figure.subplots``: ``nrows``, ``ncols``, ``sharex``, …
    """
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    settings: Any = dict.fromkeys(_INKED, ink) | _STYLE | (style or {})
    with rc_context(settings):
        figure = Figure((width, height), dpi, layout="constrained", facecolor=background)
        FigureCanvasAgg(figure)
        yield figure.subplots(squeeze=False, **options)


@contextlib.contextmanager
def chart(
    path: Path,
    title: str,
    *,
    height: float,
    rows: int = 1,
    columns: int = 1,
    dark: bool = False,
    metadata: dict[str, str] | None = None,
    **options: Any,
) -> Iterator[Any]:
    """Axes, in ``rows`` and ``columns``, of a plot that is written as PNG at the end.

    Args:
        path: Where it is written.
        title: Above the plot.
        height: Of all rows, in inches.
        rows: Of axes.
        columns: Of axes.
        dark: For a dark page, which shows through.
        metadata: Of the PNG.
        options: Of ``Figure.subplots``.
    """
    ink, background = (DARK_INK, "none") if dark else (INK, "white")
    size: Any = {"nrows": rows, "ncols": columns}
    with canvas(WIDTH, height + 0.5, ink=ink, background=background, **size, **options) as axes:
        figure = axes[0, 0].figure
        figure.suptitle(title, fontsize=10.5)
        yield axes
        save(figure, path, metadata)


def save(figure: Any, path: Path, metadata: dict[str, str] | None = None) -> None:
    """Write a figure as PNG."""
    with atomic_file(path) as file:
        figure.savefig(file, format="png", metadata=metadata)


def svg(draw: Callable[..., None], *content: Any, width: float, height: float, columns: int = 1) -> str:
    """A plot as the text of an ``<svg>`` for a light and a dark page; the same plot has the same text.

    Args:
        draw: Called with the row of axes and the content.
        content: Of the plot.
        width: Of the figure, in inches.
        height: Of the figure, in inches.
        columns: Of axes.
    """
    file = io.StringIO()
    with canvas(width, height, ink=PAGE_INK, background="none", style=_ON_A_PAGE, ncols=columns) as axes:
        draw(axes[0], *content)
        axes[0, 0].figure.savefig(file, format="svg", metadata={"Date": None})
    text = re.sub(r"<metadata>.*?</metadata>", "", file.getvalue(), flags=re.DOTALL).replace(PAGE_INK, "currentColor")
    text = re.sub(r'<g id="[^"]*"', "<g", text)  # those of several plots are the same
    return text[text.index("<svg") :].strip()


def legend(axis: Any, **options: Any) -> None:
    """One for all axes of a figure, below them: the labels of this axis."""
    axis.figure.legend(*axis.get_legend_handles_labels(), loc="outside lower center", ncols=6, **options)
