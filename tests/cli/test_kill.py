"""A training process that is killed again and again ends with the weights and the curve of one that never was."""

import os
import random
import shutil
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import pytest

from benchmarks import fault_stage
from benchmarks.digest import digest_of
from lightning_llm.__main__ import SPINS
from lightning_llm.checkpoints.reading import read_checkpoint
from lightning_llm.runs.directory import step_files
from tests.docs.shell import KILLED, PROCESS_ID, WHOLE, Shell
from tests.patience import HANGS_S
from tests.tiny_run import curves

STEPS = 64
OPENMP = ("OMP_NUM_THREADS", "GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
SAVING = "{every_n_steps: 1, asynchronous: false}"


def changed(text, *changes):
    """A config with other texts in it; each is there."""
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    return text


CONFIG = changed(
    fault_stage.CONFIG,
    (f"{{every_n_steps: {fault_stage.SAVED_EVERY}}}", SAVING),
    (f"max_steps: {fault_stage.STEPS}", f"max_steps: {STEPS}"),
)


@pytest.fixture(scope="module")
def shell():
    """Its commands have as many threads as those of a user's shell."""
    shell = Shell(WHOLE, threads={"GOMP_SPINCOUNT": SPINS, "OPENBLAS_NUM_THREADS": "1"})  # NumPy's, for the fork alone
    yield shell
    shell.close()


@pytest.fixture
def start(shell):
    """``start(folder, word, …)``: a run, forked from a process that has imported everything."""

    def begin(folder, *words):
        environment = {name: value for name, value in os.environ.items() if name not in OPENMP}
        environment |= {**shell.environment, PROCESS_ID: str(folder / "process")}
        (folder / "process").unlink(missing_ok=True)
        command = [shell.python, "-m", "lightning_llm", "fit", "--config", "tiny.yaml", *words]
        with (folder / "out.txt").open("a") as out:
            return subprocess.Popen(command, cwd=folder, env=environment, stdout=out, stderr=out)

    return begin


def send(number, folder):
    """Send a signal to the process that trains; the one that was started is its client."""
    os.kill(int((folder / "process").read_text()), number)


def names(folder):
    return {path.name for path in folder.iterdir()} if folder.is_dir() else set()


def kill_when(process, run, folder, before, moment, delay_s):
    """Kills once ``moment`` holds of the new names in ``folder`` and a delay has passed; False if it ended first."""
    deadline = time.monotonic() + HANGS_S
    while process.poll() is None:
        assert time.monotonic() < deadline, "no progress"
        if moment(names(folder) - before):
            until = time.monotonic() + delay_s  # spun away: sleeping is coarser than a step
            while time.monotonic() < until:
                pass
            with suppress(ProcessLookupError):
                send(signal.SIGKILL, run)
            return process.wait() == KILLED
    return False


def newest_step(files):
    return int(files[-1].stem.split("-")[1])


def being_written(folder):
    """The step of the checkpoint that a killed process left half written, if it did."""
    return max((int(name.split("-")[1][:8]) for name in names(folder) if name.startswith(".step-")), default=None)


@pytest.mark.slow
@pytest.mark.parametrize(("asynchronous", "wanted_kills"), [(False, 10), (True, 3)])  # benchmarks.faults has hundreds
def test_kills_change_nothing(start, tmp_path, text_file, asynchronous, wanted_kills):
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
        shutil.copy(text_file, tmp_path / name / "text.txt")
        (tmp_path / name / "tiny.yaml").write_text(CONFIG)
    assert start(tmp_path / "whole").wait() == 0
    if asynchronous:  # the same bits as those of a run that waits for its files
        config = changed(CONFIG, ("asynchronous: false", "asynchronous: true"))
        (tmp_path / "killed" / "tiny.yaml").write_text(config)

    folder, rng = tmp_path / "killed", random.Random(0)
    checkpoints = folder / "runs/tiny/version_0/checkpoints"
    kills, while_saving, words = 0, 0, ()
    for _ in range(10 * wanted_kills):
        if kills == wanted_kills:
            break
        before = names(checkpoints)
        newest = step_files(checkpoints)[-1:] if checkpoints.is_dir() else []
        in_saving, wanted = rng.random() < 0.5, rng.randint(1, 3)

        def seen(new, in_saving=in_saving, wanted=wanted):
            return any(name.endswith(".tmp") for name in new) if in_saving else len(new) >= wanted

        process = start(folder, *words)
        is_killed = kill_when(process, folder, checkpoints, before, seen, rng.random() * 0.003)
        assert is_killed, (folder / "out.txt").read_text()
        kills += 1
        lost = being_written(checkpoints)
        while_saving += lost is not None
        if lost is not None and newest and lost > 1 + newest_step(newest):  # it loses no more than that one
            assert newest_step(step_files(checkpoints)) == lost - 1
        if step_files(checkpoints):  # else: killed in its first saving
            assert not newest or step_files(checkpoints)[-1].name >= newest[0].name
            words = ("--ckpt_path", "last")
        else:
            shutil.rmtree(folder / "runs")
    assert kills == wanted_kills
    assert while_saving >= 1
    assert start(folder, *words).wait() == 0, (folder / "out.txt").read_text()

    said = (folder / "out.txt").read_text()
    assert said.count("Resumed from step ") >= wanted_kills // 2
    assert names(folder / "runs/tiny") == {"version_0"}
    assert not any(name.endswith(".tmp") for name in names(checkpoints))
    other = tmp_path / "whole/runs/tiny/version_0"
    for name in (f"step-{STEPS:08d}.ckpt", "best.ckpt"):
        ours, theirs = (read_checkpoint(run / "checkpoints" / name) for run in (checkpoints.parent, other))
        assert ours["global_step"] == theirs["global_step"]
        for part in ("state_dict", "optimizer_states", "lr_schedulers"):
            assert digest_of(ours[part]) == digest_of(theirs[part]), part
    for name in ("train_loss", "val_loss", "learning_rate"):
        assert curves(checkpoints.parent)[name] == curves(other)[name]


@pytest.mark.slow
def test_one_process_goes_on_as_two_and_sigterm_ends_both(start, tmp_path, text_file):
    """The same tokens in each step whatever the processes and micro-batches: the curve agrees up to rounding."""
    shutil.copy(text_file, tmp_path / "text.txt")
    (tmp_path / "tiny.yaml").write_text(
        changed(
            CONFIG,
            ("dropout: 0.1}", "dropout: 0.0}\n  schedule: {class_path: lightning_llm.optim.Constant}"),
            ("  accelerator: cpu\n", "  accelerator: cpu\n  precision: 32-true\n"),
        )
    )
    assert start(tmp_path).wait() == 0
    whole, run = (Path(tmp_path / "runs/tiny" / f"version_{n}") for n in (0, 1))
    assert start(tmp_path, "--trainer.max_steps=12").wait() == 0
    two = ("--trainer.devices=2", "--trainer.strategy=ddp", "--data.micro_batch_size=2")
    process = start(tmp_path, "--ckpt_path=last", *two)
    seen = names(run / "checkpoints")
    deadline = time.monotonic() + HANGS_S
    while process.poll() is None and len(names(run / "checkpoints") - seen) < 3:
        assert time.monotonic() < deadline, "no progress"
    send(signal.SIGTERM, tmp_path)  # the first process alone: both must stop after the same step
    assert process.wait(timeout=HANGS_S) == 143, (tmp_path / "out.txt").read_text()
    assert start(tmp_path, "--ckpt_path=last", "--data.num_workers=1").wait() == 0
    said = (tmp_path / "out.txt").read_text()
    assert "trainer.devices: auto -> 2" in said
    ours, theirs = curves(run)["val_loss"], curves(whole)["val_loss"]
    assert [step for step, _ in ours] == [step for step, _ in theirs]
    assert [value for _, value in ours] == pytest.approx([value for _, value in theirs], rel=1e-4)
