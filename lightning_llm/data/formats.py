"""How a file becomes documents: plain text, JSON lines and parquet, plain or compressed, always as a stream.

============================  =================================================  ==============================
file                          documents                                          needs
============================  =================================================  ==============================
``.jsonl``, ``.ndjson``       each line a JSON object, its text under a key      nothing
``.parquet``                  each row, its text in a column of that name        pyarrow
anything else                 the file is one document of UTF-8 text             nothing
any of these in ``.gz``       as without                                         nothing
any in ``.zst``, ``.zstd``    as without                                         zstandard
============================  =================================================  ==============================

Text is UTF-8, taken byte for byte: no newline is translated, no mark stripped. Memory does not grow with the file: text
comes in pieces; only a line of JSON, which is at most 64 MiB long, and a batch of parquet's rows are held whole.
"""

import codecs
import contextlib
import dataclasses
import gzip
import hashlib
import itertools
import json
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

PIECE_BYTES = 1 << 20
LONGEST_LINE = 1 << 26
DEFAULT_TEXT_KEY = "text"

_COMPRESSIONS = {".gz": "gz", ".zst": "zst", ".zstd": "zst"}
_FORMATS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet"}
_COMPRESSED_BYTES = 1 << 13  # of zstandard, decompressed at once: at the utmost 32,768 times as much comes out
_ROWS = 64  # of parquet, in memory at once
_SMALL, _MOST_GROWTH = 1 << 26, 200  # bytes unpacked that nobody minds; how much larger than the file others may be

Advance = Callable[[int], object]


def ignore_progress(size: int) -> None:
    """An ``Advance`` that shows nothing."""


@dataclasses.dataclass(frozen=True)
class Document:
    """One text on its way; it can be read once, before the next one is asked for.

    Attributes:
        name: What error messages call it.
        first: Its beginning, never empty: 65,536 characters or more, unless there are fewer.
        rest: What follows, in pieces.
    """

    name: str
    first: str
    rest: Iterator[str]

    def pieces(self) -> Iterator[str]:
        """The text in pieces."""
        return itertools.chain([self.first], self.rest)


@dataclasses.dataclass(frozen=True)
class TextFile:
    """A file with documents.

    Attributes:
        name: What error messages and fingerprints call it; by its suffix the format is known.
        size: Bytes on the disk.
        locate: Returns the file, downloading it where need be.
        version: A checksum of the content, where it is known without reading the file; otherwise empty.
        text_key: Key or column of the text in JSON lines and parquet.
        format: ``text``, ``jsonl`` or ``parquet``.
        compression: ``gz``, ``zst`` or empty.
    """

    name: str
    size: int
    locate: Callable[[], Path]
    version: str = ""
    text_key: str = DEFAULT_TEXT_KEY
    format: str = "text"
    compression: str = ""

    @property
    def can_be_cut(self) -> bool:
        """Whether reading can begin at any of its documents."""
        return self.format != "text" and not self.compression

    def checksum(self) -> str:
        """Of the content on the disk, which is read for it: 1 GB takes about 0.7 s. Errors as in :meth:`documents`."""
        if self.version:
            return self.version
        digest = hashlib.sha256()
        with self._opened() as file:
            while block := file.read(PIECE_BYTES):
                digest.update(block)
        return digest.hexdigest()

    def documents(
        self, advance: Advance = ignore_progress, start: int = 0, stop: int | None = None
    ) -> Iterator[Document]:
        """The documents in their order, without empty ones.

        Args:
            advance: Called with the number of bytes that were read from the disk.
            start: Only documents that begin at this byte or later; of parquet, row groups by their share of the size.
                For files that :attr:`can_be_cut`.
            stop: Only documents that begin before this byte.

        Raises:
            ValueError: If the file cannot be read, is broken, is not UTF-8 text, or lacks the text's key or column;
                names the file and the byte, line or row.
        """
        assert self.can_be_cut or (start == 0 and stop is None)
        if self.format == "text":
            pieces = self._text(advance)
            return iter([Document(self.name, first, pieces)] if (first := next(pieces, "")) else [])
        stop = self.size if stop is None else stop
        rows = self._lines(advance, start, stop) if self.format == "jsonl" else self._rows(advance, start, stop)
        return (Document(name, text, iter(())) for name, text in rows if text)

    def text(self) -> str:
        """The whole text of all documents. Errors as in :meth:`documents`."""
        return "".join(piece for document in self.documents() for piece in document.pieces())

    def _text(self, advance: Advance) -> Iterator[str]:
        decoder = codecs.getincrementaldecoder("utf-8")()
        done = 0
        for block in self._blocks(advance):
            if (nul := block.find(0)) >= 0:
                raise ValueError(f"{self.name} is binary, not UTF-8 text: byte {done + nul} is NUL")
            held_back = len(decoder.getstate()[0])
            if text := self._decoded(decoder, block, done - held_back):
                yield text
            done += len(block)
        self._decoded(decoder, b"", done - len(decoder.getstate()[0]))

    def _decoded(self, decoder: codecs.IncrementalDecoder, block: bytes, start: int) -> str:
        try:
            return decoder.decode(block, final=not block)
        except UnicodeDecodeError as error:
            raise ValueError(f"{self.name} is not UTF-8 text: byte {start + error.start}: {error.reason}") from error

    def _lines(self, advance: Advance, start: int, stop: int) -> Iterator[tuple[str, str]]:
        """Name and text of each line that begins within ``start`` and ``stop``, which are bytes of a plain file."""
        first = max(0, start - 1)  # a line begins at start if a newline is before it
        place, number, rest = first, 1, b""
        is_wanted = start == 0
        stop = stop if self.can_be_cut else 1 << 62
        for block in itertools.chain(self._blocks(advance, first), [b""]):
            lines = (rest + block).split(b"\n")
            rest = lines.pop() if block else b""
            if len(rest) > LONGEST_LINE:
                raise ValueError(f"{self._line(number + len(lines), first)} is longer than {LONGEST_LINE >> 20} MiB")
            for line in lines:
                if place >= stop:
                    return
                if is_wanted and line and not line.isspace():
                    name = self.name if first else f"{self.name}, line {number}"
                    yield name, self._from_json(line, number, first)
                is_wanted = True
                place += len(line) + 1
                number += 1

    def _from_json(self, line: bytes, number: int, start: int) -> str:
        try:
            record = json.loads(line)
            text = record[self.text_key]
            assert isinstance(text, str)
            text.isascii() or text.encode()
        except (ValueError, KeyError, TypeError, AssertionError, RecursionError):
            raise ValueError(f"{self._line(number, start)} {_json_fault(line, self.text_key)}") from None
        return text

    def _line(self, number: int, start: int) -> str:
        """Names a line by its number in the file, when it was counted from a byte within the file."""
        if start:
            for block in self._blocks(ignore_progress):
                number += block[:start].count(b"\n")
                start -= len(block)
                if start <= 0:
                    break
        return f"{self.name}, line {number},"

    def _rows(self, advance: Advance, start: int, stop: int) -> Iterator[tuple[str, str]]:
        parquet = _import("pyarrow.parquet", self.name)
        from pyarrow import types

        with self._opened() as raw:
            file = parquet.ParquetFile(raw, buffer_size=PIECE_BYTES, pre_buffer=False)
            schema = file.schema_arrow
            if self.text_key not in schema.names:
                raise ValueError(
                    f"{self.name} has no column {self.text_key!r}, only {', '.join(map(repr, schema.names))}: "
                    "name the text's with --text-key"
                )
            kind = schema.field(self.text_key).type
            kind = kind.value_type if types.is_dictionary(kind) else kind
            if not (types.is_string(kind) or types.is_large_string(kind)):
                raise ValueError(f"{self.name}: column {self.text_key!r} holds {kind}, not text (string)")
            groups, row = file.num_row_groups, 0
            for group in range(groups):
                count = file.metadata.row_group(group).num_rows
                self._check_rows(file.metadata.row_group(group))
                if start <= group * self.size // groups < stop:
                    read = row
                    for batch in file.iter_batches(_ROWS, [group], [self.text_key], use_threads=False):
                        for text in batch.column(0).to_pylist():
                            if text is None:
                                raise ValueError(f"{self.name}, row {read}: column {self.text_key!r} is null")
                            yield f"{self.name}, row {read}", text
                            read += 1
                    advance(self.size // groups)
                row += count

    def _check_rows(self, group: Any) -> None:
        for number in range(group.num_columns):
            column = group.column(number)
            size, packed = column.total_uncompressed_size, column.total_compressed_size
            if column.path_in_schema == self.text_key and size > max(_SMALL, _MOST_GROWTH * packed):
                raise ValueError(f"{self.name}: {self.text_key!r} is {size} bytes unpacked, {packed} in the file")

    def _blocks(self, advance: Advance, start: int = 0) -> Iterator[bytes]:
        """The content, decompressed, in blocks of about ``PIECE_BYTES``."""
        with self._opened() as raw:
            if self.compression == "zst":
                yield from self._bounded(raw, _from_zstandard(raw, self.name, advance))
                return
            file: Any = gzip.GzipFile(fileobj=raw, mode="rb") if self.compression == "gz" else raw
            if start:
                file.seek(start)
            blocks = _counted(raw, file, start, advance)
            yield from self._bounded(raw, blocks) if self.compression else blocks

    def _bounded(self, raw: IO[bytes], blocks: Iterator[bytes]) -> Iterator[bytes]:
        """Refuses a small file that would fill memory or take hours: text shrinks to a tenth, logs to a hundredth."""
        size = 0
        for block in blocks:
            size += len(block)
            if size > max(_SMALL, _MOST_GROWTH * raw.tell()):
                raise ValueError(f"{self.name} is more than {_MOST_GROWTH} times as large unpacked: unpack it first")
            yield block

    @contextlib.contextmanager
    def _opened(self) -> Iterator[IO[bytes]]:
        """The file; what goes wrong while it is read becomes one line."""
        try:
            with self.locate().open("rb") as raw:
                raw.seek(0)  # a descriptor's file may share its position
                yield raw
        except Exception as error:
            message = " ".join(str(error).split())
            is_foreign = type(error).__module__.split(".")[0] in ("zstandard", "pyarrow")
            if is_foreign or isinstance(error, (EOFError, zlib.error, gzip.BadGzipFile)):
                kind = self.compression or self.format
                raise ValueError(f"{self.name} is broken, or no .{kind} file: {message}") from error
            if isinstance(error, OSError):
                raise ValueError(f"cannot read {self.name}: {error.strerror or message}") from error
            raise


def format_of(name: str) -> tuple[str, str]:
    """Format and compression that a file's name tells, as in :class:`TextFile`."""
    path = Path(name.lower())
    compression = _COMPRESSIONS.get(path.suffix, "")
    if compression:
        path = path.with_suffix("")
    kind = _FORMATS.get(path.suffix, "text")
    if kind == "parquet" and compression:
        raise ValueError(f"{name}: parquet is compressed within, unpack it first")
    return kind, compression


def _counted(raw: IO[bytes], file: IO[bytes], start: int, advance: Advance) -> Iterator[bytes]:
    before = start
    while block := file.read(PIECE_BYTES):
        advance(raw.tell() - before)
        before = raw.tell()
        yield block


def _from_zstandard(raw: IO[bytes], name: str, advance: Advance) -> Iterator[bytes]:
    """Decompresses frame after frame by hand, because the package's own reader takes a cut file for a whole one."""
    zstandard = _import("zstandard", name)
    frame, parts, size = None, [], 0
    while packed := raw.read(_COMPRESSED_BYTES):
        advance(len(packed))
        while packed:
            frame = frame or zstandard.ZstdDecompressor().decompressobj()
            parts.append(frame.decompress(packed))
            size += len(parts[-1])
            packed = b""
            if frame.eof:
                packed, frame = frame.unused_data, None
        if size >= PIECE_BYTES:
            yield b"".join(parts)
            parts, size = [], 0
    if frame is not None:
        raise EOFError("the file ends within a frame")
    if size:
        yield b"".join(parts)


def _json_fault(line: bytes, key: str) -> str:
    try:
        record = json.loads(line)
    except UnicodeDecodeError as error:
        return f"is not UTF-8 text: byte {error.start} of the line: {error.reason}"
    except json.JSONDecodeError as error:
        return f"is not JSON: {error.msg} at character {error.pos}"
    except (ValueError, RecursionError) as error:
        return f"is not JSON that can be read: {error}"
    if not isinstance(record, dict):
        return f"is no JSON object with a key {key!r}, but {type(record).__name__}"
    if key not in record:
        found = ", ".join(map(repr, itertools.islice(record, 8))) or "none"
        return f"has no key {key!r}, only {found}: name the text's with --text-key"
    if not isinstance(record[key], str):
        return f"has under key {key!r} no text but {type(record[key]).__name__}"
    return f"has under key {key!r} half of a surrogate pair, which is no text"


def _import(name: str, file: str) -> Any:
    package = name.split(".")[0]
    try:
        return __import__(name, fromlist=["_"])
    except ImportError as error:
        raise ValueError(
            f"{file} needs the package {package}: pip install {package}, or pip install 'lightning-llm[data]'"
        ) from error
