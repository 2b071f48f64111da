"""A store from somebody else: whatever its files say, it is opened with that meaning, or refused in one line."""

import json
import os
import shutil

import numpy as np
import pytest

from lightning_llm.__main__ import main
from lightning_llm.data.prepare import prepare_store
from lightning_llm.data.splits import Shard
from lightning_llm.data.token_store import TokenStore, meta_checksum, sha256
from lightning_llm.data.token_store_writer import TokenStoreWriter, merge_shards, unfinished_tokenizer
from lightning_llm.data.tokenizers import Tokenizer


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    path = tmp_path_factory.mktemp("original") / "store"
    source = {"inputs": ["text.txt"], "fingerprint": "0", "text_key": "text", "tokenizer": "byte", "vocab_size": None}
    source["eos_token_id"] = 3
    tokenizer = Tokenizer.train_byte().to_str()
    with TokenStoreWriter(path, vocab_size=256, tokenizer=tokenizer, source=source) as writer:
        for split, count in (("train", 50), ("val", 10), ("test", 10)):
            writer.write(split, np.arange(count), text_bytes=count, documents=1)
    return path


@pytest.fixture
def store(original, tmp_path):
    return shutil.copytree(original, tmp_path / "store")


def forge(store, meta, name="meta.json"):
    """Writes meta.json with a checksum that fits, as somebody would who knows the format."""
    meta = {key: value for key, value in meta.items() if key != "checksum"}
    (store / name).write_text(json.dumps({**meta, "checksum": meta_checksum(meta)}))


def meta_of(store, name="meta.json"):
    return json.loads((store / name).read_text())


def refusal(call):
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - each caller looks at the message
        call()
    line = str(caught.value)
    assert line.isprintable()
    assert len(line) < 1000
    return line


def put(*path, value):
    """An edit of one field, given by its path."""

    def edit(meta):
        for name in path[:-1]:
            meta = meta[name]
        meta[path[-1]] = value

    return edit


def drop(*path):
    def edit(meta):
        for name in path[:-1]:
            meta = meta[name]
        del meta[path[-1]]

    return edit


DEEP = json.loads("[" * 90 + "]" * 90)
EDITS = {
    "another dtype": (put("dtype", value="int16"), "dtype is 'int16', expected 'uint16' or 'uint32'"),
    "dtype is a list": (put("dtype", value=["uint16"]), "dtype is ['uint16'], expected"),
    "no dtype": (drop("dtype"), "dtype is missing"),
    "vocab_size 0": (put("vocab_size", value=0), "vocab_size is 0, expected a whole number from 1"),
    "vocab_size true": (put("vocab_size", value=True), "vocab_size is True, expected a whole number"),
    "vocab_size 256.0": (put("vocab_size", value=256.0), "vocab_size is 256.0, expected a whole number"),
    "vocab_size text": (put("vocab_size", value="256"), "vocab_size is '256', expected a whole number"),
    "vocab_size huge": (put("vocab_size", value=10**30), "vocab_size is 1000000000"),
    "version true": (put("version", value=True), "version is True, expected 1"),
    "format null": (put("format", value=None), "says format None"),
    "unknown field": (put("code", value="import os"), "code is unknown"),
    "field with escapes": (put("a\x1b[31m\n", value=1), "'a\\x1b[31m\\n' is unknown"),
    "checksum of text": (put("tokenizer_sha256", value="0x"), "tokenizer_sha256 is '0x', expected 64 hex digits"),
    "checksum in capitals": (put("tokenizer_sha256", value="A" * 64), "expected 64 hex digits"),
    "splits list": (put("splits", value=[]), "splits is [], expected an object"),
    "splits empty": (put("splits", value={}), "splits.train is missing"),
    "no val": (drop("splits", "val"), "splits.val is missing"),
    "split with a path": (put("splits", "../../x", value={}), "splits.'../../x' is unknown"),
    "split with an absolute path": (put("splits", "/etc/passwd", value={}), "splits.'/etc/passwd' is unknown"),
    "split without a name": (put("splits", "", value={}), "splits.'' is unknown"),
    "tokens negative": (put("splits", "train", "tokens", value=-1), "splits.train.tokens is -1, expected"),
    "tokens huge": (put("splits", "train", "tokens", value=2**53), "train.bin has 100 bytes instead of"),
    "tokens beyond": (put("splits", "train", "tokens", value=10**40), "splits.train.tokens is 1000000000"),
    "tokens float": (put("splits", "val", "tokens", value=1e300), "splits.val.tokens is 1e+300, expected"),
    "tokens of another file": (put("splits", "val", "tokens", value=50), "val.bin has 20 bytes instead of 100"),
    "bytes null": (put("splits", "val", "bytes", value=None), "splits.val.bytes is None, expected"),
    "documents text": (put("splits", "val", "documents", value="\x00"), "splits.val.documents is '\\x00', expected"),
    "checksum of a split": (put("splits", "val", "sha256", value="0" * 64), "val.bin was changed"),
    "more in a split": (put("splits", "val", "file", value="/etc/passwd"), "splits.val.file is unknown"),
    "source null": (put("source", value=None), "source is None, expected an object"),
    "inputs text": (put("source", "inputs", value="text"), "source.inputs is 'text', expected a list"),
    "inputs of numbers": (put("source", "inputs", value=[1]), "source.inputs[0] is 1, expected text"),
    "fingerprint": (put("source", "fingerprint", value=DEEP), "source.fingerprint is [[[...]]], expected text"),
    "eos beyond": (put("source", "eos_token_id", value=256), "eos_token_id is 256, expected less than vocab_size 256"),
    "eos negative": (put("source", "eos_token_id", value=-1), "source.eos_token_id is -1, expected"),
    "eos text": (put("source", "eos_token_id", value="1"), "source.eos_token_id is '1', expected"),
    "more in source": (put("source", "note", value="x"), "source.note is unknown"),
}


@pytest.mark.parametrize("name", EDITS)
def test_an_edited_field_is_named(store, name):
    edit, says = EDITS[name]
    meta = meta_of(store)
    edit(meta)
    forge(store, meta)
    line = refusal(lambda: TokenStore.open(store))
    assert says in line
    assert line.startswith(f"token store {store}: ")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "meta.json is not JSON that can be read"),
        (b"{", "meta.json is not JSON"),
        (b"[]", "meta.json holds [], expected an object"),
        (b"null", "meta.json holds None, expected an object"),
        (b"\xff", "meta.json is not UTF-8 text: byte 0"),
        (b"[" * 100_000, "meta.json is not JSON that can be read: it is nested too deeply"),
        (b'{"a": ' * 100_000, "nested too deeply"),
        (b'{"version": 1, "version": 1}', "'version' is given twice"),
        (b'{"version": NaN}', "NaN is not a finite number"),
        (b'{"version": 1e999}', "1e999 is not a finite number"),
        (b'{"version": ' + b"9" * 5000 + b"}", "integer string conversion"),
        (b'{"\\ud800": 1}', "half of a surrogate pair"),
        (b"[" + b"0," * (1 << 22) + b"0]", "expected at most 8388608"),
    ],
    ids=range(13),
)
def test_content_that_is_no_sound_json_is_refused(store, content, says):
    (store / "meta.json").write_bytes(content)
    assert says in refusal(lambda: TokenStore.open(store))


@pytest.mark.parametrize("name", ["meta.json", "tokenizer.json", "train.bin", "test.bin"])
@pytest.mark.parametrize("instead", ["a FIFO", "a folder", "a link outside", "a link to a device", "a loop of links"])
def test_a_file_is_a_file_of_this_folder(store, put_instead, name, instead):
    put_instead(store / name, instead)
    assert name in refusal(lambda: TokenStore.open(store))


def test_every_leaf_of_meta_has_its_meaning_or_is_refused(store, changed_leaves):
    meta, opened, accepted = meta_of(store), TokenStore.open(store), set()
    del meta["checksum"]
    for label, changed in changed_leaves(meta):
        forge(store, changed)
        try:
            found = TokenStore.open(store)
        except ValueError:
            continue
        accepted.add(label)
        assert found.splits["train"].tokens == 50, label
        assert found.tokens("train").tolist() == list(range(50)), label
        assert found.tokenizer_sha256 == opened.tokenizer_sha256, label
        for field in ("vocab_size", "dtype", "splits", "source"):
            assert json.loads(json.dumps(getattr(found, field), default=vars)) == changed[field], label
    assert {label for label in accepted if not label.startswith("source.")} == {
        *(f"splits.{split}.{field} huge" for split in ("train", "val", "test") for field in ("bytes", "documents")),
        "splits.test dropped",
    }


@pytest.fixture
def shards(tmp_path):
    (tmp_path / "text.txt").write_text("to be or not to be\n" * 200)
    for index in (1, 2):
        prepare_store([str(tmp_path / "text.txt")], tmp_path / "out", shard=Shard(index, 2), tokenizer="byte")
    return tmp_path / "out"


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (put("shard", value=[2]), "shard is [2], expected its index and their count"),
        (put("shard", value=["2", 2]), "shard is ['2', 2], expected its index and their count"),
        (put("shard", value=[1, 10**12]), "shards are of 2 and of 1000000000000"),
        (put("splits", "train", "tokens", value=2**53), "train.bin has"),
        (put("splits", "../../x", value={}), "splits.'../../x' is unknown"),
        (put("vocab_size", value=9), "was made with another vocabulary"),
        (put("key", value=None), "key is None, expected text"),
    ],
    ids=range(7),
)
def test_an_edited_shard_is_named_and_nothing_is_merged(shards, edit, says):
    folder = shards.with_name("out.shard-2-of-2")
    meta = meta_of(folder, "shard.json")
    edit(meta)
    forge(folder, meta, "shard.json")
    before = sorted(os.listdir(shards.parent))
    assert says in refusal(lambda: merge_shards(shards))
    assert sorted(os.listdir(shards.parent)) == before


def test_ids_beyond_the_vocabulary_of_all_shards_are_refused(shards):
    for index in (1, 2):
        folder = shards.with_name(f"out.shard-{index}-of-2")
        forge(folder, {**meta_of(folder, "shard.json"), "vocab_size": 9}, "shard.json")
    assert "has token id" in refusal(lambda: merge_shards(shards))
    assert not shards.exists()


@pytest.mark.parametrize("splits", [{"../../x": {"tokens": 0}}, {"train": {}}, [], None])
def test_a_journal_from_elsewhere_is_not_followed(tmp_path, splits):
    """What a killed run left is taken over by its key alone, so that it is checked like any file."""
    left = tmp_path / f".store.partial-{os.uname().nodename}-x"
    left.mkdir()
    (left / "journal.json").write_text(json.dumps({"key": "k", "cursor": [], "splits": splits}))
    (left / "tokenizer.json").write_text("x")
    assert unfinished_tokenizer(tmp_path / "store", "k") is None
    source = {"inputs": [], "fingerprint": ""}
    with TokenStoreWriter(tmp_path / "store", vocab_size=9, tokenizer="", source=source, key="k") as writer:
        assert writer.resumed == []
    assert os.listdir(tmp_path) == ["store"]


@pytest.mark.parametrize("words", [["data", "inspect"], ["data", "verify"]])
def test_the_command_prints_one_line(store, words, capsys):
    forge(store, {**meta_of(store), "tokenizer_sha256": sha256(b"\x1b"), "dtype": "\x1b[2J\n"})
    assert main([*words, str(store)]) == 2
    assert capsys.readouterr().err.count("\n") == 1
