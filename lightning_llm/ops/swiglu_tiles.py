"""How the memory-optimised SwiGLU cuts its work into tiles. The formulas stand in ``swiglu.py``.

Forward goes over blocks of tokens at the full intermediate width: each row of the output is then one product, and
nothing is summed outside of it. Backward goes over chunks of the intermediate width: each weight gradient is then
written once, and only dx is a sum over chunks. Long inputs are cut into blocks of tokens as well, and the weight
gradients become sums over blocks. All these sums are taken in float32 at least, since bf16 would lose their last bits.

Buffers are made once for all tiles, so that their size does not grow with the number of tokens.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from lightning_llm.ops import sizes
from lightning_llm.ops.gating import gate_backward, gate_forward
from lightning_llm.ops.norm import inverse_rms, normalize, normalize_backward


class Weights(NamedTuple):
    """The parameters: gate and up (intermediate, hidden), down (hidden, intermediate), norm (hidden,) or ``None``."""

    gate: Tensor
    up: Tensor
    down: Tensor
    norm: Tensor | None


class Options(NamedTuple):
    """What is no tensor: the norm's epsilon, the chunks of the intermediate width, the dtype of the products."""

    norm_eps: float
    num_chunks: int | None
    dtype: torch.dtype


def swiglu_forward(x: Tensor, weights: Weights, options: Options, *, keep: bool) -> tuple[Tensor, ...]:
    """The output, and g and u where they are to be kept.

    Args:
        x: (…, hidden).
        weights: The parameters.
        options: The chunks of the width concern backward only.
        keep: Whether g and u are returned.

    Returns:
        y (…, hidden), and if ``keep`` g and u, both (tokens, intermediate), all in the dtype of the products. ``y`` is
        no view: FSDP2 hangs its hooks on what a module returns, and a view would lose them under ``y += x``.
    """
    y = x.new_empty(x.shape, dtype=options.dtype)
    x, flat_y = flat(x), flat(y)
    tokens, width = x.shape[0], weights.gate.shape[0]
    gate, up, down = (weight.to(options.dtype) for weight in weights[:3])
    rows = sizes.forward_rows(tokens, width, options.dtype.itemsize, x.device.type)
    g, u = (x.new_empty(tokens if keep else rows, width, dtype=options.dtype) for _ in range(2))
    a = x.new_empty(rows, width, dtype=options.dtype) if keep else g  # what is not kept is overwritten
    for block in sizes.slices(tokens, rows):
        here, size = (block if keep else slice(0, block.stop - block.start)), block.stop - block.start
        h = normalized(x[block], weights.norm, options)
        torch.mm(h, gate.t(), out=g[here])
        torch.mm(h, up.t(), out=u[here])
        torch.mm(gate_forward(g[here], u[here], a[:size]), down.t(), out=flat_y[block])
    return (y, g, u) if keep else (y,)


def swiglu_backward(
    dy: Tensor, x: Tensor, weights: Weights, kept: tuple[Tensor, ...], options: Options, needed: tuple[bool, ...]
) -> tuple[Tensor | None, ...]:
    """The gradients of x, gate, up, down and norm, each in the dtype of its tensor.

    Args:
        dy: (…, hidden), the gradient of the output.
        x: (…, hidden), the input.
        weights: The parameters.
        kept: g and u, or nothing: then they are computed again.
        options: As in forward.
        needed: Which of the five gradients are wanted; no matrix product is spent on the others.

    Returns:
        Five gradients, ``None`` where not wanted.
    """
    dx = x.new_empty(x.shape) if needed[0] else None
    work = _Backward(flat(x), weights, kept, options, needed, None if dx is None else flat(dx))
    dy = flat(dy.to(options.dtype))
    for block in sizes.slices(dy.shape[0], work.rows):
        work.add_block(block, dy[block].contiguous())
    return dx, *work.weight_gradients()


class _Backward:
    """One backward pass: its gradients so far, and the buffers of a tile."""

    def __init__(
        self,
        x: Tensor,
        weights: Weights,
        kept: tuple[Tensor, ...],
        options: Options,
        needed: tuple[bool, ...],
        dx: Tensor | None,
    ) -> None:
        self.x, self.weights, self.kept, self.options, self.dx = x, weights, kept, options, dx
        self.need_x, *need_weights, self.need_norm = needed
        self.need_input = self.need_x or self.need_norm
        self.need_gating = self.need_input or need_weights[0] or need_weights[1]
        (tokens, hidden), width, dtype = x.shape, weights.gate.shape[0], options.dtype
        self.rows = sizes.backward_rows(tokens, x.device.type, weights.gate.dtype.itemsize)
        self.columns = sizes.chunk_columns(self.rows, width, dtype.itemsize, x.device.type, options.num_chunks)
        wide = torch.promote_types(dtype, torch.float32)

        one_block = self.rows >= tokens
        self.d_weights = [
            x.new_empty(w.shape, dtype=w.dtype if one_block else wide) if need else None
            for w, need in zip(weights[:3], need_weights, strict=True)
        ]
        self.d_norm = x.new_zeros(hidden, dtype=wide) if self.need_norm else None
        # the gradient behind the norm, if there is one: of one chunk, or a sum over chunks
        self.dh_dtype = dtype if self.columns >= width and weights.norm is None else wide

        size = self.rows * self.columns
        spare = max(size, self.rows * hidden) if self.dh_dtype != dtype else size  # takes dx of a chunk as well
        self.out = x.new_empty(spare, dtype=dtype)
        self.tiles = [x.new_empty(size, dtype=dtype) for _ in range(2 if kept else 4)]

    def add_block(self, block: slice, dy: Tensor) -> None:
        """Adds what one block of tokens contributes. ``dy`` is its part: (rows, hidden)."""
        h = normalized(self.x[block], self.weights.norm, self.options)
        dh = self._dh(block) if self.need_input else None
        for chunk in sizes.slices(self.weights.gate.shape[0], self.columns):
            gate, up = (w[chunk].to(h.dtype) for w in self.weights[:2])
            a, dg, du = self._gated(block, chunk, h, dy, gate, up)
            pairs = ((dg.t(), h), (du.t(), h), (dy.t(), a))
            for d_weight, (left, right), by_columns in zip(self.d_weights, pairs, (False, False, True), strict=True):
                if d_weight is not None:
                    part = d_weight[:, chunk] if by_columns else d_weight[chunk]
                    _add(part, left, right, is_first=block.start == 0)
            if dh is not None:
                self._add_dh(dh, dg, gate, du, up, is_first=chunk.start == 0)
        if dh is not None:
            self._leave_norm(block, dh)

    def weight_gradients(self) -> list[Tensor | None]:
        sums = (*self.d_weights, self.d_norm)
        return [None if d is None or w is None else d.to(w.dtype) for d, w in zip(sums, self.weights, strict=True)]

    def _gated(
        self, block: slice, chunk: slice, h: Tensor, dy: Tensor, gate: Tensor, up: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """a, dg and du of a tile; the last two hold nothing where they are not needed."""
        shape = h.shape[0], chunk.stop - chunk.start
        out, da, scratch, *own = (tile[: shape[0] * shape[1]].view(shape) for tile in (self.out, *self.tiles))
        if self.kept:
            g, u = (tensor[block, chunk] for tensor in self.kept)
        else:
            g, u = torch.mm(h, gate.t(), out=own[0]), torch.mm(h, up.t(), out=own[1])
        if not self.need_gating:
            return gate_forward(g, u, out), scratch, da
        torch.mm(dy, self.weights.down[:, chunk].to(dy.dtype), out=da)
        return gate_backward(g, u, da, out, scratch)

    def _dh(self, block: slice) -> Tensor:
        if self.dx is not None and self.weights.norm is None and self.dx.dtype == self.dh_dtype:
            return self.dx[block]  # no need for a sum of its own
        return self.x.new_empty(self.x[block].shape, dtype=self.dh_dtype)

    def _add_dh(self, dh: Tensor, dg: Tensor, gate: Tensor, du: Tensor, up: Tensor, *, is_first: bool) -> None:
        if dh.dtype == dg.dtype:
            _add(dh, dg, gate, is_first=is_first)
            dh.addmm_(du, up)
        else:
            part = self.out[: dh.numel()].view(dh.shape)  # a has been used by now
            torch.mm(dg, gate, out=part).addmm_(du, up)
            dh.copy_(part) if is_first else dh.add_(part)

    def _leave_norm(self, block: slice, dh: Tensor) -> None:
        """From the gradient behind the norm, if there is one, to dx."""
        norm = self.weights.norm
        if norm is None:
            if self.dx is not None and self.dx.dtype != self.dh_dtype:
                self.dx[block] = dh
            return
        x = self.x[block]
        scale = inverse_rms(x, self.options.norm_eps)
        normalize_backward(dh, x, norm, scale, None if self.dx is None else self.dx[block], self.d_norm)


def normalized(x: Tensor, norm: Tensor | None, options: Options) -> Tensor:
    """(rows, hidden): what enters the products."""
    return x.to(options.dtype) if norm is None else normalize(x, norm, options.norm_eps, options.dtype)[0]


def _add(out: Tensor, left: Tensor, right: Tensor, *, is_first: bool) -> None:
    """``out = left @ right`` or ``out += left @ right``; ``out`` may be wider than the factors."""
    if out.dtype == left.dtype:
        torch.mm(left, right, out=out) if is_first else out.addmm_(left, right)
    else:
        product = torch.mm(left, right)
        out.copy_(product) if is_first else out.add_(product)


def flat(tensor: Tensor) -> Tensor:
    """(…, hidden) -> (tokens, hidden), a view where the strides allow it."""
    return tensor.reshape(-1, tensor.shape[-1])
