"""Whether a checkpoint fits a model: its architecture, its weights, its optimizer and its schedule.

A checkpoint holds recipes of optimizer and schedule, ``{"class_path": …, "init_args": {…}}``, which
``load_from_checkpoint`` turns back into objects. Only classes of ``lightning_llm.optim`` and ``torch.optim`` are
restored, looked up by name: a checkpoint never decides what is imported. For any other class, and for schedulers that
do not expose their arguments, the recipe holds the name alone, and loading warns that it is not restored. The model can
be used, but it does not train with another schedule than the checkpoint's.
"""

import dataclasses
import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_llm import optim
from lightning_llm.checkpoints.schema import ARCHITECTURE, RESUME, is_plain, validate
from lightning_llm.io.untrusted import refuse, shown
from lightning_llm.model.config import SWIGLUS, ModelConfig
from lightning_llm.model.transformer import Transformer
from lightning_llm.model.weights import lr_factors
from lightning_llm.optim import schedules
from lightning_llm.optim.groups import GroupRule, param_groups, saved_state_faults
from lightning_llm.optim.schedules import Schedule

Recipe = dict[str, Any]


def _by_path(kinds: Iterable[Any]) -> dict[str, Any]:
    return {f"{kind.__module__}.{kind.__qualname__}": kind for kind in kinds}


_OF_TORCH = [kind for kind in vars(torch.optim).values() if isinstance(kind, type) and issubclass(kind, Optimizer)]
OPTIMIZERS = _by_path([*_OF_TORCH, optim.AdamW, optim.MuonAdamW])

# What may differ between a checkpoint and the model that loads it: the parameters and their meaning stay the same.
EXECUTION_FIELDS = frozenset({"checkpoint_level", "recompute", "dropout", "loss"})


def free_fields(architecture: ModelConfig) -> frozenset[str]:
    """What may differ between a model and the one whose weights it starts from."""
    # RoPE has no parameters and extends to any length
    length = {"max_position_embeddings"} if architecture.position == "rope" else set()
    return EXECUTION_FIELDS | {"initializer_range", "mup", "vocab_multiple_of"} | length


def architecture_differences(
    saved: ModelConfig, wanted: ModelConfig, *, ignored: frozenset[str] = EXECUTION_FIELDS
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
        validate(checkpoint, trainer.ckpt_path, needs, of_tensors=False)
    saved = ModelConfig(**checkpoint["hyper_parameters"]["architecture"])
    if differences := architecture_differences(saved, model.architecture):
        raise ValueError(f"the checkpoint is of another architecture: {'; '.join(differences)}")
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
        problems += saved_state_faults(groups, state)
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
    try:
        rules = [GroupRule(**rule) for rule in content["hyper_parameters"].get("groups", ())]
        groups = param_groups(model, rules=rules, lr_factors=lr_factors(config))
    except ValueError as error:
        raise ValueError(f"checkpoint {path}: hyper_parameters.groups: {error}") from error
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


# ---- recipes


def optimizer_recipe(optimizer: Optimizer) -> Recipe:
    """The class of an optimizer, and the arguments in its ``defaults``."""
    accepted = inspect.signature(type(optimizer)).parameters
    arguments = {name: value for name, value in optimizer.defaults.items() if name in accepted}
    return _recipe(optimizer, OPTIMIZERS, arguments if is_plain(arguments) else None)


def schedule_recipe(schedule: Any) -> Recipe | None:
    """The class of a schedule, and its fields if it is one of this project's. ``None`` stays ``None``."""
    if schedule is None:
        return None
    return _recipe(schedule, _known_schedules(), vars(schedule).copy() if dataclasses.is_dataclass(schedule) else None)


def _recipe(made: object, known: Mapping[str, Any], arguments: dict[str, Any] | None) -> Recipe:
    (path,) = _by_path([type(made)])
    is_known = known.get(path) is type(made) and arguments is not None
    return {"class_path": path, **({"init_args": arguments} if is_known else {})}


def restored_optimizer(given: Any) -> Any:
    """The factory of an optimizer from its recipe; after a warning one that raises if it cannot be restored.

    Anything but a recipe is returned unchanged.
    """
    if not isinstance(given, dict):
        return given
    if known := known_optimizer(given):
        return known
    _warn_not_restored("optimizer", given)
    return partial(_lost_optimizer, given["class_path"])


def _lost_optimizer(class_path: str, params: object) -> Optimizer:
    raise _not_restored("optimizer", class_path)


def known_optimizer(given: Recipe) -> Callable[..., Optimizer] | None:
    """The factory of an optimizer, or ``None`` if its class or arguments are not known.

    Raises:
        ValueError: The class does not accept the arguments.
    """
    kind = OPTIMIZERS.get(given["class_path"])
    if kind is None or "init_args" not in given:
        return None
    made: Callable[..., Optimizer] = partial(kind, **given["init_args"])
    _try("optimizer", given, lambda: made(params=[{"params": [torch.nn.Parameter(torch.zeros(1))], "name": "vectors"}]))
    return made


@dataclasses.dataclass(frozen=True)
class LostSchedule(Schedule):
    """In place of a schedule that cannot be restored: the model can be used, but not trained.

    Attributes:
        class_path: Of the schedule.
    """

    class_path: str

    def factor(self, step: int, total_steps: int | None = None) -> float:
        """Refuse to train with another schedule.

        Raises:
            ValueError: Always.
        """
        raise _not_restored("schedule", self.class_path)


def _known_schedules() -> dict[str, Any]:
    """All that ``optim.schedules`` defines: none is left out because a list lacks it."""
    kinds: list[Any] = [kind for kind in vars(schedules).values() if dataclasses.is_dataclass(kind)]
    return _by_path(kind for kind in kinds if issubclass(kind, Schedule) and not inspect.isabstract(kind))


def restored_schedule(given: Any) -> Any:
    """The schedule of a recipe; after a warning a ``LostSchedule`` if it cannot be restored."""
    if not isinstance(given, dict):
        return given
    kind = _known_schedules().get(given["class_path"])
    if kind is None or "init_args" not in given:
        _warn_not_restored("schedule", given)
        return LostSchedule(given["class_path"])
    return _try("schedule", given, lambda: kind(**given["init_args"]))


def _try(name: str, recipe: Recipe, make: Callable[[], Any]) -> Any:
    try:
        return make()
    except (TypeError, ValueError, OverflowError, RuntimeError, AttributeError) as error:
        raise ValueError(f"the checkpoint's {name} {recipe['class_path']} cannot be made: {error}") from error


def _not_restored(name: str, class_path: str) -> ValueError:
    give = f"give load_from_checkpoint the argument {name} to train this model"
    return ValueError(f"the checkpoint's {name} {class_path} is not restored: {give}")


def _warn_not_restored(name: str, recipe: Recipe) -> None:
    warnings.warn(str(_not_restored(name, recipe["class_path"])), stacklevel=3)
