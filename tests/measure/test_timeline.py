"""The timeline of a step, from events written by hand."""

from lightning_llm.measure.timeline import Event, Owner, Timeline


def test_a_timeline_by_hand(monkeypatch):
    a, b = Owner("activations", "x"), Owner("temporary", "y")
    events = [
        Event(1, 10, a),
        Event(2, 5, b),
        Event(3, -5, b),
        Event(0, 100, Owner("other", "z")),  # met late, there from the beginning
        Event(4, -10, a),
    ]
    timeline = Timeline(events, [(0, "forward"), (2, "backward")], 6)
    assert (timeline.peak.operator, timeline.peak.phase, timeline.peak.total_bytes) == (2, "forward", 115)
    assert timeline.peak.by_module() == {"z": 100, "x": 10, "y": 5}
    assert timeline.saved.table == {("other", "z"): 100, ("activations", "x"): 10, ("temporary", "y"): 5}
    assert timeline.phases() == {
        "forward": {"peak_bytes": 115, "live_bytes": 115},
        "backward": {"peak_bytes": 115, "live_bytes": 100},
    }
    totals = [moment.total_bytes for moment in timeline.samples()]
    assert totals == [100, 110, 115, 110, 100]
    monkeypatch.setattr("lightning_llm.measure.timeline.SAMPLES", 2)
    assert 115 in [moment.total_bytes for moment in timeline.samples()]
    assert len(timeline.samples()) <= 3
