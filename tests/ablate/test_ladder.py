"""Ladders: what a file asks for, what three sizes say of a fourth, and promises that nothing rewrites."""

import json
import math

import pytest
import yaml

from lightning_llm.ablate.ladder import (
    LADDER,
    PROMISES,
    SIZES,
    check_reach,
    freeze_ladder,
    ladder_of,
    promise_of,
    read_ladder,
    store_promise,
)
from lightning_llm.ablate.ladder_report import (
    NO_BEND,
    ladder_report,
    lines_of,
    promise_for,
    table_of,
    write_ladder_report,
)
from lightning_llm.ablate.report import report_of
from lightning_llm.ablate.results import load_experiment
from lightning_llm.ablate.worker import work
from lightning_llm.statistics.extrapolation import AtSize, Spread, predict
from tests.ablate.conftest import frozen
from tests.ablate.test_experiment import ROOT

FILE = {"baseline": "base.yaml", "variants": {"a": {"model.architecture.mlp": "relu"}}, "sizes": ["25k", "50k", "100k"]}
COMPUTES = {"25k": 4.0**10, "50k": 4.0**11, "100k": 4.0**12, "200k": 4.0**13}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"sizes": ["50k", "25k", "100k"]}, "sizes, and predict after them, must increase, got 50k, 25k, 100k"),
        ({"sizes": ["25k", "25k"]}, "must increase"),
        ({"sizes": ["25k", "25000"]}, "must increase"),  # the same number
        ({"sizes": []}, "must increase"),
        ({"sizes": ["small"]}, "size must be a number of parameters such as 100k or 1.5M, got 'small'"),
        ({"sizes": "25k"}, "sizes is '25k', expected a list"),
        ({"predict": "75k"}, "must increase, got 25k, 50k, 100k, 75k"),
        ({"sizes": ["25k", "50k"], "predict": "100k"}, "predict needs 3 sizes or more, got 2"),
        ({"looks": [4, 8]}, "a ladder has no looks: it has a fixed number of pairs"),
        ({"precision": 0.1}, "a ladder has no precision"),
        ({"tune": {"option": "model.x"}}, "a ladder has no tune: tune at the smallest size, and give the value"),
        ({"match": "params"}, "match is 'params', expected one of"),
        ({"pairs": 1}, "pairs is 1, expected a whole number from 2 to"),
        ({"tokens_per_parameter": 0}, "tokens_per_parameter is 0, expected a number above 0"),
        ({"varaints": {}}, "varaints"),
    ],
)
def test_what_a_ladder_cannot_be(changes, says):
    with pytest.raises(ValueError, match=says.replace("(", r"\(")):
        ladder_of({**FILE, **changes}, "the file", "name")


def test_the_one_that_is_shipped_is_one():
    path = ROOT / "examples" / "ablations" / "ladder.yaml"
    ladder = ladder_of(yaml.safe_load(path.read_text(encoding="utf-8")), path, path.stem)
    assert (str(ladder.out), ladder.target) == ("runs/ladder", "200k")
    assert ladder.experiment("25k").variants.keys() == {"relu2", "layernorm"}
    assert ladder.experiment("25k").match == "parameters"


def test_each_size_is_an_experiment_with_a_fixed_number_of_pairs():
    options = {"options": {"trainer.precision": "32-true"}, "tokens_per_parameter": 5, "seeds": {"first": 7}}
    ladder = ladder_of({**FILE, **options, "predict": "200k", "pairs": 6}, "the file", "my name")
    assert (str(ladder.out), ladder.sizes, ladder.target) == ("runs/my name", ("25k", "50k", "100k"), "200k")
    one = ladder.experiment("50k")
    assert one.options == {"trainer.precision": "32-true", "size": "50k", "tokens_per_parameter": 5}
    assert (one.looks, one.first_seed, one.name) == ((6,), 7, "my name 50k")
    assert one.folder == "runs/my name/sizes/50k"
    assert ladder_of(FILE, "the file", "n").experiment("25k").looks == (8,)


@pytest.fixture
def ladder(tmp_path):
    """``ladder(effects={name: one per size})``: a ladder whose three sizes have ended."""

    def of(effects, base=(3.0, 2.5, 2.25), pairs=4, **more):
        out = tmp_path / "ladder"
        asked = {**FILE, "name": "test", "out": str(out), "pairs": pairs, "predict": "200k", "delta": 0.01, **more}
        asked["variants"] = {name: {} for name in effects}
        made = ladder_of(asked, "the file", "test")
        freeze_ladder(made, COMPUTES)
        for place, size in enumerate(made.sizes):
            train(made, size, {name: values[place] for name, values in effects.items()}, base[place] - 3.0)
        return made

    return of


def train(ladder, size, effects, level):
    """The experiment of a size, done by the stand-in; a text instead of an effect: its seeds that diverge."""
    (ladder.out / SIZES).mkdir(parents=True, exist_ok=True)
    variants = {
        name: {"effect": level, "diverges": effect} if isinstance(effect, list) else {"effect": level + effect}
        for name, effect in effects.items()
    }
    base, null = {"effect": level}, {"effect": level + 0.002}
    looks, out = [ladder.pairs], f"{SIZES}/{size}"
    work(frozen(ladder.out, variants, looks=looks, out=out, base=base, null=null, delta=0.01).out)


def test_a_difference_at_three_sizes_is_predicted_at_the_fourth(ladder):
    made = ladder({"same": [-0.1, -0.1, -0.1], "gone": [-0.4, -0.1, -0.025], "turned": [-0.2, -0.1, 0.0]})
    report = ladder_report(*read_ladder(made.out))
    assert report["has_ended"]
    assert {name: row["answer"] for name, row in report["ladder"].items()} == {
        "same": "holds",
        "gone": "fades",
        "turned": "unknown",  # no direction is shown at the largest size
    }
    rows = report["ladder"]["same"]["sizes"]
    assert [row["size"] for row in rows] == ["25k", "50k", "100k"]
    assert [row["compute"] for row in rows] == [COMPUTES[size] for size in made.sizes]
    sizes = {size: report_of(load_experiment(made.folder(size))) for size in made.sizes}
    every = [
        AtSize(math.log(COMPUTES[size], 4), row["difference"], row["sd"], row["pairs"])
        for size, each in sizes.items()
        for row in (*each["variants"].values(), each["aa"]["null"])
    ]
    own = [at for at, name in zip(every, ["same", "gone", "turned", "null"] * 3, strict=True) if name == "same"]
    expected = predict(own, Spread.of(every), 13.0, 4)
    found = report["ladder"]["same"]
    assert found["interval"] == pytest.approx(list(expected.interval))
    assert found["prediction_interval"] == pytest.approx(list(expected.prediction_interval))
    assert found["shown_up_to"] == pytest.approx(4.0**14)  # as far as anything is predicted
    lines = lines_of(report)
    assert lines[0].startswith("same at 200k (6.7e+07 FLOPs): holds: the direction is that at the largest size; ")
    assert "gone at 200k (6.7e+07 FLOPs): fades: the difference is smaller than 0.01; " in lines[1]
    assert NO_BEND in lines


def test_the_multiplier_is_the_compute_that_gives_the_same_loss(ladder):
    made = ladder({"a": [-0.5, -0.25, 0.0]}, base=(3.0, 2.5, 2.25))
    report = ladder_report(*read_ladder(made.out))
    rows = report["ladder"]["a"]["sizes"]
    # the baseline falls by 0.5 for 4 times the compute, then by 0.25; at the size between them by their mean
    assert rows[0]["multiplier"] == pytest.approx(4, rel=0.01)
    assert rows[1]["multiplier"] == pytest.approx(4 ** (0.25 / 0.375), rel=0.01)
    assert rows[2]["multiplier"] == pytest.approx(1, rel=0.01)
    low, high = rows[0]["multiplier_interval"]
    assert low < rows[0]["multiplier"] < high
    assert [row[-1] for row, _ in table_of(report)] == [f"{row['multiplier']:.2f}" for row in rows]


def test_a_size_with_a_diverged_run_has_no_difference_and_two_sizes_predict_nothing(ladder):
    made = ladder({"lost": [-0.1, [1], -0.1], "same": [-0.1, -0.1, -0.1]})
    report = ladder_report(*read_ladder(made.out))
    assert report["ladder"]["lost"]["sizes"][1]["difference"] is None
    assert report["ladder"]["lost"]["answer"] is None
    assert report["ladder"]["same"]["answer"] == "holds"
    assert "lost at 200k (6.7e+07 FLOPs): no prediction, which needs a difference at three sizes" in lines_of(report)[0]
    write_ladder_report(*read_ladder(made.out))  # the page can be drawn


def test_a_promise_is_kept_or_not_and_never_rewritten(ladder):
    made = ladder({"same": [-0.1, -0.1, -0.1], "bends": [-0.1, -0.1, -0.1]})
    promise = promise_for(made, COMPUTES)
    digest = store_promise(made, promise)
    other = {**promise, "variants": {}}
    assert store_promise(made, other) == digest  # the first one stays
    assert promise_of(made, "200k")["variants"].keys() == {"same", "bends"}
    waiting = ladder_report(*read_ladder(made.out))
    assert [row["hit"] for row in waiting["promises"][0]["variants"].values()] == [None, None]
    assert waiting["target"] is not None
    train(made, "200k", {"same": -0.1, "bends": 0.2}, -0.9)
    report = ladder_report(*read_ladder(made.out))
    assert {name: row["hit"] for name, row in report["promises"][0]["variants"].items()} == {
        "same": True,
        "bends": False,
    }
    assert report["target"] is None
    lines = lines_of(report)
    assert any(line.startswith("same at 200k: hit: promised -0.1") for line in lines)
    assert any(line.startswith("bends at 200k: miss: ") and line.endswith("observed +0.2002.") for line in lines)
    further = made.with_target("400k", ["200k"])
    assert further.sizes == ("25k", "50k", "100k", "200k")
    path = made.out / PROMISES / "200k.json"
    path.write_text(path.read_text().replace('"pairs": 4', '"pairs": 5'))
    with pytest.raises(ValueError, match=r"200k\.json was changed after the start: restore it"):
        ladder_report(*read_ladder(made.out))


def test_a_size_is_added_above_the_others_and_after_they_have_ended(ladder):
    made = ladder({"a": [-0.1, -0.1, -0.1]})
    with pytest.raises(ValueError, match="--size 75k must be above the sizes of the ladder, 25k, 50k, 100k"):
        made.with_target("75k", [])
    two = ladder_of({**FILE, "sizes": ["25k", "50k"]}, "the file", "n")
    with pytest.raises(ValueError, match="a prediction needs 3 sizes or more, got 2"):
        two.with_target("100k", [])
    for run in (made.folder("50k") / "runs").glob("a,seed=3"):
        (run / "summary.json").unlink()
    with pytest.raises(ValueError, match=r"50k has not ended: lightning-llm ablate run .* continues it"):
        promise_for(made, COMPUTES)


def test_nothing_is_predicted_beyond_a_factor_of_16():
    ladder = ladder_of({**FILE, "predict": "1M"}, "the file", "n")
    check_reach(ladder, {**COMPUTES, "1M": 16 * COMPUTES["100k"]})
    with pytest.raises(ValueError, match="predict 1M has 17 times the FLOPs of 100k, expected at most 16 times"):
        check_reach(ladder, {**COMPUTES, "1M": 17 * COMPUTES["100k"]})


def test_a_ladder_that_was_changed_is_refused(ladder, tmp_path):
    made = ladder({"a": [-0.1, -0.1, -0.1]})
    content = json.loads((made.out / LADDER).read_text())
    content["computes"]["200k"] *= 2
    (made.out / LADDER).write_text(json.dumps(content))
    with pytest.raises(ValueError, match="was changed after the start"):
        read_ladder(made.out)
    with pytest.raises(ValueError, match=r"holds no ladder\.json: give the folder of a ladder"):
        read_ladder(tmp_path)


def test_the_page_shows_names_as_text(ladder):
    made = ladder({"<b>$x$&": [-0.1, -0.1, -0.1]})
    _, page = write_ladder_report(*read_ladder(made.out))
    html = page.read_text(encoding="utf-8")
    assert "&lt;b&gt;$x$&amp;" in html
    assert "<b>" not in html
    assert html.count("<svg") == 1
    assert "sizes/100k/report.html" in html
    assert json.loads((made.out / "report.json").read_text())["ladder"]["<b>$x$&"]["answer"] == "holds"


def test_without_a_target_the_sizes_are_shown_alone(ladder):
    made = ladder({"a": [-0.1, -0.1, -0.1]}, predict=None)
    report = ladder_report(*read_ladder(made.out))
    assert report["target"] is None
    assert report["ladder"]["a"]["answer"] is None
    assert lines_of(report) == ["Intervals of differences: 95% for each size; predictions: 90% for each variant."]
