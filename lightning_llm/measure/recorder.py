"""Record of every module of a model in a training step: its output, and the gradients of its input and parameters.

    with Recorder(model) as recorder:
        with recorder.forward():
            loss = model(batch)
        loss.backward()
    step = recorder.step({name: parameter.grad for name, parameter in model.named_parameters()})

Only blocks and their parts are recorded, the direct children of a model and those of its layers: hooks on the
projections inside would make an operator call them that otherwise reads their weights. The gradient of an input is what
the module itself contributes, without the residual stream beside it: the module gets a view of its input, which has a
gradient of its own. A step may have several forward passes; what they computed is concatenated.
"""

import contextlib
import dataclasses
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from lightning_llm.measure.attribution import module_label
from lightning_llm.measure.meter import tensors_in

Array = npt.NDArray[np.float64]
Arrays = dict[str, Array]


@dataclasses.dataclass(frozen=True)
class RecordedStep:
    """Arrays that a step computed, in float64, by module; without torch, so that another process can send them.

    Attributes:
        order: The modules, in the order in which their forward begins.
        inputs: The first floating-point argument.
        outputs: The first floating-point result, in the order in which their forward ends.
        input_gradients: Of the loss, through this module alone.
        gradients: Of the loss, by the name of the parameter.
    """

    order: list[str]
    inputs: Arrays
    outputs: Arrays
    input_gradients: Arrays
    gradients: Arrays


class Recorder:
    """Hooks on the blocks of a model and their parts.

    Args:
        model: With layers below a name and a number, such as ``layers.0``.
        label: From a module's name to the label to record it by; ``None``: not at all.
        is_opaque: Whether a module may be called with hooks, but nothing inside it, such as a compiled one.
    """

    def __init__(
        self,
        model: nn.Module,
        label: Callable[[str], str | None] = lambda name: name,
        is_opaque: Callable[[nn.Module], bool] = lambda module: False,
    ) -> None:
        self._hooks = contextlib.ExitStack()
        self._order: list[str] = []
        self._found: dict[str, dict[str, list[Tensor]]] = defaultdict(lambda: defaultdict(list))
        self._running: list[str] = []
        self._calls: Counter[str] = Counter()
        self._records = False
        closed = [name for name, module in model.named_modules() if is_opaque(module)]
        for name, module in model.named_modules():
            own = label(name) if name else None
            is_inside = any(name.startswith(f"{outer}.") if outer else True for outer in closed)
            if own and module_label(own) == own and not is_inside and not isinstance(module, nn.Dropout | nn.Identity):
                enter = partial(self._enter, own)
                self._hooks.enter_context(module.register_forward_pre_hook(enter, with_kwargs=True))
                self._hooks.enter_context(module.register_forward_hook(self._leave))

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(self, *_: object) -> None:
        self._hooks.close()

    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
        """A forward pass. What backward runs again is not recorded."""
        self._records = True
        self._calls = Counter()
        self._running = []
        try:
            yield
        finally:
            self._records = False

    def step(self, gradients: Mapping[str, Tensor | None], dim: int = 0) -> RecordedStep:
        """The recorded step.

        Args:
            gradients: Of the parameters, by name.
            dim: Along which the forward passes cut the batch: 0 rows, 1 positions. Scalars are added up.
        """
        found = {
            name: {label: joined_arrays(list(map(_array, pieces)), dim) for label, pieces in of_all.items()}
            for name, of_all in self._found.items()
        }
        own = {name: _array(gradient) for name, gradient in gradients.items() if gradient is not None}
        inputs, outputs, input_gradients = (found.get(name, {}) for name in ("inputs", "outputs", "input_gradients"))
        return RecordedStep(self._order, inputs, outputs, input_gradients, own)

    def _enter(self, label: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self._records:
            return None
        self._calls[label] += 1
        key = label if self._calls[label] == 1 else f"{label} (call {self._calls[label]})"
        self._running.append(key)
        if key not in self._order:
            self._order.append(key)
        named: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
        place = next((place for place, value in named.items() if _is_recorded(value)), None)
        if place is None:
            return None
        x: Tensor = named[place]
        self._found["inputs"][key].append(x.detach())
        if not x.requires_grad or not torch.is_grad_enabled():
            return None
        named[place] = x.view_as(x)
        named[place].register_hook(partial(self._keep_gradient, key))
        return tuple(named[i] for i in range(len(args))), {name: named[name] for name in kwargs}

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._records:
            key = self._running.pop()
            self._found["outputs"][key] += [x.detach() for x in tensors_in(output) if _is_recorded(x)][:1]

    def _keep_gradient(self, key: str, gradient: Tensor) -> None:
        self._found["input_gradients"][key].append(gradient.detach())


def _is_recorded(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def joined_arrays(arrays: list[Array], dim: int = 0) -> Array:
    """Pieces of a batch as one; scalars are added up."""
    return np.asarray(sum(arrays)) if arrays[0].ndim == 0 else np.concatenate(arrays, axis=dim)


def _array(tensor: Tensor) -> Array:
    whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return cast(Array, whole.detach().to("cpu", torch.float64, copy=True).numpy())
