"""Saving during training: nothing mixed up, nothing lost, errors told."""

import os
import threading

import pytest
import torch

from lightning_llm.checkpoints.archives import write_atomically
from lightning_llm.checkpoints.background import Background, HostCopy
from lightning_llm.checkpoints.reading import read_checkpoint
from lightning_llm.training import checkpoint_io
from lightning_llm.training.checkpoint_io import AtomicCheckpointIO


def test_work_is_done_in_order_and_not_behind_an_error():
    background, gate, done = Background(), threading.Event(), []
    background.add(gate.wait)
    background.add(lambda: done.append(1))
    assert done == []
    gate.set()
    background.wait()
    assert done == [1]

    background.add(lambda: 1 / 0)
    background.add(lambda: done.append(2))
    with pytest.raises(ZeroDivisionError):
        background.wait()
    background.wait()  # told once
    assert done == [1]


def test_a_copy_stays_what_it_was_and_shares_what_was_shared():
    weight = torch.ones(3)
    content = {"a": weight, "b": [weight.detach(), (torch.zeros(2, 2).t(), 5)], "c": torch.ones(3), "d": torch.ones(0)}
    taker = HostCopy()
    copy = taker.of(content)
    weight.add_(1)
    assert copy["a"].tolist() == [1, 1, 1]
    assert copy["a"].data_ptr() == copy["b"][0].data_ptr() != copy["c"].data_ptr()
    assert torch.equal(copy["b"][1][0], torch.zeros(2, 2))
    assert copy["b"][1][1] == 5
    again = taker.of(content)  # the memory of the one before, whose reader is done
    assert {again[name].data_ptr() for name in "ac"} == {copy[name].data_ptr() for name in "ac"}
    assert again["a"].tolist() == [2, 2, 2]


def held(monkeypatch):
    """Writing waits for the gate that is returned."""
    gate = threading.Event()

    def write(content, path):
        assert gate.wait(60)
        write_atomically(content, path)

    monkeypatch.setattr(checkpoint_io, "write_atomically", write)
    return gate


def test_what_is_written_is_what_was_saved_and_followers_see_it_whole(tmp_path, monkeypatch):
    files, gate, weight, seen = AtomicCheckpointIO(asynchronous=True), held(monkeypatch), torch.ones(3), []
    path = tmp_path / "x.ckpt"
    files.save_checkpoint({"weight": weight}, path)
    files.then(lambda: seen.append(path.exists()))
    weight.add_(1)  # the next step
    assert not path.exists()
    gate.set()
    files.wait()
    assert seen == [True]
    assert read_checkpoint(path)["weight"].tolist() == [1, 1, 1]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_what_is_written_from_a_gpu_is_what_was_saved(tmp_path, monkeypatch):
    """Twice, through the same pinned memory, while the device continues."""
    files, pinned = AtomicCheckpointIO(asynchronous=True), []

    def write(content, path):
        pinned.append(content["weight"].is_pinned())
        write_atomically(content, path)

    monkeypatch.setattr(checkpoint_io, "write_atomically", write)
    weight = torch.zeros(2**24, device="cuda")
    for step in range(3):
        weight.fill_(step)
        files.save_checkpoint({"weight": weight, "again": weight.detach()}, tmp_path / f"{step}.ckpt")
        weight.fill_(-1)  # the next step
    files.wait()
    assert pinned == [True] * 3
    for step in range(3):
        saved = read_checkpoint(tmp_path / f"{step}.ckpt")
        assert torch.equal(saved["weight"], torch.full((2**24,), float(step)))
        assert saved["weight"].data_ptr() == saved["again"].data_ptr()


def test_the_next_saving_waits_and_tells_what_went_wrong(tmp_path, monkeypatch, capsys):
    files = AtomicCheckpointIO(asynchronous=True)

    def full(content, path):
        raise OSError(None, "cannot save the checkpoint: the disk is full", str(path))

    linked = []
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_io, "write_atomically", full)
        files.save_checkpoint({}, tmp_path / "a.ckpt")
        files.then(lambda: linked.append(1))
        with pytest.raises(OSError, match="the disk is full"):
            files.save_checkpoint({}, tmp_path / "b.ckpt")
        files.save_checkpoint({}, tmp_path / "b.ckpt")
        files.teardown()  # of a run that ends by another error
    assert "the disk is full" in capsys.readouterr().err
    assert os.listdir(tmp_path) == linked == []
