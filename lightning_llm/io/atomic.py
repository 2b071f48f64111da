"""Text files that are written whole or not at all, and JSON that every reader accepts. Needs no torch."""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path


def write_text(path: Path, content: str) -> None:
    """Write a text file whole or not at all; missing folders are made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(content, encoding="utf-8")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: Path, content: object, *, indent: int | None = 2) -> None:
    """Write :func:`json_text` whole or not at all."""
    write_text(path, json_text(content, indent=indent) + "\n")


def json_text(content: object, *, indent: int | None = None) -> str:
    """JSON as the standard has it: a number that is NaN or infinite is null."""
    return json.dumps(_finite(content), indent=indent, allow_nan=False)


def _finite(content: object) -> object:
    if isinstance(content, float):
        return content if math.isfinite(content) else None
    if isinstance(content, Mapping):
        return {name: _finite(value) for name, value in content.items()}
    if isinstance(content, list | tuple):
        return [_finite(value) for value in content]
    return content
