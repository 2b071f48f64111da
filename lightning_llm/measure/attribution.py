"""Owners of live bytes: one training step under a meter that knows the category and the module of every storage.

    meter = AttributedMeter(model, optimizers, inputs=batch)
    meter.begin("forward")
    with meter:
        loss = model(batch)
        meter.begin("backward")
        loss.backward()
        meter.begin("optimizer")
        optimizer.step()
    meter.close()
    meter.timeline().peak.by_category()

The module is the one that runs. In forward, hooks on the modules tell. In backward it is the module whose forward made
the autograd node that runs, which the node's sequence number tells; nothing hangs on the graph, so that gradients are
summed in the same order as without the meter. Work outside every module is the loss.

The category is settled when the step is over, for the whole life of a storage: what became a gradient was one from its
allocation. Saved activations are what forward made and what is live when backward begins, whoever holds it.
"""

import bisect
import contextlib
import dataclasses
import weakref
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_llm.io.untrusted import number_in
from lightning_llm.measure.meter import MemoryMeter, Watched, parts_of, tensors_in
from lightning_llm.measure.timeline import Event, Owner, Timeline

HEAD = "lm_head"
LOSS = "loss"
OPTIMIZER = "optimizer"
UNKNOWN = "unknown"


@dataclasses.dataclass
class _Owned(Watched):
    category: str = "temporary"
    module: str = UNKNOWN
    phase: str = ""


class AttributedMeter(MemoryMeter):  # type: ignore[no-untyped-call]
    """A meter that knows the category and module of what is live on the model's device. For one step of eager code.

    Args:
        model: Its parameters, buffers and submodules.
        optimizers: Their state is a category of its own.
        inputs: Any structure of tensors: the batch. Add later micro-batches by ``add_inputs``.
        unseen_bytes: What the device's allocator holds already, if it can say. What exceeds everything known counts as
            ``other`` (workspaces of libraries, buckets of DDP, rounding).

    Attributes:
        failed_in: The module and operator in which memory ran out, if it did.
    """

    def __init__(
        self, model: nn.Module, optimizers: Iterable[Optimizer] = (), inputs: Any = (), unseen_bytes: int = 0
    ) -> None:
        super().__init__()
        self.failed_in: tuple[str, str] | None = None
        self._model = model
        self._optimizers = list(optimizers)
        self._prefix = _common_prefix(model)
        names = (module_label(name, self._prefix) for name, _ in model.named_modules())
        self._outside = HEAD if HEAD in names else LOSS
        self._owners = {
            id(p): module_label(name.rpartition(".")[0], self._prefix) for name, p in model.named_parameters()
        }
        self._running: list[str] = []
        self._births: list[tuple[int, str]] = []  # from this sequence number on, autograd's nodes are this module's
        self._phase = ""
        self._operator = 0
        self._met = 0
        self._device = next((p.device.type for p in model.parameters()), None)
        self._events: list[Event] = []
        self._marks: list[tuple[int, str]] = []
        self._hooks = contextlib.ExitStack()
        self._register_held()
        self.add_inputs(inputs)
        self._unseen = max(0, unseen_bytes - sum(self._bytes.values()))
        self._hook_modules()

    # -- what the caller tells ----------------------------------------------------------------------------------------

    def add_inputs(self, inputs: Any) -> None:
        """Tensors of a batch, in any structure."""
        for tensor in tensors_in(inputs):
            self._register(tensor, "inputs", "batch")

    def begin(self, phase: str) -> None:
        """Starts ``forward``, ``backward`` or ``optimizer``; a step may have several of each."""
        if phase == "backward":
            self._find_activations()
        elif self._phase == "backward":
            self._find_gradients()
        self._phase = phase
        self._running = []
        self._marks.append((self._operator, phase))

    def close(self) -> None:
        """The step is over: settle categories, and remove the hooks. May be called again."""
        self._hooks.close()
        if self._phase == "forward":  # an error ended it: what is live is mostly what forward has saved so far
            self._find_activations()
        self._find_gradients()
        self._find_state()

    def timeline(self) -> Timeline:
        """Timeline of the bytes that were live during the step."""
        rest = max(0, self._unseen - self._met)  # what was met existed before, so the allocator counted it
        events = [Event(0, rest, Owner("other", UNKNOWN))] if rest else []
        return Timeline([*events, *self._events], self._marks, self._operator)

    # -- what is known before the step --------------------------------------------------------------------------------

    def _register_held(self) -> None:
        for name, held in (*self._model.named_parameters(), *self._model.named_buffers()):
            self._register(held, "parameters", module_label(name.rpartition(".")[0], self._prefix))
        self._find_gradients()
        self._find_state()

    def _register(self, tensor: Tensor, category: str, module: str) -> None:
        for part in parts_of(tensor):
            if part.layout != torch.strided:
                continue
            self._watch(part, "excluded")
            watched = self._watched.get(id(part.untyped_storage()))
            if isinstance(watched, _Owned) and watched.category in ("temporary", "activations", "other"):
                watched.category = category
                watched.module = module

    def _find_activations(self) -> None:
        for watched in list(self._watched.values()):
            assert isinstance(watched, _Owned)
            if watched.category == "temporary" and watched.phase == "forward":
                watched.category = "activations"

    def _find_gradients(self) -> None:
        for parameter in self._model.parameters():
            if parameter.grad is not None:
                self._register(parameter.grad, "gradients", self._owners[id(parameter)])

    def _find_state(self) -> None:
        for optimizer in self._optimizers:
            for key, state in optimizer.state.items():
                for tensor in tensors_in(state):
                    self._register(tensor, "optimizer_state", self._owners.get(id(key), OPTIMIZER))

    # -- who runs -----------------------------------------------------------------------------------------------------

    def _hook_modules(self) -> None:
        for name, module in self._model.named_modules():
            if not name:
                continue  # what the model itself does is the loss
            label = module_label(name, self._prefix)
            self._hooks.enter_context(module.register_forward_pre_hook(partial(self._enter, label), prepend=True))
            # also after an exception: activation checkpointing ends its second forward with one
            self._hooks.enter_context(module.register_forward_hook(self._leave, always_call=True))

    def _enter(self, label: str, *_: Any) -> None:
        self._running.append(label)
        self._note_birth()

    def _leave(self, *_: Any) -> None:
        if self._running:
            self._running.pop()
        self._note_birth()

    def _note_birth(self) -> None:
        if self._phase == "forward":  # a recomputed forward makes nodes that never run
            self._births.append((torch.autograd._get_sequence_nr(), self._module_now()))  # type: ignore[attr-defined]

    def _module_now(self) -> str:
        if self._running:
            return self._running[-1]
        if self._phase == "optimizer":
            return OPTIMIZER
        return self._module_of_node() if self._phase == "backward" else self._outside

    def _module_of_node(self) -> str:
        node: Any = torch._C._current_autograd_node()
        if node is None:
            return self._outside
        variable = getattr(node, "variable", None)
        if isinstance(variable, Tensor):  # it accumulates the gradient of a parameter
            return self._owners.get(id(variable), self._outside)
        place = bisect.bisect_right(self._births, node._sequence_nr(), key=lambda birth: birth[0])
        return self._births[place - 1][1] if place else self._outside

    # -- what is seen -------------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._operator += 1
        try:
            return super().__torch_dispatch__(func, types, args, kwargs)
        except RuntimeError as error:
            if self.failed_in is None and is_out_of_memory(error):
                self.failed_in = self._module_now(), str(func)
            raise

    def _watch(self, tensor: Tensor, account: str) -> None:
        if self._device is None or self._device == tensor.device.type:  # a batch in host memory is not the device's
            super()._watch(tensor, account)

    def _begin(self, reference: "weakref.ref[torch.UntypedStorage]", account: str) -> Watched:
        kind = ("temporary", self._module_now()) if account == "created" else ("other", UNKNOWN)
        return _Owned(reference, 0, account, *kind, self._phase)

    def _count(self, watched: Watched, change: int) -> None:
        super()._count(watched, change)
        assert isinstance(watched, _Owned)
        # what is met now for the first time existed from the beginning
        is_first = watched.account != "created" and not watched.nbytes and change > 0
        operator = 0 if is_first else self._operator
        self._met += change if is_first and watched.account == "met" else 0
        self._events.append(Event(operator, change, watched))


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory has run out: CUDA's error, or that of the CPU's allocator."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)


def module_label(name: str, prefix: str = "") -> str:
    """``transformer.layers.3.mlp.gate_proj`` -> ``layers.3.mlp``: a part of a layer, or a direct child of the model.

    Args:
        name: Of a module, as ``named_modules`` gives it.
        prefix: Of all that matters, left out: the attribute that a LightningModule holds its model by.
    """
    parts = name.split(".") if name else []
    if prefix and parts[:1] == [prefix]:
        parts = parts[1:]
        if not parts:
            return prefix
    number = next((place for place, part in enumerate(parts) if number_in(part) is not None), None)
    return ".".join(parts[: 1 if number is None else number + 2]) or LOSS


def _common_prefix(model: nn.Module) -> str:
    """The name of the only child that has parameters, if it has children itself."""
    children = [(name, child) for name, child in model.named_children() if next(child.parameters(), None) is not None]
    own = next(model.parameters(recurse=False), None)
    if len(children) != 1 or own is not None or next(children[0][1].children(), None) is None:
        return ""
    name, child = children[0]
    return "" if isinstance(child, nn.ModuleList | nn.Sequential) else name
