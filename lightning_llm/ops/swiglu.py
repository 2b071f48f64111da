"""SwiGLU: the plain reference first, the memory-optimised operator second.

With weights written as in the paper (Shazeer 2020, "GLU Variants Improve Transformer", equation 6), for ``tokens``
rows x, W and V of shape (hidden, intermediate) and U of shape (intermediate, hidden):

    F(x) = (SiLU(xW) ⊙ xV) U,    SiLU(z) = z σ(z),    SiLU'(z) = σ(z) (1 + z (1 - σ(z)))

Name the parts g = xW, u = xV, a = SiLU(g) ⊙ u, y = aU. Let dy be the gradient of a scalar loss with respect to y,
of shape (tokens, hidden). For a product y = aU the rule is da = dy Uᵀ and dU = aᵀ dy; applied from the output back:

    da = dy Uᵀ                      (tokens, intermediate)
    du = da ⊙ SiLU(g)               (tokens, intermediate)
    dg = da ⊙ u ⊙ SiLU'(g)          (tokens, intermediate)

and the gradients that leave the function, with the weights' own shapes:

    1. dU = aᵀ dy                   (intermediate, hidden)
    2. dV = xᵀ du                   (hidden, intermediate)
    3. dW = xᵀ dg                   (hidden, intermediate)
    4. dx through the up path:      du Vᵀ    (tokens, hidden)
    5. dx through the gate path:    dg Wᵀ    (tokens, hidden);    dx is the sum of 4 and 5

Forward takes three matrix products, backward six. Backward needs x, g, u and the weights: silu, a, and the
derivatives follow from g and u elementwise. Autograd keeps silu(g) and a as well: twice as much.

In the code the weights are (out, in), as in ``nn.Linear``: ``gate_weight`` is Wᵀ, ``up_weight`` Vᵀ, ``down_weight`` Uᵀ.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_llm.ops.gating import gate_backward, gate_forward


def swiglu_reference(x: Tensor, gate_weight: Tensor, up_weight: Tensor, down_weight: Tensor) -> Tensor:
    """SwiGLU as three linear layers, differentiated by autograd.

    Args:
        x: (…, hidden).
        gate_weight: (intermediate, hidden), the transpose of the paper's W.
        up_weight: (intermediate, hidden), the transpose of V.
        down_weight: (hidden, intermediate), the transpose of U.

    Returns:
        (…, hidden), in the dtype of ``x`` or of autocast.
    """
    return F.linear(F.silu(F.linear(x, gate_weight)) * F.linear(x, up_weight), down_weight)


def memory_optimized_swiglu(
    x: Tensor,
    gate_weight: Tensor,
    up_weight: Tensor,
    down_weight: Tensor,
    *,
    checkpoint_level: int = 0,
    num_chunks: int | None = None,
    norm_weight: Tensor | None = None,
    norm_eps: float = 1e-6,
) -> Tensor:
    """SwiGLU that keeps less for backward than autograd does.

    Args:
        x: (…, hidden).
        gate_weight: (intermediate, hidden).
        up_weight: (intermediate, hidden).
        down_weight: (hidden, intermediate).
        checkpoint_level: 0 keeps x, g and u and computes no matrix product twice; 1 keeps x only and computes two of
            nine products again.
        num_chunks: Tiles; ``None`` chooses.
        norm_weight: (hidden,). With it the input is first normalised (RMSNorm).
        norm_eps: Added to the mean square of the norm.

    Returns:
        (…, hidden), in the dtype of ``x`` or of autocast.

    Raises:
        ValueError: A shape, dtype, device, level or chunk count that does not fit.
    """
    dtype = x.dtype
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
    if norm_weight is not None and checkpoint_level < 2:
        x, norm_weight = F.rms_norm(x, (x.shape[-1],), norm_weight, norm_eps), None
    flat = x.reshape(-1, x.shape[-1])
    weights = Weights(gate_weight, up_weight, down_weight, norm_weight)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, *weights)):
        y = _SwiGLU.apply(flat, *weights, norm_eps, checkpoint_level, num_chunks, dtype)
    else:
        y = _forward(flat, weights, norm_eps, dtype)
    return y.reshape(*x.shape[:-1], y.shape[-1])


class Weights(NamedTuple):
    gate: Tensor
    up: Tensor
    down: Tensor
    norm: Tensor | None


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, gate, up, down, norm, eps, level, num_chunks, dtype):
        weights = Weights(gate, up, down, norm)
        kept = ()
        if level == 0:
            kept = tuple(x.new_empty(x.shape[0], gate.shape[0], dtype=dtype) for _ in range(2))
        y = _forward(x, weights, eps, dtype, *kept)
        ctx.save_for_backward(x, *weights, *kept)
        ctx.options = (eps, num_chunks, dtype)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        x, gate, up, down, norm, *kept = ctx.saved_tensors
        eps, num_chunks, dtype = ctx.options
        grads = _backward(dy, x, Weights(gate, up, down, norm), kept, eps, num_chunks, dtype, ctx.needs_input_grad[:5])
        return *grads, None, None, None, None


def _normalize(x, norm, eps):
    x32 = x.float() if x.dtype != torch.float64 else x
    rstd = torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
    return x32 * rstd, rstd


def _forward(x, weights, eps, dtype, kept_g=None, kept_u=None):
    gate, up, down = (w.to(dtype) for w in weights[:3])
    y = x.new_empty(x.shape[0], down.shape[0], dtype=dtype)
    rows = -(-x.shape[0] // max(1, -(-x.shape[0] * gate.shape[0] // ELEMENTS)))
    if kept_g is None:
        g_buf, u_buf = (x.new_empty(rows, gate.shape[0], dtype=dtype) for _ in range(2))
        a_buf = g_buf
    else:
        a_buf = x.new_empty(rows, gate.shape[0], dtype=dtype)
    for start in range(0, x.shape[0], rows):
        block = slice(start, start + rows)
        h = x[block]
        if weights.norm is not None:
            h = _normalize(h, weights.norm, eps)[0] * weights.norm
        h = h.to(dtype)
        g = kept_g[block] if kept_g is not None else g_buf[: h.shape[0]]
        u = kept_u[block] if kept_u is not None else u_buf[: h.shape[0]]
        torch.mm(h, gate.t(), out=g)
        torch.mm(h, up.t(), out=u)
        a = gate_forward(g, u, a_buf[: h.shape[0]])
        torch.mm(a, down.t(), out=y[block])
    return y
ELEMENTS=2**22
COLS=512
ROWS=4096

def _backward(dy, x, weights, kept, eps, num_chunks, dtype, needs):
    tokens, width = x.shape[0], weights.gate.shape[0]
    dy = dy.to(dtype).contiguous()
    blocks = -(-tokens // ROWS)
    rows = -(-tokens // blocks)
    cols = -(-width // num_chunks) if num_chunks else COLS
    acc = torch.float64 if dtype == torch.float64 else torch.float32
    acc_w = acc if blocks > 1 else weights.gate.dtype
    d_gate, d_up, d_down = (torch.empty_like(w, dtype=acc_w) for w in weights[:3])
    acc_x = acc if cols < width else dtype
    dx = torch.empty_like(x)
    bufs = [x.new_empty(rows * cols, dtype=dtype) for _ in range(3 if kept else 5)]
    for start in range(0, tokens, rows):
        block = slice(start, start + rows)
        h = x[block].to(dtype)
        dyb = dy[block]
        n = h.shape[0]
        dh = dx[block] if acc_x == x.dtype else x.new_empty(h.shape, dtype=acc_x)
        for c0 in range(0, width, cols):
            c = slice(c0, c0 + cols)
            gate_c, up_c, down_c = weights.gate[c].to(dtype), weights.up[c].to(dtype), weights.down[:, c].to(dtype)
            m = gate_c.shape[0]
            tiles = [b[: n * m].view(n, m) for b in bufs]
            da = torch.mm(dyb, down_c, out=tiles[0])
            if kept:
                g, u = kept[0][block, c], kept[1][block, c]
            else:
                g = torch.mm(h, gate_c.t(), out=tiles[3])
                u = torch.mm(h, up_c.t(), out=tiles[4])
            a, dg, du = gate_backward(g, u, da, tiles[1], tiles[2])
            _add(d_down[:, c], dyb.t(), a, start == 0)
            _add(d_gate[c], dg.t(), h, start == 0)
            _add(d_up[c], du.t(), h, start == 0)
            if acc_x == dtype:
                _add(dh, dg, gate_c, c0 == 0)
                dh.addmm_(du, up_c)
            else:
                _acc(dh, torch.mm(dg, gate_c).addmm_(du, up_c), c0 == 0)
        if acc_x != x.dtype:
            dx[block] = dh
    return dx, d_gate.to(weights.gate.dtype), d_up.to(weights.gate.dtype), d_down.to(weights.gate.dtype), None


def _add(out, a, b, first):
    if out.dtype == a.dtype:
        torch.mm(a, b, out=out) if first else out.addmm_(a, b)
    else:
        _acc(out, a @ b, first)

def _acc(out, v, first):
    out.copy_(v) if first else out.add_(v)
