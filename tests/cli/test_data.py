import numpy as np
import pytest

from lightning_llm.cli.data import run_data
from lightning_llm.data import token_store
from lightning_llm.data.prepare import prepare_store
from lightning_llm.data.token_store import TokenStore, by_powers_of_two, document_lengths
from lightning_llm.data.tokenizers import Tokenizer


@pytest.fixture
def store(tmp_path):
    (tmp_path / "text").mkdir()
    for n in range(60):
        (tmp_path / "text" / f"{n}.txt").write_text(f"document {n}\n" * (n + 1))
    return prepare_store(str(tmp_path / "text"), tmp_path / "store", tokenizer="bpe", vocab_size=280)


def refused(capsys, *argv):
    assert run_data(list(map(str, argv))) == 2
    error = capsys.readouterr().err
    assert error.startswith("lightning-llm data")
    assert error.count("\n") == 1
    return error


def test_inspect_shows_counts_text_and_lengths(store, capsys):
    assert run_data(["inspect", str(store.path), "--tokens", "9", "--start", "3"]) == 0
    out = capsys.readouterr().out
    for split in store.splits.values():
        assert f"{split.tokens:,} tokens" in out
        assert f"{split.documents:,} documents" in out
    assert "280 ids, uint16" in out
    window = Tokenizer.from_file(store.tokenizer_file).decode(store.tokens("train")[3:12])
    assert f"train, tokens 3 to 11:\n{window}" in out
    counted = [int(line.split()[3]) for line in out.splitlines() if " to " in line and not line.startswith("train")]
    assert sum(counted) == store.splits["train"].documents


@pytest.mark.parametrize("block", [3, 50, 1 << 20])
def test_lengths_are_those_of_the_documents(store, monkeypatch, block):
    monkeypatch.setattr(token_store, "_LENGTHS_BLOCK", block)
    for split in store.splits:
        tokens = store.tokens(split)
        parts = np.split(tokens, np.flatnonzero(tokens == store.eos_token_id) + 1)[:-1]
        expected = sorted(len(part) - 1 for part in parts)
        assert sorted(document_lengths(store, split).elements()) == expected
    assert list(by_powers_of_two(token_store.Counter({0: 1, 1: 2, 5: 3, 7: 1}))) == [
        (0, 0, 1),
        (1, 1, 2),
        (2, 3, 0),
        (4, 7, 4),
    ]


def test_lengths_take_time_by_block_and_not_by_document(store, monkeypatch):
    """A store of 10^8 end-of-text ids would take 8 s."""
    monkeypatch.setattr(TokenStore, "tokens", lambda self, split: np.empty(1 << 22, dtype=np.uint16))
    monkeypatch.setattr(TokenStore, "read", lambda self, split, start, count: np.zeros(count, dtype=np.uint16))
    updates = []
    monkeypatch.setattr(token_store.Counter, "update", lambda self, found: updates.append(found))
    document_lengths(store, "train")
    assert updates[1:] == [{0: (1 << 22) - 1}]  # after that of the constructor


def test_store_without_end_of_text(store, tmp_path, capsys):
    one = prepare_store(str(tmp_path / "text" / "59.txt"), tmp_path / "one", tokenizer="bpe", vocab_size=280)
    assert one.eos_token_id is None  # nothing ends a single document
    assert store.eos_token_id == Tokenizer.from_file(store.tokenizer_file).eos_token_id == 0
    assert run_data(["inspect", str(one.path)]) == 0
    assert "lengths of documents: unknown" in capsys.readouterr().out


def test_verify(store, capsys):
    assert run_data(["verify", str(store.path)]) == 0
    assert "good (sizes, checksums and ids)" in capsys.readouterr().out
    with (store.path / "val.bin").open("r+b") as file:
        file.write(b"\1\0")
    assert "val.bin was changed" in refused(capsys, "verify", store.path)
    with (store.path / "val.bin").open("ab") as file:
        file.write(b"\1\0")
    assert "val.bin has" in refused(capsys, "verify", store.path)


def test_raw_files(tmp_path, capsys):
    for name in ("train", "val"):
        np.arange(100, dtype=np.uint16).tofile(tmp_path / f"{name}.bin")
    raw = [str(tmp_path), "--raw-dtype", "uint16", "--vocab-size"]
    assert run_data(["inspect", *raw, "100", "--start", "5", "--tokens", "3"]) == 0
    assert "train, tokens 5 to 7:\n5 6 7\n" in capsys.readouterr().out
    assert run_data(["verify", *raw, "100"]) == 0
    assert "there are no checksums" in capsys.readouterr().out
    assert "token id 99 at position 99" in refused(capsys, "verify", *raw, "99")
    assert "go together" in refused(capsys, "verify", tmp_path, "--raw-dtype", "uint16")


def test_mistakes(store, tmp_path, capsys):
    assert "does not exist" in refused(capsys, "inspect", tmp_path / "nowhere")
    assert "has no test split" in refused(capsys, "inspect", store.path, "--split", "test")
    assert "--start -1" in refused(capsys, "inspect", store.path, "--start", "-1")
    assert "at least 1" in refused(capsys, "inspect", store.path, "--tokens", "0")
    assert "required" in refused(capsys)
    assert "invalid choice" in refused(capsys, "look", store.path)
    assert TokenStore.open(store.path) == store
