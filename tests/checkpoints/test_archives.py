"""Archives from a stranger: damaged, no checkpoint, or holding code. One line each, and no code runs."""

import io
import os
import pickle
import struct
import sys
import zipfile
import zlib
from collections import Counter, OrderedDict
from pathlib import Path

import pytest
import torch
from torch.optim.lr_scheduler import MultiStepLR

from lightning_llm.checkpoints import archives, reading
from lightning_llm.checkpoints.archives import Rejected, read_archive
from lightning_llm.checkpoints.reading import (
    check_run_checkpoint,
    is_intact,
    read_checkpoint,
    read_outline,
)
from tests.checkpoints.conftest import Code

COUNTER, SET, ORDERED = b"ccollections\nCounter\n", b"c__builtin__\nset\n", b"ccollections\nOrderedDict\n"
MIB = 2**20


def text(content):
    return b"X" + struct.pack("<I", len(content)) + content.encode()


def pickled(operations):
    """An archive whose pickle is a dict with what these operations make."""
    return tensor_file(b"\x80\x02}" + text("a") + operations + b"s.")


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


def storage(count, kind=b"FloatStorage"):
    """The pickle of a tensor of one number whose part is said to hold ``count``."""
    key = b"(X\x07\x00\x00\x00storagectorch\n" + kind + b"\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpu"
    tensor = b"ctorch._utils\n_rebuild_tensor_v2\n(" + key + count + b"tQK\x00K\x01\x85K\x01\x85\x89ccollections\n"
    return b"\x80\x02}X\x01\x00\x00\x00a" + tensor + b"OrderedDict\n)RtRs."


def saved(value):
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


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


def hooks():
    """A tensor that calls a function where its gradient is computed."""
    key = b"(" + text("storage") + b"ctorch\nFloatStorage\n" + text("0") + text("cpu") + b"K\x01tQ"
    hook = ORDERED + b")RK\x00c__builtin__\nset\ns"
    tensor = b"ctorch._utils\n_rebuild_tensor_v2\n(" + key + b"K\x00K\x01\x85K\x01\x85\x88" + hook + b"tR"
    return tensor_file(b"\x80\x02}" + text("a") + tensor + b"s.", {"data/0": b"\0\0\0\0"})


OTHER = "its pickle is not one that torch writes; nothing in it was executed"
CODE = "objects that only running its code could make"
DAMAGED = "truncated or damaged, or not a checkpoint"
NO_NUMBERS = "sparse, complex, quantized or without data, or has hooks"
HOSTILE = {
    "an attribute hides the items of a Counter": (
        lambda: pickled(COUNTER + b"}\x85R" + b"}" + text("items") + SET + b"sb"),
        "with attributes",
    ),
    "an attribute hides the keys of an ordered dict": (
        lambda: pickled(ORDERED + b")R" + b"}" + text("keys") + SET + b"sb"),
        "with attributes",
    ),
    "an attribute of a whole checkpoint": (
        lambda: tensor_file(b"\x80\x02" + ORDERED + b")R" + b"}" + text("items") + SET + b"sb."),
        "with attributes",
    ),
    "attributes": (attributes, "with attributes"),
    "an item of a list": (lambda: pickled(b"]K\x00K\x01s"), OTHER),
    "items of a list": (lambda: pickled(b"](K\x00K\x01u"), OTHER),
    "an item of a text": (lambda: pickled(text("a") + b"K\x00K\x01s"), OTHER),
    "an addition to a dict": (lambda: pickled(b"}K\x00a"), OTHER),
    "additions to a set": (lambda: pickled(SET + b"]\x85R(K\x00e"), OTHER),
    "a call of a text": (lambda: pickled(text("a") + b")R"), OTHER),
    "a tensor of a list": (lambda: pickled(b"ctorch._utils\n_rebuild_tensor_v2\n]\x85R"), DAMAGED),
    "a tensor of nothing": (lambda: pickled(b"ctorch._utils\n_rebuild_parameter\n)R"), DAMAGED),
    "an operation of another protocol": (lambda: pickled(b"\x97"), OTHER),
    "a call of a builtin": (lambda: pickled(b"c__builtin__\neval\n" + text("1") + b"\x85R"), CODE),
    "an instance": (lambda: pickled(b"(i__builtin__\nobject\n"), OTHER),
    "a module of one's own": (lambda: pickled(b"cmy_parts\nMLP\n)R"), CODE),
    "deep nesting": (lambda: tensor_file(nested(50_000)), "100 inside one another"),
    "a list that holds itself": (lambda: pickled(b"]q\x00h\x00a"), "100 inside one another"),
    "sparse": (lambda: saved({"a": torch.eye(3).to_sparse()}), NO_NUMBERS),
    "meta": (lambda: saved({"a": torch.empty(10**12, device="meta")}), NO_NUMBERS),
    "complex": (lambda: saved({"a": torch.zeros(2, dtype=torch.complex64)}), NO_NUMBERS),
    "quantized": (lambda: saved({"a": torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)}), NO_NUMBERS),
    "a hook of a tensor": (hooks, NO_NUMBERS),
    "a function": (lambda: pickled(b"ctorch._utils\n_rebuild_tensor_v2\n"), "function, which is not a plain value"),
    "a storage": (lambda: saved({"a": torch.ones(2).untyped_storage()}), "Storage, which is not a plain value"),
    "no dict": (lambda: saved([1]), r"holds \[1\]"),
    "overlapping parts": (overlapping, DAMAGED),
    "TorchScript's form": (lambda: tensor_file(b"\x80\x02}.", {"constants.pkl": b"\x80\x02)."}), DAMAGED),
    "torch's old form": (lambda: pickle.dumps({"a": 1}), DAMAGED),
    "tar": (lambda: b"ustar" * 300, DAMAGED),
}


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.filterwarnings("ignore:.*sparse.*", "ignore:.*quantiz.*", "ignore:TypedStorage.*")
def test_a_hostile_file_is_refused(tmp_path, name):
    make, says = HOSTILE[name]
    path = tmp_path / "x.ckpt"
    path.write_bytes(make())
    for mmap in (False, True):
        with pytest.raises(ValueError, match=says) as refusal:
            read_archive(path, mmap=mmap)
        assert "\n" not in str(refusal.value)


# torch reads these without running code: no other part of the file, and no other file, is reached
HARMLESS = {
    "attributes in pairs": lambda: pickled(ORDERED + b")R" + b"]b"),
    "an item of a Counter": lambda: pickled(COUNTER + b"}\x85RK\x00K\x01s"),
    "a Counter of a text": lambda: pickled(COUNTER + text("a") + b"\x85R"),
    "a set of a text": lambda: pickled(SET + text("a") + b"\x85R"),
    "a Counter of a Counter": lambda: pickled(COUNTER + COUNTER + b"}\x85R\x85R"),
    "an ordered dict of a list": lambda: pickled(ORDERED + b"]\x85R"),
    "arguments that are no tuple": lambda: pickled(SET + b"]R"),
    "an expanded tensor": lambda: saved({"a": torch.zeros(1).expand(10**6, 10**6)}),
    "a part twice": lambda: tensor_file(
        b"\x80\x02}" + text("a") + b"Ns.", {"data.PKL": b"\x80\x02}" + text("a") + b"Ns."}
    ),
    "something behind": lambda: saved({"a": 1}) + b"x" * 40,
    "a part that leads out": lambda: tensor_file(b"\x80\x02}" + text("a") + b"Ns.", {"../../out": b"x"}),
}


@pytest.mark.parametrize("name", HARMLESS)
def test_a_harmless_file_is_read(tmp_path, name):
    path = tmp_path / "x.ckpt"
    path.write_bytes(HARMLESS[name]())
    for mmap in (False, True):
        assert read_archive(path, mmap=mmap).keys() == {"a"}
    assert os.listdir(tmp_path) == ["x.ckpt"]
    assert is_intact(path)


def test_a_storage_reaches_no_further_than_the_file(tmp_path):
    path = tmp_path / "x.ckpt"
    path.write_bytes(tensor_file(storage(b"J\x00\x00\x00\x40"), {"data/0": b"\0\0\0\0"}))
    with pytest.raises(ValueError, match=DAMAGED):
        read_archive(path)
    assert read_archive(path, mmap=True)["a"].untyped_storage().nbytes() < path.stat().st_size


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


@pytest.mark.parametrize("operation", [b"R", b"\x81"])
def test_a_call_does_not_run(tmp_path, operation):
    path, made = tmp_path / "x.ckpt", tmp_path / "ran"
    path.write_bytes(pickled(b"cposix\nmkdir\n" + text(str(made)) + b"\x85" + operation))
    for mmap in (False, True):
        with pytest.raises(
            ValueError, match=r"running its code could make \('posix\.mkdir'\); nothing in it was executed"
        ):
            read_archive(path, mmap=mmap)
    assert not made.exists()


def test_an_open_file_is_checked_like_a_path(tmp_path):
    torch.save({"state_dict": Code(tmp_path / "ran")}, tmp_path / "x.ckpt")
    with (tmp_path / "x.ckpt").open("rb") as file, pytest.raises(ValueError, match=r"given file is rejected: .*mkdir"):
        read_archive(file)
    assert not (tmp_path / "ran").exists()


def test_what_torch_and_callbacks_save_is_read(tmp_path):
    model = torch.nn.Linear(3, 2)
    schedule = MultiStepLR(torch.optim.SGD(model.parameters()), milestones=[2, 2, 5])
    values = {
        "weights": model.state_dict(),  # an OrderedDict with the attribute _metadata
        "schedule": schedule.state_dict(),  # milestones are a Counter
        "ids": torch.tensor([1, 2, 65535], dtype=torch.uint16),
        "set": {1, 2.5, "three"},
        "bytes": bytes(range(256)),
        "keys": {(layer, head): 0.5 for layer in range(40) for head in range(40)},
        "types": [torch.device("cuda", 1), torch.bfloat16, torch.Size((1, 2)), None, True, -(2**70)],
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "history": [number / 7 for number in range(100_000)],
        "long": tuple(range(5000)),
    }
    torch.save(values, tmp_path / "x.ckpt")
    found = read_archive(tmp_path / "x.ckpt")
    for name in values.keys() - {"weights", "ids", "parameter"}:
        assert found[name] == values[name], name
    assert found["weights"]._metadata == values["weights"]._metadata
    assert torch.equal(found["weights"]["weight"], model.weight)
    assert torch.equal(found["ids"], values["ids"])
    assert isinstance(found["parameter"], torch.nn.Parameter)


class Hidden(dict):
    pass


def with_attributes(value, **attributes):
    vars(value).update(attributes)
    return value


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (with_attributes(Counter(a=1), items=set), "a value with attributes"),
        (with_attributes(OrderedDict(a=1), items=set), "a value with attributes"),
        (with_attributes(torch.ones(1), to=set), "a value with attributes"),
        (with_attributes(OrderedDict(a=1), _metadata=Hidden()), "Hidden, which is not a plain value"),
        (Hidden(a=1), "Hidden, which is not a plain value"),
        ([Hidden()], "Hidden, which is not a plain value"),
        ({Hidden: 1}, "type, which is not a plain value"),
    ],
)
def test_only_exact_types_are_values(value, says):
    with pytest.raises(Rejected, match=says):
        archives._check_types(value)


def test_a_second_name_of_a_part_leads_nowhere(tmp_path):
    """Python 3.12 takes the name of a part from an extra field, torch does not."""
    name, other = b"archive/data.pkl", b"archive/data/0"
    torch.save({"a": 1}, tmp_path / "plain.ckpt")
    with zipfile.ZipFile(tmp_path / "plain.ckpt") as old, zipfile.ZipFile(tmp_path / "x.ckpt", "w") as new:
        for entry in old.infolist():
            part = zipfile.ZipInfo(f"archive/{entry.filename.partition('/')[2]}")
            if part.filename.encode() == name:
                part.extra = struct.pack("<HHBI", 0x7075, 5 + len(other), 1, zlib.crc32(name)) + other
            new.writestr(part, old.read(entry))
    assert read_archive(tmp_path / "x.ckpt") == {"a": 1}


def allocated():
    """Bytes of memory that this process has taken, without those of files that are mapped."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon")]
    return int(line.split()[1]) * 1024


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    "read",
    [
        lambda path: read_checkpoint(path, mmap=True),
        read_outline,
        lambda path: check_run_checkpoint(path, is_described=False),
        lambda path: reading.only_checkpoints(path, trust_code=False).__enter__(),
    ],
    ids=["mapped", "outline", "check of a run", "check before Lightning's own reading"],
)
def test_tensors_that_are_only_checked_take_no_memory(tmp_path, monkeypatch, read):
    """A large checkpoint is read into memory once, by what uses its tensors."""
    size, at_check = 256 * MIB, []
    torch.save({"a": torch.zeros(size, dtype=torch.uint8), "lightning_llm": {}}, tmp_path / "x.ckpt")
    before = allocated()

    def check(content, *args, **kwargs):  # the content is held at this time
        at_check.append(allocated() - before)
        assert content["a"].nbytes == size
        content["hyper_parameters"] = {"architecture": {}}

    monkeypatch.setattr(reading, "check_content", check)
    monkeypatch.setattr(reading, "config_of_file", lambda *args, **kwargs: None)
    read(tmp_path / "x.ckpt")
    assert len(at_check) == 1
    assert at_check[0] < size / 4
