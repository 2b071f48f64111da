import os
from pathlib import Path

import pytest

from lightning_llm.data import find_store
from lightning_llm.data.find_store import (
    default_store,
    find_or_prepare,
    train_tokens_of,
    vocab_size_of_text,
)
from lightning_llm.data.formats import TextFile
from lightning_llm.data.prepare import prepare_store
from lightning_llm.data.splits import Shard
from lightning_llm.data.token_store import TokenStore
from lightning_llm.data.tokenizers import Tokenizer
from tests.data.conftest import fault

TEXT = "some text to make a store from, and a little more of it\n" * 30


@pytest.fixture
def text(tmp_path, monkeypatch):
    """A text in the folder that the test works in."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text(TEXT)
    return "text.txt"


def test_missing_store_is_prepared_and_then_found(text):
    said = []
    first = find_or_prepare(path=text, tokenizer="char", log=said.append)
    assert first.path == Path("stores") / os.listdir("stores")[0]
    assert len(said) == 1
    assert said[0].startswith("Preparing stores/text-char-")
    before = (first.path / "meta.json").stat().st_mtime_ns
    assert find_or_prepare(path=text, tokenizer="char", log=said.append) == first
    assert (first.path / "meta.json").stat().st_mtime_ns == before
    assert len(said) == 1


def test_text_wins_over_corpus(text):
    assert find_or_prepare(corpus="shakespeare", path=text, tokenizer="char").source["inputs"] == [text]


def test_changed_text_is_prepared_again(text):
    first = find_or_prepare(path=text, tokenizer="char")
    Path(text).write_text(TEXT + "more: 0123456789")
    said = []
    second = find_or_prepare(path=text, tokenizer="char", log=said.append)
    assert second.path == first.path
    assert second.fingerprint != first.fingerprint
    assert "has changed since it was prepared" in said[0]


def test_changed_tokenizer_file_is_prepared_again(text):
    Path("t.json").write_text(Tokenizer.train_byte().to_str(), encoding="utf-8")
    first = find_or_prepare(path=text, tokenizer="t.json")
    assert find_or_prepare(path=text, tokenizer="t.json") == first
    Path("t.json").write_text(Tokenizer.train_char([TEXT]).to_str(), encoding="utf-8")
    assert find_or_prepare(path=text, tokenizer="t.json").fingerprint != first.fingerprint


def test_damaged_store_is_reported_not_overwritten(text):
    store = find_or_prepare(path=text, tokenizer="char")
    os.truncate(store.path / "train.bin", 4)
    assert "train.bin has 4 bytes" in fault(lambda: find_or_prepare(path=text, tokenizer="char"))


def test_named_store_is_prepared_where_it_is_missing(text):
    store = find_or_prepare(path=text, tokenizer="byte", store="here/mine")
    assert store.path == Path("here/mine")
    assert find_or_prepare(store="here/mine") == store


def test_named_store_is_taken_as_it_is_under_default_options(text):
    store = prepare_store(text, "mine", tokenizer="bpe", vocab_size=280)
    assert find_or_prepare(store="mine") == store
    assert find_or_prepare(store="mine", corpus=None) == store
    assert find_or_prepare(store="mine", path=text, vocab_size=280) == store


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"path": "other.txt"}, "data.path 'other.txt'"),
        ({"corpus": "shakespeare"}, "data.corpus 'shakespeare'"),
        ({"tokenizer": "char"}, "data.tokenizer 'char'"),
        ({"tokenizer": "t.json"}, "data.tokenizer 't.json'"),
        ({"vocab_size": 300}, "data.vocab_size 300"),
        ({"path": "other.txt", "vocab_size": 300}, "data.path 'other.txt' and data.vocab_size 300"),
    ],
)
def test_options_that_contradict_a_named_store_are_refused(text, options, named):
    prepare_store(text, "mine", tokenizer="bpe", vocab_size=280)
    Path("other.txt").write_text("other")
    Path("t.json").write_text(Tokenizer.train_byte().to_str(), encoding="utf-8")
    message = fault(lambda: find_or_prepare(store="mine", **options))
    assert message.startswith(
        "token store mine was made from text.txt with tokenizer bpe of 280 ids, not with " + named
    )


def test_unknown_corpus_names_the_known():
    message = fault(lambda: find_or_prepare(corpus="shakespere"))
    assert message.startswith("corpus 'shakespere' is unknown: choose one of stdlib, shakespeare")


@pytest.mark.parametrize("options", [{}, {"corpus": None}])
def test_without_a_name_it_is_the_standard_library(options, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = []
    monkeypatch.setattr(find_store, "prepare_store", lambda documents, out, **_: given.append((documents.inputs, out)))
    find_or_prepare(**options)
    assert given == [(("stdlib",), Path("stores/stdlib-bpe-4096"))]


@pytest.mark.parametrize("options", [{}, {"corpus": None}, {"tokenizer": "char"}, {"vocab_size": 300}])
def test_a_named_store_that_is_missing_is_not_made_of_something(options, text):
    message = fault(lambda: find_or_prepare(store="nowhere", **options))
    assert message.startswith("data.store 'nowhere' does not exist: give an existing store, or the text to")
    assert os.listdir() == ["text.txt"]


def test_a_named_store_is_made_of_the_corpus_given_with_it(text, monkeypatch):
    given = []
    monkeypatch.setattr(find_store, "prepare_store", lambda documents, out, **_: given.append((documents.inputs, out)))
    find_or_prepare(store="mine", corpus="stdlib")
    assert given == [(("stdlib",), Path("mine"))]


def test_a_named_store_of_which_there_are_shards_says_so(text):
    prepare_store(text, "mine", shard=Shard(1, 2), tokenizer="byte")
    assert "lightning-llm prepare --merge mine" in fault(lambda: find_or_prepare(store="mine"))


def test_a_store_is_only_opened_where_it_is_not_to_be_prepared(text):
    message = fault(lambda: find_or_prepare(path=text, tokenizer="char", prepare=False))
    assert "does not exist: make it with lightning-llm prepare" in message
    store = find_or_prepare(path=text, tokenizer="char")
    Path(text).write_text(TEXT + "more: 0123456789")
    assert find_or_prepare(path=text, tokenizer="char", prepare=False) == store


def test_a_changed_time_is_no_changed_text_and_an_unchanged_one_no_unchanged_text(text):
    os.utime(text, (1, 1))
    first, said = find_or_prepare(path=text, tokenizer="char"), []
    os.utime(text, (5, 5))
    assert find_or_prepare(path=text, tokenizer="char", log=said.append) == first
    assert not said
    Path(text).write_text(TEXT[::-1])
    os.utime(text, (5, 5))
    assert find_or_prepare(path=text, tokenizer="char", log=said.append).fingerprint != first.fingerprint
    assert "has changed since it was prepared" in said[0]


def test_a_named_store_is_taken_without_reading_its_text(text, monkeypatch):
    store = prepare_store(text, "mine", tokenizer="char")
    monkeypatch.setattr(TextFile, "checksum", lambda file: pytest.fail(f"{file.name} was read"))
    assert find_or_prepare(store="mine") == store


def test_a_text_that_changed_contradicts_the_store_named_with_it(text):
    prepare_store(text, "mine", tokenizer="char")
    Path(text).write_text(TEXT[::-1])
    message = fault(lambda: find_or_prepare(store="mine", path=text))
    assert "not with data.path 'text.txt' as it is now: drop the option" in message


def test_two_processes_at_once_share_what_the_faster_one_made(text, monkeypatch):
    real = find_store.prepare_store

    def overtaken(documents, out, **options):
        real(documents, out, **options)  # the other process
        return real(documents, out, **options)

    monkeypatch.setattr(find_store, "prepare_store", overtaken)
    store = find_or_prepare(path=text, tokenizer="char")
    assert TokenStore.open(store.path) == store
    assert len(os.listdir("stores")) == 1


@pytest.mark.parametrize(
    ("inputs", "tokenizer", "name"),
    [
        (["stdlib"], "bpe", "stdlib-bpe-4096"),
        (["shakespeare"], "char", "shakespeare-char"),
        (["stdlib", "shakespeare"], "byte", "stdlib+shakespeare-byte"),
    ],
)
def test_default_names(inputs, tokenizer, name):
    assert default_store(inputs, tokenizer, 4096) == Path("stores") / name


def test_default_names_tell_texts_and_tokenizers_apart():
    inputs = [["a/text.txt"], ["b/text.txt"], ["text/*.txt"], ["stdlib"], ["stdlib", "text.txt"]]
    tokenizers = ["char", "bpe", "a/tokenizer.json", "b/tokenizer.json"]
    names = {
        default_store(given, tokenizer, size) for given in inputs for tokenizer in tokenizers for size in (300, 400)
    }
    assert len(names) == len(inputs) * (len(tokenizers) + 1)  # only bpe has a size
    assert all(name.parent == Path("stores") for name in names)


def test_a_long_or_strange_name_of_a_text_is_that_of_one_folder():
    for text in ("x" * 250, "漢" * 80, "..", "a\x1b\nb"):
        store = default_store([f"/texts/{text}.txt"], "char", 300)
        assert store.parent == Path("stores")
        assert len(store.name.encode()) <= 120
        assert store.name.isprintable()


def test_the_vocabulary_of_a_text_before_it_is_prepared(text):
    assert vocab_size_of_text(None, text, "char") == len(set(TEXT))
    assert vocab_size_of_text(None, text, "byte") == find_or_prepare(path=text, tokenizer="byte").vocab_size
    assert vocab_size_of_text("shakespeare", None, "char") is None
    prepared = find_or_prepare(path=text, tokenizer="char")
    Path(text).write_text("ab")  # the store is what is asked first
    assert vocab_size_of_text(None, text, "char") == prepared.vocab_size


def test_the_training_tokens_of_a_text_are_known_once_it_is_prepared(text):
    data = {"path": text, "tokenizer": "char"}
    assert train_tokens_of(data) is None
    prepared = find_or_prepare(path=text, tokenizer="char")
    tokens = prepared.splits["train"].tokens
    assert train_tokens_of(data) == train_tokens_of({"store": str(prepared.path)}) == tokens
    assert train_tokens_of({"mixture": {str(prepared.path): 1.0}}) == tokens
    assert train_tokens_of({"mixture": {str(prepared.path): 1.0, "none": 1.0}}) is None
    assert train_tokens_of({**data, "raw_dtype": "uint16"}) is None
