import os

import pytest

from lightning_llm.cli.prepare import main
from lightning_llm.data.token_store import TokenStore

TEXT = "some text to make a store from\n" * 40


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text(TEXT)


def refused(capsys, *argv):
    before = sorted(os.listdir())
    assert main(list(argv)) == 2
    out, error = capsys.readouterr()
    assert out == ""
    assert error.startswith("lightning-llm prepare: ")
    assert error.count("\n") == 1
    assert sorted(os.listdir()) == before
    return error


def test_text_becomes_a_store(capsys):
    assert main(["text.txt", "--tokenizer", "char", "--out", "out"]) == 0
    store = TokenStore.open("out")
    assert store.vocab_size == len(set(TEXT))
    out, error = capsys.readouterr()
    assert error == ""
    size = f"{int(0.9 * len(TEXT)):,}"
    assert out.splitlines()[0].split() == ["train", size, "tokens", size, "bytes", "1", "documents"]
    assert "next: lightning-llm fit --data.store out" in out


def test_bpe_of_a_given_size_with_a_test_split():
    assert main(["text.txt", "--vocab-size", "270", "--test-fraction", "0.1", "--out", "out"]) == 0
    store = TokenStore.open("out")
    assert store.vocab_size <= 270
    assert store.source["vocab_size"] == 270
    assert sorted(store.splits) == ["test", "train", "val"]


def test_several_inputs_make_several_documents():
    os.mkdir("folder")
    for name in "abc":
        with open(f"folder/{name}.md", "w") as file:
            file.write(f"text {name}")
    assert main(["text.txt", "folder/*.md", "--tokenizer", "byte", "--out", "out"]) == 0
    assert sum(split.documents for split in TokenStore.open("out").splits.values()) == 4


def test_store_without_a_name_lies_where_training_looks_for_it(capsys):
    from lightning_llm.data import find_or_prepare

    assert main(["text.txt", "--tokenizer", "char"]) == 0
    assert find_or_prepare(path="text.txt", tokenizer="char", say=pytest.fail).path.parent.name == "stores"


def test_help(capsys):
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    for option in ("INPUT", "--tokenizer", "--vocab-size", "--test-fraction", "--out"):
        assert option in out


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ([], "the following arguments are required: INPUT"),
        (["text.txt", "--vocab-size", "many"], "invalid int value: 'many'"),
        (["text.txt", "--colour"], "unrecognized arguments: --colour"),
        (["text.txt", "--vocab-size", "300", "--tokenizer", "char"], "--vocab-size 300 goes with --tokenizer bpe only"),
        (["text.txt", "--vocab-size", "5"], "vocab_size must be at least 257"),
        (["text.txt", "--tokenizer", "words"], "tokenizer 'words' is unknown"),
        (["text.txt", "--tokenizer", "text.txt"], "tokenizer 'text.txt': not a tokenizer.json"),
        (["text.txt", "--test-fraction", "2"], "test_fraction must be"),
        (["text.txt", "--out", "text.txt"], "text.txt exists already"),
        (["nowhere.txt", "--out", "out"], "'nowhere.txt' is no file"),
    ],
)
def test_mistakes_are_one_line_and_leave_nothing(capsys, argv, expected):
    assert expected in refused(capsys, *argv)


@pytest.mark.parametrize(
    ("content", "expected"), [(b"", "is empty"), (b"a\0", "is binary"), (b"a\xff", "is not UTF-8 text: byte 1")]
)
def test_bad_text_is_one_line_and_leaves_nothing(capsys, content, expected):
    with open("bad.txt", "wb") as file:
        file.write(content)
    assert expected in refused(capsys, "bad.txt", "--out", "out")
