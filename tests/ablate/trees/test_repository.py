"""The user's repository: a folder that is in none, or in one that git refuses, is one line."""

import re

import pytest

from lightning_llm.ablate.trees.repository import Repository
from tests.ablate.trees.conftest import git


def nothing(folder):
    folder.mkdir()


def bare(folder):
    git(folder.parent, "init", "--quiet", "--bare", str(folder))


def without_commit(folder):
    git(folder.parent, "init", "--quiet", str(folder))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (nothing, "is in no git repository"),
        (bare, "is in a bare repository"),
        (without_commit, "has no commit: commit"),
    ],
)
def test_a_folder_without_a_repository_is_one_line(tmp_path, make, message):
    make(tmp_path / "folder")
    with pytest.raises(ValueError, match=f"^[^\n]*{message}[^\n]*$"):
        Repository.of(tmp_path / "folder")


def test_git_that_is_missing_or_that_distrusts_the_owner_is_one_line(his, tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")
    monkeypatch.setattr("lightning_llm.ablate.trees.git._KEPT", re.compile("GIT_(CONFIG|TEST)_.*"))
    with pytest.raises(ValueError, match=r"another user\. Run git config --global --add safe\.directory [^\n]*$"):
        Repository.of(his)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match=r"^git is not installed, or not on PATH[^\n]*$"):
        Repository.of(his)
