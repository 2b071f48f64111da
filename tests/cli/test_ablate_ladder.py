"""``lightning-llm ablate`` with ``sizes`` in its file: planned before anything runs, and a whole one (slow)."""

import io
import json
import os
import shutil
import subprocess
import sys
import types
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import yaml

from lightning_llm.__main__ import main
from lightning_llm.ablate import Report
from lightning_llm.ablate.ladder import LADDER, PREDICTIONS, folder_of_size, prediction_of, read_ladder
from lightning_llm.ablate.names import PLAN
from lightning_llm.ablate.plan import Plan
from lightning_llm.accounting.sizing import SHAPE
from lightning_llm.cli import ablate_ladder
from lightning_llm.io.config_file import read_config
from tests.ablate.test_experiment import EXAMPLES, ROOT
from tests.cli.test_ablate import OWN_MLP, the_line

RELU = {"model.architecture.mlp": "relu2"}
FILE = {
    "name": "lad",
    "baseline": "base.yaml",
    "variants": {"relu2": RELU},
    "sizes": ["25k", "50k"],
    "tokens_per_parameter": 0.02,
    "predict": "100k",
    "pairs": 2,
}


@pytest.fixture(autouse=True)
def _file(folder):
    """``lad.yaml`` in the folder."""
    write()


def write(**changes):
    Path("lad.yaml").write_text(yaml.safe_dump({**FILE, **changes}))


@pytest.fixture
def planned(monkeypatch):
    """``planned(words)``: plan a ladder without running anything; the exit status."""
    return _planning(monkeypatch)


def _planning(patch):
    patch.setattr("lightning_llm.cli.ablate_run.run_experiment", lambda *arguments: None)
    return lambda *words: main(["ablate", "run", "lad.yaml", *words])


@pytest.fixture(scope="module")
def _planned_once(shared_folder):
    said = io.StringIO()
    with shared_folder() as (folder, patch), redirect_stdout(said):
        write()
        assert _planning(patch)() == 0
    return folder, said.getvalue()


@pytest.fixture
def frozen(_planned_once, folder, planned):
    """The folder with the ladder of ``lad.yaml``, planned in ``runs/lad``; what its command has printed."""
    planned_folder, said = _planned_once
    shutil.copytree(planned_folder, folder, dirs_exist_ok=True)
    return said


def test_all_sizes_are_planned_before_anything_runs(frozen, planned, capsys):
    ladder, computes = read_ladder(Path("runs/lad"))
    plans = {size: Plan.read(folder_of_size(ladder, size)) for size in ladder.sizes}
    assert not folder_of_size(ladder, "100k").exists()
    assert computes.keys() == {"25k", "50k", "100k"}
    assert list(computes.values()) == sorted(computes.values())
    parameters = {
        size: {name: variant.facts["parameters"] for name, variant in plan.variants.items()}
        for size, plan in plans.items()
    }
    for size, counts in parameters.items():
        assert counts["relu2"] == pytest.approx(counts["baseline"], rel=0.03), size
    assert parameters["25k"]["baseline"] < parameters["50k"]["baseline"]
    assert [list(plan.experiment.looks) for plan in plans.values()] == [[2]] * 2
    assert "Written: runs/lad/report.html" in frozen
    hashes = [plan.hash for plan in plans.values()]
    assert planned() == 0  # continues with the same plans
    assert main(["ablate", "run", "runs/lad"]) == 0
    assert [Plan.read(folder_of_size(ladder, size)).hash for size in ladder.sizes] == hashes
    assert main(["ablate", "report", "runs/lad"]) == main(["ablate", "status", "runs/lad"]) == 0
    capsys.readouterr()
    write(pairs=3)
    assert planned() == 2
    assert "runs/lad has another ladder: give another --out, or finish that one" in the_line(capsys)


@pytest.mark.slow
def test_a_variant_with_parameters_that_size_does_not_count_keeps_its_shape_when_matched(folder, planned):
    variants = {"learned": {"model.architecture.position": "learned"}}
    match = {"parameters": {"option": "model.architecture.intermediate_size"}}
    write(
        variants=variants,
        options={"model.architecture.max_position_embeddings": 256},
        sizes=["25k", "50k"],
        predict=None,
        match=match,
    )
    assert planned() == 0
    for size in ("25k", "50k"):
        plan = Plan.read(Path("runs/lad/sizes", size))
        models = {name: read_config(plan.config(name))["model"]["architecture"] for name in ("baseline", "learned")}
        for option in SHAPE:
            assert models["learned"][option] == models["baseline"][option], (size, option)
        assert models["learned"]["intermediate_size"] < models["baseline"]["intermediate_size"]
        learned, base = (plan.variants[name].facts["parameters"] for name in ("learned", "baseline"))
        assert learned == pytest.approx(base, rel=0.005)


@pytest.mark.slow
def test_the_smallest_size_of_a_shipped_ladder_can_be_planned(folder, planned):
    name = "ladder"  # all are read in tests/ablate
    content = EXAMPLES[ROOT / "examples" / "ablations" / f"{name}.yaml"]
    own_text = {**content["options"], "data.corpus": None, "data.path": "text.txt"}
    smallest = {**content, "options": own_text, "sizes": content["sizes"][:1], "predict": None, "repeat": True}
    Path("lad.yaml").write_text(yaml.safe_dump(smallest))
    Path("configs").symlink_to(ROOT / "configs")
    assert planned() == 0
    [size] = smallest["sizes"]
    planned_variants = Plan.read(Path("runs", name, "sizes", size)).variants
    assert planned_variants.keys() >= {"baseline", *content["variants"]}


@pytest.mark.slow
def test_with_tune_the_larger_sizes_wait_for_the_smallest(frozen, planned, monkeypatch, capsys):
    def rates(size):
        plan = Plan.read(Path("runs/lad/sizes", size))
        configs = {name: yaml.safe_load(plan.config(name).read_text()) for name in ("baseline", "relu2", "null")}
        return {name: config["model"]["optimizer"]["init_args"]["lr"] for name, config in configs.items()}

    own = rates("50k")["baseline"]
    shutil.rmtree("runs/lad")
    write(tune={"option": "model.optimizer.init_args.lr", "factors": [0.5, 1, 2], "seeds": 1})
    assert planned() == 0
    assert [path.name for path in Path("runs/lad/sizes").iterdir()] == ["25k"]
    assert "run this again when runs/lad/sizes/25k has ended" in capsys.readouterr().err
    ended = types.SimpleNamespace(state=types.SimpleNamespace(needed=[]))
    monkeypatch.setattr(ablate_ladder, "load_experiment", lambda out: ended)
    monkeypatch.setattr(ablate_ladder, "tuned_factors", lambda ladder: {"baseline": 2.0, "relu2": 0.5})
    assert planned() == 0
    assert rates("50k") == {"baseline": 2 * own, "relu2": own / 2, "null": 2 * own}
    assert Plan.read(Path("runs/lad/sizes/50k")).experiment.tune is None


@pytest.mark.slow
def test_a_dry_run_leaves_nothing(folder, capsys):
    assert main(["ablate", "run", "lad.yaml", "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert all(size in said for size in FILE["sizes"])
    assert "of training steps at most" in said
    assert not Path("runs").exists()
    words = ["--baseline", "base.yaml", "--vary", "model.architecture.mlp=relu", "--pairs", "4"]
    tune = {"option": "model.optimizer.init_args.lr", "factors": [0.5, 1, 2], "seeds": 2}
    asked = {
        "baseline": "base.yaml",
        "variants": {"relu": {"model.architecture.mlp": "relu"}},
        "pairs": 4,
        "tune": tune,
    }
    Path("tuned.yaml").write_text(yaml.safe_dump(asked))
    assert main(["ablate", "run", *words, "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert " 13 " in said
    assert "grows" not in said
    looks = {"baseline": asked["baseline"], "variants": asked["variants"], "looks": [4, 6]}
    Path("looks.yaml").write_text(yaml.safe_dump(looks))
    assert main(["ablate", "run", "looks.yaml", "--dry-run"]) == 0
    assert f" {1 + 4 + 2 * 6} " in capsys.readouterr().out  # the null variant ends with the first look
    assert main(["ablate", "run", "tuned.yaml", "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert f" {13 + 2 * (4 * 2 + 4)} " in said  # of each variant, three values and the vertex, and the pairs
    assert "more if the grid of tuning grows" in " ".join(said.split())
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("changes", "words", "says"),
    [
        (
            {"variants": {"a": {"model.optimizer.init_args.lr": 0.1}}, "sizes": ["25k"], "predict": None},
            [],
            "a changes model.optimizer.init_args.lr, which",
        ),
        ({"predict": "1M"}, [], "times the FLOPs of 50k, expected at most 5 times: add a size between"),
        ({"tokens_per_parameter": 1000}, [], "; --repeat accepts it (docs/resume.md)"),
        ({"sizes": ["1", "35k", "50k"]}, [], "size 1 "),
        ({"variants": {"a": {"model.architecture.mlp": "rleu"}}}, [], "rleu"),
        ({}, ["--trainer.max_steps", "9"], "--trainer.max_steps: a ladder takes options of fit in its file"),
    ],
)
def test_a_mistake_is_one_line_and_leaves_no_folder(folder, planned, capsys, changes, words, says):
    write(**changes)
    assert planned(*words) == 2
    line = the_line(capsys)
    assert says in line
    assert line.count("(docs/") == 1
    assert not Path("runs/lad").exists()


@pytest.mark.slow
def test_a_size_is_not_added_to_what_is_no_ladder(frozen, capsys):
    for words, says in (
        (["runs/lad", "--size", "30k"], "--size 30k must be above the sizes of the ladder, 25k, 50k"),
        (["runs/lad", "--size", "100k"], "has not ended: lightning-llm ablate run runs/lad continues it"),
        (["runs/lad/sizes/25k", "--size", "100k"], "holds no ladder.json"),
    ):
        assert main(["ablate", "extend", *words]) == 2
        assert says in the_line(capsys)
    assert not Path("runs/lad", PREDICTIONS).exists()


@pytest.mark.slow
def test_a_folder_prints_the_classes_that_it_imports(folder, planned, monkeypatch, capsys):
    Path("ladder_mlp.py").write_text(OWN_MLP)
    monkeypatch.syspath_prepend(str(folder))
    write(variants={"own": {"model.architecture.mlp": "ladder_mlp.OwnMLP"}})
    assert planned() == 0
    assert "lad.yaml imports ladder_mlp.OwnMLP" in capsys.readouterr().err
    assert main(["ablate", "extend", "runs/lad", "--size", "100k"]) == 2
    said = capsys.readouterr().err
    assert "runs/lad/ladder.json imports ladder_mlp.OwnMLP" in said
    assert "has not ended" in said
    shutil.rmtree("runs/lad/sizes/50k")
    assert main(["ablate", "run", "runs/lad"]) == 0
    assert "runs/lad/ladder.json imports ladder_mlp.OwnMLP" in capsys.readouterr().err
    assert Path("runs/lad/sizes/50k", PLAN).exists()


@pytest.mark.slow
def test_a_folder_without_a_planned_size_has_no_report(frozen, capsys):
    assert main(["ablate", "run", "runs/lad", "--dry-run"]) == 2
    assert "--dry-run is for what has no plan yet, and runs/lad has one" in the_line(capsys)
    shutil.rmtree("runs/lad/sizes")
    assert main(["ablate", "report", "runs/lad"]) == 2
    assert "no size of runs/lad is planned yet: lightning-llm ablate run runs/lad continues it" in the_line(capsys)


@pytest.mark.slow
def test_a_ladder_from_its_file_to_its_prediction(folder):
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))}

    def ablate(*words):
        command = [sys.executable, "-m", "lightning_llm", "ablate", *words]
        place = {**environment, "PYTHONPATH": os.pathsep.join(sys.path)}
        done = subprocess.run(command, cwd=folder, env=place, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    said = ablate("run", "lad.yaml")
    assert "relu2 at 100k" in said
    rows = list(Report.read("runs/lad").of_kind("result"))
    assert [(row.variant, row.pairs) for row in rows] == [("relu2", 2)] * 2
    said = ablate("extend", "runs/lad", "--size", "100k")
    prediction = prediction_of(read_ladder(folder / "runs/lad")[0], "100k")
    assert json.loads(Path("runs/lad/sizes/100k", PLAN).read_text())["prediction"] == prediction.hash
    low, high = prediction.variants["relu2"].prediction_interval
    (kept,) = Report.read("runs/lad").sizes.predictions
    outcome = kept.variants["relu2"]
    assert outcome.is_hit == (low <= outcome.observed <= high)
    assert f"relu2 at 100k: {'hit' if outcome.is_hit else 'miss'}: predicted" in said
    shutil.move("runs/lad", "moved")
    assert "relu2 at 100k" in ablate("report", "moved")
    assert Path("moved", LADDER).exists()
