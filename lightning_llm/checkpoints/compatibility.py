"""Whether a checkpoint fits a model: its architecture, its weights and its optimizer state."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from lightning_llm.checkpoints.loop_state import rescale_batch_progress
from lightning_llm.checkpoints.recipes import known_optimizer, warn_without_recipe
from lightning_llm.checkpoints.schema import ARCHITECTURE, RESUME, validate
from lightning_llm.io.untrusted import refuse, shown
from lightning_llm.model.config import BUILT_IN_MLPS, ModelConfig
from lightning_llm.model.transformer import Transformer
from lightning_llm.optim.groups import param_groups, saved_state_faults

# What may differ between a checkpoint and the model that loads it: the parameters and their meaning stay the same.
EXECUTION_FIELDS = frozenset({"checkpoint_level", "recompute", "dropout"})
SAME_PARAMETERS = ({"swiglu", "memory_optimized_swiglu"},)


def free_fields(architecture: ModelConfig) -> frozenset[str]:
    """What may differ between a model and the one whose weights it starts from."""
    # RoPE has no parameters and extends to any length
    length = {"max_position_embeddings"} if architecture.position == "rope" else set()
    return EXECUTION_FIELDS | {"initializer_range"} | length


def architecture_differences(
    saved: ModelConfig, wanted: ModelConfig, *, ignored: frozenset[str] = EXECUTION_FIELDS
) -> list[str]:
    """The fields that make two models' parameters differ in number, shape or meaning, each with both values."""
    differences = []
    for name, ours in wanted.to_dict().items():
        theirs = getattr(saved, name)
        if name in ignored or ours == theirs or (name == "vocab_size" and ours is None):
            continue
        if name == "mlp" and any({ours, theirs} <= same for same in SAME_PARAMETERS):
            continue
        differences.append(f"{name} is {theirs} there and {ours} here")
    return differences


def prepare_loading(checkpoint: dict[str, Any], model: Any) -> None:
    """Refuse a checkpoint that does not fit a ``LanguageModel``; adapt its counters to the run that resumes.

    Args:
        checkpoint: As Lightning is about to load it; changed in place.
        model: The LanguageModel, with its weights made.

    Raises:
        ValueError: It lacks something, or is of another architecture (naming every field that differs), or its weights
            or the optimizer state are of other shapes.
    """
    trainer = model._trainer
    is_fitting = trainer is not None and trainer.state.fn == "fit"
    if trainer is None:  # load_from_checkpoint: hyper_parameters hold the caller's arguments by now
        warn_without_recipe(checkpoint)
    else:
        needs = RESUME if is_fitting else (ARCHITECTURE,)
        validate(checkpoint, trainer.ckpt_path, needs, of_tensors=False)
    saved = ModelConfig(**checkpoint["hyper_parameters"]["architecture"])
    if differences := architecture_differences(saved, model.architecture):
        raise ValueError(f"the checkpoint is of another architecture: {'; '.join(differences)}")
    if trainer is not None and model.strict_loading:  # else torch compares them
        is_ours = type(model).configure_optimizers.__module__.startswith("lightning_llm.")  # else its order is unknown
        groups = param_groups(model) if is_fitting and is_ours else ()
        check_fits(checkpoint, model.state_dict(), trainer.ckpt_path, groups)
    if is_fitting:
        rescale_batch_progress(checkpoint, trainer.accumulate_grad_batches)


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
        ValueError: One line that names what is missing, unexpected, or has another shape or dtype.
    """
    saved = content["state_dict"]
    problems = [f"{name} is missing" for name in ours if name not in saved]
    problems += [f"{shown(name)} is unexpected" for name in saved if name not in ours]
    for name in ours.keys() & saved.keys():
        there, here = saved[name], ours[name]
        if tuple(there.shape) != tuple(here.shape):
            problems.append(f"{name} is {tuple(there.shape)} there, {tuple(here.shape)} here")
        elif there.dtype.is_floating_point != here.dtype.is_floating_point:
            problems.append(f"{name} is {there.dtype} there, {here.dtype} here")
    for state in content.get("optimizer_states", ())[:1]:
        problems += saved_state_faults(groups, state)
    refuse(problems, f"checkpoint {path} is of another model")


def check_described(content: Mapping[str, Any], path: object) -> None:
    """Compare weights and optimizer state with the model that the checkpoint describes, built on the meta device.

    A model with a user's own MLP is not compared. Raises as :func:`check_fits`.
    """
    config = ModelConfig(**content["hyper_parameters"]["architecture"])
    if config.mlp not in BUILT_IN_MLPS or config.vocab_size is None:
        return
    model = nn.Module()
    with torch.device("meta"):
        model.transformer = Transformer(config)
    check_fits(content, model.state_dict(), path, param_groups(model))
    for state in content.get("optimizer_states", ())[:1]:
        recipe = content["hyper_parameters"].get("optimizer")
        refuse(_optimizer_problems(state, recipe, param_groups(model)), f"checkpoint {path}")


def _optimizer_problems(
    state: dict[str, Any], recipe: dict[str, Any] | None, groups: list[dict[str, Any]]
) -> Iterator[str]:
    """Load the state into an optimizer like the one that saved it, if that is one of torch's or ours."""
    for group in state["param_groups"]:  # each parameter of a model of ours has a gradient at every step
        if len({frozenset(state["state"].get(number, ())) for number in group["params"]}) > 1:
            yield "optimizer_states[0].state is not the same for all parameters of a group"
    make = recipe and known_optimizer(recipe)
    if not make:
        return
    optimizer = make(groups)
    asked = [dict(group) for group in optimizer.param_groups]
    saved = {number: {name: _on_meta(value) for name, value in own.items()} for number, own in state["state"].items()}
    try:
        optimizer.load_state_dict({**state, "state": saved})
    except (ValueError, TypeError, AttributeError, RuntimeError) as error:
        yield f"optimizer_states[0]: {error}"
        return
    for number, (ours, theirs) in enumerate(zip(asked, optimizer.param_groups, strict=True)):
        for name, value in ours.items():
            if name not in theirs or (isinstance(value, tuple) and len(value) != len(theirs[name])):
                yield f"optimizer_states[0].param_groups[{number}].{name} is {shown(theirs.get(name))}"


def _on_meta(value: Any) -> Any:
    is_sharded = hasattr(value, "pieces")
    return torch.empty(tuple(value.shape), dtype=value.dtype, device="meta") if is_sharded else value
