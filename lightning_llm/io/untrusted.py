"""Untrusted files and text: read within limits, checked before anything relies on the content, printed as escapes.

1. :func:`file_in` turns a name from a file into a path. :func:`open_regular` opens every file that others may have
   made, and regular files only. :func:`check_regular` is for libraries that want a path.
2. :func:`read_text` and :func:`read_json` read no more than a limit. JSON is read strictly.
3. :func:`validate` compares the content with a schema made of the kinds below it.
4. :func:`printable` escapes control characters for a terminal, :func:`file_name` for the name of a file.

Every problem is a ``ValueError`` of one line, or the system's ``OSError``. Imports neither torch nor numpy.
"""

import codecs
import hashlib
import json
import math
import os
import re
import reprlib
import stat
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import IO, Any

MIB = 1 << 20
MOST_VALUES = 1 << 22  # in a JSON file: each takes up to 70 bytes of memory
MOST_FIELDS = 1 << 20  # of its objects: a name takes ten times as long as another value
SNAPSHOTS, BLOBS = "snapshots", "blobs"  # of the Hugging Face cache: snapshots/HASH/NAME is a link to ../../blobs/HASH
_LISTED, _LONGEST = 5, 600  # problems in one line, and its characters

# C0 but for tab and newline, DEL and C1, line and paragraph separators, surrogates; and what has no width and no shape:
# bidi marks, embeddings and isolates, zero-width spaces, joiners, invisible operators, annotations, notes, tags
_RANGES = "\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff"
_RANGES += "\ufeff\ufff9-\ufffb\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e007f"
_OBEYED = re.compile(f"[{_RANGES}]")
_JOINERS, _LAST_LATIN = "\u200c\u200d", "\u036f"  # joiners shape Persian, Hindi and emoji, but no Latin
ESCAPE = "lightning-llm-escape"  # for ``errors=`` of a stream: escapes characters that its encoding lacks
SLASH = "∕"  # looks like a slash, but separates no folders
MOST_CHOICES = 16  # that a message lists
LARGEST = 1e100  # number: its square is finite, and so are sums
DEEPEST = 100  # lists and objects in one another, in a JSON file
LONGEST_NAME = 120  # bytes of UTF-8; file systems allow 255, and a suffix or a number may be added

Kind = Callable[[Any, str], Iterable[str]]  # value and its name -> what is wrong with it


class _Short(reprlib.Repr):
    def repr_Tensor(self, value: Any, level: int) -> str:
        return f"a tensor of {str(value.dtype).removeprefix('torch.')} and shape {tuple(value.shape)}"

    repr_OrderedDict = reprlib.Repr.repr_dict


_short = _Short()
_short.maxstring = _short.maxother = _short.maxlong = 80
_short.maxlevel = 2


def shown(value: object) -> str:
    """A value for a message: escaped, and at most one line long."""
    try:
        return _short.repr(value)
    except ValueError:
        return "a number of thousands of digits"


# ---- files


def file_in(folder: Path, name: object) -> Path:
    """The path of a file directly in this folder. The file need not exist.

    Args:
        folder: The folder that the user gave.
        name: The name, as another file contains it.

    Raises:
        ValueError: It is not a plain file name, or it is a link that points outside the folder. In a folder of the
            Hugging Face cache a link may lead to the model's blobs.
    """
    if not isinstance(name, str) or name in ("", ".", "..") or not {"/", "\\", "\0"}.isdisjoint(name):
        raise ValueError(f"{folder} names the file {shown(name)}, expected the plain name of a file in this folder")
    path, home = folder / name, Path(os.path.realpath(folder))
    homes = [home, home.parents[1] / BLOBS] if home.parent.name == SNAPSHOTS else [home]
    if not any(map(Path(os.path.realpath(path)).is_relative_to, homes)):
        raise ValueError(f"{path} is a link that points outside the folder: put the file itself there")
    return path


def check_links(folder: Path, replaced: str) -> None:
    """Check that no link in a folder leads out of it, so that what is written there changes no file elsewhere.

    Args:
        folder: Where this process will write.
        replaced: How names of files end that are replaced as a whole: such a link would not be followed.

    Raises:
        ValueError: One does.
    """
    home = os.path.realpath(folder)
    for parent, folders, files in os.walk(folder):
        for path in (Path(parent, name) for name in (*folders, *files)):
            is_followed = path.is_symlink() and (path.is_dir() or not path.name.endswith(replaced))
            if is_followed and not Path(os.path.realpath(path)).is_relative_to(home):
                raise ValueError(f"{path} is a link that points outside {folder}: move what it points to in its place")


def check_regular(path: str | os.PathLike[str], limit: int | None = None) -> None:
    """Reject a FIFO or device at once: opening it would wait.

    Raises:
        ValueError: It is not a file, or has more than ``limit`` bytes.
        OSError: It is missing.
    """
    _check_kind(path, os.stat(path), limit)


def _check_kind(path: object, found: os.stat_result, limit: int | None) -> None:
    if not stat.S_ISREG(found.st_mode):
        kinds = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket", stat.S_IFLNK: "a link"}
        raise ValueError(f"{path} is {kinds.get(stat.S_IFMT(found.st_mode), 'a device')}, expected a file")
    if limit is not None and found.st_size > limit:
        raise ValueError(f"{path} has {found.st_size} bytes, expected at most {limit}")


def descriptor_of(path: str | os.PathLike[str], flags: int, limit: int | None = None) -> int:
    """Open a regular file and nothing else, as ``os.open``; ``O_NOFOLLOW`` among the flags rejects links too.

    What is there is checked before it is opened, since opening a device may do something, and again after, since it
    may have been replaced: then ``O_NONBLOCK`` keeps a FIFO from waiting. Errors as in :func:`check_regular`.
    """
    with suppress(FileNotFoundError):
        _check_kind(path, os.stat(path, follow_symlinks=not flags & os.O_NOFOLLOW), limit)
    descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK, 0o666)
    try:
        _check_kind(path, os.fstat(descriptor), limit)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def open_regular(path: str | os.PathLike[str], limit: int | None = None) -> IO[bytes]:
    """Open a file for reading. Errors as in :func:`check_regular`, or those of opening it."""
    return open(descriptor_of(path, os.O_RDONLY, limit), "rb")


def read_bytes(path: str | Path, limit: int) -> bytes:
    """The content of a file. Errors as in :func:`open_regular`."""
    with open_regular(path, limit) as file:
        return file.read(limit)


def read_text(path: str | Path, limit: int) -> str:
    """The content of a file of UTF-8, newlines as they are.

    Raises:
        ValueError: As :func:`check_regular`, or it is not UTF-8.
        OSError: It cannot be read.
    """
    try:
        return read_bytes(path, limit).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: byte {error.start}: {error.reason}") from error


def read_json(path: str | Path, limit: int = 8 * MIB, *, nan_is_null: bool = False) -> dict[str, Any]:
    """The object in a JSON file. Errors as in :func:`read_text` and :func:`parse_json`, and for over 100 levels."""
    content = parse_json(read_text(path, limit), path, nan_is_null=nan_is_null)
    inner: list[Any] = [content]
    for _ in range(DEEPEST):
        groups = (each.values() if isinstance(each, dict) else each for each in inner if isinstance(each, dict | list))
        inner = [each for group in groups for each in group]
    if inner:
        raise ValueError(f"{path} is not JSON that can be read: it is nested too deeply")
    return content


def parse_json(text: str, source: object, *, nan_is_null: bool = False) -> dict[str, Any]:
    """The object in a JSON text, read strictly.

    Args:
        text: The text.
        source: Its file, for messages.
        nan_is_null: Read NaN and infinite numbers as null; older files of this project contain them.

    Raises:
        ValueError: It is not JSON, or nested too deeply, or has too many values, gives a key twice, holds NaN, an
            infinite number or half of a surrogate pair, or is not an object.
    """

    def number(word: str) -> float | None:
        found = float(word)
        if not math.isfinite(found) and not nan_is_null:
            raise ValueError(f"{word} is not a finite number")
        return found if math.isfinite(found) else None

    try:
        if sum(map(text.count, ",[{")) > MOST_VALUES:
            raise ValueError(f"it has more than {MOST_VALUES} values")
        content = json.loads(text, object_pairs_hook=Fields(_unique), parse_float=number, parse_constant=number)
        if re.search(r"\\u[dD][89a-fA-F]", text):
            json.dumps(content, ensure_ascii=False).encode()
    except (RecursionError, ValueError) as error:
        special = {RecursionError: "it is nested too deeply", UnicodeEncodeError: "it holds half of a surrogate pair"}
        raise ValueError(f"{source} is not JSON that can be read: {special.get(type(error), error)}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{source} holds {shown(content)}, expected an object with fields by name")
    return content


class Fields:
    """Makes the objects of a JSON text, for ``json.loads``, and counts their fields.

    Args:
        make: Makes one from the pairs of names and values.
    """

    def __init__(self, make: Callable[[list[tuple[str, Any]]], dict[str, Any]] = dict) -> None:
        self.make, self.count = make, 0

    def __call__(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        """An object; a ValueError if there are too many fields."""
        self.count += len(pairs)
        if self.count > MOST_FIELDS:
            raise ValueError(f"it has more than {MOST_FIELDS} fields")
        return self.make(pairs)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        ((twice, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"{shown(twice)} is given twice")
    return content


# ---- schemas


def refuse(problems: Iterable[str], source: object, advice: str = "") -> None:
    """Raise a ValueError of one line with the first few problems, if there are any."""
    if listed := list(islice(problems, _LISTED)):
        text = " ".join("; ".join(listed).split())[:_LONGEST]
        raise ValueError(f"{source}: {text}{advice and f'; {advice}'}")


def validate(content: object, kind: Kind, source: object, advice: str = "") -> None:
    """Compare with a schema.

    Args:
        content: What was read.
        kind: The schema.
        source: The file.
        advice: What to do.

    Raises:
        ValueError: They differ. One line lists the first few differences.
    """
    refuse(kind(content, ""), source, advice)


def rule(expected: str, fits: Callable[[Any], bool]) -> Kind:
    """A value that passes a test, described in words."""

    def check(value: Any, name: str) -> Iterable[str]:
        return () if fits(value) else (f"{name or 'the content'} is {shown(value)}, expected {expected}",)

    return check


def whole(low: int = 0, high: int = 2**53) -> Kind:
    """A whole number within bounds. ``True`` is none."""
    return rule(f"a whole number from {low} to {high}", lambda value: type(value) is int and low <= value <= high)


def one_of(*values: object) -> Kind:
    """One of a few values, of the same type."""
    known = [(type(value), value) for value in values]
    return rule(" or ".join(map(repr, values)), lambda value: (type(value), value) in known)


def maybe(kind: Kind) -> Kind:
    """That, or null."""
    return lambda value, name: () if value is None else kind(value, name)


def list_of(kind: Kind, most: float = math.inf) -> Kind:
    """A list of at most ``most`` items."""
    expected = "a list" if most == math.inf else f"a list of at most {most}"

    def check(value: Any, name: str) -> Iterable[str]:
        if not isinstance(value, list | tuple) or len(value) > most:
            return [f"{name} is {shown(value)}, expected {expected}"]
        return (problem for number, each in enumerate(value) for problem in kind(each, f"{name}[{number}]"))

    return check


def by_name(kind: Kind, least: int = 1) -> Kind:
    """An object with at least one field, or ``least``, of any name, whose values are all of one kind."""

    def check(value: Any, name: str) -> Iterable[str]:
        if not isinstance(value, dict) or len(value) < least or not all(isinstance(k, str) and k for k in value):
            return [f"{name} is {shown(value)}, expected {'at least one' if least else 'options'} by name"]
        return (problem for key, each in value.items() for problem in kind(each, f"{name}.{field_name(key)}"))

    return check


def record(required: Mapping[str, Kind], optional: Mapping[str, Kind] | None = None, *, others: bool = False) -> Kind:
    """An object with these fields; ``others`` allows more."""
    known = {**(optional or {}), **required}

    def check(value: Any, name: str) -> Iterable[str]:
        if not isinstance(value, dict):
            yield f"{name or 'the content'} is {shown(value)}, expected an object with fields by name"
            return
        prefix = f"{name}." if name else ""
        yield from (f"{prefix}{field} is missing" for field in required if field not in value)
        for field, each in value.items():
            if field in known:
                yield from known[field](each, prefix + field)
            elif not others or not isinstance(field, str):
                choice = f": choose one of {', '.join(known)}" if len(known) <= MOST_CHOICES else ""
                yield f"{prefix}{field_name(field)} is unknown{choice}"

    return check


some = partial(record, others=True)


def number_in(text: str) -> int | None:
    """The whole number that 1 to 18 digits from 0 to 9 stand for. ``str.isdigit`` also accepts ², which is none."""
    return int(text) if re.fullmatch("[0-9]{1,18}", text) else None


def field_name(name: object) -> str:
    """A field's name for a message."""
    return name if isinstance(name, str) and re.fullmatch(r"[\w.]{1,80}", name) else shown(name)


NUMBER = rule("a finite number", lambda value: type(value) in (int, float) and abs(value) <= LARGEST)
POSITIVE = rule("a number above 0", lambda value: type(value) in (int, float) and 1 / LARGEST <= value <= LARGEST)
TEXT = rule("text", lambda value: isinstance(value, str))
SHA256 = rule("64 hex digits", lambda value: isinstance(value, str) and bool(re.fullmatch("[0-9a-f]{64}", value)))


# ---- text on a terminal and in file names


def printable(text: str) -> str:
    r"""Replace every character that controls a terminal, or that nobody sees, by an escape: ``\x1b``, ``\u202e``.

    Tabs and newlines are unchanged. JSON stays JSON with the same content.
    """

    def escaped(found: re.Match[str]) -> str:
        before = text[max(0, found.start() - 1) : found.start()]
        is_shaping = found[0] in _JOINERS and before > _LAST_LATIN and not _OBEYED.match(before)
        return found[0] if is_shaping else _escaped(found[0])

    return _OBEYED.sub(escaped, text)


def file_name(label: str) -> str:
    """Turn any label into the name of one file or folder.

    A label that is a valid name is unchanged. Otherwise the result is printable, in one line, has no separator and is
    not ``.`` or ``..``; a long one is cut and ends with a part of its hash.
    """
    name = printable(label).replace("\n", r"\n").replace("\t", r"\t").replace("/", SLASH)
    if len(name.encode()) > LONGEST_NAME:
        digest = hashlib.sha256(label.encode(errors="surrogatepass")).hexdigest()[:8]
        name = f"{name.encode()[: LONGEST_NAME - 12].decode(errors='ignore')}…{digest}"
    return name if name.strip(".") else f"_{name}"


def _escaped(text: str) -> str:
    if text < " ":
        return f"\\x{ord(text):02x}"
    units = text.encode("utf-16-be", errors="surrogatepass").hex()  # as JSON has it
    return "".join(f"\\u{units[start : start + 4]}" for start in range(0, len(units), 4))


def _escape_unencodable(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError)
    return "".join(map(_escaped, error.object[error.start : error.end])), error.end


codecs.register_error(ESCAPE, _escape_unencodable)
