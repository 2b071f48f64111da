import itertools

import pytest

from lightning_llm.training.callbacks import memory_report


def test_the_mark_of_the_peak_is_on_the_curve():
    def sizes(size):
        return {"by_kind": {"activations": size * 2**20}, "by_module": {"layers.0.mlp": size * 2**20}}

    samples = [{"operator": n, **sizes(size)} for n, size in ((0, 1), (5, 9), (5, 4), (6, 2), (12, 3))]
    timeline = {"marks": [(0, "forward")], "operators": 20, "samples": samples}
    peak = {"operator": 5, "bytes": 9 * 2**20, "phase": "forward"}
    for axis in memory_report.draw({"a run": {"peak": peak, "timeline": timeline}}, "a title").axes:
        (mark,) = [line for line in axis.lines if line.get_marker() == 7]
        curve = [vertex for stack in axis.collections for path in stack.get_paths() for vertex in path.vertices]
        top = [x for x, y in curve if y == mark.get_ydata()[0]]
        assert min(top) < 5 < max(top)
        assert max(y for _, y in curve) == mark.get_ydata()[0] == 9


@pytest.mark.parametrize("micro_batches", [1, 2, 4, 12, 40])
@pytest.mark.parametrize("reports", [1, 2])
def test_labels_of_phases_do_not_overlap(micro_batches, reports):
    """Accumulation makes many phases, and the optimizer takes the last two of a hundred operators."""
    length = 98 / micro_batches
    begins = [number * length for number in range(micro_batches)]
    marks = [mark for begin in begins for mark in ((begin, "forward"), (begin + 0.45 * length, "backward"))]
    sizes = {"by_kind": {"activations": 2**20}, "by_module": {"layers.0.mlp": 2**20}}
    timeline = {"marks": [*marks, (98, "optimizer")], "operators": 100, "samples": [{"operator": 0, **sizes}]}
    report = {"peak": {"operator": 0, "bytes": 2**20, "phase": "forward"}, "timeline": timeline}
    figure = memory_report.draw(dict(zip("ab"[:reports], [report] * reports, strict=True)), "a title")
    renderer = figure.canvas.get_renderer()
    boxes = [text.get_window_extent(renderer) for axis in figure.axes for text in axis.texts]
    texts = [text.get_text().strip() for text in figure.axes[0].texts]
    assert texts[-1] == "optimizer"
    assert micro_batches > 20 or len(texts) == len(marks) + 1
    assert not [pair for pair in itertools.combinations(boxes, 2) if pair[0].overlaps(pair[1])]
