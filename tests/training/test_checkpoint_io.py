"""A run that saves while it trains keeps what one that waits would keep."""

import os
import signal
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lightning_llm.checkpoints import archives
from lightning_llm.checkpoints.archives import write_atomically
from lightning_llm.checkpoints.background import Background
from lightning_llm.checkpoints.reading import read_checkpoint
from lightning_llm.training import checkpoint_io
from lightning_llm.training.callbacks import RunCheckpoints, StopOnSignal
from lightning_llm.training.checkpoint_io import AtomicCheckpointIO

FOLDER = Path("runs/run/version_0/checkpoints")


def saving(*, asynchronous):
    options = {"every_n_steps": 1, "asynchronous": asynchronous}
    return {
        "trainer.callbacks": [
            {"class_path": "lightning_llm.training.callbacks.RunCheckpoints", "init_args": options},
        ]
    }


def same(first, second):
    if torch.is_tensor(first):
        return torch.equal(first, second)
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(same(first[name], second[name]) for name in first)
    if isinstance(first, list):
        return len(first) == len(second) and all(map(same, first, second))
    return first == second


def test_it_leaves_the_same_checkpoints(tiny):
    tiny("fit", **saving(asynchronous=False), **{"trainer.default_root_dir": "waiting"})
    tiny("fit", **saving(asynchronous=True))
    other = Path("waiting/run/version_0/checkpoints")
    names = sorted(path.name for path in FOLDER.iterdir())
    assert names == sorted(path.name for path in other.iterdir())
    assert len(names) == 3
    for name in names:
        ours, theirs = read_checkpoint(FOLDER / name), read_checkpoint(other / name)
        for part in ("state_dict", "optimizer_states", "lr_schedulers", "global_step"):
            assert same(ours[part], theirs[part]), (name, part)


def test_a_write_that_fails_ends_the_run_with_one_line(tiny, monkeypatch, error_line):
    def full(content, path):
        if "00000004" in str(path):
            raise OSError(None, "cannot save the checkpoint: the disk is full", str(path))
        write_atomically(content, path)

    monkeypatch.setattr(checkpoint_io, "write_atomically", full)
    with pytest.raises(SystemExit) as leaving:
        tiny("fit", **saving(asynchronous=True))
    assert leaving.value.code == 2
    assert "the disk is full" in error_line()
    assert [path.name for path in archives_in(FOLDER)] == ["step-00000002.ckpt", "step-00000003.ckpt"]


def archives_in(folder):
    return sorted(path for path in folder.glob("step-*.ckpt") if archives.is_intact_file(path))


def test_a_signal_waits_for_the_last_one(tiny, monkeypatch):
    original, written, asked_for = StopOnSignal.on_train_batch_end, [], threading.Event()
    wait, save, queued = Background.wait, checkpoint_io.AtomicCheckpointIO.save_checkpoint, []

    def sending(self, trainer, *args, **kwargs):
        if trainer.global_step == 4:
            os.kill(os.getpid(), signal.SIGTERM)
        original(self, trainer, *args, **kwargs)

    def slow(content, path):
        if str(path).endswith("step-00000004.ckpt"):
            asked_for.wait(60)  # not before somebody waits for it
        write_atomically(content, path)
        written.append(Path(path).name)

    def saving_one(self, checkpoint, path, **options):
        save(self, checkpoint, path, **options)
        queued.append(Path(path).name)

    def waiting(self):
        if "step-00000004.ckpt" in queued:
            asked_for.set()
        wait(self)

    monkeypatch.setattr(checkpoint_io, "write_atomically", slow)
    monkeypatch.setattr(checkpoint_io.AtomicCheckpointIO, "save_checkpoint", saving_one)
    monkeypatch.setattr(Background, "wait", waiting)
    monkeypatch.setattr(StopOnSignal, "on_train_batch_end", sending)
    with pytest.raises(SystemExit) as leaving:
        tiny("fit", **saving(asynchronous=True))
    assert leaving.value.code == 143
    assert written[-1] == "step-00000004.ckpt"
    assert archives_in(FOLDER)[-1].name == "step-00000004.ckpt"


@pytest.mark.parametrize(
    ("asked", "device", "expected"), [(None, "cuda", True), (None, "cpu", False), (False, "cuda", False)]
)
def test_on_cuda_training_does_not_wait_for_files(asked, device, expected):
    files = AtomicCheckpointIO()
    trainer = SimpleNamespace(strategy=SimpleNamespace(checkpoint_io=files, root_device=torch.device(device)))
    RunCheckpoints(asynchronous=asked).setup(trainer, None, "test")
    assert files.asynchronous is expected


def test_somebody_elses_files_cannot_be_made_asynchronous():
    from lightning.fabric.plugins import TorchCheckpointIO

    from lightning_llm.training.trainer import Trainer

    trainer = Trainer(
        accelerator="cpu",
        precision="32-true",
        plugins=[TorchCheckpointIO()],
        callbacks=[RunCheckpoints(asynchronous=True)],
    )
    with pytest.raises(ValueError, match="asynchronous needs AtomicCheckpointIO, got TorchCheckpointIO"):
        next(c for c in trainer.callbacks if isinstance(c, RunCheckpoints)).setup(trainer, None, "fit")
