"""The report of an experiment: its rows and variants, and what is said of them."""

import dataclasses
import io
import json
import re
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
from scipy import stats

from lightning_llm.__main__ import main
from lightning_llm.ablate.next_runs import RunKey
from lightning_llm.ablate.report.from_experiment import _start, report_of
from lightning_llm.ablate.report.record import NOT_TESTED, Pair, Start
from lightning_llm.ablate.report.report import Report
from lightning_llm.ablate.report.words import ABOUT_SECONDARY, cost_lines, noise_lines, verdict_lines
from lightning_llm.ablate.results import COST, load_experiment
from lightning_llm.ablate.words import parameter_lines
from lightning_llm.io.console import Console
from lightning_llm.statistics.looks import PlannedLook, spending
from lightning_llm.statistics.power import FurtherPairs
from tests.ablate.conftest import work

NAMES = {"pairs", "difference", "interval", "p", "p_adjusted", "verdict", "sd", "correlation", "diverged"}


def test_the_report_has_the_names_that_scripts_rely_on(done, capsys):
    assert main(["ablate", "report", str(done.out)]) == 0
    report = json.loads((done.out / "report.json").read_text())
    assert (report["version"], report["kind"], report["design"]["plan"]) == (3, "experiment", done.hash)
    assert report["checks"]["replay_difference"] == 0.0
    results = [row for row in report["rows"] if row["kind"] == "result"]
    (null,) = (row for row in report["rows"] if row["kind"] == "null")
    assert null["sd"] == pytest.approx(0.003e-3 * np.std([0, 1, 2, 0], ddof=1), rel=1e-3)
    assert (null["pairs"], null["direction"]) == (4, "worse")  # planted
    assert report["level"] == pytest.approx(1 - 0.05 / 3)
    assert Report.read(done.out).together == 0.95
    assert all(row.keys() >= NAMES for row in report["rows"])
    assert [row["variant"] for row in results] == ["a", "lost", "<b>$x$&"]
    better, lost, same = results
    assert (better["verdict"], better["pairs"], better["diverged"]) == ("better", 4, 0)
    assert (better["direction"], better["against_delta"], better["rule"]) == ("better", "larger", "look 1")
    assert better["difference"] == pytest.approx(-0.500375)
    assert better["by_seed"][3] == {"seed": 3, "baseline": pytest.approx(3.03), "variant": pytest.approx(2.53)}
    assert better["interval"][0] < better["difference"] < better["interval"][1] < 0
    assert (lost["verdict"], lost["diverged"], lost["difference"], lost["interval"]) == ("undecided", 1, None, None)
    assert same["verdict"] == "equivalent"
    assert report["checks"]["failed_runs"] == {"lost,seed=1": "diverged: loss is nan"}
    assert report["variants"]["a"]["training_s"] == 3.0
    assert better["robust"]["smallest_p"] == 0.125
    assert lost["by_seed"][1]["variant"] is None
    printed = capsys.readouterr().out
    for words in (
        "The baseline with seed 0, trained twice: bit-identical.",
        "The null variant (the baseline with other initial MLPs): worse, by less than 0.01, which is false",
        "a: better, by more than 0.01; difference -0.5004 (-0.5",
        "it stopped at look 1 of 2, so the true difference is probably smaller",
        "sign-flip p 0.12 (smallest possible: 0.12)",
        "Simultaneous 95% intervals: with a probability of 95%, all of them contain the true differences.",
        "lost,seed=1 diverged: loss is nan",
    ):
        assert words in printed
    assert len(printed.splitlines()) <= 32  # a screen
    found = with_row(report_of(load_experiment(done.out)), "a", p_adjusted=4e-5)
    file = io.StringIO()
    found.show(Console(file=file, width=80))
    assert " <0.0001 " in file.getvalue()


def with_row(report, variant, **fields):
    """The report, with other fields in the row of a variant."""
    rows = [
        dataclasses.replace(row, **fields) if (row.variant, row.kind) == (variant, "result") else row
        for row in report.rows
    ]
    return msgspec.structs.replace(report, rows=rows)


def cells_of(page, name):
    """Of the table of costs, the last one."""
    return re.search(f"<tr><td>{name}</td>.*?</tr>", page.rpartition("<thead>")[2]).group()


def change_cost(plan, name, **fields):
    cost = json.loads((plan.out / COST).read_text())
    cost["variants"][name] = {**cost["variants"][name], **fields}
    (plan.out / COST).write_text(json.dumps(cost))


@pytest.mark.parametrize(
    ("interval", "cell", "words"),
    [
        ([0.98, 1.05], "not distinguishable", "a not distinguishable in time, 1 MiB"),
        ([1.01, 1.02], "1.015", "a 1.015 × the time, 1 MiB"),
        (None, "not distinguishable", "a not distinguishable in time, 1 MiB"),  # too few rounds
    ],
)
def test_a_ratio_inside_the_noise_is_not_shown(done, interval, cell, words):
    change_cost(done, "a", ratio=1.015, ratio_interval=interval)
    assert main(["ablate", "report", str(done.out)]) == 0
    assert f"<td>{cell}</td>" in (done.out / "report.html").read_text()
    assert any(words in line for line in cost_lines(report_of(load_experiment(done.out))))


def test_the_report_says_how_closely_time_is_matched(experiment):
    planned = {"a": {"steps": 3, "facts": {"time_ratio": 2.0, "time_ratio_interval": [1.98, 2.03]}}}
    plan = experiment({"a": {"effect": 0.0}}, match="time", planned=planned)
    assert cost_lines(report_of(load_experiment(plan.out)))[0] == "Matched: time (a within ±1.5%)."


def test_cost_of_another_plan_does_not_count(done):
    cost = json.loads((done.out / COST).read_text())
    (done.out / COST).write_text(json.dumps({**cost, "plan": "0" * 64}))
    assert load_experiment(done.out).cost is None


def test_a_null_variant_that_began_like_the_baseline_measures_no_noise(experiment):
    base = {"drawn": "01"}  # as with model.init_from
    plan = experiment({"a": {"effect": -0.5, **base}}, base=base)
    work(plan.out)
    report = report_of(load_experiment(plan.out))
    assert list(report.of_kind("null")) == []
    assert not any("null variant" in line for line in noise_lines(report))


def test_variants_with_other_seeds_are_shown_at_the_paired_difference(experiment):
    """The variant has four pairs, and the baseline five seeds, the last of which has the highest loss."""
    plan = experiment({"a": {"effect": -0.5}, "b": {"effect": 0.0, "noise": 0.1}})
    work(plan.out)
    report = report_of(load_experiment(plan.out))
    assert (report.variants["a"].runs, report.variants["baseline"].runs) == (4, 5)
    level = report.variants["baseline"].means["val_loss"].value + report["a"].difference
    assert main(["ablate", "report", str(plan.out)]) == 0
    assert f"<td>a</td><td>{level:.5g}</td>" in (plan.out / "report.html").read_text()


def test_the_report_says_what_was_not_equal_and_who_else_computed(done):
    report = report_of(load_experiment(done.out))
    report.variants["baseline"].parameters = 100
    report.variants["a"].parameters = 80
    report.spent.other_cores = 1.5
    lines = cost_lines(report)
    makes = "--match parameters=model.architecture.intermediate_size makes them equal"
    assert f"a has 20% fewer parameters than the baseline; {makes}." in lines
    assert any("while other programs used 1.5 cores on a test" in line for line in lines)
    report.spent.other_cores = 0.01
    report.variants["a"].parameters = 101
    assert any("alone on a test" in line for line in cost_lines(report))
    assert not any("parameters than" in line for line in cost_lines(report))


def test_the_numbers_of_a_verdict_can_be_recomputed_from_the_json_alone(done):
    """With scipy, and boundaries of the looks that the JSON names."""
    report_of(load_experiment(done.out)).write(done.out)
    report = json.loads((done.out / "report.json").read_text())
    design = report["design"]
    results = {row["variant"]: row for row in report["rows"] if row["kind"] == "result"}
    share = report["alpha"] / len(results)
    assert [row["kind"] for row in report["rows"]] == ["result"] * 3 + ["null"]
    for row in report["rows"]:
        both = [(each["baseline"], each["variant"]) for each in row["by_seed"]]
        assert row["diverged"] == sum(variant is None for _, variant in both)
        if row["diverged"]:
            continue
        base, variant = map(np.array, zip(*both, strict=True))
        d, pairs = variant - base, len(both)
        assert (row["pairs"], row["difference"]) == (pairs, pytest.approx(d.mean()))
        assert row["sd"] == pytest.approx(d.std(ddof=1), abs=1e-15)
        assert row["robust"]["median"] == pytest.approx(np.median(d))
        assert row["p"] == pytest.approx(stats.ttest_rel(variant, base).pvalue)
        assert row["correlation"] == pytest.approx(np.corrcoef(base, variant)[0, 1])
        if row["rule"].startswith("look"):
            number, looks = int(row["rule"].split()[1]) - 1, tuple(design["looks"])
            spent = spending(looks, design["rule"]["spending"], reserve=design["rule"]["reserve"])
            critical = PlannedLook(looks, number, spent).critical(share)
            p = PlannedLook(looks, number, spent).p(d.mean() / d.std(ddof=1) * pairs**0.5)
            assert row["p_adjusted"] == pytest.approx(min(1, p * len(results)))
        else:  # the null variant, alone
            critical = stats.t.ppf(1 - report["alpha"] / 2, pairs - 1)
        assert row["critical"] == pytest.approx(critical)
        half = critical * d.std(ddof=1) / pairs**0.5
        assert row["interval"] == pytest.approx([d.mean() - half, d.mean() + half])
        low, high = row["interval"]
        assert row["direction"] == ("worse" if low > 0 else "better" if high < 0 else "not shown")
        inside, outside = -report["delta"] < low and high < report["delta"], low > 0.01 or high < -0.01
        assert row["against_delta"] == ("smaller" if inside else "larger" if outside else "not shown")
    base = [each["baseline"] for each in results["lost"]["by_seed"]]
    assert report["variants"]["baseline"]["means"]["val_loss"]["value"] == pytest.approx(np.mean(base))
    assert design["seeds"] == [each["seed"] for each in results["lost"]["by_seed"]]


def test_a_baseline_with_one_run_that_did_not_diverge_has_a_report(experiment, capsys):
    plan = experiment({"a": {"effect": 0.0}}, looks=(4,), base={"diverges": [1, 2, 3]})
    work(plan.out)
    assert main(["ablate", "report", str(plan.out)]) == 0
    assert "3 of 4 runs of the baseline failed to train" in capsys.readouterr().out


def test_outliers_are_named_by_their_seeds(experiment):
    plan = experiment({"a": {"effect": 0.0}}, looks=(8,), base={"diverges": [0]})
    work(plan.out)
    summary = plan.run_dir(RunKey("a", 5)) / "summary.json"
    summary.write_text(json.dumps({**json.loads(summary.read_text()), "val_loss": 3.9}))
    for seed in range(8):  # differences that vary a little
        path = plan.run_dir(RunKey("a", seed)) / "summary.json"
        content = json.loads(path.read_text())
        path.write_text(json.dumps({**content, "val_loss": content["val_loss"] + 0.001 * (seed % 3)}))
    row = report_of(load_experiment(plan.out))["a"]
    assert row.robust.outliers == [5]
    assert row.warnings[0].startswith("1 pair is an outlier")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"variants": []}, "Expected `object`, got `array` - at `$.variants`"),
        ({"variants": {"x": {}}}, "Object missing required field `step_s`"),
        ({"other_cores": "many"}, "Expected `float | null`, got `str` - at `$.other_cores`"),
    ],
)
def test_a_damaged_cost_file_is_one_line(done, change, says, capsys):
    cost = json.loads((done.out / COST).read_text())
    (done.out / COST).write_text(json.dumps({**cost, **change}))
    assert main(["ablate", "report", str(done.out)]) == 2
    assert says in capsys.readouterr().err


def test_a_replay_that_differs_on_a_cpu_is_a_warning(done):
    report = report_of(load_experiment(done.out))
    report.checks.replay_difference = 0.25
    assert noise_lines(report)[0] == (
        "The baseline with seed 0, trained twice: 0.25 apart, although a CPU should repeat each bit: "
        "do not trust small differences."
    )


def test_a_report_without_curves_cost_and_verdicts_says_so(experiment, capsys):
    plan = experiment({"a": {"effect": -0.5}})
    assert main(["ablate", "report", str(plan.out)]) == 0
    report = json.loads((plan.out / "report.json").read_text())
    assert (report["has_ended"], report["spent"]["runs"], "step" in report["variants"]["a"]) == (False, 0, False)
    (row,) = report["rows"]
    assert (row["verdict"], row["note"], row["pairs"], row["level"]) == ("undecided", NOT_TESTED, 0, None)
    assert "The experiment has not ended." in (plan.out / "report.html").read_text()
    capsys.readouterr()
    assert main(["ablate", "status", str(plan.out)]) == 0
    said = capsys.readouterr().out
    assert "0 runs have ended, 0 train, 13 wait; 0 of 4 pairs" in said
    assert re.search(r"\n *a +– +– +– +– +– *\n", said)
    assert said.endswith("\na: not tested yet.\n")
    assert "imultaneous" not in said
    assert re.search("<td>a</td>(<td>–</td>){5}", (plan.out / "report.html").read_text())


def test_intervals_are_simultaneous_only_if_there_are_several(experiment, capsys):
    plan = experiment({"a": {"effect": -0.5}}, looks=(4,))
    work(plan.out)
    assert main(["ablate", "report", str(plan.out)]) == 0
    assert "Simultaneous" not in capsys.readouterr().out
    assert "(simultaneous" not in (plan.out / "report.html").read_text()


def test_the_range_of_further_pairs_is_explained_once(done):
    report = report_of(load_experiment(done.out))
    for name in ("a", "lost"):
        report = with_row(report, name, further_pairs=FurtherPairs(expected=50, low=28, high=239))
    *sentences, last = verdict_lines(report)
    assert sum("28 to 239 further pairs reach a verdict with a probability of 80%" in line for line in sentences) == 2
    assert last == (
        "Further pairs are a range, since the true difference may be anywhere in its 80% interval. "
        f"lightning-llm ablate extend {done.out} --pairs N adds pairs."
    )


def test_the_report_says_what_was_compared(experiment, capsys):
    asked = {"baseline": ("a.yaml", "b.yaml"), "record": {"text": "text.txt", "seen": {"first": [0, 1]}}}
    plan = experiment({"a": {"effect": -0.5, "options": {"x.y": "relu", "z": 3}}}, looks=(4,), delta=0.01, **asked)
    work(plan.out)
    assert main(["ablate", "report", str(plan.out)]) == 0
    said = capsys.readouterr().out
    direction = "a difference is variant minus baseline, so a negative one is an improvement."
    lines = (
        f"Seeds 0 to 3; delta 0.01 nats/token; {direction}",
        "Not independent of earlier experiments with this baseline: first has used seeds 0 to 1.",
    )
    assert "\nbaseline: a.yaml, b.yaml on text.txt\na: x.y=relu, z=3\n" + "\n".join(lines) in said
    page = (plan.out / "report.html").read_text()
    for text in ("<tr><td>baseline</td><td>a.yaml, b.yaml on text.txt</td></tr>", "<td>x.y=relu, z=3</td>", *lines):
        assert text in page


def test_the_report_says_what_the_metric_is_of(experiment):
    plan = experiment({"a": {"effect": 0.0}}, record={"validation": "half of it"})
    assert report_of(load_experiment(plan.out)).design.validation == "half of it"


def test_secondary_metrics_have_intervals_and_decide_nothing(experiment, capsys):
    variants = {"a": {"effect": -0.001, "recall": 0.5}, "lost": {"effect": 0.0, "diverges": [1]}}
    plan = experiment(variants, looks=(4,), secondary=("recall_loss",))
    work(plan.out, log=lambda line: None)
    report = report_of(load_experiment(plan.out))
    row = report["a"]
    found = report.row("a", "secondary", metric="recall_loss")
    assert (row.verdict, found.unit) == ("better", "nats/token")
    summaries = {
        name: [
            json.loads((plan.out / "runs" / f"{name},seed={seed}" / "summary.json").read_text()) for seed in range(4)
        ]
        for name in ("baseline", "a")
    }
    base, own = (np.array([summary["recall_loss"] for summary in each]) for each in summaries.values())
    error = np.std(own - base, ddof=1) / 2
    reach = row.critical * error
    assert found.difference == pytest.approx((own - base).mean())
    assert found.interval == pytest.approx([found.difference - reach, found.difference + reach], rel=1e-6)
    assert (found.pairs, found.level) == (4, row.level)
    assert report.row("lost", "secondary").interval is None
    assert found not in report.results  # it decides nothing
    assert found.by_seed == [Pair(seed, base[seed], own[seed]) for seed in range(4)]
    low, high = found.interval
    assert main(["ablate", "report", str(plan.out)]) == 0
    said = capsys.readouterr().out
    line = f"a, secondary: recall_loss difference {found.difference:+.4f} ({low:+.4f} to {high:+.4f}) nats/token."
    assert line in said
    assert "lost, secondary: recall_loss difference – (no interval) nats/token." in said
    assert said.count(ABOUT_SECONDARY) == 1
    assert line in (plan.out / "report.html").read_text()
    assert main(["compare", str(plan.out)]) == 0
    assert line in capsys.readouterr().out  # what report says
    assert found.warnings[0].startswith("too few pairs for the sign-flip test (")


def test_without_secondary_metrics_nothing_is_said_of_them(done):
    report = report_of(load_experiment(done.out))
    assert list(report.of_kind("secondary")) == []
    assert not any("econdary" in line for line in verdict_lines(report))


def test_the_report_says_what_a_pair_shares_and_which_scales_differ(experiment):
    plan = experiment({"a": {"effect": -0.5}})
    work(plan.out)
    loaded = load_experiment(plan.out)
    report = report_of(loaded)
    words = r"a: starts with \d of \d parameters equal to the baseline's\."
    assert any(re.fullmatch(words, each) for each in noise_lines(report))
    clause = "MLP output weights start at 2 times the baseline's scale (root mean square 0.02 versus 0.01)"
    started = report.variants["a"].start
    kept = ["mlp.scale", "mlp.shift"]
    report.variants["a"].start = Start(shared=started.shared, parameters=started.parameters, kept=kept, scales=[clause])
    lines = noise_lines(report)
    assert any(each.endswith("; its constructor set 2 (mlp.scale, …).") for each in lines)
    assert f"a: its {clause}." in lines
    report.variants["a"].start = None  # an earlier report
    assert not any("starts with" in each for each in noise_lines(report))


def test_scales_of_summaries_are_compared():
    base = {"initial_values": {"w": "1"}, "initial_scales": {"MLP": [0.02, 10**6]}}
    own = {"initial_values": {"w": "2"}, "initial_rules": {"w": "kept"}, "initial_scales": {"MLP": [0.04, 10**6]}}
    loaded = SimpleNamespace(
        results={RunKey(name, 0): SimpleNamespace(summary=each) for name, each in (("baseline", base), ("a", own))},
        plan=SimpleNamespace(experiment=SimpleNamespace(first_seed=0)),
    )
    start = _start(loaded, "a")
    assert (start.shared, start.parameters, start.kept) == (0, 1, ["w"])
    assert start.scales[0].startswith("MLP weights start at 2 times")


def test_scales_are_compared_before_the_first_run(experiment):
    planned = {"baseline": {"scales": {"MLP": (0.02, 10**6)}}, "a": {"scales": {"MLP": (0.01, 10**6)}}}
    plan = experiment({"a": {"effect": 0.0}}, planned=planned)
    assert "a: its MLP weights start at 0.5 times the baseline's scale" in parameter_lines(plan)[-1]


@pytest.mark.parametrize(("redrawn", "words"), [("MLPs", "MLPs"), ("attention", "attention layers"), ("", "MLPs")])
def test_the_report_says_what_the_null_variant_redraws(done, redrawn, words):
    report = report_of(load_experiment(done.out))
    report.checks.redrawn = redrawn
    assert any(f"The null variant (the baseline with other initial {words}):" in each for each in noise_lines(report))
