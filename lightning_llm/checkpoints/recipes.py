"""Optimizer and schedule of a run as plain values in its checkpoint, and back, for ``load_from_checkpoint``.

A recipe is ``{"class_path": …, "init_args": {…}}``. Only classes of ``lightning_llm.optim`` and ``torch.optim`` are
restored, looked up by name: a checkpoint never decides what is imported. For any other class, and for schedulers that
do not expose their arguments, the recipe holds the name alone, and loading warns that it is not restored.
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
    """The class of an optimizer, and the arguments in its ``defaults``."""
    accepted = inspect.signature(type(optimizer)).parameters
    arguments = {name: value for name, value in optimizer.defaults.items() if name in accepted}
    return _recipe(type(optimizer), _optimizers(), arguments if all(map(_is_plain, arguments.values())) else None)


def schedule_recipe(schedule: object) -> Recipe | None:
    """The class of a schedule, and its fields if it is one of this project's. ``None`` stays ``None``."""
    if schedule is None:
        return None
    fields: Any = schedule
    return _recipe(type(schedule), _schedules(), vars(fields).copy() if dataclasses.is_dataclass(schedule) else None)


def _recipe(kind: type, known: Mapping[str, type], arguments: dict[str, Any] | None) -> Recipe:
    path = _path_of(kind)
    if known.get(path) is not kind or arguments is None:
        return {"class_path": path}
    return {"class_path": path, "init_args": arguments}


def restored_optimizer(given: Any, default: type[Optimizer]) -> Any:
    """The factory of an optimizer from its recipe.

    Args:
        given: A recipe; anything else is returned unchanged.
        default: Used, after a warning, in place of a class that cannot be restored.
    """
    if not isinstance(given, dict):
        return given
    made = known_optimizer(given)
    if made is None:
        _warn("optimizer", given["class_path"], f"{default.__name__} with its defaults")
    return made or default


def known_optimizer(given: Recipe) -> Callable[..., Optimizer] | None:
    """The factory of an optimizer, or ``None`` if its class or arguments are not known.

    Raises:
        ValueError: The class does not accept the arguments.
    """
    kind = _optimizers().get(given["class_path"])
    if kind is None or "init_args" not in given:
        return None
    made = partial(kind, **given["init_args"])
    _try("optimizer", given, lambda: made(params=[{"params": [torch.nn.Parameter(torch.zeros(1))], "name": "vectors"}]))
    return made


def restored_schedule(given: Any) -> Any:
    """The schedule of a recipe; ``None``, the default, after a warning, if it cannot be restored."""
    if not isinstance(given, dict):
        return given
    kind = _schedules().get(given["class_path"])
    if kind is None or "init_args" not in given:
        _warn("schedule", given["class_path"], "the default schedule")
        return None
    return _try("schedule", given, lambda: kind(**given["init_args"]))


def warn_without_recipe(checkpoint: Mapping[str, Any]) -> None:
    """Warn about a training checkpoint that an older version wrote without recipes."""
    if checkpoint.get("optimizer_states") and "optimizer" not in checkpoint.get("hyper_parameters", {}):
        warnings.warn("the checkpoint is of an older version: its optimizer is not restored", stacklevel=2)


def _try(name: str, recipe: Recipe, make: Callable[[], Any]) -> Any:
    try:
        return make()
    except (TypeError, ValueError, OverflowError, RuntimeError, AttributeError) as error:
        raise ValueError(f"the checkpoint's {name} {recipe['class_path']} cannot be made: {error}") from error


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
