import errno
import io
import os
import signal

import pytest

from lightning_llm.cli.data import run_prepare
from lightning_llm.data.token_store import TokenStore

TEXT = "some text to make a store from\n" * 40


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text(TEXT)


def refused(capsys, *argv):
    before = sorted(os.listdir())
    assert run_prepare(list(argv)) == 2
    out, error = capsys.readouterr()
    assert out == ""
    assert error.startswith("lightning-llm prepare: ")
    assert error.count("\n") == 1
    assert sorted(os.listdir()) == before
    return error


def test_text_becomes_a_store(capsys):
    assert run_prepare(["text.txt", "--tokenizer", "char", "--out", "out"]) == 0
    store = TokenStore.open("out")
    assert store.vocab_size == len(set(TEXT))
    out, error = capsys.readouterr()
    assert error == ""
    size = f"{int(0.9 * len(TEXT)):,}"
    assert out.splitlines()[0].split() == ["train", size, "tokens", size, "bytes", "1", "documents"]
    assert "next: lightning-llm fit --data.store out" in out


def test_bpe_of_a_given_size_with_a_test_split():
    assert run_prepare(["text.txt", "--vocab-size", "270", "--test-fraction", "0.1", "--out", "out"]) == 0
    store = TokenStore.open("out")
    assert store.vocab_size <= 270
    assert store.source["vocab_size"] == 270
    assert sorted(store.splits) == ["test", "train", "val"]


def test_several_inputs_make_several_documents():
    os.mkdir("folder")
    for name in "abc":
        with open(f"folder/{name}.md", "w") as file:
            file.write(f"text {name}")
    assert run_prepare(["text.txt", "folder/*.md", "--tokenizer", "byte", "--out", "out"]) == 0
    assert sum(split.documents for split in TokenStore.open("out").splits.values()) == 4


def test_store_without_a_name_lies_where_training_looks_for_it(capsys):
    from lightning_llm.data import find_or_prepare

    assert run_prepare(["text.txt", "--tokenizer", "char"]) == 0
    assert find_or_prepare(path="text.txt", tokenizer="char", log=pytest.fail).path.parent.name == "stores"


def test_shards_are_merged(capsys):
    with open("lines.jsonl", "w") as file:
        file.writelines(f'{{"body": "line {n}"}}\n' for n in range(100))
    options = ["lines.jsonl", "--text-key", "body", "--tokenizer", "byte", "--out"]
    assert run_prepare([*options, "whole"]) == 0
    for shard in ("2/2", "1/2"):
        assert run_prepare([*options, "out", "--shard", shard]) == 0
    assert "when all 2 are made: lightning-llm prepare --merge out" in capsys.readouterr().out
    assert run_prepare(["--merge", "out"]) == 0
    assert "next: lightning-llm fit --data.store out" in capsys.readouterr().out
    assert TokenStore.open("out").fingerprint == TokenStore.open("whole").fingerprint
    assert not [name for name in os.listdir() if ".shard" in name]


def test_standard_input(monkeypatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(TEXT.encode())))
    assert run_prepare(["-", "--tokenizer", "char", "--out", "out"]) == 0
    assert run_prepare(["text.txt", "--tokenizer", "char", "--out", "same"]) == 0
    assert TokenStore.open("out").fingerprint == TokenStore.open("same").fingerprint
    monkeypatch.undo()


def test_interrupted(monkeypatch, capsys, default_signals):
    monkeypatch.setattr("lightning_llm.data.prepare._write", lambda *_: signal.raise_signal(signal.SIGINT))
    assert run_prepare(["text.txt", "--tokenizer", "char", "--out", "out"]) == 130
    assert capsys.readouterr().err == "lightning-llm prepare: interrupted; run the same command again to resume\n"


def test_full_disk_is_one_line(monkeypatch, capsys):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("lightning_llm.data.token_store_writer.os.fsync", full)
    assert "No space left on device; free some space" in refused(
        capsys, "text.txt", "--tokenizer", "char", "--out", "o"
    )


def test_folder_that_may_not_be_written(monkeypatch, capsys):
    def refuse(*_, **__):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr("pathlib.Path.mkdir", refuse)
    assert "cannot write the token store" in refused(capsys, "text.txt", "--tokenizer", "char", "--out", "deep/o")


def test_help(capsys):
    assert run_prepare(["--help"]) == 0
    out = capsys.readouterr().out
    for option in ("INPUT", "--tokenizer", "--vocab-size", "--test-fraction", "--out"):
        assert option in out


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ([], "no INPUT: give a file, a folder, a glob, - or a corpus"),
        (["-"], "standard input has no name: name the store with --out DIR"),
        (["text.txt", "--text-key", "body"], "--text-key 'body' is for JSON lines"),
        (["text.txt", "--shard", "1/2"], "--shard 1/2 needs --out DIR"),
        *(
            (["text.txt", "--out", "o", "--shard", bad], f"--shard '{bad}' is not I/N")
            for bad in ("3/2", "0/2", "a", "1/", "1/2/3", f"1/{10**12}")
        ),
        (["-", "--out", "o", "--shard", "1/2"], "--shard cannot share the standard input"),
        (["--merge", "o"], "--merge o: there is no shard o.shard-I-of-N next to it"),
        (["text.txt", "--merge", "o"], "--merge o takes no input and no other option"),
        (["--merge", "o", "--tokenizer", "char"], "--merge o takes no input and no other option"),
        (["text.txt", "--vocab-size", "many"], "invalid int value: 'many'"),
        (["text.txt", "--colour"], "unrecognized arguments: --colour"),
        (["text.txt", "--vocab-size", "300", "--tokenizer", "char"], "--vocab-size 300 needs --tokenizer bpe"),
        (["text.txt", "--vocab-size", str(10**11)], "vocab_size must be at most 524288 with tokenizer 'bpe'"),
        (["text.txt", "--vocab-size", "5"], "vocab_size must be at least 257"),
        (["text.txt", "--tokenizer", "words"], "tokenizer 'words' is unknown"),
        (["text.txt", "--tokenizer", "text.txt"], "tokenizer 'text.txt': not a tokenizer.json"),
        (["text.txt", "--test-fraction", "2"], "test_fraction must be"),
        (["text.txt", "--out", "text.txt"], "text.txt exists already"),
        (["nowhere.txt", "--out", "out"], "'nowhere.txt' is not a file"),
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
