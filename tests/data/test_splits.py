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


# ---- shares of the text


def shares(tmp_path, texts, **options):
    """What is said of a store of files with these texts."""
    folder = tmp_path / "folder"
    folder.mkdir()
    for number, text in enumerate(texts):
        (folder / f"{number}.txt").write_text(text)
    said = []
    store = prepare_store(
        str(folder), tmp_path / "store", tokenizer="byte", end_of_text="none", log=said.append, **options
    )
    return store, [line for line in said if line.startswith("warning:")]


def by_place(texts):
    return sorted(texts, key=splits._place)


def test_a_split_with_far_more_or_less_of_the_text_than_it_should_have_is_named(tmp_path):
    small, large = by_place(["a note", "a novel " * 1000])
    store, warnings = shares(tmp_path, [small, large])
    share = store.splits["val"].tokens / (store.splits["val"].tokens + store.splits["train"].tokens)
    assert len(warnings) == 1
    assert warnings[0].startswith(
        f"warning: the val split has {share:.2%} of the tokens instead of about 10%, and the train split has "
        f"{store.splits['train'].tokens:,} tokens: "
    )
    assert "cat FILES | lightning-llm prepare - --out DIR" in warnings[0]


def test_a_split_with_its_share_of_the_text_is_not(tmp_path):
    store, warnings = shares(tmp_path, [f"{number:04} words" for number in range(300)])
    assert not warnings
    (tmp_path / "t.txt").write_text("one text " * 100)
    assert not list(splits.split_warnings(prepare_store(str(tmp_path / "t.txt"), tmp_path / "one", tokenizer="byte")))
    assert "the test split has 0.00% of the tokens instead of about 20%" in next(splits.split_warnings(store, 0.2))


def test_copies_of_one_document_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"nothing is left for the train split: all 3 documents have the same first"):
        shares(tmp_path, ["the same text"] * 3)
    assert not (tmp_path / "store").exists()


def test_copies_stay_together_and_leave_a_text_to_train_on(tmp_path):
    """All of them have hashes that are up to the usual bound."""
    first, second = by_place([text for text in map(str, range(200)) if splits._place(text) <= 0.1])[:2]
    store, _ = shares(tmp_path, [first, second, second])
    assert (store.splits["val"].documents, store.splits["train"].documents) == (1, 2)
