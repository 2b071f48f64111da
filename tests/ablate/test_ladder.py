"""Ladders: what a file asks for, and the experiment of each size."""

from pathlib import Path

import pytest
import yaml

from lightning_llm.ablate.experiment import experiment_of
from lightning_llm.ablate.ladder import (
    LADDER,
    at_size,
    check_reach,
    folder_of_size,
    read_ladder,
    with_further,
    with_tuned,
)
from lightning_llm.ablate.report.from_sizes import prediction_for
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
        ({"sizes": ["25k"], "predict": "50k"}, "predict needs 2 sizes or more, got 1"),
        ({"looks": [4, 8]}, "a ladder has no looks: it has a fixed number of pairs"),
        ({"half_width": 0.1}, "a ladder has no half_width"),
        ({"tune": {"option": 3}}, "tune.option is 3, expected"),
        ({"match": "params"}, "match is 'params', expected one of"),
        ({"pairs": 1}, "pairs 1: one pair has no interval: give at least 2"),
        ({"tokens_per_parameter": 0}, "tokens_per_parameter is 0, expected a number above 0"),
        ({"varaints": {}}, "varaints"),
    ],
)
def test_what_a_ladder_cannot_be(changes, says):
    with pytest.raises(ValueError, match=says.replace("(", r"\(")):
        experiment_of({**LADDER_FILE, **changes}, "the file", "name")


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_those_that_are_shipped_are_some(path):
    ladder = experiment_of(yaml.safe_load(path.read_text(encoding="utf-8")), path, path.stem)
    others = {"held-out-again": ("15k", "30k", "60k", "120k"), "mixtures": ("25k", "50k", None)}
    sizes = {**others, "x-transformers": ("25k", "50k", "100k")}.get(path.stem, ("25k", "50k", "100k", "200k"))
    assert (ladder.folder, (*ladder.sizes, ladder.predict)) == (f"runs/{path.stem}", sizes)
    rules = {"parts": "flops", "x-transformers": "flops", "mixtures": "tokens"}
    assert at_size(ladder, "25k").match == rules.get(path.stem, "parameters")


def test_the_ladders_of_one_question_differ_in_tokens_and_optimizer():
    files = [yaml.safe_load(path.read_text("utf-8")) for path in SHIPPED if path.stem.startswith("swiglu-relu2")]
    assert [file.pop("tokens_per_parameter") for file in files] == [2, 20, 2, 20]
    optimizers = [file["options"].pop("model.optimizer", None) for file in files]
    assert optimizers == [optimizers[0], optimizers[0], None, None]
    assert len({str({**file, "name": ""}) for file in files}) == 1


def test_the_shipped_parts_are_the_new_ones():
    path = ROOT / "examples" / "ablations" / "parts.yaml"
    variants = experiment_of(yaml.safe_load(path.read_text(encoding="utf-8")), path, path.stem).variants
    shipped = {name_of(value) for options in variants.values() for value in options.values() if isinstance(value, str)}
    new = {
        name for kind in ("attention", "norm", "position") for name, part in BUILT_IN[kind].items() if not part.has_mup
    }
    assert new <= shipped


def test_each_size_is_an_experiment_with_a_fixed_number_of_pairs():
    options = {"options": {"trainer.precision": "32-true"}, "tokens_per_parameter": 5, "seeds": {"first": 7}}
    ladder = experiment_of({**LADDER_FILE, **options, "predict": "200k", "pairs": 6}, "the file", "my name")
    assert (ladder.folder, ladder.sizes, ladder.predict) == ("runs/my name", ("25k", "50k", "100k"), "200k")
    one = at_size(ladder, "50k")
    assert one.options == {"trainer.precision": "32-true", "size": "50k", "tokens_per_parameter": 5}
    assert (one.looks, one.first_seed, one.name) == ((6,), 7, "my name 50k")
    assert one.folder == "runs/my name/sizes/50k"
    assert experiment_of(LADDER_FILE, "the file", "n").looks == (8,)


def test_only_the_smallest_size_is_tuned():
    ladder = experiment_of({**LADDER_FILE, "tune": {"option": OPTION}}, "the file", "n")
    assert [at_size(ladder, size).tune is None for size in ladder.sizes] == [False, True, True]
    tuned = with_tuned(at_size(ladder, "50k"), OPTION, {"baseline": 0.02, "a": 0.01})
    assert tuned.options == {**at_size(ladder, "50k").options, OPTION: 0.02}
    assert tuned.variants == {"a": {**LADDER_FILE["variants"]["a"], OPTION: 0.01}}


def test_a_size_is_added_above_the_others_and_after_they_have_ended(ladder):
    made = ladder({"a": [-0.1, -0.1, -0.1]})
    with pytest.raises(ValueError, match="--size 75k must be above the sizes of the ladder, 25k, 50k, 100k"):
        with_further(made, "75k", [])
    one = experiment_of({**LADDER_FILE, "sizes": ["25k"]}, "the file", "n")
    with pytest.raises(ValueError, match="a prediction needs 2 sizes or more, got 1"):
        with_further(one, "50k", [])
    for run in (folder_of_size(made, "50k") / "runs").glob("a,seed=3"):
        (run / "summary.json").unlink()
    with pytest.raises(ValueError, match=r"50k has not ended: lightning-llm ablate run .* continues it"):
        prediction_for(made, COMPUTES)


def test_only_one_size_up_is_predicted():
    ladder = experiment_of({**LADDER_FILE, "predict": "1M"}, "the file", "n")
    check_reach(ladder, {**COMPUTES, "1M": 5 * COMPUTES["100k"]})
    with pytest.raises(ValueError, match="predict 1M has 6 times the FLOPs of 100k, expected at most 5 times"):
        check_reach(ladder, {**COMPUTES, "1M": 6 * COMPUTES["100k"]})


def test_what_is_no_ladder_of_this_version_is_one_line(ladder, tmp_path):
    made = ladder({"a": [-0.1, -0.1, -0.1]})
    assert read_ladder(Path(made.folder)) == (made, COMPUTES)
    (Path(made.folder) / LADDER).write_text('{"asked": {}, "computes": {}, "hash": "0"}')
    says = r"missing required field `experiment`; if an earlier version wrote it, its own copy of the code reads it"
    with pytest.raises(ValueError, match=says):
        read_ladder(Path(made.folder))
    with pytest.raises(ValueError, match=r"holds no ladder\.json: give the folder of a ladder"):
        read_ladder(tmp_path)
