import json
import os
import shutil
import socket
import subprocess
import sys

import numpy as np
import pytest

from lightning_llm.data import token_store_writer
from lightning_llm.data.token_store import TokenStore, dtype_for, meta_checksum
from lightning_llm.data.token_store_writer import TokenStoreWriter
from lightning_llm.data.tokenizers import Tokenizer
from tests.data.conftest import fault

TOKENIZER = Tokenizer.train_byte().to_str()


def writer(path, **options):
    return TokenStoreWriter(path, **{"vocab_size": 256, "tokenizer": TOKENIZER, "source": {"inputs": []}, **options})


def edit_meta(store, checksum=True, **changes):
    """Rewrites meta.json as a careful forger would: with the checksum that fits."""
    file = store.path / "meta.json"
    meta = {**json.loads(file.read_text()), **changes}
    del meta["checksum"]
    file.write_text(json.dumps({**meta, **({"checksum": meta_checksum(meta)} if checksum else {})}))


def test_store_comes_back(make_store):
    store = make_store(train=1000, val=[5, 6, 7], test=20)
    assert store.vocab_size == 1000
    assert store.dtype == "uint16"
    assert store.source == {"inputs": ["made up"], "fingerprint": "0"}
    np.testing.assert_array_equal(store.tokens("train"), np.arange(1000))
    np.testing.assert_array_equal(store.tokens("val"), [5, 6, 7])
    assert store.splits["val"].bytes == 6
    assert store.splits["val"].documents == 1
    assert store.bytes_per_token("val") == 2
    assert store.tokenizer_file.read_text() == TOKENIZER
    assert not store.tokens("train").flags.writeable
    store.verify()


def test_files_are_what_nanogpt_reads(make_store):
    store = make_store(train=[1, 256, 65535], vocab_size=1 << 16)
    assert (store.path / "train.bin").read_bytes() == bytes([1, 0, 0, 1, 255, 255])
    np.testing.assert_array_equal(np.memmap(store.path / "train.bin", dtype=np.uint16, mode="r"), [1, 256, 65535])
    assert sorted(os.listdir(store.path)) == ["meta.json", "tokenizer.json", "train.bin", "val.bin"]


def test_larger_vocabularies_take_four_bytes(make_store):
    store = make_store(train=[1, 1 << 16])
    assert store.dtype == "uint32"
    assert (store.path / "train.bin").read_bytes() == bytes([1, 0, 0, 0, 0, 0, 1, 0])
    assert [dtype_for(size) for size in (1, 1 << 16, (1 << 16) + 1)] == ["uint16", "uint16", "uint32"]


def test_opening_maps_the_files_and_reads_little(make_store):
    store = make_store(train=np.zeros(1000), val=10)
    tokens = store.tokens("train")
    while tokens.base is not None and not isinstance(tokens, np.memmap):
        tokens = tokens.base
    assert isinstance(tokens, np.memmap)


def test_fingerprint_names_content_not_place(make_store):
    first, same = make_store(name="a"), make_store(name="b")
    assert first.fingerprint == same.fingerprint
    others = [make_store(train=1001, vocab_size=1000 + 1, name="c"), make_store(vocab_size=1001, name="d")]
    others.append(make_store(val=101, name="e"))
    assert len({first.fingerprint, *(store.fingerprint for store in others)}) == 4


def test_split_that_is_not_there(make_store):
    assert "has no test split, only train and val" in fault(lambda: make_store().tokens("test"))


def test_missing_store(tmp_path):
    assert "does not exist" in fault(lambda: TokenStore.open(tmp_path / "nowhere"))


@pytest.mark.parametrize("name", ["meta.json", "tokenizer.json", "train.bin", "val.bin"])
def test_missing_file(make_store, name):
    store = make_store()
    (store.path / name).unlink()
    assert name in fault(lambda: TokenStore.open(store.path))


@pytest.mark.parametrize(
    ("field", "value"), [("vocab_size", 70000), ("dtype", "uint32"), ("tokenizer_sha256", "0" * 64), ("source", {})]
)
def test_edited_meta(make_store, field, value):
    store = make_store()
    file = store.path / "meta.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), field: value}))
    assert "meta.json was edited" in fault(lambda: TokenStore.open(store.path))


def test_meta_without_checksum(make_store):
    store = make_store()
    edit_meta(store, checksum=False)
    assert "meta.json was edited" in fault(lambda: TokenStore.open(store.path))


def test_reformatted_meta_is_not_edited(make_store):
    store = make_store()
    file = store.path / "meta.json"
    file.write_text(json.dumps(json.loads(file.read_text()), indent=7, sort_keys=True))
    assert TokenStore.open(store.path) == store


@pytest.mark.parametrize("changes", [{"format": "else"}, {"version": 2}])
def test_other_format_or_version(make_store, changes):
    store = make_store()
    edit_meta(store, **changes)
    assert "this program reads 'lightning-llm token store' version 1" in fault(lambda: TokenStore.open(store.path))


def test_wrong_dtype(make_store):
    store = make_store()
    edit_meta(store, dtype="uint32")
    message = fault(lambda: TokenStore.open(store.path))
    assert "dtype 'uint32' is wrong for vocab_size 1000, which needs uint16" in message


@pytest.mark.parametrize("size", [0, 1, 1998, 1999, 2001])
def test_truncated_or_grown_file(make_store, size):
    store = make_store()
    os.truncate(store.path / "train.bin", size)
    message = fault(lambda: TokenStore.open(store.path))
    assert f"train.bin has {size} bytes instead of 2000" in message


def test_tokenizer_that_does_not_belong(make_store):
    store = make_store()
    (store.path / "tokenizer.json").write_text(Tokenizer.train_char(["abc"]).to_str())
    assert "tokenizer.json does not belong to it" in fault(lambda: TokenStore.open(store.path))


@pytest.mark.parametrize("position", [0, 500, 999])
def test_id_outside_the_vocabulary(make_store, position):
    store = make_store()
    tokens = np.memmap(store.path / "train.bin", dtype="<u2", mode="r+")
    tokens[position] = 1000
    tokens.flush()
    message = fault(lambda: TokenStore.open(store.path))
    assert f"train.bin has token id 1000 at position {position}, but vocab_size is 1000" in message


def test_large_store_is_sampled_when_opened_and_scanned_by_verify(make_store, monkeypatch):
    monkeypatch.setattr("lightning_llm.data.token_store.BLOCK", 10)
    monkeypatch.setattr("lightning_llm.data.token_store._BLOCKS_AT_OPEN", 3)
    monkeypatch.setattr("lightning_llm.data.token_store._BYTES_AT_OPEN", 2 * (100 + 10) - 1)
    store = make_store(train=np.zeros(100), val=10, vocab_size=10)
    tokens = np.memmap(store.path / "train.bin", dtype="<u2", mode="r+")
    tokens[20] = 77  # between the samples
    tokens.flush()
    store = TokenStore.open(store.path)
    assert "token id 77 at position 20" in fault(store.verify)
    tokens[20], tokens[99] = 0, 77  # the end is among them
    tokens.flush()
    assert "token id 77 at position 99" in fault(lambda: TokenStore.open(store.path))


def test_changed_ids_are_found_when_a_small_store_is_opened_and_by_verify(make_store, monkeypatch):
    store = make_store()
    tokens = np.memmap(store.path / "val.bin", dtype="<u2", mode="r+")
    tokens[3] = 2
    tokens.flush()
    monkeypatch.setattr("lightning_llm.data.token_store._BYTES_AT_OPEN", 2 * (1000 + 100))
    assert "val.bin was changed: its sha256 is not" in fault(lambda: TokenStore.open(store.path))
    monkeypatch.setattr("lightning_llm.data.token_store._BYTES_AT_OPEN", 2 * (1000 + 100) - 1)
    assert "val.bin was changed: its sha256 is not" in fault(TokenStore.open(store.path).verify)


def test_raw_files_of_other_programs(tmp_path):
    np.arange(50, dtype=np.uint16).tofile(tmp_path / "train.bin")
    np.arange(10, dtype=np.uint16).tofile(tmp_path / "val.bin")
    store = TokenStore.open_raw(tmp_path, vocab_size=50)
    np.testing.assert_array_equal(store.tokens("train"), np.arange(50))
    assert sorted(store.splits) == ["train", "val"]
    assert store.tokenizer_file is None
    assert store.bytes_per_token("val") is None
    assert "token id 49 at position 49, but vocab_size is 49" in fault(
        lambda: TokenStore.open_raw(tmp_path, vocab_size=49)
    )
    assert "dtype 'int8'" in fault(lambda: TokenStore.open_raw(tmp_path, vocab_size=50, dtype="int8"))
    with (tmp_path / "val.bin").open("ab") as file:
        file.write(b"x")
    assert "val.bin has 21 bytes, not a multiple of 2" in fault(lambda: TokenStore.open_raw(tmp_path, vocab_size=50))
    (tmp_path / "val.bin").unlink()
    assert "raw token files missing" in fault(lambda: TokenStore.open_raw(tmp_path, vocab_size=50))


def test_raw_files_of_four_bytes(tmp_path):
    for name in ("train", "val"):
        np.array([0, 70000], dtype=np.uint32).tofile(tmp_path / f"{name}.bin")
    store = TokenStore.open_raw(tmp_path, vocab_size=70001, dtype="uint32")
    assert store.tokens("val").tolist() == [0, 70000]


def test_nothing_is_left_when_writing_fails(tmp_path):
    def interrupted():
        with writer(tmp_path / "deep" / "store") as half:
            half.write("train", np.arange(10), text_bytes=10)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert os.listdir(tmp_path / "deep") == []


def test_full_disk_is_one_line_and_leaves_nothing(tmp_path, monkeypatch):
    if not os.path.exists("/dev/full"):
        pytest.skip("no /dev/full, the file that is always full")
    real = open
    full = lambda file, mode: real(*("/dev/full", "wb") if str(file).endswith("train.bin") else (file, mode))  # noqa: E731
    monkeypatch.setattr(token_store_writer, "open", full, raising=False)

    def write(tokens):
        with writer(tmp_path / "store") as half:
            half.write("train", np.zeros(tokens), text_bytes=1)

    for tokens in (10, 10**6):  # fails when flushed at the end, or at once
        message = fault(lambda tokens=tokens: write(tokens))
        assert message.startswith(f"cannot write the token store {tmp_path / 'store'}: No space left on device; free")
        assert os.listdir(tmp_path) == []


def test_folder_that_exists_is_not_touched(make_store):
    store = make_store()
    assert "exists already" in fault(lambda: writer(store.path).__enter__())
    TokenStore.open(store.path).verify()


def test_parent_that_is_a_file(tmp_path):
    (tmp_path / "file").write_text("")
    assert "cannot write the token store" in fault(lambda: writer(tmp_path / "file" / "store").__enter__())


def test_replacing_keeps_the_old_one_until_the_new_one_is_whole(make_store, tmp_path):
    store = make_store(val=[1, 2, 3])
    mapped = store.tokens("val")
    with pytest.raises(RuntimeError), writer(store.path, replace=True):
        raise RuntimeError
    assert TokenStore.open(store.path) == store
    with writer(store.path, replace=True) as new:
        new.write("train", np.arange(5), text_bytes=5)
        assert TokenStore.open(store.path) == store
    assert TokenStore.open(store.path).splits["train"].tokens == 5
    assert mapped.tolist() == [1, 2, 3]
    assert os.listdir(tmp_path) == ["store"]


def test_killed_writer_leaves_no_store_and_the_next_cleans_up(tmp_path):
    script = (
        "import sys, time, numpy as np\n"
        "from lightning_llm.data.token_store_writer import TokenStoreWriter\n"
        "with TokenStoreWriter(sys.argv[1], vocab_size=9, tokenizer='', source={}) as half:\n"
        "    half.write('train', np.zeros(10**6), text_bytes=1)\n"
        "    print('writing', flush=True)\n"
        "    sys.stdin.read()\n"
    )
    path = tmp_path / "store"
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(path)], env={"PYTHONPATH": ":".join(sys.path)},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )  # fmt: skip
    with process:
        assert process.stdout.readline() == b"writing\n"
        process.kill()
    left = os.listdir(tmp_path)
    assert left == [f".store.partial-{socket.gethostname()}-{process.pid}"]
    assert "does not exist" in fault(lambda: TokenStore.open(path))
    shutil.copytree(tmp_path / left[0], tmp_path / ".store.partial-elsewhere-1")  # of another machine: may be running
    with writer(path) as new:
        new.write("train", np.arange(5), text_bytes=5)
    TokenStore.open(path).verify()
    assert sorted(os.listdir(tmp_path)) == [".store.partial-elsewhere-1", "store"]


def test_running_writer_is_not_disturbed(tmp_path):
    with writer(tmp_path / "store") as first:
        first.write("train", np.arange(5), text_bytes=5)
        (tmp_path / "store").mkdir()  # somebody else was faster
        (tmp_path / "store" / "file").write_text("")
        partial = next(name for name in os.listdir(tmp_path) if name.startswith(".store.partial"))
        assert partial not in [folder.name for folder in token_store_writer._left_behind(tmp_path / "store")]
        shutil.rmtree(tmp_path / "store")
    TokenStore.open(tmp_path / "store").verify()


def test_same_ids_give_the_same_files(make_store):
    first, second = make_store(name="a"), make_store(name="b")
    for name in os.listdir(first.path):
        assert (first.path / name).read_bytes() == (second.path / name).read_bytes()


def test_a_split_that_changed_since_the_store_was_opened_is_refused(make_store):
    store = make_store()
    os.truncate(store.path / "train.bin", 10)
    with pytest.raises(ValueError, match=r"train.bin has 10 bytes instead of 2000 for 1000 tokens of uint16"):
        store.tokens("train")
