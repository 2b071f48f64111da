"""The result of a run: ``summary.json``, read within a schema. Needs no torch."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lightning_llm.io.schema import NUMBER, TEXT, check, list_of, maybe, open_record, validate, whole
from lightning_llm.io.untrusted import read_json
from lightning_llm.runs.directory import SUMMARY

_BOOL = check("true or false", lambda value: isinstance(value, bool))
_TEXTS = check("texts by name", lambda value: _are_texts(value, ".*"))
_BY_STEP = check("texts by step", lambda value: _are_texts(value, "[0-9]{1,15}"))


def read_summary(run: Path, measured: Iterable[str]) -> dict[str, Any]:
    """The content of ``summary.json``.

    Args:
        run: The run's directory.
        measured: Fields that are numbers, or null if they were not measured.

    Raises:
        ValueError: It is damaged.
        OSError: It cannot be read.
    """
    fields = {**dict.fromkeys(measured, maybe(NUMBER)), "threads": maybe(whole()), "changed_on_resume": list_of(TEXT)}
    fields |= dict.fromkeys(("precision", "device", "torch", "numpy", "package"), maybe(TEXT))
    fields |= {"tf32": maybe(_BOOL), "initial_values": maybe(_TEXTS), "batches_at": maybe(_BY_STEP)}
    fields |= dict.fromkeys(("batches", "validation_batches"), maybe(TEXT))
    try:
        content = read_json(run / SUMMARY, nan_is_null=True)  # older ones contain Infinity
        validate(content, open_record({}, fields), run / SUMMARY)
    except ValueError as error:
        raise ValueError(f"{run / SUMMARY} is damaged: {error}") from error
    return content


def _are_texts(value: Any, names: str) -> bool:
    texts = value.items() if isinstance(value, dict) else [("", None)]
    return all(isinstance(each, str) and re.fullmatch(names, name, re.DOTALL) for name, each in texts)
