"""Folders of trees: each has what the user has, and a run leaves no traces."""

import os
import shutil
import stat
from concurrent.futures import ThreadPoolExecutor

import pytest

from lightning_llm.ablate.trees.folders import Folders, link_signature, remove_folder
from lightning_llm.ablate.trees.problems import WORKING_TREE
from lightning_llm.ablate.trees.repository import Repository
from lightning_llm.ablate.trees.store import Trees
from tests.ablate.trees.conftest import content_of, files_of, found, git, put, with_lfs


def test_a_folder_is_a_repository_of_its_own(his, ours, tmp_path):
    trees = ours()
    folders = Folders(trees)
    folder = his.parent / "trees" / "a"
    folders.checkout(trees.tree_of("HEAD"), folder, ["data.bin"])
    assert git(folder, "status", "--porcelain") == ""
    assert git(folder, "rev-parse", "HEAD") != git(his, "rev-parse", "HEAD")
    git(folder, "rm", "--quiet", "-r", "src")
    git(folder, "commit", "--quiet", "--message=by a run")
    assert folders.leftovers(folder).changed == ["src/model.py", "src/old.py"]
    assert folders.clean(folder, tmp_path / "into") == (None, [], ["src/model.py", "src/old.py"], [])
    assert folders.leftovers(folder) == ([], [])
    with pytest.raises(ValueError, match=r"^.*/trees/a exists already: remove it first$"):
        folders.checkout(trees.tree_of("HEAD"), folder)


def test_trees_in_the_users_folder_are_not_seen_by_his_git(his):
    trees = Trees.make(Repository.of(his), his / "experiment" / "trees", [])
    folders = Folders(trees)
    tree = trees.snapshot()
    folders.checkout(tree, his / "experiment" / "trees" / "a")
    assert trees.snapshot() == tree == trees.tree_of("HEAD")
    assert git(his, "status", "--porcelain") == ""


def test_a_checkout_that_fails_leaves_nothing(his, ours, tmp_path, monkeypatch):
    trees = ours()
    folders = Folders(trees)
    monkeypatch.setattr(folders, "_link", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        folders.checkout(trees.tree_of("HEAD"), tmp_path / "made" / "tree", ["data.bin"])
    assert list((tmp_path / "made").iterdir()) == []


def test_folders_are_made_at_the_same_time(ours, tmp_path):
    tree = ours().tree_of("HEAD")
    folders = [tmp_path / f"tree-{number}" for number in range(6)]
    with ThreadPoolExecutor(6) as pool:
        list(pool.map(lambda folder: Folders(Trees.read(tmp_path / "trees")).checkout(tree, folder), folders))
    assert all(files_of(folder) == files_of(folders[0]) for folder in folders)


def test_links_lead_to_the_users_files(his, ours, tmp_path):
    (his / "elsewhere.bin").symlink_to(tmp_path)
    trees = ours()
    folders = Folders(trees)
    folder = tmp_path / "tree"
    links = ["data.bin", "src/data/", str(his / "elsewhere.bin"), "data.bin"]
    folders.checkout(trees.tree_of("HEAD"), folder, links)
    assert [os.readlink(folder / link) for link in ("data.bin", "src/data", "elsewhere.bin")] == [
        str(his / link) for link in ("data.bin", "src/data", "elsewhere.bin")
    ]
    assert folders.leftovers(folder) == ([], [])
    before = link_signature(folder, links[:2])
    assert list(before) == ["data.bin", "src/data/a.bin", "src/data/b.bin"]
    assert before == link_signature(his, links[:2])
    os.utime(his / "src/data/b.bin", ns=(1, 1))
    after = link_signature(folder, links[:2])
    assert {name for name in before if before[name] != after[name]} == {"src/data/b.bin"}
    (folder / "data.bin").unlink()
    put(folder, {"data.bin": "of a run"})
    (folder / "src" / "data").unlink()
    assert folders.leftovers(folder) == (["data.bin", "src/data"], [])
    assert folders.clean(folder, tmp_path / "into")[1:] == ([], ["data.bin", "src/data"], [])
    assert (tmp_path / "into" / "data.bin").read_text() == "of a run"
    assert (folder / "data.bin").read_text() == "data"
    assert (folder / "src" / "data" / "a.bin").read_text() == "a"


def test_a_signature_has_a_limit(his, monkeypatch):
    monkeypatch.setattr("lightning_llm.ablate.trees.folders.MOST_SIGNED", 1)
    assert list(link_signature(his, ["src/data", "data.bin"])) == ["src/data/a.bin"]


@pytest.mark.parametrize(
    ("links", "message"),
    [
        (["missing.bin"], r"but .*/his/missing.bin does not exist"),
        (["../gitconfig"], "expected a path in .*/his, relative to it"),
        (["src/../../gitconfig"], "expected a path in"),
        (["/etc"], "expected a path in"),
        (["."], "expected a path in"),
        ([".git/config"], "expected a path in"),
        (["train.py"], r"but the tree has train\.py: link only files that git ignores"),
        (["src"], r"but the tree has src/model\.py, src/old\.py: link only"),
        (["to-src/data"], "but to-src is a link or a file: link to-src itself"),
        (["src/data/a.bin", "src/data"], "but --link src/data has it already"),
    ],
)
def test_what_cannot_be_linked_is_one_line(his, ours, tmp_path, links, message):
    (his / "to-src").symlink_to("src")
    trees = ours()
    folders = Folders(trees)
    with pytest.raises(ValueError, match=f"^--link got '[^\n]*{message}[^\n]*$"):
        folders.checkout(trees.tree_of("HEAD"), tmp_path / "tree", links)
    assert not (tmp_path / "tree").exists()


def test_a_run_leaves_no_traces(his, ours, tmp_path):
    trees = ours()
    folders = Folders(trees)
    folder, into = tmp_path / "tree", tmp_path / "run" / "files"
    folders.checkout(trees.tree_of("HEAD"), folder, ["data.bin"])
    setup = {"build/a.o": "a", "src/fast.so": "", "src/old.py": "generated\n"}
    put(folder, setup)
    (folder / "build" / "empty").mkdir()
    kept = folders.accept(folder)
    assert kept == ["build/a.o", "build/empty/", "src/fast.so"]
    before = content_of(folder, [".git"])
    precious = tmp_path / "precious"
    put(precious, {"file": "precious"})

    put(folder, {"ckpt.pt": "1", "ignored.bin": "2", "out/deep/log": "3", "build/b.o": "4", "train.py": "lr = 2\n"})
    put(folder, {"src/__pycache__/model.pyc": "", "__pycache__/train.pyc": "", "src/old.py": "again", '"quoted"': None})
    (folder / "run.sh").chmod(0o644)
    (folder / "train.py").touch()
    (folder / "out" / "precious").symlink_to(precious)
    (folder / "pkg").symlink_to(precious)
    os.mkfifo(folder / "fifo")
    os.mkfifo(folder / "out" / "deep" / "fifo")
    (folder / "empty").mkdir()
    (folder / "link").unlink()
    (folder / "link").mkdir()
    put(folder, {"link/inside": "5", "src/model.py": None})
    (folder / "src" / "model.py").symlink_to(precious / "file")
    (folder / "out" / "deep").chmod(0o555)

    changed = ['"quoted"', "link", "run.sh", "src/model.py", "src/old.py"]
    new = [
        "build/b.o",
        "ckpt.pt",
        "empty/",
        "fifo",
        "ignored.bin",
        "out/deep/fifo",
        "out/deep/log",
        "out/precious",
        "pkg",
    ]
    left = folders.leftovers(folder)
    assert left.changed == changed
    assert sorted(set(left.new) - set(kept)) == new
    done = folders.clean(folder, into, kept)
    moved = ["build/b.o", "ckpt.pt", "empty", "ignored.bin", "out", "pkg"]
    assert done == (into, moved, changed, ["fifo", "out/deep/fifo"])
    assert content_of(precious) == {"file": (stat.S_IFREG | 0o644, b"precious")}
    after = content_of(folder, [".git"])
    assert {path: facts for path, facts in after.items() if "__pycache__" not in path} == before
    assert "__pycache__/train.pyc" not in after  # of a folder with a restored file
    assert files_of(into) == {
        **{"ckpt.pt": (b"1", False), "ignored.bin": (b"2", False), "out/deep/log": (b"3", False)},
        **{"build/b.o": (b"4", False), "link/inside": (b"5", False), "src/old.py": (b"again", False)},
        **{"out/precious": (str(precious), False), "pkg": (str(precious), False)},
        **{"src/model.py": (str(precious / "file"), False), "run.sh": (b"#!/bin/sh\n", False)},
    }
    assert set(folders.leftovers(folder).new) == set(kept)

    put(folder, {"ckpt.pt": "the next run"})
    assert folders.clean(folder, into, kept).into == into.with_name("files.1")
    assert folders.clean(folder, into, kept).into is None


def test_a_tracked_folder_that_becomes_a_link_is_not_followed(ours, tmp_path):
    trees = ours()
    folders = Folders(trees)
    folder, precious = tmp_path / "tree", tmp_path / "precious"
    folders.checkout(trees.tree_of("HEAD"), folder)
    put(precious, {"old.py": "precious", "deep/x": ""})
    (precious / "deep").chmod(0o500)
    before = content_of(precious)
    shutil.rmtree(folder / "src")
    (folder / "src").symlink_to(precious)
    folders.leftovers(folder)
    folders.clean(folder, tmp_path / "into")
    assert content_of(precious) == before
    assert os.readlink(tmp_path / "into" / "src") == str(precious)
    assert (folder / "src" / "model.py").read_text() == "width = 8\n"
    assert not (folder / "src").is_symlink()


@pytest.mark.usefixtures("obeying_permissions")
def test_folders_without_permissions_are_cleaned_and_removed(ours, tmp_path):
    trees = ours()
    folders = Folders(trees)
    folder = tmp_path / "tree"
    folders.checkout(trees.tree_of("HEAD"), folder)
    put(folder, {"new/deep/a": "", "src/model.py": "x"})
    for name, mode in {"new/deep": 0o000, "new": 0o555, "src": 0o000, ".": 0o500}.items():
        (folder / name).chmod(mode)
    assert folders.leftovers(folder) == (["src/model.py"], ["new/deep/a"])
    put(folder, {"more/a": ""})
    for name, mode in {"new/deep": 0o000, "new": 0o555, "src": 0o000, "more": 0o000, ".": 0o500}.items():
        (folder / name).chmod(mode)
    assert folders.clean(folder, tmp_path / "into").moved == ["more", "new"]
    assert folders.leftovers(folder) == ([], [])
    (folder / "src").chmod(0o000)
    remove_folder(folder)
    assert not folder.exists()


# ---- files of git-lfs, submodules


def test_files_of_git_lfs_have_their_content_and_are_no_difference(his, ours, tmp_path):
    content = os.urandom(5000)
    with_lfs(his, content)
    put(his, {"train.py": "lr = 6\n"})
    trees = ours()
    folders = Folders(trees)
    old, new = trees.tree_of("HEAD"), trees.snapshot()
    assert trees.changed_files(old, new) == ["train.py"]
    folder = tmp_path / "tree"
    folders.checkout(new, folder)
    assert (folder / "a.npy").read_bytes() == content
    assert folders.leftovers(folder) == ([], [])
    put(folder, {"a.npy": b"from a run"})
    assert folders.clean(folder, tmp_path / "into").restored == ["a.npy"]
    assert (folder / "a.npy").read_bytes() == content
    assert folders.leftovers(folder) == ([], [])
    errors = found(trees, old, new).errors
    assert [line.partition(":")[0] for line in errors] == [
        f"{side} has pointers of git-lfs in place of files (old.npy)" for side in ("HEAD", WORKING_TREE)
    ]
    assert all("git lfs pull" in line for line in errors)


def test_submodules_are_taken_from_the_users_clones(with_submodule, ours, tmp_path):
    shutil.rmtree(tmp_path / "outer")
    trees = ours()
    folders = Folders(trees)
    old, new = trees.tree_of("HEAD"), trees.snapshot()
    assert trees.changed_files(old, new) == ["third party"]
    assert found(trees, old, new) == ([], [])
    for tree, text in ((old, b"1"), (new, b"2")):
        folder = tmp_path / tree
        folders.checkout(tree, folder)
        made = files_of(folder)
        assert made["third party/outer.py"] == (text, False)
        assert made["third party/deep/inner.py"] == (b"1", False)
        put(folder, {"third party/outer.py": "3", "third party/deep/new": ""})
        assert folders.leftovers(folder) == (["third party/outer.py"], ["third party/deep/new"])
        folders.clean(folder, tmp_path / "into")
        assert files_of(folder) == made
