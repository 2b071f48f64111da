import gzip
import json
import os

import pytest

from lightning_llm.data import formats
from lightning_llm.data.prepare import prepare_store
from lightning_llm.data.splits import Shard
from lightning_llm.data.token_store import SHARD, TokenStore, meta_checksum, read_meta
from lightning_llm.data.token_store_writer import merge_shards
from tests.data.conftest import fault


@pytest.fixture
def text(tmp_path):
    """Documents as JSON lines, as files of text, and compressed."""
    folder = tmp_path / "text"
    folder.mkdir()
    with (folder / "b.jsonl").open("w") as file:
        for n in range(100):
            file.write(json.dumps({"text": f"document {n}\n" * (n % 7 + 1)}) + "\n")
    for name in "ace":
        (folder / f"{name}.txt").write_text(f"text {name}\n" * 40)
    (folder / "d.jsonl.gz").write_bytes(gzip.compress(b'{"text": "packed"}\n' * 9))
    return str(folder)


def content(folder):
    return {name: (folder / name).read_bytes() for name in sorted(os.listdir(folder))}


@pytest.mark.parametrize("count", [1, 2, 3, 16, 150])
@pytest.mark.parametrize("tokenizer", ["char", "bpe"])
def test_shards_make_the_store_of_one_process(text, tmp_path, tokenizer, count, monkeypatch):
    monkeypatch.setattr(formats, "PIECE_BYTES", 1 << 12)
    options = {"tokenizer": tokenizer, "vocab_size": 270, "test_fraction": 0.2}
    whole = prepare_store(text, tmp_path / "whole", **options)
    for index in range(count, 0, -1):
        prepare_store(text, tmp_path / "out", shard=Shard(index, count), **options)
    assert content(merge_shards(tmp_path / "out").path) == content(whole.path)
    assert sorted(os.listdir(tmp_path)) == ["out", "text", "whole"]


def test_single_document_goes_whole_into_one_shard(tmp_path):
    (tmp_path / "text.txt").write_text("some text\n" * 50)
    for index in (1, 2):
        shard = Shard(index, 2)
        folder = prepare_store(str(tmp_path / "text.txt"), tmp_path / "out", shard=shard, tokenizer="byte").path
        assert ((folder / "train.bin").stat().st_size > 0) == (index == 1)
    assert merge_shards(tmp_path / "out").splits["val"].tokens == 50


def test_a_wrong_count_is_one_line_however_large(text, tmp_path):
    assert "shard 1 of 1000000000000: the first must be" in fault(lambda: Shard(1, 10**12))
    assert "shard 3 of 2: the first must be at least 1 and at most the second" in fault(lambda: Shard(3, 2))
    folder = prepare_store(text, tmp_path / "out", shard=Shard(1, 2), tokenizer="byte").path
    meta = {**read_meta(folder, SHARD), "shard": [1, 10**12]}
    (folder / SHARD).write_text(json.dumps({**meta, "checksum": meta_checksum(meta)}))
    folder.rename(tmp_path / f"out.shard-1-of-{10**12}")
    message = fault(lambda: merge_shards(tmp_path / "out"))
    assert "of 1000000000000 shards 2, 3, 4, 5, 6, 7, 8, 9, … are missing" in message


def test_shard_is_no_store(text, tmp_path):
    folder = prepare_store(text, tmp_path / "out", shard=Shard(1, 2), tokenizer="byte").path
    merge = f"lightning-llm prepare --merge {tmp_path / 'out'}"
    assert f"is one shard of a store: when all are made, {merge}" in fault(lambda: TokenStore.open(folder))
    assert f"but 1 of its shards do: when all are made, {merge}" in fault(lambda: TokenStore.open(tmp_path / "out"))
    assert "exists already" in fault(lambda: prepare_store(text, tmp_path / "out", shard=Shard(1, 2), tokenizer="byte"))


def test_missing_and_differing_shards_are_named(text, tmp_path):
    out = tmp_path / "out"
    assert "there is no shard out.shard-I-of-N next to it" in fault(lambda: merge_shards(out))
    prepare_store(text, out, shard=Shard(2, 3), tokenizer="byte")
    message = fault(lambda: merge_shards(out))
    assert f"of 3 shards 1, 3 are missing: lightning-llm prepare … --out {out} --shard 1/3" in message
    prepare_store(text, out, shard=Shard(1, 3), tokenizer="byte")
    prepare_store(text, out, shard=Shard(3, 3), tokenizer="char")
    assert "out.shard-3-of-3 was made with another text, options or versions" in fault(lambda: merge_shards(out))
    prepare_store(text, out, shard=Shard(1, 2), tokenizer="byte")
    assert "its shards are of 2 and of 3" in fault(lambda: merge_shards(out))
    assert not out.exists()


def test_damaged_shard_is_named_and_kept(text, tmp_path):
    for index in (1, 2):
        folder = prepare_store(text, tmp_path / "out", shard=Shard(index, 2), tokenizer="byte").path
    with (folder / "train.bin").open("r+b") as file:
        file.write(b"a\0b\0")
    before = sorted(os.listdir(tmp_path))
    assert f"{folder}: train.bin was changed" in fault(lambda: merge_shards(tmp_path / "out"))
    assert sorted(os.listdir(tmp_path)) == before
    (folder / "tokenizer.json").write_text("{}")
    assert "out.shard-2-of-2: tokenizer.json does not belong to it" in fault(lambda: merge_shards(tmp_path / "out"))


def test_merging_over_a_store_is_refused(text, tmp_path):
    prepare_store(text, tmp_path / "out", shard=Shard(1, 1), tokenizer="byte")
    (tmp_path / "out").mkdir()
    assert "exists already" in fault(lambda: merge_shards(tmp_path / "out"))
