"""The store: a snapshot is what a commit would be, a patch is the difference, and nothing of the user's changes."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_llm.ablate.trees.folders import Folders
from lightning_llm.ablate.trees.repository import Repository
from lightning_llm.ablate.trees.store import Trees
from tests.ablate.trees.conftest import commit, files_of, found, git, put, with_lfs
from tests.patience import HANGS_S

# ---- the user's repository


def test_a_snapshot_is_what_a_commit_of_all_files_would_be(his, ours, tmp_path):
    commit(his, {"deep/old.py": "", "deeper/x/y": "", "conflict": "1"})
    git(his, "checkout", "--quiet", "-b", "other", "HEAD~1")
    commit(his, {"conflict": "2"})
    with pytest.raises(subprocess.CalledProcessError):
        git(his, "merge", "main")
    git(his, "rm", "--quiet", "--cached", "src/model.py")
    put(his, {"staged.py": "1", "train.py": "lr = 3\n", "src/old.py": None, "new": "file", os.fsdecode(b"\xff"): "new"})
    git(his, "add", "staged.py")
    put(his, {"staged.py": "2", "intended.py": "x"})
    git(his, "add", "--intent-to-add", "intended.py")
    (his / "src" / "model.py").chmod(0o755)
    his.joinpath("train.py").touch()
    put(his, {"run.sh": None, "run.sh/inside": "a file became a folder", "with blank": None})
    (his / "with blank").symlink_to("src")
    shutil.rmtree(his / "deep")
    (his / "deep").symlink_to("src")
    shutil.rmtree(his / "deeper")
    put(his, {"deeper": "a folder became a file", "link": None})
    git(his, "init", "--quiet", "embedded")
    commit(his / "embedded", {"file": ""})
    hook = his / ".git" / "hooks" / "post-index-change"
    hook.parent.mkdir(exist_ok=True)
    hook.write_text(f"#!/bin/sh\ntouch {tmp_path / 'hook-ran'}\n")
    hook.chmod(0o755)
    trees = ours()
    tree = trees.snapshot()
    assert not (tmp_path / "hook-ran").exists()
    copy = tmp_path / "copy"
    shutil.copytree(his, copy, symlinks=True)
    git(copy, "-c", "core.hooksPath=/dev/null", "add", "--all")
    assert tree == git(copy, "write-tree")
    assert trees.snapshot() == tree
    assert Trees.read(tmp_path / "trees").snapshot() == tree


def test_a_change_that_leaves_size_and_time_is_in_the_snapshot(his, ours):
    """Git compares the file's time with that of the index, which a copy of the index must therefore have."""
    status = his.joinpath("train.py").stat()
    put(his, {"train.py": "lr = 9\n"})
    for path in ("train.py", ".git/index"):
        os.utime(his / path, ns=(status.st_mtime_ns, status.st_mtime_ns))
    git(his, "config", "core.trustctime", "false")
    git(his, "config", "core.checkStat", "minimal")
    trees = ours()
    assert trees.changed_files(trees.tree_of("HEAD"), trees.snapshot()) == ["train.py"]


@pytest.mark.parametrize("mark", ["--assume-unchanged", "--skip-worktree"])
def test_changes_of_files_that_git_does_not_look_at_are_in_the_snapshot(his, ours, mark):
    git(his, "update-index", mark, "train.py")
    put(his, {"train.py": "lr = 4\n"})
    trees = ours()
    assert trees.changed_files(trees.tree_of("HEAD"), trees.snapshot()) == ["train.py"]


def test_excluded_folders_are_not_in_the_snapshot(his, ours, tmp_path):
    put(his, {"runs/a": "", "experiments/lr/plan.json": "", "out/ignored": "", "src/new.py": ""})
    excluded = [his / "runs", his / "experiments" / "lr", his / "out", tmp_path, his / "missing"]
    trees = ours(excluded=excluded)
    assert trees.changed_files(trees.tree_of("HEAD"), trees.snapshot()) == ["src/new.py"]


def worktree(his, tmp_path):
    git(his, "worktree", "add", "--quiet", "--detach", str(tmp_path / "linked"))
    return tmp_path / "linked"


def shallow(his, tmp_path):
    git(tmp_path, "clone", "--quiet", "--depth=1", f"file://{his}", str(tmp_path / "shallow"))
    return tmp_path / "shallow"


def borrowing(his, tmp_path):
    git(tmp_path, "clone", "--quiet", "--shared", str(his), str(tmp_path / "bor:row\\ing"))
    return tmp_path / "bor:row\\ing"


def sparse(his, tmp_path):
    git(his, "sparse-checkout", "set", "--cone", "--sparse-index", "src/data")
    assert not (his / "link" / "x").exists()
    return his


def split_index(his, tmp_path):
    git(his, "update-index", "--split-index", "--untracked-cache")
    return his


def sha256(his, tmp_path):
    shutil.copytree(his, tmp_path / "sha256", symlinks=True, ignore=shutil.ignore_patterns(".git"))
    git(tmp_path, "init", "--quiet", "--object-format=sha256", "sha256")
    commit(tmp_path / "sha256", {})
    return tmp_path / "sha256"


@pytest.mark.parametrize("place", [worktree, shallow, borrowing, sparse, split_index, sha256])
def test_repositories_of_all_kinds(his, ours, tmp_path, place):
    folder = place(his, tmp_path)
    put(folder, {"train.py": "lr = 5\n", "src/new.py": "new", "other/new.py": "new"})
    trees = ours(folder / "src")
    assert trees.repository == Repository(folder, Path(git(folder, "rev-parse", "--absolute-git-dir")), "src")
    new = trees.snapshot()
    assert trees.changed_files(trees.tree_of("HEAD"), new) == ["other/new.py", "src/new.py", "train.py"]
    Folders(trees).checkout(new, tmp_path / "tree")
    ignored = (".bin", ".git")
    expected = {path: facts for path, facts in files_of(folder).items() if not path.endswith(ignored)}
    made = files_of(tmp_path / "tree")
    assert made.items() >= expected.items()
    assert "train.py" in expected
    assert sorted(made) == sorted(git(tmp_path / "tree", "ls-files", "-z").split("\0")[:-1])


def test_line_ends_are_those_of_the_user(his, ours, tmp_path):
    git(his, "config", "core.autocrlf", "true")
    put(his, {"new.py": "a\r\nb\r\n", ".git/info/attributes": "*.raw -text\n", "a.raw": "a\nb\n"})
    trees = ours()
    tree = trees.snapshot()
    assert git(tmp_path / "trees" / "store", "show", f"{tree}:new.py") == "a\nb"
    Folders(trees).checkout(tree, tmp_path / "tree")
    assert (tmp_path / "tree" / "new.py").read_bytes() == b"a\r\nb\r\n"
    assert (tmp_path / "tree" / "a.raw").read_bytes() == b"a\nb\n"


def test_filters_do_not_run(his, ours, tmp_path):
    for name in ("clean", "smudge", "process"):
        git(his, "config", "--global", f"filter.strip.{name}", f"touch {tmp_path / 'filter-ran'}; cat")
    git(his, "config", "filter.strip.required", "true")
    put(his, {".gitattributes": "*.ipynb filter=strip\n", "a.ipynb": "output"})
    trees = ours()
    tree = trees.snapshot()
    Folders(trees).checkout(tree, tmp_path / "tree")
    assert (tmp_path / "tree" / "a.ipynb").read_text() == "output"
    assert not (tmp_path / "filter-ran").exists()
    assert "the git filter strip does not run" in "\n".join(found(trees, trees.tree_of("HEAD"), tree).notes)


def test_large_new_files_are_not_copied(his, ours, monkeypatch):
    monkeypatch.setattr("lightning_llm.ablate.trees.store.MOST_UNTRACKED", 2 * 2**20)
    put(his, {"ckpt.pt": b"0" * 2**20, "b.pt": b"0" * (2**20 + 1), "ignored.bin": b"0" * 2**22})
    trees = ours()
    with pytest.raises(ValueError, match=r"^untracked files have 2.00 MiB, .*: add b\.pt to \.gitignore$"):
        trees.snapshot()
    put(his, {".git/info/exclude": "*.pt\n"})
    ours().snapshot()


@pytest.mark.parametrize(
    "revision", ["HEAD~9", "--since=2020-01-01", "", "HEAD:train.py", "HEAD^{tree}", "a\0b", "HEAD~1..HEAD"]
)
def test_what_is_no_revision_is_one_line(ours, revision):
    with pytest.raises(ValueError, match=r"^'.*' is not a revision of the repository .*: give a commit.*$"):
        ours().tree_of(revision)


def test_revisions(his, ours):
    git(his, "tag", "-a", "-m", "an annotated one", "v1", "HEAD~1")
    git(his, "checkout", "--quiet", "--detach")
    trees = ours()
    assert trees.commit_of("v1") == git(his, "rev-parse", "HEAD~1")
    assert trees.tree_of("v1") == git(his, "rev-parse", "HEAD~1:")
    assert trees.tree_of("HEAD") == trees.snapshot() == git(his, "rev-parse", "HEAD:")


@pytest.fixture
def branches(his):
    """Branches from the first of two commits: ``width`` and ``lr`` change a line each, ``clash`` the same as ``lr``."""
    for name, files in {
        "width": {"src/model.py": "width = 9\n"},
        "lr": {"lr.py": "a\n"},
        "clash": {"lr.py": "b\n"},
    }.items():
        git(his, "checkout", "--quiet", "-b", name, "HEAD" if name == "width" else "width~1")
        commit(his, files, name)
    git(his, "checkout", "--quiet", "main")
    commit(his, {"main.py": "newer"})
    return his


def test_branches_are_merged_as_git_does_and_nothing_of_the_user_s_is_written(branches, ours):
    trees = ours()
    tree = trees.merged("main", ["width", "lr"])
    assert trees.changed_files(trees.tree_of("main"), tree) == ["lr.py", "src/model.py"]
    assert trees.merged("main", ["lr", "width"]) == tree
    assert trees.merged("main", []) == trees.tree_of("main")
    assert trees.merged("main", ["main~1"]) == trees.tree_of("main")


def test_branches_that_change_the_same_lines_are_one_line(branches, ours):
    with pytest.raises(ValueError, match=r"^'clash' conflicts with 'width' and 'lr' in lr\.py: change one"):
        ours().merged("main", ["width", "lr", "clash"])
    with pytest.raises(ValueError, match=r"^'nothing' is not a revision of"):
        ours().merged("main", ["width", "nothing"])


def test_a_merge_runs_no_driver_of_the_user_s(branches, ours, tmp_path):
    git(branches, "config", "merge.mine.driver", f"touch {tmp_path / 'driver-ran'}")
    put(branches, {".git/info/attributes": "*.py merge=mine\n"})
    with pytest.raises(ValueError, match="conflicts"):
        ours().merged("main", ["lr", "clash"])
    assert not (tmp_path / "driver-ran").exists()


def test_histories_without_a_common_commit_are_one_line(branches, ours):
    git(branches, "checkout", "--quiet", "--orphan", "other")
    commit(branches, {"other.py": "1"})
    git(branches, "checkout", "--quiet", "main")
    with pytest.raises(
        ValueError, match=r"^'other' cannot be merged with 'main', which takes git 2.38 .*: git merge-tree"
    ):
        ours().merged("main", ["other"])


def test_branches_of_a_shallow_clone_are_merged(branches, ours, tmp_path):
    clone = tmp_path / "shallow"
    git(tmp_path, "clone", "--quiet", "--depth=2", "--no-single-branch", f"file://{branches}", str(clone))
    for name in ("width", "lr"):
        git(clone, "branch", name, f"origin/{name}")
    trees = ours(clone)
    tree = trees.merged("main", ["width", "lr"])
    assert trees.changed_files(trees.tree_of("main"), tree) == ["lr.py", "src/model.py"]


def test_a_store_whose_repository_is_gone_is_one_line(his, tmp_path):
    Trees.make(Repository.of(his), tmp_path / "trees", [])
    his.rename(tmp_path / "moved")
    with pytest.raises(ValueError, match=r"^.*/his is no longer the git repository of .*$"):
        Trees.read(tmp_path / "trees")


def test_a_kill_in_the_middle_of_a_snapshot_changes_nothing(his, ours, tmp_path):
    put(his, {f"new-{number}": os.urandom(2**16) for number in range(200)})
    trees = ours()
    script = (
        "import sys, pathlib\nfrom lightning_llm.ablate.trees.store import Trees\n"
        "trees = Trees.read(pathlib.Path(sys.argv[1]))\nprint('begins', flush=True)\nprint(trees.snapshot())"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "trees")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout.readline() == b"begins\n"
        written = tmp_path / "trees" / "store" / "objects"
        while process.poll() is None and len(list(written.iterdir())) < 20:  # the middle: some objects are written
            pass
        os.killpg(process.pid, signal.SIGKILL)
        assert process.wait(HANGS_S) == -signal.SIGKILL
    tree = trees.snapshot()
    assert len(trees.changed_files(trees.tree_of("HEAD"), tree)) == 200
    Folders(trees).checkout(tree, tmp_path / "tree")


# ---- two trees


def test_a_patch_takes_the_old_tree_to_the_new_one_and_back(his, ours, tmp_path):
    git(his, "config", "--global", "diff.noprefix", "true")
    git(his, "config", "--global", "diff.external", "false")
    changes = {"train.py": "lr = ä\n", "new/a\tb": bytes(range(256)), os.fsdecode(b"\xe4.txt"): b"latin \xe4\n"}
    put(his, {**changes, "run.sh": None, "src/model.py": b"width = \xff\n"})
    (his / "src" / "old.py").chmod(0o755)
    trees = ours()
    old, new = trees.tree_of("HEAD"), trees.snapshot()
    assert trees.changed_files(old, new) == [
        *sorted([*changes, "run.sh", "src/model.py", "src/old.py"], key=os.fsencode)
    ]
    assert "6 files changed" in trees.stat(old, new)
    assert "train.py" in trees.stat(old, new)
    (tmp_path / "patch").write_bytes(trees.patch(old, new))
    Folders(trees).checkout(old, tmp_path / "tree")
    before = files_of(tmp_path / "tree")
    Folders(trees).checkout(new, tmp_path / "new")
    git(tmp_path / "tree", "apply", "--index", str(tmp_path / "patch"))
    assert files_of(tmp_path / "tree") == files_of(tmp_path / "new") != before
    git(tmp_path / "tree", "apply", "--index", "-R", str(tmp_path / "patch"))
    assert files_of(tmp_path / "tree") == before


def test_a_changed_file_of_git_lfs_is_a_difference(his, ours, tmp_path):
    with_lfs(his, b"1234")
    put(his, {"a.npy": b"1235"})
    trees = ours()
    new = trees.snapshot()
    assert trees.changed_files(trees.tree_of("HEAD"), new) == ["a.npy"]
    Folders(trees).checkout(new, tmp_path / "tree")
    assert (tmp_path / "tree" / "a.npy").read_bytes() == b"1235"
