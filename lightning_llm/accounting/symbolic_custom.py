"""The project's own operators on shadows: what ``ops/`` allocates and keeps, tile by tile.

Each function follows the file of its name in ``ops``; the sizes of tiles and chunks are those of ``ops/sizes.py``.
"""

from typing import Any

from lightning_llm.accounting.symbolic import BOOL, FLOAT32, INT64, Count, Shadow
from lightning_llm.accounting.symbolic_ops import Operators
from lightning_llm.ops import sizes

Weights = tuple[Shadow, Shadow, Shadow, Shadow | None]


def rms_norm(ops: Operators, x: Shadow, weight: Shadow, rows: Count) -> Shadow:
    """``ops/norm.py``; on CUDA torch's kernel, which casts its result apart."""
    if ops.device != "cpu":
        return ops.cast(fused_norm(ops, x, [weight], rows, statistics=1), ops.product_size)
    width = Count(weight.elements)
    out, scale = ops.like(x, ops.product_size), ops.new(rows, FLOAT32)
    if ops.product_size != FLOAT32:
        buffer = _block_of_rows(ops, rows, width)
        del buffer
    kept, kept_scale = ops.keep(x), ops.keep(scale)
    x_size, weight_size = x.itemsize, (weight.elements, weight.itemsize)

    def run(g: list[Any]) -> list[Shadow]:
        x, scale = kept(), kept_scale()
        dx = ops.like(x, x_size)
        d_weight = _norm_backward(ops, g[0].itemsize, rows, width)
        del scale
        return [dx, d_weight if weight_size[1] == FLOAT32 else ops.new(*weight_size)]

    return ops.record(out, run, [x, weight])


def _block_of_rows(ops: Operators, rows: Count, width: Count) -> Shadow:
    """The float32 copy of the rows that are normalised at once."""
    most = sizes.norm_rows(width, ops.device)
    return ops.new((rows if rows < most else Count(most)) * width, FLOAT32)


def _norm_backward(ops: Operators, dy_size: int, rows: Count, width: Count) -> Shadow:
    """``normalize_backward``: the weight's gradient, and two buffers of a block of rows, three for a narrow dy."""
    d_weight = ops.new(width, FLOAT32)
    buffers = [_block_of_rows(ops, rows, width) for _ in range(2 if dy_size == FLOAT32 else 3)]
    del buffers
    return d_weight


def fused_norm(ops: Operators, x: Shadow, weights: list[Shadow], rows: Count, statistics: int) -> Shadow:
    """A norm as one operator of torch: keeps its input and one or two numbers a row."""
    shapes = [(t.elements, t.itemsize) for t in (x, *weights)]
    kept = [x, *(ops.new(rows, x.itemsize if ops.device == "cpu" else FLOAT32) for _ in range(statistics))]
    run = ops._using(kept, lambda _: [ops.new(*shape) for shape in shapes])
    return ops.record(ops.like(x), run, [x, *weights])


def causal_attention(
    ops: Operators, query: Shadow, key: Shadow, value: Shadow, *, heads: Count, seq: Count, head_dim: Count
) -> Shadow:
    """``ops/attention.py``; all three of the queries' size, ``heads`` those of all rows of the batch."""
    size = query.itemsize
    blocks = [(start, Count(end, "end")) for start, end in sizes.attention_blocks(seq)]
    probabilities = [ops.new(heads * (end - start) * end, size) for start, end in blocks]
    rows = Count(sizes.even(seq, sizes.ATTENTION_ROWS), "rows")
    some = Count(sizes.attention_heads(heads, seq, size), "heads")
    kept = [query, key, value, *probabilities]
    out = ops.like(query)
    tile = ops.new(some * rows * seq, size)
    del probabilities

    def run(_: Shadow) -> list[Shadow]:
        grads = [ops.new(*out_size) for _ in range(3)]
        tile = ops.new(some * rows * seq, size)
        part = ops.new(some * (blocks[-2][1] if len(blocks) > 1 else rows) * head_dim, size)
        del tile, part
        return grads

    out_size = (out.elements, out.itemsize)
    made = ops.record(out, ops._using(kept, run), [query, key, value])
    del tile
    return made


def swiglu(
    ops: Operators, x: Shadow, weights: Weights, *, tokens: Count, hidden: Count, width: Count, keep: bool
) -> Shadow:
    """``ops/swiglu.py``. ``weights``: gate, up, down, and the norm's where it is taken in."""
    itemsizes = ops.product_size, weights[0].itemsize
    if sizes.are_few(tokens, hidden, width, *itemsizes, ops.device, keep=keep, has_norm=weights[3] is not None):
        return _swiglu_whole(ops, x, weights, tokens, hidden, width, keep=keep)
    return _swiglu_tiles(ops, x, weights, tokens, hidden, width, keep=keep)


def _swiglu_tiles(
    ops: Operators, x: Shadow, weights: Weights, tokens: Count, hidden: Count, width: Count, *, keep: bool
) -> Shadow:
    """``ops/swiglu_tiles.py``."""
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
    if ops.product_size != FLOAT32:
        buffer = _block_of_rows(ops, Count(rows), Count(hidden))
        del buffer
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
    matrices = [shape for shape in shapes[:3] if shape is not None]
    rows = Count(sizes.backward_rows(tokens, ops.device, matrices[0][1]), "rows")
    columns = Count(sizes.chunk_columns(rows, width, size, ops.device), "columns")
    one_block = rows >= tokens
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
            norm_gradients = _norm_backward(ops, FLOAT32, Count(min(rows, tokens - start)), Count(hidden))
            del norm_gradients
        del h, dh, casts  # the last chunk's live as long as the names do
    last = [d if d.itemsize == own else ops.like(d, own) for d, (_, own) in zip(d_weights, matrices, strict=True)]
    own_norm = shapes[3]
    if d_norm is not None and own_norm is not None and own_norm[1] != FLOAT32:
        d_norm = ops.new(*own_norm)
    del out, tiles
    return [dx, *last, d_norm]


def _swiglu_whole(
    ops: Operators, x: Shadow, weights: Weights, tokens: Count, hidden: Count, width: Count, *, keep: bool
) -> Shadow:
    """``ops/swiglu_whole.py``."""
    size, (gate, up, down, norm) = ops.product_size, weights
    has_norm = norm is not None
    matrix, wide = hidden * width, tokens * width
    is_cast = gate.itemsize != size

    def matrix_cast() -> Shadow | None:
        return ops.new(matrix, size) if is_cast else None

    def project(h: Shadow, weight: Shadow) -> Shadow:
        cast = ops.cast(weight, size)
        out, kept = ops.new(wide, size), ops.keep(x)

        def run(_: list[Any]) -> list[Shadow | None]:
            x, cast = kept(), matrix_cast()
            dh = ops.new(tokens * hidden, size)
            del cast
            again = _normalized(ops, x, tokens, hidden, has_norm)
            d_weight = ops.new(matrix, size)
            del again
            return [dh, d_weight]

        return ops.record(out, run, [h, cast])

    h = ops.cast(x, size) if norm is None else _normalize(ops, x, norm, tokens)
    g, u = project(h, gate), project(h, up)
    del h
    cast, y = ops.cast(down, size), ops.new(tokens * hidden, size)
    a = ops.new(wide, size)
    kept = [ops.keep(tensor) for tensor in ((g, u) if keep else (x,))]

    def run(gradients: list[Any]) -> list[Shadow | None]:
        held = [get() for get in kept]
        dy = gradients[0] if gradients[0].itemsize == size else ops.like(gradients[0], size)
        if not keep:
            h = _normalized(ops, held.pop(), tokens, hidden, has_norm)
            for _ in range(2):
                cast = matrix_cast()
                held.append(ops.new(wide, size))
                del cast
            del h
        cast = matrix_cast()
        du = ops.new(wide, size)
        del cast
        a, dg = ops.new(wide, size), ops.new(wide, size)
        del held
        d_down = ops.new(matrix, size)
        del a, dy
        return [dg, du, d_down]

    made = ops.record(y, run, [g, u, cast])
    del a, g, u, cast
    return made


def _normalize(ops: Operators, x: Shadow, weight: Shadow, rows: Count) -> Shadow:
    """A norm that keeps its input alone."""
    width = Count(weight.elements)
    out, scale, kept = ops.like(x, ops.product_size), ops.new(rows, FLOAT32), ops.keep(x)
    buffer = _block_of_rows(ops, rows, width) if ops.product_size != FLOAT32 else None
    del scale, buffer
    shape = weight.elements, weight.itemsize

    def run(g: list[Any]) -> list[Shadow]:
        x = kept()
        scale, dx = ops.new(rows, FLOAT32), ops.like(x)
        d_weight = _norm_backward(ops, g[0].itemsize, rows, width)
        del scale
        return [dx, d_weight if shape[1] == FLOAT32 else ops.new(*shape)]

    return ops.record(out, run, [x, weight])


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
