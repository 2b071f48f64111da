"""Records: JSON files that this project writes itself, and reads back as typed values (``msgspec``). No torch."""

from pathlib import Path
from typing import TypeVar

import msgspec

from lightning_llm.io.atomic import write_json
from lightning_llm.io.untrusted import MIB, read_bytes

LARGEST = 64 * MIB
Kind = TypeVar("Kind")


class _Versioned(msgspec.Struct):
    version: int = 1


def read_record(path: Path, kind: type[Kind]) -> Kind:
    """The content of a file of :func:`write_record`.

    Args:
        path: The file.
        kind: The ``msgspec.Struct`` that was written.

    Raises:
        ValueError: It has other fields or values than such a record.
        OSError: It cannot be read.
    """
    try:
        return msgspec.json.decode(read_bytes(path, LARGEST), type=kind)
    except (msgspec.MsgspecError, UnicodeError) as error:
        raise ValueError(f"{path} is no file of this program: {error}") from None


def version_of(path: Path) -> int:
    """The ``version`` in a file of :func:`write_record`; 1: it has none, as files of early versions.

    Raises:
        ValueError: It holds no record.
    """
    return read_record(path, _Versioned).version


def write_record(path: Path, record: object) -> None:
    """Write a record as JSON, atomically."""
    write_json(path, msgspec.to_builtins(record))
