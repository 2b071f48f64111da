"""The token store: a folder with text as token ids, ready to be memory-mapped.

    train.bin  val.bin  [test.bin]   raw little-endian ids: uint16 up to 65,536 ids, as nanoGPT has it, else uint32
    tokenizer.json                   what made them, in Hugging Face's format
    meta.json                        format, version, dtype, vocab_size, tokenizer_sha256; for each split tokens,
                                     bytes (of UTF-8 text), documents, sha256; source; checksum of all that

To open a store is to check it: sizes, types, and every checksum and id of up to 256 MiB of ids. Of a larger store the
ids are sampled, and :meth:`TokenStore.verify` reads the rest. ``token_store_writer.py`` writes one.
"""

import dataclasses
import glob
import hashlib
import json
import mmap
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from lightning_llm.data.tokenizer_checks import LARGEST_TOKENIZER
from lightning_llm.io.untrusted import (
    MIB,
    SHA256,
    TEXT,
    file_in,
    list_of,
    maybe,
    one_of,
    read_bytes,
    read_json,
    record,
    rule,
    shown,
    validate,
    whole,
)

FORMAT = "lightning-llm token store"
VERSION = 1
SPLITS = ("train", "val", "test")
META, SHARD, TOKENIZER = "meta.json", "shard.json", "tokenizer.json"
DTYPES = {"uint16": "<u2", "uint32": "<u4"}

BLOCK = 1 << 16  # tokens that are looked at together
_BLOCKS_AT_OPEN = 256  # 16 Mi tokens, in about 5 ms
_BYTES_AT_OPEN = 1 << 28  # what is read whole: 0.2 s at 1.5 GB/s, against some 4 s that a run needs to start

Content = TypeVar("Content")
LARGEST_META = 8 * MIB
MOST_IDS = 1 << 32

_COUNTS = record({"tokens": whole(), "bytes": whole(), "documents": whole(), "sha256": SHA256})
_SOURCE = {"inputs": list_of(TEXT, 1 << 16), "fingerprint": TEXT, "text_key": TEXT, "tokenizer": TEXT}
# What meta.json and shard.json say, and what a journal says about splits.
SPLIT_COUNTS = record({"train": _COUNTS, "val": _COUNTS}, {"test": _COUNTS})
_META = {
    "format": TEXT,
    "version": one_of(VERSION),
    "dtype": one_of(*DTYPES),
    "vocab_size": whole(1, MOST_IDS),
    "tokenizer_sha256": SHA256,
    "splits": SPLIT_COUNTS,
    "source": record({}, {**_SOURCE, "vocab_size": maybe(whole()), "eos_token_id": maybe(whole(0, MOST_IDS))}),
}
_PAIR = rule("its number and their count", lambda pair: isinstance(pair, list) and len(pair) == 2)
_SHARD = {"shard": lambda pair, name: _PAIR(pair, name) or list_of(whole(1), 2)(pair, name), "key": TEXT}

Tokens = NDArray[np.unsignedinteger[Any]]


@dataclasses.dataclass(frozen=True)
class Split:
    """What ``meta.json`` says about one split: ``bytes`` is the length of its text in UTF-8."""

    tokens: int
    bytes: int
    documents: int
    sha256: str


@dataclasses.dataclass(frozen=True)
class TokenStore:
    """An opened token store. Make one with :meth:`open` or :meth:`open_raw`.

    Attributes:
        path: The folder.
        vocab_size: Number of ids; every id is below it.
        dtype: ``uint16`` or ``uint32``.
        splits: By name: ``train``, ``val`` and perhaps ``test``.
        tokenizer_sha256: Checksum of ``tokenizer.json``; ``None`` for raw files.
        source: What the text was: ``inputs``, ``fingerprint``, ``text_key``, ``tokenizer``, ``vocab_size`` as asked
            for; and ``eos_token_id``.
    """

    path: Path
    vocab_size: int
    dtype: str
    splits: dict[str, Split]
    tokenizer_sha256: str | None
    source: dict[str, Any]

    @classmethod
    def open(cls, path: str | Path) -> "TokenStore":
        """Opens and checks a store.

        Raises:
            ValueError: If it is missing, incomplete, edited, damaged, or of another version.
        """
        path = Path(path)
        _refuse_shards(path)
        if not path.is_dir():
            raise ValueError(f"token store {path} does not exist: make it with lightning-llm prepare … --out {path}")
        return cls.from_meta(path, read_meta(path))

    @classmethod
    def from_meta(cls, path: Path, meta: dict[str, Any]) -> "TokenStore":
        """Checks the files of a store, or of a shard, against :func:`read_meta`. Errors as in :meth:`open`."""
        splits = {name: Split(**split) for name, split in meta["splits"].items()}
        store = cls(path, meta["vocab_size"], meta["dtype"], splits, meta["tokenizer_sha256"], meta["source"])
        if sha256(_read(path, TOKENIZER, read_bytes, LARGEST_TOKENIZER)) != store.tokenizer_sha256:
            raise ValueError(
                f"token store {path}: {TOKENIZER} does not belong to it, the ids were made with another one: "
                "put that one back or prepare the store again"
            )
        store._check()
        return store

    @classmethod
    def open_raw(cls, path: str | Path, *, vocab_size: int, dtype: str = "uint16") -> "TokenStore":
        """Reads ``train.bin``, ``val.bin`` and ``test.bin`` as other programs (nanoGPT) leave them, without meta.json.

        Args:
            path: The folder.
            vocab_size: Number of ids.
            dtype: ``uint16`` or ``uint32``.

        Raises:
            ValueError: If files are missing, cut in the middle of a token, or hold ids that are too large.
        """
        path = Path(path)
        if dtype not in DTYPES:
            raise ValueError(f"dtype {dtype!r} of {path} is unknown: choose one of {', '.join(DTYPES)}")
        files = {name: path / f"{name}.bin" for name in SPLITS}
        if missing := [str(files[name]) for name in ("train", "val") if not files[name].is_file()]:
            raise ValueError(f"raw token files missing: {', '.join(missing)}")
        item = np.dtype(DTYPES[dtype]).itemsize
        splits = {}
        for name, file in files.items():
            if file.is_file():
                tokens, over = divmod(file.stat().st_size, item)
                if over:
                    raise ValueError(f"{file} has {file.stat().st_size} bytes, not a multiple of {item} for {dtype}")
                splits[name] = Split(tokens, 0, 1, "")
        store = cls(path, vocab_size, dtype, splits, None, {"inputs": [str(path)], "fingerprint": "raw"})
        store._check()
        return store

    @property
    def tokenizer_file(self) -> Path | None:
        """The ``tokenizer.json``; ``None`` for raw files."""
        return self.path / TOKENIZER if self.tokenizer_sha256 else None

    @property
    def eos_token_id(self) -> int | None:
        """The id behind every document; ``None`` where documents are not marked, or in raw files."""
        number: int | None = self.source.get("eos_token_id")
        return number

    @property
    def fingerprint(self) -> str:
        """16 hex digits that name tokens and tokenizer; two stores of the same text and tokenizer have the same."""
        parts: list[object] = [self.tokenizer_sha256, self.vocab_size, self.dtype]
        parts += [[name, split.tokens, split.sha256] for name, split in sorted(self.splits.items())]
        return sha256(json.dumps(parts).encode())[:16]

    def tokens(self, split: str) -> Tokens:
        """The ids of a split, memory-mapped and read-only, shape (tokens,).

        Raises:
            ValueError: If the store has no such split, or its file has another size than when the store was opened.
        """
        if split not in self.splits:
            raise ValueError(
                f"token store {self.path} has no {split} split, only {' and '.join(self.splits)}: "
                "prepare it with a test fraction, or choose another store"
            )
        return map_tokens(self.path / f"{split}.bin", self.dtype, self.splits[split].tokens)

    def bytes_per_token(self, split: str) -> float | None:
        """UTF-8 bytes of text per token, for bits per byte; ``None`` for raw files."""
        known = self.splits[split]
        return known.bytes / known.tokens if known.bytes and known.tokens else None

    def verify(self) -> None:
        """Reads everything: the checksum of each split, and every id.

        Raises:
            ValueError: If a file was changed or an id is not in the vocabulary.
        """
        for name, split in self.splits.items():
            digest = hashlib.sha256()
            for start in range(0, split.tokens, BLOCK):
                block = self.checked_block(name, start)
                if split.sha256:
                    digest.update(block.data)
            if split.sha256 and digest.hexdigest() != split.sha256:
                raise ValueError(
                    f"token store {self.path}: {name}.bin was changed, its sha256 is not that of {META}: "
                    "put it back or prepare the store again"
                )

    def _check(self) -> None:
        if self.tokenizer_sha256 and self.dtype != dtype_for(self.vocab_size):
            raise ValueError(
                f"token store {self.path}: dtype {self.dtype!r} is wrong for vocab_size {self.vocab_size}, "
                f"which needs {dtype_for(self.vocab_size)}"
            )
        sizes = {name: split.tokens * np.dtype(DTYPES[self.dtype]).itemsize for name, split in self.splits.items()}
        for name, expected in sizes.items():
            file, tokens = file_in(self.path, f"{name}.bin"), self.splits[name].tokens
            found = file.stat().st_size if file.is_file() else None
            if found != expected:
                state = "is missing" if found is None else f"has {found} bytes instead of {expected}"
                raise ValueError(
                    f"token store {self.path}: {file.name} {state} for {tokens} tokens of {self.dtype}: "
                    "prepare the store again"
                )
        if sum(sizes.values()) <= _BYTES_AT_OPEN:
            self.verify()
            return
        for name, split in self.splits.items():
            blocks = min(-(-split.tokens // BLOCK), _BLOCKS_AT_OPEN)
            for start in np.linspace(0, max(0, split.tokens - BLOCK), blocks, dtype=np.int64).tolist():
                self.checked_block(name, start)

    def checked_block(self, split: str, start: int) -> Tokens:
        """Up to :data:`BLOCK` ids from a place on.

        Raises:
            ValueError: If an id is not in the vocabulary.
        """
        block = read_tokens(self.path / f"{split}.bin", self.dtype, start, BLOCK)
        if len(block) and (largest := int(block.max())) >= self.vocab_size:
            raise ValueError(
                f"token store {self.path}: {split}.bin holds token id {largest} at position "
                f"{start + int(block.argmax())}, but vocab_size is {self.vocab_size}"
            )
        return block


def read_tokens(file: str | Path, dtype: str, start: int, count: int) -> Tokens:
    """Reads ids of a raw file, shape (tokens,); unlike mapped ones they do not count as memory of the process."""
    kind = np.dtype(DTYPES[dtype])
    return np.fromfile(file, kind, count, offset=start * kind.itemsize)


def map_tokens(file: str | Path, dtype: str, expected: int | None = None) -> Tokens:
    """Maps a raw file of ids into memory, read-only, shape (tokens,).

    Args:
        file: Raw token ids.
        dtype: ``uint16`` or ``uint32``.
        expected: How many there must be. Default: as many as there are.

    Raises:
        ValueError: If the file cannot be read or holds another number of ids.
    """
    kind = np.dtype(DTYPES[dtype])
    try:
        with open(file, "rb") as opened:
            size = os.fstat(opened.fileno()).st_size
            if expected is not None and size != expected * kind.itemsize:
                raise ValueError(
                    f"{file} has {size} bytes instead of {expected * kind.itemsize} for {expected} tokens of {dtype}: "
                    "it was changed since the store was opened; prepare the store again"
                )
            if size < kind.itemsize:
                return np.empty(0, dtype=kind)  # nothing cannot be mapped
            mapped = np.memmap(opened, dtype=kind, mode="r", shape=(size // kind.itemsize,))
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror}") from error
    return np.asarray(mapped)  # a plain view: slicing numpy's memmap class costs microseconds per batch


def check_mapped(tokens: Tokens, file: str | Path) -> None:
    """Refuses mapped ids whose file has become shorter: reading behind its end would kill the process (SIGBUS).

    Takes 1 to 2 µs. What becomes shorter in the few µs between this and the reading cannot be known.

    Args:
        tokens: From :func:`map_tokens`.
        file: Its file, for the message.

    Raises:
        ValueError: If it has.
    """
    mapping: Any = tokens.base
    while isinstance(mapping, np.ndarray):
        mapping = mapping.base
    if isinstance(mapping, mmap.mmap) and (size := mapping.size()) < tokens.nbytes:
        raise ValueError(
            f"{file} has become shorter while it was read: {size} bytes instead of {tokens.nbytes}; "
            "prepare the store again"
        )


def dtype_for(vocab_size: int) -> str:
    """The smallest type of :data:`DTYPES` that holds every id."""
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


def sha256(content: bytes) -> str:
    """Hex digits of the checksum."""
    return hashlib.sha256(content).hexdigest()


def meta_checksum(meta: dict[str, Any]) -> str:
    """Checksum of what ``meta.json`` says besides it."""
    return sha256(json.dumps(meta, sort_keys=True).encode())


def shards_of(path: Path) -> list[Path]:
    """The folders of the shards of a store, finished ones."""
    found = path.parent.glob(f"{glob.escape(path.name)}.shard-*-of-*")
    return sorted(folder for folder in found if (folder / SHARD).is_file())


def _refuse_shards(path: Path) -> None:
    if (path / SHARD).is_file() and not (path / META).exists():
        whole = path.with_name(path.name.rpartition(".shard-")[0])
        raise ValueError(
            f"token store {path} is one shard of a store: when all are made, lightning-llm prepare --merge {whole}"
        )
    if not path.exists() and (shards := shards_of(path)):
        raise ValueError(
            f"token store {path} does not exist, but {len(shards)} of its shards: when all are made, "
            f"lightning-llm prepare --merge {path}"
        )


def read_meta(path: Path, name: str = META, form: str = FORMAT) -> dict[str, Any]:
    """The object in ``meta.json`` or another such file, without its checksum.

    Raises:
        ValueError: If it cannot be read, was edited, or is of another format or version.
    """
    source = f"token store {path}: {name}"
    meta = _read(path, name, read_json, LARGEST_META)
    checksum = meta.pop("checksum", None)
    if meta.get("format") != form or meta.get("version") != VERSION:
        raise ValueError(
            f"{source} says format {shown(meta.get('format'))} version {shown(meta.get('version'))}, "
            f"this program reads {form!r} version {VERSION}"
        )
    validate(meta, record(_META if name == META else {**_META, **_SHARD}), source, "prepare the store again")
    if checksum != meta_checksum(meta):
        raise ValueError(f"{source} was edited, its checksum does not fit: put it back or prepare the store again")
    eos = meta["source"].get("eos_token_id")
    if eos is not None and eos >= meta["vocab_size"]:
        raise ValueError(
            f"{source}: source.eos_token_id is {eos}, expected less than vocab_size {meta['vocab_size']}; "
            "prepare the store again"
        )
    return meta


def _read(folder: Path, name: str, read: Callable[[Path, int], Content], limit: int) -> Content:
    try:
        return read(file_in(folder, name), limit)
    except OSError as error:
        raise ValueError(f"token store {folder}: {name} cannot be read ({error.strerror})") from error
