"""How a checkpoint says which optimizer and which schedule it was trained with, and how they are made again.

A checkpoint holds recipes, ``{"class_path": …, "init_args": {…}}``, which ``load_from_checkpoint`` turns back into
objects. Only classes of ``lightning_llm.optim`` and ``torch.optim`` are restored, looked up by name: a checkpoint never
decides what is imported. For any other class, and for schedulers that do not expose their arguments, the recipe holds
the name alone, and loading warns that it is not restored. The model can be used, but it does not train with another
schedule than the checkpoint's.
"""

import dataclasses
import inspect
import warnings
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer

from lightning_llm import optim
from lightning_llm.checkpoints.schema import is_plain_value
from lightning_llm.io.untrusted import prefixed
from lightning_llm.optim.catalog import OPTIMIZERS
from lightning_llm.optim.schedules import SCHEDULES, Schedule

Recipe = dict[str, Any]


def _by_path(classes: Iterable[Any]) -> dict[str, Any]:
    return {f"{cls.__module__}.{cls.__qualname__}": cls for cls in classes}


_OF_TORCH = [cls for cls in vars(torch.optim).values() if isinstance(cls, type) and issubclass(cls, Optimizer)]
_OWN = [getattr(optim, path.rpartition(".")[2]) for path in OPTIMIZERS if path.startswith("lightning_llm.")]
RESTORABLE_OPTIMIZERS = _by_path([*_OF_TORCH, *_OWN])


def optimizer_recipe(optimizer: Optimizer) -> Recipe:
    """The class of an optimizer, and the arguments in its ``defaults``."""
    accepted = inspect.signature(type(optimizer)).parameters
    arguments = {name: value for name, value in optimizer.defaults.items() if name in accepted}
    return _recipe(optimizer, RESTORABLE_OPTIMIZERS, arguments if is_plain_value(arguments) else None)


def schedule_recipe(schedule: Any) -> Recipe | None:
    """The class of a schedule, and its fields if it is one of this project's. ``None`` stays ``None``."""
    if schedule is None:
        return None
    arguments = vars(schedule).copy() if dataclasses.is_dataclass(schedule) else None
    return _recipe(schedule, _by_path(SCHEDULES.values()), arguments)


def _recipe(value: object, restorable: Mapping[str, Any], arguments: dict[str, Any] | None) -> Recipe:
    (path,) = _by_path([type(value)])
    is_restorable = restorable.get(path) is type(value) and arguments is not None
    return {"class_path": path, **({"init_args": arguments} if is_restorable else {})}


def restored_optimizer(recipe: Any) -> Any:
    """The factory of an optimizer from its recipe; after a warning one that raises if it cannot be restored.

    Anything but a recipe is returned unchanged.
    """
    if not isinstance(recipe, dict):
        return recipe
    if factory := known_optimizer(recipe):
        return factory
    _warn_not_restored("optimizer", recipe)
    return partial(_lost_optimizer, recipe["class_path"])


def _lost_optimizer(class_path: str, params: object) -> Optimizer:
    raise _not_restored("optimizer", class_path)


def known_optimizer(recipe: Recipe) -> Callable[..., Optimizer] | None:
    """The factory of an optimizer, or ``None`` if its class or arguments are not known.

    Raises:
        ValueError: The class does not accept the arguments.
    """
    cls = RESTORABLE_OPTIMIZERS.get(recipe["class_path"])
    if cls is None or "init_args" not in recipe:
        return None
    factory: Callable[..., Optimizer] = partial(cls, **recipe["init_args"])
    group = {"params": [torch.nn.Parameter(torch.zeros(1))], "name": "vectors"}
    _try("optimizer", recipe, lambda: factory(params=[group]))
    return factory


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


def restored_schedule(recipe: Any) -> Any:
    """The schedule of a recipe; after a warning a ``LostSchedule`` if it cannot be restored."""
    if not isinstance(recipe, dict):
        return recipe
    cls = _by_path(SCHEDULES.values()).get(recipe["class_path"])
    if cls is None or "init_args" not in recipe:
        _warn_not_restored("schedule", recipe)
        return LostSchedule(recipe["class_path"])
    return _try("schedule", recipe, lambda: cls(**recipe["init_args"]))


def _try(name: str, recipe: Recipe, make: Callable[[], Any]) -> Any:
    errors = (TypeError, ValueError, OverflowError, RuntimeError, AttributeError)
    with prefixed(f"the checkpoint's {name} {recipe['class_path']} cannot be made", *errors):
        return make()


def _not_restored(name: str, class_path: str) -> ValueError:
    give = f"give load_from_checkpoint the argument {name} to train this model"
    return ValueError(f"the checkpoint's {name} {class_path} is not restored: {give}")


def _warn_not_restored(name: str, recipe: Recipe) -> None:
    warnings.warn(str(_not_restored(name, recipe["class_path"])), stacklevel=3)
