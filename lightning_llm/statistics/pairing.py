"""Whether two runs are a pair: they used the same batches, started from the same values, and were executed alike.

``summary.json`` says so, by hashes (``training.callbacks.inputs``) of the training and validation batches that the run
used and of the initial value of each parameter, and by a record of what else decides its bits
(``training.environment``). A pair shares the initial values of all parameters that both runs have, by name, shape and
dtype. Three kinds cannot be shared: a parameter of another shape; one that the constructor of a custom part set; and
the weight of a layer that writes to the residual stream, if it does so in one run alone or if the depths differ.
``initial_rules`` says which these are. Runs of different lengths share the batches of their common steps.
"""

from collections.abc import Collection, Mapping
from typing import Any

INITIAL_VALUES = "initial_values"
BATCHES = "batches"
VALIDATION_BATCHES = "validation_batches"
BATCHES_AT = "batches_at"
STEPS = "steps"
CHANGES = "changed_on_resume"
INITIAL_RULES = "initial_rules"  # by name of a parameter; others follow the table
KEPT = "kept"
RESIDUAL = "residual"
INITIAL_SCALES = "initial_scales"
NULL_VALUES = "initial_values that the null variant redraws"  # can be excused, as can every field
# What the null variant redraws, in this order, and what it is called
REDRAWN = {".mlp.": "MLPs", ".self_attn.": "attention", "embed_tokens.": "embedding"}
_OLD_RESIDUAL = (".o_proj.", ".down_proj.")  # in runs without initial_rules
_WORDS = {BATCHES: "training batches", VALIDATION_BATCHES: "validation batches", INITIAL_VALUES: "initial values"}
_EXECUTION = {
    "precision": "precision",
    "device": "device",
    "threads": "number of threads",
    "tf32": "use of TF32",
    "torch": "version of torch",
    "numpy": "version of numpy",
    "package": "code of lightning_llm",
}


def mismatch(first: Mapping[str, Any], second: Mapping[str, Any], excused: Collection[str] = ()) -> str:
    """Why two runs are no pair, in a few words; empty if they are one.

    Args:
        first: The ``summary.json`` of one run.
        second: That of the other.
        excused: Fields in which they may differ; ``NULL_VALUES``: what the null variant redraws.
    """
    checks = (executed_otherwise, _batch_mismatch, _value_mismatch)
    return next(filter(None, (check(first, second, excused) for check in checks)), "")


def executed_otherwise(first: Mapping[str, Any], second: Mapping[str, Any], excused: Collection[str] = ()) -> str:
    """How two runs were executed differently, in a few words; empty if they were not.

    Runs of earlier versions have no record of some fields: if both lack one, it says nothing.
    """
    for field, words in _EXECUTION.items():
        value, other_value = first.get(field), second.get(field)
        if field in excused or value == other_value:
            continue
        if value is None or other_value is None:
            return f"a run has no record of its {words}"
        return f"their {words} differs: {value} and {other_value}"
    for change in (*(first.get(CHANGES) or ()), *(second.get(CHANGES) or ())):  # "step 3: threads: 2 -> 1"
        field = change.partition(": ")[2].partition(": ")[0]
        if field in _EXECUTION and field not in excused:
            return f"a run was resumed with another {_EXECUTION[field]} ({change})"
    return ""


def _batch_mismatch(first: Mapping[str, Any], second: Mapping[str, Any], excused: Collection[str]) -> str:
    """Their batches; the training batches of runs with other numbers of steps, up to the last step of both."""
    are_as_long = first.get(STEPS) == second.get(STEPS)
    for field in (BATCHES, VALIDATION_BATCHES):
        if field in excused:
            continue
        if not first.get(field) or not second.get(field):
            return f"a run has no record of its {_WORDS[field]}"
        if first[field] != second[field] and (field != BATCHES or are_as_long):
            return f"their {_WORDS[field]} differ"
    if BATCHES in excused or are_as_long:
        return ""
    hashes, other_hashes = first.get(BATCHES_AT), second.get(BATCHES_AT)
    if not hashes or not other_hashes:
        return f"they have {first.get(STEPS)} and {second.get(STEPS)} steps, and no record of the batches of both"
    common = max(hashes.keys() & other_hashes.keys(), key=int, default=None)
    if common is None:
        return "their records of training batches have no step in common"
    return "" if hashes[common] == other_hashes[common] else f"their training batches up to step {common} differ"


def _value_mismatch(first: Mapping[str, Any], second: Mapping[str, Any], excused: Collection[str]) -> str:
    """The initial values of the parameters that both have."""
    if INITIAL_VALUES in excused:
        return ""
    values, other_values = first.get(INITIAL_VALUES), second.get(INITIAL_VALUES)
    if not values or not other_values:
        return f"a run has no record of its {_WORDS[INITIAL_VALUES]}"
    shared = [name for name in values if name in other_values and _shape(values[name]) == _shape(other_values[name])]
    if not shared:
        return "they share no parameter"
    own = own_values(first, second)
    differing = [name for name in shared if values[name] != other_values[name] and name not in own]
    if NULL_VALUES in excused and (redrawn := redrawn_part(first, second)) is not None:
        differing = [name for name in differing if redrawn not in name]
    if differing:
        more = f" and {len(differing) - 1} more" if len(differing) > 1 else ""
        return f"their initial values differ: {differing[0]}{more}"
    return ""


def own_values(first: Mapping[str, Any], second: Mapping[str, Any]) -> set[str]:
    """The parameters whose initial values a pair need not share, of those that both runs have.

    Args:
        first: The ``summary.json`` of one run.
        second: That of the other.
    """
    rules, other_rules = (_rules(run) for run in (first, second))
    depths = {
        len({name.partition("layers.")[2].partition(".")[0] for name in run[INITIAL_VALUES]}) for run in (first, second)
    }
    found = set()
    for name in first[INITIAL_VALUES].keys() & second[INITIAL_VALUES].keys():
        rule, other = rules.get(name), other_rules.get(name)
        if KEPT in (rule, other) or rule != other or (rule == RESIDUAL and len(depths) > 1):
            found.add(name)
    return found


def redrawn_part(baseline: Mapping[str, Any], null: Mapping[str, Any]) -> str | None:
    """The key of ``REDRAWN`` for what the null variant drew again; ``None``: nothing differs, or it is not known."""
    values, other_values = (run.get(INITIAL_VALUES) or {} for run in (baseline, null))
    differing = [name for name in values.keys() & other_values.keys() if values[name] != other_values[name]]
    return next((part for part in REDRAWN if any(part in name for name in differing)), None)


def _rules(summary: Mapping[str, Any]) -> Mapping[str, str]:
    """``initial_rules``, of earlier versions by the names of layers."""
    rules: Mapping[str, str] | None = summary.get(INITIAL_RULES)
    if rules is None:
        rules = {name: RESIDUAL for name in summary[INITIAL_VALUES] if any(part in name for part in _OLD_RESIDUAL)}
    return rules


def _shape(recorded: str) -> str:
    return recorded.rpartition(" ")[0]
