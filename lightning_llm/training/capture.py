"""Forward and backward of a micro-batch as CUDA graphs: a replay launches all their kernels at once.

A small model leaves a GPU waiting for the host, which starts each kernel from Python. A CUDA graph records the kernels
of a function, with the addresses that they read and write, and starts them without Python. So a captured micro-batch
reads its tokens from, and writes its loss and its gradients to, the same memory every time. It runs the kernels of an
eager one in the same order. Clipping and the optimizer stay outside: the learning rate is a number of Python, which a
graph would freeze.

What Python does in forward and backward is done when the graphs are recorded, and never again: a part must not depend
on anything but its tensors. See https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import _get_current_dispatch_mode

from lightning_llm.data.batches import Batch
from lightning_llm.model.parts import name_of

RECORDED = ("training_step", "loss")  # of LanguageModel
READS_VALUES = "mixture_of_experts"  # how many tokens each expert gets decides the sizes of its matmuls
Static = tuple[Sequence[Tensor], Callable[[], object]]


def capture_problems(model: Any, trainer: Any) -> Iterator[str]:
    """Problems that keep the step of a run from being captured; none, unless ``trainer.capture`` asks for it."""
    if not getattr(trainer, "capture", False):
        return
    strategy = trainer.strategy
    kind = type(model)
    if strategy.root_device.type != "cuda":
        yield f"trainer.capture true needs a GPU with CUDA, this run is on {strategy.root_device.type}: leave it out"
    if not isinstance(strategy, SingleDeviceStrategy):
        yield (
            f"trainer.capture true is for one device, got {type(strategy).__name__}: leave it out, or set "
            "trainer.devices to 1 and trainer.strategy to auto"
        )
    for name in RECORDED:
        if not getattr(getattr(kind, name, None), "__module__", "").startswith("lightning_llm."):
            yield (
                f"trainer.capture true records the {name} of LanguageModel, and {kind.__qualname__} has its own: "
                "leave it out"
            )
            return
    if any(name_of(layer.mlp) == READS_VALUES for layer in model.architecture.layer_configs):
        yield (
            f"trainer.capture true cannot record architecture.mlp {READS_VALUES}, which reads how many tokens each "
            "expert gets: leave it out"
        )


class Graphs(Protocol):
    """Recorder of functions, which can be replayed."""

    def record(self, function: Callable[[], Sequence[Tensor]]) -> Static:
        """Record a function without running it.

        Returns:
            The tensors that it returns, which each replay overwrites, and what replays it.
        """


class CudaGraphs:
    """CUDA graphs that share a pool of memory, which nothing else uses."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, function: Callable[[], Sequence[Tensor]]) -> Static:
        """Record a function as a graph; the tensors that it makes are in the pool."""
        graph = torch.cuda.CUDAGraph()
        # other threads copy batches and save checkpoints meanwhile: that is not part of the graph
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            outputs = function()
        return outputs, graph.replay


class CapturedLoss:
    """The loss of micro-batches of a model, replayed from graphs together with its backward pass.

    The first micro-batch of a shape runs eagerly, and so does one whose shape is not that of the one before, such as
    the last of an epoch: it is the warm-up in which libraries and kernels are loaded. The second in a row is recorded.
    Under an operator mode, such as the memory profiler's, micro-batches run eagerly.

    Args:
        model: The LanguageModel, on its device.
        graphs: What records. ``None``: CUDA graphs.
    """

    def __init__(self, model: Any, graphs: Graphs | None = None) -> None:
        self._model = model
        self._graphs = CudaGraphs() if graphs is None else graphs
        self._tensors = [*model.parameters(), *model.buffers()]
        self._last: Any = None  # the conditions of the micro-batch before
        self._recorded: tuple[Any, _Recording] | None = None  # with its conditions

    def __call__(self, batch: Batch) -> Tensor:
        """The loss as of ``model.loss``; its ``backward`` gives the parameters their gradients.

        Raises:
            ValueError: The step cannot be recorded, such as one that reads a value of the device.
        """
        if _get_current_dispatch_mode() is not None or torch.is_anomaly_enabled():
            return self._eager(batch)
        tensors = {name: value for name, value in batch.items() if isinstance(value, Tensor)}
        conditions = self._conditions(tensors)
        is_repeated = conditions == self._last
        self._last = conditions
        if self._recorded is not None and self._recorded[0] == conditions:
            return self._recorded[1].loss(tensors)
        if not is_repeated:
            return self._eager(batch)
        self._recorded = None  # frees its memory before the next one takes some
        recording = _Recording(self._model, tensors, self._graphs)
        self._recorded = conditions, recording
        return recording.loss(tensors)

    def _eager(self, batch: Batch) -> Tensor:
        loss: Tensor = self._model.loss(batch)
        return loss

    def _conditions(self, batch: Batch) -> Any:
        """Everything that a recording depends on, besides the values in the batch and in the model's tensors."""
        return (
            {name: (tensor.shape, tensor.dtype) for name, tensor in batch.items()},
            [(tensor.data_ptr(), tensor.requires_grad) for tensor in self._tensors],
            _autocast_of(self._model.device.type),
        )


class _Recording:
    """Forward and backward of micro-batches of one shape.

    They are recorded twice: with no gradients, as for the first micro-batch of a step, and with some to add to.
    """

    def __init__(self, model: Any, batch: Batch, graphs: Graphs) -> None:
        self._model = model
        self._graphs = graphs
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._inputs = {name: tensor.clone() for name, tensor in batch.items()}
        self._anchor = torch.zeros((), device=model.device, requires_grad=True)  # lets autograd call the backward pass
        before = [parameter.grad for parameter in self._parameters]
        self._attach([None] * len(before))
        self._first = self._record()
        self._gradients = [parameter.grad for parameter in self._parameters]
        self._adding: _Pass | None = None
        self._attach(before)

    def loss(self, batch: Batch) -> Tensor:
        """The loss of a micro-batch of that shape."""
        for name, tensor in batch.items():
            self._inputs[name].copy_(tensor, non_blocking=True)
        chosen = self._first
        if any(parameter.grad is not None for parameter in self._parameters):
            self._take_over()
            self._adding = self._adding or self._record()
            chosen = self._adding
        loss: Tensor = _Replay.apply(self._anchor, self, chosen)  # type: ignore[no-untyped-call]
        # copies: the next replay overwrites the recorded tensors, and what is logged waits for its turn
        self._model.loss_count, self._model.auxiliary_loss = (
            None if tensor is None else tensor.clone() for tensor in (chosen.count, chosen.auxiliary_loss)
        )
        return loss

    def backward(self, chosen: "_Pass", d_loss: Tensor) -> None:
        """Give the parameters their gradients, or add to those that they have."""
        if chosen is self._adding:
            self._take_over()  # they may have been freed since the forward pass
        chosen.d_loss.copy_(d_loss)
        chosen.replay_backward()
        self._attach(self._gradients)

    def _record(self) -> "_Pass":
        return _Pass(self._model, self._inputs, self._parameters, self._graphs)

    def _take_over(self) -> None:
        """Move the gradients of the parameters into the recorded tensors, which then are the parameters'."""
        for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
            if gradient is None or parameter.grad is gradient:
                continue
            if parameter.grad is None:
                gradient.zero_()
            else:
                gradient.copy_(parameter.grad)
            parameter.grad = gradient

    def _attach(self, gradients: Sequence[Tensor | None]) -> None:
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            parameter.grad = gradient


class _Pass:
    """A recorded forward and backward pass.

    Attributes:
        replay_forward: Computes ``loss``, ``count`` and ``auxiliary_loss``.
        replay_backward: Computes the gradients from ``d_loss``.
        loss: As ``model.loss`` returns it.
        count: The model's ``loss_count``.
        auxiliary_loss: The model's.
        d_loss: Gradient of the loss.
    """

    def __init__(self, model: Any, inputs: Batch, parameters: Sequence[Tensor], graphs: Graphs) -> None:
        kind = model.device.type
        live: list[Tensor | None] = []  # loss, count and auxiliary loss, with what backward needs

        def forward() -> list[Tensor]:
            model.loss_count = model.auxiliary_loss = None
            # without the cache: a weight that autocast had cast before would be read, stale, by every replay
            with torch.autocast(kind, **_autocast_of(kind), cache_enabled=False):
                loss = model.loss(inputs)
            live[:] = loss, model.loss_count, model.auxiliary_loss
            return [tensor for tensor in live if tensor is not None]

        def backward() -> list[Tensor]:
            with torch.autocast(kind, enabled=False):
                torch.autograd.backward(live[0], self.d_loss)  # type: ignore[arg-type]
            return [parameter.grad for parameter in parameters if parameter.grad is not None]

        try:
            outputs, self.replay_forward = graphs.record(forward)
            recorded = iter([output.detach() for output in outputs])
            has_count, has_auxiliary = (tensor is not None for tensor in live[1:])
            self.loss = next(recorded)
            self.count = next(recorded) if has_count else None
            self.auxiliary_loss = next(recorded) if has_auxiliary else None
            self.d_loss = torch.ones_like(self.loss)
            _, self.replay_backward = graphs.record(backward)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            reason = str(error).strip().partition("\n")[0]
            raise ValueError(
                f"trainer.capture true: the training step cannot be recorded ({reason}). A part that reads a value of "
                "the device, as .item() does, must not: change it, or leave trainer.capture out"
            ) from error


class _Replay(torch.autograd.Function):
    """A replayed forward pass, whose backward pass is replayed too."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, recording: _Recording, chosen: _Pass) -> Tensor:
        ctx.recording = recording
        ctx.chosen = chosen
        chosen.replay_forward()
        return chosen.loss.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_loss: Tensor) -> tuple[None, None, None]:
        ctx.recording.backward(ctx.chosen, d_loss)
        return None, None, None


def _autocast_of(kind: str) -> dict[str, Any]:
    """The arguments of ``torch.autocast`` that are in force."""
    return {"enabled": torch.is_autocast_enabled(kind), "dtype": torch.get_autocast_dtype(kind)}
