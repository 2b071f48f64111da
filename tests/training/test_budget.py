"""``model.memory_budget`` in ``fit``: chosen before the model is built, recorded, and kept on resume."""

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml

from lightning_llm.accounting import step_memory
from lightning_llm.cli.train import cli_main
from lightning_llm.runs.directory import MEMORY_PLAN
from lightning_llm.training import budget
from lightning_llm.training.run_config import RunOptions, read_run

RUN = Path("runs/run/version_0")
BUDGET = {"model.memory_budget": "680KB", "trainer.val_check_interval": 3}

pytestmark = pytest.mark.usefixtures("traced_once")


def chosen(cli):
    model = cli.model
    return {
        "micro_batch_size": cli.datamodule.micro_batch_size,
        "checkpoint_level": model.architecture.checkpoint_level,
        "recompute": model.architecture.recompute,
        "loss_chunks": model.loss_chunks,
        "accumulation": cli.trainer.accumulate_grad_batches,
    }


def test_the_run_is_what_was_planned_and_says_so(tiny, capsys):
    cli = tiny("fit", **BUDGET)
    plan = json.loads((RUN / MEMORY_PLAN).read_text())
    assert chosen(cli) == {name: plan[name] for name in chosen(cli)}
    assert plan["memory"]["peak"] <= 680_000
    assert plan["accumulation"] > 1  # else nothing is shown of what follows from it
    assert cli.trainer.global_step == 6
    assert cli.trainer.val_check_batch == 3 * plan["accumulation"]
    saved = yaml.safe_load((RUN / "config.yaml").read_text())
    assert saved["data"]["micro_batch_size"] == plan["micro_batch_size"]
    assert saved["model"]["architecture"]["recompute"] == plan["recompute"]
    assert saved["model"]["memory_budget"] == "680KB"
    out = " ".join(capsys.readouterr().out.split())
    assert f"micro-batches of {plan['micro_batch_size']}, " in out
    assert "overrides" not in out
    assert f"({8} × 16 in {plan['accumulation']} micro-batches)" in out


def test_more_memory_takes_the_whole_batch_at_once(tiny):
    cli = tiny("fit", **{**BUDGET, "model.memory_budget": "1GB", "data.micro_batch_size": 2})
    assert chosen(cli)["micro_batch_size"] == 8
    assert chosen(cli)["accumulation"] == 1


@pytest.mark.parametrize("command", ["fit", "check"])
def test_options_that_the_plan_overrides_are_named_in_its_line(tiny, capsys, command):
    changes = {"data.micro_batch_size": 2, "model.architecture.checkpoint_level": 2, "model.loss_chunks": 3}
    tiny(command, **{**BUDGET, "model.memory_budget": "1GB", **changes})
    out = " ".join(capsys.readouterr().out.split())
    given = "data.micro_batch_size 2, model.architecture.checkpoint_level 2, model.loss_chunks 3"
    assert f"; memory_budget overrides {given}" in out


@pytest.mark.parametrize("own_config", [False, True])
def test_a_resumed_run_plans_the_same_and_sees_no_change(tiny, capsys, own_config):
    first = tiny("fit", **{**BUDGET, "trainer.max_steps": 3})
    capsys.readouterr()
    if own_config:
        words = ["--config", str(RUN / "config.yaml"), "--ckpt_path", "last", "--trainer.max_steps=6"]
        rest = cli_main(["fit", *words])
    else:
        rest = tiny("fit", "--ckpt_path=last", **BUDGET)
    assert rest.trainer.global_step == 6
    assert chosen(rest) == chosen(first)
    out = capsys.readouterr().out
    assert "Resumed from step 3" in out
    assert "overrides" not in out  # the plan that the config records is no wish
    changes = [line.split(":")[0].strip() for line in out.splitlines() if " -> " in line]
    assert changes == ["trainer.max_steps"]


def test_check_tells_the_plan_and_the_batch_that_follows(tiny, capsys):
    tiny("check", **BUDGET)
    out = " ".join(capsys.readouterr().out.split())
    assert "plan micro-batches of " in out
    plan_rows = int(out.split("plan micro-batches of ")[1].split(",")[0])
    assert f"{8 // plan_rows} micro-batches" in out


@pytest.mark.parametrize(
    ("budget", "expected"),
    [
        ("80Gigs", "model.memory_budget '80Gigs' is not a size: give a number with one of B, KB, "),
        ("10KB", "model.memory_budget 10KB: memory of 10,000 bytes is too little: the smallest that fits is "),
        (None, "model.memory_reserve 2GiB is a part of memory_budget, which is null: give both"),
        (
            "1GiB",
            "model.memory_budget 1GiB: memory of 1,073,741,824 bytes is too little: the smallest that fits is 2,1",
        ),
    ],
)
def test_a_mistake_is_one_line(tiny, error_line, budget, expected):
    reserve = {} if budget in ("10KB", "80Gigs") else {"model.memory_reserve": "2GiB"}
    with pytest.raises(SystemExit, match="2"):
        tiny("fit", **{"model.memory_budget": budget, **reserve})
    assert expected in error_line()


def test_a_run_with_packed_documents_is_planned_for_them(tiny, tmp_path, text_file):
    (tmp_path / "docs").mkdir()
    for number, text in enumerate(text_file.read_text().split("\n")[:60]):
        (tmp_path / "docs" / f"{number}.txt").write_text(text)
    changes = {"data.tokenizer": "bpe", "data.vocab_size": 300, "data.path": str(tmp_path / "docs")}
    cli = tiny("fit", **{**changes, "data.document_mask": True, **BUDGET, "model.memory_budget": "2MB"})
    assert cli.trainer.global_step == 6
    plan = cli.model.plan
    architecture, setting = cli.model.architecture, plan.choice
    step = {"rows": setting.rows, "loss_chunks": setting.loss_chunks, "accumulation": min(2, plan.accumulation)}
    step |= {"context_length": 16, "precision": cli.trainer.precision}
    assert plan.memory.peak == step_memory(architecture, document_mask=True, **step).peak
    assert plan.memory.peak != step_memory(architecture, **step).peak


def test_a_run_fills_the_settings_of_its_step_as_estimate_does(tiny):
    own = {"model.architecture.mlp": "tests.training.callbacks.test_memory_profiler.OwnMLP"}
    cli = tiny("fit", **{**own, "trainer.precision": "bf16-mixed"})
    inside = budget._space_of(cli.model, cli.datamodule, cli.trainer, None).step
    outside = read_run(RunOptions(config=[str(RUN / "config.yaml")], trust_code=True)).step
    assert inside.measured
    different = [
        field.name
        for field in dataclasses.fields(inside)
        if getattr(inside, field.name) != getattr(outside, field.name)
    ]
    assert different == []


def test_a_reserve_leaves_less_for_tensors(tiny, capsys):
    tiny("fit", **{**BUDGET, "model.memory_budget": "780KB", "model.memory_reserve": "100KB"})
    plan = json.loads((RUN / MEMORY_PLAN).read_text())
    assert plan["needed"] == plan["memory"]["peak"] + 100_000 <= 780_000
    assert "and 0.10 MiB left free, of 780KB" in " ".join(capsys.readouterr().out.split())


def test_a_plan_uses_at_most_what_the_device_has(tiny, monkeypatch):
    monkeypatch.setattr(budget, "_memory_limit", lambda device: 680_000)
    cli = tiny("fit", **{**BUDGET, "model.memory_budget": "1GB", "trainer.max_steps": 1})
    assert cli.model.plan.needed <= 680_000


def test_the_memory_of_a_gpu_is_what_cuda_reports(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=79 * 2**30))
    assert budget._memory_limit(torch.device("cuda")) == 79 * 2**30
    assert budget._memory_limit(torch.device("cpu")) == float("inf")


def test_an_mlp_of_the_users_own_is_measured(tiny, capsys):
    tiny("fit", **{**BUDGET, "model.architecture.mlp": "tests.training.callbacks.test_memory_profiler.OwnMLP"})
    assert json.loads((RUN / MEMORY_PLAN).read_text())["memory"]["peak"] <= 680_000
    assert "plan micro-batches of " in " ".join(capsys.readouterr().out.split())
