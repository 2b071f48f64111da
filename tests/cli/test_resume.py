"""Going on from a checkpoint: the same run, the same curve, and every difference said."""

import json
import os
import shutil
import signal
import stat
from pathlib import Path

import pytest
import torch

from lightning_llm.__main__ import main
from lightning_llm.checkpoints.archives import write_atomically
from lightning_llm.checkpoints.reading import read_checkpoint
from lightning_llm.cli.train import cli_main
from lightning_llm.runs.directory import step_files, step_of
from lightning_llm.training.callbacks import StopOnSignal
from tests.tiny_run import assert_same_weights, curves, weights

RUN = Path("runs/run/version_0")
FOLDER = RUN / "checkpoints"
CONSTANT = {"model.schedule.class_path": "lightning_llm.optim.Constant"}
OFTEN = [{"class_path": "lightning_llm.training.callbacks.RunCheckpoints", "init_args": {"every_n_steps": 1}}]

DROPPING = """
from torch import nn


class MLP(nn.Dropout):
    def __init__(self, config):
        super().__init__(0.5)
"""


class Killed(BaseException):
    """Ends a run as a kill would: nothing is saved on the way out."""


def killed_after(monkeypatch, tiny, step, **changes):
    """A run that dies in step ``step``, after it was logged and before anything is saved."""

    def dying(self, trainer, *args, **kwargs):
        if trainer.global_step == step:
            for logger in trainer.loggers:
                logger.save()
            raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(StopOnSignal, "on_train_batch_end", dying)
        with pytest.raises(Killed):
            tiny("fit", **changes)


def cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def test_where_the_newest_cannot_be_resumed_the_message_names_the_newest_that_can(tiny, error_line):
    tiny("fit", **{"trainer.callbacks": [{**OFTEN[0], "init_args": {"every_n_steps": 1, "keep_last": 4}}]})

    def spoil(step):
        content = read_checkpoint(path := FOLDER / f"step-{step:08d}.ckpt")
        content["loops"]["fit_loop"]["epoch_progress"]["total"]["ready"] = 9
        path.unlink()  # the best may be the same file
        write_atomically(content, path)

    for steps, newest in (((5, 6), "step-00000004.ckpt"), ((3, 4), "best.ckpt")):
        for step in steps:
            spoil(step)
        with pytest.raises(SystemExit, match="2"):
            tiny("fit", "--ckpt_path=last")
        assert f"the newest that can be resumed: --ckpt_path {FOLDER}/{newest}" in error_line()


def test_what_lightnings_loops_count_matters_to_no_command_but_fit(finished, tiny, error_line, tmp_path):
    path = FOLDER / "step-00000006.ckpt"
    content = read_checkpoint(path)
    content["loops"]["fit_loop"]["epoch_progress"]["total"]["ready"] = 9
    path.unlink()  # the best may be the same file
    write_atomically(content, path)
    (tmp_path / "more.txt").write_text("abc\n" * 40)
    for words in (
        ["generate", str(path), "--max-new-tokens", "2", "--prompt", "a"],
        ["evaluate", str(path), "--data", "more.txt"],
        ["export", str(path), "out"],
        ["validate", "--ckpt_path", str(path)],
    ):
        assert main(words) == 0, words
    with pytest.raises(SystemExit, match="2"):
        tiny("fit", f"--ckpt_path={path}", **{"trainer.max_steps": 8})
    assert "epoch_progress" in error_line()


def test_the_command_says_where_it_goes_on_from(tiny, capsys):
    tiny("fit", **CONSTANT, **{"trainer.max_steps": 3})
    capsys.readouterr()
    tiny("fit", "--ckpt_path=last", **CONSTANT)
    assert f"Resumed from step 3: {FOLDER}/step-00000003.ckpt" in capsys.readouterr().out


@pytest.mark.parametrize("every", [1, 2])
def test_the_curve_goes_on_without_gap_or_overlap(tiny, monkeypatch, every):
    options = {"trainer.log_every_n_steps": every, "trainer.max_steps": 8}
    whole = tiny("fit", **options, **{"trainer.default_root_dir": "whole"})
    killed_after(monkeypatch, tiny, 6, **options)  # saved at 3, logged up to 6
    rest = tiny("fit", "--ckpt_path=last", **options)
    assert Path(rest.trainer.log_dir) == RUN
    for name in ("train_loss", "val_loss", "learning_rate", "train_loss_eval"):
        assert curves(RUN)[name] == curves(whole.trainer.log_dir)[name], name
    assert_same_weights(weights(whole), weights(rest))


@pytest.mark.parametrize("step", [3, 6])  # after both a validation is due; no step follows the second
def test_a_validation_that_was_owed_is_made_up_for(tiny, monkeypatch, step):
    whole = tiny("fit", **{"trainer.default_root_dir": "whole"})

    def interrupted(self, trainer, *args, **kwargs):
        if trainer.global_step == step and not self._received:
            os.kill(os.getpid(), signal.SIGTERM)
        original(self, trainer, *args, **kwargs)

    for hook in ("on_train_batch_end", "on_validation_batch_end"):
        original = getattr(StopOnSignal, hook)
        shutil.rmtree("runs", ignore_errors=True)
        with monkeypatch.context() as patch:
            patch.setattr(StopOnSignal, hook, interrupted)
            with pytest.raises(SystemExit) as leaving:
                tiny("fit")
        assert leaving.value.code == 143
        assert max(step_of(path) for path in FOLDER.iterdir()) == step
        tiny("fit", "--ckpt_path=last")
        found, expected = (json.loads((run / "summary.json").read_text()) for run in (RUN, Path(whole.trainer.log_dir)))
        assert found["val_loss"] == expected["val_loss"]
        if step == 3:
            assert curves(RUN)["val_loss"] == curves(whole.trainer.log_dir)["val_loss"]


def test_a_restart_at_each_step_changes_nothing(tiny, monkeypatch):
    """Checkpoints at every step, on steps with and without validation, log entries over two steps."""
    options = {"trainer.callbacks": OFTEN, "trainer.log_every_n_steps": 2, "model.architecture.dropout": 0.1}
    whole = tiny("fit", **options, **{"trainer.default_root_dir": "whole"})
    killed_after(monkeypatch, tiny, 2, **options)
    for step in (4, 5):
        killed_after(monkeypatch, tiny, step, ckpt_path="last", **options)
    rest = tiny("fit", "--ckpt_path=last", **options)
    assert_same_weights(weights(whole), weights(rest))
    for name in ("train_loss", "val_loss"):
        assert curves(RUN)[name] == curves(whole.trainer.log_dir)[name]
    ours, theirs = (read_checkpoint(run / "checkpoints/best.ckpt") for run in (RUN, Path(whole.trainer.log_dir)))
    assert ours["global_step"] == theirs["global_step"]


def test_dropout_in_a_part_of_the_users_own_resumes_to_the_same_bits(tiny, monkeypatch, tmp_path):
    (tmp_path / "dropping.py").write_text(DROPPING)
    monkeypatch.syspath_prepend(tmp_path)
    options = {"model.architecture.mlp": "dropping.MLP"}
    whole = tiny("fit", **options, **{"trainer.default_root_dir": "whole"})
    killed_after(monkeypatch, tiny, 5, **options)  # saved at 3
    assert_same_weights(weights(whole), weights(tiny("fit", "--ckpt_path=last", **options)))


@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
def test_rounding_goes_on_to_the_same_bits(tiny, monkeypatch, precision):
    path = "lightning_llm.optim.AdamW"
    options = {"model.optimizer.class_path": path, "model.optimizer.init_args.state_dtype": "bfloat16"}
    options |= {"trainer.precision": precision}
    whole = tiny("fit", **options, **{"trainer.default_root_dir": "whole"})
    killed_after(monkeypatch, tiny, 5, **options)  # saved at 3
    rest = tiny("fit", "--ckpt_path=last", **options)
    assert_same_weights(weights(whole), weights(rest))
    ours, theirs = (run.trainer.optimizers[0].state_dict()["state"] for run in (whole, rest))
    for number, own in ours.items():
        assert own["step"] == theirs[number]["step"] == 6
        for average in ("exp_avg", "exp_avg_sq"):
            assert own[average].dtype == torch.bfloat16
            assert torch.equal(own[average], theirs[number][average])


@pytest.mark.parametrize("damage", ["cut", "empty", "flipped bit", "other bytes"])
def test_a_damaged_newest_checkpoint_gives_way_to_the_one_before(tiny, capsys, damage):
    whole = tiny("fit")
    newest, before = FOLDER / "step-00000006.ckpt", FOLDER / "step-00000003.ckpt"
    content = bytearray(newest.read_bytes())
    if damage == "flipped bit":
        content[len(content) // 2] ^= 1
    newest.unlink()  # best.ckpt is the same file
    newest.write_bytes(
        {"cut": content[: len(content) // 2], "empty": b"", "flipped bit": content, "other bytes": b"x" * 5000}[damage]
    )
    capsys.readouterr()
    rest = tiny("fit", "--ckpt_path=last")
    said = capsys.readouterr()
    assert f"checkpoint {newest} is truncated or damaged: using {before}, the one before it" in said.err
    assert "Resumed from step 3" in said.out
    assert_same_weights(weights(whole), weights(rest))
    assert (FOLDER / "step-00000006.aside").exists()
    assert [path.name for path in step_files(FOLDER)] == ["step-00000003.ckpt", "step-00000006.ckpt"]


def test_when_all_are_damaged_nothing_starts_afresh(finished, tiny, error_line):
    for path in step_files(FOLDER):
        cut(path)
    with pytest.raises(SystemExit) as leaving:
        tiny("fit", "--ckpt_path=last")
    assert leaving.value.code == 2
    assert "every checkpoint of runs/run/version_0 is truncated or damaged" in error_line()


def test_another_text_is_refused(finished, tiny, tmp_path, error_line, text_file):
    other = tmp_path / "other.txt"
    other.write_text(text_file.read_text()[::-1])
    with pytest.raises(SystemExit):
        tiny("fit", "--ckpt_path=last", **{"data.path": str(other)})
    assert "was trained on token store" in error_line()


def test_evaluating_leaves_the_curves_alone(finished):
    before = curves(RUN)["val_loss"]
    cli_main(["validate", "--ckpt_path", str(RUN)])
    assert curves(RUN)["val_loss"] == before
    assert [path.name for path in RUN.parent.iterdir()] == ["version_0"]


def slurm(monkeypatch, tmp_path, restarts=0):
    scontrol = tmp_path / "bin" / "scontrol"
    scontrol.parent.mkdir(exist_ok=True)
    scontrol.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/scontrol.log\n')
    scontrol.chmod(scontrol.stat().st_mode | stat.S_IEXEC)
    job = {"NTASKS": 1, "JOB_NAME": "train", "JOB_ID": 17, "PROCID": 0, "LOCALID": 0, "NODEID": 0, "NODELIST": "here"}
    for name, value in {**job, "NTASKS_PER_NODE": 1, "RESTART_COUNT": restarts}.items():
        monkeypatch.setenv(f"SLURM_{name}", str(value))
    monkeypatch.setenv("PATH", f"{scontrol.parent}:{os.environ['PATH']}")


@pytest.mark.filterwarnings("ignore:The `srun` command is available")
@pytest.mark.parametrize(("number", "requeued"), [(signal.SIGUSR1, True), (signal.SIGTERM, False)])
def test_slurm_gets_its_job_back_and_it_goes_on(tiny, monkeypatch, tmp_path, capsys, number, requeued):
    with monkeypatch.context() as patch:
        whole = weights(tiny("fit", **{"trainer.default_root_dir": "whole"}))
        slurm(patch, tmp_path)
        original = StopOnSignal.on_train_batch_end

        def sending(self, trainer, *args, **kwargs):
            if trainer.global_step == 4:
                os.kill(os.getpid(), number)
            original(self, trainer, *args, **kwargs)

        with monkeypatch.context() as inner:
            inner.setattr(StopOnSignal, "on_train_batch_end", sending)
            with pytest.raises(SystemExit) as leaving:
                tiny("fit")
        assert leaving.value.code == 128 + number
        assert (FOLDER / "step-00000004.ckpt").exists()
        assert not list(Path().rglob("hpc_ckpt*"))  # Lightning's own handler saves within a step
        log = tmp_path / "scontrol.log"
        assert (log.read_text() if log.exists() else "") == ("requeue 17\n" if requeued else "")
        slurm(patch, tmp_path, restarts=1)
        capsys.readouterr()
        rest = tiny("fit")  # the same command, as SLURM gives it
    assert "Resumed from step 4" in capsys.readouterr().out
    assert_same_weights(whole, weights(rest))
    assert signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler)


@pytest.mark.filterwarnings("ignore:The `srun` command is available")
def test_another_job_does_not_take_the_run_over(finished, tiny, monkeypatch, tmp_path, capsys):
    with monkeypatch.context() as patch:
        slurm(patch, tmp_path, restarts=1)
        cli = tiny("fit")
    assert cli.trainer.log_dir.endswith("version_1")
    assert "starting from scratch" in capsys.readouterr().err
