"""Checkpoint files: whole or absent, read without running code."""

import errno
import os
import pickle
import random
import resource
import signal
import zipfile

import pytest
import torch

from lightning_llm.checkpoints.archives import write_atomically
from lightning_llm.checkpoints.reading import is_intact, load_transformer, read_checkpoint
from lightning_llm.training.checkpoint_io import AtomicCheckpointIO
from tests.checkpoints.conftest import Code


def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path):
    path = tmp_path / "x.ckpt"
    write_atomically({"old": torch.ones(3)}, path)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))  # the disk takes no more than this of a file
    try:
        with pytest.raises(OSError, match=r"cannot save the checkpoint: File too large: .*x\.ckpt"):
            write_atomically({"new": torch.ones(1_000_000)}, path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert os.listdir(tmp_path) == ["x.ckpt"]
    assert torch.equal(read_checkpoint(path)["old"], torch.ones(3))


def test_a_full_disk_is_named_as_such(tmp_path, monkeypatch):
    def full(content, file):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(OSError, match="No space left on device"):
        write_atomically({}, tmp_path / "x.ckpt")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("variable", [None, "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"])
def test_code_is_never_run(tmp_path, monkeypatch, variable):
    torch.save({"state_dict": Code(tmp_path / "ran")}, tmp_path / "bad.ckpt")
    if variable:
        monkeypatch.setenv(variable, "1")
    with pytest.raises(ValueError, match="would run code" if variable else "is rejected"):
        read_checkpoint(tmp_path / "bad.ckpt")
    assert not (tmp_path / "ran").exists()


def test_a_plain_pickle_is_not_run_either(tmp_path):
    (tmp_path / "bad.ckpt").write_bytes(pickle.dumps(Code(tmp_path / "ran")))
    with pytest.raises(ValueError, match="not a checkpoint"):
        read_checkpoint(tmp_path / "bad.ckpt")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", ["README.md", "model.safetensors", "no-suffix"])
def test_what_never_was_a_checkpoint_has_no_earlier_one(tmp_path, name):
    path = tmp_path / name
    path.write_bytes(b"# Words\n" * 9)
    says = "is not a checkpoint: give one that lightning-llm fit has saved"
    with pytest.raises(ValueError, match=f"^{path} {says}$"):
        read_checkpoint(path)
    with path.open("rb") as file, pytest.raises(ValueError, match=f"^the given file {says}$"):
        read_checkpoint(file)
    write_atomically({"weights": torch.ones(10)}, path)
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(ValueError, match=r"truncated or damaged, or not a checkpoint: use an earlier one$"):
        read_checkpoint(path)


@pytest.mark.parametrize("kept", [0, 10, 0.5, 0.99])
def test_a_file_cut_short_is_named(tmp_path, kept):
    path = tmp_path / "x.ckpt"
    write_atomically({"weights": torch.ones(10_000)}, path)
    content = path.read_bytes()
    path.write_bytes(content[: kept if isinstance(kept, int) else int(kept * len(content))])
    with pytest.raises(ValueError, match="truncated or damaged"):
        read_checkpoint(path)


@pytest.mark.parametrize(
    ("source", "says"),
    [("http://localhost/x.ckpt", "is a URL"), ("nowhere.ckpt", "does not exist")],
)
def test_what_is_no_file_is_refused(source, says):
    with pytest.raises(ValueError, match=says):
        read_checkpoint(source)


def test_lightning_cannot_turn_the_safety_off(tmp_path):
    write_atomically({}, tmp_path / "x.ckpt")
    with pytest.raises(ValueError, match="would run code"):
        AtomicCheckpointIO().load_checkpoint(tmp_path / "x.ckpt", weights_only=False)


def test_a_checkpoint_from_elsewhere_is_no_model(tmp_path):
    write_atomically({"state_dict": {}}, tmp_path / "x.ckpt")
    with pytest.raises(ValueError, match="was not written by lightning-llm fit"):
        load_transformer(tmp_path / "x.ckpt")


def bits_to_flip(content, *, thorough):
    """Every bit of a tensor's index entry, one of each other byte of the index; thorough: all of these, of the file."""
    rng, end = random.Random(0), content.rindex(b"PK\x05\x06")
    start = int.from_bytes(content[end + 16 : end + 20], "little")  # of the index, which reaches to the end
    entry = content.index(b"PK\x01\x02", content.index(b"archive/data.pkl", start))
    entry = content.rindex(b"PK\x01\x02", entry, content.index(b"archive/data/0", entry))
    for place in range(0 if thorough else start, len(content)):
        every = place in range(entry, entry + 46) or (thorough and place >= start)
        yield from ((place, bit) for bit in (range(8) if every else [rng.randrange(8)]))


@pytest.mark.parametrize("thorough", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_flipped_bit_is_damage_or_changes_nothing(tmp_path, thorough):
    path, flipped = tmp_path / "x.ckpt", tmp_path / "flipped.ckpt"
    saved = {"w": torch.arange(8.0), "b": torch.ones(3, dtype=torch.bfloat16), "step": 3}
    write_atomically(saved, path)
    content = path.read_bytes()
    places = list(bits_to_flip(content, thorough=thorough))
    damaged = 0
    for place, bit in places:
        flipped.write_bytes(content[:place] + bytes([content[place] ^ 1 << bit]) + content[place + 1 :])
        if not is_intact(flipped):
            damaged += 1
            with pytest.raises(ValueError, match="damaged"):
                read_checkpoint(flipped)
            continue
        for mmap in (False, True):
            found = read_checkpoint(flipped, mmap=mmap)
            assert found.keys() == saved.keys()
            assert found["step"] == 3
            for name in ("w", "b"):
                assert found[name].dtype == saved[name].dtype
                assert torch.equal(found[name], saved[name]), (place, bit)
    assert damaged > len(places) // 2


def test_a_file_that_torch_cannot_open_is_not_whole(tmp_path):
    with zipfile.ZipFile(tmp_path / "x.ckpt", "w") as archive:
        archive.writestr("archive/version", "3")
    assert not is_intact(tmp_path / "x.ckpt")
    (tmp_path / "nowhere.ckpt").symlink_to(tmp_path / "removed.ckpt")
    assert not is_intact(tmp_path / "nowhere.ckpt")


def test_a_file_with_code_is_refused_and_not_called_damaged(tmp_path):
    torch.save({"state_dict": Code(tmp_path / "ran")}, tmp_path / "bad.ckpt")
    assert is_intact(tmp_path / "bad.ckpt")
    assert not (tmp_path / "ran").exists()
