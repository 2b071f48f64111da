"""Untrusted files and text: opened safely, read within limits, printed as escapes.

1. :func:`file_in` turns a name from a file into a path. :func:`open_regular` opens every file that others may have
   made, and regular files only. :func:`check_regular` is for libraries that want a path.
2. :func:`read_text` and :func:`read_json` read no more than a limit. JSON is read strictly.
3. :func:`printable` escapes control characters for a terminal, :func:`file_name` for the name of a file.

What was read is compared with a schema of ``io.schema``. Every problem is a ``ValueError`` of one line, or the
system's ``OSError``. Imports neither torch nor numpy.
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
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, TypeGuard

MIB = 1 << 20
SNAPSHOTS, BLOBS = "snapshots", "blobs"  # of the Hugging Face cache: snapshots/HASH/NAME is a link to ../../blobs/HASH

# C0 but for tab and newline, DEL and C1, line and paragraph separators, surrogates; and what has no width and no shape:
# bidi marks, embeddings and isolates, zero-width spaces, joiners, invisible operators, annotations, notes, tags
_RANGES = "\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff"
_RANGES += "\ufeff\ufff9-\ufffb\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e007f"
_OBEYED = re.compile(f"[{_RANGES}]")
_JOINERS, _LAST_LATIN = "\u200c\u200d", "\u036f"  # joiners shape Persian, Hindi and emoji, but no Latin
ESCAPE = "lightning-llm-escape"  # for ``errors=`` of a stream: escapes characters that its encoding lacks
SLASH = "∕"  # looks like a slash, but separates no folders
DEEPEST = 100  # lists and objects in one another, in a JSON file
LONGEST_NAME = 120  # bytes of UTF-8; file systems allow 255, and a suffix or a number may be added


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


@contextmanager
def prefixed(prefix: str, *errors: type[Exception]) -> Iterator[None]:
    """One of these errors becomes a ``ValueError`` of one line, its message after the prefix."""
    try:
        yield
    except errors as error:
        raise ValueError(f"{prefix}: {' '.join(str(error).split())}") from error


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
    path = folder / name
    home = Path(os.path.realpath(folder))
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
    _check_file_type(path, os.stat(path), limit)


def _check_file_type(path: object, status: os.stat_result, limit: int | None) -> None:
    if not stat.S_ISREG(status.st_mode):
        types = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket", stat.S_IFLNK: "a link"}
        raise ValueError(f"{path} is {types.get(stat.S_IFMT(status.st_mode), 'a device')}, expected a file")
    if limit is not None and status.st_size > limit:
        raise ValueError(f"{path} has {status.st_size} bytes, expected at most {limit}")


def descriptor_of(path: str | os.PathLike[str], flags: int, limit: int | None = None) -> int:
    """Open a regular file and nothing else, as ``os.open``; ``O_NOFOLLOW`` among the flags rejects links too.

    What is there is checked before it is opened, since opening a device may do something, and again after, since it
    may have been replaced: then ``O_NONBLOCK`` keeps a FIFO from waiting. Errors as in :func:`check_regular`.
    """
    with suppress(FileNotFoundError):
        _check_file_type(path, os.stat(path, follow_symlinks=not flags & os.O_NOFOLLOW), limit)
    descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK, 0o666)
    try:
        _check_file_type(path, os.fstat(descriptor), limit)
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
        inner = [value for group in inner for value in values_in(group)]
    if inner:
        raise ValueError(f"{path} is not JSON that can be read: it is nested too deeply")
    return content


def values_in(group: object) -> Iterable[Any]:
    """The values of a dict, list or tuple; none in anything else."""
    return group.values() if isinstance(group, dict) else group if isinstance(group, list | tuple) else ()


def parse_json(text: str, source: object, *, nan_is_null: bool = False) -> dict[str, Any]:
    """The object in a JSON text, read strictly.

    Args:
        text: The text.
        source: Its file, for messages.
        nan_is_null: Read NaN and infinite numbers as null; older files of this project contain them.

    Raises:
        ValueError: It is not JSON, or nested too deeply, gives a key twice, holds NaN, an infinite number or half of a
            surrogate pair, or is not an object.
    """

    def number(word: str) -> float | None:
        value = float(word)
        if not math.isfinite(value) and not nan_is_null:
            raise ValueError(f"{word} is not a finite number")
        return value if math.isfinite(value) else None

    try:
        content = json.loads(text, object_pairs_hook=_unique, parse_float=number, parse_constant=number)
        if re.search(r"\\u[dD][89a-fA-F]", text):
            json.dumps(content, ensure_ascii=False).encode()
    except (RecursionError, ValueError) as error:
        special = {RecursionError: "it is nested too deeply", UnicodeEncodeError: "it holds half of a surrogate pair"}
        raise ValueError(f"{source} is not JSON that can be read: {special.get(type(error), error)}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{source} holds {shown(content)}, expected an object with fields by name")
    return content


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        ((repeated_name, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"{shown(repeated_name)} is given twice")
    return content


def is_number(value: object) -> TypeGuard[int | float]:
    """Whether it is an integer or a float, and no boolean."""
    return isinstance(value, int | float) and not isinstance(value, bool)


# ---- text on a terminal and in file names


def printable(text: str) -> str:
    r"""Replace every character that controls a terminal, or that nobody sees, by an escape: ``\x1b``, ``\u202e``.

    Tabs and newlines are unchanged. JSON stays JSON with the same content.
    """

    def escaped(match: re.Match[str]) -> str:
        previous = text[max(0, match.start() - 1) : match.start()]
        is_shaping = match[0] in _JOINERS and previous > _LAST_LATIN and not _OBEYED.match(previous)
        return match[0] if is_shaping else _escaped(match[0])

    return _OBEYED.sub(escaped, text)


def field_name(name: object) -> str:
    """A field's name for a message."""
    return name if isinstance(name, str) and re.fullmatch(r"[\w.]{1,80}", name) else shown(name)


def number_in(text: str) -> int | None:
    """The whole number that 1 to 18 digits from 0 to 9 stand for. ``str.isdigit`` also accepts ², which is none."""
    return int(text) if re.fullmatch("[0-9]{1,18}", text) else None


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
