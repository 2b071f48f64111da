"""What the content of every checkpoint goes through: it is as the schema says, and agrees with itself and the model.

Only what a later stage would stumble over is looked at. Of the user's own optimizer or module, it is what Lightning and
torch need to load it.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lightning_llm.checkpoints.loop_state import LOOPS, loop_faults
from lightning_llm.checkpoints.recipes import known_optimizer
from lightning_llm.checkpoints.schema import (
    CHECKPOINT,
    FORMAT,
    MODEL_CHECKPOINT,
    OF_TENSORS,
    SHOWN,
    VERSION,
    faults,
    refuse,
    shown,
)
from lightning_llm.data.tokenizers import Tokenizer
from lightning_llm.model.config import BUILT_IN_MLPS, ModelConfig
from lightning_llm.model.transformer import Transformer
from lightning_llm.optim.groups import param_groups, saved_state_faults

FORMAT_VERSION = 1
ARCHITECTURE = "hyper_parameters.architecture"
# What must be there, by what a reader is going to do.
WEIGHTS = ("state_dict", ARCHITECTURE, FORMAT)
LIGHTNING = ("state_dict", VERSION, "global_step")  # before it calls any of our code
RESUME = (*WEIGHTS, *LIGHTNING, "loops", "callbacks", "optimizer_states", "lr_schedulers")
PLAIN_LOOP = ("model", "optimizer", "iteration")

# Lightning 2 without its first releases, whose checkpoints it changes on the way
_LIGHTNING = re.compile(r"2\.[1-9]\d{0,3}(\.\d{1,4})*(\.?(a|b|rc|dev|post)\d{1,8})?", re.ASCII)
# What a scheduler would lose if its state had the name
_RESERVED = {"optimizer", *(name for name in dir(LRScheduler) if callable(getattr(LRScheduler, name)))}


def validate(content: Mapping[str, Any], path: object, needs: tuple[str, ...] = (), *, of_tensors: bool = True) -> None:
    """Compare what was read with the schema.

    Args:
        content: Of a checkpoint.
        path: Of it, for the message.
        needs: What must be there: ``WEIGHTS``, ``LIGHTNING``, ``RESUME``, ``PLAIN_LOOP``.
        of_tensors: False for an outline: what holds tensors, and what takes time, is left out.

    Raises:
        ValueError: One line with what is wrong.
    """
    looked_at = content if of_tensors else {name: content[name] for name in content.keys() - set(OF_TENSORS)}
    refuse(faults(looked_at, {**CHECKPOINT, "loops?": LOOPS}, ""), f"checkpoint {path}: ")
    present = {*content, *(f"hyper_parameters.{name}" for name in content.get("hyper_parameters", ()))}
    if missing := [name for name in needs if name not in present]:
        writer = "save_checkpoint" if needs == PLAIN_LOOP else "lightning-llm fit"
        raise ValueError(f"checkpoint {path} was not written by {writer}: it lacks {', '.join(missing)}")
    refuse(_sense(content, of_tensors), f"checkpoint {path}: ")


def _sense(content: Mapping[str, Any], of_tensors: bool) -> Iterator[str]:
    version = content.get(VERSION, "2.6")
    if not _LIGHTNING.fullmatch(version):
        yield f"{VERSION} is {shown(version)}, expected one of Lightning 2"
    own = content.get(FORMAT, {})
    if own.get("format_version", 1) > FORMAT_VERSION:
        yield f"it has format {own['format_version']}, this version reads up to {FORMAT_VERSION}: upgrade"
    config = None
    try:
        given = content.get("hyper_parameters", {}).get("architecture")
        config = None if given is None else ModelConfig(**given)
        if config is not None and config.vocab_size is None:
            yield f"{ARCHITECTURE}.vocab_size is null, expected a whole number"
    except (ValueError, TypeError) as error:  # a value that cannot be compared
        yield f"{ARCHITECTURE}: {error}"
    if "loops" in content:
        yield from loop_faults(content["loops"], content.get("global_step"))
    if of_tensors:
        yield from _callback_faults(content.get("callbacks", {}), content.get("global_step", 0))
        yield from _tokenizer_faults(own.get("tokenizer"), config)
        yield from _optimizer_faults(content)


def _callback_faults(callbacks: Mapping[str, Any], step: int) -> Iterator[str]:
    for name in ("best_step", "validated_step"):
        if (noted := callbacks.get("RunCheckpoints", {}).get(name, -1)) > step:
            yield f"callbacks.RunCheckpoints.{name} is {noted}, global_step is {step}"
    entry = callbacks.get("TrainingLog")
    if entry and (entry["loss"].numel() != 1 or not entry["loss"].isfinite().all()):
        yield f"callbacks.TrainingLog.loss is {shown(entry['loss'])}, expected one number"
    for name, state in callbacks.items():
        if name.startswith("ModelCheckpoint"):
            where = f"callbacks.{name[:SHOWN]}"
            found = list(faults(state, MODEL_CHECKPOINT, where))
            yield from found
            if not found:
                paths = [each for each in (*state.values(), *state.get("best_k_models", ())) if isinstance(each, str)]
                if any("://" in path or ".." in re.split(r"[/\\]", path) for path in paths):
                    yield f"{where} names a file elsewhere"


def _tokenizer_faults(text: str | None, config: ModelConfig | None) -> Iterator[str]:
    if text is None or config is None:
        return
    try:
        ids = Tokenizer(text).vocab_size
    except Exception as error:  # whatever the library makes of it
        yield f"{FORMAT}.tokenizer is {shown(str(error))}, expected the text of a tokenizer.json"
        return
    if config.vocab_size is not None and ids > config.vocab_size:
        yield f"{FORMAT}.tokenizer has {ids} ids, the architecture's vocab_size is {config.vocab_size}"


def _optimizer_faults(content: Mapping[str, Any]) -> Iterator[str]:
    states, schedulers = content.get("optimizer_states", []), content.get("lr_schedulers", [])
    if "schedule" in content.get("hyper_parameters", {}) and "optimizer_states" in content:  # LanguageModel's own
        for name, given in (("optimizer_states", states), ("lr_schedulers", schedulers)):
            if len(given) != 1:
                yield f"{name} is a list of {len(given)}, expected one"
    for number, state in enumerate([*states, *([content["optimizer"]] if "optimizer" in content else [])]):
        where = f"optimizer_states[{number}]"
        known = [each for group in state["param_groups"] for each in group["params"]]
        if len(set(known)) != len(known) or not known:
            yield f"{where}.param_groups have parameters twice, or none"
        if state["state"].keys() - set(known):
            yield f"{where}.state is of parameters that are in no group"
        for number_, kept in state["state"].items() if "global_step" in content and len(states) == 1 else ():
            if isinstance(kept.get("step"), int | float) and kept["step"] > content["global_step"]:
                yield f"{where}.state.{number_}.step is {shown(kept['step'])}, global_step is {content['global_step']}"
    for number, schedule in enumerate(schedulers):
        where = f"lr_schedulers[{number}]"
        if reserved := sorted(schedule.keys() & _RESERVED):
            yield f"{where}.{reserved[0]} is no state of a scheduler"
        if "lr_lambdas" in schedule and schedule.get("last_epoch") != content.get("global_step", 0):  # our own
            yield f"{where}.last_epoch is {shown(schedule.get('last_epoch'))}, expected the global_step"
        groups = {len(state["param_groups"]) for state in states}
        for name in ("base_lrs", "_last_lr", "lr_lambdas"):
            if len(groups) == 1 and name in schedule and len(schedule[name]) not in groups:
                yield f"{where}.{name} is a list of {len(schedule[name])}, the optimizer has {max(groups)} groups"


def check_described(content: Mapping[str, Any], path: object) -> None:
    """Compare weights and optimizer state with the model that the checkpoint itself describes, made without storage.

    A model with an MLP of the user's own is left out. Raises as :func:`check_fits`.
    """
    config = ModelConfig(**content["hyper_parameters"]["architecture"])
    if config.mlp not in BUILT_IN_MLPS or config.vocab_size is None:
        return
    model = nn.Module()
    with torch.device("meta"):
        model.transformer = Transformer(config)
    check_fits(content, model.state_dict(), path, param_groups(model))
    for state in content.get("optimizer_states", ())[:1]:
        refuse(_described_optimizer_faults(content, state, model), f"checkpoint {path}: ")


def _described_optimizer_faults(content: Mapping[str, Any], state: dict[str, Any], model: nn.Module) -> Iterator[str]:
    """Load the state into an optimizer like the one that saved it, if that is one of torch's or ours."""
    for group in state["param_groups"]:  # each parameter of a model of ours has a gradient at every step
        if len({frozenset(state["state"].get(number, ())) for number in group["params"]}) > 1:
            yield "optimizer_states[0].state is not the same for all parameters of a group"
    recipe = content["hyper_parameters"].get("optimizer")
    make = None if recipe is None else known_optimizer(recipe)
    if make is None:
        return
    optimizer: Optimizer = make(param_groups(model))
    asked = [dict(group) for group in optimizer.param_groups]
    kept = {number: _without_storage(own) for number, own in state["state"].items()}
    try:
        optimizer.load_state_dict({**state, "state": kept})
    except (ValueError, TypeError, AttributeError, RuntimeError) as error:
        yield f"optimizer_states[0]: {error}"
        return
    for number, (ours, theirs) in enumerate(zip(asked, optimizer.param_groups, strict=True)):
        for name, value in ours.items():
            if name not in theirs or (isinstance(value, tuple) and len(value) != len(theirs[name])):
                yield f"optimizer_states[0].param_groups[{number}].{name} is {shown(theirs.get(name))}"


def _without_storage(kept: dict[str, Any]) -> dict[str, Any]:
    return {
        name: torch.empty(tuple(value.shape), dtype=value.dtype, device="meta") if hasattr(value, "pieces") else value
        for name, value in kept.items()
    }


def check_fits(
    content: Mapping[str, Any], ours: Mapping[str, Any], path: object, groups: Iterable[dict[str, Any]] = ()
) -> None:
    """Compare the weights and the optimizer state of a checkpoint with a model.

    Args:
        content: Of the checkpoint, validated.
        ours: The model's tensors by the same names.
        path: Of the checkpoint, for the message.
        groups: Of its optimizer's parameters, if their order is known.

    Raises:
        ValueError: One line that names what is missing, unexpected, or of another shape or kind.
    """
    saved = content["state_dict"]
    listed = [f"{name} is missing" for name in ours if name not in saved]
    listed += [f"{shown(name)} is unexpected" for name in saved if name not in ours]
    for name in ours.keys() & saved.keys():
        there, here = saved[name], ours[name]
        if tuple(there.shape) != tuple(here.shape):
            listed.append(f"{name} is {tuple(there.shape)} there, {tuple(here.shape)} here")
        elif there.dtype.is_floating_point != here.dtype.is_floating_point:
            listed.append(f"{name} is {there.dtype} there, {here.dtype} here")
    for state in content.get("optimizer_states", ())[:1]:
        listed += saved_state_faults(groups, state)
    refuse(listed, f"checkpoint {path} is of another model: ")
