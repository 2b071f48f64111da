"""Text to token ids and back, by character, by byte or by byte pairs, always saved as Hugging Face ``tokenizer.json``.

=========  ==============================================================================  ==================
kind       ids                                                                             end of text
=========  ==============================================================================  ==================
``char``   one per character, numbered in the order of their code points                   none
``byte``   the bytes of the UTF-8 text themselves, 0 to 255                                none
``bpe``    byte-level byte-pair encoding as in GPT-2 (Radford et al. 2019, section 2.2)    ``<|endoftext|>``
``file``   any other ``tokenizer.json``                                                    if one is known
=========  ==============================================================================  ==================

``transformers.PreTrainedTokenizerFast(tokenizer_file=…)`` encodes and decodes the same from the file alone.
Reading a file recognizes the first three kinds, which have a faster path here than through the library.

Long text is encoded, and learned from, in pieces, which ``cuts.py`` makes.
"""

import codecs
import contextlib
import dataclasses
import functools
import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Regex, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from lightning_llm.data import tokenizer_json
from lightning_llm.data.boundaries import END_OF_TEXT, Boundaries, end_of_text_in, read_boundaries, write_boundaries
from lightning_llm.data.cuts import LONGEST_PIECE, PIECE_CHARACTERS, cut_at_newlines, cut_long_words
from lightning_llm.data.token_store import TOKEN_DTYPES, dtype_for
from lightning_llm.data.tokenizer_json import LARGEST_TOKENIZER, byte_alphabet
from lightning_llm.io.untrusted import read_text

Ids = NDArray[np.unsignedinteger[Any]]

NO_TOKEN = "none"
LARGEST_VOCABULARY = tokenizer_json.MOST_IDS
_LISTED = 8  # tokens that a message lists
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")  # of a byte that the vocabulary lacks (byte_fallback)


class Tokenizer:
    """A tokenizer, made from the text of a ``tokenizer.json``.

    Args:
        content: The file's content.

    Attributes:
        kind: ``char``, ``byte``, ``bpe`` or ``file``.
        vocab_size: Number of ids; the largest is one less.
        boundaries: What the file puts around a text. The ids are those that a model was, or will be, trained with.
        eos_token_id: The id that ends a document, or ``None`` if there is none.

    Raises:
        ValueError: If the content is not that of a ``tokenizer.json``.
    """

    def __init__(self, content: str) -> None:
        parsed = tokenizer_json.read_content(content)
        self.kind = tokenizer_json.kind_of(parsed)
        self._drops_characters = self.kind == "file" and tokenizer_json.drops_characters(parsed)
        self._bytes_of_characters = tokenizer_json.bytes_of_characters(parsed)
        with _library("not a tokenizer.json"):
            self._backend = Backend.from_str(content)
        self._content = content
        self._backend.no_truncation()  # a file may have all three, for inference
        self._backend.no_padding()
        self._backend.post_processor = None  # it may repeat a text any number of times
        self.boundaries = read_boundaries(parsed)
        vocabulary = self._backend.get_vocab(with_added_tokens=True)
        if not vocabulary:
            raise ValueError("not a tokenizer.json: its vocabulary is empty")
        self.vocab_size = max(vocabulary.values()) + 1
        if max(itertools.chain(*dataclasses.astuple(self.boundaries)), default=0) >= self.vocab_size:
            raise ValueError("not a tokenizer.json: its post_processor has ids beyond its vocabulary")
        between = self.boundaries.between
        self.eos_token_id = between[0] if between else end_of_text_in(parsed, vocabulary)
        del parsed  # Gemma's takes 200 MiB
        self._checked: set[int] = set()
        if self.kind == "char":
            codes = list(map(ord, vocabulary))
            self._ids_of_code_points = np.full(max(codes) + 2, -1, dtype=np.int32)
            self._ids_of_code_points[codes] = list(vocabulary.values())

    @classmethod
    def from_str(cls, content: str) -> "Tokenizer":
        """From the content of a ``tokenizer.json``; the same again for the content of the last call."""
        return _of_content(cls, content)  # type: ignore[arg-type]  # a class can be hashed

    @classmethod
    def from_file(cls, path: str | Path) -> "Tokenizer":
        """From a ``tokenizer.json``. Raises a ValueError if it is missing or something else."""
        try:
            return cls.from_str(read_text(path, LARGEST_TOKENIZER))
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise ValueError(f"tokenizer {str(path)!r}: {reason}") from error

    @classmethod
    def train_char(cls, texts: Iterable[str]) -> "Tokenizer":
        """One id per character that occurs, sorted by code point. Raises a ValueError if there is no text."""
        seen = np.zeros(0x110000, dtype=bool)
        for text in texts:
            seen[_code_points(text)] = True
        vocabulary = {chr(code): number for number, code in enumerate(np.flatnonzero(seen).tolist())}
        if not vocabulary:
            raise ValueError("tokenizer 'char' needs text to take its characters from, got none")
        # The name of the unknown token is not in the vocabulary, so that an unknown character always raises.
        backend = Backend(models.WordLevel(vocabulary, unk_token="<unknown character>"))
        backend.pre_tokenizer = pre_tokenizers.Split(Regex(tokenizer_json.ONE_CHARACTER), "isolated")
        backend.decoder = decoders.Fuse()
        return cls(backend.to_str())

    @classmethod
    def train_byte(cls) -> "Tokenizer":
        """A tokenizer whose ids are the 256 bytes."""
        backend = Backend(models.BPE({character: byte for byte, character in enumerate(byte_alphabet())}, []))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.decoder = decoders.ByteLevel()
        return cls(backend.to_str())

    @classmethod
    def train_bpe(cls, texts: Iterable[str], vocab_size: int, special_tokens: Sequence[str] = ()) -> "Tokenizer":
        """Byte-level byte-pair encoding; the same text gives the same tokenizer.

        Args:
            texts: Documents, or pieces of documents from ``cut_at_newlines``.
            vocab_size: Total number of ids. There are fewer if the text has nothing left to merge.
            special_tokens: In addition to the end of text. Each is always one id, and nothing is learned from it.

        Raises:
            ValueError: As :func:`check_bpe`.
        """
        special = check_bpe(vocab_size, special_tokens)
        backend = Backend(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        options: dict[str, Any] = {"initial_alphabet": pre_tokenizers.ByteLevel.alphabet(), "show_progress": False}
        trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=special, **options)
        # the trainer does not know the special tokens yet: it would learn pairs of their letters
        apart = re.compile("|".join(re.escape(token) for token in sorted(special, key=len, reverse=True)))
        splitter = pre_tokenizers.ByteLevel(add_prefix_space=False)  # the backend's own is locked during training
        parts = (part for text in texts for part in apart.split(text))
        backend.train_from_iterator((piece for part in parts for piece in cut_long_words(part, splitter)), trainer)
        return cls(backend.to_str())

    def with_boundaries(self, begin_of_text: str | None = None, end_of_text: str | None = None) -> "Tokenizer":
        """The same tokenizer, whose file names other tokens around a text.

        Args:
            begin_of_text: The token before every text, or ``none``. ``None``: as it is.
            end_of_text: The token after a document, or ``none``. ``None``: as it is.

        Raises:
            ValueError: If the vocabulary has no such token.
        """
        before, after, between = dataclasses.astuple(self.boundaries)
        if begin_of_text is not None:
            before = self._ids_named(begin_of_text, "begin-of-text")
        if end_of_text is not None:
            between = self._ids_named(end_of_text, "end-of-text")
            after = between if after else ()
        return self._bounded(Boundaries(before, after, between))

    def without_begin(self) -> "Tokenizer":
        """The same tokenizer for a model that was trained without a token before each text."""
        return self._bounded(dataclasses.replace(self.boundaries, before=()))

    def _bounded(self, boundaries: Boundaries) -> "Tokenizer":
        if boundaries == self.boundaries:
            return self
        names = {number: self.token(number) for number in itertools.chain(*dataclasses.astuple(boundaries))}
        return type(self)(write_boundaries(self._content, boundaries, names))

    def _ids_named(self, name: str, option: str) -> tuple[int, ...]:
        if name == NO_TOKEN:
            return ()
        if (number := self._backend.token_to_id(name)) is None:
            known = ", ".join(map(repr, [*self.added_tokens.values()][:_LISTED])) or "no special tokens"
            raise ValueError(
                f"--{option} {name!r} is not a token of the tokenizer, which has {known}: give one of its tokens, or "
                f"{NO_TOKEN!r}; lightning-llm tokenizer train --special-token makes one"
            )
        return (number,)

    @property
    def dtype(self) -> np.dtype[Any]:
        """The smallest little-endian type that can represent every id."""
        return TOKEN_DTYPES[dtype_for(self.vocab_size)]

    def to_str(self) -> str:
        """The content of the ``tokenizer.json``."""
        return self._content

    def encode_prompt(self, text: str) -> list[int]:
        """Ids of a text to continue, after the token that begins a text in training. Errors as in :meth:`encode`."""
        return [*self.begin_of(ids := self.encode(text)), *ids]

    def begin_of(self, ids: Sequence[int] | Ids) -> tuple[int, ...]:
        """Ids to put before these ids of a text: none if it begins with them itself."""
        before = self.boundaries.before
        return () if before == tuple(ids[: len(before)]) else before

    @property
    def begin_of_text(self) -> str | None:
        """The last token before each text; ``None`` if there is none."""
        return self.token(self.boundaries.before[-1]) if self.boundaries.before else None

    def without_begin_of(self, ids: list[int]) -> list[int]:
        """Ids without the tokens before the text."""
        before = self.boundaries.before
        return ids[len(before) :] if before == tuple(ids[: len(before)]) else ids

    @property
    def added_tokens(self) -> dict[int, str]:
        """Tokens that the file adds to the model's vocabulary, such as special ones, by id."""
        return {number: token.content for number, token in self._backend.get_added_tokens_decoder().items()}

    def encode(self, text: str) -> list[int]:
        """Ids of a text. Adds no special tokens. Errors as in :meth:`encode_batch`."""
        ids: list[int] = self.encode_batch([text])[0].tolist()
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """Ids of each text, shape (tokens,), in :attr:`dtype`; byte-pair encoding uses every core.

        Raises:
            ValueError: If a text has a character that the vocabulary cannot express.
        """
        if self.kind == "char":
            return [self._char_ids(text) for text in texts]
        if self.kind == "byte":
            return [np.frombuffer(_utf8(text), dtype=np.uint8).astype(self.dtype) for text in texts]
        for text in texts:
            if not text.isascii():
                _utf8(text)  # raises where the library would raise a TypeError
        if self.kind == "bpe" and any(len(text) > LONGEST_PIECE for text in texts):
            pieces = (cut_at_newlines([text], PIECE_CHARACTERS, LONGEST_PIECE) for text in texts)  # as `prepare` does
            return [np.concatenate(self.encode_batch(list(each) or [""])) for each in pieces]
        with _library("the tokenizer cannot encode this text"):
            encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        if self._drops_characters:
            self._reject_dropped(texts)
        return [np.array(encoding.ids, dtype=self.dtype) for encoding in encodings]

    def decode(self, ids: Sequence[int] | NDArray[Any]) -> str:
        """Text of ids; bytes that are not UTF-8 become U+FFFD.

        Raises:
            ValueError: If an id is not in the vocabulary.
        """
        numbers = [int(number) for number in ids]
        for number in numbers:
            self._check_id(number)
        with _library("the tokenizer cannot decode these ids"):
            return self._backend.decode(numbers, skip_special_tokens=False)

    def stream(self) -> "TextStream":
        """A decoder that takes one id at a time."""
        return TextStream(self)

    def token(self, number: int) -> str:
        """The token of an id, as written in the file. Errors as in :meth:`decode`."""
        self._check_id(number)
        return self._backend.id_to_token(number) or ""

    def bytes_of(self, number: int) -> bytes:
        """UTF-8 bytes of the text of an id, which may be part of a character. Errors as in :meth:`decode`."""
        token = self.token(number)
        if number not in self.added_tokens:
            if self._bytes_of_characters and set(token) <= self._bytes_of_characters.keys():
                return bytes(self._bytes_of_characters[character] for character in token)
            if byte := _BYTE_TOKEN.fullmatch(token):
                return bytes([int(byte[1], 16)])
        return self.decode([number]).encode()

    def byte_count(self, number: int) -> int:
        """Length of :meth:`bytes_of`."""
        return len(self.bytes_of(number))

    def _reject_dropped(self, texts: Sequence[str]) -> None:
        """Without byte tokens and an unknown token, the library silently drops what the vocabulary lacks."""
        normalizer = self._backend.normalizer
        for text in texts:
            for code in sorted(set(np.unique(_code_points(text)).tolist()) - self._checked):
                character = chr(code)
                is_kept = normalizer is None or normalizer.normalize_str(character).strip()
                if is_kept and not character.isspace() and not self._backend.encode(character).ids:
                    raise ValueError(
                        f"{_described(text, text.index(character))} is not in the vocabulary of the tokenizer, which "
                        "has neither bytes nor an unknown token for it"
                    )
                self._checked.add(code)

    def _check_id(self, number: int) -> None:
        if not 0 <= number < self.vocab_size:
            raise ValueError(f"token id {number} is not in the tokenizer's vocabulary of {self.vocab_size}")

    def _char_ids(self, text: str) -> Ids:
        ids = self._ids_of_code_points.take(_code_points(text), mode="clip")  # the last entry is no character's
        if ids.size and ids.min() < 0:
            raise ValueError(
                f"{_described(text, int(ids.argmin()))} is not among the {self.vocab_size} characters of the tokenizer"
            )
        known: Ids = ids.astype(self.dtype)
        return known


class TextStream:
    """Turns ids into text one at a time, and holds back the bytes of an unfinished character.

    The results of :meth:`push` and a final :meth:`flush`, joined, are what ``tokenizer.decode`` returns for all ids.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._bytes = {character: byte for byte, character in enumerate(byte_alphabet())}
        self._ids: list[int] = []  # kind 'file': all ids so far, and how many characters of their text were returned
        self._written = 0

    def push(self, number: int) -> str:
        """The text that this id completes, often empty within a character. Errors as in ``Tokenizer.decode``."""
        if self._tokenizer.kind == "char":
            return self._tokenizer.decode([number])
        if self._tokenizer.kind in ("byte", "bpe"):
            return self._utf8.decode(bytes(self._bytes[character] for character in self._tokenizer.token(number)))
        self._ids.append(number)
        text = self._tokenizer.decode(self._ids)
        return "" if text.endswith("\ufffd") else self._rest(text)

    def flush(self) -> str:
        """The text that was held back."""
        if self._tokenizer.kind == "file":
            return self._rest(self._tokenizer.decode(self._ids))
        return self._utf8.decode(b"", final=True)

    def _rest(self, text: str) -> str:
        rest = text[self._written :]
        self._written = len(text)
        return rest


def check_bpe(vocab_size: int, special_tokens: Sequence[str] = ()) -> list[str]:
    """Rejects what ``Tokenizer.train_bpe`` cannot make, before any text is read. Returns all its special tokens.

    Raises:
        ValueError: If ``vocab_size`` is above :data:`LARGEST_VOCABULARY` or too small for the bytes and the special
            tokens, or a special token is empty, is given twice, is no Unicode, or contains white space (where text is
            cut).
    """
    special = [END_OF_TEXT, *(token for token in special_tokens if token != END_OF_TEXT)]
    letters = "".join(special)
    is_text = letters.encode(errors="ignore").decode() == letters  # half of a surrogate pair is none
    if not all(special) or len(set(special)) < len(special) or any(map(str.isspace, letters)) or not is_text:
        raise ValueError(
            "special tokens must differ from each other, have at least one character, all of them Unicode, and no "
            f"white space, got {', '.join(map(repr, special_tokens))}"
        )
    smallest = 256 + len(special)
    if vocab_size < smallest:
        what = "the end of text" if len(special) == 1 else f"{len(special)} special tokens"
        raise ValueError(
            f"vocab_size must be at least {smallest} with tokenizer 'bpe' (256 bytes and {what}), got {vocab_size}"
        )
    if vocab_size > LARGEST_VOCABULARY:
        raise ValueError(f"vocab_size must be at most {LARGEST_VOCABULARY} with tokenizer 'bpe', got {vocab_size}")
    return special


@functools.lru_cache(maxsize=1)
def _of_content(kind: type[Tokenizer], content: str) -> Tokenizer:
    """The last one is kept: a command checks that of a checkpoint, then uses it, and 490,000 merges take 1.2 s."""
    return kind(content)


@contextlib.contextmanager
def _library(what: str) -> Iterator[None]:
    """The library raises a plain Exception, or, if a file contradicts itself, something that is not an Exception."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ValueError(f"{what}: {error}") from error


def _described(text: str, position: int) -> str:
    return f"character {text[position]!r} (U+{ord(text[position]):04X}, at position {position})"


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
