"""An MLP class that the accounting does not know: one layer is measured on a CPU at two tiny numbers of tokens.

``accounting`` extends the two as a line in the tokens. It gets numbers alone, so it needs no torch.
"""

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from lightning_llm.accounting.counts import MeasuredMLP
from lightning_llm.measure.meter import MemoryMeter
from lightning_llm.model.config import BUILT_IN_MLPS, ModelConfig
from lightning_llm.model.mlp import build_mlp
from lightning_llm.model.weights import drawing

TINY = 32  # tokens that an MLP is measured at, and twice as many
EXTENDED = f"The estimate extrapolates {{}} from a measurement at {TINY} and {2 * TINY} tokens."


def measure_mlp(config: ModelConfig, precision: str) -> MeasuredMLP | None:
    """What one layer of the config's MLP takes; ``None`` for a built-in one, which the accounting knows.

    Raises:
        ValueError: The class cannot be imported.
    """
    if config.mlp in BUILT_IN_MLPS:
        return None
    with drawing(0, "mlp"):
        mlp = build_mlp(config)
    if precision == "bf16-true":
        mlp.to(torch.bfloat16)
    once, twice = (_measured_bytes(mlp, config.hidden_size, tokens, precision) for tokens in (TINY, 2 * TINY))
    saved, forward, backward, flops = ((2.0 * a - b, (b - a) / TINY) for a, b in zip(once, twice, strict=True))
    elements = sum(parameter.numel() for parameter in mlp.parameters())
    return MeasuredMLP(parameters=elements, flops=round(flops[1]), saved=saved, forward=forward, backward=backward)


def _measured_bytes(mlp: nn.Module, hidden: int, tokens: int, precision: str) -> tuple[int, int, int, int]:
    """Bytes saved for backward, temporaries of forward and of backward, and FLOPs of forward."""
    parameters = list(mlp.parameters())
    x = torch.zeros(1, tokens, hidden, dtype=next((p.dtype for p in parameters), None), requires_grad=True)
    counter, autocast = FlopCounterMode(display=False), torch.autocast("cpu", enabled=precision == "bf16-mixed")
    with MemoryMeter(exclude=[mlp, x]) as meter:
        with meter.phase("forward") as forward, counter, autocast:
            y = mlp(x)
        saved = meter.live_bytes - y.nbytes
        dy = torch.ones_like(y)
        with meter.phase("backward") as backward:
            gradients = torch.autograd.grad(y, [x, *parameters], dy, allow_unused=True)
    needed = saved + y.nbytes + dy.nbytes + sum(g.nbytes for g in gradients if g is not None)
    return saved, forward.peak_bytes - saved - y.nbytes, backward.peak_bytes - needed, counter.get_total_flops()
