"""The checkpoints of a run's folder: the newest and the best, on a full disk and after a kill too."""

import resource
import signal

import pytest

from lightning_llm.checkpoints.reading import read_checkpoint
from lightning_llm.runs.directory import step_files
from lightning_llm.training.callbacks import RunCheckpoints
from tests.cli.test_resume import CONSTANT, FOLDER, OFTEN


def test_the_newest_and_the_best_are_kept(tiny):
    tiny("fit", **{"trainer.callbacks": OFTEN, "trainer.max_steps": 5})
    assert sorted(path.name for path in FOLDER.iterdir()) == ["best.ckpt", "step-00000004.ckpt", "step-00000005.ckpt"]


def test_later_steps_and_their_best_step_aside(tiny):
    tiny("fit", **CONSTANT)
    tiny("fit", f"--ckpt_path={FOLDER}/step-00000003.ckpt", **{**CONSTANT, "trainer.max_steps": 4})
    assert [path.name for path in step_files(FOLDER)] == ["step-00000003.ckpt", "step-00000004.ckpt"]
    assert {path.name for path in FOLDER.glob("*.aside")} == {"step-00000006.aside", "best.aside"}
    assert read_checkpoint(FOLDER / "best.ckpt")["global_step"] == 3


def test_leftovers_of_a_kill_are_cleared_away(tiny):
    tiny("fit", **CONSTANT, **{"trainer.max_steps": 3})
    (FOLDER / ".step-00000004.ckpt.17.tmp").write_bytes(b"half")
    (FOLDER / "best.ckpt").unlink()  # killed between saving and linking
    tiny("fit", "--ckpt_path=last", **CONSTANT, **{"trainer.max_steps": 4})
    assert not list(FOLDER.glob(".*"))
    assert read_checkpoint(FOLDER / "best.ckpt")["global_step"] == 3


def test_a_full_disk_leaves_the_older_checkpoints(tiny, error_line, monkeypatch):
    save, limits = RunCheckpoints.save, resource.getrlimit(resource.RLIMIT_FSIZE)

    def on_a_full_disk(self, trainer):
        if trainer.global_step == 6:
            resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
        save(self, trainer)

    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    monkeypatch.setattr(RunCheckpoints, "save", on_a_full_disk)
    try:
        with pytest.raises(SystemExit) as leaving:
            tiny("fit")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert leaving.value.code == 2
    assert "cannot save the checkpoint" in error_line()
    assert sorted(path.name for path in FOLDER.iterdir()) == ["best.ckpt", "step-00000003.ckpt"]
    assert read_checkpoint(FOLDER / "step-00000003.ckpt")["global_step"] == 3
