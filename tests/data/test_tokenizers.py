import hashlib
import json
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from lightning_llm.data import tokenizers as tokenizers_module
from lightning_llm.data.cuts import LONGEST_WORD, PIECE_CHARACTERS, cut_at_newlines
from lightning_llm.data.tokenizers import Tokenizer, byte_alphabet

TEXT = (
    "def f(x):\n    return x + 1\n\n\nclass A:\r\n\t'''It's é, \u20ac and 𝕏 , e\u0301 .'''\n  x = 12345  # they're  \n"
    "text, text; text: the text that the text is\n"
)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=60) | st.text("ab \n\r\t's1.\u00a0é", max_size=200)


@pytest.fixture(scope="module")
def tokenizers():
    foreign = Backend(models.WordLevel({"the": 0, "text": 1, "<unk>": 2, "</s>": 3}, unk_token="<unk>"))
    foreign.pre_tokenizer = pre_tokenizers.Whitespace()
    return {
        "char": Tokenizer.train_char([TEXT[:50], TEXT[50:]]),
        "byte": Tokenizer.train_byte(),
        "bpe": Tokenizer.train_bpe([TEXT] * 3, 300),
        "file": Tokenizer(foreign.to_str()),
    }


KINDS = ["char", "byte", "bpe"]


@pytest.mark.parametrize("kind", KINDS)
def test_text_comes_back(tokenizers, kind):
    tokenizer = tokenizers[kind]
    assert tokenizer.kind == kind
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT
    assert tokenizer.encode("") == []
    assert tokenizer.decode([]) == ""


@pytest.mark.parametrize("kind", KINDS)
def test_file_comes_back_as_the_same_tokenizer(tokenizers, kind, tmp_path):
    tokenizer = tokenizers[kind]
    (tmp_path / "tokenizer.json").write_text(tokenizer.to_str(), encoding="utf-8")
    for again in (Tokenizer.from_file(tmp_path / "tokenizer.json"), Tokenizer.from_str(tokenizer.to_str())):
        assert again.to_str() == tokenizer.to_str()
        assert (again.kind, again.vocab_size, again.eos_token_id) == (
            kind,
            tokenizer.vocab_size,
            tokenizer.eos_token_id,
        )
        assert again.encode(TEXT) == tokenizer.encode(TEXT)


@pytest.mark.parametrize("kind", KINDS)
def test_transformers_reads_the_file_and_agrees(tokenizers, kind, tmp_path):
    from transformers import PreTrainedTokenizerFast

    tokenizer = tokenizers[kind]
    (tmp_path / "tokenizer.json").write_text(tokenizer.to_str(), encoding="utf-8")
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    assert len(theirs) == tokenizer.vocab_size
    assert theirs(TEXT)["input_ids"] == tokenizer.encode(TEXT)
    assert theirs.decode(tokenizer.encode(TEXT)) == TEXT


@given(texts)
def test_fast_ways_agree_with_the_library(text):
    for tokenizer in (Tokenizer.train_byte(), Tokenizer.train_char([text + "x"])):
        backend = Backend.from_str(tokenizer.to_str())
        ids = tokenizer.encode(text)
        assert ids == backend.encode(text).ids
        assert tokenizer.decode(ids) == text == backend.decode(ids)


def test_char_numbers_sorted_characters():
    tokenizer = Tokenizer.train_char(["hello\n", "wörld 𝕏"])
    characters = sorted(set("hello\nwörld 𝕏"))
    assert tokenizer.vocab_size == len(characters)
    assert tokenizer.encode("".join(characters)) == list(range(len(characters)))
    assert tokenizer.encode("\n") == [0]
    assert tokenizer.eos_token_id is None
    assert tokenizer.dtype == np.dtype("<u2")


def test_byte_ids_are_the_bytes():
    tokenizer = Tokenizer.train_byte()
    assert tokenizer.vocab_size == 256
    assert tokenizer.eos_token_id is None
    assert tokenizer.encode(TEXT) == list(TEXT.encode())
    assert tokenizer.decode(range(128)) == "".join(map(chr, range(128)))
    assert tokenizer.decode(b"\xe2\x82 \xff") == "\ufffd \ufffd"


def test_bpe_has_the_size_asked_for_and_an_end_of_text(tokenizers):
    tokenizer = tokenizers["bpe"]
    assert tokenizer.vocab_size == 300
    assert tokenizer.decode([tokenizer.eos_token_id]) == "<|endoftext|>"
    assert tokenizer.encode("a<|endoftext|>").count(tokenizer.eos_token_id) == 1
    assert len(tokenizer.encode(TEXT)) < len(TEXT.encode())
    assert tokenizer.decode(tokenizer.encode("\u2603 never seen \x00")) == "\u2603 never seen \x00"


def test_bpe_stops_where_nothing_is_left_to_merge():
    assert Tokenizer.train_bpe(["ab ab"], 1000).vocab_size < 270


def test_bpe_training_is_the_same_in_every_process():
    script = (
        "import hashlib; from lightning_llm.data.tokenizers import Tokenizer; import sys;"
        "print(hashlib.sha256(Tokenizer.train_bpe([sys.argv[1]], 300).to_str().encode()).hexdigest())"
    )
    digests = {
        subprocess.run(
            [sys.executable, "-c", script, TEXT], env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            check=True, capture_output=True, text=True
        ).stdout.strip()
        for seed in ("1", "2")
    }  # fmt: skip
    assert digests == {hashlib.sha256(Tokenizer.train_bpe([TEXT], 300).to_str().encode()).hexdigest()}


def test_dtype_grows_with_the_vocabulary():
    characters = "".join(map(chr, [*range(0xD800), *range(0xE000, 0x10800)]))
    assert len(characters) == 1 << 16 == Tokenizer.train_char([characters]).vocab_size
    assert Tokenizer.train_char([characters]).dtype == np.dtype("<u2")
    larger = Tokenizer.train_char([characters + chr(0x10800)])
    assert larger.dtype == np.dtype("<u4")
    assert larger.encode(chr(0x10800)) == [1 << 16]


@pytest.mark.parametrize("kind", [*KINDS, "file"])
def test_stream_gives_the_decoded_text_piece_by_piece(tokenizers, kind):
    tokenizer = tokenizers[kind]
    ids = tokenizer.encode(TEXT)
    stream = tokenizer.stream()
    pieces = [stream.push(number) for number in ids]
    assert "".join(pieces) + stream.flush() == tokenizer.decode(ids)
    assert len([piece for piece in pieces if piece]) > len(pieces) / 2
    assert not any("\ufffd" in piece for piece in pieces)


@given(st.lists(st.integers(0, 299), max_size=30))
def test_stream_of_any_ids_is_their_decoded_text(ids):
    for tokenizer in (Tokenizer.train_byte(), Tokenizer.train_bpe([TEXT] * 3, 300)):
        known = [number % tokenizer.vocab_size for number in ids]
        stream = tokenizer.stream()
        assert "".join(map(stream.push, known)) + stream.flush() == tokenizer.decode(known)


def test_stream_holds_back_an_unfinished_character():
    stream = Tokenizer.train_byte().stream()
    assert [stream.push(byte) for byte in "é€".encode()] == ["", "é", "", "", "€"]
    stream.push(0xE2)
    assert stream.flush() == "\ufffd"


def test_alphabet_is_that_of_the_library():
    assert sorted(byte_alphabet()) == sorted(pre_tokenizers.ByteLevel.alphabet())
    assert byte_alphabet()[ord(" ")] == "Ġ"


def test_foreign_file_is_taken_as_it_is(tokenizers):
    tokenizer = tokenizers["file"]
    assert (tokenizer.kind, tokenizer.vocab_size, tokenizer.eos_token_id) == ("file", 4, 3)
    assert tokenizer.encode("the text, the") == [0, 1, 2, 0]


def test_truncation_and_padding_in_a_file_do_not_cut_text(tokenizers):
    content = json.loads(tokenizers["bpe"].to_str())
    content["truncation"] = {"max_length": 2, "strategy": "LongestFirst", "stride": 0, "direction": "Right"}
    content["padding"] = {
        "strategy": {"Fixed": 500}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0,
        "pad_token": "<|endoftext|>",
    }  # fmt: skip
    assert Tokenizer(json.dumps(content)).encode(TEXT) == tokenizers["bpe"].encode(TEXT)


@pytest.mark.parametrize(
    "change",
    [
        {"normalizer": {"type": "Lowercase"}},
        {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}},
    ],
)
def test_only_what_is_exactly_our_kind_takes_the_fast_way(tokenizers, change):
    assert Tokenizer(json.dumps({**json.loads(tokenizers["bpe"].to_str()), **change})).kind == "file"


def test_character_outside_the_vocabulary_is_named():
    tokenizer = Tokenizer.train_char(["abc"])
    for text, expected in (
        ("abé", r"character 'é' \(U\+00E9, at position 2\)"),
        ("aB", r"character 'B' \(U\+0042, at"),
    ):
        with pytest.raises(ValueError, match=f"^{expected}.*3 characters of the tokenizer$"):
            tokenizer.encode(text)


def test_character_outside_the_vocabulary_is_refused_by_the_library_too(tokenizers):
    with pytest.raises(Exception, match="WordLevel error"):
        Backend.from_str(tokenizers["char"].to_str()).encode("☃")


@pytest.mark.parametrize("kind", KINDS)
def test_half_a_surrogate_pair_is_refused(tokenizers, kind):
    with pytest.raises(
        ValueError, match=r"^character '\\ud800' .*(half of a surrogate pair|not among the \d+ characters)"
    ):
        tokenizers[kind].encode("a\ud800")


@pytest.mark.parametrize("number", [-1, 300])
@pytest.mark.parametrize("kind", KINDS)
def test_id_outside_the_vocabulary_is_refused(tokenizers, kind, number):
    with pytest.raises(ValueError, match=f"token id {number} is not in the tokenizer's vocabulary of"):
        tokenizers[kind].decode([0, number])


def test_bpe_needs_room_for_the_bytes():
    with pytest.raises(ValueError, match=r"vocab_size must be at least 257 with tokenizer 'bpe'.*got 256"):
        Tokenizer.train_bpe([TEXT], 256)


def test_char_needs_text():
    with pytest.raises(ValueError, match="tokenizer 'char' needs text"):
        Tokenizer.train_char([""])


def test_file_that_is_no_tokenizer(tmp_path):
    file = tmp_path / "tokenizer.json"
    with pytest.raises(ValueError, match=f"tokenizer '{file}': No such file or directory"):
        Tokenizer.from_file(file)
    for content in (b"{}", b"nonsense", b"\xff\xfe"):
        file.write_bytes(content)
        with pytest.raises(ValueError, match=f"tokenizer '{file}': "):
            Tokenizer.from_file(file)


def test_characters_that_a_vocabulary_would_drop_are_refused():
    backend = Backend(models.BPE({"a": 0, "b": 1}, []))
    tokenizer = Tokenizer(backend.to_str())
    assert tokenizer.encode("ab ba") == [0, 1, 1, 0]
    with pytest.raises(ValueError, match=r"character 'c' \(U\+0063, at position 2\) is not in the vocabulary"):
        tokenizer.encode("abc")


@pytest.mark.parametrize(("content", "options"), [("a b", {}), ("<x>", {"lstrip": True}), ("<x>", {"rstrip": True})])
def test_added_token_that_reaches_over_a_cut_makes_the_kind_file(tokenizers, content, options):
    backend = Backend.from_str(tokenizers["bpe"].to_str())
    backend.add_tokens([AddedToken(content, **options)])
    assert Tokenizer(backend.to_str()).kind == "file"


LONG_WORDS = {
    "letters": "".join(chr(97 + number * number % 23) for number in range(9000)),
    "one letter": "x" * 9000,
    "signs": "=" * 9000,
    "spaces": " " * 9000,
    "digits": "1234567890" * 900,
    "separators": "\x1c" * 9000,
    "behind a space": " " + "y" * 1030,
}


@pytest.mark.parametrize("word", LONG_WORDS.values(), ids=LONG_WORDS)
def test_bpe_learns_from_words_of_limited_length_and_still_encodes_whole_ones(word, monkeypatch):
    splitter, learnt_from = pre_tokenizers.ByteLevel(add_prefix_space=False), []
    real = tokenizers_module.cut_long_words

    def recorded(text, splitter):
        for piece in real(text, splitter):
            learnt_from.append(piece)
            yield piece

    text = f"before {word} after\n{word}\n"
    monkeypatch.setattr(tokenizers_module, "cut_long_words", recorded)
    tokenizer = Tokenizer.train_bpe([text], 300)
    lengths = [end - start for piece in learnt_from for _, (start, end) in splitter.pre_tokenize_str(piece)]
    assert max(lengths) == LONGEST_WORD
    assert max(end - start for _, (start, end) in splitter.pre_tokenize_str(text)) > LONGEST_WORD
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode(text) == Backend.from_str(tokenizer.to_str()).encode(text).ids


def test_pieces_of_a_text_without_a_gap_have_the_ids_that_encoding_it_whole_gives(monkeypatch):
    monkeypatch.setattr(tokenizers_module, "LONGEST_PIECE", 1000)
    tokenizer, text = Tokenizer.train_bpe([TEXT] * 3, 300), "a-text" * 1000
    pieces = list(cut_at_newlines([text], PIECE_CHARACTERS, 1000))
    assert [len(piece) for piece in pieces] == [1000] * 6
    ids = [number for piece in pieces for number in tokenizer.encode(piece)]
    assert ids != Backend.from_str(tokenizer.to_str()).encode(text).ids
    assert [each.tolist() for each in tokenizer.encode_batch([text, "", "a b"])] == [ids, [], tokenizer.encode("a b")]
