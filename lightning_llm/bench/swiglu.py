"""``lightning-llm bench swiglu``: memory and time of the MLP, every way of writing it, as stacks of layers.

Variants: the standard module; the notebook's way (a Function that keeps g and u, or nothing, with whole-width buffers);
``torch.utils.checkpoint`` around the standard module; ``torch.compile`` of it; Liger-Kernel where it is installed and
there is CUDA; ours at each level, and level 1 at several numbers of chunks. With a norm before each MLP: the standard
pair, and level 2, where the norm belongs to the op.
"""

import copy
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lightning_llm.bench.harness import Case, Request, Row, chosen, measure
from lightning_llm.model.mlp import SwiGLU
from lightning_llm.ops.swiglu import memory_optimized_swiglu

# named sets: batch x seq x hidden x intermediate x layers
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
DEFAULT_SHAPES = ["8x512x1024x4096x3"]
CHUNKS = (1, 4, 16)
Shape = tuple[int, int, int, int, int]


def parse_shape(text: str) -> Shape:
    """``8x512x1024x4096x3``: batch, seq, hidden, intermediate, layers."""
    parts = text.split("x")
    if len(parts) != 5 or not all(part.isdigit() and int(part) for part in parts):
        raise ValueError(
            f"shapes {text!r} is not BATCHxSEQxHIDDENxINTERMEDIATExLAYERS, such as {DEFAULT_SHAPES[0]}, "
            f"nor one of {', '.join(SHAPES)}"
        )
    batch, seq, hidden, intermediate, layers = map(int, parts)
    return batch, seq, hidden, intermediate, layers


def run(asked: Request) -> Iterator[Row]:
    """Rows for every shape and dtype; a budget is shared evenly."""
    parsed = [parse_shape(text) for text in asked.shapes]
    share = None if asked.budget_s is None else asked.budget_s / (len(parsed) * len(asked.dtypes))
    for text, shape in zip(asked.shapes, parsed, strict=True):
        for dtype in asked.dtypes:
            batch, seq, *_ = shape
            yield from measure(
                "swiglu",
                chosen(cases(shape, dtype, asked.device), asked.variants),
                shape=text,
                dtype=dtype,
                device=asked.device,
                tokens=batch * seq,
                rounds=asked.rounds,
                budget_s=share,
            )


def cases(shape: Shape, dtype: torch.dtype, device: str) -> dict[str, Case]:
    """The variants, all with the same weights and input."""
    batch, seq, hidden, intermediate, layers = shape
    torch.manual_seed(0)
    mlps = nn.ModuleList(SwiGLU(hidden, intermediate) for _ in range(layers)).to(device, dtype)
    norms = nn.ModuleList(nn.RMSNorm(hidden, eps=1e-6) for _ in range(layers)).to(device, dtype)
    x = torch.randn(batch, seq, hidden, device=device, dtype=dtype, requires_grad=True)
    gradient = torch.randn(batch, seq, hidden, device=device, dtype=dtype)

    def stack(
        layer: Callable[[Any, Any, Tensor], Tensor], modules: nn.ModuleList = mlps, residual: bool = False
    ) -> Case:
        def forward() -> Tensor:
            y = x
            for mlp, norm in zip(modules, norms, strict=True):
                out = layer(mlp, norm, y)
                y = y + out if residual else out
            return y

        held: list[Tensor | nn.Module] = [modules, norms, x] if residual else [modules, x]
        return Case(forward=forward, held=held, gradient=gradient)

    found = {
        "standard": stack(lambda mlp, _, y: mlp(y)),
        "notebook 0": stack(lambda mlp, _, y: _notebook(mlp, y, 0)),
        "notebook 1": stack(lambda mlp, _, y: _notebook(mlp, y, 1)),
        "checkpoint": stack(lambda mlp, _, y: checkpoint(mlp, y, use_reentrant=False)),
        "ours 0": stack(lambda mlp, _, y: memory_optimized_swiglu(y, *_weights(mlp), checkpoint_level=0)),
        "ours 1": stack(partial(_ours_1, None)),
        **{f"ours 1, {n} chunks": stack(partial(_ours_1, n)) for n in CHUNKS},
        "norm + standard": stack(lambda mlp, norm, y: mlp(norm(y)), residual=True),
        "ours 2": stack(_ours_2, residual=True),
        "compiled standard": _compiled(stack, mlps),
    }
    if device == "cuda" and (liger := _liger()) is not None:
        found["liger"] = stack(lambda mlp, _, y: mlp.down_proj(liger.apply(mlp.gate_proj(y), mlp.up_proj(y))))
    return found


def draw_frontier(files: Mapping[str, Sequence[Path]], path: Path, title: str) -> None:
    """Draw written rows as one picture: peak memory against time, both over those of the standard MLP, by dtype.

    The picture's description is the :func:`fingerprint` of the files, which tells whether it is still theirs.

    Args:
        files: What ``--json`` wrote, under the name of the set-up (at most two), drawn filled and hollow.
        path: Where the picture goes.
        title: Over it.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [(set_up, row) for set_up, names in files.items() for name in names for row in json.loads(name.read_text())]
    dtypes = list(dict.fromkeys(row["dtype"] for _, row in rows))
    figure, axes = pyplot.subplots(
        1, len(dtypes), figsize=(5.5 * len(dtypes), 4.5), sharex=True, sharey=True, squeeze=False, layout="constrained"
    )
    for axis, dtype in zip(axes[0], dtypes, strict=True):
        for set_up, is_filled in zip(files, (True, False), strict=False):
            group = {row["variant"]: row for its, row in rows if (its, row["dtype"]) == (set_up, dtype)}
            standard = group["standard"]
            for name, row in group.items():
                point = (row["total_s"] / standard["total_s"], row["peak_bytes"] / standard["peak_bytes"])
                color = "tab:red" if name.startswith("ours") else "dimgray"
                axis.scatter(*point, s=70, edgecolors=color, facecolors=color if is_filled else "none", zorder=3)
                label = name.replace("ours", "ours, level") if is_filled else ""
                offset = (0, 9) if name == "standard" else (0, -18)
                axis.annotate(label, point, offset, textcoords="offset points", ha="center")
        axis.axhline(1, color="lightgray", zorder=1)
        axis.axvline(1, color="lightgray", zorder=1)
        axis.set(title=dtype, xlabel="time of forward and backward, standard = 1", xlim=(0.6, 1.4), ylim=(0, 1.15))
    axes[0][0].set_ylabel("peak memory, standard = 1")
    for set_up, is_filled in zip(files, (True, False), strict=False):
        axes[0][-1].scatter([], [], s=70, edgecolors="black", facecolors="black" if is_filled else "none", label=set_up)
    axes[0][-1].legend(loc="lower left")
    figure.suptitle(title)
    names = [name for group in files.values() for name in group]
    figure.savefig(path, dpi=110, metadata={"Description": fingerprint(names)})
    pyplot.close(figure)


def fingerprint(files: Sequence[Path]) -> str:
    """Of the content of files in their order."""
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _compiled(stack: Callable[..., Case], mlps: nn.ModuleList) -> Case:
    modules = copy.deepcopy(mlps)
    case = stack(lambda mlp, _, y: mlp(y), modules)

    def forward() -> Tensor:
        for module in modules:  # not before it is asked for: loading the compiler takes seconds
            if module._compiled_call_impl is None:
                module.compile()
        return case.forward()

    return Case(forward=forward, held=case.held, gradient=case.gradient, is_eager=False)


def _ours_1(num_chunks: int | None, mlp: SwiGLU, _: Any, y: Tensor) -> Tensor:
    return memory_optimized_swiglu(y, *_weights(mlp), checkpoint_level=1, num_chunks=num_chunks)


def _ours_2(mlp: SwiGLU, norm: nn.RMSNorm, y: Tensor) -> Tensor:
    return memory_optimized_swiglu(y, *_weights(mlp), checkpoint_level=2, norm_weight=norm.weight, norm_eps=1e-6)


def _notebook(mlp: SwiGLU, y: Tensor, level: int) -> Tensor:
    out: Tensor = _Notebook.apply(y, *_weights(mlp), level)  # type: ignore[no-untyped-call]
    return out


def _weights(mlp: SwiGLU) -> tuple[Tensor, Tensor, Tensor]:
    return mlp.gate_proj.weight, mlp.up_proj.weight, mlp.down_proj.weight


def _liger() -> Any | None:
    try:
        from liger_kernel.ops.swiglu import LigerSiLUMulFunction
    except ImportError:
        return None
    return LigerSiLUMulFunction


class _Notebook(torch.autograd.Function):
    """The course notebook's operator: the five gradients as they stand in the derivation, at the full width."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor, up: Tensor, down: Tensor, level: int) -> Tensor:
        g, u = F.linear(x, gate), F.linear(x, up)
        ctx.save_for_backward(x, gate, up, down, *((g, u) if level == 0 else ()))
        return F.linear(F.silu(g) * u, down)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, gate, up, down, *kept = ctx.saved_tensors
        g, u = kept or (F.linear(x, gate), F.linear(x, up))
        sigmoid = torch.sigmoid(g)
        silu = g * sigmoid
        a = silu * u
        da = dy @ down
        d_down = dy.flatten(0, -2).T @ a.flatten(0, -2)
        du = da * silu
        dg = da * u * (sigmoid * (1 + g * (1 - sigmoid)))
        d_gate, d_up = (d.flatten(0, -2).T @ x.flatten(0, -2) for d in (dg, du))
        return dg @ gate + du @ up, d_gate, d_up, d_down, None
