"""The project's own operators on shadows: what ``ops/`` allocates and keeps, tile by tile.

Each function follows the file of its name in ``ops``; the sizes of tiles and chunks are those of ``ops/sizes.py``.
"""

from typing import Any

from lightning_llm.accounting.shadow import BOOL, FLOAT32, INT64, Count, Shadow
from lightning_llm.accounting.shadow_ops import Operators
from lightning_llm.ops import sizes

Weights = tuple[Shadow, Shadow, Shadow, Shadow | None]


def rms_norm(ops: Operators, x: Shadow, weight: Shadow, rows: Count) -> Shadow:
    """``ops/norm.py``; on CUDA torch's kernel, which casts its result apart."""
    if ops.device != "cpu":
        return ops.cast(fused_norm(ops, x, [weight], rows, statistics=1), ops.product_size)
    wide, scale = ops.like(x, FLOAT32), ops.new(rows, FLOAT32)
    kept, kept_scale = ops.keep(x), ops.keep(scale)
    out = wide.view() if ops.product_size == FLOAT32 else ops.like(x, ops.product_size)
    x_size, weight_size = x.itemsize, (weight.elements, weight.itemsize)

    def run(g: list[Any]) -> list[Shadow]:
        x, scale = kept(), kept_scale()
        dx, d_weight = _norm_backward(ops, g[0], x.elements, weight_size[0])
        del scale
        dx = dx if x_size == FLOAT32 else ops.like(dx, x_size)
        return [dx, d_weight if weight_size[1] == FLOAT32 else ops.new(*weight_size)]

    return ops.record(out, run, [x, weight])


def _norm_backward(ops: Operators, dy: Shadow, elements: int, width: int) -> tuple[Shadow, Shadow]:
    """``normalize_backward``: three tensors of the input's size in float32 beside dy, the last of which is dx."""
    wide = dy if dy.itemsize == FLOAT32 else ops.new(elements, FLOAT32)
    normalized, product = ops.new(elements, FLOAT32), ops.new(elements, FLOAT32)
    d_weight = ops.new(width, FLOAT32)
    dx = ops.new(elements, FLOAT32)
    del wide, normalized, product
    return dx, d_weight


def fused_norm(ops: Operators, x: Shadow, weights: list[Shadow], rows: Count, statistics: int) -> Shadow:
    """A norm as one operator of torch: keeps its input and one or two numbers a row."""
    shapes = [(t.elements, t.itemsize) for t in (x, *weights)]
    kept = [x, *(ops.new(rows, x.itemsize if ops.device == "cpu" else FLOAT32) for _ in range(statistics))]
    run = ops._using(kept, lambda _: [ops.new(*shape) for shape in shapes])
    return ops.record(ops.like(x), run, [x, *weights])


def causal_attention(ops: Operators, query: Shadow, key: Shadow, value: Shadow, seq: int, scores: Count) -> Shadow:
    """``ops/attention.py``; all three of the queries' size, scores is batch × heads × seq × seq."""
    first = ops.new(scores, query.itemsize)
    probabilities = ops.new(scores, query.itemsize)
    kept = [query, key, value, probabilities]
    out = ops.like(query)

    def run(_: Shadow) -> list[Shadow]:
        d_value = ops.new(out_size[0], out_size[1])
        d_probabilities, d_scores = ops.new(scores, out_size[1]), ops.new(scores, out_size[1])
        grads = [ops.new(*out_size), ops.new(*out_size), d_value]
        del d_probabilities, d_scores
        return grads

    out_size = (out.elements, out.itemsize)
    made = ops.record(out, ops._using(kept, run), [query, key, value])
    del first
    return made


def swiglu(
    ops: Operators, x: Shadow, weights: Weights, *, tokens: Count, hidden: Count, width: Count, keep: bool
) -> Shadow:
    """``ops/swiglu_tiles.py``. ``weights``: gate, up, down, and the norm's where it is taken in."""
    size = ops.product_size
    y = ops.new(tokens * hidden, size)
    casts = [ops.like(w, size) for w in weights[:3] if w.itemsize != size and w is not None]
    rows = Count(sizes.forward_rows(tokens, width, size, ops.device), "rows")
    kept_rows = tokens if keep else rows
    g, u = ops.new(kept_rows * width, size), ops.new(kept_rows * width, size)
    a = ops.new(rows * width, size) if keep else None
    for start in range(0, tokens, rows):
        h = _normalized(ops, x, min(rows, tokens - start), hidden, weights[3])
        del h
    kept = [ops.keep(tensor) for tensor in ((x, g, u) if keep else (x,))]
    shapes = [None if w is None else (w.elements, w.itemsize) for w in weights]
    has_norm = weights[3] is not None

    def run(gradients: list[Any]) -> list[Shadow | None]:
        held = [get() for get in kept]
        results = _swiglu_backward(ops, gradients[0], held, shapes, tokens, hidden, width, has_norm)
        del held
        return results

    made = ops.record(y, run, [x, *weights])
    del casts, a, g, u
    return made


def _normalized(ops: Operators, x: Shadow, rows: int, hidden: int, norm: Shadow | bool | None) -> Shadow:
    """What enters the products of a tile."""
    if not norm:
        return x.view() if x.itemsize == ops.product_size else ops.new(rows * hidden, ops.product_size)
    h = ops.new(rows * hidden, ops.product_size)
    wide = ops.new(min(rows, sizes.NORM_ROWS) * hidden, FLOAT32)
    del wide
    return h


def _swiglu_backward(
    ops: Operators,
    dy: Shadow,
    held: list[Shadow],
    shapes: list[tuple[int, int] | None],
    tokens: Count,
    hidden: Count,
    width: Count,
    has_norm: bool,
) -> list[Shadow | None]:
    size, x = ops.product_size, held[0]
    dx = ops.like(x)
    rows = Count(sizes.backward_rows(tokens), "rows")
    columns = Count(sizes.chunk_columns(rows, width, size, ops.device), "columns")
    one_block = rows >= tokens
    matrices = [shape for shape in shapes[:3] if shape is not None]
    d_weights = [ops.new(elements, own if one_block else FLOAT32) for elements, own in matrices]
    d_norm = ops.new(hidden, FLOAT32) if has_norm else None
    dh_size = size if columns >= width and not has_norm else FLOAT32
    tile = rows * columns
    out = ops.new(max(tile, rows * hidden) if dh_size != size else tile, size)
    tiles = [ops.new(tile, size) for _ in range(2 if len(held) > 1 else 4)]
    dy = dy if dy.itemsize == size else ops.like(dy, size)
    for start in range(0, tokens, rows):
        h = _normalized(ops, x, min(rows, tokens - start), hidden, has_norm)
        own_dh = has_norm or dx.itemsize != dh_size
        dh = ops.new(rows * hidden, dh_size) if own_dh else None
        for _ in range(0, width, columns):
            casts = [] if matrices[0][1] == size else [ops.new(columns * hidden, size) for _ in range(2)]
            if matrices[0][1] != size:
                down = ops.new(columns * hidden, size)
                del down
            if d_weights[0].itemsize != size:
                product = ops.new(columns * hidden, size)
                del product
        if has_norm:
            _leave_norm(ops, dh, min(rows, sizes.NORM_ROWS) * hidden, hidden)
        del h, dh, casts  # the last chunk's live as long as the names do
    last = [d if d.itemsize == own else ops.like(d, own) for d, (_, own) in zip(d_weights, matrices, strict=True)]
    own_norm = shapes[3]
    if d_norm is not None and own_norm is not None and own_norm[1] != FLOAT32:
        d_norm = ops.new(*own_norm)
    del out, tiles
    return [dx, *last, d_norm]


def _leave_norm(ops: Operators, dh: Shadow | None, elements: int, width: int) -> None:
    assert dh is not None
    scaled = ops.new(elements, FLOAT32)
    del scaled
    grads = _norm_backward(ops, dh, elements, width)
    del grads


def linear_cross_entropy(
    ops: Operators,
    hidden: Shadow,
    weight: Shadow,
    bias: Shadow | None,
    *,
    tokens: Count,
    vocab: Count,
    num_chunks: int | None,
) -> Shadow:
    """``ops/loss_chunks.py``: the gradients are made in forward and held until backward."""
    size, device = ops.product_size, ops.device
    width = Count(hidden.elements // tokens, "h")
    losses, counted, weights = ops.new(tokens, FLOAT32), ops.new(tokens, BOOL), ops.new(tokens, FLOAT32)
    cast = ops.like(weight, size) if weight.itemsize != size else None
    wide_bias = ops.like(bias, FLOAT32) if bias is not None and bias.itemsize != FLOAT32 else None
    rows = Count(sizes.loss_rows(tokens, vocab, size, device, num_chunks), "rows")
    rows = rows if rows < tokens else tokens
    logits = ops.new(rows * vocab, size)
    block = min(sizes.vocab_block(device), vocab)
    d_hidden, d_weight = ops.like(hidden), ops.like(weight, FLOAT32)
    d_bias = None if bias is None else ops.like(bias, FLOAT32)
    index = ops.new(tokens, INT64)
    for start in range(0, tokens, rows):
        here = min(rows, tokens - start)
        h = hidden.view() if hidden.itemsize == size else ops.new(width * here, size)
        if device == "cpu":
            _softmax_rows(ops, here, vocab, has_bias=bias is not None)
        if d_hidden.itemsize != size:
            part = ops.new(width * here, size)
            del part
        if size != FLOAT32:
            part = ops.new(width * block, size)
            del part
        del h
    held = [d_hidden, d_weight if weight.itemsize == FLOAT32 else ops.like(weight), d_bias]
    if d_bias is not None and bias is not None and bias.itemsize != FLOAT32:
        held[2] = ops.like(bias)
    del d_hidden, d_weight, d_bias, logits, cast, wide_bias, counted, weights, losses, index
    kept = ops.keep(hidden)

    def run(_: list[Any]) -> list[Shadow | None]:
        hidden = kept()
        results, held[:] = list(held), []
        del hidden
        return results

    return ops.record(ops.new(1, FLOAT32), run, [hidden, weight, bias])


def _softmax_rows(ops: Operators, rows: int, vocab: Count, *, has_bias: bool) -> None:
    """``ops/softmax_rows.py``: a float32 buffer of a group of rows, unless the logits are float32 already."""
    losses, group = ops.new(rows, FLOAT32), min(rows, sizes.softmax_rows(vocab, FLOAT32))
    buffer = ops.new(vocab * group, FLOAT32) if ops.product_size != FLOAT32 else None
    sums = ops.new(vocab, FLOAT32) if has_bias else None
    del losses, buffer, sums
