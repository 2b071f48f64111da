"""A training step of the real model, traced: it runs on tensors that have sizes and no values, under the meter.

The model is built under torch's ``FakeTensorMode``, and forward, loss and backward run as in training. What they
allocate, and how long it lives, is counted by ``measure.attribution``, as in a real step. The operators take the tiles
and kernels of the device that is meant (``ops/traced.py``). Tensors are those of a CPU: fake CUDA tensors abort a CPU
build of torch in backward.

A part whose shapes depend on values cannot be traced. Then the step runs with values, on small batches: see
``accounting/memory.py``.
"""

import contextlib
from collections.abc import Iterator
from functools import cache, partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_llm.accounting.memory_trace import LiveBytes, MemoryTrace, NeedsValues, Stage, Table, TracePoint
from lightning_llm.accounting.step_settings import StepSettings, weight_dtype
from lightning_llm.measure.attribution import AttributedMeter
from lightning_llm.measure.meter import Watched, WithoutCompiler
from lightning_llm.model.block import BRANCHES
from lightning_llm.model.config import ModelConfig
from lightning_llm.model.transformer import Transformer
from lightning_llm.ops import traced

STAGES_OF_ROOT: dict[str, Stage] = {
    "embed_tokens": "embeddings",
    "embed_positions": "embeddings",
    "dropout": "embeddings",
    "norm": "final norm",
}
KINDS = {name: kind for kind, name in BRANCHES.items()}
PARTS_OF_ROOT = {**STAGES_OF_ROOT, "norm": "norms"}

OF_VALUES = DataDependentOutputException, DynamicOutputShapeException  # torch's errors
EMPTY = [getattr(torch.ops.aten, name) for name in ("empty", "empty_like", "new_empty")]
EMPTY += [torch.ops.aten.empty_strided, torch.ops.aten.new_empty_strided]

Made = TypeVar("Made", bound=nn.Module)


@contextlib.contextmanager
def trace_mode(device: str, *, has_values: bool = False, has_all_tiles: bool = False) -> Iterator[None]:
    """Runs what is inside on tensors without values, with the operators of a device.

    Args:
        device: Its type, ``cpu`` or ``cuda``.
        has_values: Use tensors with values instead.
        has_all_tiles: Let loops run over all tiles, so that FLOPs can be counted.

    Raises:
        NeedsValues: What runs inside depends on values.
    """
    modes: list[Any] = [_NoGarbage()] if has_values else [_NoValues(), _Writes()]  # type: ignore[no-untyped-call]
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(traced.tracing(device, _fused_attention, has_all_tiles=has_all_tiles or has_values))
            stack.enter_context(_kernels_of(device))
            for mode in modes:
                stack.enter_context(mode)
            yield
    except OF_VALUES as error:
        raise NeedsValues(str(error)) from None
    except ValueError as error:  # one with a cause: the constructor of a part failed, perhaps for lack of values
        if has_values or error.__cause__ is None:
            raise
        raise NeedsValues(str(error.__cause__)) from None


def trace_step(config: ModelConfig, settings: StepSettings, *, has_values: bool = False) -> MemoryTrace:
    """Traces the last micro-batch of a step.

    Args:
        config: ``vocab_size`` must be known.
        settings: Of the step. What processes share, and the optimizer, have no influence here. With ``document_mask``
            each row counts as one document, which needs the most.
        has_values: Run the step instead.

    Raises:
        ValueError: The context is too long for the model, or a part cannot be made.
        NeedsValues: The step depends on values.
    """
    with trace_mode(settings.device, has_values=has_values):
        model = in_dtype(Transformer(config, seed=0), getattr(torch, weight_dtype(settings.precision)))
        model.tie_weights()
        if settings.accumulation > 1:  # later micro-batches add to the gradients of the first
            for parameter in filter(lambda parameter: parameter.requires_grad, model.parameters()):
                parameter.grad = torch.empty_like(parameter)
        shape = settings.rows, settings.context_length
        names = ("input_ids", "targets", *(["documents"] if settings.document_mask else []))
        batch = {name: torch.zeros(shape, dtype=torch.int64) for name in names}
        meter = _StepMeter(model, inputs=batch)
        try:
            with meter:
                meter.begin("forward")
                with torch.autocast("cpu", torch.bfloat16, enabled=settings.precision == "bf16-mixed"):
                    loss = _loss(model, batch, settings.loss_chunks)
                meter.begin("backward")
                loss.backward()  # type: ignore[no-untyped-call]
                del loss
        finally:
            meter.close()
        return meter.trace()


def layer_shapes(config: ModelConfig) -> list[dict[str, tuple[int, ...]]]:
    """The shapes of the parameters of each layer, by name."""
    try:
        with trace_mode("cpu"):
            layers = Transformer(config, seed=0).layers
    except NeedsValues:
        layers = Transformer(config, seed=0).layers
    return [{name: tuple(p.shape) for name, p in layer.named_parameters()} for layer in layers]


def in_dtype(made: Made, dtype: torch.dtype) -> Made:
    """A module in ``dtype``: ``Module.to`` cannot swap fake parameters that something refers to."""
    for module in made.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.is_floating_point() and parameter.dtype != dtype:
                setattr(module, name, nn.Parameter(parameter.detach().to(dtype), parameter.requires_grad))
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_floating_point() and buffer.dtype != dtype:
                setattr(module, name, buffer.to(dtype))
    return made


def _loss(model: Transformer, batch: dict[str, Tensor], num_chunks: int | None) -> Tensor:
    """Loss as ``LanguageModel.loss`` computes it, with the same tensors alive."""
    hidden = model(batch["input_ids"], documents=batch.get("documents"))
    total, count = model.objective(hidden, model.lm_head, batch["targets"], weights=None, num_chunks=num_chunks)
    loss: Tensor = total / count.where(count > 0, 1)
    added = model.auxiliary_loss()
    return loss if added is None else loss + added


class _NoValues(WithoutCompiler, FakeTensorMode):  # type: ignore[no-untyped-call]
    """Torch's mode, without its detour by the compiler at each operator."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.dispatch(func, types, args, kwargs or {})


class _Writes(WithoutCompiler, TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Operators that only write values into their arguments do nothing: they allocate nothing that can be seen.

    Torch would infer shapes for each of them again, which takes half of the time of a trace.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        names = _written(func)
        if names is None:
            return func(*args, **kwargs)
        given = {**dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)), **kwargs}
        results = [given[name] for name in names]
        if not all(result.numel() for result in results):  # an empty ``out=`` gets its size from the operator
            return func(*args, **kwargs)
        return results[0] if len(results) == 1 else tuple(results)


@cache
def _written(operator: Any) -> list[str] | None:
    """The arguments that an operator writes and returns; ``None``: it returns something else, or changes shapes."""
    schema = operator._schema
    written = {
        frozenset(argument.alias_info.before_set): argument.name
        for argument in schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    }
    sets = [None if result.alias_info is None else frozenset(result.alias_info.before_set) for result in schema.returns]
    if not sets or torch.Tag.inplace_view in operator.tags or any(found not in written for found in sets):
        return None
    return [written[found] for found in sets if found is not None]


class _NoGarbage(WithoutCompiler, TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Memory that nothing writes to is zero: the stand-ins for kernels write little, and what runs reads values."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result.zero_() if func.overloadpacket in EMPTY else result


@contextlib.contextmanager
def _kernels_of(device: str) -> Iterator[None]:
    """Lets functions of torch that allocate otherwise on CUDA than on a CPU do so.

    A function mode of torch would not do: it is off in what backward recomputes.
    """
    if device != "cuda":
        yield
        return
    replaced: dict[str, Any] = {"dropout": _dropout, "rms_norm": _rms_norm, "layer_norm": _layer_norm}
    replaced["softmax"] = partial(_softmax, F.softmax)
    before = {name: getattr(F, name) for name in replaced}
    for name, function in replaced.items():
        setattr(F, name, function)
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(F, name, function)


def _dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    return torch.native_dropout(x, p, training)[0] if training and p else x


def _softmax(softmax: Any, x: Tensor, *args: Any, **options: Any) -> Tensor:
    result: Tensor = softmax(_as_autocast(x), *args, **options)
    return result


def _as_autocast(x: Tensor) -> Tensor:
    """An input as autocast of CUDA passes it to norms and softmax: in float32. That of a CPU leaves it."""
    return x.float() if torch.is_autocast_enabled("cpu") and x.is_floating_point() and x.element_size() < 4 else x


class _FusedNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, statistics: int, *weights: Tensor) -> Tensor:
        rows = x.shape[:-1]
        saved = [x.new_empty(rows, dtype=torch.float32) for _ in range(statistics)]
        ctx.save_for_backward(x, *weights, *saved)
        ctx.count = len(weights)
        return torch.empty_like(x).copy_(x)  # values of this kind, where values matter

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, *held = ctx.saved_tensors
        return torch.empty_like(x).copy_(dy), None, *(torch.empty_like(weight) for weight in held[: ctx.count])


def _rms_norm(x: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    return _fused_norm(x, [weight], statistics=1)


def _layer_norm(
    x: Tensor, normalized_shape: Any, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    return _fused_norm(x, [weight, bias], statistics=2)


def _fused_norm(x: Tensor, weights: list[Tensor | None], statistics: int) -> Tensor:
    given = [weight for weight in weights if weight is not None]
    out: Tensor = _FusedNorm.apply(_as_autocast(x), statistics, *given)  # type: ignore[no-untyped-call]
    return out


class _FusedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, form: str) -> Tensor:
        out = torch.empty_like(query)
        if form == "efficient":  # whatever the strides of queries, it writes head after head of a position
            out = torch.empty_like(query.transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2)
        ctx.save_for_backward(query, key, value, out, query.new_empty(query.shape[:-1], dtype=torch.float32))
        return out.copy_(query)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> Any:
        return *(torch.empty_like(x) for x in ctx.saved_tensors[:3]), None


def _fused_attention(query: Tensor, key: Tensor, value: Tensor, form: str) -> Tensor:
    """Stand-in for a kernel of CUDA: the result and one number for each row of scores are saved."""
    out: Tensor = _FusedAttention.apply(query, key, value, form)  # type: ignore[no-untyped-call]
    return out


class _StepMeter(AttributedMeter):  # type: ignore[no-untyped-call]
    """The meter of a traced step, which knows where in the step each allocation is."""

    def __init__(self, model: Transformer, inputs: Any) -> None:
        self._points: list[TracePoint | None] = []  # of each event
        super().__init__(model, inputs=inputs)
        self._device = None  # one for all tensors; to ask a fake tensor for its device costs as much as an operator

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:  # 6 of 10 calls: autograd asks all fake tensors
            return torch.device("cpu")
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _count(self, watched: Watched, change: int) -> None:
        super()._count(watched, change)
        self._points.append(self._point() if self._phase and change > 0 else None)

    def _point(self) -> TracePoint:
        phase: Any = "recomputing" if self._phase == "backward" and self._running else self._phase
        first, *rest = self._module_now().split(".")
        if first != "layers":
            return TracePoint(phase, STAGES_OF_ROOT.get(first, "loss"))
        return TracePoint(phase, "mlp" if rest[1:2] == [BRANCHES["mlp"]] else "attention", int(rest[0]))

    def trace(self) -> MemoryTrace:
        """The step, from its events."""
        live: Table = {}
        points: dict[TracePoint, LiveBytes] = {}
        total = gradients = 0
        events = zip(self._events, self._points, strict=True)
        for (_, change, owner), point in sorted(events, key=lambda event: event[0].operator > 0):  # as ``Timeline``
            if owner.category == "inputs":
                continue
            key = owner.category, part_of(owner.module)
            live[key] = live.get(key, 0) + change
            total += change
            gradients += change if owner.category == "gradients" else 0
            if point is None:
                continue
            most = points.get(point)
            if most is None or total > most.total:
                table = {key: size for key, size in live.items() if size}
                least = 0 if most is None else most.without_gradients
                points[point] = LiveBytes(total, max(least, total - gradients), table)
            elif total - gradients > most.without_gradients:
                points[point] = most._replace(without_gradients=total - gradients)
        saved: dict[str, int] = {}
        sample = self.timeline().saved
        for (category, module), size in sample.table.items() if sample is not None else ():
            if category == "activations":
                saved[part_of(module)] = saved.get(part_of(module), 0) + size
        sizes = [(parameter.nbytes, parameter.requires_grad) for parameter in self._model.parameters()]
        return MemoryTrace(
            parameters=sum(size for size, _ in sizes),
            gradients=sum(size for size, is_trained in sizes if is_trained),
            saved=saved,
            points=points,
        )


def part_of(module: str) -> str:
    """The part of the model that a module of the meter belongs to."""
    first, *rest = module.split(".")
    if first != "layers":
        return PARTS_OF_ROOT.get(first, "loss")
    name = rest[1] if len(rest) > 1 else ""
    return KINDS.get(name, "norms" if "norm" in name else "residual stream")
