"""Parts that the accounting does not know, of one layer, are measured on a CPU at three tiny sizes.

``accounting`` extends each figure as a fixed amount, one per token, and one per token and position that it sees. It
gets numbers alone, so it needs no torch. A large built-in part is measured smaller in all its widths: its activations
grow in proportion to them.
"""

import dataclasses
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from lightning_llm.accounting.parts import IN_LAYERS, LayerGroup, layer_groups, parts_to_measure
from lightning_llm.accounting.settings import LONGEST_MEASURED, Affine, Measured, MeasuredPart, weight_dtype
from lightning_llm.io.trust import CLASS_PATH, INIT_ARGS
from lightning_llm.measure.meter import MemoryMeter
from lightning_llm.model.block import Block
from lightning_llm.model.build import build
from lightning_llm.model.config import ModelConfig
from lightning_llm.model.context import Context, Shared
from lightning_llm.model.parts import arguments_of, name_of, option_of
from lightning_llm.model.position import Position
from lightning_llm.ops.dispatch import matmul_dtype

# of a built-in part that is measured as it is
MOST_ELEMENTS, MEASURED_EXPERTS, MOST_ACTIVATIONS = 1 << 25, 256, 1 << 24
TINY = 32  # tokens, and two and four times as many; for attention and blocks the context, up to a limit
IN_CONTEXT = ("attention", "block")
WIDTHS = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
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
    dtype = getattr(torch, weight_dtype(precision))
    owners = {group.prefix + kind: (kind, group) for group in layer_groups(config) for kind in IN_LAYERS}
    of_model = LayerGroup(config, [0])
    return {
        name: _measured(*owners.get(name, (name, of_model)), precision, dtype, context_length)
        for name in parts_to_measure(config)
    }


def _measured(kind: str, alike: LayerGroup, precision: str, dtype: torch.dtype, context_length: int) -> MeasuredPart:
    seq = max(2, min(context_length, LONGEST_MEASURED)) if kind in IN_CONTEXT else 2 * TINY
    narrow, scale = _shrunk(kind, alike.config, seq)
    figures = _cases(kind, dataclasses.replace(alike, config=narrow), seq, precision, dtype)

    def affine(name: str, scale: int = scale) -> Affine:
        return _affine([scale * case[name] for case in figures], seq)

    with torch.device("meta"):
        part = _built(kind, alike.config, alike.indices[:2][-1])
        different = alike.indices if kind == "attention" or kind in alike.config.custom_parts else ()
        more = sum(_elements(_built(kind, alike.config, layer)) - _elements(part) for layer in different)
    return MeasuredPart(
        parameters=_elements(part),
        more_parameters=more,
        matrices=sum(parameter.numel() for parameter in part.parameters() if parameter.dim() == 2),
        flops=affine("flops", scale**2),
        saved=affine("saved"),
        forward=affine("forward"),
        backward=affine("backward"),
        itemsize=int(figures[0]["itemsize"]),
    )


def _cases(kind: str, alike: LayerGroup, seq: int, precision: str, dtype: torch.dtype) -> list[dict[str, float]]:
    """The figures of one row and of two, and of one row of half the length, for the second of several layers."""
    config, first_index, second_index = alike.config, alike.indices[0], alike.indices[:2][-1]
    part, norm = _built(kind, config, second_index).to(dtype), _built("norm", config, 0).to(dtype)
    has_earlier = kind in IN_CONTEXT and first_index != second_index
    first = _built(kind, config, first_index).to(dtype) if has_earlier else part
    needs_position = kind in (*IN_CONTEXT, "position")
    position = _built("position", config).to(dtype) if needs_position else Position(config)
    classes = config.vocab_rows if kind == "loss" else 1
    head = nn.Linear(config.hidden_size, classes, bias=config.lm_head_bias).to(dtype)
    with torch.autocast("cpu", enabled=precision == "bf16-mixed"):
        # attention and MLP get what a norm before them returns
        of_norm = norm(torch.zeros(1, 1, config.hidden_size, dtype=dtype)).dtype
    is_inside = kind in ("attention", "mlp") and config.block != "post"
    figures = []
    for rows, length in ((1, seq), (2, seq), (1, seq // 2)):
        x = torch.randn(rows, length, config.hidden_size).to(of_norm if is_inside else dtype).requires_grad_()
        with torch.autocast("cpu", enabled=precision == "bf16-mixed"):
            positions = torch.arange(length)
            context = Context(positions, position, Shared(), position.prepare(positions, matmul_dtype(x)))
            if kind in IN_CONTEXT:
                for each in (first, part):
                    each.prepare(x, context) if hasattr(each, "prepare") else None
            if has_earlier:
                first(x, context)  # which leaves what later layers may ask for
        call = _call(kind, part, head, x, context)
        figures.append(_figures(call, [part, *([head] if kind == "loss" else [])], x, precision))
    return figures


def _shrunk(kind: str, config: ModelConfig, seq: int) -> tuple[ModelConfig, int]:
    """The config with a built-in part narrow enough to be measured, and how many times as wide the part is."""
    if kind not in ("mlp", "attention") or kind in config.custom_parts:
        return config, 1
    sizes = {name: int(getattr(config, name)) for name in WIDTHS}
    has_experts = kind == "mlp" and option_of("mlp", config.mlp, "num_experts") is not None
    experts, top_k = (option_of("mlp", config.mlp, name) or 1 for name in ("num_experts", "top_k"))
    hidden, wide, heads, kv_heads = sizes.values()

    def fits(scale: int) -> bool:
        if kind == "mlp":
            is_small = 3 * hidden * wide * experts <= MOST_ELEMENTS * scale**3 and experts <= MEASURED_EXPERTS * scale
            return is_small and 2 * seq * top_k * (hidden + wide) <= MOST_ACTIVATIONS * scale
        projections = 2 * hidden * (config.head_dim or 1) * (heads + kv_heads)
        return projections <= 2 * MOST_ELEMENTS * scale**2 and heads * seq**2 <= MOST_ACTIVATIONS * scale

    scale = next(scale for scale in (1 << power for power in itertools.count()) if fits(scale))
    if scale == 1:
        return config, 1
    narrow: dict[str, Any] = {name: max(1, size // scale) for name, size in sizes.items()}
    narrow["num_attention_heads"] = narrow["num_key_value_heads"] * (heads // kv_heads)
    narrow["max_position_embeddings"] = min(config.max_position_embeddings, 2 * LONGEST_MEASURED)
    if has_experts:
        fewer = max(2, experts // scale)
        options = {**arguments_of(config.mlp), "num_experts": fewer, "top_k": min(top_k, fewer)}
        narrow["mlp"] = {CLASS_PATH: name_of(config.mlp), INIT_ARGS: options}
    return dataclasses.replace(config, **narrow), scale


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


def _affine(figures: list[float], seq: int) -> Affine:
    """From one row and two of ``seq`` tokens, and one of half as many: exact for any rows of that length."""
    one, two, shorter = figures
    of_row, half = two - one, seq // 2
    fixed = one - of_row
    per_pair = (of_row * half / seq - (shorter - fixed)) / (half * (seq - half))
    return fixed, of_row / seq - seq * per_pair, per_pair
