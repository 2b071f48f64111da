import itertools
import json

import pytest

from lightning_llm.training.callbacks import memory_breakdown


def test_the_mark_of_the_peak_is_on_the_curve():
    def sizes(size):
        return {"by_kind": {"activations": size * 2**20}, "by_module": {"layers.0.mlp": size * 2**20}}

    samples = [{"operator": n, **sizes(size)} for n, size in ((0, 1), (5, 9), (5, 4), (6, 2), (12, 3))]
    timeline = {"marks": [(0, "forward")], "operators": 20, "samples": samples}
    peak = {"operator": 5, "bytes": 9 * 2**20, "phase": "forward"}
    for axis in memory_breakdown.draw({"a run": {"peak": peak, "timeline": timeline}}, "a title").axes:
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
    figure = memory_breakdown.draw(dict(zip("ab"[:reports], [report] * reports, strict=True)), "a title")
    renderer = figure.canvas.get_renderer()
    boxes = [text.get_window_extent(renderer) for axis in figure.axes for text in axis.texts]
    texts = [text.get_text().strip() for text in figure.axes[0].texts]
    assert texts[-1] == "optimizer"
    assert micro_batches > 20 or len(texts) == len(marks) + 1
    assert not [pair for pair in itertools.combinations(boxes, 2) if pair[0].overlaps(pair[1])]


def sampled(run, *steps, folder="memory", **content):
    (run / folder).mkdir(parents=True)
    for step in steps:
        point = {"bytes": step}
        (run / folder / f"step-{step}.json").write_text(json.dumps({"peak": point, "saved": point, **content}))
    return run


def test_the_last_step_that_most_runs_sampled_is_compared(tmp_path):
    first = sampled(tmp_path / "first", 2, 10)
    other = sampled(tmp_path / "other", 2, 9, 10, 20, folder="memory/rank-0")
    none, compiled = tmp_path / "none", sampled(tmp_path / "compiled", 10, peak=None, compiled=True)
    (first / "memory" / "step-x.json").write_text("{")
    step, reports = memory_breakdown.last_breakdowns([first, none, other, compiled])
    assert step == 10
    assert {run: report["peak"]["bytes"] for run, report in reports.items()} == {first: 10, other: 10}
    assert memory_breakdown.last_breakdowns([none]) == (0, {})
    later = sampled(tmp_path / "later", 30)
    assert {*memory_breakdown.last_breakdowns([first, later, other])[1]} == {first, other}
    assert [*memory_breakdown.last_breakdowns([first, later])[1]] == [later]


def test_modules_that_differ_come_first_and_the_rest_is_added_up(monkeypatch):
    monkeypatch.setattr(memory_breakdown, "MOST_MODULES", 2)

    def report(**modules):
        sizes = {name: size * 2**20 for name, size in modules.items()}
        all_of_them = sum(sizes.values())
        return {"by_kind": {"activations": all_of_them}, "by_module": sizes, "bytes": all_of_them}

    head, rows = memory_breakdown.difference({"a": report(x=1, y=5, z=7, w=1), "[b]": report(x=4, y=5, z=2, v=1)})
    assert head == ["MiB", "a", "[b]", "difference"]
    assert rows == [
        ["saved activations", "14.0", "12.0", "-2.0"],
        ["z", "7.0", "2.0", "-5.0"],
        ["x", "1.0", "4.0", "+3.0"],
        ["all others", "6.0", "6.0", "="],
        ["all", "14.0", "12.0", "-2.0"],
    ]
