"""The report: numbers by name, one page that needs nothing else, the same after a kill."""

import io
import json
import re

import numpy as np
import pytest
from scipy import stats
from torch.utils.tensorboard import SummaryWriter

from lightning_llm.__main__ import main
from lightning_llm.ablate.curves import Curves, curves_of
from lightning_llm.ablate.page import page_of, write_report
from lightning_llm.ablate.report import report_of
from lightning_llm.ablate.results import COST, load_experiment
from lightning_llm.ablate.scheduler import Run
from lightning_llm.ablate.words import cost_lines, noise_lines
from lightning_llm.ablate.worker import work
from lightning_llm.cli.ablate_report import show_report
from lightning_llm.io.console import Console
from lightning_llm.statistics.looks import PlannedLook, spending

NAMES = {"pairs", "difference", "interval", "p", "p_adjusted", "verdict", "sd", "correlation", "diverged"}


def with_cost(plan, sides):
    """As ``ablate measure`` writes it: steps of 1 s, and of half of it for the variants."""
    step = {"step_s": 0.5, "step_p20_s": 0.4, "step_p80_s": 0.7, "ratio": 0.5, "peak_bytes": 2**20}
    rows = dict.fromkeys(sides, step) | {"baseline": {**step, "step_s": 1.0, "step_p80_s": 1.1, "ratio": 1.0}}
    facts = {"machine": "a test", "threads": 1, "date": "2026-01-01", "torch": "2", "rounds": 20, "other_cores": 0.0}
    (plan.out / COST).write_text(json.dumps({**facts, "plan": plan.content["hash"], "sides": rows}))


def with_curves(plan):
    """Validation losses at steps 3 and 6: falling by 1 to what the summary says."""
    for run, result in load_experiment(plan.out).results.items():
        if not result.has_diverged:
            with SummaryWriter(str(plan.run_dir(run))) as writer:
                for step in (3, 6):
                    writer.add_scalar("val_loss", result.loss + (6 - step) / 3, step)


@pytest.fixture
def done(experiment):
    """An experiment that has ended: one variant better, one diverged, one with a name that HTML would read."""
    variants = {"a": {"effect": -0.5}, "lost": {"effect": 0.0, "diverges": [1]}, "<b>$x$&": {"effect": 0.0}}
    plan = experiment(variants, delta=0.01)
    work(plan.out)
    with_cost(plan, variants)
    with_curves(plan)
    return plan


def test_the_report_has_the_names_that_scripts_rely_on(done, capsys):
    assert main(["ablate", "report", str(done.out)]) == 0
    report = json.loads((done.out / "report.json").read_text())
    assert (report["plan"], report["pairs"]) == (done.content["hash"], 5)
    assert report["aa"]["replay_difference"] == 0.0
    assert report["aa"]["null_sd"] == pytest.approx(0.003e-3 * np.std([0, 1, 2, 0], ddof=1), rel=1e-3)
    assert (report["aa"]["null"]["pairs"], report["aa"]["null"]["direction"]) == (4, "worse")  # planted
    assert report["interval"] == {"each": pytest.approx(1 - 0.05 / 3), "together": 0.95}
    assert all(row.keys() >= NAMES for row in report["variants"].values())
    better, lost, same = report["variants"].values()
    assert (better["verdict"], better["pairs"], better["diverged"]) == ("better", 4, 0)
    assert (better["direction"], better["size"], better["rule"]) == ("better", "larger", "look 1")
    assert better["difference"] == pytest.approx(-0.500375)
    assert better["by_seed"][3] == {"seed": 3, "baseline": pytest.approx(3.03), "variant": pytest.approx(2.53)}
    assert better["interval"][0] < better["difference"] < better["interval"][1] < 0
    assert (lost["verdict"], lost["diverged"], lost["difference"], lost["interval"]) == ("undecided", 1, None, None)
    assert same["verdict"] == "equivalent"
    assert report["diverged_runs"] == {"lost,seed=1": "loss is nan"}
    assert report["cost"]["sides"]["a"]["training_s"] == 3.0
    assert better["robust"]["smallest_p"] == 0.125
    assert lost["by_seed"][1]["variant"] is None
    printed = capsys.readouterr().out
    for words in (
        "The baseline's seed 0 again: bit-identical.",
        "The null variant (the baseline with other initial MLPs): worse, by less than 0.01, which is false",
        "a: better, by more than 0.01; difference -0.5004 (-0.5",
        "look 1 of 2: the difference is likely exaggerated",
        "sign-flip p 0.12, at least 0.12",
        "All intervals hold together with a probability of 95 %.",
        "lost,seed=1 diverged: loss is nan",
    ):
        assert words in printed
    assert len(printed.splitlines()) < 30  # a screen
    row = report["variants"]["a"] | {"p_adjusted": 4e-5}
    file = io.StringIO()
    show_report(report | {"variants": {"a": row}}, Console(file=file, width=80))
    assert " <0.0001 " in file.getvalue()


def test_the_page_needs_nothing_else_and_escapes_names(done):
    assert main(["ablate", "report", str(done.out)]) == 0
    page = (done.out / "report.html").read_text()
    assert page.count("<svg") == 3
    assert page.count("&lt;b&gt;$x$&amp;") >= 4  # the tables and all plots
    assert "<b>" not in page
    assert "<script" not in page
    used = re.findall(r"(?:href|src|url)\s*[=(]\s*[\"']?([^\"')]+)", page)
    assert {link[0] for link in used} == {"#"}  # inside the page
    assert "prefers-color-scheme: dark" in page
    assert "currentColor" in page
    before = page
    assert main(["ablate", "report", str(done.out)]) == 0
    assert (done.out / "report.html").read_text() == before


def test_curves_are_compared_in_pairs_and_at_equal_time(done):
    loaded = load_experiment(done.out)
    curves = curves_of(loaded)
    steps, differences = curves.differences("a")
    assert steps == [3, 6]
    assert differences.shape == (4, 2)
    assert differences[:, -1] == pytest.approx([-0.5, -0.5005, -0.501, -0.5], abs=1e-6)
    sides = report_of(loaded)["cost"]["sides"]
    # when the variant ends, after 3 s, the baseline is at step 3: its loss is 1 above its end
    assert curves.at_equal_time("a", sides) == pytest.approx(-1.500375, abs=1e-5)
    assert curves.at_equal_time("lost", sides) == pytest.approx(-1.0, abs=1e-5)  # of its seed that did not


def test_no_loss_is_made_up_before_the_first_validation(done):
    loaded = load_experiment(done.out)
    sides = report_of(loaded)["cost"]["sides"]
    sides["a"]["step_s"] = 0.4  # it ends after 2.4 s; the baseline is first validated after 3 s
    assert curves_of(loaded).at_equal_time("a", sides) is None


def curves_with(*validations):
    """Of losses 1 + 10 / step; the variant's are 0.5 below."""
    steps, losses = {}, {}
    for name, below in (("baseline", 0.0), ("a", 0.5)):
        steps[name] = list(validations)
        losses[name] = np.array([[1 + 10 / step - below for step in validations]])
    return Curves(steps, losses, {"baseline": [0], "a": [0]})


PACES = {"baseline": {"step_s": 1.0}, "a": {"step_s": 0.95}}  # the variant ends when the baseline is at step 95


@pytest.mark.parametrize(
    ("validations", "delta", "is_shown"),
    [
        ([80, 90, 100], 0.005, True),  # off by about 10 / 90³ · 5 · 5
        ([80, 90, 100], 0.001, False),
        ([20, 60, 100], 0.005, False),
        ([20, 60, 100], None, False),  # the default delta
        ([20, 60, 100], 0.1, True),
        ([20, 60, 95, 100], 0.001, True),  # a validation at that moment
        ([60, 100], 1.0, False),  # no neighbor tells how far the line is off
        ([100], 1.0, False),
    ],
)
def test_equal_time_needs_validations_close_to_the_moment(validations, delta, is_shown):
    found = curves_with(*validations).at_equal_time("a", PACES, delta)
    assert (found is not None) == is_shown
    if is_shown:
        true = (1 + 10 / 100 - 0.5) - (1 + 10 / 95)
        assert found == pytest.approx(true, abs=delta / 4)


def test_equal_time_is_the_end_where_times_cannot_be_distinguished():
    paces = {**PACES, "a": {"step_s": 0.95, "ratio_interval": [0.9, 1.02]}}
    assert curves_with(20, 100).at_equal_time("a", paces, 0.001) == pytest.approx(-0.5)


def test_the_page_compares_with_the_delta_of_the_experiment(done):
    report = report_of(load_experiment(done.out))
    for name, pace in PACES.items():
        report["cost"]["sides"][name] |= pace | dict.fromkeys(("step_p20_s", "step_p80_s"), pace["step_s"])
    curves = curves_with(20, 60, 100)  # off by about 0.008
    assert "<td>1</td><td>–</td></tr>" in row_of(page_of(report, curves), "a")
    assert "<td>1</td><td>-0." in row_of(page_of(report | {"delta": 0.1}, curves), "a")


def row_of(page, name):
    """Of the table of costs, the last one."""
    return re.search(f"<tr><td>{name}</td>.*?</tr>", page.rpartition("<thead>")[2]).group()


def change_cost(plan, name, **fields):
    cost = json.loads((plan.out / COST).read_text())
    cost["sides"][name] = {**cost["sides"][name], **fields}
    (plan.out / COST).write_text(json.dumps(cost))


@pytest.mark.parametrize(
    ("interval", "cell", "words"),
    [
        ([0.98, 1.05], "not distinguishable", "a not distinguishable in time, 1 MiB"),
        ([1.01, 1.02], "1.015", "a 1.015 × the time, 1 MiB"),
        (None, "not distinguishable", "a not distinguishable in time, 1 MiB"),  # too few rounds
        ("none", "1.015", "a 1.015 × the time, 1 MiB"),  # an older file
    ],
)
def test_a_ratio_inside_the_noise_is_not_shown(done, interval, cell, words):
    change_cost(done, "a", ratio=1.015, **({} if interval == "none" else {"ratio_interval": interval}))
    assert main(["ablate", "report", str(done.out)]) == 0
    assert f"<td>{cell}</td>" in (done.out / "report.html").read_text()
    assert any(words in line for line in cost_lines(report_of(load_experiment(done.out))))


def test_the_report_says_how_closely_time_is_matched(experiment):
    sides = {name: {"steps": 6, "tokenizer": "t"} for name in ("baseline", "null", "a")}
    sides["a"] |= {"steps": 3, "time_ratio": 2.0, "time_ratio_interval": [1.98, 2.03]}
    plan = experiment({"a": {"effect": 0.0}}, match="time", sides=sides)
    assert cost_lines(report_of(load_experiment(plan.out)))[0] == "Matched: time: a within ±1.5%."


def test_cost_of_another_plan_does_not_count(done):
    cost = json.loads((done.out / COST).read_text())
    (done.out / COST).write_text(json.dumps({**cost, "plan": "0" * 64}))
    assert load_experiment(done.out).cost is None


def test_a_null_variant_that_began_like_the_baseline_measures_no_noise(experiment):
    base = {"drawn": "01"}  # as with model.init_from
    plan = experiment({"a": {"effect": -0.5, **base}}, base=base)
    work(plan.out)
    report = report_of(load_experiment(plan.out))
    assert (report["aa"]["null_sd"], report["aa"]["null"]) == (None, None)


def test_sides_with_other_seeds_are_shown_at_the_paired_difference(experiment):
    """The variant has four pairs, and the baseline five seeds, the last of which has the highest loss."""
    plan = experiment({"a": {"effect": -0.5}, "b": {"effect": 0.0}})
    work(plan.out)
    report = report_of(load_experiment(plan.out))
    assert (report["variants"]["a"]["runs"], report["baseline"]["runs"]) == (4, 5)
    level = report["baseline"]["mean"] + report["variants"]["a"]["difference"]
    assert main(["ablate", "report", str(plan.out)]) == 0
    assert f"<td>a</td><td>{level:.5g}</td>" in (plan.out / "report.html").read_text()


def test_the_report_says_what_was_not_equal_and_who_else_computed(done):
    report = report_of(load_experiment(done.out))
    report["baseline"]["parameters"], report["variants"]["a"]["parameters"] = 100, 80
    report["cost"]["other_cores"] = 1.5
    lines = cost_lines(report)
    assert "Parameters are not equal: a 0.8 × the baseline's." in lines
    assert any("while other programs used 1.5 cores on a test" in line for line in lines)
    report["cost"]["other_cores"], report["variants"]["a"]["parameters"] = 0.01, 100
    assert any("alone on a test" in line for line in cost_lines(report))
    assert not any("not equal" in line for line in cost_lines(report))


def test_the_numbers_of_a_verdict_can_be_recomputed_from_the_json_alone(done):
    """With scipy, and boundaries of the looks that the JSON names."""
    write_report(load_experiment(done.out))
    report = json.loads((done.out / "report.json").read_text())
    share = report["alpha"] / len(report["variants"])
    for row in [*report["variants"].values(), report["aa"]["null"]]:
        both = [(each["baseline"], each["variant"]) for each in row["by_seed"]]
        assert row["diverged"] == sum(variant is None for _, variant in both)
        if row["diverged"]:
            continue
        base, variant = map(np.array, zip(*both, strict=True))
        d, pairs = variant - base, len(both)
        assert (row["pairs"], row["difference"]) == (pairs, pytest.approx(d.mean()))
        assert row["sd"] == pytest.approx(d.std(ddof=1), abs=1e-15)
        assert row["robust"]["median"] == pytest.approx(np.median(d))
        if not d.any():
            assert (row["interval"], row["verdict"]) == ([0, 0], "equivalent")
            continue
        assert row["p"] == pytest.approx(stats.ttest_rel(variant, base).pvalue)
        assert row["correlation"] == pytest.approx(np.corrcoef(base, variant)[0, 1])
        if row["rule"].startswith("look"):
            number, looks = int(row["rule"].split()[1]) - 1, tuple(report["looks"])
            spent = spending(looks, report["rule"]["spending"], reserve=report["rule"]["reserve"])
            critical = PlannedLook(looks, number, spent).critical(share)
            p = PlannedLook(looks, number, spent).p(d.mean() / d.std(ddof=1) * pairs**0.5)
            assert row["p_adjusted"] == pytest.approx(min(1, p * len(report["variants"])))
        else:  # the null variant, alone
            critical = stats.t.ppf(1 - report["alpha"] / 2, pairs - 1)
        assert row["critical"] == pytest.approx(critical)
        half = critical * d.std(ddof=1) / pairs**0.5
        assert row["interval"] == pytest.approx([d.mean() - half, d.mean() + half])
        low, high = row["interval"]
        assert row["direction"] == ("worse" if low > 0 else "better" if high < 0 else "not shown")
        inside, outside = -report["delta"] < low and high < report["delta"], low > 0.01 or high < -0.01
        assert row["size"] == ("smaller" if inside else "larger" if outside else "not shown")
    base = [each["baseline"] for each in report["variants"]["lost"]["by_seed"]]
    assert report["baseline"]["mean"] == pytest.approx(np.mean(base))
    assert report["seeds"] == [each["seed"] for each in report["variants"]["lost"]["by_seed"]]


def test_a_baseline_with_one_run_that_did_not_diverge_has_a_report(experiment, capsys):
    plan = experiment({"a": {"effect": 0.0}}, looks=(4,), base={"diverges": [1, 2, 3]})
    work(plan.out)
    assert main(["ablate", "report", str(plan.out)]) == 0
    assert "3 of 4 runs of the baseline diverged" in capsys.readouterr().out


def test_outliers_are_named_by_their_seeds(experiment):
    plan = experiment({"a": {"effect": 0.0}}, looks=(8,), base={"diverges": [0]})
    work(plan.out)
    summary = plan.run_dir(Run("a", 5)) / "summary.json"
    summary.write_text(json.dumps({**json.loads(summary.read_text()), "val_loss": 3.9}))
    for seed in range(8):  # differences that vary a little
        path = plan.run_dir(Run("a", seed)) / "summary.json"
        content = json.loads(path.read_text())
        path.write_text(json.dumps({**content, "val_loss": content["val_loss"] + 0.001 * (seed % 3)}))
    row = report_of(load_experiment(plan.out))["variants"]["a"]
    assert row["robust"]["outliers"] == [5]
    assert row["warnings"][0].startswith("1 pair is an outlier")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"sides": []}, "sides is []"),
        ({"sides": {"x": {}}}, "sides.x.step_s is missing"),
        ({"other_cores": "many"}, "other_cores is 'many', expected a finite number"),
    ],
)
def test_a_damaged_cost_file_is_one_line(done, change, says, capsys):
    cost = json.loads((done.out / COST).read_text())
    (done.out / COST).write_text(json.dumps({**cost, **change}))
    assert main(["ablate", "report", str(done.out)]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("name", ["a", "model.architecture.intermediate_size=1024"])
def test_no_verdict_is_cut_on_80_columns(experiment, name):
    plan = experiment({name: {"effect": 0.0}, "b": {"effect": 0.02}})
    work(plan.out)
    file = io.StringIO()
    show_report(report_of(load_experiment(plan.out)), Console(file=file, width=80))
    table = [line for line in file.getvalue().splitlines() if "…" in line]
    assert table == []
    assert "undecided" in file.getvalue()
    assert " worse" in file.getvalue()


def test_a_replay_that_differs_on_a_cpu_is_a_warning(done):
    report = report_of(load_experiment(done.out))
    report["aa"]["replay_difference"] = 0.25
    assert noise_lines(report)[0] == (
        "The baseline's seed 0 again: 0.25 apart, although a CPU should repeat each bit: "
        "do not trust small differences."
    )


def test_a_report_without_curves_cost_and_verdicts_says_so(experiment, capsys):
    plan = experiment({"a": {"effect": -0.5}})
    assert main(["ablate", "report", str(plan.out)]) == 0
    report = json.loads((plan.out / "report.json").read_text())
    assert (report["has_ended"], report["pairs"], report["cost"]["sides"]) == (False, 0, {})
    assert (report["variants"]["a"]["verdict"], report["variants"]["a"]["note"]) == ("undecided", "no look yet")
    assert "The experiment has not ended." in (plan.out / "report.html").read_text()
    capsys.readouterr()
    assert main(["ablate", "status", str(plan.out)]) == 0
    assert "0 runs have ended, 0 train, 13 wait" in capsys.readouterr().out


def test_the_report_says_what_the_metric_is_of(experiment):
    plan = experiment({"a": {"effect": 0.0}}, base={"trainer": {"limit_val_batches": 2}})
    assert report_of(load_experiment(plan.out))["validation"] == "2 batches of the validation text"
