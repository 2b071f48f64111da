"""Parameters, FLOPs and traffic of parts that no formula describes, of one layer, measured at three tiny sizes.

The part runs on tensors without values, as in ``tracing.py``, or with values where it needs them. Each figure is
extended as a fixed amount, one per token, and one per token and position that it sees.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from lightning_llm.accounting.memory_trace import NeedsValues
from lightning_llm.accounting.parts import IN_LAYERS, LayerGroup, layer_groups, parts_to_measure
from lightning_llm.accounting.step_settings import Affine, Measured, MeasuredPart, weight_dtype
from lightning_llm.accounting.tracing import in_dtype, trace_mode
from lightning_llm.measure.meter import MemoryMeter
from lightning_llm.model.block import Block
from lightning_llm.model.build import build
from lightning_llm.model.config import ModelConfig
from lightning_llm.model.context import Context, CrossLayerState
from lightning_llm.model.position import Position
from lightning_llm.ops.dispatch import matmul_dtype

TINY = 32  # tokens, and two and four times as many; for attention and blocks the context, up to a limit
LONGEST_MEASURED = 1280  # tokens of a row in which attention is measured: more than twice those of a short attention
IN_CONTEXT = ("attention", "block")


def measure_parts(config: ModelConfig, precision: str, context_length: int) -> Measured:
    """Measure the parts that the accounting does not know; empty if it knows all.

    Args:
        config: With the parts; ``vocab_size`` must be known for a loss.
        precision: ``32-true``, ``bf16-true`` or ``bf16-mixed``.
        context_length: Of the run: attention differs between short and long contexts.

    Raises:
        ValueError: A class cannot be imported or made.
    """
    dtype = getattr(torch, weight_dtype(precision))
    owners = {group.prefix + kind: (kind, group) for group in layer_groups(config) for kind in IN_LAYERS}
    of_model = LayerGroup(config, [0])
    return {
        name: _measured(*owners.get(name, (name, of_model)), precision, dtype, context_length)
        for name in parts_to_measure(config)
    }


def _measured(kind: str, alike: LayerGroup, precision: str, dtype: torch.dtype, context_length: int) -> MeasuredPart:
    seq = max(2, min(context_length, LONGEST_MEASURED)) if kind in IN_CONTEXT else 2 * TINY
    try:
        with trace_mode("cpu", has_all_tiles=True):
            figures = _cases(kind, alike, seq, precision, dtype)
    except NeedsValues:
        figures = _cases(kind, alike, seq, precision, dtype)

    def affine(name: str) -> Affine:
        return _affine([case[name] for case in figures], seq)

    with torch.device("meta"):
        part = _built(kind, alike.config, alike.indices[:2][-1])
        different = alike.indices if kind == "attention" or kind in alike.config.custom_parts else ()
        more = sum(_elements(_built(kind, alike.config, layer)) - _elements(part) for layer in different)
    return MeasuredPart(
        parameters=_elements(part),
        more_parameters=more,
        matrices=sum(parameter.numel() for parameter in part.parameters() if parameter.dim() == 2),
        flops=affine("flops"),
        saved=affine("saved"),
        forward=affine("forward"),
        backward=affine("backward"),
    )


def _cases(kind: str, alike: LayerGroup, seq: int, precision: str, dtype: torch.dtype) -> list[dict[str, float]]:
    """The figures of one row and of two, and of one row of half the length, for the second of several layers."""
    config = alike.config
    first_index = alike.indices[0]
    second_index = alike.indices[:2][-1]
    part, norm = (in_dtype(_built(*args), dtype) for args in ((kind, config, second_index), ("norm", config, 0)))
    has_earlier = kind in IN_CONTEXT and first_index != second_index
    first = in_dtype(_built(kind, config, first_index), dtype) if has_earlier else part
    needs_position = kind in (*IN_CONTEXT, "position")
    position = in_dtype(_built("position", config), dtype) if needs_position else Position(config)
    classes = config.vocab_rows if kind == "loss" else 1
    head = in_dtype(nn.Linear(config.hidden_size, classes, bias=config.lm_head_bias), dtype)
    with torch.autocast("cpu", enabled=precision == "bf16-mixed"):
        # attention and MLP get what a norm before them returns
        of_norm = norm(torch.zeros(1, 1, config.hidden_size, dtype=dtype)).dtype
    is_inside = kind in ("attention", "mlp") and config.block != "post"
    figures = []
    for rows, length in ((1, seq), (2, seq), (1, seq // 2)):
        x = torch.randn(rows, length, config.hidden_size).to(of_norm if is_inside else dtype).requires_grad_()
        with torch.autocast("cpu", enabled=precision == "bf16-mixed"):
            positions = torch.arange(length)
            context = Context(positions, position, CrossLayerState(), position.prepare(positions, matmul_dtype(x)))
            if kind in IN_CONTEXT:
                for each in (first, part):
                    each.prepare(x, context) if hasattr(each, "prepare") else None
            if has_earlier:
                first(x, context)  # which leaves what later layers may ask for
        call = _call(kind, part, head, x, context)
        figures.append(_figures(call, [part, *([head] if kind == "loss" else [])], x, precision))
    return figures


def _built(kind: str, config: ModelConfig, layer: int = 0) -> Any:
    base = {"position": Position, "block": Block}.get(kind, nn.Module)
    size = config.hidden_size if kind == "norm" else None
    return build(kind, config, seed=0, path=kind, layer=layer, size=size, base=base)


def _elements(part: nn.Module) -> int:
    return sum(parameter.numel() for parameter in part.parameters())


def _call(kind: str, part: Any, head: nn.Module, x: Tensor, context: Context) -> Callable[[], Tensor]:
    """The part's forward pass on ``x``."""
    if kind == "position":
        kept: list[Any] = []  # it lives as long as the forward pass of the model

        def embed() -> Tensor:
            kept[:] = [part.prepare(context.positions, matmul_dtype(x))]
            out: Tensor = part.embed(x, context.positions)
            return out

        return embed
    if kind == "loss":
        targets = torch.zeros(x.shape[:2], dtype=torch.int64)
        return lambda: part(x, head, targets, None, None)[0]
    return partial(part, x) if kind in ("mlp", "norm") else partial(part, x, context)


def _figures(call: Callable[[], Tensor], modules: list[nn.Module], x: Tensor, precision: str) -> dict[str, float]:
    """Bytes saved for backward, temporaries of forward and of backward, and FLOPs of forward."""
    parameters = [parameter for module in modules for parameter in module.parameters()]
    counter = FlopCounterMode(display=False)
    autocast = torch.autocast("cpu", enabled=precision == "bf16-mixed")
    with MemoryMeter(exclude=[x, *modules]) as meter:
        with meter.phase("forward") as forward, counter, autocast:
            y = call()
        saved = meter.live_bytes - y.nbytes
        dy = torch.ones_like(y)
        with meter.phase("backward") as backward:
            gradients = torch.autograd.grad(y, [x, *parameters], dy, allow_unused=True)
    needed = saved + y.nbytes + dy.nbytes + sum(g.nbytes for g in gradients if g is not None)
    return {
        "flops": counter.get_total_flops(),
        "saved": saved,
        "forward": forward.peak_bytes - saved - y.nbytes,
        "backward": backward.peak_bytes - needed,
    }


def _affine(figures: list[float], seq: int) -> Affine:
    """From one row and two of ``seq`` tokens, and one of half as many: exact for any rows of that length."""
    one, two, shorter = figures
    of_row = two - one
    half = seq // 2
    fixed = one - of_row
    per_pair = (of_row * half / seq - (shorter - fixed)) / (half * (seq - half))
    return fixed, of_row / seq - seq * per_pair, per_pair
