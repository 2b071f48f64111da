"""What a checkpoint holds, written down once. ``training.checkpoint_checks`` compares each file that is read with it.

A name that is not listed is the user's own, of a callback say: it is left alone, except where Lightning would make an
attribute of it.

How it is written: a dict is a dict with these names, of which those with ``?`` may be missing; ``[kind]`` is a list, a
tuple ``(kind, kind)`` any of several, :class:`Each` a dict with any names, :class:`Between` a number, a type itself.
"""

import math
from collections.abc import Iterable, Iterator
from itertools import islice
from types import NoneType, UnionType
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from torch import Tensor

from lightning_llm.model.config import ModelConfig

FORMAT = "lightning_llm"  # the key of a checkpoint's own part
VERSION = "pytorch-lightning_version"

SHOWN, SAID, LISTED = 60, 600, 5  # characters of a value and of a message, faults in it
MOST_STEPS = 2**53
CLOSED = "*"  # among the names of a record: there are no others


class Between(NamedTuple):
    """A number with its bounds, both allowed. NaN is between nothing."""

    low: float
    high: float
    kind: type = int


class Each(NamedTuple):
    """A dict of which every name and every value is of a kind."""

    name: Any
    value: Any


class Shaped:
    """A tensor, or the rows of one that are in files (``training.sharded_files``)."""


class Plain:
    """What YAML holds: no tensors, however deep."""


class OneOf(NamedTuple):
    """One of several texts."""

    texts: tuple[str, ...]


def _kind_of(annotation: Any) -> Any:
    """The same in our own words, of a field of a dataclass."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin in (Union, UnionType):
        return tuple(map(_kind_of, arguments))
    if origin is Literal:
        return OneOf(arguments)
    if origin is list:
        return [_kind_of(arguments[0])]
    return Each(*arguments) if origin is dict else annotation


COUNT, POSITIVE, STEP_OR_NONE = Between(0, MOST_STEPS), Between(1, MOST_STEPS), Between(-1, MOST_STEPS)
RATE, BELOW_ONE = Between(0, 1e6, float), Between(0, math.nextafter(1, 0), float)
PLAIN_DICT = Each(str, Any)
CALLBACKS = {
    "HonestResume?": {"options": Each(str, Plain)},
    "RunCheckpoints?": {
        "best_loss": Between(-math.inf, math.inf, float),
        "best_step": STEP_OR_NONE,
        "validated_step": STEP_OR_NONE,
        "turn?": COUNT,
    },
    "TrainingLog?": {"loss": Tensor, "steps": COUNT},
}
MODEL_CHECKPOINT = {  # Lightning's, which removes files of these names
    "best_model_path": str,
    "best_model_score": (Tensor, float, NoneType),
    "dirpath?": (str, NoneType),
    "best_k_models?": PLAIN_DICT,
    "kth_best_model_path?": str,
    "last_model_path?": str,
}
OPTIONS = {  # of optimizers, those that are known
    "lr?": RATE,
    "initial_lr?": RATE,
    "betas?": [BELOW_ONE],
    "eps?": (RATE, list),
    "state_dtype?": (OneOf(("bfloat16",)), NoneType),
    **dict.fromkeys(("amsgrad?", "fused?", "foreach?", "maximize?", "nesterov?"), (bool, NoneType)),
    "weight_decay?": RATE,
    "momentum?": RATE,
    "newton_schulz_steps?": Between(1, 100),
    "name?": str,
}
RECIPE = {"class_path": str, "init_args?": PLAIN_DICT}
HYPER_PARAMETERS = {
    "architecture?": {
        CLOSED: None,
        **{f"{name}?": _kind_of(annotation) for name, annotation in get_type_hints(ModelConfig).items()},
    },
    "loss_chunks?": (COUNT, NoneType),
    "optimizer?": ({"class_path": str, "init_args?": OPTIONS}, NoneType),
    "schedule?": (RECIPE, NoneType),
    "memory_budget?": (str, NoneType),
    "init_from?": (str, NoneType),
    "compile_mode?": (str, NoneType),
    "_instantiator?": NoneType,  # Lightning would import what it names
}
OPTIMIZER = {
    "state": Each(int, PLAIN_DICT),
    "param_groups": [
        {
            "params": [COUNT],
            **OPTIONS,
        }
    ],
}
SCHEDULER = {
    "last_epoch?": STEP_OR_NONE,
    "_step_count?": COUNT,
    "base_lrs?": [RATE],
    "_last_lr?": [RATE],
    "lr_lambdas?": [(PLAIN_DICT, NoneType)],
    "_is_initial?": bool,
    "_get_lr_called_within_step?": bool,
}
PRECISIONS: tuple[str, ...] = ("16-mixed", "16-true", "bf16-mixed", "bf16-true", "32-true", "64-true")
PRECISIONS += ("transformer-engine", "transformer-engine-float16")
CHECKPOINT = {
    "epoch?": COUNT,
    "global_step?": COUNT,
    f"{VERSION}?": str,
    "state_dict?": Each(str, Shaped),
    "callbacks?": CALLBACKS,
    "optimizer_states?": [OPTIMIZER],
    "lr_schedulers?": [SCHEDULER],
    "hparams_name?": (str, NoneType),
    "hparams_type?": (str, NoneType),
    "hparams?": NoneType,  # of Lightning before 1.0, which takes them for arguments of the model
    "module_arguments?": NoneType,
    "hyper_parameters?": HYPER_PARAMETERS,
    "TokenDataModule?": {
        "optimizer_steps?": COUNT,
        "accumulation?": POSITIVE,
        "global_batch_size?": POSITIVE,
        "context_length?": POSITIVE,
        "seed?": int,
        "store": str,
    },
    f"{FORMAT}?": {
        "format_version": POSITIVE,
        "tokenizer": (str, NoneType),
        # a run that says auto takes the precision over
        "execution?": {"precision?": OneOf(PRECISIONS), "threads?": POSITIVE, "device?": str},
    },
    "model?": PLAIN_DICT,  # of a plain loop
    "optimizer?": OPTIMIZER,
    "iteration?": COUNT,
}
OF_TENSORS = ("state_dict", "optimizer_states")
_NAMES = {int: "a whole number", float: "a number", str: "a text", bool: "true or false", NoneType: "null"}
_NAMES |= {dict: "a dict", list: "a list", Tensor: "a tensor", Shaped: "a tensor", Plain: "a plain value"}


def faults(value: object, kind: Any, where: str) -> Iterator[str]:
    """Where a value is not of a kind, in words.

    Args:
        value: Anything.
        kind: As the schema is written, see above. A whole number is a number too, and a tuple a list.
        where: Name of the value.
    """
    if kind is Any:
        return
    if isinstance(kind, Between):
        if not _is_a(value, kind.kind) or not kind.low <= value <= kind.high:  # type: ignore[operator]
            yield f"{where} is {shown(value)}, expected {_NAMES[kind.kind]} from {kind.low:.6g} to {kind.high:.6g}"
    elif isinstance(kind, OneOf):
        if not isinstance(value, str) or value not in kind.texts:
            yield f"{where} is {shown(value)}, expected one of {', '.join(kind.texts)}"
    elif isinstance(kind, Each):
        if not isinstance(value, dict):
            yield f"{where} is {shown(value)}, expected a dict"
            return
        for name, each in value.items():
            yield from faults(name, kind.name, f"a name in {where}")
            yield from faults(each, kind.value, f"{where}.{shown(name)}")
    elif isinstance(kind, tuple):
        tried = [list(faults(value, each, where)) for each in kind]
        if all(tried):
            yield from (
                tried[0]
                if isinstance(value, dict)
                else [f"{where} is {shown(value)}, expected {' or '.join(map(_name, kind))}"]
            )
    elif isinstance(kind, list):
        if not isinstance(value, list | tuple):
            yield f"{where} is {shown(value)}, expected a list"
            return
        for number, each in enumerate(value):
            yield from faults(each, kind[0], f"{where}[{number}]")
    elif isinstance(kind, dict):
        yield from _record_faults(value, kind, where)
    elif not _is_a(value, kind):
        yield f"{where} is {shown(value)}, expected {_NAMES[kind]}"


def _record_faults(value: object, kind: dict[str, Any], where: str) -> Iterator[str]:
    if not isinstance(value, dict):
        yield f"{where} is {shown(value)}, expected a dict"
        return
    prefix = f"{where}." if where else ""
    for name, its in kind.items():
        plain = name.removesuffix("?")
        if plain in value:
            yield from faults(value[plain], its, f"{prefix}{plain}")
        elif name == plain != CLOSED:
            yield f"{prefix}{name} is missing"
    for name in value:
        if not isinstance(name, str) or (CLOSED in kind and name not in kind and f"{name}?" not in kind):
            yield f"{prefix}{shown(name)} is unknown"


def _is_a(value: object, kind: Any) -> bool:
    if kind is Plain:
        inner = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
        plain = isinstance(value, NoneType | bool | int | float | str | list | tuple | dict)
        return plain and all(_is_a(each, Plain) for each in inner)
    if kind is Shaped:
        return isinstance(value, Tensor) or hasattr(value, "pieces")
    if kind in (int, float):
        known = isinstance(value, int if kind is int else int | float) and not isinstance(value, bool)
        return known and -(2**63) <= value < 2**63 if isinstance(value, int) else known
    return isinstance(value, kind)


def _name(kind: Any) -> str:
    if isinstance(kind, Between):
        return _NAMES[kind.kind]
    return _NAMES[kind] if isinstance(kind, type) else "a list" if isinstance(kind, list) else "a dict"


def shown(value: object) -> str:
    """A value in a message, short."""
    if isinstance(value, Tensor):
        return f"a tensor of {str(value.dtype).removeprefix('torch.')} and shape {tuple(value.shape)}"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, int) and value.bit_length() > 64:
        return f"a whole number of {value.bit_length()} bits"
    if isinstance(value, dict | list | tuple | set):
        return f"a {type(value).__name__} of {len(value)}"
    if isinstance(value, str):
        return value[:SHOWN] if value.isprintable() else repr(value[:SHOWN])
    return repr(value)[:SHOWN]


def refuse(found: Iterable[str], introduction: str) -> None:
    """Raise a ValueError of the first faults, if there are any, in one line."""
    if listed := list(islice(found, LISTED)):
        raise ValueError(f"{introduction}{' '.join('; '.join(listed).split())[:SAID]}")
