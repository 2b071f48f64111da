import os
import subprocess
import sys
import tracemalloc

import numpy as np
import pytest

from lightning_llm.data import cuts, formats, prepare
from lightning_llm.data.corpora import open_corpus
from lightning_llm.data.prepare import prepare_store
from lightning_llm.data.token_store import TokenStore
from lightning_llm.data.tokenizers import Tokenizer
from tests.data.conftest import fault, text_of

TEXT = "".join(f"Line {n}: caf\u00e9, \u20ac{n * n} and 𝕏\n" for n in range(300))


@pytest.fixture
def text_file(tmp_path):
    path = tmp_path / "text.txt"
    path.write_bytes(TEXT.encode())
    return path


@pytest.fixture
def folder(tmp_path):
    """60 documents of different text and length."""
    path = tmp_path / "folder"
    path.mkdir()
    for n in range(60):
        (path / f"{n}.txt").write_text(f"document {n}\n" * (n + 1))
    return path


@pytest.fixture(params=["char", "byte", "bpe"])
def tokenizer(request):
    return request.param


@pytest.mark.parametrize("piece_bytes", [7, 100, 1 << 22])
def test_one_document_is_split_by_position(text_file, tmp_path, tokenizer, piece_bytes, monkeypatch):
    monkeypatch.setattr(formats, "PIECE_BYTES", piece_bytes)
    monkeypatch.setattr(cuts, "PIECE_CHARACTERS", 50)
    monkeypatch.setattr(prepare, "_BATCH_CHARACTERS", 500)
    store = prepare_store(str(text_file), tmp_path / "out", tokenizer=tokenizer, vocab_size=300)
    end = int(0.9 * len(TEXT))
    trained = Tokenizer.from_file(store.tokenizer_file)
    for split, text in (("train", TEXT[:end]), ("val", TEXT[end:])):
        assert store.tokens(split).tolist() == trained.encode(text)
        assert store.splits[split].bytes == len(text.encode())
        assert store.splits[split].documents == 1
    assert sorted(store.splits) == ["train", "val"]
    assert store.vocab_size == trained.vocab_size
    store.verify()


def test_char_vocabulary_is_that_of_the_whole_text(text_file, tmp_path):
    store = prepare_store(str(text_file), tmp_path / "out", tokenizer="char")
    assert store.vocab_size == len(set(TEXT))


def test_test_split_comes_last(text_file, tmp_path):
    store = prepare_store(str(text_file), tmp_path / "out", tokenizer="byte", test_fraction=0.2)
    first, second = int((1 - 0.1 - 0.2) * len(TEXT)), int((1 - 0.2) * len(TEXT))
    assert text_of(store, "train") == TEXT[:first]
    assert text_of(store, "val") == TEXT[first:second]
    assert text_of(store, "test") == TEXT[second:]


def documents_of(store, split):
    tokenizer = Tokenizer.from_file(store.tokenizer_file)
    tokens = store.tokens(split)
    ends = np.flatnonzero(tokens == tokenizer.eos_token_id)
    assert ends[-1] == len(tokens) - 1
    return [tokenizer.decode(part[part != tokenizer.eos_token_id]) for part in np.split(tokens, ends + 1)[:-1]]


def test_many_documents_go_whole_into_splits_with_end_of_text_behind_each(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(cuts, "PIECE_CHARACTERS", 50)
    store = prepare_store(str(folder), tmp_path / "out", tokenizer="bpe", vocab_size=300, test_fraction=0.3)
    texts = {file.text() for file in open_corpus([str(folder)]).files}
    found = {split: documents_of(store, split) for split in store.splits}
    assert sorted(text for documents in found.values() for text in documents) == sorted(texts)
    for split, documents in found.items():
        assert store.splits[split].documents == len(documents)
        assert store.splits[split].bytes == sum(len(text) for text in documents)
    sizes = {split: len(documents) for split, documents in found.items()}
    # Binomial: 60 documents at 0.1 and 0.3, give or take four standard deviations.
    assert abs(sizes["val"] - 6) < 4 * (60 * 0.1 * 0.9) ** 0.5
    assert abs(sizes["test"] - 18) < 4 * (60 * 0.3 * 0.7) ** 0.5


def test_split_is_a_function_of_the_document_not_of_the_run(folder, tmp_path):
    everything = prepare_store(str(folder), tmp_path / "all", tokenizer="bpe", vocab_size=257)
    moved = tmp_path / "moved"
    moved.mkdir()
    for n in range(60):
        if n % 4:
            (moved / f"renamed {60 - n}").write_bytes((folder / f"{n}.txt").read_bytes())
    most = prepare_store(str(moved), tmp_path / "most", tokenizer="bpe", vocab_size=257)
    for split in ("train", "val"):
        assert set(documents_of(most, split)) <= set(documents_of(everything, split))


def test_char_documents_follow_one_another_without_a_mark(folder, tmp_path):
    store = prepare_store(str(folder), tmp_path / "out", tokenizer="char")
    total = sum(store.splits[split].tokens for split in store.splits)
    assert total == open_corpus([str(folder)]).size


def test_given_tokenizer_is_used_and_kept(text_file, tmp_path):
    ours = Tokenizer.train_bpe([TEXT], 280)
    (tmp_path / "tokenizer.json").write_text(ours.to_str(), encoding="utf-8")
    by_file = prepare_store(str(text_file), tmp_path / "a", tokenizer=str(tmp_path / "tokenizer.json"))
    by_value = prepare_store(str(text_file), tmp_path / "b", tokenizer=ours)
    assert by_file.fingerprint == by_value.fingerprint
    assert by_file.tokenizer_file.read_text(encoding="utf-8") == ours.to_str()


def test_same_text_gives_the_same_store(folder, tmp_path, tokenizer):
    first, second = (
        prepare_store(str(folder), tmp_path / name, tokenizer=tokenizer, vocab_size=280) for name in ("a", "b")
    )
    for name in os.listdir(first.path):
        assert (first.path / name).read_bytes() == (second.path / name).read_bytes()


def test_memory_does_not_grow_with_the_text(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr(formats, "PIECE_BYTES", 1 << 16)
    monkeypatch.setattr(prepare, "_BATCH_CHARACTERS", 1 << 16)
    monkeypatch.setattr(cuts, "PIECE_CHARACTERS", 1 << 14)
    line, peaks = "the quick brown fox jumps over the lazy dog, again\n", []
    for kilobytes in (500, 4500):
        (tmp_path / "text").write_text(line * (kilobytes * 1000 // len(line)))
        tracemalloc.start()
        try:
            prepare_store(str(tmp_path / "text"), tmp_path / str(kilobytes), tokenizer=tokenizer, vocab_size=257)
            peaks.append(tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()
    assert peaks[1] - peaks[0] < 1e6  # of 4e6 more


def test_no_torch_is_imported():
    script = (
        "import sys, lightning_llm.cli.data, lightning_llm.data.prepare;"
        "from lightning_llm.data import TokenStore, Tokenizer, WindowOrder, prepare_store, window_starts;"
        "assert not {'torch', 'lightning', 'rich'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], env={"PYTHONPATH": ":".join(sys.path)}, check=True)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "is empty"),
        (b"text \0 text" * 100, "is binary, not UTF-8 text: byte 5 is NUL"),
        (b"text \xff" * 100, "is not UTF-8 text: byte 5"),
        (b"x", "too little text: nothing is left for the train split"),
    ],
)
def test_bad_text_leaves_nothing(tmp_path, tokenizer, content, expected):
    (tmp_path / "text").write_bytes(content)
    assert expected in fault(lambda: prepare_store(str(tmp_path / "text"), tmp_path / "out", tokenizer=tokenizer))
    assert os.listdir(tmp_path) == ["text"]


def test_missing_text(tmp_path):
    assert "is not a file" in fault(lambda: prepare_store(str(tmp_path / "text"), tmp_path / "out"))


def test_text_that_the_tokenizer_cannot_encode_names_the_file(folder, tmp_path):
    (folder / "30.txt").write_text("caf\u00e9")
    ours = Tokenizer.train_char(["document 0123456789\n"])
    message = fault(lambda: prepare_store(str(folder), tmp_path / "out", tokenizer=ours))
    assert message.startswith(f"{folder / '30.txt'}: character 'a' (U+0061, at position 1)")
    assert os.listdir(tmp_path) == ["folder"]


def test_unknown_tokenizer(text_file, tmp_path):
    message = fault(lambda: prepare_store(str(text_file), tmp_path / "out", tokenizer="word"))
    assert message.startswith("tokenizer 'word' is unknown: choose one of char, byte, bpe, or give the path")


def test_vocabulary_too_small_for_bpe(text_file, tmp_path):
    assert "at least 257" in fault(lambda: prepare_store(str(text_file), tmp_path / "out", vocab_size=100))


@pytest.mark.parametrize("fraction", [-0.1, 0.9, 1.0])
def test_test_fraction_out_of_range(text_file, tmp_path, fraction):
    message = fault(lambda: prepare_store(str(text_file), tmp_path / "out", test_fraction=fraction))
    assert f"test_fraction must be at least 0 and below 0.9, got {fraction}" in message


def test_folder_that_exists_is_kept(text_file, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("")
    assert "exists already" in fault(lambda: prepare_store(str(text_file), tmp_path / "out"))
    assert os.listdir(tmp_path / "out") == ["mine"]


def test_progress_counts_the_bytes_of_the_text(folder, tmp_path, monkeypatch):
    phases = {}

    class Bar:
        def __enter__(self):
            return self.phase

        def __exit__(self, *_):
            pass

        def phase(self, name):
            phases[name] = 0
            return lambda size: phases.update({name: phases[name] + size})

    monkeypatch.setattr(prepare, "progress_bar", lambda total, show: Bar())
    prepare_store(str(folder), tmp_path / "out", tokenizer="bpe", vocab_size=257)
    assert phases == dict.fromkeys(["training tokenizer bpe", "encoding"], open_corpus([str(folder)]).size)


def test_progress_bar_is_drawn_and_the_store_is_the_same(text_file, tmp_path, capsys):
    shown = prepare_store(str(text_file), tmp_path / "a", tokenizer="byte", progress=True)
    assert shown.fingerprint == prepare_store(str(text_file), tmp_path / "b", tokenizer="byte").fingerprint
    assert capsys.readouterr() == ("", "")  # no terminal, no bar


def test_store_of_the_standard_library(tmp_path):
    store = prepare_store("stdlib", tmp_path / "out", tokenizer="byte")
    chosen, count = store.splits["val"].documents, len(open_corpus(["stdlib"]).files)
    assert abs(chosen - count / 10) < 4 * (count * 0.1 * 0.9) ** 0.5  # each by a hash of its own: a binomial draw
    assert TokenStore.open(tmp_path / "out") == store


def test_a_folder_named_through_one_that_is_missing_is_opened_where_it_was_written(tmp_path):
    (tmp_path / "text.txt").write_text("to be or not to be\n" * 100)
    store = prepare_store([str(tmp_path / "text.txt")], tmp_path / "missing" / ".." / "store", tokenizer="byte")
    assert store.path == tmp_path / "store"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["store", "text.txt"]
