"""Optimizer and schedule of a run as plain values in its checkpoint, and back: for ``load_from_checkpoint``.

A recipe is ``{"class_path": …, "init_args": {…}}``. Only classes of ``lightning_llm.optim`` and ``torch.optim`` are
made again, looked up by name: a checkpoint never decides what is imported. Of any other class, and of schedulers that
do not tell their arguments, the recipe has the name alone, and loading says that it is not restored.
"""

import dataclasses
import inspect
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer

from lightning_llm import optim
from lightning_llm.optim.schedules import Schedule

Recipe = dict[str, Any]


def optimizer_recipe(optimizer: Optimizer) -> Recipe:
    """The class of an optimizer, and the arguments that its ``defaults`` tell."""
    kind = type(optimizer)
    accepted = inspect.signature(kind).parameters
    arguments = {name: value for name, value in optimizer.defaults.items() if name in accepted}
    if kind not in _optimizers().values() or not all(map(_is_plain, arguments.values())):
        return {"class_path": _path_of(kind)}
    return {"class_path": _path_of(kind), "init_args": arguments}


def schedule_recipe(schedule: object) -> Recipe | None:
    """The class of a schedule, and its fields if it is one of this project's; ``None`` stays what it is."""
    if schedule is None:
        return None
    kind = type(schedule)
    if kind not in _schedules().values() or not dataclasses.is_dataclass(schedule):
        return {"class_path": _path_of(kind)}
    return {"class_path": _path_of(kind), "init_args": dataclasses.asdict(schedule)}  # type: ignore[arg-type]


def restored_optimizer(given: Any, default: type[Optimizer]) -> Any:
    """What makes the optimizer of a recipe; ``default``, after a warning, where that cannot be told.

    Args:
        given: A recipe; anything else is returned as it is.
        default: Instead of a class that is not made again.
    """
    if not isinstance(given, dict):
        return given
    made = known_optimizer(given)
    if made is None:
        _warn("optimizer", given["class_path"], f"{default.__name__} with its defaults")
        return default
    return made


def known_optimizer(given: Recipe) -> Callable[..., Optimizer] | None:
    """What makes the optimizer of a recipe, or ``None`` where that cannot be told.

    Raises:
        ValueError: Its arguments are none that the class takes.
    """
    kind = _optimizers().get(given["class_path"])
    if kind is None or "init_args" not in given:
        return None
    made = partial(kind, **given["init_args"])
    _try("optimizer", given, lambda: made(params=[{"params": [torch.nn.Parameter(torch.zeros(1))], "name": "vectors"}]))
    return made


def restored_schedule(given: Any) -> Any:
    """The schedule of a recipe, likewise; ``None``, the default, after a warning, where that cannot be told."""
    if not isinstance(given, dict):
        return given
    kind = _schedules().get(given["class_path"])
    if kind is None or "init_args" not in given:
        _warn("schedule", given["class_path"], "the default schedule")
        return None
    return _try("schedule", given, lambda: kind(**given["init_args"]))


def _try(name: str, recipe: Recipe, make: Callable[[], Any]) -> Any:
    try:
        return make()
    except (TypeError, ValueError, OverflowError, RuntimeError, AttributeError) as error:
        raise ValueError(f"the checkpoint's {name} {recipe['class_path']} cannot be made: {error}") from error


def warn_without_recipe(checkpoint: Mapping[str, Any]) -> None:
    """Warn of a training checkpoint that an older version wrote, without recipes."""
    if checkpoint.get("optimizer_states") and "optimizer" not in checkpoint.get("hyper_parameters", {}):
        warnings.warn("the checkpoint is of an older version: its optimizer is not restored", stacklevel=2)


def _warn(name: str, class_path: str, instead: str) -> None:
    warnings.warn(
        f"the checkpoint's {name} {class_path} is not restored: this model has {instead}; "
        f"give load_from_checkpoint the argument {name}",
        stacklevel=2,
    )


def _path_of(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _optimizers() -> dict[str, type[Optimizer]]:
    found = [*vars(torch.optim).values(), optim.AdamW, optim.MuonAdamW]
    return {_path_of(kind): kind for kind in found if isinstance(kind, type) and issubclass(kind, Optimizer)}


def _schedules() -> dict[str, type[Schedule]]:
    kinds = (optim.Constant, optim.WarmupCosine, optim.WarmupLinear, optim.WarmupStableDecay)
    return {_path_of(kind): kind for kind in kinds}


def _is_plain(value: object) -> bool:
    if isinstance(value, tuple | list):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)
