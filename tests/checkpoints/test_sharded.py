"""A checkpoint as a folder: whole or absent, each fault by the name of its file."""

import errno
import os
import zipfile

import pytest
import torch

from lightning_llm.checkpoints.reading import (
    is_intact,
    read_checkpoint,
    read_outline,
)
from lightning_llm.checkpoints.sharded import MARK, PROCESSES, LazyShardedTensor, write_sharded
from lightning_llm.io.atomic import link_path, remove_path, replace_path
from lightning_llm.runs.find import find_checkpoint
from tests.checkpoints.conftest import Code

ROWS = torch.arange(10.0).view(5, 2)


def write(path, *, fails=(), processes=2):
    """What two processes write, one after the other; where the first is wanted alone it votes alone."""
    content = {"state_dict": {"w": {MARK: "w", "shape": [5, 2]}}, "global_step": 7}
    parts = [{"w": {"start": 0, "rows": ROWS[:3]}}, {"w": {"start": 3, "rows": ROWS[3:]}}]
    votes = []

    def agree(failed):
        votes.append(failed)
        if len(votes) == 1:  # the folder is there: the other one writes its part
            torch.save(parts[1], path.with_name(f".{path.name}.tmp") / "shard-00001.pt")
        return failed or len(votes) in fails

    write_sharded(content, parts[0], path, process=0, processes=processes, agree=agree)
    return votes


def test_it_appears_when_all_are_done_and_reads_as_one_file_would(tmp_path):
    path = tmp_path / "step-00000007.ckpt"
    assert write(path) == [False, False, False]
    assert sorted(os.listdir(path)) == ["checkpoint.pt", "shard-00000.pt", "shard-00001.pt"]
    assert os.listdir(tmp_path) == [path.name]
    content = read_checkpoint(path)
    assert content.keys() == {"state_dict", "global_step"}
    assert torch.equal(content["state_dict"]["w"], ROWS)
    assert is_intact(path)
    assert find_checkpoint(str(path), tmp_path) == path
    write(path)  # again, over what is there
    assert os.listdir(tmp_path) == [path.name]


@pytest.mark.parametrize("turn", [1, 2, 3])
def test_where_another_process_fails_the_old_one_stays(tmp_path, turn):
    path = tmp_path / "step-00000007.ckpt"
    write(path)
    before = (path / "checkpoint.pt").stat().st_mtime_ns
    with pytest.raises(OSError, match="another process failed to write its part"):
        write(path, fails=(turn,))
    assert os.listdir(tmp_path) == [path.name]
    assert turn == 3 or (path / "checkpoint.pt").stat().st_mtime_ns == before


def test_a_full_disk_is_named_and_leaves_nothing(tmp_path, monkeypatch):
    save = torch.save

    def full(content, file):
        if not isinstance(file, os.PathLike):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        save(content, file)

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(OSError, match=r"cannot save the checkpoint: No space left on device"):
        write(tmp_path / "x.ckpt")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("name", ["checkpoint.pt", "shard-00000.pt", "shard-00001.pt"])
@pytest.mark.parametrize("damage", ["missing", "cut", "flipped bit"])
def test_a_damaged_part_is_named(tmp_path, name, damage):
    path = tmp_path / "x.ckpt"
    write(path)
    content = bytearray((path / name).read_bytes())
    with zipfile.ZipFile(path / name) as archive:
        first = archive.read(archive.namelist()[0])  # what lies between the parts has no checksum, and no meaning
    (path / name).unlink()
    if damage != "missing":
        content[content.find(first) + len(first) // 2] ^= 1
        (path / name).write_bytes(content if damage == "flipped bit" else content[: len(content) // 2])
    assert not is_intact(path)
    with pytest.raises(ValueError, match=f"{name} (does not exist|is truncated or damaged)"):
        read_checkpoint(path)


def test_a_link_is_refused(tmp_path):
    path = tmp_path / "x.ckpt"
    write(path)
    for name in ("checkpoint.pt", "shard-00001.pt"):
        (path / name).rename(tmp_path / name)
        (path / name).symlink_to(tmp_path / name)
        for read in (read_checkpoint, read_outline) if name == "checkpoint.pt" else (read_checkpoint,):
            with pytest.raises(ValueError, match=f"is rejected: {name} is a link"):
                read(path)
        assert not is_intact(path)
        (path / name).unlink()
        (tmp_path / name).rename(path / name)
    assert is_intact(path)


def test_shared_weights_stay_shared(tmp_path):
    names = [str(number) for number in range(4)]
    path = tmp_path / "x.ckpt"
    path.mkdir()
    marks = {name: {MARK: name, "shape": [1000, 8]} for name in names}
    torch.save({"state_dict": marks, "__processes__": 1}, path / "checkpoint.pt")
    whole = torch.zeros(1000, 8)
    torch.save({name: {"start": 0, "rows": whole} for name in names}, path / "shard-00000.pt")
    state = read_checkpoint(path)["state_dict"]
    assert len({each.data_ptr() for each in state.values()}) == 1


def test_rows_that_nobody_has_are_missed(tmp_path):
    path = tmp_path / "x.ckpt"
    write(path, processes=1)
    with pytest.raises(ValueError, match="lacks rows of w"):
        read_checkpoint(path)


@pytest.mark.parametrize("name", ["checkpoint.pt", "shard-00001.pt"])
def test_code_in_a_part_is_never_run(tmp_path, name):
    path = tmp_path / "x.ckpt"
    write(path)
    torch.save({"w": Code(tmp_path / "ran")}, path / name)
    with pytest.raises(ValueError, match=f"{name} is rejected"):
        read_checkpoint(path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(("start", "stop"), [(0, 5), (0, 3), (2, 4), (3, 5), (4, 4), (5, 5)])
def test_rows_between(start, stop):
    rows = LazyShardedTensor((5, 2), [(0, ROWS[:1]), (1, ROWS[1:3]), (3, ROWS[3:5]), (5, ROWS[5:])])
    assert torch.equal(rows.between(start, stop), ROWS[start:stop])


def test_folders_are_linked_replaced_and_removed_like_files(tmp_path):
    first, second, best = (tmp_path / f"{name}.ckpt" for name in ("a", "b", "best"))
    for folder in (first, second):
        folder.mkdir()
        (folder / "checkpoint.pt").write_text(folder.name)
    link_path(first, best)
    link_path(second, best)
    assert (best / "checkpoint.pt").stat().st_ino == (second / "checkpoint.pt").stat().st_ino
    remove_path(second)
    assert (best / "checkpoint.pt").read_text() == "b.ckpt"
    replace_path(first, best)
    assert (best / "checkpoint.pt").read_text() == "a.ckpt"
    (tmp_path / "file").write_text("one")
    replace_path(tmp_path / "file", best)  # one process resumes from what two have saved
    assert best.read_text() == "one"
    assert os.listdir(tmp_path) == ["best.ckpt"]


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "x.ckpt"
    path.mkdir()
    main = {"state_dict": {"w": {MARK: "w", "shape": [4, 2]}}, PROCESSES: 2}
    shards = [{"w": {"start": 2 * number, "rows": torch.ones(2, 2)}} for number in range(2)]

    def write(main_changes=(), first=None):
        torch.save({**main, **dict(main_changes)}, path / "checkpoint.pt")
        for number, shard in enumerate([shards[0] if first is None else first, shards[1]]):
            torch.save(shard, path / f"shard-0000{number}.pt")
        return path

    return write


MARKED = {MARK: "w", "shape": [4, 2]}


FOLDERS = [
    ({PROCESSES: -1}, None, "__processes__ is -1"),
    ({PROCESSES: "2"}, None, "__processes__ is '2', expected"),
    ({PROCESSES: 10**15}, None, "does not exist"),
    ({PROCESSES: 1}, None, "lacks rows of w"),
    ({"state_dict": {"w": {MARK: "../w", "shape": [4, 2]}}}, None, "lacks rows of ../w"),
    ({"state_dict": {"w": {MARK: ["w"], "shape": [4, 2]}}}, None, r"__shards__ is \['w'\]"),
    ({"state_dict": {"w": {**MARKED, "shape": [-4, 2]}}}, None, r"shape\[0\] is -4"),
    ({"state_dict": {"w": {**MARKED, "shape": [10**12, 2]}}}, None, "lacks rows of w"),
    ({"state_dict": {"w": {**MARKED, "shape": []}}}, None, "lacks rows of w"),
    ({"state_dict": {"w": {MARK: "w"}}}, None, "shape is missing"),
    ({}, {"w": {"start": 1, "rows": torch.ones(2, 2)}}, "lacks rows of w"),
    ({}, {"w": {"start": 0, "rows": torch.ones(3, 2)}}, "lacks rows of w"),
    ({}, {"w": {"start": 0, "rows": torch.ones(2, 3)}}, "lacks rows of w"),
    ({}, {"w": {"start": 0, "rows": torch.ones(2, 2, dtype=torch.int64)}}, "lacks rows of w"),
    ({}, {"w": {"start": 0, "rows": torch.ones(())}}, "lacks rows of w"),
    ({}, {"w": {"start": "0", "rows": torch.ones(2, 2)}}, "start is '0', expected"),
    ({}, {"w": {"start": 0, "rows": 3}}, "rows is 3, expected a tensor"),
    ({}, {"w": 3}, "w is 3, expected an object"),
]


@pytest.mark.parametrize(("changes", "first", "says"), FOLDERS)
def test_a_folder_of_shards_is_checked(folder, changes, first, says):
    path = folder(changes, first)
    for mmap in (False, True):
        with pytest.raises(ValueError, match=says) as refusal:
            read_checkpoint(path, mmap=mmap)
        assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("name", ["shard-00001.pt", "checkpoint.pt"])
def test_a_shard_that_is_a_link_is_refused(folder, tmp_path, name):
    path = folder()
    assert torch.equal(read_checkpoint(path)["state_dict"]["w"], torch.ones(4, 2))
    (path / name).rename(tmp_path / "elsewhere.pt")
    (path / name).symlink_to(tmp_path / "elsewhere.pt")
    with pytest.raises(ValueError, match=f"{name} is a link"):
        read_checkpoint(path)
