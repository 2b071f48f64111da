"""Problems of a comparison: each one is found, and a difference without them is silent."""

import shutil
from pathlib import Path

import pytest

from tests.ablate.trees.conftest import found, git, put


@pytest.mark.parametrize(
    ("files", "options", "errors", "notes"),
    [
        ({}, {}, ["the working tree has no difference from HEAD"], []),
        ({"a.py": ""}, {}, [], []),
        ({"k/a.cu": "", "b.PYX": "", "c.py": ""}, {}, ["compiled sources (b.PYX, k/a.cu): give --setup"], []),
        ({"k/a.cu": ""}, {"has_setup": True}, [], []),
        ({"uv.lock": "", "requirements-dev.txt": "", "a.py": ""}, {}, [], ["dev.txt, uv.lock is not installed"]),
        ({"a.py": "open('{root}/x')", "b.py": "'{root}-2'"}, {}, [], ["change of a.py contains {root}, so"]),
        ({"a.py": ""}, {"command": ["sh", "-c", "cd {root};x"]}, ["names {root}, so both sides would"], []),
        ({"a.py": ""}, {"command": ["--f={root}/src/model.py"]}, ["write {{tree}}/src/model.py instead"], []),
        ({"a.py": ""}, {"command": ["{root}/venv/python", "{root}/data.bin", "{root}-2/src", "{{tree}}/src"]}, [], []),
    ],
)  # fmt: skip
def test_problems_of_a_difference(his, ours, files, options, errors, notes):
    put(his, {name: content.format(root=his) for name, content in files.items()})
    command = [word.format(root=his) for word in options.get("command", ["python", "train.py"])]
    trees = ours()
    problems = found(trees, trees.tree_of("HEAD"), trees.snapshot(), **{**options, "command": command})
    for lines, expected in ((problems.errors, errors), (problems.notes, notes)):
        assert len(lines) == len(expected)
        for line, text in zip(lines, expected, strict=True):
            assert text.format(root=his) in line
            assert "\n" not in line


def test_a_folder_that_one_side_lacks_is_an_error(his, ours):
    put(his, {"src/new/a.py": ""})
    trees = ours(his / "src" / "new")
    (line,) = found(trees, trees.tree_of("HEAD"), trees.snapshot()).errors
    assert line.startswith("src/new is a path that is not in the tree of HEAD")


def test_files_that_a_partial_clone_lacks_are_an_error(his, ours, tmp_path):
    git(his, "config", "uploadpack.allowFilter", "true")
    git(tmp_path, "clone", "--quiet", "--filter=blob:none", f"file://{his}", "partial")
    trees = ours(tmp_path / "partial")
    old, new = trees.tree_of("HEAD~1"), trees.snapshot()
    assert trees.changed_files(old, new) == ["link", "outside", "run.sh", "train.py"]
    (line,) = found(trees, old, new).errors
    assert line.startswith("a partial clone lacks files of HEAD (train.py): run git archive HEAD > /dev/null")


def changed_inside(his):
    put(his / "third party", {"outer.py": "3", "__pycache__/outer.pyc": ""})


def changed_deep_inside(his):
    put(his / "third party" / "deep", {"new": ""})


def removed(his):
    git(his, "submodule", "deinit", "--force", "--all")
    shutil.rmtree(his / ".git" / "modules")


def without_folder(his):
    shutil.rmtree(his / "third party")


def with_a_filter(his):
    """Git is not sure whether the files have changed, and would ask the filter."""
    for path, name in {"third party": "outer.py", "third party/deep": "inner.py"}.items():
        git_dir = Path(git(his / path, "rev-parse", "--absolute-git-dir"))
        put(git_dir, {"info/attributes": "*.py filter=strip\n"})
        git(his / path, "config", "filter.strip.clean", f"touch {his.parent / 'filter-ran'}; cat")
        (his / path / name).touch()


def not_fetched(his):
    git(his, "update-index", "--cacheinfo", f"160000,{'1' * 40},third party")
    git(his, "commit", "--quiet", "-m", "a submodule of the future")


@pytest.mark.parametrize(
    ("change", "errors", "notes"),
    [
        (
            changed_inside,
            ["submodule third party has changes (third party/outer.py): commit in the submodule first"],
            [],
        ),
        (
            changed_deep_inside,
            ["submodule third party has changes (third party/deep/new): commit in the submodule first"],
            [],
        ),
        (without_folder, [], ["submodule third party/deep is not initialized: the trees do not have its folder"]),
        (with_a_filter, [], []),
        (removed, [], ["submodule third party is not initialized: the trees do not have its folder"]),
        (not_fetched, ["submodule third party of HEAD: its clone does not have commit 111111111111, run git"], []),
    ],
)
def test_submodules_that_cannot_be_taken(with_submodule, ours, change, errors, notes):
    change(with_submodule)
    put(with_submodule, {"train.py": "lr = 7\n"})
    trees = ours()
    problems = found(trees, trees.tree_of("HEAD"), trees.snapshot())
    assert [line[: len(text)] for line, text in zip(problems.errors, errors, strict=True)] == errors
    assert problems.notes == notes
    assert not (with_submodule.parent / "filter-ran").exists()
