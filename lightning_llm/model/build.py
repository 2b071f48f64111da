"""Makes the parts that a config names: built-in ones and those of the user, in one way.

A part is called with the config and the arguments that the config gives it, and with ``layer`` and ``seed`` where it
has parameters of these names; a norm with its size and ``eps``. One whose arguments refer to the config is called with
these alone (``references.py``).
"""

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from traceback import walk_tb
from typing import Any

import torch
from torch import nn

from lightning_llm.io.trust import OUR_PREFIX, trust_and_import
from lightning_llm.io.untrusted import shown
from lightning_llm.model.config import ModelConfig
from lightning_llm.model.context import Context, CrossLayerState
from lightning_llm.model.initial_values import Part, construct
from lightning_llm.model.parts import BUILT_IN, arguments_of, name_of
from lightning_llm.model.references import MLP_RATIO, filled, is_mapped

CONSTRUCTORS = dict.fromkeys(BUILT_IN, "(config, **arguments)") | {"norm": "(size, *, eps, **arguments)"}
PASSED = dict.fromkeys(BUILT_IN, "config is the ModelConfig") | {"norm": "size and eps are numbers"}
LONGEST = 200  # characters of a signature or an error in a message
FORWARDS = {
    "attention": "x, context",
    "mlp": "x",
    "norm": "x",
    "block": "x, context",
    "loss": "hidden, head, targets, weights, num_chunks",
}


def build(
    kind: str,
    config: ModelConfig,
    *,
    seed: int,
    path: str,
    layer: int = 0,
    size: int | None = None,
    base: type[nn.Module] = nn.Module,
) -> Any:
    """The part of a kind that the config names.

    Args:
        kind: ``attention``, ``mlp``, ``norm``, ``position``, ``block`` or ``loss``.
        config: Of the model.
        seed: Of the initial values: what a constructor draws is a function of seed and path.
        path: The part's name inside ``Transformer``.
        layer: Index of the block.
        size: Of a norm.
        base: What its class must derive from.

    Raises:
        ValueError: It cannot be imported, is no class of modules, or does not take the arguments of its kind.
    """
    part = getattr(config, kind)
    name = name_of(part)
    built_in = BUILT_IN[kind].get(name)
    make = _imported(kind, name) if built_in is None else _shipped(built_in.path)
    if built_in is None and not (isinstance(make, type) and issubclass(make, base)):
        raise ValueError(f"{kind} {name!r} is {make!r}: it must be a class derived from {_path(base)}")
    given: tuple[Any, ...] = (config,) if size is None else (size,)
    options = arguments_of(part)
    of_size = {} if size is None else {"size": size, "eps": config.rms_norm_eps}
    called = CONSTRUCTORS[kind]
    if is_mapped(options) and built_in is None:
        given, called = (), f"({', '.join(f'{each}=…' for each in options)})"
    else:
        options |= {each: value for each, value in of_size.items() if each != "size"}
        accepted = inspect.signature(make).parameters
        options |= {each: value for each, value in (("layer", layer), ("seed", seed)) if each in accepted}
    _check_call(kind, name, make, called, given, options)
    forward = partial(_forward_pass, kind, config) if kind in ("attention", "mlp") else None
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    assert config.intermediate_size is not None
    values |= {"config": config, "layer": layer, "seed": seed, **of_size}
    values[MLP_RATIO] = config.intermediate_size / config.hidden_size
    make_it = partial(make, *given, **options) if built_in else partial(_called, kind, make, given, options, values)
    part_to_make = Part(make_it, seed, path, f"{kind} {name!r}", built_in is None, config.hidden_size, forward)
    try:
        made = construct(part_to_make)
    except RecursionError:
        raise ValueError(f"{kind} {name!r} builds itself as one of its parts: give a class of one part") from None
    except Exception as error:
        if built_in is not None or isinstance(error, MemoryError | torch.OutOfMemoryError):
            raise
        if isinstance(error, ValueError) and _is_raised_here(error):
            raise
        raise ValueError(_misfit(kind, name, make, called, error)) from error
    if built_in is None and kind in FORWARDS:
        words = FORWARDS[kind].split(", ")
        _check_call(kind, name, type(made).forward, f".forward({FORWARDS[kind]})", (made, *words), {})
    return made


def _called(
    kind: str,
    make: Callable[..., Any],
    given: tuple[Any, ...],
    options: Mapping[str, Any],
    values: Mapping[str, Any],
) -> Any:
    """Call a constructor with the values that its arguments refer to, and the objects that they describe."""

    def object_of(path: str, arguments: Mapping[str, Any]) -> Any:
        cls = _imported(f"{kind}.init_args", path)
        try:
            return cls(**arguments)
        except Exception as error:
            reason = _shortened(" ".join(f"{type(error).__name__}: {error}".split()))
            raise ValueError(
                f"{kind}.init_args: {path} cannot be made with {shown(dict(arguments))}: {reason}"
            ) from error

    return make(*given, **filled(options, values, object_of))


def _forward_pass(kind: str, config: ModelConfig, part: nn.Module) -> Any:
    """The output of an MLP or an attention for one row of two tokens, on the CPU."""
    x = torch.randn(1, 2, config.hidden_size, device="cpu", dtype=torch.float32)
    if kind == "mlp":
        return part(x)
    position = build("position", config, seed=0, path="embed_positions")
    positions = torch.arange(2, device="cpu")
    context = Context(positions, position, CrossLayerState(), position.prepare(positions, x.dtype))
    if (prepare := getattr(part, "prepare", None)) is not None:
        prepare(x, context)
    return part(x, context)


def _shipped(path: str) -> Callable[..., Any]:
    """A built-in part, which may be a class of torch under our name."""
    module, _, name = path.rpartition(".")
    found: Callable[..., Any] = getattr(import_module(f"{OUR_PREFIX}model.{module}"), name)
    return found


def _imported(kind: str, path: str) -> Callable[..., Any]:
    try:
        found: Callable[..., Any] = trust_and_import(path)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{kind} {path!r} cannot be imported: {error}; give package.module.Class") from error
    return found


def _path(cls: type) -> str:
    return f"{cls.__module__.replace('torch.nn.modules.module', 'torch.nn')}.{cls.__qualname__}"


def _check_call(
    kind: str, name: str, function: Callable[..., Any], call: str, given: tuple[Any, ...], options: dict[str, Any]
) -> None:
    """Whether a function can be called so; else a line that says how, and what it takes."""
    try:
        inspect.signature(function).bind(*given, **options)
    except TypeError as error:
        advice = f": {_mapping(kind, function)}" if call == CONSTRUCTORS[kind] else ""
        called = f"{name.rpartition('.')[2]}{call}: {error}; it takes {_signature(function)}{advice}"
        raise ValueError(f"{kind} {name!r} is called as {called}") from None


def _is_raised_here(error: Exception) -> bool:
    """Whether the line is ours, or that of a class which derives from one of ours."""
    *_, (last, _) = walk_tb(error.__traceback__)
    return str(last.f_globals.get("__name__")).startswith(OUR_PREFIX)


def _misfit(kind: str, name: str, make: Callable[..., Any], call: str, error: Exception) -> str:
    """Message about a constructor of the user's choice that failed with what it was given, and where."""
    place = ""
    reason = " ".join(f"{type(error).__name__}: {error}".split())
    for frame, line in walk_tb(error.__traceback__):
        if frame.f_globals.get("__name__") == make.__module__:
            place = f" ({frame.f_code.co_filename}, line {line})"
    called = f"{make.__name__}{call}"
    if call == CONSTRUCTORS[kind]:
        called += f", where {PASSED[kind]} and arguments are those of init_args"
    advice = f"it takes {_signature(make)}: {_mapping(kind, make)}"
    return f"{kind} {name!r} is called as {called}, and its constructor failed: {_shortened(reason)}{place}; {advice}"


def _mapping(kind: str, make: Callable[..., Any]) -> str:
    """Advice to map the arguments of a class of another package, with its own first argument as the example."""
    argument = next(iter(inspect.signature(make).parameters), "dim")
    number = "${size}" if kind == "norm" else "${hidden_size}"
    value = "{class_path: …, init_args: …}" if "config" in argument else number
    example = f"{{{argument}: {value}}}"
    return f"name its arguments in init_args, such as {example}, or write a class that is called so and makes this one"


def _signature(function: Callable[..., Any]) -> str:
    return _shortened(str(inspect.signature(function)))


def _shortened(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}…"
