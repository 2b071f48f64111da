"""Which run is the newest, whatever the clock says, and what a run leaves behind."""

import os
import random
import socket
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary

from lightning_llm.__main__ import main
from lightning_llm.checkpoints import event_files, run_directory
from lightning_llm.checkpoints.event_files import put_events_before, read_curves
from lightning_llm.checkpoints.run_directory import CHECKPOINTS, take_turn, turn_of
from lightning_llm.cli.report import RunReport
from lightning_llm.cli.run_names import run_folders
from lightning_llm.cli.runs import CONFIG, newest_run
from lightning_llm.io.atomic import link_path

HOLDER = """
import sys, time
from pathlib import Path
from lightning_llm.checkpoints.run_directory import RunLock
RunLock(Path(sys.argv[1])).acquire()
print("held", flush=True)
time.sleep(600)
"""


@pytest.fixture
def make_run(tmp_path):
    """``make_run("a/version_0", written_s=100)``: a run with one checkpoint of that time, which took its turn."""

    def make(name, *, written_s):
        run = tmp_path / name
        (run / CHECKPOINTS).mkdir(parents=True)
        (run / CONFIG).write_text("trainer: {}\n")
        file = run / CHECKPOINTS / "step-00000001.ckpt"
        file.write_bytes(b"")
        os.utime(file, (written_s, written_s))
        take_turn(run)
        return run

    return make


def test_within_an_experiment_the_one_started_last_is_newest_whatever_the_clock(make_run, tmp_path):
    older = make_run("a/version_0", written_s=9000)  # its clock was ahead
    newer = make_run("a/version_1", written_s=1000)
    assert turn_of(newer) == turn_of(older) + 1
    assert newest_run(tmp_path) == newer
    take_turn(older)  # it is resumed
    assert newest_run(tmp_path) == older


def test_between_experiments_the_file_written_last_decides(make_run, tmp_path):
    make_run("a/version_0", written_s=1000)
    make_run("a/version_1", written_s=1001)
    other = make_run("b/version_0", written_s=2000)
    assert newest_run(tmp_path) == other


def test_a_run_without_a_turn_comes_before_those_with_one(make_run, tmp_path):
    old = make_run("a/version_0", written_s=9000)
    (old / "turn").unlink()
    new = make_run("a/version_1", written_s=1000)
    assert newest_run(tmp_path) == new


def events(run):
    return sorted(path.name for path in run.glob("events*"))


def test_event_files_from_a_clock_ahead_get_earlier_names_in_their_order(tmp_path):
    for time, rest in ((5000, "a"), (6000, "b")):
        (tmp_path / f"events.out.tfevents.{time:010d}.host.{rest}").write_text(rest)
    put_events_before(tmp_path, 6000)
    assert events(tmp_path) == ["events.out.tfevents.0000005000.host.a", "events.out.tfevents.0000006000.host.b"]
    put_events_before(tmp_path, 5999)
    assert events(tmp_path) == ["events.out.tfevents.0000005997.host.a", "events.out.tfevents.0000005998.host.b"]
    assert (tmp_path / "events.out.tfevents.0000005997.host.a").read_text() == "a"


def test_event_files_with_no_time_in_their_names_are_left_alone(tmp_path):
    for name in ("abc", "²", "0000006000"):
        (tmp_path / f"events.out.tfevents.{name}.host").touch()
        before = events(tmp_path)
        put_events_before(tmp_path, 6000)
        assert events(tmp_path) == before


def test_folders_are_sorted_by_the_numbers_in_their_names(tmp_path):
    names = ["version_²", "version_2", "version_10", "1²2", "version_x"]
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").write_text("seed_everything: 1\n")
    found = [path.name for path in run_folders(str(tmp_path))]
    assert sorted(found) == sorted(names)
    assert found.index("version_2") < found.index("version_10")


def test_restarts_leave_what_the_last_of_them_has_kept(tmp_path):
    draw, expected = random.Random(3), dict[str, dict[int, float]]()
    with (tmp_path / "events.out.tfevents.1.host").open("wb") as file:
        for number in range(400):
            step = draw.randrange(30)
            if draw.random() < 0.2:
                event = Event(step=step, session_log=SessionLog(status=SessionLog.START))
                expected = {tag: {n: y for n, y in curve.items() if n < step} for tag, curve in expected.items()}
            else:
                tag = draw.choice("ab")
                event = Event(step=step, summary=Summary(value=[Summary.Value(tag=tag, simple_value=number)]))
                expected.setdefault(tag, {})[step] = number
            record = event.SerializeToString()
            file.write(struct.pack("<Q4x", len(record)) + record + b"\0" * 4)
    curves = read_curves(tmp_path, lambda name: True)
    assert curves == {tag: sorted(curve.items()) for tag, curve in expected.items()}
    assert sum(map(len, curves.values())) > 5


def test_only_the_points_of_wanted_curves_are_limited_to_fewer(tmp_path, monkeypatch):
    monkeypatch.setattr(event_files, "MOST_POINTS", 4)
    with (tmp_path / "events.out.tfevents.1.host").open("wb") as file:
        for step in range(5):
            values = [Summary.Value(tag=tag, simple_value=step) for tag in ("a", "b", "c")[: 3 - step // 4]]
            record = Event(step=step, summary=Summary(value=values)).SerializeToString()
            file.write(struct.pack("<Q4x", len(record)) + record + b"\0" * 4)
    assert read_curves(tmp_path, "c".__eq__) == {"c": [(step, step) for step in range(4)]}
    with pytest.raises(ValueError, match="the curves that are needed have more than 4 points"):
        read_curves(tmp_path, "b".__eq__)


@pytest.mark.parametrize("place", ["events.out.tfevents.1.host", "below/a.tfevents"])
def test_an_event_file_that_is_a_fifo_is_one_line(tmp_path, place, capsys):
    (tmp_path / place).parent.mkdir(exist_ok=True)
    (tmp_path / "config.yaml").write_text("seed_everything: 1\n")
    os.mkfifo(tmp_path / place)
    if place[0] == "e":  # those below are not of the run itself
        with pytest.raises(ValueError, match="is a FIFO, expected a file"):
            read_curves(tmp_path, bool)
    (tmp_path / "events.out.tfevents.0.host").touch()
    assert main(["dashboard", str(tmp_path)]) == 2
    assert f"{tmp_path / place} is a FIFO, expected a file" in capsys.readouterr().err


def test_a_link_to_the_file_that_has_the_name_already_leaves_nothing_beside_it(tmp_path):
    source, target = tmp_path / "step.ckpt", tmp_path / "best.ckpt"
    source.write_text("x")
    for _ in range(2):
        link_path(source, target)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["best.ckpt", "step.ckpt"]
    assert target.samefile(source)


def test_going_on_from_a_finished_run_says_that_nothing_is_left(tiny, capsys):
    first = tiny("fit")
    summary = Path(first.trainer.log_dir, "summary.json").read_text()
    capsys.readouterr()
    again = tiny("fit", "--ckpt_path=last")
    assert again.trainer.log_dir == first.trainer.log_dir
    said = " ".join(capsys.readouterr().out.split())
    assert "Resumed from step 6" in said
    assert "no steps are left" in said
    assert '"steps": 6' in Path(first.trainer.log_dir, "summary.json").read_text()
    assert '"steps": 6' in summary


def test_the_best_is_made_up_for_when_the_run_was_killed_before_it_was_kept(tiny):
    best = Path(tiny("fit").trainer.log_dir, "checkpoints", "best.ckpt")
    newest = best.with_name("step-00000006.ckpt")
    assert best.samefile(newest)  # of this run the last validation is the best
    best.unlink()
    tiny("fit", "--ckpt_path=last")
    assert best.samefile(newest)


def test_a_run_without_validation_says_so(tiny, capsys):
    cli = tiny("fit", **{"trainer.limit_val_batches": 0})
    assert "result not validated; 6 steps in" in " ".join(capsys.readouterr().out.split())
    assert '"val_loss": null' in Path(cli.trainer.log_dir, "summary.json").read_text()


def test_a_second_writer_is_refused_before_it_changes_anything(tiny, monkeypatch, error_line):
    run = tiny("fit", **{"trainer.max_steps": 3}).trainer.run_dir
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(run)], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout.readline() == "held\n"
        before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
        monkeypatch.setattr(run_directory, "WAIT_S", 0.0)
        with pytest.raises(SystemExit) as leaving:
            tiny("fit", "--ckpt_path=last")
        assert leaving.value.code == 2
        assert f"process {holder.pid} on {socket.gethostname()} trains in {run}" in error_line()
        assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before
        assert tiny("fit").trainer.run_dir == run.with_name("version_1")  # a run of its own is free to start
    finally:
        holder.kill()
        holder.communicate()
    assert tiny("fit", f"--ckpt_path={run}").trainer.run_dir == run  # nothing is left to clear up


def test_the_folder_is_kept_until_the_results_are_written(tiny, monkeypatch):
    held, finish = [], RunReport.finish

    def noting(self, trainer, model, data):
        held.append(trainer.run_directory.is_open)
        finish(self, trainer, model, data)

    monkeypatch.setattr(RunReport, "finish", noting)
    cli = tiny("fit", **{"trainer.max_steps": 3})
    assert held == [True]
    assert not cli.trainer.run_directory.is_open
