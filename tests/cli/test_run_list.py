"""``lightning-llm runs``: what it lists, and that ``clean`` removes what is of no use and nothing else."""

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_llm.__main__ import main
from lightning_llm.cli import run_list
from lightning_llm.io.console import Console
from lightning_llm.runs import directory
from lightning_llm.runs.directory import FAILED, FINISHED, INTERRUPTED, LOCK, RUNNING, RunLock, write_status

HOLDER = """
import sys, time
from pathlib import Path
from lightning_llm.runs.directory import RunLock
RunLock(Path(sys.argv[1])).acquire()
print("held", flush=True)
time.sleep(600)
"""


@pytest.fixture
def make(tmp_path, monkeypatch):
    """``make("a/version_0", status)``: a run below ``runs`` that ended so, without a checkpoint."""
    monkeypatch.chdir(tmp_path)

    def run(name, status=FAILED, *, checkpoint="", summary=None):
        folder = Path("runs", name)
        folder.mkdir(parents=True)
        (folder / "config.yaml").write_text("trainer: {}\n")
        (folder / LOCK).write_text("1 host\n")
        if status is not None:
            write_status(folder, status, step=7, val_loss=2.5, reason="" if status == FINISHED else "why")
        if checkpoint:
            (folder / checkpoint).parent.mkdir(exist_ok=True)
            (folder / checkpoint).write_bytes(b"x" * 5000)
        if summary is not None:
            (folder / "summary.json").write_text(summary)
        return folder

    return run


def listed(*words):
    assert main(["runs", *words, "--json", "list.json"]) == 0
    return {row.pop("run").removeprefix("runs/"): row for row in json.loads(Path("list.json").read_text())}


def test_state_step_loss_size_and_age_are_listed(make, capsys):
    finished = make("a/version_0", FINISHED, checkpoint="checkpoints/step-00000007.ckpt", summary='{"val_loss": 1.5}')
    os.link(finished / "checkpoints/step-00000007.ckpt", finished / "checkpoints/best.ckpt")
    failed = make("a/version_1")
    for path in (failed, *failed.iterdir()):
        os.utime(path, (0, 0))
    rows = listed()
    first, second = rows["a/version_0"], rows["a/version_1"]
    assert (first["state"], first["step"], first["val_loss"], first["removable"]) == (FINISHED, 7, 1.5, False)
    assert (second["state"], second["step"], second["val_loss"], second["removable"]) == ("failed (why)", 7, 2.5, True)
    assert 5000 < first["bytes"] < 60_000
    sizes = [512 * path.lstat().st_blocks for path in finished.rglob("*") if path.name != "best.ckpt"]
    assert first["bytes"] == sum(sizes)  # the best is another name of the newest
    assert first["age_s"] < 600
    assert second["age_s"] > 365 * 86400
    said = capsys.readouterr().out
    row = next(line for line in said.splitlines() if "a/version_1" in line)
    for word in ("failed (why)", "2.5000", "MiB", "days", "yes"):
        assert word in row
    assert "removable (ended without a result and without a checkpoint): lightning-llm runs clean\n" in said


def test_clean_lists_and_removes_only_with_yes(make, capsys):
    make("a/version_0", FINISHED, summary="{}")
    useless = [make("a/version_1"), make("a/version_2", INTERRUPTED)]
    assert main(["runs", "clean"]) == 0
    said = capsys.readouterr().out
    assert [f"would remove {run}: " in said for run in useless] == [True, True]
    assert "2 runs, " in said
    assert said.endswith("would be removed: add --yes to remove them\n")
    assert all(run.is_dir() for run in useless)
    assert main(["runs", "clean", "runs", "--yes"]) == 0
    assert f"removed {useless[0]}: failed (why), " in capsys.readouterr().out
    assert [path.name for path in Path("runs/a").iterdir()] == ["version_0"]
    assert main(["runs", "clean", "--yes"]) == 0
    assert capsys.readouterr().out == "no run is removable: none has ended without a result and without a checkpoint\n"


def killed():
    done = subprocess.Popen([sys.executable, "-c", ""])
    done.wait()
    return done.pid


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
def test_what_may_be_of_use_is_kept(make, change):
    run = make("a/version_0")
    assert listed()["a/version_0"]["removable"]
    change(run)
    assert not listed()["a/version_0"]["removable"]
    assert main(["runs", "clean", "--yes"]) == 0
    assert run.exists()


@pytest.mark.parametrize("name", ["step-00000007.ckpt", "mine.ckpt.aside", "a-folder-of-shards"])
def test_a_checkpoint_of_any_name_is_kept(make, name):
    run = make("a/version_0", checkpoint=f"checkpoints/{name}")
    make("a/version_1", checkpoint="checkpoints/.step-00000007.ckpt.1.tmp")  # of a kill while it was written
    make("a/version_2", checkpoint="of_my_own/last.ckpt")
    assert [row["removable"] for row in listed().values()] == [False, True, False]
    assert main(["runs", "clean", "--yes"]) == 0
    assert run.is_dir()


def test_a_folder_that_cannot_be_read_may_hold_a_checkpoint(make, obeying_permissions):
    run = make("a/version_0")
    (run / "mine").mkdir(mode=0)
    assert not listed()["a/version_0"]["removable"]


def test_killed_runs_are_removable(make):
    as_running(make("a/version_0"), host=socket.gethostname(), process=killed())
    row = listed()["a/version_0"]
    assert (row["state"], row["removable"]) == ("killed", True)


def test_a_held_lock_keeps_a_run(make, monkeypatch, error_line):
    run = make("a/version_0")
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(run)], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout.readline() == "held\n"
        row = listed()["a/version_0"]
        assert (row["state"], row["removable"]) == ("trains", False)
        assert main(["runs", "clean", "--yes"]) == 0
        assert run.is_dir()
        monkeypatch.setattr(run_list, "is_locked", lambda folder: False)  # it was locked after it was listed
        monkeypatch.setattr(directory, "WAIT_S", 0.0)
        assert main(["runs", "clean", "--yes"]) == 2
        assert f"process {holder.pid} on {socket.gethostname()} trains in {run.resolve()}" in error_line()
        assert run.is_dir()
    finally:
        holder.kill()
        holder.communicate()
    assert main(["runs", "clean", "--yes"]) == 0
    assert not run.exists()


def test_a_lock_of_this_process_is_not_lost_by_looking(make):
    run = make("a/version_0")
    lock = RunLock(run).acquire()
    assert not listed()["a/version_0"]["removable"]
    code = f"import sys\nfrom pathlib import Path\n{IS_LOCKED}\nsys.exit(0 if is_locked(Path({str(run)!r})) else 1)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
    lock.release()


IS_LOCKED = "from lightning_llm.runs.directory import is_locked"


def test_a_run_that_was_resumed_meanwhile_is_kept(make, monkeypatch, error_line):
    run = make("a/version_0")
    acquire = RunLock.acquire

    def after_a_checkpoint(lock):
        (run / "checkpoints").mkdir()
        (run / "checkpoints" / "step-00000008.ckpt").touch()
        return acquire(lock)

    monkeypatch.setattr(RunLock, "acquire", after_a_checkpoint)
    assert main(["runs", "clean", "--yes"]) == 2
    assert "was resumed since it was listed: it is kept" in error_line()
    assert run.is_dir()


def test_nothing_outside_the_folder_is_removed(make):
    make("a/version_0")
    other = make("b/version_0")
    assert main(["runs", "clean", "runs/a", "--yes"]) == 0
    assert not Path("runs/a/version_0").exists()
    assert other.is_dir()
    Path("runs/b/version_0/outside").symlink_to(Path.cwd() / "kept")
    Path("kept").mkdir()
    Path("kept/file").touch()
    assert main(["runs", "clean", str(other), "--yes"]) == 0
    assert not other.exists()
    assert Path("kept/file").is_file()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "runs: no such directory; give run directories, or a folder that contains some"),
        (["nowhere"], "nowhere: no such directory"),
        (["clean", "nowhere", "--yes"], "nowhere: no such directory"),
        (["empty"], "empty: no run in it or up to two levels below"),
        (["--yes"], "--yes belongs to lightning-llm runs clean"),
        (["--jason", "x"], "unrecognized arguments: --jason"),
    ],
)
def test_a_mistake_is_one_line(words, says, error_line, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    assert main(["runs", *words]) == 2
    line = error_line()
    assert line.startswith("lightning-llm runs: error: ")
    assert says in line
    assert line.endswith("(docs/dashboard.md)")


def test_a_run_of_the_command_line_is_listed(tiny, capsys):
    tiny("fit", **{"trainer.max_steps": 3})
    summary = json.loads(Path("runs/run/version_0/summary.json").read_text())
    row = listed()["run/version_0"]
    assert (row["state"], row["step"], row["removable"]) == (FINISHED, 3, False)
    assert row["val_loss"] == summary["val_loss"]
    assert main(["runs", "clean", "--yes"]) == 0
    assert Path("runs/run/version_0/checkpoints/best.ckpt").is_file()


def test_no_torch_is_imported(make):
    make("a/version_0")
    code = (
        "import sys; from lightning_llm.__main__ import main; assert main(['runs']) == 0; "
        "assert not {'torch', 'lightning'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_runs_are_named_by_what_differs_in_a_narrow_table(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for number, mlp in enumerate(("relu", "memory_optimized_swiglu")):
        run = Path("runs/a-name-of-a-config") / f"version_{number}"
        run.mkdir(parents=True)
        (run / "config.yaml").write_text(f"model: {{architecture: {{mlp: {mlp}}}}}\n")
        (run / "summary.json").write_text('{"val_loss": 2.0}')
    assert main(["runs"]) == 0
    assert "mlp=memory_optimized_swiglu" in capsys.readouterr().out
    monkeypatch.setattr(run_list, "Console", lambda **options: Console(**{**options, "width": 80}))
    assert main(["runs"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    for word in ("a-name-of-a-config", "version_1", "swiglu", "2.0000", "finished"):
        assert any(word in line for line in lines), word
