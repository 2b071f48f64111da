"""Operators on symbolic tensors: what each allocates, and what it saves for backward.

Bytes live exactly as long as a Python name, or a node that saved the tensor, refers to them. So a name that nobody
reads (``_a``, ``_casts``, ``_dy``) is a buffer until its function returns, and ``del`` frees one earlier.

First torch's, then the project's own, with the tiles and chunks of ``ops/sizes.py``. Of equal tiles the first
is enough: the others allocate no more than it did. Under autocast, weights of linear layers are cast once per forward
pass (the copies live at least until its end), inputs at each use.
"""

from typing import Any

from lightning_llm.accounting import symbolic
from lightning_llm.accounting.symbolic import BOOL, FLOAT32, INT64, AllocationLog, Count, Gradients, Graph, Leaf, Size
from lightning_llm.accounting.symbolic import SymbolicTensor as Tensor
from lightning_llm.ops import sizes

WEIGHT_CASTS = "weights cast by autocast"

Held = list[Tensor]
Linear = tuple[Tensor, Tensor | None]  # weight and bias
Weights = tuple[Tensor, Tensor, Tensor, Tensor | None]  # of SwiGLU: gate, up, down, and the norm's where it is taken in
Shape = tuple[Count, Count, Count]  # tokens, hidden, width


class Operators(Graph):
    """Operators of one device and precision.

    Attributes:
        device: Type of the device, ``cpu`` or ``cuda``.
        storage_size: Bytes per element of the parameters.
        matmul_size: Bytes per element of the factors of matmuls.
    """

    def __init__(self, log: AllocationLog, device: str, precision: str) -> None:
        super().__init__(log, adds_in_place=device != "cpu")  # on a CPU, what the meter sees
        self.device = device
        self.storage_size, self.matmul_size = symbolic.item_sizes(precision)
        self.is_autocast = self.storage_size != self.matmul_size

    def parameter(self, elements: Count) -> Tensor:
        """A parameter; its bytes are of the category ``parameters``."""
        parameter = self.new(elements, self.storage_size, category="parameters", part="")
        parameter.node = Leaf(self)
        return parameter

    # -- torch: elementwise and views ---------------------------------------------------------------------------------

    def like(self, x: Tensor, itemsize: int | None = None) -> Tensor:
        """A new tensor of the same size, like ``torch.empty_like``."""
        return self.new(x.elements, x.itemsize if itemsize is None else itemsize)

    def cast(self, x: Tensor, itemsize: int) -> Tensor:
        """``x.to(dtype)``; the engine casts the gradient back."""
        return x if x.itemsize == itemsize else self._viewing(self.like(x, itemsize), x)

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        """``x + y``, in the wider dtype."""
        return self._viewing(self.like(x, max(x.itemsize, y.itemsize)), x, y)

    def multiply(self, x: Tensor, y: Tensor) -> Tensor:
        """``x * y``, which saves both."""
        return self.apply(self.like(x), [x, y], [x, y])

    def activation(self, x: Tensor, *, saves_output: bool = False) -> Tensor:
        """SiLU, GELU and the square save their input, ReLU its output."""
        out = self.like(x)
        return self.apply(out, [x], [out if saves_output else x])

    def dropout(self, x: Tensor, probability: float) -> Tensor:
        """On a CPU the mask is as large as its input, on CUDA a byte per element."""
        if not probability:
            return x
        mask = self.like(x, None if self.device == "cpu" else BOOL)
        return self.apply(self.like(x), [x], [mask])

    def copy(self, x: Tensor) -> Tensor:
        """``contiguous`` or ``reshape`` where the strides demand a copy; the gradient is a view."""
        return self._viewing(self.like(x), x)

    def copy_gradient(self, x: Tensor) -> Tensor:
        """A view whose gradient must be copied."""
        return self.apply(x.view(), [x])

    def repeat(self, x: Tensor, elements: Count) -> Tensor:
        """``repeat_interleave``: the gradients of a group are summed."""
        return self.apply(self.new(elements, x.itemsize), [x])

    def _viewing(self, out: Tensor, *inputs: Tensor) -> Tensor:
        """An operator whose inputs' gradients are views of its output's."""
        counts = [x.elements for x in inputs]
        return self.apply(out, inputs, backward=lambda dy, _: [dy.view(count) for count in counts])

    # -- torch: matmuls, norms, losses --------------------------------------------------------------------------------

    def linear(self, x: Tensor, layer: Linear, elements: int) -> Tensor:
        """``F.linear``: saves its input and its weight as they were multiplied."""
        x = self.cast(x, self.matmul_size) if self.is_autocast else x
        weight = self._cast_weight(layer[0])
        bias = None if layer[1] is None else self._cast_weight(layer[1])
        return self.apply(self.new(elements, self.matmul_size), [x, weight, bias], [x, weight])

    def _cast_weight(self, weight: Tensor) -> Tensor:
        if not self.is_autocast:
            return weight
        if id(weight) not in self.weight_casts:
            part, self.log.part = self.log.part, WEIGHT_CASTS
            self.weight_casts[id(weight)] = self.cast(weight, self.matmul_size)
            self.log.part = part
        return self.weight_casts[id(weight)]

    def embedding(self, weight: Tensor, elements: int) -> Tensor:
        """A lookup: the gradient is as large as the table."""
        return self.apply(self.new(elements, weight.itemsize), [weight])

    def fused_norm(self, x: Tensor, weights: list[Tensor], rows: Count, statistics: int) -> Tensor:
        """A norm as one operator of torch: saves its input and one or two numbers per row."""
        size = x.itemsize if self.device == "cpu" else FLOAT32
        saved = [self.new(rows, size) for _ in range(statistics)]
        return self.apply(self.like(x), [x, *weights], [x, *saved])

    def flash_attention(self, query: Tensor, key: Tensor, value: Tensor, rows: Count) -> Tensor:
        """The built-in attention that saves O(seq): its output and one number for each row of scores."""
        out, sums = self.like(query), self.new(rows, FLOAT32)
        return self.apply(out, [query, key, value], [query, key, value, out, sums])

    def cross_entropy(self, logits: Tensor) -> Tensor:
        """``F.cross_entropy``: saves the logarithms of all probabilities."""
        logits = self.cast(logits, FLOAT32)
        logs = self.like(logits)
        self.apply(logs, [logits], [logs])
        return self.apply(self.new(1, FLOAT32), [logs], [logs])

    # -- ours: sums of matmuls ----------------------------------------------------------------------------------------

    def _scratch_of_sum(self, elements: int, *, accumulates: bool) -> None:
        """``matmul_into`` a wider dtype: on CUDA the product is wide, and needs no buffer unless it is added.

        It is counted even if the matmul adds it itself, which only a GPU can tell.
        """
        if self.device != "cuda" or accumulates:
            self.scratch((elements, FLOAT32 if self.device == "cuda" else self.matmul_size))

    # -- ours: rotation, RMSNorm --------------------------------------------------------------------------------------

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Of queries or keys."""
        return self.apply(self.like(x), [x], [cos, sin])

    def rms_norm(self, x: Tensor, weight: Tensor, rows: Count, *, saves_scale: bool = True) -> Tensor:
        """The kernel of torch, which casts its result apart, or the Function; without ``saves_scale`` it saves x."""
        if saves_scale and self.device == "cuda" and x.itemsize == weight.itemsize:
            return self.cast(self.fused_norm(x, [weight], rows, statistics=1), self.matmul_size)
        width, weight_size = Count(weight.elements), weight.size
        out, scale = self.like(x, self.matmul_size), self.new(rows, FLOAT32)
        if self.matmul_size != FLOAT32:
            self.scratch(self._block_of_rows(rows, width))

        def backward(dy: Tensor, held: Held) -> Gradients:
            scale = held.pop() if saves_scale else self.new(rows, FLOAT32)
            dx, d_weight = self.like(held[0]), self._norm_backward(dy.itemsize, rows, width)
            del scale
            return [dx, d_weight if weight_size[1] == FLOAT32 else self.new(*weight_size)]

        return self.apply(out, [x, weight], [x, scale if saves_scale else None], backward)

    def _block_of_rows(self, rows: int, width: int) -> Size:
        """The float32 copy of the rows that are normalized at once."""
        return min(rows, sizes.norm_rows(width, self.device)) * width, FLOAT32

    def _norm_backward(self, dy_size: int, rows: int, width: int) -> Tensor:
        """``normalize_backward``: the weight's gradient, and two buffers of a block of rows, three for a narrow dy."""
        d_weight = self.new(width, FLOAT32)
        self.scratch(*[self._block_of_rows(rows, width)] * (2 if dy_size == FLOAT32 else 3))
        return d_weight

    # -- ours: attention, causal, then inside documents and windows ---------------------------------------------------

    def causal_attention(self, query: Tensor, key: Tensor, value: Tensor, shape: tuple[Count, Count, Count]) -> Tensor:
        """Saves its probabilities. All are (heads of all rows of the batch, positions, width of a head)."""
        heads, seq, head_dim = shape
        size, query_size = query.itemsize, query.size
        blocks = [(start, Count(end, "end")) for start, end in sizes.attention_blocks(seq)]
        probabilities = [self.new(heads * (end - start) * end, size) for start, end in blocks]
        rows, some_heads = sizes.even(seq, sizes.ATTENTION_ROWS), sizes.attention_heads(heads, seq, size)
        out, tile = self.like(query), (some_heads * rows * seq, size)
        self.scratch(tile)

        def backward(dy: Tensor, held: Held) -> Gradients:
            gradients: Gradients = [self.new(*query_size) for _ in range(3)]
            self.scratch(tile, (some_heads * (blocks[-2][1] if len(blocks) > 1 else rows) * head_dim, size))
            return gradients

        return self.apply(out, [query, key, value], [query, key, value, *probabilities], backward)

    def span_attention(
        self, query: Tensor, key: Tensor, value: Tensor, shape: tuple[int, ...], window: int | None = None
    ) -> Tensor:
        """In blocks of queries; ``shape``: rows, heads, positions, key heads, width of a head. For the longest span."""
        _, heads, seq, kv_heads, head_dim = shape
        size, shapes = query.itemsize, [x.size for x in (query, key, value)]
        rows, some_heads = sizes.span_heads(shape, kv_heads, size)
        block_rows = sizes.even(seq, sizes.ATTENTION_ROWS)
        reach = seq if window is None else min(seq, window - 1 + block_rows)  # keys that a block sees
        all_queries = rows * some_heads * (heads // kv_heads) * block_rows
        mask = (rows + 1) * block_rows * reach * BOOL
        tile = (all_queries * seq, size)
        block = all_queries * head_dim * size
        key_elements = rows * some_heads * seq * head_dim
        q_copy = block * (heads > kv_heads)  # no views of one dimension
        dy_copy = block * (heads > kv_heads or rows > 1)
        out = self.like(query)
        self.scratch(tile, (max(block, q_copy + mask), 1))

        def backward(dy: Tensor, held: Held) -> Gradients:
            gradients: Gradients = [self.new(*input_size) for input_size in shapes]
            product = max(block, 0 if size == FLOAT32 else key_elements // seq * reach * size)
            self.scratch(tile, tile, (2 * key_elements, FLOAT32), (q_copy + max(mask, dy_copy + product), 1))
            return gradients

        return self.apply(out, [query, key, value], [query, key, value], backward)

    # -- ours: SwiGLU -------------------------------------------------------------------------------------------------

    def swiglu(self, x: Tensor, weights: Weights, shape: Shape, *, saves: bool) -> Tensor:
        """Memory-optimized SwiGLU; ``saves`` is true at level 0."""
        itemsizes = self.matmul_size, weights[0].itemsize
        has_norm = weights[3] is not None
        is_whole = sizes.prefers_whole(*shape, *itemsizes, self.device, saves=saves, has_norm=has_norm)
        run = self._swiglu_whole if is_whole else self._swiglu_tiles
        return run(x, weights, shape, saves)

    def _swiglu_whole(self, x: Tensor, weights: Weights, shape: Shape, saves: bool) -> Tensor:
        tokens, hidden, width = shape
        size, (gate, up, down, norm) = self.matmul_size, weights
        has_norm = norm is not None
        matrix, wide = (hidden * width, size), (tokens * width, size)

        def weight_cast() -> Tensor | None:
            return self.new(*matrix) if down.itemsize != size else None

        def project(h: Tensor, weight: Tensor) -> Tensor:
            def backward(dy: Tensor, held: Held) -> Gradients:
                cast = weight_cast()
                dh = self.new(tokens * hidden, size)
                del cast
                _again = self._normalized(held[0], tokens, hidden, has_norm)
                return [dh, self.new(*matrix)]

            cast = self.cast(weight, size)
            return self.apply(self.new(*wide), [h, cast], [x], backward)

        def backward(dy: Tensor, held: Held) -> Gradients:
            dy = dy if dy.itemsize == size else self.like(dy, size)
            if not saves:
                h = self._normalized(held.pop(), tokens, hidden, has_norm)
                for _ in range(2):
                    cast = weight_cast()
                    held.append(self.new(*wide))
                    del cast
                del h
            cast = weight_cast()
            du = self.new(*wide)
            del cast
            _a, dg = self.new(*wide), self.new(*wide)
            held.clear()
            return [dg, du, self.new(*matrix)]

        h = self.cast(x, size) if norm is None else self.rms_norm(x, norm, tokens, saves_scale=False)
        g, u = project(h, gate), project(h, up)
        del h
        cast, y = self.cast(down, size), self.new(tokens * hidden, size)
        self.scratch(wide)
        return self.apply(y, [g, u, cast], (g, u) if saves else (x,), backward)

    def _swiglu_tiles(self, x: Tensor, weights: Weights, shape: Shape, saves: bool) -> Tensor:
        tokens, hidden, width = shape
        size, has_norm = self.matmul_size, weights[3] is not None
        y = self.new(tokens * hidden, size)
        _casts = [self.like(weight, size) for weight in weights[:3] if weight is not None and weight.itemsize != size]
        rows = Count(sizes.forward_rows(tokens, width, size, self.device), "rows")
        g, u = (self.new((tokens if saves else rows) * width, size) for _ in range(2))
        _a = self.new(rows * width, size) if saves else None
        self._normalized(x, rows, hidden, has_norm)
        sizes_of_weights = [None if weight is None else weight.size for weight in weights]

        def backward(dy: Tensor, held: Held) -> Gradients:
            return self._swiglu_tiles_backward(dy, held, sizes_of_weights, shape)

        return self.apply(y, [x, *weights], (x, g, u) if saves else (x,), backward)

    def _swiglu_tiles_backward(self, dy: Tensor, held: Held, weights: list[Any], shape: Shape) -> Gradients:
        tokens, hidden, width = shape
        *matrices, norm = weights
        size, x = self.matmul_size, held[0]
        dx, weight_size = self.like(x), matrices[0][1]
        rows = sizes.backward_rows(tokens, width, size, self.device, weight_size)
        columns = sizes.chunk_columns(rows, width, size, self.device)
        sum_size = weight_size if rows >= tokens else FLOAT32
        sums = [self.new(elements, sum_size) for elements, _ in matrices]
        d_norm = self.new(hidden, FLOAT32) if norm else None
        dh_size = size if columns >= width and not norm else FLOAT32
        tile, chunk = rows * columns, (columns * hidden, size)
        _out = self.new(max(tile, rows * hidden) if dh_size != size else tile, size)
        _tiles = [self.new(tile, size) for _ in range(2 if len(held) > 1 else 4)]
        _dy = dy if dy.itemsize == size else self.like(dy, size)
        h = self._normalized(x, rows, hidden, bool(norm))
        dh = self.new(rows * hidden, dh_size) if norm or dx.itemsize != dh_size else None
        casts: Held = []
        for _ in range(0, width, columns):
            if weight_size != size:
                casts = [self.new(*chunk) for _ in range(2)]  # the last chunk's live as long as the names do
                self.scratch(chunk)
            if sum_size != size:
                self._scratch_of_sum(columns * hidden, accumulates=rows < tokens)
        if norm:
            self._norm_backward(FLOAT32, rows, hidden)
        del h, dh, casts
        d_weights: Gradients = [d if sum_size == weight_size else self.like(d, weight_size) for d in sums]
        return [dx, *d_weights, self.new(*norm) if norm and norm[1] != FLOAT32 else d_norm]

    def _normalized(self, x: Tensor, rows: int, hidden: int, has_norm: bool) -> Tensor:
        """What enters the matmuls of a tile."""
        if not has_norm and x.itemsize == self.matmul_size:
            return x.view()
        h = self.new(rows * hidden, self.matmul_size)
        if has_norm and self.matmul_size != FLOAT32:
            self.scratch(self._block_of_rows(rows, hidden))
        return h

    # -- ours: the loss in chunks -------------------------------------------------------------------------------------

    def linear_cross_entropy(
        self, hidden: Tensor, head: Linear, tokens: Count, vocab: Count, num_chunks: int | None
    ) -> Tensor:
        """The gradients are computed in forward and held until backward."""
        gradients = self._loss_gradients(hidden, *head, tokens, vocab, num_chunks)
        return self.apply(self.new(1, FLOAT32), [hidden, *head], [hidden], lambda *_: gradients)

    def _loss_gradients(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, tokens: int, vocab: int, num_chunks: int | None
    ) -> Gradients:
        size, width = self.matmul_size, hidden.elements // tokens
        _per_token = [self.new(tokens, itemsize) for itemsize in (FLOAT32, BOOL, FLOAT32)]  # losses, counted, weights
        _cast = self.like(weight, size) if weight.itemsize != size else None
        _wide_bias = self.like(bias, FLOAT32) if bias is not None and bias.itemsize != FLOAT32 else None
        rows = min(tokens, sizes.loss_rows(tokens, vocab, size, self.device, num_chunks))
        _logits = self.new(rows * sizes.logits_stride(vocab, self.device), size)
        d_hidden, d_weight = self.like(hidden), self.like(weight, FLOAT32)
        d_bias = None if bias is None else self.like(bias, FLOAT32)
        _index = self.new(tokens, INT64)
        h = None if hidden.itemsize == size else self.new(rows * width, size)
        if self.device == "cpu":  # softmax of a group of rows: a float32 buffer, unless the logits are float32 already
            group = min(rows, sizes.softmax_rows(vocab, FLOAT32))
            buffer = [(vocab * group, FLOAT32)] if size != FLOAT32 else []
            self.scratch((rows, FLOAT32), *buffer, *([(vocab, FLOAT32)] if bias is not None else []))
        if d_hidden.itemsize != size:
            self._scratch_of_sum(rows * width, accumulates=False)
        if size != FLOAT32:
            self._scratch_of_sum(width * min(sizes.vocab_block(self.device), vocab), accumulates=rows < tokens)
        del h
        return [
            d_hidden,
            d_weight if weight.itemsize == FLOAT32 else self.like(weight),
            self.like(bias) if bias is not None and bias.itemsize != FLOAT32 else d_bias,
        ]
