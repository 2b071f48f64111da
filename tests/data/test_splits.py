import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_llm.data import splits
from lightning_llm.data.corpora import Corpus
from lightning_llm.data.formats import TextFile
from lightning_llm.data.prepare import prepare_store
from lightning_llm.data.splits import Shard
from tests.data.conftest import text_of


@given(st.integers(2, 10**7))
def test_split_is_where_nanogpt_cuts(length):
    assert int((1 - splits.VALIDATION_FRACTION - 0.0) * length) == int(0.9 * length)


@pytest.mark.parametrize("count", [2, 3, 4])
def test_few_documents_still_train_and_validate(tmp_path, count):
    for attempt in range(20):
        folder = tmp_path / str(attempt)
        folder.mkdir()
        for n in range(count):
            (folder / str(n)).write_text(f"document {n} of attempt {attempt}")
        store = prepare_store(str(folder), tmp_path / f"out-{attempt}", tokenizer="byte")
        assert store.splits["train"].documents + store.splits["val"].documents == count
        assert store.splits["train"].documents >= 1
        assert store.splits["val"].documents >= 1


@pytest.mark.parametrize("places", [(0.01, 0.02), (0.8, 0.9), (0.05, 0.5)])
def test_two_documents_are_never_in_one_split(tmp_path, monkeypatch, places):
    for name, text in (("a", "one"), ("b", "other")):
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(splits, "_place", lambda text: places[text == "other"])
    store = prepare_store([str(tmp_path / "a"), str(tmp_path / "b")], tmp_path / "out", tokenizer="byte")
    assert (text_of(store, "val"), text_of(store, "train")) == ("one", "other")


@pytest.mark.parametrize("count", [1, 2, 5, 1000])
def test_shards_cover_every_file_once(count):
    corpus = Corpus(("x",), tuple(TextFile(f"{n}", n * 37 % 11 + 1, lambda: None) for n in range(30)))
    spans = [list(Shard(index, count).spans(corpus)) for index in range(1, count + 1)]
    assert all(sum(shard[n] is not None for shard in spans) == 1 for n in range(30))
