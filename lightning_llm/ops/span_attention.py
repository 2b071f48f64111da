"""Causal attention within spans: a query sees the keys from the first of its span to its own position.

Packed documents are such spans: the span of a query begins where its document begins. A sliding window makes it begin
at most ``window - 1`` positions before the query. Within a row, these beginnings never decrease.

No tensor here grows with the square of the sequence. On CUDA, FlexAttention (Dong et al. 2024, "Flex Attention",
arXiv:2412.05496) gets a list of blocks of keys for each block of queries. FlexAttention has no backward on a CPU.
Elsewhere, one block of queries at a time is multiplied with the keys from the beginning of its first query to its own
end, and earlier keys are skipped. The formulas are those of ``attention.py``, except that only queries, keys and values
are saved: backward recomputes the probabilities of a block, with one matmul of its five. Sums over blocks are in
float32 at least.
"""

from collections.abc import Callable, Iterator
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from lightning_llm.ops import sizes, traced
from lightning_llm.ops.attention import empty_gradients, part_of
from lightning_llm.ops.autograd import autograd_function, custom_op

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

FLEX_BLOCK = 128  # queries, and keys, of one block of FlexAttention
# Not the decoding kernel that torch takes below 128 queries: torch 2.11 has none there for grouped heads
# (https://github.com/pytorch/pytorch/pull/185349)
FLEX_OPTIONS = {"FORCE_USE_FLEX_ATTENTION": True}
_Part = tuple[slice, slice, slice, slice]  # rows, key heads, queries, keys


class AttentionSpans(NamedTuple):
    """Keys that each query sees.

    Attributes:
        start: (batch, seq), int64: the position of the first key that each query sees.
        blocks: The same for FlexAttention, where that computes the attention.
    """

    start: Tensor
    blocks: "BlockMask | None" = None


def spans_of_documents(documents: Tensor) -> AttentionSpans:
    """The spans of packed documents.

    Args:
        documents: (batch, seq), the number of each token's document; zeros if each row is one.
    """
    position = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    is_first = documents != documents.roll(1, dims=1)  # at position 0 it changes nothing
    return AttentionSpans(torch.where(is_first, position, 0).cummax(dim=1).values)


def dense_mask(spans: AttentionSpans, dtype: torch.dtype) -> Tensor:
    """The spans as a mask, for an attention that needs one.

    Args:
        spans: Of a batch.
        dtype: Of the scores. Every layer would turn a boolean mask into one of this dtype, and save its own for
            backward.

    Returns:
        (batch, 1, seq, seq): 0 where a query sees a key, minus infinity elsewhere.
    """
    batch, seq = spans.start.shape
    mask = torch.zeros(batch, 1, seq, seq, dtype=dtype, device=spans.start.device)
    return mask.masked_fill_(_masked(spans.start, slice(0, seq), 0)[:, None], float("-inf"))


def span_attention(query: Tensor, key: Tensor, value: Tensor, spans: AttentionSpans) -> Tensor:
    """Attention of every query to the keys of its span.

    Args:
        query: (batch, heads, seq, head_dim).
        key: (batch, kv_heads, seq, head_dim); ``heads`` is a multiple of ``kv_heads``.
        value: As ``key``.
        spans: Of the batch.

    Returns:
        (batch, heads, seq, head_dim).
    """
    if spans.blocks is not None and (trace := traced.current()) is not None:
        return trace.attention(query, key, value, "flex")  # type: ignore[no-any-return]
    if spans.blocks is not None:
        fields = {"block_mask": spans.blocks, "enable_gqa": query.shape[1] != key.shape[1]}
        out: Tensor = _flex()(query, key, value, **fields, kernel_options=FLEX_OPTIONS)
        return out
    inputs = *(x.contiguous() for x in (query, key, value)), spans.start
    return _operator(*inputs)[0] if torch.compiler.is_compiling() else _function(*inputs)


# ---- FlexAttention


def with_flex_blocks(spans: AttentionSpans) -> AttentionSpans:
    """The same spans with the blocks that FlexAttention visits.

    The first and last query of each block tell: ``create_block_mask`` would look at all pairs of positions.
    """
    from torch.nn.attention.flex_attention import BlockMask

    span_start = spans.start
    starts = torch.arange(0, span_start.shape[1], FLEX_BLOCK, device=span_start.device)
    ends = (starts + FLEX_BLOCK).clamp(max=span_start.shape[1])
    # (batch, blocks of queries, blocks of keys): whether a query of the block sees a key of the other; whether all do
    sees_any = (ends > span_start[:, starts, None]) & (starts <= starts[:, None])
    sees_all = (starts >= span_start[:, ends - 1, None]) & (starts < starts[:, None])

    def mask_mod(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (key >= span_start[batch, query])

    lengths = span_start.shape[1], span_start.shape[1]
    listed = *_listed(sees_any & ~sees_all), *_listed(sees_all)
    return spans._replace(blocks=BlockMask.from_kv_blocks(*listed, FLEX_BLOCK, mask_mod, seq_lengths=lengths))


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """For each block of queries, how many blocks of keys it has, and their indices first: the same for all heads."""
    order = blocks.to(torch.int32).argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32)[:, None], order.to(torch.int32)[:, None]


def _flex() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    # without a compiler it would compute all scores
    return flex_attention if torch.compiler.is_compiling() else _compiled(flex_attention)


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=False)


# ---- blocks of queries


def _forward(query: Tensor, key: Tensor, value: Tensor, span_start: Tensor) -> list[Tensor]:
    """The result, in a list. All inputs are contiguous."""
    out = torch.empty_like(query)
    tile = _tile(query, key)
    with torch.autocast(query.device.type, enabled=False):
        for part in _parts(query, key, span_start):
            _, _, p = _probabilities(query, key, span_start, part, tile)
            _queries(out, key, part).copy_(torch.bmm(p, _keys(value, part)).view_as(_queries(out, key, part)))
    return [out]


def _backward(d_out: Tensor, query: Tensor, key: Tensor, value: Tensor, span_start: Tensor) -> list[Tensor]:
    """The gradients of queries, keys and values."""
    d_query, d_key, d_value = map(torch.empty_like, (query, key, value))
    tile, d_tile = _tile(query, key), _tile(query, key)
    scale = query.shape[-1] ** -0.5
    sums: tuple[Tensor, ...] = ()  # gradients of keys and values of the rows and heads of a part
    with torch.autocast(query.device.type, enabled=False):
        for part in _parts(query, key, span_start):
            rows, heads, queries, keys = part
            if not queries.start:
                wide = torch.promote_types(key.dtype, torch.float32)
                sums = tuple(torch.zeros_like(key[rows, heads], dtype=wide).flatten(0, 1) for _ in range(2))
            q, k, p = _probabilities(query, key, span_start, part, tile)
            d = _queries(d_out, key, part).reshape(q.shape)
            d_scores = torch.bmm(d, _keys(value, part).mT, out=part_of(d_tile, p.shape))
            torch.ops.aten._softmax_backward_data.out(d_scores, p, -1, d_scores.dtype, grad_input=d_scores)
            target = _queries(d_query, key, part)
            target.copy_(torch.bmm(d_scores, k).mul_(scale).view_as(target))
            _add(sums[0][:, keys], d_scores, q)
            _add(sums[1][:, keys], p, d)
            del q, d
            if queries.stop == query.shape[2]:
                for target, total in ((d_key, sums[0].mul_(scale)), (d_value, sums[1])):
                    target[rows, heads] = total.view_as(target[rows, heads])
    return [d_query, d_key, d_value]


def _add(total: Tensor, left: Tensor, right: Tensor) -> None:
    total.baddbmm_(left.mT, right) if total.dtype == left.dtype else total.add_(torch.bmm(left.mT, right))


def _probabilities(
    query: Tensor, key: Tensor, span_start: Tensor, part: _Part, tile: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries (rows × key heads, queries of a group, head_dim), keys, and the probabilities, in the tile."""
    groups = query.shape[1] // key.shape[1]
    k = _keys(key, part)
    q = _queries(query, key, part).reshape(k.shape[0], -1, k.shape[-1])
    scores = part_of(tile, torch.Size((k.shape[0], q.shape[1], k.shape[1])))
    torch.baddbmm(scores, q, k.mT, beta=0, alpha=k.shape[-1] ** -0.5, out=scores)
    masked = _masked(span_start[part[0]], part[2], part[3].start)  # (rows, queries, keys)
    by_head = scores.view(masked.shape[0], -1, groups, *masked.shape[1:])
    by_head.masked_fill_(masked[:, None, None], float("-inf"))
    return q, k, torch.softmax(scores, dim=-1, out=scores)


def _parts(query: Tensor, key: Tensor, span_start: Tensor) -> Iterator[_Part]:
    """Some rows and key heads, one block of their queries, and the keys that this block sees."""
    rows_at_once, heads_at_once = sizes.span_heads(query.shape, key.shape[1], query.dtype.itemsize)
    blocks = sizes.attention_blocks(query.shape[2])
    has_values = traced.current() is None  # else the longest span, which fills its row
    for rows in sizes.slices(query.shape[0], rows_at_once):
        # of the first query of each block
        first_keys = span_start[rows, :: blocks[0][1]].amin(dim=0).tolist() if has_values else [0] * len(blocks)
        for heads in sizes.slices(key.shape[1], heads_at_once):
            for (start, end), first_key in zip(blocks, first_keys, strict=True):
                yield rows, heads, slice(start, end), slice(first_key, end)


def _queries(tensor: Tensor, key: Tensor, part: _Part) -> Tensor:
    """A view: (rows, key heads, heads of a group, queries, head_dim)."""
    by_group = tensor.view(tensor.shape[0], key.shape[1], -1, *tensor.shape[2:])
    return by_group[part[0], part[1], :, part[2]]


def _keys(tensor: Tensor, part: _Part) -> Tensor:
    """(rows × key heads, keys, head_dim)."""
    rows, heads, _, keys = part
    return tensor[rows, heads, keys].flatten(0, 1)


def _masked(span_start: Tensor, queries: slice, first_key: int) -> Tensor:
    """Keys from ``first_key`` to the last query's position that a query does not see: (rows, queries, keys)."""
    position = torch.arange(first_key, queries.stop, device=span_start.device)
    masked = position < span_start[:, queries, None]
    return masked.logical_or_(position > position[queries.start - first_key :, None])


def _tile(query: Tensor, key: Tensor) -> Tensor:
    """A buffer for the scores of a part."""
    _, heads, seq, _ = query.shape
    rows, heads_at_once = sizes.span_heads(query.shape, key.shape[1], query.dtype.itemsize)
    return query.new_empty(rows * heads_at_once * heads // key.shape[1] * sizes.even(seq, sizes.ATTENTION_ROWS) * seq)


def _gradients(ctx: Any, grads: list[Tensor], run: Callable[..., list[Tensor]] | None = None) -> tuple[Any, ...]:
    return *(run or _operator_backward)(grads[0], *ctx.saved_tensors), None


_INPUTS = "Tensor query, Tensor key, Tensor value, Tensor span_start"
_function = autograd_function("_SpanAttention", _forward, _gradients, _backward)
_operator = custom_op(
    "span_attention", _INPUTS, _forward, lambda query, *_: [torch.empty_like(query)], gradients=_gradients
)
_operator_backward = custom_op("span_attention_backward", f"Tensor d_out, {_INPUTS}", _backward, empty_gradients)
