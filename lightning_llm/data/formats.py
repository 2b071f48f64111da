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

Text is UTF-8, read byte for byte: no newline is translated, no byte order mark removed. Memory does not grow with the
file: text comes in pieces. Only a line of JSON (at most 64 MiB) and a batch of parquet rows are in memory as a whole.
Reading reports its progress in bytes.
"""

import codecs
import contextlib
import dataclasses
import gzip
import hashlib
import importlib
import itertools
import json
import math
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from lightning_llm.io.progress import Advance, ignore_progress
from lightning_llm.io.untrusted import open_regular

PIECE_BYTES = 1 << 20
LONGEST_LINE = 1 << 26
DEFAULT_TEXT_KEY = "text"

_COMPRESSIONS = {".gz": "gz", ".zst": "zst", ".zstd": "zst"}
_FORMATS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet"}
_COMPRESSED_BYTES = 1 << 13  # of zstandard, decompressed at once: the result is at most 32,768 times as large
_ROWS = 64  # of parquet, in memory at once: each may have the whole size of its column, if a dictionary has its text
_ROWS_BYTES = 1 << 29


@dataclasses.dataclass(frozen=True)
class Document:
    """One text in a stream; it can be read once, before the next one is requested.

    Attributes:
        name: Its name in error messages.
        first: Its beginning, never empty: at least 65,536 characters, unless the text is shorter.
        rest: The remaining pieces.
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
        name: Its name in error messages and fingerprints.
        size: Bytes on disk.
        locate: Returns the file's path; downloads the file if needed.
        version: A checksum of the content if it is known without reading the file, else empty.
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
        """Checksum of the content on disk. Reads the file: 1 GB takes about 0.7 s. Errors as in :meth:`documents`."""
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
        """The documents in order, without empty ones.

        Args:
            advance: Called with the number of bytes that were read from disk.
            start: Only documents that begin at this byte or later; for parquet, row groups by their share of the size.
                For files that :attr:`can_be_cut`.
            stop: Only documents that begin before this byte.

        Raises:
            ValueError: If the file cannot be read, is broken, is not UTF-8 text, or lacks the text's key or column;
                with the file and the byte, line or row.
        """
        assert self.can_be_cut or (start == 0 and stop is None)
        if self.format == "text":
            pieces = self._text(advance)
            return iter([Document(self.name, first, pieces)] if (first := next(pieces, "")) else [])
        read = self._lines if self.format == "jsonl" else self._rows
        rows = read(advance, start, math.inf if stop is None else stop)
        return (Document(name, text, iter(())) for name, text in rows if text)

    def text(self) -> str:
        """The whole text of all documents. Errors as in :meth:`documents`."""
        return "".join(piece for document in self.documents() for piece in document.pieces())

    def _text(self, advance: Advance) -> Iterator[str]:
        decoder = codecs.getincrementaldecoder("utf-8")()
        done = 0
        for block in itertools.chain(self._blocks(advance), [b""]):
            if (nul := block.find(0)) >= 0:
                raise ValueError(f"{self.name} is binary, not UTF-8 text: byte {done + nul} is NUL")
            start = done - len(decoder.getstate()[0])  # the decoder holds back the bytes of an unfinished character
            try:
                text = decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                place = f"byte {start + error.start}: {error.reason}"
                raise ValueError(f"{self.name} is not UTF-8 text: {place}") from error
            if text:
                yield text
            done += len(block)

    def _lines(self, advance: Advance, start: int, stop: float) -> Iterator[tuple[str, str]]:
        """Name and text of each line that begins at a byte from ``start`` up to ``stop`` of a plain file."""
        first = max(0, start - 1)  # a line begins at start if a newline is before it
        place = first
        number = 1
        rest = b""
        is_wanted = start == 0
        for block in itertools.chain(self._blocks(advance, first), [b""]):
            lines = (rest + block).split(b"\n")
            rest = lines.pop() if block else b""
            if len(rest) > LONGEST_LINE:
                raise ValueError(f"{self._line(number + len(lines), first)} is longer than {LONGEST_LINE >> 20} MiB")
            for line in lines:
                if place >= stop:
                    return
                if is_wanted and line and not line.isspace():
                    text, problem = _parse_line(line, self.text_key)
                    if problem:
                        raise ValueError(f"{self._line(number, first)} {problem}")
                    yield self.name if first else f"{self.name}, line {number}", text
                is_wanted = True
                place += len(line) + 1
                number += 1

    def _line(self, number: int, start: int) -> str:
        """A line by its number in the file; ``number`` was counted from byte ``start``."""
        if start:
            for block in self._blocks(ignore_progress):
                number += block[:start].count(b"\n")
                start -= len(block)
                if start <= 0:
                    break
        return f"{self.name}, line {number},"

    def _rows(self, advance: Advance, start: int, stop: float) -> Iterator[tuple[str, str]]:
        parquet, types = (_import(f"pyarrow.{module}", self.name) for module in ("parquet", "types"))
        with self._opened() as raw:
            file = parquet.ParquetFile(raw, buffer_size=PIECE_BYTES, pre_buffer=False)
            schema = file.schema_arrow
            if self.text_key not in schema.names:
                raise ValueError(
                    f"{self.name} has no column {self.text_key!r}, only {', '.join(map(repr, schema.names))}: "
                    "set the text's column with --text-key"
                )
            kind = schema.field(self.text_key).type
            kind = kind.value_type if types.is_dictionary(kind) else kind
            if not (types.is_string(kind) or types.is_large_string(kind)):
                raise ValueError(f"{self.name}: column {self.text_key!r} has {kind}, not text (string)")
            groups, first_row = file.num_row_groups, 0
            for number in range(groups):
                group = file.metadata.row_group(number)
                if start <= number * self.size // groups < stop:
                    rows = min(_ROWS, max(1, _ROWS_BYTES // max(1, self._size_of(group))))
                    batches = file.iter_batches(rows, [number], [self.text_key], use_threads=False)
                    texts = (text.as_py() for batch in batches for text in batch.column(0))
                    for row, text in enumerate(texts, first_row):
                        if text is None:
                            raise ValueError(f"{self.name}, row {row}: column {self.text_key!r} is null")
                        yield f"{self.name}, row {row}", text
                    advance(self.size // groups)
                first_row += group.num_rows

    def _size_of(self, group: Any) -> int:
        """Bytes of the texts of a row group, each that repeats counted once."""
        columns = [each for each in map(group.column, range(group.num_columns)) if each.path_in_schema == self.text_key]
        return sum(int(each.total_uncompressed_size) for each in columns)

    def _blocks(self, advance: Advance, start: int = 0) -> Iterator[bytes]:
        """The content, decompressed, in blocks of about ``PIECE_BYTES``."""
        with self._opened() as raw:
            if self.compression == "zst":
                blocks = _from_zstandard(raw, self.name)
            else:
                file: Any = gzip.GzipFile(fileobj=raw, mode="rb") if self.compression == "gz" else raw
                if start:
                    file.seek(start)
                blocks = iter(lambda: file.read(PIECE_BYTES), b"")
            before = start
            for block in blocks:
                advance(raw.tell() - before)
                before = raw.tell()
                yield block

    @contextlib.contextmanager
    def _opened(self) -> Iterator[IO[bytes]]:
        """The open file; an error while it is read becomes one line."""
        try:
            with open_regular(self.locate()) as raw:
                raw.seek(0)  # a file opened by its descriptor may share its position
                yield raw
        except Exception as error:
            message = " ".join(str(error).split())
            is_foreign = type(error).__module__.split(".")[0] in ("zstandard", "pyarrow")
            if is_foreign or isinstance(error, (EOFError, zlib.error, gzip.BadGzipFile)):
                kind = self.compression or self.format
                raise ValueError(f"{self.name} is damaged, or not a .{kind} file: {message}") from error
            if isinstance(error, OSError):
                raise ValueError(f"cannot read {self.name}: {error.strerror or message}") from error
            raise


def format_of(name: str) -> tuple[str, str]:
    """Format and compression by a file's name, as in :class:`TextFile`."""
    path = Path(name.lower())
    compression = _COMPRESSIONS.get(path.suffix, "")
    kind = _FORMATS.get(path.with_suffix("").suffix if compression else path.suffix, "text")
    if kind == "parquet" and compression:
        raise ValueError(f"{name}: parquet is compressed already: decompress it first")
    return kind, compression


def _from_zstandard(raw: IO[bytes], name: str) -> Iterator[bytes]:
    """Decompresses frame after frame by hand: the package's own reader accepts a truncated file."""
    zstandard = _import("zstandard", name)
    frame = None
    parts = []
    size = 0
    while packed := raw.read(_COMPRESSED_BYTES):
        while packed:
            frame = frame or zstandard.ZstdDecompressor().decompressobj()
            parts.append(frame.decompress(packed))
            size += len(parts[-1])
            packed, frame = (frame.unused_data, None) if frame.eof else (b"", frame)
        if size >= PIECE_BYTES:
            yield b"".join(parts)
            parts = []
            size = 0
    if frame is not None:
        raise EOFError("the file ends within a frame")
    if size:
        yield b"".join(parts)


def _parse_line(line: bytes, key: str) -> tuple[str, str]:
    """The text of a line of JSON, and what is wrong with the line; one of the two is empty."""
    try:
        record = json.loads(line)
    except UnicodeDecodeError as error:
        return "", f"is not UTF-8 text: byte {error.start} of the line: {error.reason}"
    except json.JSONDecodeError as error:
        return "", f"is not JSON: {error.msg} at character {error.pos}"
    except (ValueError, RecursionError) as error:
        return "", f"is not JSON that can be read: {error}"
    if not isinstance(record, dict):
        return "", f"is not a JSON object with the key {key!r}, but {type(record).__name__}"
    if key not in record:
        found = ", ".join(map(repr, itertools.islice(record, 8))) or "none"
        return "", f"has no key {key!r}, only {found}: set the text's key with --text-key"
    text = record[key]
    if not isinstance(text, str):
        return "", f"has {type(text).__name__} under key {key!r}, not text"
    try:
        text.isascii() or text.encode()
    except UnicodeEncodeError:
        return "", f"has half of a surrogate pair under key {key!r}, which is not valid text"
    return text, ""


def _import(name: str, file: str) -> Any:
    package = name.split(".")[0]
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ValueError(f"{file} needs the package {package}: python -m pip install {package}") from error
