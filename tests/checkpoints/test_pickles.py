"""What a pickle may do: nothing that torch does not write, and no more work than its size explains."""

import struct
import zipfile
import zlib
from collections import Counter, OrderedDict

import pytest
import torch
from torch.optim.lr_scheduler import MultiStepLR

from lightning_llm.checkpoints import pickles
from lightning_llm.checkpoints.archives import read_archive
from lightning_llm.checkpoints.pickles import Rejected, check_pickle, check_values

COUNTER, SET, ORDERED = b"ccollections\nCounter\n", b"c__builtin__\nset\n", b"ccollections\nOrderedDict\n"
ENCODE = b"c_codecs\nencode\n"


def text(content):
    return b"X" + struct.pack("<I", len(content)) + content.encode()


def floats(count, after=b""):
    return b"".join(b"G" + struct.pack(">d", number) + after for number in range(count))


ELSEWHERE = "where torch does not write it"
OTHERS = "with other values than torch does"
WORK = "too much work"
MEGABYTE = text("x" * 2**20)
HOSTILE = {
    "an attribute hides the items of a Counter": (
        COUNTER + b"}\x85R" + b"}" + text("items") + SET + b"sb",
        f"BUILD {ELSEWHERE}",
    ),
    "attributes of a set": (SET + b"]\x85R" + b"}b", f"BUILD {ELSEWHERE}"),
    "attributes in pairs": (ORDERED + b")R" + b"]b", f"BUILD {ELSEWHERE}"),
    "an item of a list": (b"]K\x00K\x01s", f"SETITEM {ELSEWHERE}"),
    "items of a list": (b"](K\x00K\x01u", f"SETITEMS {ELSEWHERE}"),
    "an item of a text": (text("a") + b"K\x00K\x01s", f"SETITEM {ELSEWHERE}"),
    "an item of a Counter": (COUNTER + b"}\x85RK\x00K\x01s", f"SETITEM {ELSEWHERE}"),
    "an addition to a dict": (b"}K\x00a", f"APPEND {ELSEWHERE}"),
    "additions to a set": (SET + b"]\x85R(K\x00e", f"APPENDS {ELSEWHERE}"),
    "a Counter of a text": (COUNTER + MEGABYTE + b"\x85R", OTHERS),
    "a set of a text": (SET + MEGABYTE + b"\x85R", OTHERS),
    "a Counter of a Counter": (COUNTER + COUNTER + b"}\x85R\x85R", OTHERS),
    "an ordered dict of a list": (ORDERED + b"]\x85R", OTHERS),
    "a tensor of a list": (b"ctorch._utils\n_rebuild_tensor_v2\n]\x85R", OTHERS),
    "arguments that are no tuple": (SET + b"]R", OTHERS),
    "a call of a text": (MEGABYTE + b")R", "its pickle calls '"),
    "one text encoded often": (ENCODE + MEGABYTE + text("latin1") + b"\x86q\x00R" + (ENCODE + b"h\x00R") * 128, WORK),
    "one tuple in many sizes": (
        b"(" + b"K\x01" * 1_000_000 + b"tq\x00" + (b"ctorch\nSize\nh\x00\x85R") * 20,
        WORK,
    ),
    "one list in many sets": (b"](" + b"K\x01" * 10_000 + b"eq\x00" + (SET + b"h\x00\x85R") * 200, WORK),
    "a list that grows once it is an argument": (
        SET + b"]q\x00\x85q\x01Rh\x00(" + floats(7000) + b"e" + SET + b"h\x01R",
        WORK,
    ),
    "one dict in many Counters": (b"}(" + b"K\x01K\x02" * 10_000 + b"uq\x00" + (COUNTER + b"h\x00\x85R") * 200, WORK),
    "one long key often": (b"}" + MEGABYTE + b"q\x00K\x01s" + b"h\x00K\x01s" * 128, WORK),
    "numbers of one hash": (b"}" + floats(7000, b"K\x01s"), WORK),
    "tuples as keys": (b"}K\x01\x85q\x00K\x01s" + b"h\x00K\x01s" * 7000, WORK),
    "many lists": (b"](" + b"]" * 600_000 + b"e", WORK),
    "a tensor of nothing": (b"ctorch._utils\n_rebuild_parameter\n)R", OTHERS),
    "an operation of protocol 4": (b"\x8f", "its pickle is not one that torch writes"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_pickle_is_rejected_before_it_runs(name):
    content, says = HOSTILE[name]
    with pytest.raises(Rejected, match=says) as rejection:
        check_pickle(b"\x80\x02" + content + b".", {})
    assert len(str(rejection.value)) < 200


def test_the_work_of_values_in_one_another_stays_a_small_number():
    items, pair = pickles._Item(list), pickles._tuple_of([])
    for _ in range(90):  # each step doubles it
        pickles._put_into(items, "APPEND", [items])
        pair = pickles._tuple_of([pair, pair])
    assert max(items.work, pair.work) <= pickles.MOST_WORK + 2


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


def test_a_large_run_is_far_from_the_limits(tmp_path, monkeypatch):
    monkeypatch.setattr(pickles, "MOST_OPERATIONS", pickles.MOST_OPERATIONS // 50)
    monkeypatch.setattr(pickles, "MOST_WORK", pickles.MOST_WORK // 50)
    names = [f"transformer.blocks.{number}.attention.query.weight" for number in range(200)]  # 10,000 / 50
    state = {number: {"step": 3.0, "exp_avg": torch.ones(1), "exp_avg_sq": torch.ones(1)} for number in range(200)}
    torch.save({"state_dict": {name: torch.ones(1) for name in names}, "optimizer": state}, tmp_path / "x.ckpt")
    assert read_archive(tmp_path / "x.ckpt")["optimizer"].keys() == state.keys()


class Hidden(dict):
    pass


def with_attributes(value, **attributes):
    vars(value).update(attributes)
    return value


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (with_attributes(Counter(a=1), items=set), "a dict with attributes"),
        (with_attributes(OrderedDict(a=1), items=set), "a dict with attributes"),
        (with_attributes(OrderedDict(a=1), _metadata=Hidden()), "Hidden, which is not a plain value"),
        (Hidden(a=1), "Hidden, which is not a plain value"),
        ([Hidden()], "Hidden, which is not a plain value"),
    ],
)
def test_only_exact_types_are_values(value, says):
    with pytest.raises(Rejected, match=says):
        check_values(value, 100)


def test_a_part_has_one_name(tmp_path):
    """Python 3.12 takes the name of a part from an extra field, torch does not."""
    name, other = b"archive/data.pkl", b"archive/data/0"
    torch.save({}, tmp_path / "plain.ckpt")
    with zipfile.ZipFile(tmp_path / "plain.ckpt") as old, zipfile.ZipFile(tmp_path / "x.ckpt", "w") as new:
        for entry in old.infolist():
            part = zipfile.ZipInfo(f"archive/{entry.filename.partition('/')[2]}")
            if part.filename.encode() == name:
                part.extra = struct.pack("<HHBI", 0x7075, 5 + len(other), 1, zlib.crc32(name)) + other
            new.writestr(part, old.read(entry))
    with pytest.raises(ValueError, match="truncated or damaged"):
        read_archive(tmp_path / "x.ckpt")
