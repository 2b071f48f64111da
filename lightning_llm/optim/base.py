"""Base of AdamW and MuonAdamW: checks of options and of saved states, and a step over all groups."""

import abc
import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_llm.io.options import raise_all
from lightning_llm.io.untrusted import is_number, shown

AVERAGES = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer")  # of the shape of their parameter
ADAMW_STATE = ["exp_avg", "exp_avg_sq", "step"]
STATE_DTYPES = {None: None, "bfloat16": torch.bfloat16}
ROUNDINGS = ("nearest", "stochastic")

ParamGroup = dict[str, Any]
T = TypeVar("T")
Check = tuple[Callable[[Any], bool], str]  # whether a value fits, and what is expected


def is_decay_rate(value: Any) -> bool:
    """Whether it is a number of at least 0 and below 1."""
    return is_number(value) and 0 <= value < 1


def is_not_negative(value: Any) -> bool:
    """Whether it is a finite number of at least 0."""
    return is_number(value) and 0 <= value < math.inf


def _are_betas(value: Any) -> bool:
    return isinstance(value, tuple | list) and len(value) == 2 and all(map(is_decay_rate, value))


class GroupOptimizer(Optimizer, abc.ABC):
    """Base of AdamW and MuonAdamW: checks of groups and saved states, a step over all groups."""

    checks: ClassVar[dict[str, Check]] = {
        **dict.fromkeys(("lr", "eps", "weight_decay"), (is_not_negative, "a number of at least 0")),
        "betas": (_are_betas, "two numbers of at least 0 and below 1"),
        "state_dtype": (lambda value: value in STATE_DTYPES, "None (the parameter's) or 'bfloat16'"),
        "param_rounding": (lambda value: value in ROUNDINGS, " or ".join(ROUNDINGS)),
    }

    def add_param_group(self, param_group: ParamGroup) -> None:
        """Adds a group, if its options and its parameters fit."""
        self._check_options({**self.defaults, **param_group})
        super().add_param_group(param_group)
        group = self.param_groups.pop()  # until it is known to fit
        self._check_params(group)
        self.param_groups.append(group)

    def _check_params(self, group: ParamGroup) -> None:
        for param in group["params"]:
            if param.is_complex():
                raise ValueError(f"params must be real, got a tensor of {param.dtype}: pass torch.view_as_real of it")

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Updates every parameter that has a gradient; returns what the closure returned."""
        with torch.enable_grad():
            loss = None if closure is None else closure()
        for param in (param for group in self.param_groups for param in group["params"]):
            if param.grad is not None and param.grad.layout != torch.strided:  # before any parameter is changed
                raise ValueError(
                    f"gradients must be dense, got {param.grad.layout} of shape {tuple(param.grad.shape)}: "
                    "make the embedding with sparse=False"
                )
        offset = 0
        with torch.no_grad():
            for group in self.param_groups:
                self.step_group(group, offset)
                offset += sum(param.numel() for param in group["params"])
        return loss

    @abc.abstractmethod
    def step_group(self, group: ParamGroup, offset: int) -> None:
        """Updates the parameters of one group.

        Args:
            group: Its parameters and options.
            offset: How many numbers the parameters of the groups before it hold.
        """

    def check_saved(self, state_dict: dict[str, Any]) -> None:
        """Raises ValueError if another optimizer saved this state, or one with options that change the result."""
        for group in state_dict["param_groups"]:
            missing = [name for name in ("lr", "betas", "eps", "weight_decay") if name not in group]
            if missing:
                raise ValueError(f"the optimizer state has no {', '.join(missing)}: it was saved by another optimizer")
            changed = [f"{name}=True" for name in ("amsgrad", "maximize") if group.get(name)]
            if group["weight_decay"] and not group.get("decoupled_weight_decay", True):
                changed.append("decoupled_weight_decay=False")
            if changed:
                raise ValueError(
                    f"the optimizer state was saved with {', '.join(changed)}: load it into the class that saved it"
                )
            self._check_options(group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a saved state in the ``state_dtype`` of this optimizer, which keeps its ``param_rounding`` too.

        torch takes all options from what was saved, loads averages in the dtype of their parameter, and saves the step
        as a tensor. An average that was saved in bfloat16 gets the same bits; one in float32 is rounded to the nearest.

        Raises:
            ValueError: If another optimizer saved it, or one with an option that this class lacks.
        """
        self.check_saved(state_dict)
        kept = [{name: group[name] for name in ("state_dtype", "param_rounding")} for group in self.param_groups]
        super().load_state_dict(state_dict)
        for group, options in zip(self.param_groups, kept, strict=True):
            group |= options
            group.setdefault("fused", None)
            for param in group["params"]:
                state = self.state.get(param, {})
                if "step" in state:
                    state["step"] = int(state["step"])
                for average in {"exp_avg", "exp_avg_sq"} & state.keys():
                    state[average] = state[average].to(STATE_DTYPES[options["state_dtype"]] or param.dtype)

    def _check_options(self, group: ParamGroup) -> None:
        raise_all(
            f"{name} must be {expected}, got {group[name]!r}"
            for name, (fits, expected) in self.checks.items()
            if name in group and not fits(group[name])
        )


def saved_state_problems(groups: Iterable[dict[str, Any]], saved: dict[str, Any]) -> list[str]:
    """Where a saved state does not fit the parameters, which torch would not notice, or not before the next step.

    Args:
        groups: Of the optimizer that is going to load it, or of one with the same parameters.
        saved: As of ``Optimizer.state_dict``. torch itself reports another number of parameters.
    """
    groups = list(groups)
    problems = []
    names, saved_names = ([group.get("name") for group in each] for each in (groups, saved["param_groups"]))
    if groups and None not in (*names, *saved_names) and names != saved_names:  # states are by number of parameter
        there = [name for name in saved_names if name not in names]
        here = [name for name in names if name not in saved_names]
        problems.append(f"its parameter groups have {shown(there)}, here {shown(here)}: give the patterns of its run")
    params = [param for group in groups for param in group["params"]]
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    if len(numbers) != len(params):
        return problems
    for number, param in zip(numbers, params, strict=True):
        for name, value in saved["state"].get(number, {}).items():
            shape = tuple(getattr(value, "shape", ()))
            is_floating = getattr(value, "dtype", torch.int64).is_floating_point
            is_none = value is None and name == "momentum_buffer"  # torch's SGD without momentum
            if name in AVERAGES and not is_none and (shape, is_floating) != (tuple(param.shape), True):
                problems.append(f"{name} of parameter {number} has shape {shape}, expected {tuple(param.shape)}")
            elif name == "step" and not _is_step(value):
                problems.append(f"step of parameter {number} is {value!r:.60}, not a number of steps")
    return problems


def _is_step(value: Any) -> bool:
    number = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
    return is_number(number) and 0 <= number < 2**53 and number == int(number)


def group_by(items: Iterable[T], key: Callable[[T], Hashable]) -> dict[Any, list[T]]:
    """The items by their keys, both in the order in which they first come."""
    groups: dict[Any, list[T]] = defaultdict(list)
    for item in items:
        groups[key(item)].append(item)
    return groups


def local_shard(tensor: Any) -> Tensor:
    """This rank's shard of a ``DTensor`` (whose import costs half a second), or the tensor itself."""
    shard: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return shard
