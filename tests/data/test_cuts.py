import itertools

from hypothesis import given
from hypothesis import strategies as st
from tokenizers import pre_tokenizers

from lightning_llm.data.cuts import LONGEST_WORD, cut_at_newlines, cut_long_words
from lightning_llm.data.tokenizers import Tokenizer
from tests.data.test_tokenizers import TEXT, texts


@given(texts, st.integers(1, 20), st.integers(1, 30))
def test_cuts_leave_bpe_ids_as_they_are(text, size, first):
    tokenizer = Tokenizer.train_bpe([TEXT], 280)
    pieces = list(cut_at_newlines([text[:first], text[first:]], size))
    assert "".join(pieces) == text
    assert [number for piece in pieces for number in tokenizer.encode(piece)] == tokenizer.encode(text)


def test_cuts_are_made():
    lines = "".join(f"line {number}\n" for number in range(100))
    assert len(list(cut_at_newlines([lines], 10))) == 50
    assert list(cut_at_newlines(["a\n\nb\n c"], 1)) == ["a\n\nb\n c"]


@given(st.text("ab 'é", max_size=200), st.integers(1, 20), st.integers(1, 20))
def test_text_without_newlines_is_cut_at_spaces_and_leaves_ids_as_they_are(text, size, first):
    text += "a b" * 30
    tokenizer = Tokenizer.train_bpe([TEXT], 280)
    whole = list(cut_at_newlines([text], size, longest=60))
    assert list(cut_at_newlines([text[:first], text[first:]], size, longest=60)) == whole
    assert max(map(len, whole)) <= 61
    if all("b" in piece or "a" in piece for piece in whole):
        assert "".join(whole) == text
        if all(after[0] == " " != after[1] and not before[-1].isspace() for before, after in itertools.pairwise(whole)):
            assert [number for piece in whole for number in tokenizer.encode(piece)] == tokenizer.encode(text)


def test_text_without_any_gap_is_cut_at_the_limit():
    assert [len(piece) for piece in cut_at_newlines(["x" * 250], 10, longest=100)] == [100, 100, 50]


@given(texts, st.integers(0, 2000))
def test_text_is_cut_within_long_words_only(text, length):
    splitter = pre_tokenizers.ByteLevel(add_prefix_space=False)
    whole = text + "z" * length + text
    pieces = list(cut_long_words(whole, splitter))
    assert "".join(pieces) == whole
    longest = max((end - start for _, (start, end) in splitter.pre_tokenize_str(whole)), default=0)
    assert len(pieces) == 1 + max(0, longest - 1) // LONGEST_WORD
