"""The figures that a test saves, and which of their texts overlap."""

import itertools

import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text


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
