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
