"""A resumed run with other options: what differs is printed and holds, or the run is refused."""

import json
import math

import pytest

from lightning_llm.optim import cosine_lr
from lightning_llm.training.callbacks import ResumeDiff
from tests.cli.test_resume import CONSTANT, FOLDER, RUN
from tests.tiny_run import curves


def test_flags_win_over_the_checkpoint_and_are_said(tiny, capsys):
    tiny("fit", **CONSTANT, **{"trainer.max_steps": 3, "model.optimizer.lr": 0.001})
    capsys.readouterr()
    changed = {"model.optimizer.lr": 0.002, "model.optimizer.weight_decay": 0.5, "data.micro_batch_size": 4}
    cli = tiny("fit", "--ckpt_path=last", **CONSTANT, **changed)
    said = capsys.readouterr().out
    for line in ("lr: 0.001 -> 0.002", "weight_decay: 0.1 -> 0.5", "data.micro_batch_size: None -> 4"):
        assert line in said
    assert said.index("Changed since the checkpoint") < said.index("Resumed from step 3")
    groups = cli.trainer.optimizers[0].param_groups
    assert {group["lr"] for group in groups} == {0.002}
    assert {group["weight_decay"] for group in groups} == {0.0, 0.5}
    assert curves(RUN)["learning_rate"][3] == (4, pytest.approx(0.002))


def test_nothing_is_said_where_nothing_has_changed(tiny, capsys):
    tiny("fit", **CONSTANT)
    capsys.readouterr()
    tiny("fit", f"--ckpt_path={FOLDER}/step-00000003.ckpt", **CONSTANT)
    assert "Changed since" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "schedule",
    [
        {"class_path": "lightning_llm.optim.WarmupCosine", "init_args": {"warmup_steps": 2, "min_lr_ratio": 0.5}},
        {"class_path": "torch.optim.lr_scheduler.StepLR", "init_args": {"step_size": 2, "gamma": 0.5}},
    ],
)
def test_a_changed_schedule_is_said_and_holds_from_the_next_step_on(tiny, tmp_path, capsys, schedule):
    config = tmp_path / "schedule.yaml"
    config.write_text(json.dumps({"model": {"schedule": schedule}}))
    whole = tiny("fit", f"--config={config}", **{"trainer.default_root_dir": "whole"})
    tiny("fit", **CONSTANT, **{"trainer.max_steps": 3})
    capsys.readouterr()
    ckpt = f"--ckpt_path={FOLDER}/step-00000003.ckpt"
    tiny("fit", f"--config={config}", ckpt)
    assert "model.schedule.class_path: lightning_llm.optim.Constant -> " in capsys.readouterr().out
    assert curves(RUN)["learning_rate"][3:] == curves(whole.trainer.log_dir)["learning_rate"][3:]


def test_more_steps_have_the_rates_of_the_longer_schedule(tiny, monkeypatch, capsys):
    rates = []

    def record(self, trainer, pl_module, optimizer):
        rates.append(optimizer.param_groups[0]["lr"])

    monkeypatch.setattr(ResumeDiff, "on_before_optimizer_step", record)
    schedule = {"class_path": "lightning_llm.optim.WarmupCosine", "init_args": {"warmup_steps": 1, "min_lr_ratio": 0.1}}
    options = {"model.schedule": schedule, "model.optimizer.lr": 0.5}
    tiny("fit", **options, **{"trainer.max_steps": 3})
    capsys.readouterr()
    tiny("fit", "--ckpt_path=last", **options, **{"trainer.max_steps": 6})
    assert "trainer.max_steps: 3 -> 6" in capsys.readouterr().out
    lengths = (3, 3, 3, 6, 6, 6)  # of the schedule that each step follows
    expected = [
        cosine_lr(step, max_lr=0.5, min_lr=0.05, warmup_steps=1, decay_steps=length)
        for step, length in enumerate(lengths, start=1)
    ]
    assert rates == pytest.approx(expected)
    assert rates[2] == pytest.approx(0.05)  # decayed, and the further steps begin at a higher rate
    assert rates[3] == pytest.approx(0.05 + (1 + math.cos(0.6 * math.pi)) / 2 * 0.45)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model.architecture.hidden_size": 48}, "hidden_size is 32 there and 48 here"),
        ({"model.architecture.tie_word_embeddings": True}, "tie_word_embeddings is False there and True here"),
        ({"data.tokenizer": "byte"}, "vocab_size"),
        ({"model.optimizer": "torch.optim.SGD"}, "torch.optim.SGD here"),
        ({"trainer.max_steps": 2}, "trainer.max_steps 2 is below step 6"),
    ],
)
def test_what_cannot_go_on_is_refused_with_both_values(finished, tiny, error_line, changes, says):
    before = {path.name for path in FOLDER.iterdir()}
    with pytest.raises(SystemExit) as leaving:
        tiny("fit", "--ckpt_path=last", **changes)
    assert leaving.value.code == 2
    assert says in error_line()
    assert {path.name for path in FOLDER.iterdir()} == before


@pytest.mark.parametrize(
    "changes", [{"model.architecture.checkpoint_level": 1}, {"model.architecture.recompute": "block"}]
)
def test_what_only_changes_the_execution_may_change(tiny, changes, capsys):
    tiny("fit", **CONSTANT, **{"trainer.max_steps": 3})
    tiny("fit", "--ckpt_path=last", **CONSTANT, **changes)
    assert f"{next(iter(changes))}: " in capsys.readouterr().out
