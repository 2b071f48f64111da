"""Combinations of factors: the cells that a file or the command line asks for, and one line for each mistake."""

import re
from types import SimpleNamespace

import pytest

from lightning_llm.__main__ import main
from lightning_llm.ablate.command.spec import COMMAND_LINE
from lightning_llm.ablate.experiment import Looks, experiment_of
from lightning_llm.ablate.extension import extension_of
from lightning_llm.ablate.factors import factors_in, named_cells
from lightning_llm.ablate.names import AGAIN, BASELINE, NULL
from lightning_llm.ablate.next_runs import RunKey, state_of

MLP, NORM, THETA = (f"model.architecture.{name}" for name in ("mlp", "qk_norm", "rope_theta"))
FACTORS = {"swiglu": {MLP: "swiglu"}, "qk": {NORM: True, THETA: 500}}
BASE = {"baseline": "a.yaml", "factors": FACTORS}
COMMAND = {"baseline": None, "command": "true {seed} {options}", "read": "loss {number}"}


def asked(source="f.yaml", **keys):
    return experiment_of({**BASE, **keys}, source, "f")


def test_cells_are_variants_with_the_options_of_their_factors_and_one_look():
    found = asked(seeds={"first": 1000})
    assert found.variants == {
        "swiglu": {MLP: "swiglu"},
        "qk": {NORM: True, THETA: 500},
        "swiglu+qk": {MLP: "swiglu", NORM: True, THETA: 500},
    }
    assert found.factors == FACTORS
    assert found.stop == Looks(pairs=(16,))
    assert asked(pairs=6).looks == (6,)


def test_each_cell_has_the_same_seeds_and_the_null_variant_at_most_eight():
    found = asked(pairs=10, seeds={"first": 5})
    needed = state_of(found, {}).needed
    seeds = {name: [run.seed for run in needed if run.name == name] for name in {run.name for run in needed}}
    assert {name: sorted(each) for name, each in seeds.items()} == {
        **{name: list(range(5, 15)) for name in (BASELINE, *found.variants)},
        AGAIN: [5],
        NULL: list(range(5, 13)),
    }
    assert len(needed) == found.most_runs() == 1 + 8 + 4 * 10
    ordinary = experiment_of({"baseline": "a.yaml", "variants": FACTORS, "looks": [10]}, "f.yaml", "f")
    assert ordinary.null_runs == 10


def test_no_cell_ends_early_and_none_is_extended():
    found = asked(pairs=4, delta=None)
    losses = {run: 3.0 - 0.5 * (run.name != BASELINE) + 0.01 * run.seed for run in state_of(found, {}).needed}
    del losses[RunKey("swiglu+qk", 3)]
    assert state_of(found, losses).needed == [RunKey("swiglu+qk", 3)]
    loaded = SimpleNamespace(plan=SimpleNamespace(out="runs/f", experiment=found), state=None)
    with pytest.raises(
        ValueError, match=r"runs/f combines factors, which has a fixed number of pairs: .*--first-seed N"
    ):
        extension_of(loaded, 4, None)


def test_names_of_cells_join_those_of_factors():
    assert list(named_cells(["a", "b", "c"]).values()) == [BASELINE, "a", "b", "c", "a+b", "a+c", "b+c", "a+b+c"]
    assert list(named_cells(["a", "b", "c", "d"]).values())[1:3] == ["a+b", "a+c"]


def test_words_of_the_command_line_with_one_name_are_options_of_one_factor():
    words = [f"swiglu:{MLP}=swiglu", f"qk:{NORM}=true", f"qk:{THETA}=a:b=c"]
    assert factors_in(words) == {"swiglu": {MLP: "swiglu"}, "qk": {NORM: "true", THETA: "a:b=c"}}
    assert factors_in(["a:@x=1", "b:lr=@2"]) == {"a": "@x=1", "b": {"lr": "@2"}}


def test_revisions_of_factors_are_merged_into_the_one_that_they_change():
    keys = {"command": "true {seed} {options}", "read": "loss {number}", "against": "main"}
    found = experiment_of({**keys, "factors": {"a": "@idea", "b": {"lr": 3}, "c": "@fix"}}, "f.yaml", "f")
    assert found.variants == {name: {"lr": 3} if "b" in name else {} for name in found.variants}
    revisions = {"a": "idea", "c": "fix"}
    merged = {name: tuple(revisions[part] for part in name.split("+") if part in revisions) for name in found.variants}
    trees = found.command.trees
    assert {name: (tree.revision, tree.merged) for name, tree in trees.items()} == {
        BASELINE: ("main", ()),
        **{name: ("main", each) for name, each in merged.items()},
    }
    assert (trees["b"].name, trees["a+b+c"].name) == ("main", "main + idea + fix")


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["a"], "--factor 'a' must be NAME:OPTION=VALUE or NAME:@REV, such as swiglu:model"),
        (["a:b"], "--factor 'a:b' must be NAME:OPTION=VALUE"),
        ([":b=1"], "must be NAME:OPTION=VALUE"),
        (["b=1"], "must be NAME:OPTION=VALUE"),
        (["a:@"], "--factor 'a:@' must be NAME:OPTION=VALUE or NAME:@REV"),
        (["a:@HEAD", "a:@HEAD~1"], "--factor a is given twice: a revision is a factor of its own"),
        (["a:@HEAD", "a:x=1"], "--factor a is given twice"),
        (["a:x=1", "a:@HEAD"], "--factor a is given twice"),
        (["a:x=1", "a:x=2"], "--factor a has x twice"),
    ],
)
def test_a_factor_that_is_none(words, problem):
    with pytest.raises(ValueError, match=problem) as error:
        factors_in(words)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ({"factors": {"a": {MLP: "relu"}}}, "factors has one factor, which adds up with nothing: give two or more"),
        ({"factors": {"a": {MLP: "relu"}, "b": {MLP: "gelu"}}}, f"a and b set {MLP}: factors need options of their"),
        (
            {"factors": {"a": {MLP: {"class_path": "x"}}, "b": {f"{MLP}.width": 2}}},
            f"a and b set {MLP} and {MLP}.width, one within the other|a and b set {MLP}.width and {MLP}, one",
        ),
        ({"factors": {"a/b": {MLP: "relu"}, "b": {NORM: True}}}, "the factor 'a/b' must be the name of a folder"),
        ({"factors": {"a+b": {MLP: "relu"}, "b": {NORM: True}}}, r"the factor 'a\+b' must be .* without \+"),
        ({"factors": {"baseline": {MLP: "relu"}, "b": {NORM: True}}}, "the factor 'baseline' must be"),
        ({"factors": {"a": {}, "b": {NORM: True}}}, "the factor a changes nothing: give it an option"),
        ({"factors": {f"f{n}": {f"model.x{n}": 1} for n in range(13)}}, "has 13 factors, expected at most 12"),
        (
            {"factors": {"a": "idea", "b": {NORM: True}}},
            "factors.a is 'idea', expected options by dotted name, or @ and",
        ),
        ({"factors": {"a": "@x", "b": "@x"}, **COMMAND}, "a and b are @x: factors need revisions of their own"),
        ({"factors": {"a": "@x", "b": "@y"}, **COMMAND}, "factors has the revision @x: give f.yaml: against REV too"),
        ({"against": "main", **COMMAND}, "factors and f.yaml: against say what is compared in two ways"),
        ({"variants": {"x": {MLP: "gelu"}}}, "variants and f.yaml: factors say what is compared in two ways"),
        ({"looks": [8, 12]}, "factors with f.yaml: looks: combinations of factors have a fixed number of pairs"),
        ({"half_width": 0.01}, "factors with f.yaml: half_width"),
        ({"sizes": ["25k", "50k"]}, "factors with f.yaml: sizes"),
        ({"tune": {"option": "model.optimizer.init_args.lr"}}, "factors with f.yaml: tune"),
        ({"pairs": 1}, "pairs 1: one pair has no interval"),
        ({"factors": {"a": {"seed_everything": 1}, "b": {NORM: True}}}, "seed_everything is set by the experiment"),
    ],
)
def test_a_file_that_cannot_be_planned(keys, problem):
    with pytest.raises(ValueError, match=problem) as error:
        asked(**keys)
    assert "\n" not in str(error.value)
    assert "f.yaml" in str(error.value)


def test_on_the_command_line_mistakes_name_the_option():
    with pytest.raises(ValueError, match=re.escape("--vary and --factor say what is compared in two ways")):
        asked(COMMAND_LINE, variants={"x": {MLP: "gelu"}})


def test_a_mistake_is_one_line_and_makes_no_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = ["--command", "true {options} {seed}", "--read", "loss {number}", "--factor", "a:x=1", "--factor", "b:x=2"]
    assert main(["ablate", "run", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "--factor: a and b set x: factors need options of their own" in line
    assert not list(tmp_path.iterdir())
