"""The exchangeable parts of a model: how a config names one, and the built-in ones with their options. No torch.

A part is a short name, an import path, or ``{class_path: name or path, init_args: {…}}``. What a class of each kind
gets and returns is in docs/extending.md.
"""

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from lightning_llm.io.trust import CLASS_PATH, INIT_ARGS, OUR_PREFIX, is_custom
from lightning_llm.io.untrusted import field_name, is_number, shown, values_in

Part = str | dict[str, Any]
Norms = Mapping[str, tuple[str | None, str | None]]  # names: before and after attention and mlp; after the two sums

MOST_NESTED = 4  # lists or dicts inside one another, among the arguments of a class
MOST_EXPERTS = 4096
REQUIRED = object()
NO_NORMS: Norms = dict.fromkeys(("attention", "mlp", "sums"), (None, None))


class Option(NamedTuple):
    """An option of a built-in part.

    Attributes:
        default: Its value where it is not given, or ``REQUIRED``.
        fits: Whether it accepts a value.
        expected: What it accepts, in words.
    """

    default: Any
    fits: Callable[[Any], bool]
    expected: str


class BuiltIn(NamedTuple):
    """A built-in part.

    Attributes:
        path: Of what makes it, inside ``lightning_llm.model``.
        options: Its own, by name.
        is_gated: Of an MLP: whether it has three matrices, and so a smaller ``intermediate_size`` by default.
        has_mup: Whether the table of ``mup`` (``model/mup.py``) says how its weights scale with the width.
        has_own_keys: Of an attention: whether it makes keys in its own way, for each query head and with its own norm.
        positions: Of an attention: those that it takes, if not all; ``PARTIAL_ROPE`` is ``rope`` with
            ``partial_rotary_factor`` below 1.
        needs_all_layers: Of an attention: whether all layers must have it, since later ones use what the first leaves.
        norms: Of a block that joins attention and MLP as those of ``block.py`` do; the accounting measures any other.
    """

    path: str
    options: Mapping[str, Option] = MappingProxyType({})
    is_gated: bool = False
    has_mup: bool = False
    has_own_keys: bool = False
    positions: tuple[str, ...] | None = None
    needs_all_layers: bool = False
    norms: Norms = NO_NORMS


def is_positive(value: Any, most: float = 1e30) -> bool:
    """Whether it is a number above 0 that torch can hold."""
    return is_number(value) and 0 < value <= most


def _whole(default: Any, least: int, most: int = 2**40) -> Option:
    return Option(default, lambda value: type(value) is int and least <= value <= most, f"a whole number from {least}")


def _number(default: float) -> Option:
    return Option(default, lambda value: is_number(value) and 0 <= value <= 1e6, "a number of at least 0")


def _or_null(option: Option) -> Option:
    return Option(None, lambda value: value is None or option.fits(value), f"null or {option.expected}")


def _above_0(default: float | None) -> Option:
    return Option(default, is_positive, "a number above 0")


_SOFTCAP = {"softcap": _or_null(_above_0(None))}
_LOSS = {
    "z_loss": _number(0.0),
    "label_smoothing": Option(0.0, lambda value: is_number(value) and 0 <= value < 1, "a number from 0 to below 1"),
}
_EXPERTS = {
    "num_experts": _whole(8, 2, MOST_EXPERTS),
    "top_k": _whole(2, 1, MOST_EXPERTS),
    "load_balancing": _number(0.01),
    "z_loss": _number(0.001),
}
_GATE = Option("element", ("element", "head").__contains__, "element or head")
_SHARE = Option(0.5, lambda value: is_number(value) and 0 <= value <= 1, "a number from 0 to 1")
_PLACES = Option("AB", ("A", "B", "AB").__contains__, "A, B or AB")
_RANK = {"rank": _or_null(_whole(None, 1, 2**20))}
PARTIAL_ROPE = "rope with partial_rotary_factor below 1"
_LATENT_POSITIONS = (PARTIAL_ROPE, "learned", "alibi", "none")
_WINDOW = {"window": _whole(REQUIRED, 1), "every": _or_null(_whole(None, 2)), **_SOFTCAP}
_PRE: Norms = {**NO_NORMS, "attention": ("input_layernorm", None), "mlp": ("post_attention_layernorm", None)}
_POST: Norms = {**NO_NORMS, "sums": ("post_attention_layernorm", "post_feedforward_layernorm")}
_SANDWICH: Norms = {
    **NO_NORMS,
    "attention": ("input_layernorm", "post_attention_layernorm"),
    "mlp": ("pre_feedforward_layernorm", "post_feedforward_layernorm"),
}
# Every built-in part. A new one is its class and a line here.
BUILT_IN: dict[str, dict[str, BuiltIn]] = {
    "attention": {
        "full": BuiltIn("attention.CausalSelfAttention", _SOFTCAP, has_mup=True),
        "sliding_window": BuiltIn("attention.SlidingWindowAttention", _WINDOW, has_mup=True),
        "canon": BuiltIn("attentions.canon.CanonAttention", {"places": _PLACES, "width": _whole(4, 2, 64), **_SOFTCAP}),
        "gated": BuiltIn("attentions.gated.GatedAttention", {"per": _GATE, **_SOFTCAP}),
        "gated_delta_net": BuiltIn(
            "attentions.gated_delta_net.GatedDeltaNet", has_own_keys=True, positions=("learned", "none")
        ),
        "latent": BuiltIn("attentions.latent.LatentAttention", _RANK, has_own_keys=True, positions=_LATENT_POSITIONS),
        "value_residual": BuiltIn(
            "attentions.value_residual.ValueResidual", {"share": _SHARE, **_SOFTCAP}, needs_all_layers=True
        ),
    },
    "mlp": {
        "swiglu": BuiltIn("mlp.build_swiglu", is_gated=True, has_mup=True),
        "memory_optimized_swiglu": BuiltIn("mlp.build_memory_optimized_swiglu", is_gated=True, has_mup=True),
        "geglu": BuiltIn("mlp.build_geglu", is_gated=True, has_mup=True),
        **dict.fromkeys(("gelu", "gelu_tanh", "relu", "relu2"), BuiltIn("mlp.build_plain", has_mup=True)),
        "mixture_of_experts": BuiltIn("experts.MixtureOfExperts", _EXPERTS, is_gated=True),
    },
    "norm": {
        "rmsnorm": BuiltIn("norm.RMSNorm", has_mup=True),
        "layernorm": BuiltIn("norm.LayerNorm", has_mup=True),
        "dynamic_tanh": BuiltIn("norm.DynamicTanh", {"alpha": _above_0(0.5)}),
    },
    "position": {
        "rope": BuiltIn("position.RotaryPositions", has_mup=True),
        "learned": BuiltIn("position.LearnedPositions", has_mup=True),
        "none": BuiltIn("position.Position", has_mup=True),
        "alibi": BuiltIn("position.LinearBiases"),
    },
    "block": {
        "pre": BuiltIn("block.Block", has_mup=True, norms=_PRE),
        "post": BuiltIn("block.PostNormBlock", has_mup=True, norms=_POST),
        "sandwich": BuiltIn("block.SandwichBlock", has_mup=True, norms=_SANDWICH),
    },
    "loss": {"cross_entropy": BuiltIn("loss.CrossEntropy", _LOSS, has_mup=True)},
}

# Our classes by their paths; another path into this package is no part
SHORT_NAMES = {
    f"{OUR_PREFIX}model.{part.path}": name
    for parts in BUILT_IN.values()
    for name, part in parts.items()
    if part.path.rpartition(".")[2][0].isupper()
}


def name_of(part: Part) -> str:
    """The short name or the import path of a part."""
    return part if isinstance(part, str) else str(part[CLASS_PATH])


def arguments_of(part: Part) -> dict[str, Any]:
    """The arguments that a part gives."""
    return {} if isinstance(part, str) else dict(part[INIT_ARGS])


def option_of(kind: str, part: Part, name: str) -> Any:
    """An option of a built-in part, or its default; ``None`` for a part that has no such option."""
    built_in = BUILT_IN[kind].get(name_of(part))
    if built_in is None or name not in built_in.options:
        return None
    return arguments_of(part).get(name, built_in.options[name].default)


def window_of_layer(layer: int, window: int | None, every: int | None) -> int | None:
    """The window of a layer's attention; ``None`` where it is full."""
    return None if every is not None and (layer + 1) % every == 0 else window


def normalized(part: Any) -> Any:
    """A part in its shortest form: a name where it gives no arguments. A malformed one is returned as it is."""
    if not isinstance(part, dict) or set(part) - {CLASS_PATH, INIT_ARGS} or not isinstance(part.get(CLASS_PATH), str):
        return part
    given = part.get(INIT_ARGS) or {}
    return {CLASS_PATH: part[CLASS_PATH], INIT_ARGS: given} if given else part[CLASS_PATH]


def by_path(kind: str, part: Any) -> Any:
    """A part with the import path of its class, where the class itself is given; ours by their short names."""
    path = part.get(CLASS_PATH) if isinstance(part, dict) else part
    if isinstance(path, type):
        if "." in path.__qualname__:
            raise ValueError(
                f"{kind} {path.__qualname__} is inside a function or class: define it at the top of a module"
            )
        path = f"{path.__module__}.{path.__qualname__}"
    if not isinstance(path, str):
        return part
    path = SHORT_NAMES.get(path, path)
    return {**part, CLASS_PATH: path} if isinstance(part, dict) else path


def form_problems(kind: str, part: Any) -> Iterator[str]:
    """Why a normalized value of a config is no part at all."""
    form = "a name, an import path, or class_path and init_args"
    if not isinstance(part, str | dict):
        yield f"{kind} must be {form}, got {shown(part)}"
    elif isinstance(part, dict):
        unknown = [field_name(name) for name in part if name not in (CLASS_PATH, INIT_ARGS)]
        if unknown or not isinstance(part.get(CLASS_PATH), str):
            yield f"{kind} must be {form}, got {f'the key {unknown[0]}' if unknown else shown(part)}"
        elif not isinstance(part.get(INIT_ARGS), dict) or not all(isinstance(name, str) for name in part[INIT_ARGS]):
            yield f"{kind}.init_args must be options by name, got {shown(part.get(INIT_ARGS))}"


def part_problems(kind: str, part: Part) -> Iterator[str]:
    """An unknown name, or an argument that a built-in part does not take."""
    name = name_of(part)
    given = arguments_of(part)
    known = BUILT_IN[kind]
    if name in known:
        yield from _option_problems(kind, name, known[name].options, given)
    elif "." not in name or not is_custom(name):
        yield (
            f"{kind} {shown(name)} is unknown: choose one of {', '.join(known)}, "
            "or give the import path of a class (package.module.Class)"
        )
    elif not _is_plain(given, MOST_NESTED):
        yield f"{kind}.init_args of {shown(name)} must be plain values, got {shown(given)}"


def _option_problems(kind: str, name: str, options: Mapping[str, Option], given: dict[str, Any]) -> Iterator[str]:
    for argument, value in given.items():
        if argument not in options:
            takes = f"it takes {', '.join(options)}" if options else "it takes none"
            yield f"{kind} {name!r} has no argument {shown(argument)}: {takes}"
        elif not options[argument].fits(value):
            yield f"{kind}.{argument} must be {options[argument].expected}, got {shown(value)}"
    yield from (
        f"{kind} {name!r} needs {argument}: {option.expected}"
        for argument, option in options.items()
        if option.default is REQUIRED and argument not in given
    )


def _is_plain(value: Any, depth: int) -> bool:
    """Whether the values in nested lists and dicts are plain, and not too deep."""
    if isinstance(value, str | int | float | bool | None):
        return True
    return (
        depth > 0
        and isinstance(value, list | tuple | dict)
        and (all(_is_plain(each, depth - 1) for each in values_in(value)))
    )
