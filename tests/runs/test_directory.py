"""A run has a folder of its own, which it alone writes to; only names that it gives its checkpoints have a step."""

import pickle
from pathlib import Path

import pytest
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from lightning_llm import LanguageModel, TokenDataModule
from lightning_llm.checkpoints.reading import read_checkpoint
from lightning_llm.runs import directory
from lightning_llm.runs.directory import (
    RunDirectory,
    claim,
    start_number_of,
    step_files,
    step_name,
    step_of,
    take_start_number,
)
from lightning_llm.training.trainer import Trainer


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
    assert [start_number_of(run) for run in runs] == [1, 2]
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
    assert start_number_of(trainer.run_dir) == 2
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


@pytest.mark.parametrize(
    "name", ["start_number", "job", "config.yaml", "hparams.yaml", "checkpoints", "memory/report.png"]
)
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
    (tmp_path / "run" / "start_number").symlink_to(tmp_path / "precious")
    take_start_number(tmp_path / "run")
    assert (tmp_path / "precious").read_text() == "kept"
    assert start_number_of(tmp_path / "run") == 1


def test_numbers_of_others_in_names_are_passed_over(tmp_path):
    for name in ("version_7", "version_²", "version_٣", "version_", "version_1_0", f"version_{'9' * 200}"):
        (tmp_path / name).mkdir()
    assert claim(tmp_path).name == "version_8"


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
    assert {read_checkpoint(path)["callbacks"]["RunCheckpoints"]["start_number"] for path in files} == {1}


def test_fast_dev_run_leaves_nothing(train, tmp_path):
    trainer = train(fast_dev_run=True)
    assert trainer.run_dir is None
    assert names(tmp_path) <= {"stores"}


@pytest.mark.parametrize("names", [("../..", None), ("run", "../../../x"), ("/elsewhere", None), ("run", "/elsewhere")])
def test_a_name_that_leads_out_of_the_root_is_refused(tmp_path, names):
    with pytest.raises(ValueError, match=f"points outside {tmp_path}: give the name of a folder in it"):
        RunDirectory(tmp_path, *names)
    assert RunDirectory(tmp_path, "family/of..runs").root == tmp_path


@pytest.mark.parametrize("content", ["-1", "9" * 5000, "\udcff", "1e9", ""])
def test_a_turn_that_is_no_number_is_none(tmp_path, content):
    runs = [tmp_path / "version_0", tmp_path / "version_1"]
    for run in runs:
        run.mkdir()
    (runs[0] / "start_number").write_text(content, errors="surrogateescape")
    take_start_number(runs[1])
    assert start_number_of(runs[1]) >= 0


@pytest.mark.parametrize("name", ["hparams.yaml", "status.json", "config.yaml"])
def test_a_folder_in_place_of_a_file_is_reported_before_anything_is_written(tmp_path, name):
    (tmp_path / name).mkdir()
    directory = RunDirectory("runs")
    directory.take(tmp_path)
    with pytest.raises(ValueError, match=f"{name} is a folder, expected a file"):
        directory.open()
    assert names(tmp_path) == {name}


@pytest.mark.parametrize("step", [0, 7, 10**8])
def test_a_step_is_read_from_the_name_that_it_gets(step):
    assert step_of(Path("checkpoints", step_name(step))) == step


@pytest.mark.parametrize("name", ["best.ckpt", "step-7.ckpt", "step-0000000².ckpt", "epoch=0-step=7.ckpt"])
def test_other_names_have_none(name):
    assert step_of(Path(name)) == -1


def test_the_files_of_a_folder_are_in_the_order_of_their_steps(tmp_path):
    for name in (step_name(10**8), step_name(3), "step-9.ckpt", "best.ckpt", ".step-00000004.ckpt.tmp"):
        (tmp_path / name).touch()
    assert [path.name for path in step_files(tmp_path)] == [step_name(3), step_name(10**8)]
