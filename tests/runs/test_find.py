"""Which runs a word means, which of them is the newest, whatever the clock says, and what a run leaves behind."""

import os
import socket
from pathlib import Path

import pytest

from lightning_llm.cli.training_output import TrainingSummary
from lightning_llm.runs.directory import CHECKPOINTS, start_number_of, take_start_number
from lightning_llm.runs.event_files import EVENT_FILES
from lightning_llm.runs.find import CONFIG, find_runs, newest_run, run_folders
from tests.runs.test_names import changed, found, make
from tests.tiny_run import lock_held


@pytest.fixture
def make_run(tmp_path):
    """``make_run("a/version_0", written_s=100)``: a run with one checkpoint of that time, with a start number."""

    def make(name, *, written_s):
        run = tmp_path / name
        (run / CHECKPOINTS).mkdir(parents=True)
        (run / CONFIG).write_text("trainer: {}\n")
        file = run / CHECKPOINTS / "step-00000001.ckpt"
        file.write_bytes(b"")
        os.utime(file, (written_s, written_s))
        take_start_number(run)
        return run

    return make


def test_within_an_experiment_the_one_started_last_is_newest_whatever_the_clock(make_run, tmp_path):
    older = make_run("a/version_0", written_s=9000)  # its clock was ahead
    newer = make_run("a/version_1", written_s=1000)
    assert start_number_of(newer) == start_number_of(older) + 1
    assert newest_run(tmp_path) == newer
    take_start_number(older)  # it is resumed
    assert newest_run(tmp_path) == older


def test_between_experiments_the_file_written_last_decides(make_run, tmp_path):
    make_run("a/version_0", written_s=1000)
    make_run("a/version_1", written_s=1001)
    other = make_run("b/version_0", written_s=2000)
    assert newest_run(tmp_path) == other


def test_a_run_without_a_turn_comes_before_those_with_one(make_run, tmp_path):
    old = make_run("a/version_0", written_s=9000)
    (old / "start_number").unlink()
    new = make_run("a/version_1", written_s=1000)
    assert newest_run(tmp_path) == new


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
    with lock_held(run) as holder:
        before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
        monkeypatch.setattr("lightning_llm.runs.lock.WAIT_S", 0.0)
        with pytest.raises(SystemExit) as leaving:
            tiny("fit", "--ckpt_path=last")
        assert leaving.value.code == 2
        assert f"process {holder} on {socket.gethostname()} trains in {run}" in error_line()
        assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before
        assert tiny("fit").trainer.run_dir == run.with_name("version_1")  # a run of its own is free to start
    assert tiny("fit", f"--ckpt_path={run}").trainer.run_dir == run  # nothing is left to clear up


def test_the_folder_is_kept_until_the_results_are_written(tiny, monkeypatch):
    held, finish = [], TrainingSummary.finish

    def noting(self, trainer, model, data):
        held.append(trainer.run_directory.is_open)
        finish(self, trainer, model, data)

    monkeypatch.setattr(TrainingSummary, "finish", noting)
    cli = tiny("fit", **{"trainer.max_steps": 3})
    assert held == [True]
    assert not cli.trainer.run_directory.is_open


def test_folders_are_searched_two_levels_down_in_the_order_of_numbers(tmp_path):
    for number in (0, 10, 2):
        make(tmp_path / "runs" / "a" / f"version_{number}", changed(seed_everything=number))
    make(tmp_path / "runs" / "b" / "version_0", events=False)
    said = []
    runs_found = find_runs(
        [str(tmp_path / "runs"), str(tmp_path / "runs" / "a")], EVENT_FILES, "no events", said.append
    )
    assert [run.path.name for run in runs_found] == ["version_0", "version_2", "version_10"]
    assert said == [f"left out {tmp_path / 'runs' / 'b' / 'version_0'}: no events"]


def test_runs_of_experiments_streams_and_ladders_are_found_where_they_are_wanted(tmp_path):
    runs = tmp_path / "runs"
    make(runs / "a" / "version_0")
    experiments = [runs / "plain", runs / "stream" / "ideas" / "1-gelu", runs / "ladder" / "sizes" / "small"]
    for folder in experiments:
        make(folder / "runs" / "gelu,seed=0")
        (folder / "plan.json").write_text("{}")
    (runs / "stream" / "stream.json").write_text("{}")
    (runs / "ladder" / "ladder.json").write_text("{}")
    make(runs / "unmarked" / "runs" / "gelu,seed=0")
    inner = {folder / "runs" / "gelu,seed=0" for folder in experiments}
    assert set(run_folders(str(runs), with_experiments=True)) == {runs / "a" / "version_0", *inner}
    assert run_folders(str(runs)) == [runs / "a" / "version_0"]  # compare and runs take each experiment alone
    for folder in (runs / "plain", runs / "stream", runs / "ladder"):
        deep = run_folders(str(folder), with_experiments=True)
        assert len(deep) == 1
        assert deep[0] in inner


def test_what_is_no_run_is_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    bare = make(tmp_path / "a" / "version_0", events=False)
    for folder, says in (
        (tmp_path / "nowhere", "no such directory"),
        (tmp_path / "empty", "no run in it"),
        (bare, "no events"),
        (bare.parent, "no events"),
    ):
        with pytest.raises(ValueError, match=says) as error:
            found(folder)
        assert str(folder) in str(error.value)


def test_a_config_that_is_none_is_named(tmp_path):
    run = make(tmp_path / "a" / "version_0")
    for content, says in (("a: [", "is not YAML"), ("- a", "must have options by name")):
        Path(run, "config.yaml").write_text(content)
        with pytest.raises(ValueError, match=says):
            found(run)


def test_folders_are_sorted_by_the_numbers_in_their_names(tmp_path):
    names = ["version_²", "version_2", "version_10", "1²2", "version_x"]
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").write_text("seed_everything: 1\n")
    folders = [path.name for path in run_folders(str(tmp_path))]
    assert sorted(folders) == sorted(names)
    assert folders.index("version_2") < folders.index("version_10")
