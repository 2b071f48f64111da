"""Whether two runs are a pair: both used the same batches and started from the same values, by hashes that they wrote.

``summary.json`` has these hashes (``training.callbacks.inputs``): of the training and validation batches that the run
used, and of the initial value of each parameter. A pair shares the initial values of all parameters that both runs
have, by name, shape and dtype; a parameter of another shape cannot be shared.
"""

from collections.abc import Mapping
from typing import Any

INITIAL_VALUES, BATCHES, VALIDATION_BATCHES = "initial_values", "batches", "validation_batches"
_WORDS = {BATCHES: "training batches", VALIDATION_BATCHES: "validation batches", INITIAL_VALUES: "initial values"}


def mismatch(first: Mapping[str, Any], second: Mapping[str, Any]) -> str:
    """Why two runs are no pair, in a few words; empty if they are one.

    Args:
        first: The ``summary.json`` of one run.
        second: That of the other.
    """
    for field, words in _WORDS.items():
        if not first.get(field) or not second.get(field):
            return f"a run has no record of its {words}"
        if field != INITIAL_VALUES and first[field] != second[field]:
            return f"their {words} differ"
    ours, theirs = first[INITIAL_VALUES], second[INITIAL_VALUES]
    shared = [name for name in ours if name in theirs and _shape(ours[name]) == _shape(theirs[name])]
    if not shared:
        return "they share no parameter"
    if differing := [name for name in shared if ours[name] != theirs[name]]:
        more = f" and {len(differing) - 1} more" if len(differing) > 1 else ""
        return f"their initial values differ: {differing[0]}{more}"
    return ""


def _shape(recorded: str) -> str:
    return recorded.rpartition(" ")[0]
