"""Archives from a stranger: built to cost hours or all memory, or holding code. One line each."""

import io
import os
import pickle
import resource
import subprocess
import sys
import zipfile
from collections import OrderedDict
from pathlib import Path

import pytest
import torch

from lightning_llm.checkpoints.archives import read_archive
from lightning_llm.checkpoints.reading import (
    is_intact,
    read_checkpoint,
)
from tests.patience import HANGS_S


def tensor_file(pickled, parts=None):
    """A file in torch's form around a pickle of one's own."""
    file = io.BytesIO()
    torch.save({}, file)
    made = io.BytesIO()
    with zipfile.ZipFile(file) as old, zipfile.ZipFile(made, "w") as new:
        for entry in old.infolist():
            new.writestr(entry.filename, pickled if entry.filename.endswith("data.pkl") else old.read(entry))
        for name, bytes_ in (parts or {}).items():
            new.writestr(f"archive/{name}", bytes_)
    return made.getvalue()


def doubled_tuples(times):
    return b"\x80\x02}" + b"K\x01\x85" + b"q\x00h\x00\x86" * times + b"K\x01s."


def doubled_lists(times):
    pickled = b"\x80\x02}X\x01\x00\x00\x00a](]q\x00K\x01a"
    for number in range(times):  # a list of twice the one before, each under a number of its own
        pickled += b"]q" + bytes([number + 1]) + 2 * (b"h" + bytes([number]) + b"a")
    return pickled + b"es."


def storage(count, kind=b"FloatStorage"):
    """The pickle of a tensor of one number whose part is said to hold ``count``."""
    key = b"(X\x07\x00\x00\x00storagectorch\n" + kind + b"\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpu"
    tensor = b"ctorch._utils\n_rebuild_tensor_v2\n(" + key + count + b"tQK\x00K\x01\x85K\x01\x85\x89ccollections\n"
    return b"\x80\x02}X\x01\x00\x00\x00a" + tensor + b"OrderedDict\n)RtRs."


def saved(value):
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def many_views():
    whole = torch.zeros(2**14)
    return saved({"a": [whole[number:] for number in range(100)]})


def attributes():
    value = OrderedDict(a=1)
    value.items_ = 3
    return saved({"state_dict": value})


def overlapping():
    content = bytearray(saved({"a": torch.zeros(1000), "b": torch.ones(1000)}))
    first = content.index(b"PK\x01\x02", content.index(b"PK\x01\x02"))
    offsets = []
    while first >= 0:
        offsets.append(first)
        first = content.find(b"PK\x01\x02", first + 4)
    place = content.index(b"archive/data/1", offsets[0]) - 46
    content[place + 42 : place + 46] = bytes(4)
    return bytes(content)


def nested(depth):
    return b"\x80\x02}X\x01\x00\x00\x00a" + b"]" * depth + b"a" * (depth - 1) + b"s."


HOSTILE = {
    "tuples that double": (lambda: tensor_file(doubled_tuples(40)), "too much work"),
    "lists that double": (lambda: tensor_file(doubled_lists(40)), "more than 500000 values"),
    "deep nesting": (lambda: tensor_file(nested(50_000)), "100 inside one another"),
    "many operations": (lambda: tensor_file(b"\x80\x02}" + b"N" * 2_100_000 + b"."), "more than 1250000 operations"),
    "a storage larger than its part": (
        lambda: tensor_file(storage(b"J\x00\x00\x00\x40"), {"data/0": b"\0\0\0\0"}),
        "has 4 bytes, not 1073741824",
    ),
    "an expanded tensor": (lambda: saved({"a": torch.zeros(1).expand(10**6, 10**6)}), "larger than its data"),
    "many views": (many_views, "larger than its data"),
    "sparse": (lambda: saved({"a": torch.eye(3).to_sparse()}), "running its code"),
    "meta": (lambda: saved({"a": torch.empty(10**12, device="meta")}), "running its code"),
    "complex": (lambda: saved({"a": torch.zeros(2, dtype=torch.complex64)}), "running its code"),
    "quantized": (
        lambda: saved({"a": torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)}),
        "running its code",
    ),
    "a call that allocates": (
        lambda: tensor_file(b"\x80\x02ctorch.storage\nUntypedStorage\n\x8a\x06\0\0\0\0\0\x01\x85R."),
        "its pickle calls",
    ),
    "attributes": (attributes, "dict with attributes"),
    "a function": (lambda: tensor_file(b"\x80\x02}X\x01\x00\x00\x00actorch._utils\n_rebuild_tensor_v2\ns."), "plain"),
    "no dict": (lambda: saved([1]), r"holds \[1\]"),
    "overlapping parts": (overlapping, "truncated or damaged"),
    "a part twice": (lambda: tensor_file(b"\x80\x02}.", {"data.PKL": b"\x80\x02}."}), "truncated or damaged"),
    "something behind": (lambda: saved({}) + b"x" * 40, "truncated or damaged"),
    "torch's old form": (
        lambda: pickle.dumps({"a": 1}),
        "truncated or damaged, or not a checkpoint",
    ),
    "tar": (lambda: b"ustar" * 300, "truncated or damaged, or not a checkpoint"),
}


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.filterwarnings("ignore:.*sparse.*", "ignore:.*quantiz.*")
def test_a_hostile_file_is_refused(tmp_path, name):
    make, says = HOSTILE[name]
    path = tmp_path / "x.ckpt"
    path.write_bytes(make())
    for mmap in (False, True):
        with pytest.raises(ValueError, match=says) as refusal:
            read_archive(path, mmap=mmap)
        assert "\n" not in str(refusal.value)


def test_thousands_of_parts_are_not_indexed(tmp_path, monkeypatch):
    from lightning_llm.checkpoints import archives

    monkeypatch.setattr(archives, "MOST_INDEX_BYTES", 2000)
    path = tmp_path / "x.ckpt"
    torch.save({str(number): torch.zeros(1) for number in range(100)}, path)
    with pytest.raises(ValueError, match="truncated or damaged, or not a checkpoint"):
        read_archive(path)


def test_tied_weights_and_views_are_fine(tmp_path):
    weight = torch.arange(12.0).view(3, 4)
    torch.save({"a": weight, "b": weight, "c": weight.T, "d": weight[1:], "e": torch.zeros(0, 10**6)}, tmp_path / "x")
    assert torch.equal(read_archive(tmp_path / "x")["d"], weight[1:])


@pytest.mark.parametrize("kind", ["pipe", "folder", "device", "link to a device"])
def test_what_is_no_file_is_answered_at_once(tmp_path, kind):
    path = tmp_path / "x"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "link to a device":
        path.symlink_to("/dev/zero")
    else:
        path = Path("/dev/zero")
    with pytest.raises(ValueError, match="is not a file"):
        read_checkpoint(path)
    assert not is_intact(path)


MEMORY = """
import resource, sys
from lightning_llm.checkpoints.archives import read_archive
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for path in sys.argv[1:]:
    try:
        read_archive(path, mmap=False)
        raise SystemExit(f"{path} was read")
    except ValueError as error:
        print(error)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.slow
def test_refusing_takes_no_memory(tmp_path):
    names = ("lists that double", "tuples that double", "an expanded tensor", "a storage larger than its part")
    for number, name in enumerate(names):
        (tmp_path / f"{number}.ckpt").write_bytes(HOSTILE[name][0]())
    paths = [str(tmp_path / f"{number}.ckpt") for number in range(len(names))]
    ended = subprocess.run([sys.executable, "-c", MEMORY, *paths], capture_output=True, text=True, timeout=HANGS_S)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    scale = 1 if sys.platform == "darwin" else 1024  # bytes there, kibibytes elsewhere
    assert int(ended.stdout.splitlines()[-1]) * scale < 2**29, resource.getpagesize()
