"""``lightning-llm ablate``: mistakes in one line before anything runs, and whole experiments (slow)."""

import dataclasses
import datetime
import io
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import redirect_stderr, suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
import yaml

from benchmarks.ablate_experiments import COMMAND, RUN, SERVER, processes
from lightning_llm.__main__ import main
from lightning_llm.ablate import Report, matching, planning
from lightning_llm.ablate.fit import cost
from lightning_llm.ablate.fit import matching as fit_matching
from lightning_llm.ablate.names import NULL, PLAN
from lightning_llm.ablate.next_runs import Extension, RunKey
from lightning_llm.ablate.plan import CONFIGS, PlannedVariant, Replay, Reused
from lightning_llm.ablate.report import from_experiment
from lightning_llm.ablate.report.record import VERSION, Row
from lightning_llm.ablate.results import load_experiment
from lightning_llm.measure.timer import Timing
from lightning_llm.statistics.design import NOT_SHOWN, UNDECIDED, Design
from lightning_llm.statistics.power import power_analysis
from lightning_llm.statistics.verdict import Noise
from tests.ablate.conftest import frozen, work
from tests.ablate.test_experiment import ROOT, SHIPPED
from tests.cli.conftest import CONFIG

MLP, INITIAL = "model.architecture.mlp", "model.architecture.initializer_range"
RELU = {MLP: "relu"}
OWN_MLP = """
from torch import nn


class OwnMLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x):
        return self.down_proj(self.up_proj(x).relu())
"""
LEVEL, WARM_UP = "model.architecture.checkpoint_level", "lightning_llm.optim.WarmupLinear"


@pytest.fixture
def experiment(tmp_path):
    return partial(frozen, tmp_path)


def planned(monkeypatch, **experiment):
    """Freeze the plan of an experiment without running anything; the exit status."""
    monkeypatch.setattr("lightning_llm.cli.ablate_run.run_experiment", lambda *arguments: None)
    Path("exp.yaml").write_text(yaml.safe_dump({"baseline": "base.yaml", "out": "out", **experiment}, sort_keys=False))
    return lambda *words: main(["ablate", "run", "exp.yaml", *words])


@pytest.fixture(scope="module")
def _planned_once(shared_folder):
    said = io.StringIO()
    with shared_folder() as (folder, patch), redirect_stderr(said):
        assert planned(patch, variants={"a": RELU}, looks=[8], out="runs/first")() == 0
    return folder, said.getvalue()


@pytest.fixture
def first(_planned_once, folder):
    """The folder with a plan in ``runs/first``: of 8 pairs, with the variant a; what its command has said."""
    planned_folder, said = _planned_once
    shutil.copytree(planned_folder, folder, dirs_exist_ok=True)
    return said


def the_line(capsys):
    lines = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    assert len(lines) == 1, lines
    assert lines[0].startswith("lightning-llm ablate")
    return lines[0]


@pytest.mark.parametrize(
    ("experiment", "says"),
    [
        ({"variants": {"a": {"model.architecture.mpl": "relu"}}}, "a: "),  # an option that the baseline lacks
        ({"variants": {"a": {LEVEL: 0}}}, f"a equals the baseline, which has the same {LEVEL}: leave it out"),
        ({"variants": {"a": RELU, "b": RELU}}, "b equals a"),
        ({"variants": {"a": {"data.tokenizer": "byte"}}}, "data.tokenizer: another tokenizer has other windows"),
        ({"variants": {"a": {"data.context_length": 12}}}, "a changes data.context_length to 12, and the baseline has"),
        (
            {"variants": {"a": {"data.tokenizer": "byte"}}, "options": {"trainer.limit_val_batches": 1.0}},
            "data.tokenizer: losses per token cannot be compared",
        ),
        ({"variants": {"a": {"trainer.limit_val_batches": 1}}}, "a changes trainer.limit_val_batches"),
        (
            {"variants": {"a": {"trainer.max_steps": 9}}},
            "a has trainer.max_steps 9, which is 1.50 times the tokens of the baseline: give 6, or leave it out",
        ),
        ({"variants": {"a": {INITIAL: 0.01}}}, f"a changes {INITIAL}: a pair starts from the same values"),
        ({"variants": {"a": RELU}, "options": {"trainer.limit_val_batches": 0}}, "there is no loss to compare"),
        ({"variants": {"a": RELU}, "options": {"trainer.fast_dev_run": True}}, "trainer.fast_dev_run"),
        ({"variants": {"a": RELU}, "baseline": "none.yaml"}, "config 'none.yaml' is no file"),
        ({"variants": {"a": {"trainer.max_steps": datetime.date(2020, 1, 1)}}}, "trainer.max_steps is "),
        (
            {
                "variants": {"a": RELU},
                "options": {"model.schedule": {"class_path": WARM_UP, "init_args": {"warmup_steps": 3}}},
                "tune": {"option": "model.schedule.init_args.warmup_steps", "factors": [0.5, 1, 2]},
            },
            "tune.factors: 0.5 times 3 is no value: baseline: ",
        ),
        ({"variants": {"a": RELU}, "pairs": 1}, "pairs 1: one pair has no interval: give at least 2"),
        ({"variants": {"a": RELU}, "detla": 1}, "detla is unknown: choose one of baseline, variants, "),
    ],
)  # fmt: skip
def test_what_cannot_be_compared_is_one_line_before_anything_runs(folder, monkeypatch, capsys, experiment, says):
    assert planned(monkeypatch, **experiment)() == 2
    assert says in the_line(capsys)
    assert not Path("out").exists()


def test_a_baseline_does_not_resume(folder, monkeypatch, capsys):
    assert main(["fit", "--config=base.yaml", "--trainer.run_dir=run", "--trainer.log_every_n_steps=1"]) == 0
    checkpoint = max(Path("run", "checkpoints").glob("*.ckpt"))
    Path("base.yaml").write_text(yaml.safe_dump({**CONFIG, "ckpt_path": str(checkpoint)}))
    capsys.readouterr()
    assert planned(monkeypatch, variants={"a": RELU})() == 2
    assert "baseline: ckpt_path is set by the experiment: leave it out, or use model.init_from" in the_line(capsys)


def test_runs_of_a_plan_that_was_deleted_do_not_count(folder, monkeypatch, capsys):
    run = planned(monkeypatch, variants={"a": RELU}, looks=[2])
    Path("out", "runs", "baseline,seed=0").mkdir(parents=True)
    assert run() == 2
    assert "out has runs of an experiment without plan.json: give another --out" in the_line(capsys)


def test_runs_are_for_the_device_of_the_plan_and_tokenizers_are_compared_by_bytes(folder, monkeypatch):
    variants = {"bytes": {"data.tokenizer": "byte"}}
    options = {"trainer.accelerator": "auto", "trainer.limit_val_batches": 1.0}
    assert planned(monkeypatch, variants=variants, metric="bits_per_byte", looks=[2], options=options)() == 0
    plan = json.loads(Path("out", PLAN).read_text())
    assert plan["experiment"]["metric"] == "bits_per_byte"
    trainer = yaml.safe_load(Path("out", CONFIGS, "bytes.yaml").read_text())["trainer"]
    assert (trainer["accelerator"], trainer["devices"]) == (plan["accelerator"], 1)


SCHEDULE = {"class_path": WARM_UP, "init_args": {"warmup_steps": 2, "decay_steps": 4}}
LENGTHS = {
    "context": {"data.context_length": 8},
    "batch": {"data.global_batch_size": 4},
    "steps": {"data.global_batch_size": 16, "trainer.max_steps": 3},
}


def test_context_batch_and_steps_may_vary_where_tokens_and_validation_windows_are_equal(folder, monkeypatch):
    assert planned(monkeypatch, variants=LENGTHS, looks=[2], options={"model.schedule": SCHEDULE})() == 0
    plan = json.loads(Path("out", PLAN).read_text())["variants"]
    assert {name: plan[name]["steps"] for name in LENGTHS} == {"context": 12, "batch": 12, "steps": 3}
    assert {plan[name]["ratio"] for name in LENGTHS} == {1.0}
    assert "it trains 12 steps in place of 6" in plan["context"]["unshared"]
    configs = {
        name: yaml.safe_load(Path("out", CONFIGS, f"{name}.yaml").read_text()) for name in ("baseline", *LENGTHS)
    }
    assert {
        config["data"].get("eval_context_length") or config["data"]["context_length"] for config in configs.values()
    } == {8}
    assert {name: config["trainer"]["limit_val_batches"] for name, config in configs.items()} == {
        "baseline": 2, "context": 2, "batch": 4, "steps": 1,
    }  # fmt: skip
    warmups = {name: config["model"]["schedule"]["init_args"]["warmup_steps"] for name, config in configs.items()}
    assert warmups == {"baseline": 2, "context": 4, "batch": 4, "steps": 1}
    own = {"own": {**LENGTHS["steps"], "model.schedule.init_args.warmup_steps": 2}}
    options = {"model.schedule": SCHEDULE}
    assert planned(monkeypatch, variants=own, looks=[2], out="own", options=options)() == 0
    arguments = yaml.safe_load(Path("own", CONFIGS, "own.yaml").read_text())["model"]["schedule"]["init_args"]
    assert (arguments["warmup_steps"], arguments["decay_steps"]) == (2, 2)  # its own stays, in its own steps


@pytest.mark.slow
def test_pairs_of_other_lengths_validate_the_same_windows(folder):
    experiment = {"baseline": "base.yaml", "variants": LENGTHS, "looks": [2], "out": "out"}
    (folder / "exp.yaml").write_text(yaml.safe_dump(experiment))
    assert start(folder, "run", "exp.yaml", "--workers", "2").wait() == 0, (folder / "out.txt").read_text()
    results = load_experiment(folder / "out").results
    summaries = {key.name: result.summary for key, result in results.items() if key.seed == 1}
    assert {summary["tokens"] for summary in summaries.values()} == {6 * 8 * 16}
    assert len({summary["validation_batches"] for summary in summaries.values()}) == 1
    batches = {name: summary["batches"] for name, summary in summaries.items()}
    assert batches["baseline"] == batches["batch"] == batches["steps"] != batches["context"]  # the order of windows
    said = (folder / "out.txt").read_text()
    assert "context: its pairs share the validation windows, of 8 tokens, and no training batches" in said
    assert "in batches of 4 windows in place of 8; it trains 12 steps in place of 6, at the learning rate" in said
    assert "steps: baseline 6, batch 12, context 12, steps 3" in said


def test_a_plan_is_frozen_once(folder, monkeypatch, capsys):
    run = planned(monkeypatch, variants={"relu": RELU}, looks=[2], match="flops")
    assert run("--trainer.gradient_clip_val", "0.5", "--workers", "1") == 0
    plan = json.loads(Path("out", PLAN).read_text())
    assert plan["variants"]["relu"]["steps"] > 6 == plan["variants"]["baseline"]["steps"]
    assert plan["variants"]["relu"]["ratio"] == pytest.approx(1, abs=0.1)
    config = yaml.safe_load(Path("out", CONFIGS, "relu.yaml").read_text())
    assert (config["model"]["architecture"]["mlp"], config["trainer"]["gradient_clip_val"]) == ("relu", 0.5)
    assert config["trainer"]["max_steps"] == plan["variants"]["relu"]["steps"]
    null = yaml.safe_load(Path("out", CONFIGS, "null.yaml").read_text())
    assert null["trainer"]["callbacks"] == [{"class_path": "lightning_llm.ablate.fit.null_variant.RedrawMLP"}]
    capsys.readouterr()
    assert run("--trainer.gradient_clip_val", "0.5") == 0  # again, as after a kill
    assert json.loads(Path("out", PLAN).read_text()) == plan
    capsys.readouterr()
    run_folder = Path("out", "runs", "baseline,seed=0")
    run_folder.mkdir(parents=True)
    (run_folder / "summary.json").write_text('{"val_loss": 3.0}')
    assert run() == 2
    assert (
        "out has a plan with another trainer.gradient_clip_val of the baseline (0.5, now None), which makes a new "
        "experiment: give another --name or --out" in the_line(capsys)
    )
    shutil.rmtree(Path("out", "runs"))
    assert run() == 0  # nothing has come of it: the new plan is in place of it
    assert json.loads(Path("out", PLAN).read_text()) != plan


def test_a_plan_matched_by_time_has_the_interval_and_scales_the_schedule(folder, monkeypatch):
    timings = [Timing((1.0,) * 6), Timing((0.4, 0.5, 0.5, 0.5, 0.5, 0.6))]  # the variant takes half the time
    monkeypatch.setattr(cost, "time_pair", lambda baseline, variant: (None, None, timings))
    options = {"model.schedule": SCHEDULE}
    assert planned(monkeypatch, variants={"relu": RELU}, looks=[2], match="time", options=options)() == 0
    variants = json.loads(Path("out", PLAN).read_text())["variants"]
    relu, base = variants["relu"], variants["baseline"]
    assert (relu["facts"]["time_ratio"], relu["facts"]["time_ratio_interval"]) == (0.5, [0.4, 0.6])
    assert (base["facts"]["time_ratio"], base["facts"]["time_ratio_interval"], base["matched"]) == (None, None, {})
    scaled = {"decay_steps": 8, "warmup_steps": 4}
    assert relu["steps"] == 12
    assert relu["matched"] == {f"model.schedule.init_args.{name}": steps for name, steps in scaled.items()} | {
        "trainer.max_steps": 12
    }
    config = yaml.safe_load(Path("out", CONFIGS, "relu.yaml").read_text())
    assert config["model"]["schedule"]["init_args"] == {**scaled, "min_lr_ratio": 0.0}
    assert config["trainer"]["val_check_interval"] == 3  # as it was
    monkeypatch.setattr(cost, "time_pair", None)  # nothing is timed again
    run = planned(monkeypatch, variants={"relu": RELU}, looks=[2], match="time", options=options)
    assert run() == 0


def test_what_was_matched_is_no_change_of_a_variant(tmp_path):
    def options(steps, clip):
        schedule = {"class_path": WARM_UP, "init_args": {"decay_steps": steps}}
        return {"model": {"schedule": schedule}, "trainer": {"max_steps": steps, "gradient_clip_val": clip}}

    (tmp_path / "a.yaml").write_text(yaml.safe_dump(options(8, 0.5)))
    variants = {"a": PlannedVariant(matched={"trainer.max_steps": 8, "model.schedule.init_args.decay_steps": 8})}
    plan = SimpleNamespace(variants=variants, config=lambda name: tmp_path / f"{name}.yaml")
    draft = SimpleNamespace(options={"a": options(4, 1.0)})
    assert planning._changed_option(plan, draft) == "another trainer.gradient_clip_val of a (0.5, now 1.0)"
    variants["a"] = PlannedVariant()
    assert planning._changed_option(plan, draft).startswith("another model.schedule of a")


def test_steps_of_a_variants_own_schedule_are_scaled_last(folder, monkeypatch):
    timings = [Timing((1.0,) * 6), Timing((0.5,) * 6)]
    monkeypatch.setattr(cost, "time_pair", lambda baseline, variant: (None, None, timings))
    own = {"class_path": WARM_UP, "init_args": {"warmup_steps": 1, "decay_steps": 4}}
    variants = {"late": {"model.schedule.init_args.warmup_steps": 3, "model.schedule": own}}
    options = {"model.schedule": SCHEDULE}
    assert planned(monkeypatch, variants=variants, looks=[2], match="time", options=options)() == 0
    config = yaml.safe_load(Path("out", CONFIGS, "late.yaml").read_text())
    assert config["model"]["schedule"]["init_args"] == {"warmup_steps": 2, "decay_steps": 8, "min_lr_ratio": 0.0}


@pytest.mark.parametrize("match", ["flops", "time"])
def test_a_schedule_that_cannot_follow_is_one_line(folder, monkeypatch, capsys, match):
    torchs = {"class_path": "torch.optim.lr_scheduler.StepLR", "init_args": {"step_size": 3}}
    experiment = {"variants": {"relu": RELU}, "match": match, "options": {"model.schedule": torchs}}
    assert planned(monkeypatch, **experiment)() == 2
    assert (
        f"match: {match} changes trainer.max_steps of relu, but model.schedule torch.optim.lr_scheduler.StepLR would "
        "not follow: give shares of the total_steps that Schedule.factor gets, or use match: tokens" in the_line(capsys)
    )
    assert not Path("out").exists()


def test_the_command_line_names_its_variants(folder, monkeypatch):
    monkeypatch.setattr("lightning_llm.cli.ablate_run.run_experiment", lambda *arguments: None)
    words = ["--baseline", "base.yaml", "--vary", f"{MLP}=relu", "--vary", f"{MLP}=gelu", "--name", "which-mlp"]
    solved = "model.architecture.intermediate_size"
    assert main(["ablate", "run", *words, f"--match=parameters={solved}", "--first-seed=1000"]) == 0
    plan = json.loads(Path("runs/which-mlp", PLAN).read_text())
    experiment = plan["experiment"]
    assert experiment["variants"] == {"relu": RELU, "gelu": {MLP: "gelu"}}
    assert (experiment["match"], experiment["solved"], experiment["first_seed"]) == ("parameters", solved, 1000)
    assert plan["variants"]["gelu"]["ratio"] == pytest.approx(1, abs=0.005)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["run"], "give an experiment's FILE, or --baseline CONFIG and at least one --vary"),
        (["run", "exp.yaml", "--vary", "a=1"], "--vary is in place of a file: leave it out, or exp.yaml"),
        (
            ["run", "b=2", "--vary", "a=1"],
            "'b=2' is no experiment file; give each change its own option: --vary b=2 is a second",
        ),
        (["run", "--baseline", "a.yaml", "--with", "a=1"], "give it after the --vary whose variant it belongs to"),
        (["run", "--baseline", "a.yaml", "--vary", "a.b=1", "--metric", "luck"], "metric is 'luck', expected val_loss"),
        (
            ["run", "--baseline", "a.yaml", "--vary", "a.b=1", "--tune", "data.seed"],
            "tune.option is 'data.seed', expected a number of the model",
        ),
        (
            ["run", "--baseline", "a.yaml", "--vary", "a.b=1", "--match", "size"],
            "match is 'size', expected one of tokens, flops, time, parameters=model.architecture.NAME",
        ),
        (["run", "--baseline", "a.yaml", "--vary", "a.b=1", "--first-seed", "-1"], "seeds.first is -1, expected"),
        (["run", ".", "--match", "tokens"], ". holds no plan.json: give the folder of an experiment"),
        (["run", "exp.yaml", "--workers", "0"], "--workers must be at least 1, got 0"),
        (["run", "exp.yaml", "--data.seed", "3"], "--data.seed is set by the experiment: leave it out"),
        (["status", "out", "--trainer.max_steps=3"], "--trainer.max_steps=3 is an option of fit: only ablate run"),
        (["status", "nowhere"], "nowhere holds no plan.json"),
        (["extend", "out", "--pairs", "many"], "invalid int value: 'many'"),
        (["power", "--baseline", "a.yaml", "--vary", "a.b=1"], "one of the arguments --spread --from is required"),
        (
            ["power", "--baseline", "a.yaml", "--vary", "a.b=1", "--spread", "0"],
            "--spread must be from 1e-09 to 1e+06, got 0.0",
        ),
        (
            ["power", "--baseline", "a.yaml", "--vary", "a.b=1", "--from", "x"],
            "x has no report.json with the spread of pairs in val_loss: give --spread instead",
        ),
    ],
)
def test_a_wrong_command_line_is_one_line(tmp_path, monkeypatch, capsys, words, says):
    monkeypatch.chdir(tmp_path)
    assert main(["ablate", *words]) == 2
    assert says in the_line(capsys)


def null_of(sd, sd_interval=None):
    """The report of an experiment whose null variant has had a look."""
    noise = None if sd_interval is None else Noise(sd_interval, 0.01, None, None, None)
    about = {"variant": NULL, "kind": "null", "metric": "val_loss", "unit": "nats/token", "sd": sd, "noise": noise}
    counts = {"pairs": 8, "level": 0.95, "diverged": 0, "baseline_diverged": 0, "note": "", "warnings": []}
    words = {"verdict": UNDECIDED, "direction": NOT_SHOWN, "sentence": "neither better nor worse is shown"}
    fields = {"metric": "val_loss", "unit": "nats/token", "alpha": 0.05, "level": 0.95}
    row = Row(**about, **counts, **words, has_ended=True)
    return Report(version=VERSION, kind="experiment", name="pilot", rows=[row], **fields)


def test_power_shows_what_an_experiment_would_find(folder, capsys):
    words = ["power", "--baseline", "base.yaml", "--vary", f"{MLP}=relu", "--vary", f"{MLP}=gelu"]
    assert main(["ablate", *words, "--spread", "0.001"]) == 0
    said = capsys.readouterr().out
    rows = [line.split() for line in said.splitlines() if re.match(r" [\d.]+ .*%", line)]
    assert [row[0] for row in rows] == ["0", "0.0025", "0.005", "0.01", "0.02"]
    assert rows[-1][1:] == ["100%", "0%", "0%", "100/100/100", "8.0", "33"]  # 1 + 8 of the null variant + 8 x 3
    assert rows[0][2] == "100%"  # a delta of five standard deviations: no difference is found to be smaller
    assert rows[-1][1] == "100%"
    assert "warning" not in said
    (folder / "pilot").mkdir()
    (folder / "pilot" / "report.json").write_text(null_of(0.008, sd_interval=(0.0054, 0.0154)).to_json())
    assert main(["ablate", *words, "--from", "pilot", "--pairs", "8"]) == 0
    said = capsys.readouterr().out
    within = "null variant of pilot, 95% interval 0.0054 to 0.0154"
    assert f"a pair's difference has a standard deviation of 0.008 ({within})." in said
    warning = next(line for line in said.splitlines() if line.startswith("warning: "))
    found = re.search(r"delta 0\.005 in only (\d+)% of experiments: .* a delta of about ([\d.]+)", warning)
    assert int(found[1]) < 10
    wider = power_analysis(Design(0.025, (8,), float(found[2])), 0.0, 0.008)
    assert wider.probabilities["equivalent"] == pytest.approx(0.8, abs=0.05)


def test_power_of_a_pilot_is_that_of_its_own_experiment(first, monkeypatch, capsys):
    assert planned(monkeypatch, variants={"a": RELU, "b": {MLP: "gelu"}}, pairs=4)() == 0
    said = capsys.readouterr().err
    assert "4 pairs are a pilot: by default, the first test is after 8\n" in said
    after = "after it, see lightning-llm ablate power --from out --pairs 16"
    assert "note: what this pilot can find is not known, since no experiment with this baseline in the same " in said
    assert f"has measured the spread; {after}\n" in said
    Path("out", "report.json").write_text(null_of(0.008).to_json())
    assert main(["ablate", "power", "--from", "out"]) == 0
    said = capsys.readouterr().out
    assert "8/12" not in said
    assert "each of 2 variants, if a pair's difference has a standard deviation of 0.008 (null variant of out)." in said
    assert main(["ablate", "power", "--from", "out", "--pairs", "12"]) == 0
    assert "8/12" in capsys.readouterr().out
    assert "pilot" not in first


def test_a_plan_says_which_seeds_an_earlier_one_has_used_and_what_it_can_find(first, monkeypatch, capsys):
    assert "not independent" not in first
    for seed in range(4):
        Path("runs/first/runs", f"baseline,seed={seed}").mkdir(parents=True)
    Path("runs/first/report.json").write_text(null_of(0.008).to_json())
    shared = {f"baseline,seed={seed}": "first" for seed in range(4)}
    with monkeypatch.context() as patch:
        patch.setattr(planning, "reusable", lambda *_, **__: Reused(runs=shared))
        assert planned(monkeypatch, variants={"b": {MLP: "gelu"}}, looks=[4, 6], out="runs/shares")() == 0
    assert "not independent" not in capsys.readouterr().err  # these runs are shared on purpose
    run = planned(monkeypatch, variants={"b": {MLP: "gelu"}}, looks=[4, 6], out="runs/second")
    assert run() == 0
    said = capsys.readouterr().err
    assert "note: first has used seeds 0 to 3 with this baseline, so the two experiments are not independent" in said
    assert "Fresh seeds: --first-seed 1000, or seeds: {first: 1000} in a file" in said
    assert "What the spread of the null variant of first lets this experiment find:" in said
    assert json.loads(Path("runs/second", PLAN).read_text())["seen"] == {"first": [0, 1, 2, 3]}
    fresh = planned(monkeypatch, variants={"b": {MLP: "gelu"}}, looks=[4], out="runs/third", seeds={"first": 1000})
    assert fresh() == 0
    assert "not independent" not in capsys.readouterr().err
    assert json.loads(Path("runs/third", PLAN).read_text())["experiment"]["first_seed"] == 1000


def test_a_variant_with_another_optimizer_says_what_it_keeps(folder, monkeypatch, capsys):
    """The parser keeps the arguments that both classes have, defaults of the baseline's class too."""
    sgd = {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.5, "momentum": 0.9}}
    variants = {"plain": {"model.optimizer": "torch.optim.SGD"}, "own": {"model.optimizer": sgd}, "relu": RELU}
    options = {"model.optimizer": {"class_path": "lightning_llm.optim.AdamW", "init_args": {"lr": 0.004}}}
    assert planned(monkeypatch, variants=variants, options=options)() == 0
    lines = [line for line in capsys.readouterr().err.splitlines() if "keeps" in line]
    others = "its other arguments are what the variant sets, or SGD's defaults"
    assert lines == [
        f"lightning-llm ablate: {name}: model.optimizer SGD keeps {kept} of the baseline's AdamW; {others}"
        for name, kept in (("plain", "lr 0.004, weight_decay 0.1"), ("own", "weight_decay 0.1"))
    ]
    configs = {name: yaml.safe_load(Path("out", CONFIGS, f"{name}.yaml").read_text()) for name in ("plain", "own")}
    arguments = {name: config["model"]["optimizer"]["init_args"] for name, config in configs.items()}
    assert (arguments["plain"]["lr"], arguments["plain"]["momentum"]) == (0.004, 0.0)
    assert (arguments["own"]["lr"], arguments["own"]["weight_decay"]) == (0.5, 0.1)


def identities(out):
    """Of the variants of a plan."""
    variants = json.loads(Path(out, PLAN).read_text())["variants"]
    return {name: variant["identity"] for name, variant in variants.items()}


@pytest.mark.slow
def test_what_changes_the_identity_of_a_baseline(folder, monkeypatch):
    def of(out, mlp="relu", before=lambda: None, **experiment):
        before()
        assert planned(monkeypatch, variants={"a": {MLP: mlp}}, looks=[4], out=f"runs/{out}", **experiment)() == 0
        return identities(f"runs/{out}")

    (folder / "own_mlp.py").write_text(OWN_MLP)
    monkeypatch.syspath_prepend(str(folder))
    first = of("first")
    assert first["baseline"] != first["null"] != first["a"]
    for out, mlp in (("gelu", "gelu"), ("own", "own_mlp.OwnMLP")):  # another variant, with or without code of its own
        assert {name: value for name, value in of(out, mlp).items() if name != "a"} == {
            name: first[name] for name in ("baseline", "null")
        }
    own = identities("runs/own")
    changed = of("changed", "own_mlp.OwnMLP", lambda: (folder / "own_mlp.py").write_text(OWN_MLP + "# changed\n"))
    assert changed["baseline"] == own["baseline"]
    assert changed["a"] != own["a"]
    of_own = of("of-own", options={MLP: "own_mlp.OwnMLP"})["baseline"]
    (folder / "own_mlp.py").write_text(OWN_MLP + "# changed again\n")
    others = [of_own, of("of-changed", options={MLP: "own_mlp.OwnMLP"})["baseline"]]
    others.append(of("option", options={"model.optimizer.init_args.lr": 0.02})["baseline"])
    (folder / "text.txt").write_text((folder / "text.txt").read_text() + "more")
    others.append(of("text")["baseline"])
    monkeypatch.setattr("lightning_llm.ablate.fit.planning.threads_for", lambda *given: 7)
    others.append(of("threads")["baseline"])
    assert len({first["baseline"], *others}) == 6


@pytest.mark.slow
def test_initial_weights_of_the_same_name_with_other_values_change_an_identity(folder, monkeypatch):
    found = []
    for number, steps in enumerate((1, 2, 2)):
        shutil.rmtree("start", ignore_errors=True)
        trainer = {"max_steps": steps, "val_check_interval": 1, "log_every_n_steps": 1, "run_dir": "start"}
        assert main(["fit", "--config", "base.yaml", *(f"--trainer.{name}={v}" for name, v in trainer.items())]) == 0
        variants = {"a": {"model.optimizer.init_args.lr": 0.02}}
        experiment = {"variants": variants, "options": {"model.init_from": "start"}, "looks": [4]}
        assert planned(monkeypatch, **experiment, out=f"runs/{number}")() == 0
        found.append(identities(f"runs/{number}")["baseline"])
    assert found[0] != found[1] == found[2]


@pytest.mark.slow
def test_code_of_a_variant_is_none_of_a_baseline_with_code_of_its_own(folder, monkeypatch):
    monkeypatch.syspath_prepend(str(folder))
    (folder / "own_mlp.py").write_text(OWN_MLP)
    found = []
    for number in range(2):
        (folder / "other_mlp.py").write_text(OWN_MLP + f"# {number}\n")
        monkeypatch.delitem(sys.modules, "other_mlp", raising=False)
        experiment = {"options": {MLP: "own_mlp.OwnMLP"}, "variants": {"a": {MLP: "other_mlp.OwnMLP"}}, "looks": [4]}
        assert planned(monkeypatch, **experiment, out=f"runs/{number}")() == 0
        found.append(identities(f"runs/{number}"))
    assert found[0]["baseline"] == found[1]["baseline"]
    assert found[0]["a"] != found[1]["a"]


@pytest.mark.slow
def test_reuse_is_chosen_when_a_plan_is_made(folder, monkeypatch, capsys):
    asked = []
    monkeypatch.setattr(planning, "reusable", lambda out, identities, reuse, **more: asked.append(reuse) or Reused())
    run = planned(monkeypatch, variants={"a": RELU}, looks=[4], out="runs/first")
    assert run("--reuse", "none") == 0
    assert main(["ablate", "run", "runs/first", "--reuse", "variants"]) == 2
    assert "has a frozen plan: only --workers can be given with it" in the_line(capsys)
    for name, words in (("second", ["--reuse", "variants"]), ("third", [])):
        assert planned(monkeypatch, variants={"a": RELU}, looks=[4], out=f"runs/{name}")(*words) == 0
    assert asked == ["none", "variants", "baseline"]


def test_what_cannot_be_extended_is_one_line(first, monkeypatch, capsys):
    monkeypatch.setattr("lightning_llm.cli.ablate_run.run_experiment", lambda *arguments: None)
    extend = ["ablate", "extend", "runs/first", "--pairs", "2"]
    assert main(extend) == 2
    assert "runs/first has not used up its plan: lightning-llm ablate run runs/first continues it" in the_line(capsys)
    ended = load_experiment(Path("runs/first"))
    state = dataclasses.replace(ended.state, needed=[], unfinished=[])
    monkeypatch.setattr("lightning_llm.cli.ablate.load_experiment", lambda out: dataclasses.replace(ended, state=state))
    assert main(extend) == 2
    assert "every comparison has ended: name those that you want to know better: --variants NAME" in the_line(capsys)
    assert main([*extend, "--variants", "x"]) == 2
    assert "--variants x: runs/first has a" in the_line(capsys)
    assert main([*extend, "--variants", "a"]) == 0
    assert load_experiment(Path("runs/first")).plan.extensions == [Extension(2, ("a",))]


# ---- whole experiments


@pytest.mark.slow
@pytest.mark.parametrize("path", SHIPPED[::4], ids=lambda path: path.stem)  # all are read in tests/ablate
def test_a_shipped_experiment_can_be_planned(folder, monkeypatch, path):
    monkeypatch.setattr("lightning_llm.cli.ablate_run.run_experiment", lambda *arguments: None)
    monkeypatch.setattr(cost, "time_pair", partial(cost.time_pair, rounds=2))
    monkeypatch.syspath_prepend(str(ROOT / "examples" / "parts"))
    Path("configs").symlink_to(ROOT / "configs")
    options = yaml.safe_load(path.read_text()).get("options", {})
    repeat = ["--repeat"] if "size" in options else []  # the text of the tests is short
    assert main(["ablate", "run", str(path), "--out", "out", "--data.path", "text.txt", *repeat]) == 0
    plan = json.loads(Path("out", PLAN).read_text())
    assert plan["experiment"]["name"] == path.stem
    assert all(variant["steps"] > 0 for variant in plan["variants"].values())


def start(folder, *words):
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    command = [sys.executable, "-m", "lightning_llm", "ablate", *words]
    out = (folder / "out.txt").open("a")
    with out:
        return subprocess.Popen(command, cwd=folder, env=environment, stdout=out, stderr=out)


def numbers(folder):
    """All of an experiment but seconds, memory and the folder's name."""
    loaded = load_experiment(folder)
    losses = {str(run): (each.loss, each.curves()) for run, each in loaded.results.items()}
    return {"verdicts": loaded.state.verdicts, "losses": losses, "replay": loaded.replay}


@pytest.mark.slow
def test_an_experiment_from_its_file_to_its_verdicts(folder):
    experiment = {"baseline": "base.yaml", "variants": {"relu": RELU}, "looks": [2], "out": "out"}
    (folder / "exp.yaml").write_text(yaml.safe_dump(experiment))
    assert start(folder, "run", "exp.yaml", "--workers", "2").wait() == 0, (folder / "out.txt").read_text()
    loaded = load_experiment(folder / "out")
    assert loaded.replay == Replay(0.0)
    assert set(loaded.results) == {
        *(RunKey(name, seed) for name in ("baseline", "null", "relu") for seed in (0, 1)),
        RunKey("baseline-again", 0),
    }
    assert loaded.results[RunKey("null", 0)].loss != loaded.results[RunKey("baseline", 0)].loss
    assert {each.summary["threads"] for each in loaded.results.values()} == {loaded.plan.record.threads}
    by_hand = ["--config", "out/configs/relu.yaml", "--seed_everything=1", "--data.seed=1", "--trainer.run_dir=hand"]
    environment = {**os.environ, "OMP_NUM_THREADS": str(loaded.plan.record.threads)}
    command = [sys.executable, "-m", "lightning_llm", "fit", *by_hand]
    subprocess.run(command, cwd=folder, env=environment, check=True, capture_output=True)
    both = [folder / run for run in ("out/runs/relu,seed=1", "hand")]
    summaries = [json.loads((run / "summary.json").read_text()) for run in both]
    for field in ("seconds", "peak_memory_gib", "checkpoint"):
        summaries[0].pop(field), summaries[1].pop(field)
    assert summaries[0] == summaries[1]  # a copy of the server has the bits of a process of its own
    files = [next((run / "checkpoints").glob("step-*.ckpt")) for run in both]
    weights = [torch.load(file, weights_only=False)["state_dict"] for file in files]
    assert all(torch.equal(weights[0][name], value) for name, value in weights[1].items())
    assert loaded.cost.variants.keys() == {"baseline", "relu"}
    assert loaded.cost.variants["relu"].peak_bytes > 0
    assert "one variant after another: out/logs/measure.txt says how far it is" in (folder / "out.txt").read_text()
    assert "measuring relu and the baseline" in (folder / "out/logs/measure.txt").read_text()
    assert start(folder, "extend", "out", "--pairs", "1", "--workers", "2").wait() == 0
    more = load_experiment(folder / "out")
    assert more.state.verdicts["relu"].rule == "look 2"
    assert set(more.results) - set(loaded.results) == {RunKey("baseline", 2), RunKey("relu", 2)}


@pytest.mark.slow
def test_a_second_experiment_trains_its_variant_alone(folder):
    def run_experiment(out, mlp, *words):
        experiment = {"baseline": "base.yaml", "variants": {mlp: {MLP: mlp}}, "looks": [2], "out": out}
        (folder / "exp.yaml").write_text(yaml.safe_dump(experiment))
        assert start(folder, "run", "exp.yaml", *words).wait() == 0, (folder / "out.txt").read_text()
        return load_experiment(folder / out)

    def own(loaded):
        return {run for run in loaded.results if not loaded.plan.is_reused(run)}

    first = run_experiment("runs/first", "relu")
    second = run_experiment("runs/second", "gelu")
    gelu = {RunKey("gelu", 0), RunKey("gelu", 1)}
    assert own(second) == gelu
    lines = (folder / "out.txt").read_text().splitlines()
    assert "Reused from first: baseline seeds 0 to 1; null seeds 0 to 1." in lines
    assert "2 of 6 runs are left to train." in lines
    assert "In first, the baseline with one seed, trained twice: bit-identical." in lines
    alone = run_experiment("runs/alone", "gelu", "--reuse", "none")
    assert own(alone) == {*alone.results}
    ours, theirs = (numbers(folder / "runs" / name) for name in ("second", "alone"))
    assert (ours.pop("replay"), theirs.pop("replay")) == (Replay(0.0, "first"), Replay(0.0))
    assert theirs["losses"].pop("baseline-again,seed=0") == ours["losses"]["baseline,seed=0"]
    assert ours == theirs
    words = ["extend", "runs/second", "--pairs", "1", "--variants", "gelu"]
    assert start(folder, *words).wait() == 0
    assert own(load_experiment(folder / "runs/second")) == gelu | {RunKey("gelu", 2), RunKey("baseline", 2)}
    before = numbers(folder / "runs/second")
    clean = ["runs", "clean", "runs/first", "runs/second", "--yes"]
    subprocess.run([sys.executable, "-m", "lightning_llm", *clean], cwd=folder, check=True)
    shutil.rmtree(first.plan.out)
    assert numbers(folder / "runs/second") == before


@pytest.mark.slow
def test_kills_change_nothing(folder):
    config = {**CONFIG, "trainer": {**CONFIG["trainer"], "max_steps": 24, "val_check_interval": 6}}
    (folder / "base.yaml").write_text(yaml.safe_dump(config))
    experiment = {"baseline": "base.yaml", "variants": {"relu": RELU}, "looks": [2]}
    (folder / "exp.yaml").write_text(yaml.safe_dump(experiment))
    assert start(folder, "run", "exp.yaml", "--out", "whole").wait() == 0, (folder / "out.txt").read_text()
    rng, out = random.Random(0), (folder / "killed").resolve()
    words = ["run", "exp.yaml", "--out", str(out), "--reuse", "none"]
    planner = start(folder, *words)
    for ended, kind in ((0, COMMAND), (2, RUN), (4, SERVER)):
        deadline = time.monotonic() + 300
        while len(list(out.glob("runs/*/summary.json"))) < ended or not (found := processes(out, kind)):
            assert planner.poll() is None, (folder / "out.txt").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        until = time.monotonic() + rng.random() * 4  # anywhere in a run: starting, training, saving, reporting
        while time.monotonic() < until and planner.poll() is None:
            time.sleep(0.05)
        with suppress(ProcessLookupError):
            os.kill(rng.choice(processes(out, kind) or found), signal.SIGKILL)
        if kind == COMMAND:
            planner.wait()
            planner = start(folder, *words)
    assert planner.wait() == 0, (folder / "out.txt").read_text()
    assert numbers(out) == numbers(folder / "whole")


class Widths(matching.Match):
    """A rule of a user: the tokens of a run times the parameters are equal."""

    name = "work"
    caveat = "Work is tokens times parameters."
    facts: ClassVar = ("work",)

    def closeness(self, base, variant):
        base_work, work = (each["parameters"] * each["tokens_per_step"] * each["steps"] for each in (base, variant))
        return work / base_work


def match_work(base, variant, solved):
    base_parameters, parameters = (cost.parameters_of(each.architecture) for each in (base, variant))
    scale = base_parameters / parameters
    options = fit_matching.scaled_options(Widths.name, variant, base.steps, scale)
    steps = options.get("trainer.max_steps", base.steps)
    return fit_matching.Matched(options, {"work": 1.0 * parameters * variant.data.tokens_per_step * steps})


def test_a_matching_rule_is_a_class_a_function_and_a_line_of_each_table(folder, monkeypatch, capsys):
    wide = {"wide": {"model.architecture.intermediate_size": 512}}
    run = planned(monkeypatch, variants=wide, looks=[2], match="work")
    assert run() == 2
    assert "match is 'work', expected one of tokens, flops, time, parameters=model" in the_line(capsys)
    monkeypatch.setitem(matching.MATCHES, Widths.name, Widths())
    monkeypatch.setitem(fit_matching.MATCHING, Widths.name, match_work)
    for module in (fit_matching, from_experiment):  # MATCHES gives it when the module is imported
        monkeypatch.setattr(module, "FACTS", (*matching.FACTS, "work"))
    assert run() == 0
    variant = json.loads(Path("out", PLAN).read_text())["variants"]["wide"]
    assert variant["steps"] == 2 < 6
    assert variant["ratio"] == pytest.approx(1, abs=0.2)
    capsys.readouterr()
    assert main(["ablate", "report", "out"]) == 0
    printed = capsys.readouterr().out
    assert f"Matched: work (wide {variant['ratio']:.2f} times the baseline's)." in printed
    assert "Work is tokens times parameters." in printed
    reported = Report.read("out")
    assert reported.design.match == "work"
    assert reported.variants["wide"].ratio == variant["ratio"]
    assert reported.variants["wide"].facts == {"work": variant["facts"]["work"]}
    assert variant["facts"]["work"] > 0


def test_options_of_one_variant_are_joined_and_metric_and_tune_are_options(folder, monkeypatch):
    monkeypatch.setattr("lightning_llm.cli.ablate_run.run_experiment", lambda *arguments: None)
    rate = "model.optimizer.init_args.lr"
    words = ["--vary", f"{MLP}=relu", "--with", "model.architecture.qk_norm=true", "--vary", f"{MLP}=gelu"]
    words += ["--metric", "bits_per_byte", "--tune", rate, "--pairs", "2", "--out", "out"]
    assert main(["ablate", "run", "--baseline", "base.yaml", *words]) == 0
    experiment = json.loads(Path("out", PLAN).read_text())["experiment"]
    both = {MLP: "relu", "model.architecture.qk_norm": "true"}
    assert experiment["variants"] == {"relu+qk_norm=true": both, "gelu": {MLP: "gelu"}}
    assert (experiment["metric"], experiment["tune"]["option"]) == ("bits_per_byte", rate)
    assert (experiment["match"], experiment["first_seed"]) == ("tokens", 0)  # without options of their own


@pytest.mark.parametrize("words", [["ablate", "status"], ["ablate", "report"], ["compare"]])
def test_what_has_been_found_is_shown_without_torch(experiment, words):
    plan = experiment({"a": {"effect": -0.5}})
    work(plan.out)
    code = (
        f"import sys; from lightning_llm.__main__ import main; assert main([*{words}, {str(plan.out)!r}]) == 0; "
        "assert not {'torch', 'lightning'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
