"""What every action of ``lightning-llm ablate`` does with an experiment: read it, run it, write its report."""

import json
from pathlib import Path

import pytest
import yaml

from lightning_llm.__main__ import main
from lightning_llm.ablate.experiment import experiment_of
from lightning_llm.ablate.names import PLAN
from lightning_llm.ablate.planning import plan_of
from lightning_llm.cli.ablate_run import draft_of
from tests.cli.test_ablate import OWN_MLP, RELU


def test_parameters_of_each_variant_are_shown_before_the_first_run(folder, monkeypatch, capsys):
    monkeypatch.setattr("lightning_llm.cli.ablate_run.train", lambda plan, slots: None)
    monkeypatch.setattr("lightning_llm.cli.ablate_run._measure", lambda *of_plan: "")
    Path("exp.yaml").write_text(yaml.safe_dump({"baseline": "base.yaml", "variants": {"relu": RELU}, "out": "out"}))
    assert main(["ablate", "run", "exp.yaml"]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert any(line.startswith("exp: 1 variant, tested after 8, 12, and 16 pairs, ") for line in lines)
    place = next(place for place, line in enumerate(lines) if line.startswith("parameters: "))
    planned = json.loads(Path("out", PLAN).read_text())["variants"]
    ours, theirs = (planned[name]["facts"]["parameters"] for name in ("relu", "baseline"))
    assert lines[place] == f"parameters: baseline {theirs:,}, relu {ours:,}"
    few, makes = 100 * (1 - ours / theirs), "--match parameters=model.architecture.intermediate_size makes them equal"
    assert lines[place + 1] == f"relu has {few:.3g}% fewer parameters than the baseline; {makes}."


def test_what_a_file_imports_is_printed_and_the_plan_has_the_hash_of_its_prediction(folder, monkeypatch, capsys):
    Path("run_mlp.py").write_text(OWN_MLP)
    monkeypatch.syspath_prepend(str(folder))
    variants = {"own": {"model.architecture.mlp": "run_mlp.OwnMLP"}}
    experiment = experiment_of({"baseline": "base.yaml", "variants": variants, "out": "out"}, "e.yaml", "e")
    plan = plan_of(draft_of(experiment, source=Path("e.yaml")), None, prediction="0" * 64)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "lightning-llm ablate: e.yaml imports run_mlp.OwnMLP"
    assert lines[1] == "lightning-llm ablate: checking the baseline and own"
    assert plan.record.prediction == "0" * 64
    with pytest.raises(ValueError, match=r"none\.yaml"):
        draft_of(experiment_of({"baseline": "none.yaml", "variants": variants}, "e.yaml", "e"))
