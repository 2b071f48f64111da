"""Which runs are of no use, and that nothing else is ever removed."""

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_llm.__main__ import main
from lightning_llm.runs.list import is_useless
from lightning_llm.runs.lock import LOCK, RunLock
from lightning_llm.runs.status import RUNNING
from tests.tiny_run import killed_process, listed, lock_held


def change_config(run):
    (run / "config.yaml").unlink()
    (run / "events.out.tfevents.1.host").write_text("")


def as_running(run, **facts):
    (run / "status.json").write_text(json.dumps({"status": RUNNING, **facts}))


def in_a_link(run):
    shutil.move(run.parent, "elsewhere")
    run.parent.symlink_to(Path("elsewhere").resolve())


def alone_in_a_link(run):
    shutil.move(run, "elsewhere")
    run.symlink_to(Path("elsewhere").resolve())


def a_run_inside(run):
    (run / "version_0").mkdir()
    (run / "version_0" / "config.yaml").write_text("trainer: {}\n")


KEPT = {
    "without config.yaml": change_config,
    "finished": lambda run: (run / "summary.json").write_text("{}"),
    "a damaged result": lambda run: (run / "summary.json").write_text("{"),
    "a damaged status": lambda run: (run / "status.json").write_text("{"),
    "no status": lambda run: (run / "status.json").unlink(),
    "still trains": lambda run: as_running(run, host=socket.gethostname(), process=os.getpid()),
    "trains on another host": lambda run: as_running(run, host="elsewhere", process=1),
    "another run inside": a_run_inside,
    "behind a link": in_a_link,
    "a link": alone_in_a_link,
    "a lock that is no file": lambda run: ((run / LOCK).unlink(), os.mkfifo(run / LOCK)),
    "a lock that is a link": lambda run: ((run / LOCK).unlink(), (run / LOCK).symlink_to("/dev/null")),
}


@pytest.mark.parametrize("change", KEPT.values(), ids=KEPT.keys())
def test_what_may_be_of_use_is_kept(make_run, change):
    run = make_run("a/version_0")
    assert listed()["a/version_0"]["removable"]
    change(run)
    assert not listed()["a/version_0"]["removable"]
    assert main(["runs", "clean", "--yes"]) == 0
    assert run.exists()


@pytest.mark.parametrize("name", ["step-00000007.ckpt", "mine.ckpt.aside", "a-folder-of-shards"])
def test_a_checkpoint_of_any_name_is_kept(make_run, name):
    run = make_run("a/version_0", checkpoint=f"checkpoints/{name}")
    make_run("a/version_1", checkpoint="checkpoints/.step-00000007.ckpt.1.tmp")  # of a kill while it was written
    make_run("a/version_2", checkpoint="of_my_own/last.ckpt")
    assert [row["removable"] for row in listed().values()] == [False, True, False]
    assert main(["runs", "clean", "--yes"]) == 0
    assert run.is_dir()


def test_a_folder_that_cannot_be_read_may_hold_a_checkpoint(make_run, obeying_permissions):
    run = make_run("a/version_0")
    (run / "mine").mkdir(mode=0)
    assert not listed()["a/version_0"]["removable"]


def test_a_run_that_diverged_in_an_experiment_is_a_result(make_run):
    status = json.dumps({"status": "diverged", "step": 4, "reason": "the loss is nan"})
    run = make_run("a/version_0")
    (run / "status.json").write_text(status)
    assert is_useless(run)
    (run.parents[1] / "plan.json").write_text("{}")
    assert not is_useless(run)


def test_killed_runs_are_removable(make_run):
    as_running(make_run("a/version_0"), host=socket.gethostname(), process=killed_process())
    row = listed()["a/version_0"]
    assert (row["state"], row["removable"]) == ("killed", True)


def test_a_held_lock_keeps_a_run(make_run, monkeypatch, error_line):
    run = make_run("a/version_0")
    with lock_held(run) as holder:
        row = listed()["a/version_0"]
        assert (row["state"], row["removable"]) == ("trains", False)
        assert main(["runs", "clean", "--yes"]) == 0
        assert run.is_dir()
        monkeypatch.setattr(
            "lightning_llm.runs.list.is_locked", lambda folder: False
        )  # it was locked after it was listed
        monkeypatch.setattr("lightning_llm.runs.lock.WAIT_S", 0.0)
        assert main(["runs", "clean", "--yes"]) == 2
        assert f"process {holder} on {socket.gethostname()} trains in {run.resolve()}" in error_line()
        assert run.is_dir()
    assert main(["runs", "clean", "--yes"]) == 0
    assert not run.exists()


def test_a_lock_of_this_process_is_not_lost_by_looking(make_run):
    run = make_run("a/version_0")
    lock = RunLock(run).acquire()
    assert not listed()["a/version_0"]["removable"]
    code = f"import sys\nfrom pathlib import Path\n{IS_LOCKED}\nsys.exit(0 if is_locked(Path({str(run)!r})) else 1)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
    lock.release()


IS_LOCKED = "from lightning_llm.runs.lock import is_locked"


def test_a_run_that_was_resumed_meanwhile_is_kept(make_run, monkeypatch, error_line):
    run = make_run("a/version_0")
    acquire = RunLock.acquire

    def after_a_checkpoint(lock):
        (run / "checkpoints").mkdir()
        (run / "checkpoints" / "step-00000008.ckpt").touch()
        return acquire(lock)

    monkeypatch.setattr(RunLock, "acquire", after_a_checkpoint)
    assert main(["runs", "clean", "--yes"]) == 2
    assert "was resumed since it was listed: it is kept" in error_line()
    assert run.is_dir()


def test_nothing_outside_the_folder_is_removed(make_run):
    make_run("a/version_0")
    other = make_run("b/version_0")
    assert main(["runs", "clean", "runs/a", "--yes"]) == 0
    assert not Path("runs/a/version_0").exists()
    assert other.is_dir()
    Path("runs/b/version_0/outside").symlink_to(Path.cwd() / "kept")
    Path("kept").mkdir()
    Path("kept/file").touch()
    assert main(["runs", "clean", str(other), "--yes"]) == 0
    assert not other.exists()
    assert Path("kept/file").is_file()
