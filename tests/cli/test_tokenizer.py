"""``lightning-llm tokenizer train``."""

import os
import shutil
import subprocess
import sys
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_llm.__main__ import main
from lightning_llm.data.corpora import open_corpus
from lightning_llm.data.prepare import bytes_and_tokens, encode_document
from lightning_llm.data.tokenizers import Tokenizer

SPECIAL = ["<|user|>", "<|assistant|>"]
LINE = "The user said <|user|> that the assistants' naïve café costs 5 €. <|user|><|user|>\n"
TRAINED = Tokenizer.train_bpe([LINE * 20], 300, SPECIAL)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=60) | st.lists(
    st.sampled_from([*SPECIAL, "<|", "user", "|>", " ", "\n", "é", "𝕏", "<|endoftext|>"]), max_size=12
).map("".join)


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(LINE * 400, encoding="utf-8")
    return path


def train(*words):
    return main(["tokenizer", "train", *map(str, words)])


def test_the_same_bytes_each_time_whatever_the_threads(corpus, tmp_path, capsys):
    command = [sys.executable, "-m", "lightning_llm", "tokenizer", "train", str(corpus), "--vocab-size", "300"]
    for name, threads in (("one.json", "1"), ("two.json", "3")):
        environment = {**os.environ, "RAYON_NUM_THREADS": threads, "PYTHONPATH": ":".join(sys.path)}
        subprocess.run([*command, "--out", tmp_path / name], env=environment, check=True, capture_output=True)
    assert train(corpus, "--vocab-size", 300, "--out", tmp_path / "three.json") == 0
    made = {(tmp_path / f"{name}.json").read_bytes() for name in ("one", "two", "three")}
    assert len(made) == 1
    tokenizer = Tokenizer.from_file(tmp_path / "three.json")
    size, tokens = len((LINE * 400).encode()), len(tokenizer.encode(LINE * 400))
    out = capsys.readouterr().out
    assert f"{size:,} bytes as {tokens:,} tokens: {size / tokens:.3f} bytes per token" in out
    assert "bpe, 300 ids" in out


@pytest.mark.parametrize("kind", ["char", "byte"])
def test_the_other_kinds(corpus, tmp_path, kind):
    out = tmp_path / "tokenizer.json"
    assert train(corpus, "--kind", kind, "--out", out) == 0
    tokenizer = Tokenizer.from_file(out)
    assert tokenizer.kind == kind
    assert tokenizer.decode(tokenizer.encode(LINE)) == LINE


def test_prepare_takes_the_file_and_special_tokens_are_one_id(corpus, tmp_path, capsys):
    out = tmp_path / "tokenizer.json"
    words = [word for token in SPECIAL for word in ("--special-token", token)]
    assert train(corpus, "--vocab-size", 300, *words, "--out", out) == 0
    assert main(["prepare", str(corpus), "--tokenizer", str(out), "--out", str(tmp_path / "store")]) == 0
    kept = Tokenizer.from_file(tmp_path / "store" / "tokenizer.json")
    assert kept.kind == "bpe"
    assert kept.decode([1]) == "<|user|>"
    assert kept.encode("a<|user|>b<|user|>").count(1) == 2


@given(texts)
def test_any_text_comes_back_and_special_tokens_are_never_split_or_merged_over(text):
    ids = TRAINED.encode(text)
    assert TRAINED.decode(ids) == text
    for number, token in enumerate(["<|endoftext|>", *SPECIAL]):
        assert ids.count(number) == text.count(token)
    stream = TRAINED.stream()
    assert "".join(map(stream.push, ids)) + stream.flush() == text


def test_nothing_is_learnt_from_a_special_token():
    without = Tokenizer.train_bpe([LINE.replace("<|user|>", "") * 20], 400)
    learnt = {TRAINED.token(number) for number in range(3, TRAINED.vocab_size)}
    assert not {token for token in learnt if len(token) > 1 and ("<" in token or "|" in token)}
    assert "Ġuser" in learnt  # of the plain word
    assert without.vocab_size < 400


@given(st.lists(st.integers(0, TRAINED.vocab_size - 1), max_size=30))
def test_any_ids_decode_be_they_cut_within_a_character(ids):
    assert isinstance(TRAINED.decode(ids), str)
    assert sum(map(TRAINED.byte_count, ids)) >= len(TRAINED.decode(ids).replace("\ufffd", "").encode())


def test_memory_does_not_grow_with_the_text(tmp_path):
    peaks = []
    for lines in (60_000, 240_000):  # 5 and 20 MB
        (tmp_path / "long.txt").write_text(LINE * lines, encoding="utf-8")
        (document,) = open_corpus([str(tmp_path / "long.txt")]).documents()
        tracemalloc.start()
        try:
            total = sum(size for _, size in encode_document(Tokenizer.train_byte(), document))
            peaks.append(tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()
        assert total == len((LINE * lines).encode())
    assert peaks[1] < 1.2 * peaks[0]


def test_bytes_and_tokens_count_the_pieces_together(corpus):
    counted = bytes_and_tokens(TRAINED, open_corpus([str(corpus)]), lambda name: lambda size: None)
    assert counted == (len((LINE * 400).encode()), len(TRAINED.encode(LINE * 400)))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--vocab-size", str(10**11)], "vocab_size must be at most 524288 with tokenizer 'bpe', got 100000000000"),
        (["--vocab-size", "256"], "vocab_size must be at least 257"),
        (["--vocab-size", "257", "--special-token", "<x>"], "(256 bytes and 2 special tokens)"),
        (["--special-token", "a b"], "no white space, got 'a b'"),
        (["--special-token", "\ud800"], "all of them Unicode"),
        (["--special-token", "<x>", "--special-token", "<x>"], "must differ from each other"),
        (["--kind", "char", "--vocab-size", "300"], "--vocab-size needs --kind bpe"),
        (["--kind", "byte", "--special-token", "<x>"], "--special-token needs --kind bpe"),
        (["--out", "nowhere/tokenizer.json"], "there is no folder nowhere"),
    ],
)
def test_a_users_mistake_is_one_line(corpus, capsys, options, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert train(corpus, *options) == 2
    error = capsys.readouterr().err.strip()
    assert says in error
    assert len(error.splitlines()) == 1
    assert not (tmp_path / "tokenizer.json").exists()


def test_no_link_is_followed_and_names_are_quoted(corpus, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = "$(touch PWNED) text.txt"
    shutil.copy(corpus, text)
    os.symlink("precious", "tokenizer.json")
    assert main(["tokenizer", "train", text, "--kind", "byte"]) == 2
    assert "tokenizer.json exists" in capsys.readouterr().err
    assert not os.path.lexists("precious")
    assert main(["tokenizer", "train", text, "--kind", "byte", "--out", "a b.json"]) == 0
    assert f"next: lightning-llm prepare '{text}' --tokenizer 'a b.json'" in capsys.readouterr().out
    assert main(["prepare", text, "--tokenizer", "byte", "--out", "a b"]) == 0
    assert "next: lightning-llm fit --data.store 'a b'" in capsys.readouterr().out


def test_an_old_file_is_left_alone(corpus, tmp_path, capsys):
    (tmp_path / "old.json").write_text("mine")
    assert train(corpus, "--out", tmp_path / "old.json") == 2
    assert "exists: give another --out" in capsys.readouterr().err
    assert (tmp_path / "old.json").read_text() == "mine"
