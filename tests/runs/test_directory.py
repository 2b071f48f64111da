"""Each run has a folder of its own, which it alone writes to."""

import errno
import fcntl
import os
import pickle
import signal
import subprocess
import sys

import pytest
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from lightning_llm import LanguageModel, TokenDataModule
from lightning_llm.checkpoints.reading import read_checkpoint
from lightning_llm.runs import directory
from lightning_llm.runs.directory import LOCK, RunDirectory, RunLock, claim, is_locked, take_turn, turn_of
from lightning_llm.training.trainer import Trainer

HOLDER = """
import os, sys, time
from pathlib import Path
from lightning_llm.runs.directory import RunLock
RunLock(Path(sys.argv[1])).acquire()
if os.fork() == 0:  # as workers that load data
    print(os.getpid(), flush=True)
    time.sleep(600)
    os._exit(0)
time.sleep(600)
"""


@pytest.fixture
def train(text_file, tmp_path, monkeypatch):
    """``train(logger=…)``: a run of two steps from Python; returns its Trainer."""
    monkeypatch.chdir(tmp_path)

    def run(**options):
        data = TokenDataModule(path=str(text_file), tokenizer="char", context_length=16, global_batch_size=8)
        model = LanguageModel({"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1})
        basis = {"max_steps": 2, "val_check_interval": 2, "limit_val_batches": 1, "log_every_n_steps": 1}
        trainer = Trainer(
            **{**basis, "accelerator": "cpu", "precision": "32-true", "enable_progress_bar": False, **options}
        )
        trainer.fit(model, data)
        return trainer

    return run


def names(folder):
    return {path.name for path in folder.iterdir()}


@pytest.mark.parametrize("logger", [None, False, "csv"])
def test_a_run_from_python_has_a_folder_of_its_own(train, tmp_path, logger):
    runs = []
    for _ in range(2):
        trainer = train(logger=CSVLogger("logs") if logger == "csv" else logger, default_root_dir="here")
        runs.append(trainer.run_dir)
        assert "step-00000002.ckpt" in names(trainer.run_dir / "checkpoints")
    assert [str(run) for run in runs] == ["here/run/version_0", "here/run/version_1"]
    assert [turn_of(run) for run in runs] == [1, 2]
    assert names(tmp_path / "here") == {"run"}
    assert any(runs[0].glob("events*")) is (logger is None)
    assert (tmp_path / "logs").is_dir() is (logger == "csv")


def test_a_tensorboard_logger_below_the_root_shares_the_folder(train):
    for number in range(2):
        trainer = train(logger=TensorBoardLogger("runs", name="mine"))
        assert str(trainer.run_dir) == trainer.log_dir == f"runs/mine/version_{number}"
        assert list(trainer.run_dir.glob("events*"))
    given = train(logger=TensorBoardLogger("runs", name="mine", version=0))  # another's folder
    assert str(given.run_dir) == "runs/mine/version_2"


def test_a_trainer_trains_twice(train, text_file):
    trainer = train(logger=False)
    trainer.fit_loop.epoch_loop.max_steps = 4
    trainer.fit(trainer.model, trainer.datamodule)
    assert "step-00000004.ckpt" in names(trainer.run_dir / "checkpoints")
    assert turn_of(trainer.run_dir) == 2
    assert not trainer.run_directory.is_open


def test_a_failed_run_gives_its_lock_back(train):
    class Failing(ModelCheckpoint):
        def on_train_start(self, trainer, pl_module):
            self.trainer = trainer
            raise RuntimeError("on purpose")

    callback = Failing()
    with pytest.raises(RuntimeError, match="on purpose"):
        train(callbacks=callback, logger=False)
    assert not callback.trainer.run_directory.is_open


def test_processes_that_see_the_same_next_number_get_a_folder_each(tmp_path, monkeypatch):
    monkeypatch.setattr(directory, "next_number", lambda parent: 0)  # all looked before any had made its folder
    assert [claim(tmp_path / "a").name for _ in range(3)] == ["version_0", "version_1", "version_2"]
    assert claim(tmp_path / "a", "mine").name == "mine"
    assert claim(tmp_path / "a", "mine").name == "version_3"


def test_other_processes_make_no_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(rank_zero_only, "rank", 1)
    run = RunDirectory(tmp_path)
    run.open()
    assert run.path == tmp_path / "run" / "version_0"
    assert not run.is_open
    assert names(tmp_path) == set()


def test_a_root_that_is_no_folder_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"default_root_dir \S+/file: cannot create a run directory in \S+/file/run"):
        RunDirectory(tmp_path / "file").open()


@pytest.fixture
def holder(tmp_path):
    """A process that holds the lock of a folder and has forked a worker."""
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    worker = int(process.stdout.readline())
    yield process, worker
    os.kill(worker, signal.SIGKILL)
    process.kill()
    process.communicate()  # ends when neither has the pipe open any more


def test_the_process_that_trains_there_is_named_and_a_kill_frees_the_folder(tmp_path, holder, monkeypatch):
    process, worker = holder
    monkeypatch.setattr(directory, "WAIT_S", 0.0)
    lock = RunLock(tmp_path)
    with pytest.raises(
        ValueError, match=rf"process {process.pid} on \S+ trains in {tmp_path}: wait until it has ended"
    ):
        lock.acquire()
    process.kill()
    process.wait()
    os.kill(worker, 0)  # it lives, and does not hold the lock
    lock.acquire()
    lock.release()


def test_a_process_that_is_ending_is_waited_for(tmp_path, holder, monkeypatch):
    process, _ = holder
    monkeypatch.setattr(directory.time, "sleep", lambda seconds: (process.kill(), process.wait()))
    lock = RunLock(tmp_path)
    lock.acquire()
    assert (tmp_path / LOCK).read_text().startswith(f"{os.getpid()} ")
    lock.release()


def test_one_process_locks_a_folder_once_at_a_time(tmp_path):
    lock = RunLock(tmp_path)
    for _ in range(2):
        lock.acquire()
        with pytest.raises(ValueError, match=f"process {os.getpid()} on "):
            RunLock(tmp_path).acquire()
        lock.release()


@pytest.mark.parametrize("instead", ["a FIFO", "a link", "a folder"])
def test_a_lock_that_is_no_file_locks_nobody_in(tmp_path, capsys, instead):
    put = {"a FIFO": os.mkfifo, "a link": lambda path: path.symlink_to("other"), "a folder": os.mkdir}[instead]
    put(tmp_path / LOCK)
    for run in (RunLock(tmp_path), RunDirectory(tmp_path)):
        run.take(tmp_path) if isinstance(run, RunDirectory) else None
        with pytest.raises(ValueError, match=f"{LOCK} is {instead}, expected a file"):
            run.acquire() if isinstance(run, RunLock) else run.open()
    assert is_locked(tmp_path) is None
    assert names(tmp_path) == {LOCK}
    assert capsys.readouterr().err == ""  # no word about a file system without locks


@pytest.mark.parametrize("name", ["turn", "job", "config.yaml", "hparams.yaml", "checkpoints", "memory/report.png"])
def test_a_run_whose_links_lead_elsewhere_is_not_resumed(tmp_path, name):
    run, outside = tmp_path / "runs" / "theirs", tmp_path / "precious"
    (run / name).parent.mkdir(parents=True)
    outside.mkdir()
    (run / name).symlink_to(outside / "new" if "." in name else outside)
    resumed = RunDirectory(tmp_path)
    resumed.take(run)
    with pytest.raises(ValueError, match=f"{name} is a link that points outside"):
        resumed.open()
    assert names(run) == {name.partition("/")[0]}  # not even a lock
    assert names(outside) == set()


def test_a_turn_is_written_to_no_other_file(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "precious").write_text("kept")
    (tmp_path / "run" / "turn").symlink_to(tmp_path / "precious")
    take_turn(tmp_path / "run")
    assert (tmp_path / "precious").read_text() == "kept"
    assert turn_of(tmp_path / "run") == 1


def test_numbers_of_others_in_names_are_passed_over(tmp_path):
    for name in ("version_7", "version_²", "version_٣", "version_", "version_1_0", f"version_{'9' * 200}"):
        (tmp_path / name).mkdir()
    assert claim(tmp_path).name == "version_8"


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS])
def test_a_file_system_without_locks_is_named_once(tmp_path, monkeypatch, capsys, number):
    def refuse(*args):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "lockf", refuse)
    run = RunDirectory(tmp_path)
    run.open()
    run.open()
    run.close()
    said = capsys.readouterr().err
    assert said.count(f"{run.path} is on a file system without locks ({os.strerror(number)})") == 1


def test_a_spawned_process_knows_the_folder_and_has_no_lock(tmp_path):
    run = RunDirectory(tmp_path)
    run.open()
    copy = pickle.loads(pickle.dumps(run))
    assert copy.path == run.path
    assert not copy.is_open
    run.close()


def test_the_turn_is_in_every_checkpoint(train):
    trainer = train(callbacks=ModelCheckpoint(), logger=False)
    files = sorted((trainer.run_dir / "checkpoints").glob("*.ckpt"))
    assert [path.name for path in files] == ["best.ckpt", "epoch=0-step=2.ckpt", "step-00000002.ckpt"]
    assert {read_checkpoint(path)["callbacks"]["RunCheckpoints"]["turn"] for path in files} == {1}


def test_fast_dev_run_leaves_nothing(train, tmp_path):
    trainer = train(fast_dev_run=True)
    assert trainer.run_dir is None
    assert names(tmp_path) <= {"stores"}


@pytest.mark.parametrize("names", [("../..", None), ("run", "../../../x"), ("/elsewhere", None), ("run", "/elsewhere")])
def test_a_name_that_leads_out_of_the_root_is_refused(tmp_path, names):
    with pytest.raises(ValueError, match=f"points outside {tmp_path}: give the name of a folder in it"):
        RunDirectory(tmp_path, *names)
    assert RunDirectory(tmp_path, "family/of..runs").root == tmp_path
