"""The report of combined factors: rows of effects, and sentences that say no more than their intervals."""

import json

import msgspec
import numpy as np
import pytest

from lightning_llm.__main__ import main
from lightning_llm.ablate.command.spec import Command
from lightning_llm.ablate.factors import variants_of
from lightning_llm.ablate.plan import Plan
from lightning_llm.ablate.report import words
from lightning_llm.ablate.report.from_experiment import report_of
from lightning_llm.ablate.report.from_factors import effect_rows
from lightning_llm.ablate.report.record import EFFECTS
from lightning_llm.ablate.report.report import Report
from lightning_llm.ablate.results import Loaded, load_experiment
from tests.ablate.conftest import work

ALONE = {"a": -0.03, "b": -0.02, "c": 0.01, "d": -0.01}


def of(experiment, count=2, interaction=0.013, delta=None, fails=(), pairs=6, noise=0.0002):
    """An experiment that has ended: effects of each alone, and one interaction of the first two factors."""
    factors = {name: {f"model.{name}": 1} for name in list(ALONE)[:count]}
    cells = {}
    for number, (name, options) in enumerate(variants_of(factors).items()):
        chosen = name.split("+")
        effect = sum(ALONE[factor] for factor in chosen) + interaction * ({"a", "b"} <= {*chosen})
        cells[name] = {"effect": effect, "options": options, "noise": noise * (number + 1) * (-1) ** number}
        cells[name] |= {"diverges": [1]} if name in fails else {}
    plan = experiment(cells, looks=(pairs,), delta=delta, factors=factors)
    work(plan.out)
    return load_experiment(plan.out)


def test_rows_of_effects_have_the_contrast_of_each_seed(experiment):
    report = report_of(of(experiment))
    assert [(row.kind, row.variant, row.baseline) for row in report.effects] == [
        ("main", "a", "without a"),
        ("main", "b", "without b"),
        ("interaction", "a × b", "a without b"),
        ("together", "all together", "baseline"),
        ("sum", "all against the sum of each alone", "the sum of each alone"),
    ]
    results = {row.variant: [pair.variant for pair in row.by_seed] for row in report.results}
    base = np.array([pair.baseline for pair in report.row("a").by_seed])
    a, b, both = (np.array(results[name]) for name in ("a", "b", "a+b"))
    wanted = {"main": (a + both - base - b) / 2, "interaction": both - a - b + base, "together": both - base}
    for kind, contrast in wanted.items():
        row = next(report.of_kind(kind))
        assert [pair.difference for pair in row.by_seed] == pytest.approx(contrast)
        assert row.difference == pytest.approx(contrast.mean())
        assert row.mean - row.baseline_mean == pytest.approx(contrast.mean())
    assert [row.verdict for row in report.effects] == [
        *("better", "better", "less together than apart", "better", "less together than apart")
    ]
    assert report.row("a").kind == "result"  # the effect of a alone is another row
    assert {row.further_pairs for row in report.rows} == {None}


def test_the_first_sentence_says_what_is_given_together_and_what_apart(experiment):
    first, *others = words.effect_lines(report_of(of(experiment)))
    assert first.startswith("Together -0.0370 (")
    assert " nats/token; the sum of each alone is -0.0501; they give 0.0130 less together than apart (0.01" in first
    assert any(line.startswith("a: better on average over the others; difference -0.0235 (") for line in others)
    assert any(line.startswith("a × b: 0.0130 less together than apart (") for line in others)
    assert "Intervals: main effects 97.5%, interactions 95%, all together 95%, the sum 95%." in " ".join(others)
    assert "measured again" in others[-2]
    assert "four times the pairs" in others[-1]


def test_more_together_than_apart(experiment):
    first = words.effect_lines(report_of(of(experiment, interaction=-0.013)))[0]
    assert "they give 0.0130 more together than apart (0.01" in first


def test_an_interval_that_holds_0_never_adds_up_without_delta(experiment):
    first = words.effect_lines(report_of(of(experiment, interaction=0.0, noise=0.003)))[0]
    assert "whether they add up is not shown: the sum may be off by -0.0" in first
    assert "they add up, within" not in first


def test_inside_delta_they_add_up(experiment):
    report = report_of(of(experiment, interaction=0.0, delta=0.005))
    assert "; they add up, within 0.005 (-0.00" in words.effect_lines(report)[0]
    assert next(report.of_kind("sum")).verdict == "they add up"


def test_where_higher_is_better_signs_change_and_words_do_not(experiment):
    loaded = of(experiment)
    command = Command(text="t", words=("t",))
    asked = msgspec.structs.replace(loaded.plan.experiment, metric="-score", command=command)
    record = msgspec.structs.replace(loaded.plan.record, experiment=asked)
    negated = Loaded(Plan(loaded.plan.out, record), loaded.results, loaded.state, None)
    rows, losses = effect_rows(negated), effect_rows(loaded)
    for row, loss in zip(rows, losses, strict=True):
        assert (row.verdict, row.sentence) == (loss.verdict, loss.sentence)
        assert row.difference == -loss.difference
        assert row.interval == (-loss.interval[1], -loss.interval[0])
        assert [pair.difference for pair in row.by_seed] == pytest.approx([-pair.difference for pair in loss.by_seed])
    assert words.effect_sentence(rows[2]) == "a × b: 0.01301 less together than apart (0.01209 to 0.01393)."


def test_a_three_way_interaction_is_shown_without_words(experiment):
    report = report_of(of(experiment, 3))
    row = report.row("a × b × c", kind="interaction")
    assert (row.verdict, row.level, row.interval is not None) == ("no verdict", 0.95, True)
    (line,) = (line for line in words.effect_lines(report) if line.startswith("a × b × c"))
    assert line.endswith("nats/token, by itself and without words.")
    assert "main effects 98.33%, interactions 98.33%" in " ".join(words.effect_lines(report))


def test_a_half_of_the_cells_names_what_is_confounded(experiment):
    report = report_of(of(experiment, 4))
    row = report.row("a × b (or c × d)", kind="interaction")
    assert row.difference == pytest.approx(0.013, abs=0.002)
    assert [each.variant for each in report.results][:2] == ["a+b", "a+c"]
    assert "the sum of each alone is -0.05" in words.effect_lines(report)[0]
    (note,) = report.notes
    assert "Half of all combinations were trained: interactions of three factors are taken to be 0; effects" in note
    assert note in str(report)
    assert report_of(of(experiment, 3)).notes == []


def test_a_run_that_failed_leaves_no_contrast_and_says_so(experiment):
    report = report_of(of(experiment, fails=["a"]))
    first, *others = words.effect_lines(report)
    assert "the sum of each alone is not known: 1 run that it is a contrast of failed to train." in first
    assert "a: 1 run that it is a contrast of failed to train." in others
    assert next(report.of_kind("together")).difference == pytest.approx(-0.037, abs=1e-3)


def test_before_the_end_there_are_no_effects(experiment):
    loaded = of(experiment)
    left = {run: result for run, result in loaded.results.items() if str(run) != "a+b,seed=5"}
    state = loaded.plan.state({run: result.loss for run, result in left.items()})
    report = report_of(Loaded(loaded.plan, left, state, None))
    assert report.effects == []
    assert [row.note for row in report.results] == ["not tested yet"] * 3


def test_every_format_has_the_effects_first_and_the_combinations_after(experiment, capsys):
    out = of(experiment).plan.out
    printed = {}
    for name in ("text", "markdown", "latex", "csv", "json"):
        assert main(["ablate", "report", str(out), "--format", name]) == 0
        printed[name] = capsys.readouterr().out
    sentence = "they give 0.0130 less together than apart"
    assert sentence in printed["text"]
    assert sentence in printed["markdown"]
    assert "| a × b | interaction | 6 | +0.0130 |" in printed["markdown"]
    assert r"a $\times$ b & interaction & 6 & $+0.0130$" in printed["latex"]
    lines = printed["csv"].splitlines()
    assert [line.split(",")[2] for line in lines[1:9]] == [
        *("main", "main", "interaction", "together", "sum"),
        *("result", "result", "result"),
    ]
    kinds = [row["kind"] for row in json.loads(printed["json"])["rows"]]
    assert [kind for kind in kinds if kind in EFFECTS] == ["main", "main", "interaction", "together", "sum"]
    page = (out / "report.html").read_text()
    assert page.index("Do they add up?") < page.index("Each combination against the baseline")
    assert sentence in page
    assert {"effects.svg", "differences.svg"} <= {path.name for path in (out / "figures").iterdir()}
    assert Report.read(out).effects == report_of(load_experiment(out)).effects
