"""Random faults on a tiny run: each kind once, and proof that the bench sees what it is for."""

import json
import sys
import threading

import pytest
import torch
from torch.utils.tensorboard import SummaryWriter

from benchmarks import fault_process
from benchmarks.__main__ import main
from benchmarks.fault_process import Ended
from benchmarks.fault_stage import CURVES, Stage
from benchmarks.faults import ROUNDS
from lightning_llm.checkpoints.archives import write_atomically

LATE, IN_TRAIN = 5, 2  # seeds: of a NaN when something is saved; of a bit in train.bin before the run
LOSES_A_STEP = """
from lightning_llm.data.datamodule import TokenDataModule
steps = lambda trainer: max(0, trainer.global_step - (trainer.ckpt_path is not None))
TokenDataModule.position = property(lambda self: steps(self.trainer))
"""
TAKES_ANYTHING = """
from lightning_llm.data.token_store import TokenStore
TokenStore._check = lambda self: None
"""


def rounds(tmp_path, count, *variants, seed=0):
    words = ["faults", "--rounds", str(count), "--seed", str(seed), "--json", str(tmp_path / "rows.json")]
    status = main([*words, *(["--variants", *variants] if variants else [])])
    return status, {row["variant"]: row for row in json.loads((tmp_path / "rows.json").read_text())["rows"]}


@pytest.fixture
def broken(monkeypatch, tmp_path):
    """``broken(code)``: the code runs in every training process before its run begins."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def spoil(code):
        (tmp_path / "spoil").mkdir()
        (tmp_path / "spoil/sitecustomize.py").write_text(
            "import benchmarks.fault_process as process\n"
            "inject = process.inject\n"
            "def spoilt(*args):\n"
            f"    exec({code!r}, {{}})\n"
            "    inject(*args)\n"
            "process.inject = spoilt\n"
        )
        monkeypatch.syspath_prepend(str(tmp_path / "spoil"))

    return spoil


@pytest.mark.slow
def test_every_fault_is_survived(tmp_path, capsys):
    status, rows = rounds(tmp_path, len(ROUNDS))
    error = capsys.readouterr().err
    assert status == 0, error
    assert rows.keys() == ROUNDS.keys()
    for name, row in rows.items():
        assert (row["rounds"], row["lost_steps"], row["wrong"]) == (1, 0, 0), name
        assert row["injected"] >= 1
    assert sum(row["resumed"] for row in rows.values()) >= len(ROUNDS) / 2
    assert rows["nan batch"]["refused"] == rows["truncated checkpoint"]["refused"] == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "variant", "seed", "says"),
    [
        (LOSES_A_STEP, "nan batch", LATE, "wrong result: state_dict differs"),
        (TAKES_ANYTHING, "flipped tokens", IN_TRAIN, "run 1: status 0 and no message"),
    ],
)
def test_a_broken_product_is_found(broken, tmp_path, capsys, code, variant, seed, says):
    broken(code)
    status, rows = rounds(tmp_path, 1, variant, seed=seed)
    assert status == 2
    assert rows[variant]["wrong"] == 1
    error = " ".join(capsys.readouterr().err.split())
    assert says in error
    assert f"seed {seed}, {variant}" in error
    kept = next(tmp_path.glob(f"bench-faults-*/round-{seed}"))
    assert str(kept) in error.replace(" ", "")
    assert (kept / "run-1-0.txt").exists()


class Scripted:
    """In place of the process that forks: ends runs as told."""

    def __init__(self, *ended):
        self.ended, self.asked = list(ended), []

    def __call__(self, children, time_limit_s):
        self.asked.append(children)
        return [self.ended.pop(0) for _ in children]


def ended(status=0, out="", error="", notes=()):
    return Ended(status, 1.0, out, error, list(notes))


def stage(tmp_path, *script, processes=1):
    (tmp_path / "text.txt").write_text("text")
    return Stage(Scripted(*script), tmp_path / "round", tmp_path, processes)


def a_run(tmp_path, weight=1.0, losses=(3.0, 2.0), best=12, left=None):
    """A folder with what a run leaves, in place of one that was trained."""
    checkpoints = tmp_path / "round/runs/tiny/version_0/checkpoints"
    checkpoints.mkdir(parents=True)
    for name, step in (("step-00000012.ckpt", 12), ("best.ckpt", best)):
        content = {"state_dict": {"w": torch.tensor([weight])}, "optimizer_states": [], "lr_schedulers": []}
        write_atomically({"global_step": step, **content}, checkpoints / name)
    with SummaryWriter(checkpoints.parent) as events:
        for name in CURVES:
            for step, loss in enumerate(losses):
                events.add_scalar(name, loss, step)
    if left:
        (checkpoints / left).touch()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({}, None),
        ({"weight": 1.0 + 2**-23}, "wrong result: state_dict differs"),
        ({"losses": (3.0, 2.5)}, "wrong curve: train_loss"),
        ({"losses": (3.0,)}, "wrong curve: val_loss"),
        ({"best": 8}, "wrong result: the step of best.ckpt differs: 8 instead of 12"),
        ({"left": ".step-00000012.ckpt.1.tmp"}, "left behind: .step-00000012.ckpt.1.tmp"),
    ],
)
def test_what_differs_from_an_undisturbed_run_is_found(tmp_path, changes, says):
    played = []
    for name, made in (("undisturbed", {}), ("disturbed", changes)):
        (tmp_path / name).mkdir()
        played.append(stage(tmp_path / name))
        a_run(tmp_path / name, **made)
    played[1].compare(played[0].truth())
    assert bool(played[1].problems) is (says is not None)
    assert says is None or any(says in problem for problem in played[1].problems), played[1].problems


@pytest.mark.skipif(sys.platform != "linux", reason="threads are counted in /proc")
def test_a_process_with_threads_is_not_forked():
    end = threading.Event()
    thread = threading.Thread(target=end.wait)
    thread.start()
    try:
        with pytest.raises(RuntimeError, match="has several threads"):
            fault_process._check_single_thread()
    finally:
        end.set()
        thread.join()
