"""Whether a checkpoint fits a model: its architecture, its weights, its optimizer and its schedule."""

import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from lightning_llm.checkpoints.recipes import Recipe, known_optimizer
from lightning_llm.checkpoints.schema import ARCHITECTURE, RESUME, check_content
from lightning_llm.io.schema import refuse
from lightning_llm.io.untrusted import prefixed, shown
from lightning_llm.model.config import SWIGLUS, ModelConfig
from lightning_llm.model.transformer import Transformer
from lightning_llm.model.weights import lr_factors
from lightning_llm.optim.base import saved_state_problems
from lightning_llm.optim.groups import GroupRule, param_groups

# What may differ between a checkpoint and the model that loads it: the parameters and their meaning stay the same.
EXCHANGEABLE_FIELDS = frozenset({"checkpoint_level", "recompute", "dropout", "loss"})


def free_fields(architecture: ModelConfig) -> frozenset[str]:
    """Fields that may differ between a model and the one whose weights it starts from."""
    # RoPE has no parameters and extends to any length
    length = {"max_position_embeddings"} if architecture.position == "rope" else set()
    return EXCHANGEABLE_FIELDS | {"initializer_range", "mup", "vocab_multiple_of"} | length


def architecture_differences(
    saved: ModelConfig, wanted: ModelConfig, *, ignored: frozenset[str] = EXCHANGEABLE_FIELDS
) -> list[str]:
    """The fields that make two models' parameters differ in number, shape or meaning, each with both values."""
    differences = []
    for name, ours in wanted.to_dict().items():
        theirs = getattr(saved, name)
        is_same = ours == theirs or (name == "vocab_size" and ours is None)
        if not (is_same or name in ignored or (name == "mlp" and ours in SWIGLUS and theirs in SWIGLUS)):
            differences.append(f"{name} is {theirs} there and {ours} here")
    return differences


def check_loading(checkpoint: Mapping[str, Any], model: Any) -> None:
    """Reject a checkpoint that does not fit a ``LanguageModel``.

    Args:
        checkpoint: As Lightning is about to load it.
        model: The LanguageModel, with its weights made.

    Raises:
        ValueError: It lacks something, or is of another architecture (naming every field that differs), or its weights
            or the optimizer state are of other shapes.
    """
    trainer = model._trainer
    is_fitting = trainer is not None and trainer.state.fn == "fit"
    if trainer is None:  # load_from_checkpoint: hyper_parameters hold the caller's arguments by now
        if checkpoint.get("optimizer_states") and "optimizer" not in checkpoint.get("hyper_parameters", {}):
            warnings.warn("the checkpoint is of an older version: its optimizer is not restored", stacklevel=2)
    else:
        needs = RESUME if is_fitting else (ARCHITECTURE,)
        check_content(checkpoint, trainer.ckpt_path, needs, of_tensors=False)
    saved = ModelConfig(**checkpoint["hyper_parameters"]["architecture"])
    if differences := architecture_differences(saved, model.architecture):
        problem = f"the checkpoint has a different architecture: {'; '.join(differences)}"
        if trainer is not None and not is_fitting and saved.vocab_size != model.architecture.vocab_size:
            problem += "; on texts of another vocabulary, measure with lightning-llm evaluate RUN --data TEXT"
        raise ValueError(problem)
    if trainer is not None and model.strict_loading:  # else torch compares them
        is_ours = type(model).configure_optimizers.__module__.startswith("lightning_llm.")  # else its order is unknown
        groups = model.groups_of(model) if is_fitting and is_ours else ()
        check_fits(checkpoint, model.state_dict(), trainer.ckpt_path, groups)


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
        problems += saved_state_problems(groups, state)
    refuse(problems, f"checkpoint {path} is of another model")


def check_described(content: Mapping[str, Any], path: object) -> None:
    """Compare weights and optimizer state with the model that the checkpoint describes, built on the meta device.

    A model with parts of the user's own is not compared. Raises as :func:`check_fits`.
    """
    config = ModelConfig(**content["hyper_parameters"]["architecture"])
    if config.custom_parts or config.vocab_size is None:
        return
    model = nn.Module()
    with torch.device("meta"):
        model.transformer = Transformer(config)
    with prefixed(f"checkpoint {path}: hyper_parameters.groups", ValueError):
        rules = [GroupRule(**rule) for rule in content["hyper_parameters"].get("groups", ())]
        groups = param_groups(model, rules=rules, lr_factors=lr_factors(config))
    check_fits(content, model.state_dict(), path, groups)
    for state in content.get("optimizer_states", ())[:1]:
        recipe = content["hyper_parameters"].get("optimizer")
        refuse(_optimizer_problems(state, recipe, groups), f"checkpoint {path}")


def _optimizer_problems(state: dict[str, Any], recipe: Recipe | None, groups: list[dict[str, Any]]) -> Iterator[str]:
    """Load the state into an optimizer like the one that saved it, if that is one of torch's or ours."""
    for group in state["param_groups"]:  # each parameter of a model of ours has a gradient at every step
        if len({frozenset(state["state"].get(number, ())) for number in group["params"]}) > 1:
            yield "optimizer_states[0].state is not the same for all parameters of a group"
    if not recipe or not (make := known_optimizer(recipe)):
        return
    optimizer = make(groups)
    expected = [dict(group) for group in optimizer.param_groups]
    saved = {number: _on_meta(values) for number, values in state["state"].items()}
    try:
        optimizer.load_state_dict({**state, "state": saved})
    except (ValueError, TypeError, AttributeError, RuntimeError) as error:
        yield f"optimizer_states[0]: {error}"
        return
    for number, (ours, theirs) in enumerate(zip(expected, optimizer.param_groups, strict=True)):
        for name, value in ours.items():
            if name not in theirs or (isinstance(value, tuple) and len(value) != len(theirs[name])):
                yield f"optimizer_states[0].param_groups[{number}].{name} is {shown(theirs.get(name))}"


def _on_meta(values: Mapping[str, Any]) -> dict[str, Any]:
    """State of a parameter, with a tensor that has no data in place of each sharded one."""
    return {
        name: torch.empty(tuple(value.shape), dtype=value.dtype, device="meta") if hasattr(value, "pieces") else value
        for name, value in values.items()
    }
