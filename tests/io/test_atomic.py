"""JSON that every reader accepts, in files that are written whole or not at all."""

import ast
import json
from pathlib import Path

import pytest

from lightning_llm.io.atomic import json_text, write_json, write_text

PACKAGE = Path(__file__).parents[2] / "lightning_llm"
# Compared or hashed between our own processes, and read by nobody else: an option may be infinite there.
OWN = (
    "training/callbacks/consistency.py",
    "io/untrusted.py",
    "data/token_store.py",
    "data/prepare.py",
    "data/tokenizers.py",
)
OWN += ("training/run_options.py", "interop/writer.py")  # text and a dictionary of the config, as code and table


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
