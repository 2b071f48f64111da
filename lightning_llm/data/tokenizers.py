"""Text to token ids and back, by character, by byte or byte pairs; all kept as Hugging Face ``tokenizer.json``.

=========  ==============================================================================  ==================
kind       ids                                                                             end of text
=========  ==============================================================================  ==================
``char``   one per character, numbered in the order of their code points                   none
``byte``   the bytes of the UTF-8 text themselves, 0 to 255                                none
``bpe``    byte-level byte-pair encoding as in GPT-2 (Radford et al. 2019, section 2.2)    ``<|endoftext|>``
``file``   whatever a given ``tokenizer.json`` says                                        if it has one
=========  ==============================================================================  ==================

The file alone says everything: ``transformers.PreTrainedTokenizerFast(tokenizer_file=…)`` encodes and decodes the same.
Reading one back recognises the first three kinds, which have a faster way here than through the library.
"""

import codecs
import contextlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from tokenizers import Regex, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from lightning_llm.data.cuts import LONGEST_PIECE, PIECE_CHARACTERS, cut_at_newlines, cut_long_words
from lightning_llm.data.tokenizer_checks import LARGEST_TOKENIZER, MOST_IDS, read_content
from lightning_llm.io.untrusted import read_text

Kind = Literal["char", "byte", "bpe", "file"]
Ids = NDArray[np.unsignedinteger[Any]]

END_OF_TEXT = "<|endoftext|>"
# What a tokenizer.json calls it is not written in it: the names that GPT-2, Llama 3, Llama 2 and Gemma use.
END_OF_TEXT_NAMES = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>")
SMALLEST_BPE_VOCABULARY = 257  # the bytes and the end of text
LARGEST_VOCABULARY = MOST_IDS

_ONE_CHARACTER = r"[\s\S]"


def byte_alphabet() -> list[str]:
    """GPT-2's printable stand-in for each byte (``bytes_to_unicode`` in its encoder.py), indexed by byte."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    stand_ins = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(stand_ins)) for byte in range(256)]


class Tokenizer:
    """A tokenizer, made from the text of a ``tokenizer.json``.

    Args:
        content: The file's content.

    Attributes:
        kind: ``char``, ``byte``, ``bpe`` or ``file``.
        vocab_size: Number of ids; the largest is one less.
        eos_token_id: The id that ends a document, or ``None`` where there is none.

    Raises:
        ValueError: If the content is not that of a ``tokenizer.json``.
    """

    def __init__(self, content: str) -> None:
        parsed = read_content(content)
        with _library("not a tokenizer.json"):
            self._backend = Backend.from_str(content)
        self._content = content
        self._backend.no_truncation()  # a file may carry both, for inference
        self._backend.no_padding()
        vocabulary = self._backend.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        if not vocabulary:
            raise ValueError("not a tokenizer.json: its vocabulary is empty")
        self.eos_token_id = next((vocabulary[name] for name in END_OF_TEXT_NAMES if name in vocabulary), None)
        self.kind = _kind(parsed)
        self._drops_characters = self.kind == "file" and _drops_characters(parsed)
        self._checked: set[int] = set()
        if self.kind == "char":
            self._characters = sorted(vocabulary, key=lambda character: vocabulary[character])
            self._ids_of_code_points = np.full(max(map(ord, vocabulary)) + 1, -1, dtype=np.int32)
            self._ids_of_code_points[list(map(ord, self._characters))] = np.arange(self.vocab_size)

    @classmethod
    def from_str(cls, content: str) -> "Tokenizer":
        """From the content of a ``tokenizer.json``."""
        return cls(content)

    @classmethod
    def from_file(cls, path: str | Path) -> "Tokenizer":
        """From a ``tokenizer.json``.

        Raises:
            ValueError: If there is none, or it is something else.
        """
        try:
            return cls(read_text(path, LARGEST_TOKENIZER))
        except OSError as error:
            raise ValueError(f"tokenizer {str(path)!r}: {error.strerror}") from error
        except ValueError as error:
            raise ValueError(f"tokenizer {str(path)!r}: {error}") from error

    @classmethod
    def train_char(cls, texts: Iterable[str]) -> "Tokenizer":
        """One id per character that occurs, sorted by code point.

        Raises:
            ValueError: If there is no text.
        """
        seen = np.zeros(0x110000, dtype=bool)
        for text in texts:
            seen[_code_points(text)] = True
        vocabulary = {chr(code): number for number, code in enumerate(np.flatnonzero(seen).tolist())}
        if not vocabulary:
            raise ValueError("tokenizer 'char' needs text to take its characters from, got none")
        # The name of the unknown token is not in the vocabulary, so that an unknown character raises everywhere.
        backend = Backend(models.WordLevel(vocabulary, unk_token="<unknown character>"))
        backend.pre_tokenizer = pre_tokenizers.Split(Regex(_ONE_CHARACTER), "isolated")
        backend.decoder = decoders.Fuse()
        return cls(backend.to_str())

    @classmethod
    def train_byte(cls) -> "Tokenizer":
        """The 256 bytes."""
        backend = Backend(models.BPE({stand_in: byte for byte, stand_in in enumerate(byte_alphabet())}, []))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.decoder = decoders.ByteLevel()
        return cls(backend.to_str())

    @classmethod
    def train_bpe(cls, texts: Iterable[str], vocab_size: int, special_tokens: Sequence[str] = ()) -> "Tokenizer":
        """Byte-level byte-pair encoding; the same text gives the same tokenizer.

        Args:
            texts: Documents, or pieces of documents from :func:`cut_at_newlines`.
            vocab_size: Ids in all. Fewer come out where the text has nothing left to merge.
            special_tokens: Beside the end of text: each is one id wherever it stands, and nothing is learnt from it.

        Raises:
            ValueError: As :func:`check_bpe`.
        """
        special = check_bpe(vocab_size, special_tokens)
        backend = Backend(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=special,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        # the trainer does not know them yet: it would learn pairs of their letters
        apart = re.compile("|".join(re.escape(token) for token in sorted(special, key=len, reverse=True)))
        parts = (part for text in texts for part in apart.split(text))
        splitter = pre_tokenizers.ByteLevel(add_prefix_space=False)  # the backend's own is locked while it learns
        words = (piece for part in parts for piece in cut_long_words(part, splitter))
        backend.train_from_iterator(words, trainer)
        return cls(backend.to_str())

    @property
    def dtype(self) -> np.dtype[Any]:
        """The smaller of little-endian uint16 and uint32 that holds every id."""
        return np.dtype("<u2" if self.vocab_size <= 1 << 16 else "<u4")

    def to_str(self) -> str:
        """The content of the ``tokenizer.json``."""
        return self._content

    def encode(self, text: str) -> list[int]:
        """Ids of a text. Errors as in :meth:`encode_array`."""
        ids: list[int] = self.encode_array(text).tolist()
        return ids

    def encode_array(self, text: str) -> Ids:
        """Ids of a text, shape (tokens,), in :attr:`dtype`. Nothing is added before or behind.

        Raises:
            ValueError: If the text has what the vocabulary cannot express (names the character).
        """
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """Ids of each text; byte-pair encoding uses every core. Errors as in :meth:`encode_array`."""
        if self.kind == "char":
            return [self._char_ids(text) for text in texts]
        if self.kind == "byte":
            return [np.frombuffer(_utf8(text), dtype=np.uint8).astype(self.dtype) for text in texts]
        for text in texts:
            if not text.isascii():
                _utf8(text)  # raises on what the library would raise a TypeError on
        if self.kind == "bpe" and any(len(text) > LONGEST_PIECE for text in texts):
            pieces = (cut_at_newlines([text], PIECE_CHARACTERS, LONGEST_PIECE) for text in texts)  # as `prepare` does
            return [np.concatenate(self.encode_batch(list(each) or [""])) for each in pieces]
        with _library("the tokenizer cannot encode this text"):
            encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        if self._drops_characters:
            self._refuse_dropped(texts)
        return [np.array(encoding.ids, dtype=self.dtype) for encoding in encodings]

    def decode(self, ids: Sequence[int] | NDArray[Any]) -> str:
        """Text of ids; bytes that are not UTF-8 become U+FFFD.

        Raises:
            ValueError: If an id is not in the vocabulary.
        """
        numbers = [int(number) for number in ids]
        for number in numbers:
            self._check_id(number)
        if self.kind == "char":
            return "".join(self._characters[number] for number in numbers)
        if self.kind == "byte":
            return bytes(numbers).decode("utf-8", errors="replace")
        with _library("the tokenizer cannot decode these ids"):
            return self._backend.decode(numbers, skip_special_tokens=False)

    def stream(self) -> "TextStream":
        """A decoder that takes one id at a time."""
        return TextStream(self)

    def token(self, number: int) -> str:
        """How the file writes an id. Errors as in :meth:`decode`."""
        self._check_id(number)
        return self._backend.id_to_token(number) or ""

    def byte_count(self, number: int) -> int:
        """UTF-8 bytes of text that an id stands for. Errors as in :meth:`decode`."""
        if self.kind in ("byte", "bpe"):
            return len(self.token(number))  # a sign for each byte
        return len(self.decode([number]).encode())

    def _refuse_dropped(self, texts: Sequence[str]) -> None:
        """The library leaves out without a word what a vocabulary without bytes and unknown token lacks."""
        for text in texts:
            for code in np.unique(_code_points(text)).tolist():
                if code in self._checked:
                    continue
                character = chr(code)
                normalizer = self._backend.normalizer
                is_kept = normalizer is None or normalizer.normalize_str(character).strip()
                if is_kept and not character.isspace() and not self._backend.encode(character).ids:
                    raise ValueError(
                        f"character {character!r} (U+{code:04X}, at position {text.index(character)}) is not in the "
                        "vocabulary of the tokenizer, which has neither bytes nor an unknown token for it"
                    )
                self._checked.add(code)

    def _check_id(self, number: int) -> None:
        if not 0 <= number < self.vocab_size:
            raise ValueError(f"token id {number} is not in the tokenizer's vocabulary of {self.vocab_size}")

    def _char_ids(self, text: str) -> Ids:
        codes = _code_points(text)
        table = self._ids_of_code_points
        if codes.size and codes.max() < len(table):
            ids = table[codes]
            if ids.min() >= 0:
                known_ids: Ids = ids.astype(self.dtype)
                return known_ids
        known = set(self._characters)
        for position, character in enumerate(text):
            if character not in known:
                raise ValueError(
                    f"character {character!r} (U+{ord(character):04X}, at position {position}) is not among the "
                    f"{self.vocab_size} characters of the tokenizer"
                )
        return np.empty(0, dtype=self.dtype)


def check_bpe(vocab_size: int, special_tokens: Sequence[str] = ()) -> list[str]:
    """Refuses what ``Tokenizer.train_bpe`` cannot make, before any text is read; returns all its special tokens.

    Raises:
        ValueError: If ``vocab_size`` is above :data:`LARGEST_VOCABULARY` or has no room for the bytes and the special
            tokens, or one of these is empty or given twice or has white space, where text is cut.
    """
    special = [END_OF_TEXT, *(token for token in special_tokens if token != END_OF_TEXT)]
    if not all(special) or len(set(special)) < len(special) or any(map(str.isspace, "".join(special))):
        raise ValueError(
            "special tokens must differ from each other, have a character at least and no white space, "
            f"got {', '.join(map(repr, special_tokens))}"
        )
    smallest = SMALLEST_BPE_VOCABULARY - 1 + len(special)
    if vocab_size < smallest:
        what = "the end of text" if len(special) == 1 else f"{len(special)} special tokens"
        raise ValueError(
            f"vocab_size must be at least {smallest} with tokenizer 'bpe' (256 bytes and {what}), got {vocab_size}"
        )
    if vocab_size > LARGEST_VOCABULARY:
        raise ValueError(f"vocab_size must be at most {LARGEST_VOCABULARY} with tokenizer 'bpe', got {vocab_size}")
    return special


class TextStream:
    """Turns ids into text as they come; the bytes of an unfinished character are held back.

    What :meth:`push` and, at the end, :meth:`flush` return is together what ``tokenizer.decode`` makes of all ids.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._bytes = {stand_in: byte for byte, stand_in in enumerate(byte_alphabet())}
        self._ids: list[int] = []  # of kind 'file': all ids so far, and how much of their text is out
        self._written = 0

    def push(self, number: int) -> str:
        """The text that this id completes, often empty within a character. Errors as in ``Tokenizer.decode``."""
        if self._tokenizer.kind == "char":
            return self._tokenizer.decode([number])
        if self._tokenizer.kind in ("byte", "bpe"):
            return self._utf8.decode(bytes(self._bytes[sign] for sign in self._tokenizer.token(number)))
        self._ids.append(number)
        text = self._tokenizer.decode(self._ids)
        return "" if text.endswith("\ufffd") else self._rest(text)

    def flush(self) -> str:
        """What was held back."""
        if self._tokenizer.kind == "file":
            return self._rest(self._tokenizer.decode(self._ids))
        return self._utf8.decode(b"", final=True)

    def _rest(self, text: str) -> str:
        rest, self._written = text[self._written :], len(text)
        return rest


@contextlib.contextmanager
def _library(what: str) -> Iterator[None]:
    """The library raises plain Exception, or, where it contradicts itself, what is no Exception."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ValueError(f"{what}: {error}") from error


def _code_points(text: str) -> NDArray[np.unsignedinteger[Any]]:
    if text.isascii():
        return np.frombuffer(text.encode("ascii"), dtype=np.uint8)
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")


def _utf8(text: str) -> bytes:
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        character = text[error.start]
        raise ValueError(f"character {character!r} at position {error.start} is half of a surrogate pair") from error


def _drops_characters(content: dict[str, Any]) -> bool:
    model = content["model"]
    has_bytes = model.get("byte_fallback") or "ByteLevel" in json.dumps(content.get("pre_tokenizer"))
    return model.get("type") == "BPE" and model.get("unk_token") is None and not has_bytes


def _reaches_out(token: dict[str, Any]) -> bool:
    """Whether an added token takes in more than its own ASCII letters, so that text may not be cut anywhere by it."""
    return (
        not token["content"].isascii() or any(map(str.isspace, token["content"])) or token["lstrip"] or token["rstrip"]
    )


def _kind(content: dict[str, Any]) -> Kind:
    """Which of our own kinds a ``tokenizer.json`` is, part by part."""
    model, splitter = content["model"], content.get("pre_tokenizer") or {}
    if content.get("normalizer"):
        return "file"
    added = [token["content"] for token in content.get("added_tokens") or []]
    if model.get("type") == "WordLevel" and splitter.get("pattern") == {"Regex": _ONE_CHARACTER} and not added:
        vocabulary = model["vocab"]
        one_each = all(len(token) == 1 for token in vocabulary)
        return "char" if one_each and sorted(vocabulary.values()) == list(range(len(vocabulary))) else "file"
    byte_level = splitter.get("type") == "ByteLevel" and not splitter.get("add_prefix_space", True)
    if model.get("type") == "BPE" and byte_level and not model.get("dropout"):
        if splitter.get("use_regex", True):
            return "bpe" if not any(map(_reaches_out, content.get("added_tokens") or [])) else "file"
        if model["vocab"] == {sign: byte for byte, sign in enumerate(byte_alphabet())} and not added:
            return "byte"
    return "file"
