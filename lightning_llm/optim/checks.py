"""What AdamW and Muon refuse: options out of range, tensors they cannot update, state that is not theirs."""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

AVERAGES = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer")  # of the shape of their parameter
ADAMW_STATE = ["exp_avg", "exp_avg_sq", "step"]
STATE_DTYPES = {None: None, "bfloat16": torch.bfloat16}

State = dict[str, Any]


def check_group(group: dict[str, Any]) -> None:
    """Raises ValueError with every option of an AdamW group that is out of range."""
    faults = [
        f"{name} must be a number of at least 0, got {group[name]!r}"
        for name in ("lr", "eps", "weight_decay")
        if not _is_number(group[name]) or not 0 <= group[name] < math.inf
    ]
    betas = group["betas"]
    if not isinstance(betas, (tuple, list)) or len(betas) != 2 or not all(_is_number(b) and 0 <= b < 1 for b in betas):
        faults.append(f"betas must be two numbers of at least 0 and below 1, got {betas!r}")
    if group["state_dtype"] not in STATE_DTYPES:
        faults.append(f"state_dtype must be None (the parameter's) or 'bfloat16', got {group['state_dtype']!r}")
    if faults:
        raise ValueError("; ".join(faults))


def check_saved_group(group: dict[str, Any]) -> None:
    """Raises ValueError if a saved group is not one of AdamW, or has options of torch's that change the result."""
    missing = [name for name in ("lr", "betas", "eps", "weight_decay") if name not in group]
    if missing:
        raise ValueError(f"the optimizer state has no {', '.join(missing)}: it was not saved by AdamW")
    changed = [f"{name}=True" for name in ("amsgrad", "maximize") if group.get(name)]
    if group["weight_decay"] and not group.get("decoupled_weight_decay", True):
        changed.append("decoupled_weight_decay=False")
    if changed:
        raise ValueError(
            f"the optimizer state was saved with {', '.join(changed)}: load it into the class that saved it"
        )
    check_group({"state_dtype": None, **group})


def check_saved_state(states: Iterable[State]) -> None:
    """Raises ValueError if what was saved for a parameter is neither nothing nor what AdamW keeps."""
    for state in states:
        if state and sorted(state) != ADAMW_STATE:
            raise ValueError(
                f"the optimizer state holds {', '.join(sorted(state))}: AdamW's is {', '.join(ADAMW_STATE)}"
            )


def saved_state_faults(groups: Iterable[dict[str, Any]], saved: dict[str, Any]) -> list[str]:
    """Where a saved state does not belong to parameters: what torch would not notice before the next step.

    Args:
        groups: Of the optimizer that is going to load it, or of one with the same parameters.
        saved: As of ``Optimizer.state_dict``. Other numbers of parameters are left to torch, which reports them.
    """
    params = [param for group in groups for param in group["params"]]
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    faults = []
    for number, param in zip(numbers, params, strict=False) if len(numbers) == len(params) else ():
        for name, value in saved["state"].get(number, {}).items():
            found = tuple(getattr(value, "shape", ())), getattr(value, "dtype", torch.int64).is_floating_point
            is_none = value is None and name == "momentum_buffer"  # torch's SGD without momentum
            if name in AVERAGES and not is_none and found != (tuple(param.shape), True):
                faults.append(f"{name} of parameter {number} has shape {found[0]}, expected {tuple(param.shape)}")
            elif name == "step" and not _is_step(value):
                faults.append(f"step of parameter {number} is {value!r:.60}, no number of steps")
    return faults


def _is_step(value: Any) -> bool:
    number = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
    return _is_number(number) and 0 <= number < 2**53 and number == int(number)


def restore_steps(optimizer: Optimizer) -> None:
    """Makes plain numbers of loaded step counters: torch keeps them as tensors."""
    for state in optimizer.state.values():
        if "step" in state:
            state["step"] = int(state["step"])


def state_dtypes(optimizer: Optimizer) -> list[str | None]:
    """The option of each group, to be kept while a state is loaded: torch takes all options from what was saved."""
    return [group["state_dtype"] for group in optimizer.param_groups]


def restore_state_dtypes(optimizer: Optimizer, names: list[str | None]) -> None:
    """Keeps AdamW's averages as the optimiser was made to: torch loads them in the dtype of their parameter.

    What was saved in bfloat16 has the same bits again; what was saved in float32 is rounded to the nearest, once.
    """
    for group, name in zip(optimizer.param_groups, names, strict=True):
        group["state_dtype"] = name
        for param in group["params"]:
            state = optimizer.state.get(param, {})
            for average in {"exp_avg", "exp_avg_sq"} & state.keys():
                state[average] = state[average].to(STATE_DTYPES[name] or param.dtype)


def refuse_complex(params: list[Tensor]) -> None:
    """Raises ValueError if a parameter is complex."""
    for param in params:
        if param.is_complex():
            raise ValueError(f"params must be real, got a tensor of {param.dtype}: pass torch.view_as_real of it")


def refuse_sparse_gradients(groups: list[dict[str, Any]]) -> None:
    """Raises ValueError, before anything is changed, if a gradient is sparse."""
    for group in groups:
        for param in group["params"]:
            if param.grad is not None and param.grad.layout != torch.strided:
                raise ValueError(
                    f"gradients must be dense, got {param.grad.layout} of shape {tuple(param.grad.shape)}: "
                    "make the embedding with sparse=False"
                )


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
