"""Parts that the accounting does not know, of one layer, are measured on a CPU at three tiny sizes.

``accounting`` extends each figure as a fixed amount, one per token, and one per token and position that it sees. It
gets numbers alone, so it needs no torch.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from lightning_llm.accounting.counts import LONGEST_MEASURED, Growth, Measured, MeasuredPart, parts_to_measure
from lightning_llm.measure.meter import MemoryMeter
from lightning_llm.model.block import Block
from lightning_llm.model.build import build
from lightning_llm.model.config import ModelConfig
from lightning_llm.model.context import Context, Shared
from lightning_llm.model.position import Position
from lightning_llm.ops.conventions import matmul_dtype

TINY = 32  # tokens, and two and four times as many; for attention and blocks the context, up to a limit
IN_LAYERS = ("attention", "mlp", "block")
EXTENDED = "The estimate extrapolates {} from a measurement on one and two rows."


def measure_parts(config: ModelConfig, precision: str, context_length: int) -> Measured:
    """What the parts take that the accounting does not know; empty if it knows all.

    Args:
        config: With the parts; ``vocab_size`` must be known for a loss.
        precision: ``32-true``, ``bf16-true`` or ``bf16-mixed``.
        context_length: Of the run: attention differs between short and long contexts.

    Raises:
        ValueError: A class cannot be imported or made.
    """
    dtype = torch.bfloat16 if precision == "bf16-true" else torch.float32
    return {kind: _measured(kind, config, precision, dtype, context_length) for kind in parts_to_measure(config)}


def _measured(kind: str, config: ModelConfig, precision: str, dtype: torch.dtype, context_length: int) -> MeasuredPart:
    layers = config.num_hidden_layers if kind in IN_LAYERS else 1
    first, part = (_built(kind, config, layer).to(dtype) for layer in (0, min(1, layers - 1)))
    position, norm = (_built(each, config).to(dtype) for each in ("position", "norm"))
    head = nn.Linear(config.hidden_size, config.vocab_rows, bias=config.lm_head_bias).to(dtype)
    with torch.autocast("cpu", enabled=precision == "bf16-mixed"):
        # attention and MLP get what a norm before them returns
        of_norm = norm(torch.zeros(1, 1, config.hidden_size, dtype=dtype)).dtype
    is_inside = kind in ("attention", "mlp") and config.block != "post"
    seq = max(2, min(context_length, LONGEST_MEASURED)) if kind in ("attention", "block") else 2 * TINY
    found = []
    for rows, length in ((1, seq), (2, seq), (1, seq // 2)):
        x = torch.randn(rows, length, config.hidden_size).to(of_norm if is_inside else dtype).requires_grad_()
        with torch.autocast("cpu", enabled=precision == "bf16-mixed"):
            positions = torch.arange(length)
            context = Context(positions, position, Shared(), position.prepare(positions, matmul_dtype(x)))
            if kind in ("attention", "block"):
                for each in (first, part):
                    each.prepare(x, context) if hasattr(each, "prepare") else None
                if layers > 1:
                    first(x, context)  # which leaves what later layers may ask for
        call = _call(kind, part, head, x, context)
        found.append(_figures(call, [part, *([head] if kind == "loss" else [])], x, precision))

    def growth(name: str) -> Growth:
        return _growth([each[name] for each in found], seq)

    with torch.device("meta"):
        in_all = sum(_elements(_built(kind, config, layer)) for layer in range(layers))
    return MeasuredPart(
        parameters=_elements(part),
        more_parameters=in_all - layers * _elements(part),
        matrices=sum(parameter.numel() for parameter in part.parameters() if parameter.dim() == 2),
        flops=growth("flops"),
        saved=growth("saved"),
        forward=growth("forward"),
        backward=growth("backward"),
        itemsize=int(found[0]["itemsize"]),
    )


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
    counter, autocast = FlopCounterMode(display=False), torch.autocast("cpu", enabled=precision == "bf16-mixed")
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
        "itemsize": y.itemsize,
    }


def _growth(found: list[float], seq: int) -> Growth:
    """From one row and two of ``seq`` tokens, and one of half as many: exact for any rows of that length."""
    one, two, shorter = found
    of_row, half = two - one, seq // 2
    fixed = one - of_row
    per_pair = (of_row * half / seq - (shorter - fixed)) / (half * (seq - half))
    return fixed, of_row / seq - seq * per_pair, per_pair
