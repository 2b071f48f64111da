"""Writes token stores, from ids or from shards. A store is written completely or not at all.

1. :class:`TokenStoreWriter` writes into a hidden folder next to the store, flushes it to disk, and renames it: an
   unfinished store never has the name of a store.
2. A journal in that folder records up to where its files are valid. If the process is killed, the next process on the
   same machine with the same key resumes there. Without the same key, it deletes the folder.
3. :func:`merge_shards` makes a store from the shards of several hosts. A shard is a folder next to the store,
   ``DIR.shard-3-of-16``, with shard.json instead of meta.json, so that nothing mistakes it for a store. Shards hold
   documents in order: concatenated, they are byte for byte the store that a single process makes.
"""

import contextlib
import dataclasses
import errno
import glob
import hashlib
import itertools
import json
import os
import shutil
import socket
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any, NamedTuple

import numpy as np

from lightning_llm.data import token_store as stores
from lightning_llm.data.token_store import FORMATS, META, SHARD, TOKEN_DTYPES, TOKENIZER, TokenStore, shards_of
from lightning_llm.data.tokenizer_json import LARGEST_TOKENIZER
from lightning_llm.io import schema, untrusted
from lightning_llm.io.atomic import atomic_file, open_to_append, replace_path, write_text
from lightning_llm.io.processes import is_alive
from lightning_llm.io.progress import progress_bar
from lightning_llm.io.shell import shell_path
from lightning_llm.io.untrusted import file_in

_JOURNAL = "journal.json"
_CURSOR = schema.list_of(schema.whole(), 2)
_JOURNAL_SCHEMA = schema.record({"key": schema.TEXT, "cursor": _CURSOR, "splits": stores.SPLIT_COUNTS})
_BLOCK_BYTES = 1 << 24
_LISTED = 8  # missing shards that a message lists
_active: set[Path] = set()  # folders that this process is writing


class _SplitFile(NamedTuple):
    """A split that is being written."""

    file: IO[bytes]
    digest: Any
    counts: Counter[str]  # tokens, bytes and documents


@dataclasses.dataclass
class TokenStoreWriter:
    """Writes a store. As a context manager, it leaves a complete store or nothing.

    Args:
        path: Folder of the store, which must not exist yet unless ``replace`` is set.
        vocab_size: Number of ids.
        tokenizer: Content of the ``tokenizer.json``.
        source: Where the text came from; saved in ``meta.json``.
        replace: Replace an existing store once the new one is complete.
        key: Identifies everything that the ids depend on. With a key, a killed or interrupted run leaves what it
            committed, and the next run with the same key resumes from there.
        shard: Index and count, if this is a shard and not a store.

    Attributes:
        resumed: The last commit of the run that is being resumed; empty for a new run.

    Raises:
        ValueError: If the folder exists or cannot be created; on leaving, if the disk is full.
    """

    path: str | Path
    _: dataclasses.KW_ONLY
    vocab_size: int
    tokenizer: str
    source: dict[str, Any]
    replace: bool = False
    key: str = ""
    shard: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        self.resumed: list[int] = []
        self._out = Path(os.path.abspath(self.path))
        self._dtype = stores.dtype_for(self.vocab_size)
        self._partial = self._out.with_name(f"{_prefix(self._out)}{os.getpid()}")
        self._splits: dict[str, _SplitFile] = {}

    def __enter__(self) -> "TokenStoreWriter":
        if self._out.exists() and not self.replace:
            raise ValueError(f"{self._out} exists already: remove it or choose another folder")
        with self._all_or_nothing():
            self._out.parent.mkdir(parents=True, exist_ok=True)
            if not self._resume():
                for folder in _left_behind(self._out):
                    shutil.rmtree(folder, ignore_errors=True)
                self._partial.mkdir()
                _active.add(self._partial)
                write_text(self._partial / TOKENIZER, self.tokenizer)
                for name in ("train", "val"):
                    self._add(name)
                self.commit([])
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, _: TracebackType | None) -> None:
        with self._all_or_nothing():
            if value is not None:
                raise value
            self._finish()

    def check_splits(self) -> None:
        """Raises a ValueError if there is no text for training or validation."""
        if missing := [name for name in ("train", "val") if not self._splits[name].counts["tokens"]]:
            raise ValueError(
                f"too little text: nothing is left for the {' and the '.join(missing)} split; of several documents, "
                "copies belong to the same split"
            )

    def write(self, name: str, ids: stores.Tokens, *, text_bytes: int, documents: int = 0) -> None:
        """Appends ids to a split.

        Args:
            name: ``train``, ``val`` or ``test``.
            ids: Shape (tokens,), each below ``vocab_size``.
            text_bytes: Bytes of the text in UTF-8.
            documents: How many documents end in these ids.

        Raises:
            OSError: If the disk is full; leaving the context turns it into one line.
        """
        assert not len(ids) or int(ids.max()) < self.vocab_size
        content = np.ascontiguousarray(ids, dtype=TOKEN_DTYPES[self._dtype])
        split = self._splits.get(name) or self._add(name)
        split.file.write(content.data)
        split.digest.update(content.data)
        split.counts.update(tokens=len(ids), bytes=text_bytes, documents=documents)

    def commit(self, cursor: Sequence[int]) -> None:
        """Records that everything written so far is valid, and how far into the input it reaches.

        Needs no flush to disk: resuming verifies the checksums. Errors as in :meth:`write`.
        """
        if not self.key:
            return
        for split in self._splits.values():
            split.file.flush()
        journal = {"key": self.key, "cursor": list(cursor), "splits": self._described()}
        write_text(self._partial / _JOURNAL, json.dumps(journal, allow_nan=False))

    def _described(self) -> dict[str, dict[str, Any]]:
        return {name: {**split.counts, "sha256": split.digest.hexdigest()} for name, split in self._splits.items()}

    def _add(self, name: str) -> _SplitFile:
        path = self._partial / f"{name}.bin"
        path.unlink(missing_ok=True)  # of a killed run that has not committed it
        file = open(path, "xb")  # noqa: SIM115 - closed by _close
        self._splits[name] = _SplitFile(file, hashlib.sha256(), Counter(tokens=0, bytes=0, documents=0))
        return self._splits[name]

    def _resume(self) -> bool:
        """Takes over the folder of a killed run with the same key. The rename decides between several processes."""
        for folder in _left_behind(self._out) if self.key else []:
            journal = _read_journal(folder)
            if journal.get("key") != self.key:
                continue
            try:
                folder.rename(self._partial)
                _active.add(self._partial)
                for name, counts in journal["splits"].items():
                    self._splits[name] = _reopened(self._partial, name, counts, self._dtype)
            except (OSError, ValueError):  # another process was faster, or a power failure lost data: start over
                self._close()
                self._splits.clear()
                shutil.rmtree(self._partial, ignore_errors=True)
                continue
            self.resumed = journal["cursor"]
            return True
        return False

    def _finish(self) -> None:
        name = SHARD if self.shard else META
        meta = {
            "format": FORMATS[name],
            "version": stores.VERSION,
            "dtype": self._dtype,
            "vocab_size": self.vocab_size,
            "tokenizer_sha256": stores.sha256(self.tokenizer.encode()),
            "splits": self._described(),
            "source": self.source,
        }
        if self.shard:
            meta |= {"shard": list(self.shard), "key": self.key}
        meta["checksum"] = stores.meta_checksum(meta)
        described = json.dumps(meta, indent=2, allow_nan=False) + "\n"
        for each, content in ((TOKENIZER, self.tokenizer), (name, described)):
            with atomic_file(self._partial / each, durable=True) as file:
                file.write(content.encode())
        for split in self._splits.values():
            split.file.flush()
            os.fsync(split.file.fileno())
        self._close()
        for left in (self._partial / _JOURNAL, *self._partial.glob(".*.tmp")):  # a kill may have left the latter
            left.unlink(missing_ok=True)
        if self.replace:
            replace_path(self._partial, self._out)  # a run that has mapped the old files can still read them
        else:
            self._partial.rename(self._out)

    @contextlib.contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self._close()
            if not (self.key and isinstance(error, KeyboardInterrupt)):
                shutil.rmtree(self._partial, ignore_errors=True)
            if isinstance(error, OSError):
                full = error.errno in (errno.ENOSPC, errno.EDQUOT)
                elsewhere = "lightning-llm prepare … --out DIR makes it in another folder, for --data.store DIR"
                advice = f"{'free some space, or ' if full else ''}{elsewhere}"
                raise ValueError(f"cannot write the token store {self._out}: {error.strerror}; {advice}") from error
            raise

    def _close(self) -> None:
        for split in self._splits.values():
            with contextlib.suppress(OSError):  # closing writes the buffer
                split.file.close()
        _active.discard(self._partial)


# ---- resuming a killed run


def unfinished_tokenizer(path: str | Path, key: str) -> str | None:
    """Content of the ``tokenizer.json`` of a killed run with this key; ``None`` if there is none."""
    for folder in _left_behind(Path(os.path.abspath(path))):
        if _read_journal(folder).get("key") == key:
            with contextlib.suppress(OSError, ValueError):
                return untrusted.read_text(file_in(folder, TOKENIZER), LARGEST_TOKENIZER)
    return None


def _prefix(path: Path) -> str:
    return f".{path.name}.partial-{socket.gethostname()}-"


def _left_behind(path: Path) -> list[Path]:
    """Folders of killed runs on this machine. In a container, the next process often has the same process id."""
    found = []
    for folder in sorted(path.parent.glob(f"{glob.escape(_prefix(path))}*")):
        number = folder.name.removeprefix(_prefix(path)).split("-")[0]
        own = number == str(os.getpid()) and folder not in _active
        pid = untrusted.number_in(number)
        if own or pid is None or not is_alive(pid):
            found.append(folder)
    return found


def _read_journal(folder: Path) -> dict[str, Any]:
    try:
        content = untrusted.read_json(file_in(folder, _JOURNAL), stores.LARGEST_META)
        schema.validate(content, _JOURNAL_SCHEMA, folder, "")
    except (OSError, ValueError):
        return {}
    return content


def _reopened(folder: Path, name: str, counts: dict[str, Any], dtype: str) -> _SplitFile:
    """Opens a split for appending, without what was not committed. A ValueError if the rest was changed."""
    path = file_in(folder, f"{name}.bin")
    digest = hashlib.sha256()
    left = size = counts["tokens"] * TOKEN_DTYPES[dtype].itemsize
    with untrusted.open_regular(path) as content:
        while left and (block := content.read(min(left, _BLOCK_BYTES))):
            digest.update(block)
            left -= len(block)
    if digest.hexdigest() != counts.pop("sha256"):
        raise ValueError(f"{path} was changed")
    os.truncate(path, size)
    return _SplitFile(open_to_append(path), digest, Counter(counts))


# ---- merging shards


def shard_folder(out: Path, index: int, count: int) -> Path:
    """The folder of shard ``index`` of ``count`` of a store."""
    return out.with_name(f"{out.name}.shard-{index}-of-{count}")


def merge_shards(out: str | Path, *, progress: bool = False) -> TokenStore:
    """Merges the shards of a store into the store in folder ``out``, deletes them, and opens the store.

    Raises:
        ValueError: If a shard is missing, damaged or made from something else, if ``out`` exists, or the disk is full.
            The shards are left as they are.
    """
    out = Path(out)
    if out.exists():
        raise ValueError(f"{out} exists already: remove it or choose another folder")
    shards = _open_shards(out)
    first = shards[0]
    tokenizer = untrusted.read_text(file_in(first.path, TOKENIZER), LARGEST_TOKENIZER)
    total = sum(file.stat().st_size for shard in shards for file in shard.path.glob("*.bin"))
    with (
        progress_bar(total, progress) as phase,
        TokenStoreWriter(out, vocab_size=first.vocab_size, tokenizer=tokenizer, source=first.source) as writer,
    ):
        advance = phase("merging")
        for shard, name in ((each, name) for each in shards for name in each.splits):
            split = shard.splits[name]
            for block in shard.blocks(name):
                writer.write(name, block, text_bytes=0)
                advance(block.nbytes)
            writer.write(name, np.empty(0, np.uint16), text_bytes=split.bytes, documents=split.documents)
        writer.check_splits()
    store = TokenStore.open(out)
    for shard in shards:
        shutil.rmtree(shard.path)
    return store


def _open_shards(out: Path) -> list[TokenStore]:
    """All shards, in order."""
    found = {folder: stores.read_meta(folder, SHARD) for folder in shards_of(out)}
    if not found:
        raise ValueError(f"--merge {out}: there is no shard {shard_folder(out, 1, 1).name[:-6]}I-of-N next to it")
    counts = sorted({meta["shard"][1] for meta in found.values()})
    if len(counts) > 1:
        raise ValueError(f"--merge {out}: its shards are of {' and of '.join(map(str, counts))}: remove the wrong ones")
    (count,) = counts
    absent = (index for index in range(1, count + 1) if shard_folder(out, index, count) not in found)
    # a wrong count may be any number: list a few
    if missing := [str(index) for index in itertools.islice(absent, _LISTED + 1)]:
        listed = ", ".join(missing if len(missing) <= _LISTED else [*missing[:_LISTED], "…"])
        raise ValueError(
            f"--merge {out}: of {count} shards {listed} {'is' if len(missing) == 1 else 'are'} missing: "
            f"lightning-llm prepare … --out {shell_path(out)} --shard {missing[0]}/{count}"
        )
    first, *others = folders = [shard_folder(out, index, count) for index in range(1, count + 1)]
    fields = {"key": "text, options or versions", "tokenizer_sha256": "tokenizer", "vocab_size": "vocabulary"}
    for folder, (field, what) in itertools.product(others, fields.items()):
        if found[folder][field] != found[first][field]:
            raise ValueError(f"--merge {out}: {folder.name} was made with another {what} than {first.name}")
    return [TokenStore.from_meta(folder, found[folder]) for folder in folders]
