"""JSON that every reader accepts, in files that are written whole or not at all."""

import ast
import json
import os
import re
from pathlib import Path

import pytest

from lightning_llm.io.atomic import (
    atomic_file,
    atomic_path,
    json_text,
    link_path,
    open_to_append,
    remove_path,
    replace_path,
    write_json,
    write_text,
)

PACKAGE = Path(__file__).parents[2] / "lightning_llm"
# Compared or hashed between our own processes, and read by nobody else: an option may be infinite there.
OWN = (
    "training/callbacks/rank_consistency.py",
    "io/untrusted.py",
    "data/token_store.py",
    "data/prepare.py",
    "data/tokenizers.py",
)
OWN += ("runs/options.py", "interop/writer.py")  # text and a dictionary of the config, as code and table


def strictly(text):
    def refuse(word):
        raise AssertionError(f"{word} is no JSON")

    return json.loads(text, parse_constant=refuse)


def test_numbers_that_json_has_no_word_for_are_null(tmp_path):
    content = {"a": float("nan"), "b": [1.5, float("inf"), (float("-inf"), 2)], "c": {"d": float("nan")}, "e": "NaN"}
    expected = {"a": None, "b": [1.5, None, [None, 2]], "c": {"d": None}, "e": "NaN"}
    assert strictly(json_text(content)) == expected
    write_json(tmp_path / "new" / "file.json", content)
    assert strictly((tmp_path / "new" / "file.json").read_text()) == expected


def test_a_file_that_cannot_be_written_leaves_the_old_one(tmp_path):
    file = tmp_path / "file"
    write_text(file, "old")
    with pytest.raises(UnicodeEncodeError):
        write_text(file, "\ud800")
    assert file.read_text() == "old"
    assert list(tmp_path.iterdir()) == [file]


def test_the_package_writes_no_json_that_is_none():
    faults = []
    for path in sorted(PACKAGE.rglob("*.py")):
        place = path.relative_to(PACKAGE).as_posix()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not (isinstance(node, ast.Call) and ast.unparse(node.func) in ("json.dump", "json.dumps")):
                continue
            if place not in OWN and "allow_nan=False" not in {ast.unparse(keyword) for keyword in node.keywords}:
                faults.append(f"{place}:{node.lineno}")
    assert not faults, f"NaN would be written as such: give allow_nan=False, or use json_text: {faults}"


def leave_links(folder, name, target):
    """The links that would catch a temporary name with the number of a process."""
    for number in (*range(1, 100), os.getpid()):
        (folder / f".{name}.{number}.tmp").symlink_to(target)


@pytest.mark.parametrize("write", [write_text, lambda path, text: link_path(made(path, text), path)])
def test_a_temporary_name_cannot_be_guessed(tmp_path, write):
    folder, precious = tmp_path / "theirs", tmp_path / "precious"
    folder.mkdir()
    precious.write_text("kept")
    leave_links(folder, "report.html", precious)
    write(folder / "report.html", "ours")
    assert precious.read_text() == "kept"
    assert (folder / "report.html").read_text() == "ours"
    assert not (folder / "report.html").is_symlink()


def made(path, text):
    source = path.with_name("source")
    source.write_text(text)
    return source


def test_a_file_has_the_mode_that_the_umask_leaves(tmp_path):
    before = os.umask(0o027)
    try:
        write_text(tmp_path / "file", "x")
        open_to_append(tmp_path / "log").close()
    finally:
        os.umask(before)
    assert [(tmp_path / name).stat().st_mode & 0o777 for name in ("file", "log")] == [0o640, 0o640]


def test_what_a_kill_leaves_begins_with_a_dot_and_ends_with_tmp(tmp_path):
    with atomic_file(tmp_path / "x.ckpt"):
        (left,) = tmp_path.iterdir()
    assert re.fullmatch(r"\.x\.ckpt\.[0-9a-f]{16}\.tmp", left.name)


@pytest.mark.parametrize("ending", ["gone", "old"])
def test_folders_are_replaced_and_removed_beside_links(tmp_path, ending):
    """Renames follow no link: their temporary names may be known."""
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").touch()
    old, new = tmp_path / "run", tmp_path / "new"
    (tmp_path / f".run.{ending}.tmp").symlink_to(precious)
    for folder in (old, new):
        folder.mkdir()
        (folder / "x").touch()
    replace_path(new, old)
    remove_path(old)
    assert [path.name for path in precious.iterdir()] == ["file"]
    assert not old.exists()
    old.symlink_to(precious)
    remove_path(old)
    assert not old.is_symlink()
    assert [path.name for path in precious.iterdir()] == ["file"]


def test_a_link_to_the_file_that_has_the_name_already_leaves_nothing_beside_it(tmp_path):
    source, target = tmp_path / "step.ckpt", tmp_path / "best.ckpt"
    source.write_text("x")
    for _ in range(2):
        link_path(source, target)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["best.ckpt", "step.ckpt"]
    assert target.samefile(source)


@pytest.mark.parametrize("inside", ["", "part/x"])
def test_an_error_names_the_file_and_not_its_temporary_name(tmp_path, inside):
    with pytest.raises(PermissionError) as caught, atomic_path(tmp_path / "a.json") as temporary:
        raise PermissionError(1, "Operation not permitted", str(temporary / inside))
    assert caught.value.filename == str(tmp_path / "a.json" / inside)
