"""A user's own ModelCheckpoint beside the run's checkpoints, and which of all is taken."""

from pathlib import Path

import pytest

from lightning_llm.checkpoints.reading import read_checkpoint
from lightning_llm.cli import inference
from lightning_llm.runs.find import find_checkpoint
from lightning_llm.training import run_config

FOLDER = Path("runs/run/version_0/checkpoints")
OURS = {"best.ckpt", "step-00000003.ckpt", "step-00000006.ckpt"}


def keeping(**options):
    """Options for a run with a ModelCheckpoint."""
    return {
        "trainer.callbacks": [{"class_path": "lightning.pytorch.callbacks.ModelCheckpoint", "init_args": options}],
        "model.schedule.class_path": "lightning_llm.optim.Constant",
    }


def names():
    return {path.name for path in FOLDER.iterdir()}


def found(given, said=None):
    return find_checkpoint(given, Path("runs"), (lambda line: None) if said is None else said.append).name


@pytest.fixture
def trained(tiny):
    """A run of 6 steps, with files of the user's own at steps 2, 4 and 6."""
    options = keeping(every_n_train_steps=2, save_top_k=-1)
    tiny("fit", **options)
    return options


def test_both_keep_their_files(tiny):
    tiny("fit", **keeping(every_n_train_steps=2, save_top_k=-1, save_last=True))
    assert names() == {*OURS, *(f"epoch=0-step={step}.ckpt" for step in (2, 4, 6)), "last.ckpt"}
    assert read_checkpoint(FOLDER / "last.ckpt")["global_step"] == 6


def test_the_highest_step_is_the_newest_and_the_runs_own_comes_first(trained, capsys):
    assert found("last") == "step-00000006.ckpt"
    assert found("best") == found("runs/run/version_0") == "best.ckpt"
    (FOLDER / "step-00000006.ckpt").unlink()
    assert found("last") == "epoch=0-step=6.ckpt"
    (FOLDER / "best.ckpt").unlink()
    assert found("best") == found("runs/run/version_0") == "epoch=0-step=6.ckpt"
    (FOLDER / "step-00000003.ckpt").unlink()
    assert found("last") == "epoch=0-step=6.ckpt"  # a run with the user's files alone is found too
    assert inference.run_generate(["runs/run/version_0", "--prompt", "A", "--max-new-tokens", "2"]) == 0


def test_the_best_alone_is_not_the_last(trained):
    for file in FOLDER.glob("*.ckpt"):
        if file.name != "best.ckpt":
            file.unlink()
    assert found("best") == "best.ckpt"
    with pytest.raises(ValueError, match=r"holds best\.ckpt alone, which is not the last state of a run"):
        found("last")


@pytest.mark.parametrize("name", ["step-{:08d}.ckpt", "epoch={}.ckpt"])
def test_where_every_file_is_damaged_all_are_named(tmp_path, name):
    (tmp_path / "checkpoints").mkdir()
    for number in range(20):
        (tmp_path / "checkpoints" / name.format(number)).write_bytes(b"PK\3\4")
    with pytest.raises(ValueError, match=r"every checkpoint of .* is truncated or damaged") as refusal:
        find_checkpoint(str(tmp_path), Path("runs"))
    assert all(name.format(number) in str(refusal.value) for number in range(20))
    (tmp_path / "config.yaml").write_text("model: {}")
    assert run_config._vocab_size_of_run(tmp_path / "config.yaml") is None


def test_a_run_goes_on_from_the_users_file(tiny, trained, capsys):
    (FOLDER / "step-00000006.ckpt").unlink()
    rest = tiny("fit", "--ckpt_path=last", **{**trained, "trainer.max_steps": 8})
    assert rest.trainer.run_dir == FOLDER.parent
    assert f"Resumed from step 6: {FOLDER}/epoch=0-step=6.ckpt" in capsys.readouterr().out


def test_files_that_a_run_sent_back_has_left_behind_are_not_the_newest(tiny, trained):
    tiny("fit", f"--ckpt_path={FOLDER}/step-00000003.ckpt", **{**trained, "trainer.max_steps": 4})
    assert {"epoch=0-step=2.ckpt", "epoch=0-step=6.ckpt"} <= names()  # they are the user's: left alone
    assert found("last") == "step-00000004.ckpt"


def test_what_cannot_be_opened_is_reported_and_passed_over(trained):
    for name in ("step-00000006.ckpt", "epoch=0-step=6.ckpt"):
        (FOLDER / name).unlink()
    (FOLDER / "step-00000006.ckpt").symlink_to("/nowhere.ckpt")
    (FOLDER / "epoch=0-step=6.ckpt").write_bytes(b"half")
    said = []
    assert found("last", said) == "epoch=0-step=4.ckpt"
    assert len(said) == 2
    for line, name in zip(sorted(said), ("epoch=0-step=6", "step-00000006"), strict=True):
        assert line.startswith(
            f"checkpoint {FOLDER}/{name}.ckpt is truncated or damaged: using {FOLDER}/epoch=0-step=4"
        )


def test_a_link_that_leads_nowhere_is_damaged(finished, tiny, capsys):
    (FOLDER / "step-00000006.ckpt").unlink()
    (FOLDER / "step-00000006.ckpt").symlink_to("/nowhere.ckpt")
    capsys.readouterr()
    tiny("fit", "--ckpt_path=last")
    said = capsys.readouterr()
    assert f"Resumed from step 3: {FOLDER}/step-00000003.ckpt" in said.out
    assert "step-00000006.ckpt is truncated or damaged: using" in said.err
    (FOLDER / "best.ckpt").unlink()
    (FOLDER / "best.ckpt").symlink_to("/nowhere.ckpt")
    assert found("best") == "step-00000006.ckpt"


def test_a_damaged_best_gives_way(finished):
    (FOLDER / "best.ckpt").unlink()
    (FOLDER / "best.ckpt").write_bytes(b"half")
    said = []
    assert found("best", said) == "step-00000006.ckpt"
    assert said == [
        f"checkpoint {FOLDER}/best.ckpt is truncated or damaged: using {FOLDER}/step-00000006.ckpt, "
        "in place of the best"
    ]


def test_weights_alone_come_last(tiny):
    tiny("fit", **keeping(every_n_train_steps=4, save_weights_only=True), **{"trainer.max_steps": 5})
    (FOLDER / "step-00000005.ckpt").unlink()
    assert found("last") == "step-00000003.ckpt"


@pytest.mark.parametrize(
    "filename", ["best", "step-{step:08d}"], ids=["the name of the best", "the names of the steps"]
)
def test_names_of_our_own_are_refused(tiny, error_line, filename):
    with pytest.raises(SystemExit) as leaving:
        tiny("fit", **keeping(filename=filename, auto_insert_metric_name=False))
    assert leaving.value.code == 2
    assert f"ModelCheckpoint.filename {filename!r} gives its files the names of the run's own" in error_line()
    assert not Path("runs").exists()
