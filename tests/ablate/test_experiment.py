"""What a user asks for: read strictly, with one line for each mistake."""

import re
from pathlib import Path

import pytest
import yaml
from msgspec.structs import replace

from lightning_llm.ablate.experiment import LOOKS, Experiment, ScreenAndConfirm, experiment_of
from lightning_llm.ablate.tuning import Grid
from lightning_llm.io.records import read_record, write_record

ROOT = Path(__file__).parents[2]
EXAMPLES = {path: yaml.safe_load(path.read_text("utf-8")) for path in (ROOT / "examples" / "ablations").glob("*.yaml")}
SHIPPED = sorted(path for path, content in EXAMPLES.items() if "sizes" not in content)  # the others are ladders
RATE = "model.optimizer.init_args.lr"
BASE = {"baseline": "a.yaml", "variants": {"relu": {"model.architecture.mlp": "relu"}}}


def test_a_file_with_only_the_required_keys_gets_the_defaults():
    found = experiment_of(BASE, "f.yaml", "f")
    assert (found.name, found.baseline, found.folder) == ("f", ("a.yaml",), "runs/f")
    assert (found.metric, found.alpha, found.delta, found.match) == ("val_loss", 0.05, 0.005, "tokens")
    assert (found.looks, found.first_seed, found.half_width) == (LOOKS, 0, None)


def test_the_file_on_the_page_is_one():
    page = ROOT / "docs" / "ablate.md"
    content = yaml.safe_load(re.search(r"```yaml\n(.+?)```", page.read_text(encoding="utf-8"), re.S)[1])
    found = experiment_of(content, page, "page")
    assert (found.name, found.folder, list(found.variants)) == (
        "attention",
        "runs/attention",
        ["no_qk_norm", "no_positions"],
    )


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_those_that_are_shipped_are_some(path):
    found = experiment_of(yaml.safe_load(path.read_text(encoding="utf-8")), path, path.stem)
    assert (found.name, found.folder) == (path.stem, f"runs/{path.stem}")
    assert all((ROOT / config).is_file() for config in found.baseline)


def test_nested_options_are_those_with_dots():
    nested = {"relu": {"model": {"architecture": {"mlp": "relu"}, "schedule": {"class_path": "x.Y", "init_args": {}}}}}
    found = experiment_of({**BASE, "variants": nested}, "f.yaml", "f").variants["relu"]
    assert found == {"model.architecture.mlp": "relu", "model.schedule": {"class_path": "x.Y", "init_args": {}}}


def test_pairs_cut_the_looks():
    assert experiment_of({**BASE, "pairs": LOOKS[0] + 1}, "f", "f").looks == (LOOKS[0], LOOKS[0] + 1)
    assert experiment_of({**BASE, "pairs": LOOKS[0]}, "f", "f").looks == LOOKS[:1]
    assert experiment_of({**BASE, "pairs": 40}, "f", "f").looks == (*LOOKS, 40)
    assert experiment_of({**BASE, "pairs": 4}, "f", "f").looks == (4,)  # a pilot
    assert experiment_of({**BASE, "looks": [4, 6, 8], "pairs": 7}, "f", "f").looks == (4, 6, 7)
    assert experiment_of({**BASE, "looks": [8, 12], "pairs": 4}, "f", "f").looks == (4,)
    assert experiment_of({**BASE, "looks": [3, 5], "pairs": 5}, "f", "f").looks == (3, 5)


def test_the_first_metric_decides():
    found = experiment_of({**BASE, "metrics": ["recall_loss", "val_loss", "other_loss"]}, "f", "f")
    assert (found.metric, found.secondary) == ("recall_loss", ("val_loss", "other_loss"))
    assert experiment_of(BASE, "f", "f").secondary == ()


def test_an_experiment_is_read_back_as_it_was_written(tmp_path):
    content = {**BASE, "tune": {"option": RATE}, "half_width": 0.1, "options": {"a": [1, None]}, "delta": None}
    written = experiment_of(content, "f", "f")
    stopped = replace(
        written, stop=ScreenAndConfirm(level=0.004, looks=(12, 20), first_confirming_seed=900), because="why"
    )
    for experiment in (written, stopped):
        write_record(tmp_path / "experiment.json", experiment)
        assert read_record(tmp_path / "experiment.json", Experiment) == experiment


def test_parameters_are_matched_by_an_option():
    option = "model.architecture.intermediate_size"
    for match in ({"parameters": {"option": option}}, f"parameters={option}"):
        found = experiment_of({**BASE, "match": match}, "f", "f")
        assert (found.match, found.solved) == ("parameters", option)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"name": "a\ntouch ran\n"}, r"name is 'a\ntouch ran\n', expected one line without control characters"),
        ({"name": "a\x1b[2J"}, "expected one line without control characters"),
        ({"baseline": 3}, "baseline is 3, expected a list"),
        ({"variants": {}}, "variants is {}, expected at least one by name"),
        ({"variants": {"a": "relu"}}, "variants.a is 'relu', expected options by dotted name"),
        ({"variants": {"a,b": {"x": 1}}}, "the variant 'a,b' must be the name of a folder without commas"),
        ({"variants": {"a\\b": {"x": 1}}}, "must be the name of a folder without commas or backslashes"),
        ({"variants": {"null": {"x": 1}}}, "and not baseline, baseline-again or null"),
        ({"variants": {"../a": {"x": 1}}}, "must be the name of a folder"),
        ({"variants": {"a": {"data.seed": 1}}}, "variants.a: data.seed is set by the experiment: leave it out"),
        ({"options": {"seed_everything": 1}}, "options: seed_everything is set by the experiment"),
        (
            {"metric": "train_loss"},
            "metric is 'train_loss', expected val_loss, bits_per_byte, recall_loss or other_loss",
        ),
        ({"metrics": []}, "metrics is [], expected different ones of val_loss, bits_per_byte, recall_loss, other_loss"),
        ({"metrics": ["val_loss", "val_loss"]}, "metrics is ['val_loss', 'val_loss'], expected different ones of"),
        ({"metrics": ["val_loss", [3]]}, "expected different ones of"),
        ({"metrics": "val_loss"}, "metrics is 'val_loss', expected different ones of"),
        ({"metric": "val_loss", "metrics": ["recall_loss"]}, "metrics has the metric that decides as its first"),
        ({"delta": 0}, "delta is 0, expected a number above 0"),
        ({"alpha": 0.5}, "alpha is 0.5, expected a number above 0 and below 0.5"),
        ({"looks": [6, 4]}, "looks is [6, 4], expected at most 20 increasing numbers of pairs"),
        ({"looks": [1]}, "one pair has no interval: give at least 2"),
        ({"looks": [1, 4]}, "one pair has no interval: the first look needs at least 2"),
        ({"pairs": 1}, "one pair has no interval"),
        ({"half_width": 0}, "half_width is 0, expected a number above 0"),
        ({"seeds": {"first": -1}}, "seeds.first is -1, expected"),
        ({"match": "memory"}, "match is 'memory', expected one of tokens, flops, time, parameters=model.architecture."),
        ({"match": "tokens=model.architecture.mlp"}, "match is 'tokens=model.architecture.mlp', expected one of"),
        ({"match": "parameters"}, "match is 'parameters', expected one of tokens"),
        ({"tune": {"option": "model.architecture.dropout"}}, "tune.option is 'model.architecture.dropout', expected a"),
        ({"tune": {"option": RATE, "factors": [1, 2]}}, "tune.factors is [1, 2], expected at least three increasing"),
        ({"tune": {"option": RATE, "factors": [1, 1.001, 2]}}, "each at least 1% above the one before"),
        ({"tune": {"option": RATE, "seed": 2}}, "tune.seed is unknown"),
        (
            {"tune": {"option": RATE}, "looks": [4, 101]},
            "seeds 100 to 101 belong to tuning, and 101 pairs use 0 to 100: give fewer pairs or another seeds.first",
        ),
        ({"tune": {"option": RATE}, "seeds": {"first": 101}}, "seeds 100 to 101 belong to tuning"),
        ({"seeds": 3}, "seeds is 3, expected an object"),
        ({"predict": "100k"}, "predict is a key of a ladder: give sizes too, or leave it out"),
    ],
)
def test_a_mistake_is_one_line(change, says):
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the text is compared
        experiment_of({**BASE, **change}, "f.yaml", "f")
    assert str(error.value).startswith("f.yaml: ")
    assert says in str(error.value)
    assert "\n" not in str(error.value)


def test_the_name_of_a_file_is_the_name_of_an_experiment_under_the_same_rule():
    with pytest.raises(ValueError, match=r"name is .*, expected one line without control characters"):
        experiment_of(BASE, "f.yaml", "a\ntouch ran\n")


def test_the_grid_of_a_tuned_option_has_a_default():
    found = experiment_of({**BASE, "tune": {"option": RATE}}, "f", "f")
    assert found.tune == Grid(option=RATE, factors=(0.5, 0.71, 1.0, 1.41, 2.0), seeds=2)


def test_the_runs_of_tuned_variants_are_counted_twice_and_with_the_grid():
    content = {**BASE, "variants": {"a": {"x": 1}, "b": {"x": 2}}, "looks": [4, 8]}
    assert experiment_of(content, "f", "f").most_runs() == 1 + 4 + 3 * 8
    tuned = experiment_of({**content, "tune": {"option": RATE, "factors": [0.5, 1, 2], "seeds": 3}}, "f", "f")
    assert tuned.runs_of_tuning() == 3 * 4 * 3
    assert tuned.most_runs() == 1 + 4 + 3 * 8 * 2 + 3 * 4 * 3
    assert tuned.most_runs(12) == tuned.most_runs() + 3 * 12 * 3


@pytest.mark.parametrize(
    ("variants", "seeds", "runs"),
    [
        (60, 2, 1 + 8 + 61 * 2000 + 61 * (5 + 12 + 1) * 2),  # most of them compare the tuned variants
        (20, 200, 1 + 8 + 21 * 2000 + 21 * (5 + 12 + 1) * 200),  # most of them are of a grid that grows
    ],
)
def test_more_runs_than_anyone_trains_are_refused_with_those_of_tuning(variants, seeds, runs):
    content = {**BASE, "variants": {f"v{n}": {"x": n} for n in range(variants)}, "pairs": 1000}
    content |= {"seeds": {"first": 1000}, "tune": {"option": RATE, "seeds": seeds}}
    with pytest.raises(ValueError, match=f"ask for {runs} runs, expected at most 100000"):
        experiment_of(content, "f", "f")
