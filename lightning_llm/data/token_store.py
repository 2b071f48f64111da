"""The token store: a folder with text as token ids, ready to be memory-mapped.

    train.bin  val.bin  [test.bin]   raw little-endian ids: uint16 up to 65,536 ids (as in nanoGPT), else uint32
    tokenizer.json                   the tokenizer that made them, in Hugging Face's format
    meta.json                        format, version, dtype, vocab_size, tokenizer_sha256; for each split tokens,
                                     bytes (of UTF-8 text), documents, sha256; source; a checksum of all that

Opening a store checks it: sizes, types, and every checksum and id of up to 256 MiB of ids. In a larger store the ids
are sampled; :meth:`TokenStore.verify` reads the rest. ``token_store_writer.py`` writes stores.
"""

import dataclasses
import glob
import hashlib
import json
import mmap
import os
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from lightning_llm.data.tokenizer_json import LARGEST_TOKENIZER
from lightning_llm.io import schema, untrusted
from lightning_llm.io.schema import SHA256, TEXT, maybe, record, whole
from lightning_llm.io.shell import shell_path
from lightning_llm.io.untrusted import file_in, read_bytes, shown

FORMAT = "lightning-llm token store"
VERSION = 1
SPLITS = ("train", "val", "test")
META = "meta.json"
SHARD = "shard.json"
TOKENIZER = "tokenizer.json"
TOKEN_DTYPES: dict[str, np.dtype[Any]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}

BLOCK = 1 << 16  # tokens checked at once
_BLOCKS_AT_OPEN = 256  # 16 Mi tokens, about 5 ms
_BYTES_AT_OPEN = 1 << 28  # a store up to this size is read whole: 0.2 s at 1.5 GB/s; a run takes about 4 s to start
_LENGTHS_BLOCK = 1 << 22  # tokens scanned at once for document lengths
LARGEST_META = 8 * untrusted.MIB
MOST_IDS = 1 << 32

Content = TypeVar("Content")
Tokens = NDArray[np.unsignedinteger[Any]]

# ---- what meta.json and shard.json contain; the writer's journal has the same split counts

_COUNTS = record({"tokens": whole(), "bytes": whole(), "documents": whole(), "sha256": SHA256})
_SOURCE = {"inputs": schema.list_of(TEXT), "fingerprint": TEXT, "text_key": TEXT, "tokenizer": TEXT}
SPLIT_COUNTS = record({"train": _COUNTS, "val": _COUNTS}, {"test": _COUNTS})
_META = {
    "format": TEXT,
    "version": schema.one_of(VERSION),
    "dtype": schema.one_of(*TOKEN_DTYPES),
    "vocab_size": whole(1, MOST_IDS),
    "tokenizer_sha256": SHA256,
    "splits": SPLIT_COUNTS,
    "source": record({}, {**_SOURCE, "vocab_size": maybe(whole()), "eos_token_id": maybe(whole(0, MOST_IDS))}),
}
_PAIR = schema.check(
    "its index and their count",
    lambda pair: isinstance(pair, list) and len(pair) == 2 and all(type(n) is int and n > 0 for n in pair),
)
_SCHEMAS = {META: record(_META), SHARD: record({**_META, "shard": _PAIR, "key": TEXT})}
FORMATS = {META: FORMAT, SHARD: f"{FORMAT}, shard"}


@dataclasses.dataclass(frozen=True)
class Split:
    """Split as ``meta.json`` describes it. ``bytes`` is the length of its text in UTF-8."""

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
        splits: By name: ``train``, ``val`` and optionally ``test``.
        tokenizer_sha256: Checksum of ``tokenizer.json``; ``None`` for raw files.
        source: Where the text came from: ``inputs``, ``fingerprint``, ``text_key``, ``tokenizer``, the requested
            ``vocab_size``, and ``eos_token_id``.
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
        merge = "when all are made, lightning-llm prepare --merge"
        if (path / SHARD).is_file() and not (path / META).exists():
            whole_store = path.with_name(path.name.rpartition(".shard-")[0])
            raise ValueError(f"token store {path} is one shard of a store: {merge} {shell_path(whole_store)}")
        if not path.exists() and (shards := shards_of(path)):
            raise ValueError(
                f"token store {path} does not exist, but {len(shards)} of its shards do: {merge} {shell_path(path)}"
            )
        if not path.is_dir():
            raise ValueError(
                f"token store {path} does not exist: make it with lightning-llm prepare … --out {shell_path(path)}"
            )
        return cls.from_meta(path, read_meta(path))

    @classmethod
    def from_meta(cls, path: Path, meta: dict[str, Any]) -> "TokenStore":
        """Checks the files of a store, or of a shard, against :func:`read_meta`. Errors as in :meth:`open`."""
        splits = {name: Split(**split) for name, split in meta["splits"].items()}
        store = cls(path, meta["vocab_size"], meta["dtype"], splits, meta["tokenizer_sha256"], meta["source"])
        if sha256(_read(path, TOKENIZER, lambda file: read_bytes(file, LARGEST_TOKENIZER))) != store.tokenizer_sha256:
            raise ValueError(
                f"token store {path}: {TOKENIZER} does not belong to it, the ids were made with another one: "
                "put that one back or prepare the store again"
            )
        if store.dtype != dtype_for(store.vocab_size):
            raise ValueError(
                f"token store {path}: dtype {store.dtype!r} is wrong for vocab_size {store.vocab_size}, "
                f"which needs {dtype_for(store.vocab_size)}"
            )
        store._check()
        return store

    @classmethod
    def open_raw(cls, path: str | Path, *, vocab_size: int, dtype: str = "uint16") -> "TokenStore":
        """Opens ``train.bin``, ``val.bin`` and ``test.bin`` as other programs (nanoGPT) write them, without meta.json.

        Args:
            path: The folder.
            vocab_size: Number of ids.
            dtype: ``uint16`` or ``uint32``.

        Raises:
            ValueError: If files are missing, end in the middle of a token, or contain ids that are too large.
        """
        path = Path(path)
        if dtype not in TOKEN_DTYPES:
            raise ValueError(f"dtype {dtype!r} of {path} is unknown: choose one of {', '.join(TOKEN_DTYPES)}")
        files = {name: path / f"{name}.bin" for name in SPLITS}
        if missing := [str(files[name]) for name in ("train", "val") if not files[name].is_file()]:
            raise ValueError(f"raw token files missing: {', '.join(missing)}")
        item = TOKEN_DTYPES[dtype].itemsize
        sizes = {name: file.stat().st_size for name, file in files.items() if file.is_file()}
        for name, size in sizes.items():
            if size % item:
                raise ValueError(f"{files[name]} has {size} bytes, not a multiple of {item} for {dtype}")
        splits = {name: Split(size // item, 0, 1, "") for name, size in sizes.items()}
        store = cls(path, vocab_size, dtype, splits, None, {"inputs": [str(path)], "fingerprint": "raw"})
        store._check()
        return store

    @property
    def tokenizer_file(self) -> Path | None:
        """The ``tokenizer.json``; ``None`` for raw files."""
        return self.path / TOKENIZER if self.tokenizer_sha256 else None

    @property
    def eos_token_id(self) -> int | None:
        """The id after every document; ``None`` if documents are not marked, and for raw files."""
        return self.source.get("eos_token_id")

    @property
    def fingerprint(self) -> str:
        """16 hex digits that identify tokens and tokenizer; equal for two stores of the same text and tokenizer."""
        parts: list[object] = [self.tokenizer_sha256, self.vocab_size, self.dtype]
        parts += [[name, split.tokens, split.sha256] for name, split in sorted(self.splits.items())]
        return sha256(json.dumps(parts).encode())[:16]

    def file(self, split: str) -> Path:
        """The ids of a split."""
        return self.path / f"{split}.bin"

    def tokens(self, split: str) -> Tokens:
        """The ids of a split, memory-mapped and read-only, shape (tokens,).

        Raises:
            ValueError: If the store has no such split, or its file changed size or cannot be read.
        """
        if split not in self.splits:
            raise ValueError(
                f"token store {self.path} has no {split} split, only {' and '.join(self.splits)}: "
                "prepare it with a test fraction, or choose another store"
            )
        return _read(self.path, f"{split}.bin", lambda file: _mapped(file, self.dtype, self.splits[split].tokens))

    def bytes_per_token(self, split: str) -> float | None:
        """UTF-8 bytes of text per token, for bits per byte; ``None`` for raw files."""
        known = self.splits[split]
        return known.bytes / known.tokens if known.bytes and known.tokens else None

    def verify(self) -> None:
        """Reads everything and checks each split's checksum and every id. Errors as in :meth:`blocks`."""
        for name in self.splits:
            for _ in self.blocks(name):
                pass

    def blocks(self, split: str) -> Iterator[Tokens]:
        """The ids of a split in blocks, and at the end a comparison of the checksums.

        Raises:
            ValueError: If the file was changed or an id is not in the vocabulary.
        """
        known = self.splits[split]
        digest = hashlib.sha256()
        for start in range(0, known.tokens, BLOCK):
            block = self._checked_block(split, start)
            digest.update(block.data)
            yield block
        if known.sha256 and digest.hexdigest() != known.sha256:
            raise ValueError(
                f"token store {self.path}: {split}.bin was changed: its sha256 is not the recorded one; "
                "put it back or prepare the store again"
            )

    def _check(self) -> None:
        size = sum(self.tokens(name).nbytes for name in self.splits)
        if size <= _BYTES_AT_OPEN:
            self.verify()
            return
        for name, split in self.splits.items():
            blocks = min(-(-split.tokens // BLOCK), _BLOCKS_AT_OPEN)
            for start in np.linspace(0, max(0, split.tokens - BLOCK), blocks, dtype=np.int64).tolist():
                self._checked_block(name, start)

    def read(self, split: str, start: int, count: int) -> Tokens:
        """Ids of a split, shape (tokens,). Unlike mapped ids, they do not count as memory of the process."""
        kind = TOKEN_DTYPES[self.dtype]
        return np.fromfile(self.file(split), kind, count, offset=start * kind.itemsize)

    def _checked_block(self, split: str, start: int) -> Tokens:
        block = self.read(split, start, BLOCK)
        if len(block) and (largest := int(block.max())) >= self.vocab_size:
            raise ValueError(
                f"token store {self.path}: {split}.bin has token id {largest} at position "
                f"{start + int(block.argmax())}, but vocab_size is {self.vocab_size}"
            )
        return block


# ---- files of ids


def dtype_for(vocab_size: int) -> str:
    """The smallest type of :data:`TOKEN_DTYPES` that can represent every id."""
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


def _mapped(file: Path, dtype: str, expected: int) -> Tokens:
    kind = TOKEN_DTYPES[dtype]
    with untrusted.open_regular(file) as opened:
        if (size := os.fstat(opened.fileno()).st_size) != expected * kind.itemsize:
            raise ValueError(
                f"token store {file.parent}: {file.name} has {size} bytes instead of {expected * kind.itemsize} for "
                f"{expected} tokens of {dtype}: prepare the store again"
            )
        if not size:
            return np.empty(0, dtype=kind)  # an empty file cannot be mapped
        # a plain view: slicing numpy's memmap class costs microseconds per batch
        return np.asarray(np.memmap(opened, dtype=kind, mode="r", shape=(expected,)))


def check_mapped(tokens: Tokens, file: Path) -> None:
    """Raises a ValueError for mapped ids whose file was truncated: reading past its end kills the process (SIGBUS).

    Takes 1 to 2 µs. A truncation in the few µs between this check and the read goes undetected.
    """
    mapping: Any = tokens.base
    while isinstance(mapping, np.ndarray):
        mapping = mapping.base
    if isinstance(mapping, mmap.mmap) and (size := mapping.size()) < tokens.nbytes:
        raise ValueError(
            f"{file} was truncated while it was read: {size} bytes instead of {tokens.nbytes}; prepare the store again"
        )


# ---- meta.json and shards


def sha256(content: bytes) -> str:
    """The checksum in hex digits."""
    return hashlib.sha256(content).hexdigest()


def meta_checksum(meta: dict[str, Any]) -> str:
    """Checksum of the rest of ``meta.json``."""
    return sha256(json.dumps(meta, sort_keys=True).encode())


def read_meta(path: Path, name: str = META) -> dict[str, Any]:
    """The object in ``meta.json`` or ``shard.json``, without its checksum.

    Raises:
        ValueError: If it cannot be read, was edited, or is of another format or version.
    """
    source = f"token store {path}: {name}"
    meta = _read(path, name, lambda file: untrusted.read_json(file, LARGEST_META))
    checksum = meta.pop("checksum", None)
    if meta.get("format") != FORMATS[name] or meta.get("version") != VERSION:
        raise ValueError(
            f"{source} says format {shown(meta.get('format'))} version {shown(meta.get('version'))}, "
            f"this program reads {FORMATS[name]!r} version {VERSION}"
        )
    schema.validate(meta, _SCHEMAS[name], source, "prepare the store again")
    if checksum != meta_checksum(meta):
        raise ValueError(f"{source} was edited, its checksum does not match: put it back or prepare the store again")
    eos = meta["source"].get("eos_token_id")
    if eos is not None and eos >= meta["vocab_size"]:
        raise ValueError(
            f"{source}: source.eos_token_id is {eos}, expected less than vocab_size {meta['vocab_size']}; "
            "prepare the store again"
        )
    return meta


def _read(folder: Path, name: str, read: Callable[[Path], Content]) -> Content:
    try:
        return read(file_in(folder, name))
    except OSError as error:
        raise ValueError(
            f"token store {folder}: {name} cannot be read: {error.strerror}; prepare the store again"
        ) from error


def shards_of(path: Path) -> list[Path]:
    """The folders of a store's finished shards."""
    found = path.parent.glob(f"{glob.escape(path.name)}.shard-*-of-*")
    return sorted(folder for folder in found if (folder / SHARD).is_file())


# ---- document lengths


def document_lengths(store: TokenStore, split: str, eos: int | None = None) -> Counter[int] | None:
    """How many documents of a split have each length in tokens, without the end-of-text token.

    Reads the whole split, in blocks. Returns ``None`` if no end-of-text id marks the documents.

    Args:
        store: The store.
        split: Name of the split.
        eos: The end-of-text id. Default: the recorded one.
    """
    total = len(store.tokens(split))
    eos = store.eos_token_id if eos is None else eos
    if eos is None:
        return None
    lengths: Counter[int] = Counter()
    begin = 0
    for start in range(0, total, _LENGTHS_BLOCK):
        block = store.read(split, start, _LENGTHS_BLOCK)
        ends = np.flatnonzero(block == eos) + start
        if len(ends):
            lengths[int(ends[0]) - begin] += 1  # alone: it may begin in any earlier block
            counts = np.bincount(np.diff(ends) - 1)
            lengths.update({length: int(counts[length]) for length in np.flatnonzero(counts).tolist()})
            begin = int(ends[-1]) + 1
    if begin < total:
        lengths[total - begin] += 1
    return lengths


def by_powers_of_two(lengths: Counter[int]) -> Iterator[tuple[int, int, int]]:
    """A histogram: shortest and longest length of each bin (0, 1, 2 to 3, 4 to 7 and so on), and its documents."""
    bins: Counter[int] = Counter()
    for length, count in lengths.items():
        bins[length.bit_length()] += count
    for bits in range(min(bins, default=0), max(bins, default=-1) + 1):
        yield 1 << bits >> 1, (1 << bits) - 1, bins[bits]
