"""One number sets a model and its training: ``size: 100k``, from a base config. No torch.

``size`` counts parameters without embeddings and head. It starts from the base config, replaces the options in
this table, and leaves everything else, so the size is reached with the base's own parts. What the user gives besides
the base wins: it is not replaced, and the size is reached around it. "Relative" means divided by the base's.

=======================================  ==============================================================================
option                                   rule, and its source
=======================================  ==============================================================================
hidden_size, num_hidden_layers           the legal shape nearest to the base's width per layer and to
                                         12 · layers · width² = size (Kaplan et al. 2020, arXiv:2001.08361, who find
                                         that the loss depends weakly on the shape); widths are multiples of head_dim
head_dim, num_attention_heads            16 wide below width 96, 32 wide below 256, then 64; heads fill the width (ours)
num_key_value_heads                      as many query heads for each as in the base, or fewer (ours)
intermediate_size                        the multiple of 8 nearest to the size, counted with the parts of the model
data.global_batch_size                   relative tokens^0.38 (Bergsma et al. 2025, "Power Lines", arXiv:2505.13738),
                                         rounded to a multiple of micro-batch times devices
trainer.max_steps                        tokens_per_parameter · size / tokens of a step; by default 10, half of the 20
                                         of Hoffmann et al. 2022, arXiv:2203.15556
lr of AdamW and Adam                     1 / relative width (Yang et al. 2022, arXiv:2203.03466; with ``mup`` the model
                                         does it), 1 / √ relative depth (Yang et al. 2023, arXiv:2310.02244),
                                         √ relative batch (Malladi et al. 2022, arXiv:2205.10287)
lr of MuonAdamW                          1 / √ relative width: the spectral norm of its step, 0.2 √width (Liu et al.
                                         2025, arXiv:2502.16982), must not grow for square matrices (Yang et al. 2023,
                                         arXiv:2310.17813), and that of AdamW's grows with the width; 1 / √ relative
                                         depth; nothing for the batch (measured: benchmarks/README.md, learning rates)
weight_decay                             lr · decay · steps is the base's (Wang and Aitchison 2024, arXiv:2405.13698;
                                         "Power Lines" confirms it where tokens per parameter are equal)
warmup_steps, decay_steps,               the base's share of the run (ours); no schedule: its default
trainer.val_check_interval
data.eval_batch_size                     the base's rows
trainer.limit_val_batches                a whole number: about as many windows as in the base
=======================================  ==============================================================================
"""

import dataclasses
import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from lightning_llm.accounting.counts import parameters_by_part, step_flops
from lightning_llm.accounting.parts import parts_to_measure
from lightning_llm.accounting.step_settings import UNMEASURED, Measured
from lightning_llm.io.config_file import Section, class_of, merged, value_at
from lightning_llm.io.units import four_digits
from lightning_llm.io.untrusted import is_number, shown
from lightning_llm.model.config import ModelConfig
from lightning_llm.optim.catalog import OPTIMIZERS
from lightning_llm.optim.schedules import SCHEDULES

SIZE_OPTIONS = ("size", "tokens_per_parameter", "repeat")  # at the top of a config
TOKENS_PER_PARAMETER = 10.0
CLOSE = 0.1  # how far a model may be from the size that was asked for, as a share
MULTIPLE = 8  # of the intermediate size
MOST_EPOCHS = 4  # Muennighoff et al. 2023, arXiv:2305.16264: up to here, repeated text is nearly as good as new text
HEADS = ((96, 16), (256, 32), (math.inf, 64))  # below this width, heads are this wide
BATCH_EXPONENT = 0.38
UNITS = {"": 1, "k": 10**3, "M": 10**6, "B": 10**9}
ARCHITECTURE, CONTEXT = "model.architecture", "data.context_length"
STEPS, INTERVAL = "trainer.max_steps", "trainer.val_check_interval"
LR, DECAY = "model.optimizer.init_args.lr", "model.optimizer.init_args.weight_decay"
LIMIT = "trainer.limit_val_batches"
BATCH, MICRO_BATCH, EVAL_BATCH = (f"data.{name}_batch_size" for name in ("global", "micro", "eval"))
SHAPE = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim")

MeasureParts = Callable[[ModelConfig], Measured]
_Models = tuple[ModelConfig, ModelConfig]  # of the base, and of the size


class SizeRequest(NamedTuple):
    """Request of a user: size, tokens per parameter, whether text may repeat, and how many configs are the base."""

    size: int
    tokens_per_parameter: float
    repeat: bool
    base_configs: int


def request_in(contents: Sequence[Section], typed: Section) -> SizeRequest | None:
    """Request of the configs, in their order, and of the command line; ``None``: no size.

    The configs up to the last one that has ``size`` are the base; if the command line has it, all of them are.

    Raises:
        ValueError: A value is wrong, or given without a size.
    """
    options = {name: value for each in [*contents, typed] for name, value in each.items() if name in SIZE_OPTIONS}
    if options.get("size") is None:
        if names := [name for name in SIZE_OPTIONS if options.get(name)]:
            raise ValueError(f"{names[0]} needs size: give one, such as --size 100k, or leave {names[0]} out")
        return None
    ratio = options.get("tokens_per_parameter")
    ratio = TOKENS_PER_PARAMETER if ratio is None else ratio
    if not is_number(ratio) or not 0 < ratio < math.inf:
        raise ValueError(f"tokens_per_parameter must be a number above 0, got {shown(ratio)}")
    sized = [number for number, content in enumerate(contents, 1) if "size" in content]
    base_configs = sized[-1] if typed.get("size") is None else len(contents)
    return SizeRequest(parse_size(options["size"]), ratio, bool(options.get("repeat")), base_configs)


def parse_size(text: object) -> int:
    """``100k``, ``1.5M`` or a whole number as a number of parameters.

    Raises:
        ValueError: It is none of these.
    """
    match = re.fullmatch(r"(\d{1,15}(?:\.\d{1,9})?)([kMB]?)", str(text))
    size = 0.0 if match is None else round(float(match[1]) * UNITS[match[2]], 3)
    if size < 1 or size % 1:
        raise ValueError(f"size must be a number of parameters such as 100k or 1.5M, got {shown(text)}")
    return int(size)


def size_name(size: int) -> str:
    """A number of parameters as short as it can be written exactly: ``100k``, ``1.5M``, ``1448``."""
    unit = next(unit for unit in reversed(UNITS) if size * 10 % UNITS[unit] == 0 and size >= UNITS[unit])
    return f"{size / UNITS[unit]:.15g}{unit}"


@dataclasses.dataclass(frozen=True)
class Sizing:
    """Values that ``size`` sets.

    Attributes:
        size: As asked for.
        tokens_per_parameter: As asked for.
        options: Of ``fit``, by dotted name; without those that the user gave.
        parameters: Of the model, without embeddings and head.
        tokens: Of the run.
        flops: Of the run: matmuls of forward and backward, head and attention included. ``None``: the vocabulary is
            not known.
        limits_epochs: More than ``MOST_EPOCHS`` epochs are refused. Not so if the user gave the length of the run.
    """

    size: int
    tokens_per_parameter: float
    options: dict[str, Any]
    parameters: int
    tokens: int
    flops: int | None
    limits_epochs: bool = True

    def epoch_problem(self, train_tokens: int) -> str:
        """Problem if the run reads so many tokens of training text too often; else empty."""
        epochs = self.size * self.tokens_per_parameter / train_tokens
        if not self.limits_epochs or epochs <= MOST_EPOCHS:
            return ""
        largest = math.floor(MOST_EPOCHS * train_tokens / self.tokens_per_parameter)
        unit = 10 ** max(0, len(str(largest)) - 2)
        what = f"size {size_name(self.size)} at {self.tokens_per_parameter:g} tokens per parameter"
        often = f"reads the {train_tokens:,} tokens of training text {epochs:.1f} times, more than {MOST_EPOCHS}"
        return f"{what} {often}: the largest size that fits is {size_name(largest // unit * unit)}; --repeat accepts it"

    def in_words(self) -> str:
        """The options in one line."""
        pairs = ", ".join(f"{name.rpartition('.')[2]} {value}" for name, value in self.options.items())
        return f"size {size_name(self.size)} sets {pairs or 'nothing'}: {self.parameters:,} parameters"


def given_options(options: Section, names: Iterable[str], prefix: str = "") -> dict[str, Any]:
    """Select nested options by the given names, with or without ``init_args``; a part of the model is one option."""
    option_names = {name.replace(".init_args", "") for name in names}
    selected: dict[str, Any] = {}
    for name, value in options.items():
        path = f"{prefix}{name}"
        short_path = path.replace(".init_args", "")
        is_inside = any(option.startswith(f"{short_path}.") for option in option_names)
        if f"{path}.class_path" in option_names:  # with the defaults of another class
            selected[path] = value
        if is_inside and isinstance(value, dict) and not path.startswith(f"{ARCHITECTURE}."):
            selected |= given_options(value, option_names, f"{path}.")
        elif is_inside or short_path in option_names:
            selected[path] = value
    return selected


def with_options(options: Section, given: Mapping[str, Any]) -> Section:
    """Nested options with others, by dotted name, in them."""
    for name, value in given.items():
        for key in reversed(name.split(".")):
            value = {key: value}
        options = merged(options, value)
    return options


def sizing_for(
    base: Section,
    size: int,
    tokens_per_parameter: float = TOKENS_PER_PARAMETER,
    *,
    given: Mapping[str, Any] | None = None,
    measure: MeasureParts | None = None,
) -> Sizing:
    """Set a model and its training from one number, by the table above.

    Args:
        base: A config of ``fit``: nested options, with ``trainer.max_steps``, ``data.context_length`` and
            ``data.global_batch_size``.
        size: Parameters of the model without embeddings and head.
        tokens_per_parameter: Tokens of the run for each of them.
        given: Options that the user gave besides the base, by dotted name: ``size`` works around them.
        measure: Measures parts that no formula describes, as ``accounting.measured_parts`` does.

    Raises:
        ValueError: No model of this size can be made, or the base lacks what a rule needs.
    """
    given = given or {}
    run_options = with_options(base, given)
    old = ModelConfig(**_get(base, ARCHITECTURE, {}))
    new, measured, parameters = _nearest_shape(old, run_options, size, given, measure)
    options = {f"{ARCHITECTURE}.{name}": getattr(new, name) for name in (*SHAPE, "intermediate_size")}
    options |= _training(base, run_options, given, (old, new), size * tokens_per_parameter)
    context = _base_number(run_options, CONTEXT)
    tokens = options[STEPS] * options[BATCH] * context
    flops = None
    if new.vocab_size is not None:
        flops = step_flops(new, tokens=tokens, context_length=context, measured=measured).model
    options = {name: value for name, value in options.items() if name not in given}
    return Sizing(size, tokens_per_parameter, options, parameters, tokens, flops, STEPS not in given)


def _get(options: Any, name: str, default: Any = None) -> Any:
    value = value_at(options, name)
    return default if value is None else value


def _base_number(options: Section, name: str) -> int:
    """A number that rules are relative to."""
    value = _get(options, name)
    if type(value) is not int or value < 1:
        raise ValueError(f"size scales a base config, which needs {name}, got {shown(value)}: give it there")
    return value


def _devices(options: Section) -> int:
    numbers = [str(_get(options, f"trainer.{name}")) for name in ("devices", "num_nodes")]
    return math.prod(int(number) for number in numbers if re.fullmatch("[1-9][0-9]{0,8}", number))


# ---- the shape


def _nearest_shape(
    old: ModelConfig, run_options: Section, size: int, given: Mapping[str, Any], measure: MeasureParts | None
) -> tuple[ModelConfig, Measured, int]:
    """The model whose shape is nearest to the base's among those of the size."""

    def distance(fields: Mapping[str, int]) -> float:
        width = fields[f"{ARCHITECTURE}.hidden_size"]
        layers = fields[f"{ARCHITECTURE}.num_hidden_layers"]
        aspect = width / layers * old.num_hidden_layers / old.hidden_size
        return abs(math.log(aspect)) + abs(math.log(12 * width**2 * layers / size))

    counts = set[int]()
    problem = ""
    for fields in sorted(_shapes(old, size, given), key=distance):
        try:
            config, measured, parameters = _with_mlp(with_options(run_options, fields), size, given, measure)
        except ValueError as error:  # such as heads that do not divide the width
            problem = problem or str(error)
            continue
        if abs(parameters / size - 1) <= CLOSE:
            return config, measured, parameters
        counts.add(parameters)
    if not counts:
        raise ValueError(f"size {size_name(size)} cannot be made: {problem}")
    nearest = sorted(sorted(counts, key=lambda count: abs(math.log(count / size)))[:2])
    names = " and ".join(map(size_name, nearest))
    raise ValueError(f"size {size_name(size)} cannot be made from this base: the nearest are {names}")


def _shapes(old: ModelConfig, size: int, given: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Legal widths and depths with about 12 · layers · width² parameters, and their heads."""
    fixed = {name: given.get(f"{ARCHITECTURE}.{name}") for name in SHAPE}
    queries = old.num_attention_heads // (old.num_key_value_heads or 1)
    for width in [fixed["hidden_size"]] if fixed["hidden_size"] else _widths(size):
        head_dim = fixed["head_dim"] or next(head_width for limit, head_width in HEADS if width < limit)
        heads = fixed["num_attention_heads"] or max(1, width // head_dim)
        head_dim = fixed["head_dim"] or max(1, width // heads)
        keys = next(keys for keys in range(max(1, heads // queries), 0, -1) if heads % keys == 0)
        depth = size / (12 * width**2)
        depths = {fixed["num_hidden_layers"]} if fixed["num_hidden_layers"] else {math.floor(depth), math.ceil(depth)}
        for layers in depths:
            if layers:
                fields = zip(SHAPE, (width, layers, heads, fixed["num_key_value_heads"] or keys, head_dim), strict=True)
                yield {f"{ARCHITECTURE}.{name}": value for name, value in fields}


def _widths(size: int) -> Iterator[int]:
    """Up to those of one layer with three times the size, and the two smallest in any case."""
    width = 0
    for count in itertools.count():
        following = ((limit, (width // head + 1) * head) for limit, head in HEADS)
        width = next(wider for limit, wider in following if wider < limit)
        if count >= 2 and 12 * width**2 > 3 * size:
            return
        yield width


def _with_mlp(
    run_options: Section, size: int, given: Mapping[str, Any], measure: MeasureParts | None
) -> tuple[ModelConfig, Measured, int]:
    """A shape with the intermediate size that comes nearest to the size, and its parameters."""
    name = "intermediate_size"

    def counted(width: int) -> tuple[ModelConfig, Measured, int]:
        intermediate = given.get(f"{ARCHITECTURE}.{name}") or width
        config = ModelConfig(**{**_get(run_options, ARCHITECTURE), name: intermediate})
        parts = parts_to_measure(config)
        measured = UNMEASURED
        if parts and measure is None:
            part = " ".join(next(iter(parts.items())))
            raise ValueError(f"{part} has no formula: its parameters can only be measured")
        if parts and measure is not None:
            measured = measure(config)
        complete = config if config.vocab_size is not None else dataclasses.replace(config, vocab_size=1)
        by_part = parameters_by_part(complete, measured)
        return config, measured, sum(by_part.values()) - by_part["embeddings"] - by_part["head"]

    smallest = counted(MULTIPLE)
    slope = counted(2 * MULTIPLE)[2] - smallest[2]
    added = max(0, round((size - smallest[2]) / slope)) if slope > 0 else 0
    return counted(MULTIPLE * (1 + added)) if added else smallest


def _training(base: Section, run_options: Section, given: Mapping[str, Any], models: _Models, tokens: float) -> Section:
    """Batch, steps, learning rate, weight decay, and what counts steps."""
    if _get(base, "trainer.max_epochs", -1) != -1:
        raise ValueError(f"size sets {STEPS}: leave trainer.max_epochs out of the base config")
    options = _batch_and_steps(base, run_options, given, tokens)
    options |= _rates(base, run_options, given, models, batch=options[BATCH], steps=options[STEPS])
    return options | _step_counts(base, run_options, steps=options[STEPS])


def _batch_and_steps(base: Section, run_options: Section, given: Mapping[str, Any], tokens: float) -> Section:
    old_batch, old_steps = _base_number(base, BATCH), _base_number(base, STEPS)
    unit = _get(run_options, MICRO_BATCH, 1) * _devices(run_options)
    relative = tokens / (old_steps * old_batch * _base_number(base, CONTEXT))
    batch = given.get(BATCH) or unit * max(1, round(old_batch * relative**BATCH_EXPONENT / unit))
    steps = given.get(STEPS) or max(1, round(tokens / (batch * _base_number(run_options, CONTEXT))))
    options = {BATCH: batch, STEPS: steps}
    if _get(run_options, "data.class_path") is None:
        rows = max(1, old_batch // _devices(base))
        options[EVAL_BATCH] = _get(base, EVAL_BATCH) or _get(base, MICRO_BATCH) or rows
        if type(limit := _get(run_options, LIMIT)) is int and limit > 0:
            options[LIMIT] = max(1, round(limit * old_batch / batch))
    return options


def _rates(
    base: Section, run_options: Section, given: Mapping[str, Any], models: _Models, *, batch: int, steps: int
) -> Section:
    """Learning rate and weight decay."""
    old, new = models
    old_batch, old_steps = _base_number(base, BATCH), _base_number(base, STEPS)
    path, arguments = _class(run_options, "model.optimizer", "lightning_llm.optim.AdamW")
    known = OPTIMIZERS.get(path)
    if known is None or known.width_exponent is None:
        supported = ", ".join(path for path, known in OPTIMIZERS.items() if known.width_exponent is not None)
        raise ValueError(f"size does not know how the learning rate of {shown(path)} scales: use one of {supported}")
    given_lr = given.get(LR)
    old_lr = (_get(base, LR) if given_lr else arguments.get("lr")) or known.lr
    factor = (old.hidden_size / new.hidden_size) ** (known.width_exponent if new.mup is None else 0)
    factor *= math.sqrt(old.num_hidden_layers / new.num_hidden_layers) * (batch / old_batch) ** known.batch_exponent
    lr = given_lr or four_digits(old_lr * factor)
    decay = arguments.get("weight_decay", known.weight_decay)
    return {LR: lr} | ({DECAY: four_digits(decay * old_lr * old_steps / (lr * steps))} if decay else {})


def _step_counts(base: Section, run_options: Section, *, steps: int) -> Section:
    """The steps of the schedule, and between two validations."""
    path, arguments = _class(run_options, "model.schedule", "")
    schedule = SCHEDULES.get(path.rpartition(".")[2]) if path.startswith("lightning_llm.") else None
    if path and schedule is None and any(type(value) is int and value > 0 for value in arguments.values()):
        raise ValueError(f"size cannot scale the steps of model.schedule {shown(path)}: use {', '.join(SCHEDULES)}")
    names = schedule.step_options if schedule else ()
    counts = {f"model.schedule.init_args.{name}": arguments.get(name) for name in names}
    if type(interval := _get(base, INTERVAL)) is int:
        counts[INTERVAL] = interval
    old_steps = _base_number(base, STEPS)
    return {name: max(1, round(value * steps / old_steps)) for name, value in counts.items() if value}


def _class(options: Section, name: str, default: str) -> tuple[str, Section]:
    """The path of a class, as its package exports it, and its arguments."""
    path, arguments = class_of(options, name, default)
    return re.sub(r"^(lightning_llm\.optim|torch\.optim)\.[a-z]+\.", r"\1.", path), arguments
