"""The report in words: what was matched, and how closely."""

from lightning_llm.ablate.words import matched_lines


def report(match, rows, sides=()):
    side = {"ratio": None, "solved": None}
    variants = {name: {**side, **row} for name, row in rows.items()}
    cost = {"variants": dict(sides)}
    return {"match": match, "solved": None, "baseline": {"steps": 200}, "variants": variants, "cost": cost}


def test_a_report_says_how_closely_time_was_matched():
    rows = {"a": {"steps": 100, "time_ratio_interval": [1.99, 2.024]}, "b": {"steps": 200}}
    rows["b"]["time_ratio_interval"] = [0.9999, 1.00001]
    assert matched_lines(report("time", rows)) == ["Matched: time (a within ±1.2%, b within ±0.1%)."]


def test_a_plan_without_intervals_is_reported_by_the_time_measured_afterwards():
    sides = {"baseline": {"training_s": 4.0}, "a": {"training_s": 5.0}}
    old = report("time", {"a": {"steps": 100, "time_ratio_interval": None}}, sides)
    assert matched_lines(old) == ["Matched: time (a 1.25 times the baseline's)."]
    assert matched_lines(report("time", {"a": {"steps": 100}})) == ["Matched: time."]


def test_a_report_says_what_flops_leave_out():
    assert matched_lines(report("flops", {"a": {"ratio": 1.021}})) == [
        "Matched: flops (a 1.02 times the baseline's).",
        "FLOPs leave out the optimizer and recomputation.",
    ]
    assert matched_lines(report("tokens", {"a": {"ratio": 1.0}})) == ["Matched: tokens (a 1.00 times the baseline's)."]
