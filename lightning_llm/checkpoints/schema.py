"""The content of a checkpoint, field by field, and :func:`check_content`, which compares every file with it.

Names that are not listed belong to the user, to a callback for example. They are ignored, unless Lightning would make
an attribute of them. The state of the user's own optimizer or module is checked as far as Lightning and torch need it.
"""

import math
import re
from collections.abc import Generator, Iterable, Iterator, Mapping
from types import NoneType
from typing import Any

from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from lightning_llm.checkpoints.loop_state import LOOPS, loop_problems
from lightning_llm.data.tokenizers import Tokenizer
from lightning_llm.io.schema import TEXT, Schema, check, list_of, maybe, one_of, open_record, record, refuse, whole
from lightning_llm.io.untrusted import field_name, shown, values_in
from lightning_llm.model.config import ModelConfig
from lightning_llm.model.parts import option_of

FORMAT = "lightning_llm"  # the key of a checkpoint's own part
EXECUTION = "execution"  # in that part: see training.environment
ACCUMULATION = "accumulation"  # in that part: micro-batches per optimizer step
FORMAT_VERSION = 1
BOUNDARIES = "boundaries"  # in that part: whether the model was trained with what its tokenizer puts before a text
VERSION = "pytorch-lightning_version"
ARCHITECTURE = "hyper_parameters.architecture"

# Required fields, by what the reader will do.
WEIGHTS = ("state_dict", ARCHITECTURE, FORMAT)
LIGHTNING = ("state_dict", VERSION, "global_step")  # before it calls any of our code
RESUME = (*WEIGHTS, *LIGHTNING, "loops", "callbacks", "optimizer_states", "lr_schedulers")
RESUME_PLAIN = tuple(name for name in RESUME if name not in (ARCHITECTURE, FORMAT))  # of a plain LightningModule
PLAIN_LOOP = ("model", "optimizer", "iteration")


# ---- schemas of what JSON does not have


def number(low: float = -math.inf, high: float = math.inf) -> Schema:
    """A number within bounds; infinity only if the bounds include it."""

    def fits(value: Any) -> bool:
        return (type(value) is float or (type(value) is int and abs(value) < 2**63)) and low <= value <= high

    return check(f"a number from {low:.6g} to {high:.6g}", fits)


def any_of(*schemas: Schema) -> Schema:
    """Any of several schemas; a message is about the first one."""

    def problems_of(value: Any, name: str) -> Iterable[str]:
        problems = [list(schema(value, name)) for schema in schemas]
        return problems[0] if all(problems) else ()

    return problems_of


def mapping(names: Schema, values: Schema) -> Schema:
    """A dict of any length."""

    def problems_of(value: Any, name: str) -> Iterable[str]:
        if not isinstance(value, dict):
            yield f"{name} is {shown(value)}, expected a dict"
            return
        for field, item in value.items():
            yield from names(field, f"a name in {name}")
            yield from values(item, f"{name}.{field_name(field)}")

    return problems_of


def is_plain_value(value: object) -> bool:
    """Whether a value consists of numbers, text and null, in lists, tuples and dicts."""
    is_kind = isinstance(value, NoneType | int | float | str | list | tuple | dict)
    return is_kind and all(map(is_plain_value, values_in(value)))


COUNT = whole()
AT_LEAST_1 = whole(1)
STEP_OR_NONE = whole(-1)
INTEGER = whole(-(2**63), 2**63 - 1)
RATE = number(0, 1e6)
BELOW_ONE = number(0, math.nextafter(1, 0))
BOOL = one_of(True, False)
NULL = one_of(None)
HASH = check("16 hex digits", lambda value: isinstance(value, str) and bool(re.fullmatch("[0-9a-f]{16}", value)))
STEP_NAME = check("digits", lambda value: isinstance(value, str) and bool(re.fullmatch("[0-9]{1,15}", value)))
TENSOR = check("a tensor", lambda value: isinstance(value, Tensor))
ROWS = check("a tensor", lambda value: isinstance(value, Tensor) or hasattr(value, "pieces"))  # see checkpoints.sharded
ANYTHING = check("anything", lambda value: True)
PLAIN_DICT = mapping(TEXT, ANYTHING)
PLAIN = check("a plain value", is_plain_value)


# ---- the schema

BEST_FIELDS = {"best_loss": number(), "best_step": STEP_OR_NONE, "validated_step": STEP_OR_NONE}
CALLBACKS = {
    "InputHashes": open_record(
        {"initial_values": mapping(TEXT, TEXT), "batches": HASH},
        {
            "batches_at": mapping(STEP_NAME, HASH),
            "initial_rules": mapping(TEXT, TEXT),
            "initial_scales": mapping(TEXT, list_of(number())),
        },
    ),
    "ResumeDiff": open_record({"options": mapping(TEXT, PLAIN)}, {"changes": list_of(TEXT)}),
    "RunCheckpoints": open_record(BEST_FIELDS, {"start_number": COUNT, "validation_batches": maybe(HASH)}),
    "TrainingLog": open_record({"loss": TENSOR}, {"count": TENSOR}),
}
MODEL_CHECKPOINT = open_record(  # Lightning's, which removes files of these names
    {"best_model_path": TEXT, "best_model_score": any_of(TENSOR, number(), NULL)},
    {"dirpath": maybe(TEXT), "best_k_models": PLAIN_DICT, "kth_best_model_path": TEXT, "last_model_path": TEXT},
)
OPTIMIZER_OPTIONS = {  # of optimizers
    **dict.fromkeys(("lr", "initial_lr", "lr_factor", "weight_decay", "weight_decay_factor", "momentum"), RATE),
    **dict.fromkeys(("amsgrad", "fused", "foreach", "maximize", "nesterov"), maybe(BOOL)),
    "betas": list_of(BELOW_ONE),
    "eps": any_of(RATE, list_of(ANYTHING)),
    "state_dtype": maybe(one_of("bfloat16")),
    "param_rounding": one_of("nearest", "stochastic"),
    "newton_schulz_steps": whole(1, 100),
    "name": TEXT,
}
HYPER_PARAMETERS = {
    "architecture": record({}, dict.fromkeys(ModelConfig.__dataclass_fields__, PLAIN)),  # which checks the values
    "loss_chunks": maybe(COUNT),
    "optimizer": maybe(open_record({"class_path": TEXT}, {"init_args": open_record({}, OPTIMIZER_OPTIONS)})),
    "schedule": maybe(open_record({"class_path": TEXT}, {"init_args": PLAIN_DICT})),
    "groups": list_of(
        record({"pattern": TEXT}, dict.fromkeys(("lr_factor", "weight_decay_factor"), maybe(RATE))), 1000
    ),
    **dict.fromkeys(("memory_budget", "memory_reserve", "init_from", "compile_mode", "compile_scope"), maybe(TEXT)),
    "_instantiator": NULL,  # Lightning would import the class of this name
}
GROUP = open_record({"params": list_of(COUNT)}, OPTIMIZER_OPTIONS)
OPTIMIZER = open_record({"state": mapping(INTEGER, PLAIN_DICT), "param_groups": list_of(GROUP)})
SCHEDULER = {
    "last_epoch": STEP_OR_NONE,
    "_step_count": COUNT,
    **dict.fromkeys(("base_lrs", "_last_lr"), list_of(RATE)),
    "lr_lambdas": list_of(maybe(PLAIN_DICT)),
    **dict.fromkeys(("_is_initial", "_get_lr_called_within_step"), BOOL),
}
DATA = dict.fromkeys(("accumulation", "global_batch_size", "context_length"), AT_LEAST_1)
PRECISION_NAMES = "16-mixed 16-true bf16-mixed bf16-true 32-true 64-true transformer-engine transformer-engine-float16"
# a run with precision auto takes it over
OF_EXECUTION = {
    "precision": one_of(*PRECISION_NAMES.split()),
    "threads": AT_LEAST_1,
    "device": TEXT,
    "tf32": BOOL,
    "capture": BOOL,
    "loss_chunk_mib": AT_LEAST_1,
}
OF_EXECUTION |= {"torch": TEXT, "numpy": TEXT, "package": HASH}
OWN = open_record(
    {"format_version": AT_LEAST_1, "tokenizer": maybe(TEXT)},
    {EXECUTION: open_record({}, OF_EXECUTION), BOUNDARIES: BOOL, ACCUMULATION: AT_LEAST_1},
)
CHECKPOINT = {
    **dict.fromkeys(("epoch", "global_step", "iteration"), COUNT),
    VERSION: TEXT,
    "loops": LOOPS,
    "callbacks": open_record({}, CALLBACKS),
    "lr_schedulers": list_of(open_record({}, SCHEDULER)),
    **dict.fromkeys(("hparams_name", "hparams_type"), maybe(TEXT)),
    # of Lightning before 1.0, which takes them for arguments of the model
    **dict.fromkeys(("hparams", "module_arguments"), NULL),
    "hyper_parameters": open_record({}, HYPER_PARAMETERS),
    "TokenDataModule": open_record({"store": TEXT}, {"optimizer_steps": COUNT, "seed": INTEGER, **DATA}),
    FORMAT: OWN,
    "model": PLAIN_DICT,  # of a plain loop
    "optimizer": OPTIMIZER,
}
TENSORS = {"state_dict": mapping(TEXT, ROWS), "optimizer_states": list_of(OPTIMIZER)}

# Lightning 2 without its first releases, whose checkpoints it migrates
_LIGHTNING = re.compile(r"2\.[1-9]\d{0,3}(\.\d{1,4})*(\.?(a|b|rc|dev|post)\d{1,8})?", re.ASCII)
# What a scheduler would lose if its state had the name
_RESERVED = {"optimizer", *(name for name in dir(LRScheduler) if callable(getattr(LRScheduler, name)))}


def check_content(
    content: Mapping[str, Any], path: object, needs: tuple[str, ...] = (), *, of_tensors: bool = True
) -> None:
    """Compare a checkpoint with the schema and with itself.

    Args:
        content: Of a checkpoint.
        path: Its path, for the message.
        needs: Required fields: ``WEIGHTS``, ``LIGHTNING``, ``RESUME``, ``PLAIN_LOOP``. What the counters of Lightning's
            loops say matters for ``RESUME`` alone.
        of_tensors: False for an outline: fields that hold tensors, and slow checks, are left out.

    Raises:
        ValueError: One line with the problems.
    """
    unread = {*(() if of_tensors else TENSORS), *(() if VERSION in needs else ("loops",))}  # only Lightning reads loops
    checked = {name: value for name, value in content.items() if name not in unread}
    refuse(open_record({}, {**CHECKPOINT, **TENSORS})(checked, ""), f"checkpoint {path}")
    present = {*content, *(f"hyper_parameters.{name}" for name in content.get("hyper_parameters", ()))}
    if missing := [name for name in needs if name not in present]:
        writer = "save_checkpoint" if needs == PLAIN_LOOP else "lightning-llm fit"
        raise ValueError(f"checkpoint {path} was not written by {writer}: it lacks {', '.join(missing)}")
    of_loops = loop_problems(content["loops"], content["global_step"]) if "loops" in needs else ()
    refuse([*of_loops, *_contradictions(content, of_tensors)], f"checkpoint {path}")


def _contradictions(content: Mapping[str, Any], of_tensors: bool) -> Iterator[str]:
    version = content.get(VERSION, "2.6")
    step = content.get("global_step")
    if not _LIGHTNING.fullmatch(version):
        yield f"{VERSION} is {shown(version)}, expected one of Lightning 2"
    ours = content.get(FORMAT, {})
    if ours.get("format_version", 1) > FORMAT_VERSION:
        yield f"it has format {ours['format_version']}, this version reads up to {FORMAT_VERSION}: upgrade"
    config = yield from _architecture_problems(content, of_tensors)
    if of_tensors:
        yield from _callback_problems(content.get("callbacks", {}), step or 0)
        yield from _tokenizer_problems(ours.get("tokenizer"), config)
        yield from _optimizer_problems(content)


def _architecture_problems(content: Mapping[str, Any], of_tensors: bool) -> Generator[str, None, ModelConfig | None]:
    """Yields what is wrong with the architecture and with the number of tensors; returns the architecture."""
    architecture = content.get("hyper_parameters", {}).get("architecture")
    if architecture is None:
        return None
    config = None
    try:
        config = ModelConfig(**architecture)
        if config.vocab_size is None:
            yield f"{ARCHITECTURE}.vocab_size is null, expected a whole number"
        # each expert has at least one tensor: the model is not built for a file that has none
        least = sum(option_of("mlp", of_layer.mlp, "num_experts") or 1 for of_layer in config.layer_configs)
        if of_tensors and "block" not in config.custom_parts and len(content.get("state_dict", ())) < least:
            yield f"state_dict has {len(content.get('state_dict', ()))} tensors, the architecture at least {least}"
    except (ValueError, TypeError) as error:  # a value that cannot be compared
        yield f"{ARCHITECTURE}: {error}"
    return config


def _callback_problems(callbacks: Mapping[str, Any], step: int) -> Iterator[str]:
    for name in ("best_step", "validated_step"):
        if (noted := callbacks.get("RunCheckpoints", {}).get(name, -1)) > step:
            yield f"callbacks.RunCheckpoints.{name} is {noted}, global_step is {step}"
    for name, value in callbacks.get("TrainingLog", {}).items():
        if isinstance(value, Tensor) and (value.numel() != 1 or not value.isfinite().all()):
            yield f"callbacks.TrainingLog.{name} is {shown(value)}, expected one number"
    for name, state in callbacks.items():
        if name.startswith("ModelCheckpoint"):
            where = f"callbacks.{field_name(name)}"
            problems = list(MODEL_CHECKPOINT(state, where))
            yield from problems
            values = [] if problems else [*state.values(), *state.get("best_k_models", ())]
            if any("://" in each or ".." in re.split(r"[/\\]", each) for each in values if isinstance(each, str)):
                yield f"{where} names a file elsewhere"


def own_part(tokenizer: str | None) -> dict[str, Any]:
    """The own part of a checkpoint."""
    return {"format_version": FORMAT_VERSION, "tokenizer": tokenizer, BOUNDARIES: True}


def trained_tokenizer(own: Mapping[str, Any]) -> str | None:
    """The ``tokenizer.json`` in a checkpoint's own part, with what was before each text in training."""
    content: str | None = own["tokenizer"]
    if content is None or own.get(BOUNDARIES):
        return content
    return Tokenizer.from_str(content).without_begin().to_str()  # earlier versions trained without


def _tokenizer_problems(text: str | None, config: ModelConfig | None) -> Iterator[str]:
    if text is None or config is None:
        return
    try:
        ids = Tokenizer.from_str(text).vocab_size
    except Exception as error:  # whatever the library makes of it
        yield f"{FORMAT}.tokenizer is {shown(str(error))}, expected the text of a tokenizer.json"
        return
    if config.vocab_size is not None and ids > config.vocab_size:
        yield f"{FORMAT}.tokenizer has {ids} ids, the architecture's vocab_size is {config.vocab_size}"


def _optimizer_problems(content: Mapping[str, Any]) -> Iterator[str]:
    states, schedulers = content.get("optimizer_states", []), content.get("lr_schedulers", [])
    last = content.get("global_step", math.inf) if len(states) == 1 else math.inf
    is_own = "schedule" in content.get("hyper_parameters", {}) and "optimizer_states" in content  # LanguageModel's
    if is_own:
        for name, items in (("optimizer_states", states), ("lr_schedulers", schedulers)):
            if len(items) != 1:
                yield f"{name} is a list of {len(items)}, expected one"
    for index, state in enumerate([*states, *([content["optimizer"]] if "optimizer" in content else [])]):
        where = f"optimizer_states[{index}]"
        parameters = [number for group in state["param_groups"] for number in group["params"]]
        if len(set(parameters)) != len(parameters) or not parameters:
            yield f"{where}.param_groups have parameters twice, or none"
        if state["state"].keys() - set(parameters):
            yield f"{where}.state is of parameters that are in no group"
        for parameter, saved in state["state"].items():
            if isinstance(saved.get("step"), int | float) and saved["step"] > last:
                yield f"{where}.state.{parameter}.step is {shown(saved['step'])}, global_step is {last}"
    groups = {len(state["param_groups"]) for state in states}
    for index, schedule in enumerate(schedulers):
        where = f"lr_schedulers[{index}]"
        if reserved := sorted(schedule.keys() & _RESERVED):
            yield f"{where}.{reserved[0]} is not part of a scheduler's state"
        if is_own and "lr_lambdas" in schedule and schedule.get("last_epoch") != content.get("global_step", 0):
            yield f"{where}.last_epoch is {shown(schedule.get('last_epoch'))}, expected the global_step"
        for name in ("base_lrs", "_last_lr", "lr_lambdas"):
            if len(groups) == 1 and name in schedule and len(schedule[name]) not in groups:
                yield f"{where}.{name} is a list of {len(schedule[name])}, the optimizer has {max(groups)} groups"
