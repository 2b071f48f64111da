"""A killed prepare resumes where it was, and never leaves a folder that loads as a store."""

import os
import random
import signal
import subprocess
import sys

import pytest

from lightning_llm.data import formats, prepare
from lightning_llm.data.prepare import prepare_store
from lightning_llm.data.token_store import TokenStore
from lightning_llm.data.token_store_writer import TokenStoreWriter, unfinished_tokenizer


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch):
    monkeypatch.setattr(formats, "PIECE_BYTES", 1000)
    monkeypatch.setattr(prepare, "_BATCH_CHARACTERS", 1000)
    monkeypatch.setattr(prepare, "_COMMITTED_CHARACTERS", 1)


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "text"
    path.mkdir()
    for n in range(30):
        (path / f"{n}.txt").write_text(f"document {n} é\n" * (n * 10 + 1), encoding="utf-8")
    return path


def content(path):
    return {name: (path / name).read_bytes() for name in sorted(os.listdir(path))}


def interrupt_at(monkeypatch, number):
    """Ctrl-C at the commit of this number: what was committed is kept, as by a kill, and this process continues."""
    real, count = TokenStoreWriter.commit, 0

    def commit(self, cursor):
        nonlocal count
        real(self, cursor)
        count += 1
        if count == number:
            for split in self._splits.values():
                split.file.write(b"half")  # not committed
            raise KeyboardInterrupt

    monkeypatch.setattr(TokenStoreWriter, "commit", commit)
    return lambda: monkeypatch.setattr(TokenStoreWriter, "commit", real)


@pytest.mark.parametrize("number", [1, 2, 9, 25])
@pytest.mark.parametrize("tokenizer", ["char", "bpe"])
@pytest.mark.parametrize("one", [True, False])
def test_interrupted_run_goes_on(folder, tmp_path, monkeypatch, tokenizer, number, one):
    given = str(folder / "29.txt") if one else str(folder)
    number = min(number, 3) if one else number
    whole = prepare_store(given, tmp_path / "whole", tokenizer=tokenizer, vocab_size=270)
    restore = interrupt_at(monkeypatch, number)
    with pytest.raises(KeyboardInterrupt):
        prepare_store(given, tmp_path / "out", tokenizer=tokenizer, vocab_size=270)
    restore()
    with pytest.raises(ValueError, match="does not exist"):
        TokenStore.open(tmp_path / "out")
    [left] = [path for path in tmp_path.iterdir() if path.name.startswith(".out.partial")]
    written = (left / "train.bin").stat().st_size
    (left / ".journal.json.1.tmp").write_text("")  # a kill during a write
    monkeypatch.setattr(prepare, "train_tokenizer", lambda *_: pytest.fail("the tokenizer was there"))
    encoded = []
    real = prepare._encoded
    monkeypatch.setattr(prepare, "_encoded", lambda batch, with_: encoded.extend(batch) or real(batch, with_))
    again = prepare_store(given, tmp_path / "out", tokenizer=tokenizer, vocab_size=270)
    assert content(again.path) == content(whole.path)
    assert sorted(os.listdir(tmp_path)) == ["out", "text", "whole"]
    total = sum(split.bytes for split in again.splits.values())
    assert number == 1 or sum(len(segment.text.encode()) for segment in encoded) < total
    assert written > 4 or number == 1


@pytest.mark.parametrize("change", ["text", "options", "damage", "journal"])
def test_what_does_not_fit_is_begun_anew(folder, tmp_path, monkeypatch, change):
    restore = interrupt_at(monkeypatch, 9)
    with pytest.raises(KeyboardInterrupt):
        prepare_store(str(folder), tmp_path / "out", tokenizer="byte")
    restore()
    [left] = [path for path in tmp_path.iterdir() if path.name.startswith(".out.partial")]
    options = {"tokenizer": "byte"}
    if change == "text":
        (folder / "0.txt").write_text("another text")
    elif change == "options":
        options["tokenizer"] = "char"
    elif change == "damage":
        with (left / "train.bin").open("r+b") as file:
            file.write(b"zz")
    else:
        (left / "journal.json").write_text("{")
    store = prepare_store(str(folder), tmp_path / "out", **options)
    assert content(store.path) == content(prepare_store(str(folder), tmp_path / "whole", **options).path)
    assert sorted(os.listdir(tmp_path)) == ["out", "text", "whole"]


def test_nothing_left_means_no_tokenizer(tmp_path):
    assert unfinished_tokenizer(tmp_path / "out", "key") is None


SCRIPT = """
import sys
from lightning_llm.data import formats, prepare
formats.PIECE_BYTES = prepare._BATCH_CHARACTERS = 20_000
prepare._COMMITTED_CHARACTERS = 1
print("ready", flush=True)
prepare.prepare_store(sys.argv[1], sys.argv[2], tokenizer=sys.argv[3], vocab_size=300)
"""


@pytest.mark.slow
def test_killed_at_ten_moments(tmp_path):
    (tmp_path / "text.txt").write_text("".join(f"line {n} of {n * n % 977}\n" for n in range(300_000)))
    (tmp_path / "text.jsonl").write_text("".join(f'{{"text": "document {n}"}}\n' for n in range(20_000)))
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "text.*")]
    environment = {**os.environ, "PYTHONPATH": ":".join(filter(None, sys.path))}
    subprocess.run([*command, str(tmp_path / "whole"), "bpe"], env=environment, check=True, capture_output=True)
    expected, draw, runs, kills = content(tmp_path / "whole"), random.Random(0), 0, 0
    while kills < 10:
        out = tmp_path / f"out-{runs}"
        process = subprocess.Popen([*command, str(out), "bpe"], env=environment, stdout=subprocess.PIPE)
        with process:
            assert process.stdout.readline() == b"ready\n"
            try:
                process.wait(draw.uniform(0, 0.6))
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGKILL)
                process.wait()
                kills += 1
        assert process.returncode in (0, -signal.SIGKILL)
        if out.exists():  # finished, perhaps killed right after: the next one begins another store
            assert content(out) == expected
            runs += 1
        else:
            with pytest.raises(ValueError, match="does not exist"):
                TokenStore.open(out)
    out = tmp_path / f"out-{runs}"
    subprocess.run([*command, str(out), "bpe"], env=environment, check=True, capture_output=True)
    assert content(out) == expected
    assert not [name for name in os.listdir(tmp_path) if ".partial" in name]
