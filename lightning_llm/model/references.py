"""References of ``init_args`` to the config, and objects in them: how a class of another package is constructed.

``{dim: ${hidden_size}, act: {class_path: torch.nn.SiLU}}`` calls ``Class(dim=…, act=SiLU())``: a part whose arguments
refer to something is constructed with them alone, and does not get the config by itself. No torch.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from difflib import get_close_matches
from typing import Any

from lightning_llm.io.trust import CLASS_PATH, INIT_ARGS
from lightning_llm.io.untrusted import shown

REFERENCE = re.compile(r"\$\{(.*)\}")
MLP_RATIO = "mlp_ratio"  # intermediate_size / hidden_size, by which many packages say how wide an MLP is
OF_ALL = ("config", "layer", "seed", MLP_RATIO)  # beside the fields of the config
OF_NORM = ("size", "eps")


def is_mapped(arguments: Mapping[str, Any]) -> bool:
    """Whether the arguments of a part refer to the config, and so are all that its constructor gets."""
    return any(True for _ in references_in(arguments))


def references_in(value: Any) -> Iterator[str]:
    """The names that nested arguments refer to, as they are written."""
    if isinstance(value, str):
        if (found := REFERENCE.fullmatch(value)) is not None:
            yield found[1]
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from references_in(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from references_in(each)


def classes_in(value: Any) -> Iterator[str]:
    """The import paths of the objects in nested arguments."""
    if isinstance(value, Mapping):
        if isinstance(value.get(CLASS_PATH), str):
            yield value[CLASS_PATH]
        for each in value.values():
            yield from classes_in(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from classes_in(each)


def reference_problems(kind: str, arguments: Mapping[str, Any], fields: Iterable[str]) -> Iterator[str]:
    """A line for each reference to a name that does not exist, and for each malformed object.

    Args:
        kind: Of the part.
        arguments: Its own.
        fields: Names in the config.
    """
    known = (*fields, *OF_ALL, *(OF_NORM if kind == "norm" else ()))
    for name in dict.fromkeys(references_in(arguments)):
        if name not in known:
            close = get_close_matches(name, known, 1)
            hint = f"; did you mean ${{{close[0]}}}?" if close else ": it takes a key of model.architecture"
            yield f"{kind}.init_args refers to {shown(f'${{{name}}}')}, which does not exist{hint}"
    yield from _object_problems(kind, arguments)


def _object_problems(kind: str, value: Any) -> Iterator[str]:
    if isinstance(value, list | tuple):
        for each in value:
            yield from _object_problems(kind, each)
    if not isinstance(value, Mapping):
        return
    if CLASS_PATH in value:
        path, options = value[CLASS_PATH], value.get(INIT_ARGS) or {}
        if not isinstance(path, str) or "." not in path:
            yield f"{kind}.init_args has an object with class_path {shown(path)}: give package.module.Class"
        elif value.keys() - {CLASS_PATH, INIT_ARGS} or not isinstance(options, Mapping):
            yield f"{kind}.init_args: the object {shown(path)} takes class_path and init_args, got {shown(value)}"
    for each in value.values():
        yield from _object_problems(kind, each)


def filled(value: Any, values: Mapping[str, Any], make: Callable[[str, Mapping[str, Any]], Any]) -> Any:
    """Arguments with what they refer to, and with the objects that they describe.

    Args:
        value: Nested arguments without :func:`reference_problems`.
        values: By the name of a reference.
        make: Makes an object from an import path and arguments by name.
    """
    if isinstance(value, str):
        found = REFERENCE.fullmatch(value)
        return value if found is None else values[found[1]]
    if isinstance(value, list | tuple):
        return [filled(each, values, make) for each in value]
    if not isinstance(value, Mapping):
        return value
    if CLASS_PATH in value:
        return make(value[CLASS_PATH], filled(value.get(INIT_ARGS) or {}, values, make))
    return {name: filled(each, values, make) for name, each in value.items()}
