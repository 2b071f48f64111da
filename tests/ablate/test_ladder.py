"""Ladders: what a file asks for, and promises that nothing rewrites."""

import json

import pytest
import yaml

from lightning_llm.ablate.ladder import LADDER, check_reach, ladder_of, read_ladder, with_tuned
from lightning_llm.ablate.ladder_report import promise_for
from lightning_llm.model.parts import BUILT_IN, name_of
from tests.ablate.conftest import COMPUTES, LADDER_FILE
from tests.ablate.test_experiment import EXAMPLES, ROOT

SHIPPED = sorted(path for path, content in EXAMPLES.items() if "sizes" in content)
OPTION = "model.optimizer.init_args.lr"


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
        ({"half_width": 0.1}, "a ladder has no half_width"),
        ({"tune": {"option": 3}}, "tune.option is 3, expected"),
        ({"match": "params"}, "match is 'params', expected one of"),
        ({"pairs": 1}, "pairs is 1, expected a whole number from 2 to"),
        ({"tokens_per_parameter": 0}, "tokens_per_parameter is 0, expected a number above 0"),
        ({"varaints": {}}, "varaints"),
    ],
)
def test_what_a_ladder_cannot_be(changes, says):
    with pytest.raises(ValueError, match=says.replace("(", r"\(")):
        ladder_of({**LADDER_FILE, **changes}, "the file", "name")


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_those_that_are_shipped_are_some(path):
    ladder = ladder_of(yaml.safe_load(path.read_text(encoding="utf-8")), path, path.stem)
    assert (str(ladder.out), ladder.sizes, ladder.target) == (f"runs/{path.stem}", ("25k", "50k", "100k"), "200k")
    assert ladder.experiment("25k").match == ("flops" if path.stem == "parts" else "parameters")


def test_the_ladders_of_one_question_differ_in_tokens_and_optimizer():
    files = [yaml.safe_load(path.read_text("utf-8")) for path in SHIPPED if path.stem.startswith("swiglu-relu2")]
    assert [file.pop("tokens_per_parameter") for file in files] == [2, 20, 2, 20]
    optimizers = [file["options"].pop("model.optimizer", None) for file in files]
    assert optimizers == [optimizers[0], optimizers[0], None, None]
    assert len({str({**file, "name": ""}) for file in files}) == 1


def test_the_shipped_parts_are_the_new_ones():
    path = ROOT / "examples" / "ablations" / "parts.yaml"
    variants = ladder_of(yaml.safe_load(path.read_text(encoding="utf-8")), path, path.stem).experiment("25k").variants
    shipped = {name_of(value) for options in variants.values() for value in options.values() if isinstance(value, str)}
    new = {
        name for kind in ("attention", "norm", "position") for name, part in BUILT_IN[kind].items() if not part.has_mup
    }
    assert new <= shipped


def test_each_size_is_an_experiment_with_a_fixed_number_of_pairs():
    options = {"options": {"trainer.precision": "32-true"}, "tokens_per_parameter": 5, "seeds": {"first": 7}}
    ladder = ladder_of({**LADDER_FILE, **options, "predict": "200k", "pairs": 6}, "the file", "my name")
    assert (str(ladder.out), ladder.sizes, ladder.target) == ("runs/my name", ("25k", "50k", "100k"), "200k")
    one = ladder.experiment("50k")
    assert one.options == {"trainer.precision": "32-true", "size": "50k", "tokens_per_parameter": 5}
    assert (one.looks, one.first_seed, one.name) == ((6,), 7, "my name 50k")
    assert one.folder == "runs/my name/sizes/50k"
    assert ladder_of(LADDER_FILE, "the file", "n").experiment("25k").looks == (8,)


def test_only_the_smallest_size_is_tuned():
    ladder = ladder_of({**LADDER_FILE, "tune": {"option": OPTION}}, "the file", "n")
    assert ladder.tuned_option == OPTION
    assert [ladder.experiment(size).tune is None for size in ladder.sizes] == [False, True, True]
    tuned = with_tuned(ladder.experiment("50k"), OPTION, {"baseline": 0.02, "a": 0.01})
    assert tuned.options == {**ladder.experiment("50k").options, OPTION: 0.02}
    assert tuned.variants == {"a": {**LADDER_FILE["variants"]["a"], OPTION: 0.01}}
    assert ladder_of(LADDER_FILE, "the file", "n").tuned_option is None


def test_a_size_is_added_above_the_others_and_after_they_have_ended(ladder):
    made = ladder({"a": [-0.1, -0.1, -0.1]})
    with pytest.raises(ValueError, match="--size 75k must be above the sizes of the ladder, 25k, 50k, 100k"):
        made.with_target("75k", [])
    two = ladder_of({**LADDER_FILE, "sizes": ["25k", "50k"]}, "the file", "n")
    with pytest.raises(ValueError, match="a prediction needs 3 sizes or more, got 2"):
        two.with_target("100k", [])
    for run in (made.folder("50k") / "runs").glob("a,seed=3"):
        (run / "summary.json").unlink()
    with pytest.raises(ValueError, match=r"50k has not ended: lightning-llm ablate run .* continues it"):
        promise_for(made, COMPUTES)


def test_nothing_is_predicted_beyond_a_factor_of_16():
    ladder = ladder_of({**LADDER_FILE, "predict": "1M"}, "the file", "n")
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
