"""The state of an optimizer, found by two steps on tensors without storage."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_llm.accounting.step_settings import weight_dtype
from lightning_llm.io.trust import not_found, trust_and_import
from lightning_llm.io.untrusted import prefixed
from lightning_llm.measure.meter import tensors_in
from lightning_llm.model.config import ModelConfig
from lightning_llm.model.transformer import Transformer
from lightning_llm.optim.groups import param_groups


def state_bytes(optimizer: Optimizer, parameters: Sequence[Tensor]) -> int:
    """Bytes of the state after two steps: the first one may only collect what the second one needs, as in SOAP.

    One parameter of each kind gets a gradient: those of the same group, shape and dtype have the same state, and most
    layers of a model are alike.

    Args:
        optimizer: A new one.
        parameters: All of its own, on the ``meta`` device; some get gradients.
    """
    groups = {parameter: number for number, group in enumerate(optimizer.param_groups) for parameter in group["params"]}
    kinds: dict[tuple[Any, ...], list[Tensor]] = defaultdict(list)
    for parameter in parameters:
        kinds[groups.get(parameter), parameter.shape, parameter.dtype].append(parameter)
    for one, *_ in kinds.values():
        one.grad = torch.empty_like(one)
    if hasattr(optimizer, "train"):  # without a schedule, it has a mode
        optimizer.train()
    for _ in range(2):
        optimizer.step(lambda: 0.0)
    found = {key: _bytes_in(state) for key, state in optimizer.state.items()}
    for one, *alike in kinds.values():
        found |= {parameter: found.get(one, 0) for parameter in alike if parameter not in found}
    return sum(found.values())


def _bytes_in(state: Any) -> int:
    return sum(tensor.nbytes for tensor in tensors_in(state))


def state_per_parameter(path: str, arguments: Mapping[str, Any], config: ModelConfig, precision: str) -> float:
    """Tensors of a parameter's size that an optimizer keeps for each parameter, on average over the model.

    Args:
        path: Its import path, which the caller trusts.
        arguments: Of its constructor, besides the parameters.
        config: Of the model.
        precision: Of the run.

    Raises:
        ValueError: There is no such class; its arguments are wrong; or its steps need numbers.
    """
    try:
        optimizer_class = trust_and_import(path)
    except (ImportError, AttributeError):
        raise not_found("model.optimizer", path) from None
    if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, Optimizer)):
        raise ValueError(f"model.optimizer {path} must be a subclass of torch.optim.Optimizer")
    with torch.device("meta"):
        model = Transformer(config).to(getattr(torch, weight_dtype(precision)))
    parameters = list(model.parameters())
    with prefixed(f"model.optimizer {path} cannot be measured", Exception):  # whatever the class raises
        state = state_bytes(optimizer_class(param_groups(model), **arguments), parameters)
    return state / sum(parameter.nbytes for parameter in parameters)
