"""``python -m benchmarks swiglu``: memory and time of the MLP in every implementation, as stacks of layers.

Variants: the standard module; the notebook's (a Function that saves g and u, or nothing, with full-width buffers);
``torch.utils.checkpoint`` around the standard module; ``torch.compile`` of it; Liger-Kernel where it is installed and
there is CUDA; ours at each level, and level 1 at several numbers of chunks. With a norm before each MLP: the standard
pair, and level 2, where the norm belongs to the op.
"""

import copy
import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from benchmarks.harness import Bench, Case, Request, measure
from benchmarks.rows import Row
from benchmarks.workloads import ShapeSizes
from lightning_llm.model.mlp import SwiGLU
from lightning_llm.ops.swiglu import memory_optimized_swiglu

SHAPES = {
    "notebook": [
        "16x128x512x2048x2",
        "32x128x512x2048x2",
        "8x512x1024x4096x3",
        "16x512x1024x4096x3",
        "4x1024x4096x16384x5",
    ],
    "llama-3-8b": ["1x2048x4096x14336x1"],
}
CHUNKS = (1, 4, 16)


def run(request: Request) -> Iterator[Row]:
    """A row for each variant."""
    batch, seq, *_ = request.sizes.values()
    yield from measure(cases(request.sizes, getattr(torch, request.dtype), request.device), request, tokens=batch * seq)


def cases(sizes: ShapeSizes, dtype: torch.dtype, device: str) -> dict[str, Case]:
    """The variants, all with the same weights and input."""
    batch, seq, hidden, intermediate, layers = sizes.values()
    torch.manual_seed(0)
    mlps = nn.ModuleList(SwiGLU(hidden, intermediate) for _ in range(layers)).to(device, dtype)
    norms = nn.ModuleList(nn.RMSNorm(hidden, eps=1e-6) for _ in range(layers)).to(device, dtype)
    x = torch.randn(batch, seq, hidden, device=device, dtype=dtype, requires_grad=True)
    gradient = torch.randn(batch, seq, hidden, device=device, dtype=dtype)

    def stack(layer: Callable[[Any, Any, Tensor], Tensor], modules: Any = mlps, residual: bool = False) -> Case:
        def forward() -> Tensor:
            y = x
            for mlp, norm in zip(modules, norms, strict=True):
                out = layer(mlp, norm, y)
                y = y + out if residual else out
            return y

        return Case(forward=forward, held=[modules, norms, x] if residual else [modules, x], gradient=gradient)

    variants = {
        "standard": stack(lambda mlp, _, y: mlp(y)),
        **{f"notebook {level}": stack(partial(_notebook, level)) for level in (0, 1)},
        "checkpoint": stack(lambda mlp, _, y: checkpoint(mlp, y, use_reentrant=False)),
        **{f"ours {level}": stack(partial(_ours, level, None)) for level in (0, 1)},
        **{f"ours 1, {n} chunks": stack(partial(_ours, 1, n)) for n in CHUNKS},
        "norm + standard": stack(lambda mlp, norm, y: mlp(norm(y)), residual=True),
        "ours 2": stack(partial(_ours, 2, None), residual=True),
        "compiled standard": dataclasses.replace(stack(_compiled, copy.deepcopy(mlps)), is_eager=False),
    }
    if device == "cuda" and find_spec("liger_kernel"):
        from liger_kernel.ops.swiglu import LigerSiLUMulFunction

        act = LigerSiLUMulFunction.apply
        variants["liger"] = stack(lambda mlp, _, y: mlp.down_proj(act(mlp.gate_proj(y), mlp.up_proj(y))))
    return variants


def _compiled(mlp: SwiGLU, _: Any, y: Tensor) -> Any:
    if mlp._compiled_call_impl is None:  # not before it is asked for: loading the compiler takes seconds
        mlp.compile()
    return mlp(y)


def _ours(level: int, num_chunks: int | None, mlp: SwiGLU, norm: nn.RMSNorm, y: Tensor) -> Tensor:
    options: dict[str, Any] = {"norm_weight": norm.weight, "norm_eps": norm.eps} if level == 2 else {}
    return memory_optimized_swiglu(y, *_weights(mlp), checkpoint_level=level, num_chunks=num_chunks, **options)


def _notebook(level: int, mlp: SwiGLU, _: Any, y: Tensor) -> Tensor:
    return cast(Tensor, _Notebook.apply(y, *_weights(mlp), level))  # type: ignore[no-untyped-call]


def _weights(mlp: SwiGLU) -> tuple[Tensor, Tensor, Tensor]:
    return mlp.gate_proj.weight, mlp.up_proj.weight, mlp.down_proj.weight


class _Notebook(torch.autograd.Function):
    """The course notebook's operator: the five gradients as they stand in the derivation, at the full width."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor, up: Tensor, down: Tensor, level: int) -> Tensor:
        g, u = F.linear(x, gate), F.linear(x, up)
        ctx.save_for_backward(x, gate, up, down, *((g, u) if level == 0 else ()))
        return F.linear(F.silu(g) * u, down)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, gate, up, down, *saved = ctx.saved_tensors
        g, u = saved or (F.linear(x, gate), F.linear(x, up))
        sigmoid = torch.sigmoid(g)
        silu = g * sigmoid
        a = silu * u
        da = dy @ down
        d_down = dy.flatten(0, -2).T @ a.flatten(0, -2)
        du = da * silu
        dg = da * u * (sigmoid * (1 + g * (1 - sigmoid)))
        d_gate, d_up = (d.flatten(0, -2).T @ x.flatten(0, -2) for d in (dg, du))
        return dg @ gate + du @ up, d_gate, d_up, d_down, None


BENCH = Bench(
    run=run,
    shapes=["8x512x1024x4096x3"],
    sizes=("batch", "seq", "hidden", "intermediate", "layers"),
    named_shapes=SHAPES,
    files=("lightning_llm/ops/swiglu.py", "lightning_llm/ops/swiglu_tiles.py", "lightning_llm/ops/sizes.py"),
)
