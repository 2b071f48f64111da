"""How large the operators' tiles and chunks are, and which attention runs. No torch: the accounting reads the same.

Sizes of caches and allocations are in bytes, those of matmuls in rows (tokens) or columns. ``device`` is a device's
type; one that is not listed is treated as a CPU.
"""

from collections.abc import Iterator, Sequence
from typing import Literal

from lightning_llm.ops import traced

CHECKPOINT_LEVELS = (0, 1, 2)  # of the memory-optimized SwiGLU
AttentionForm = Literal["short", "spans", "flex", "fused", "efficient", "math"]

# One buffer of a tile of SwiGLU. On 2 cores of an AMD EPYC (Zen 5) at 4,096 tokens and 1024/4096, matmuls of such tiles
# are as fast as whole ones to within 2%; tiles of half the width are 5 to 10 % slower. A GPU wants more work at once.
TILE_BYTES = {"cpu": 8 * 2**20, "cuda": 128 * 2**20}
LONGEST_BLOCK = 8192  # tokens; on CUDA more, where a tile of them has the whole width
# Tokens of a block whose weight gradients, being float32, are summed in place: fewer tokens mean more columns per tile.
# 16,384 tokens of 384/1024 with freed memory cached: 707 ms forward and backward in float32, 763 in blocks of 8,192
# (the standard MLP 724); in bf16 359 and 374 (336); 8,192 of 768/2048 1,410 and 1,466 (1,364), 661 and 686 (646).
SUMMING_BLOCK = {"cpu": 2048}
SHORTEST_BLOCK = 256
NARROWEST_CHUNK = 256
# One float32 copy of the rows that are normalized at once: three of them stay in cache. 16,384 × 384 backward takes
# 6.4 ms in pieces of 3 MiB, 8.7 in 0.8 and 15.3 in one.
NORM_BYTES = {"cpu": 3 * 2**20, "cuda": 64 * 2**20}

# Logits of one chunk of the loss. 2 cores of an AMD EPYC (Zen 5), vocabulary 50,257: 320 tokens in float32, whose
# matmuls are as fast as those of 1,024 tokens; those of 128 are 20 % slower.
CHUNK_BYTES = {"cpu": 64 * 2**20, "cuda": 512 * 2**20}
# The same where memory is planned. Of 4,096 × 768 × 50,257 in bf16, this leaves 0.117 of the plain loss's peak, by its
# bytes; the time is not measured yet.
PLANNED_CHUNK_BYTES = {"cuda": 128 * 2**20}
SMALLEST_CHUNK = 256  # tokens
# Columns of one matmul. There, 4,096 tokens in float32: 1.8 s in such blocks, 2.1 s in one.
VOCAB_BLOCK = {"cpu": 2048, "cuda": 65536}
# Rows of logits begin at multiples of so many elements: on CUDA matmuls and kernels then read 16 bytes at once.
LOGITS_MULTIPLE = {"cpu": 1, "cuda": 64}
GROUP_BYTES = 3 * 2**20  # logits that softmax and its gradient are computed for at once, so that they stay in cache

# Longest sequence of the attention that saves its probabilities; beyond, the built-in's O(seq) memory is worth more.
LONGEST_SHORT_ATTENTION = 512
# Queries in one matmul with all keys up to theirs: fewer masked pairs than with all queries. Their scores for
# some heads at once, so that they stay in cache: 384 heads × 256 × 64 on 2 cores of an AMD EPYC (Zen 5) take 59 + 89 ms
# in float32, where all heads and queries at once took 61 + 110; in bf16 28 + 45 and 33 + 50; 48 heads × 512 × 64 in
# float32 25 + 40 and 32 + 58.
ATTENTION_ROWS = 128
ATTENTION_BYTES = 3 * 2**20


def even(total: int, most: int) -> int:
    """The size of pieces of ``total`` that are as even as possible and at most ``most``."""
    return -(-total // -(-total // most))


def norm_rows(width: int, device: str) -> int:
    """Rows that are normalized at once."""
    return max(1, NORM_BYTES.get(device, NORM_BYTES["cpu"]) // (4 * max(1, width)))


def forward_rows(tokens: int, width: int, itemsize: int, device: str) -> int:
    """Tokens of a tile of SwiGLU in forward, at the full intermediate width."""
    return even(tokens, max(SHORTEST_BLOCK, 2 * _tile_elements(itemsize, device) // width))


def backward_rows(tokens: int, width: int, itemsize: int, device: str, weight_itemsize: int) -> int:
    """Tokens of a tile of SwiGLU in backward."""
    if device == "cuda":  # a sum over blocks reads and writes all weight gradients, and casts the weights, once more
        return even(tokens, max(LONGEST_BLOCK, _tile_elements(itemsize, device) // width))
    longest = SUMMING_BLOCK.get(device, LONGEST_BLOCK) if weight_itemsize >= 4 else LONGEST_BLOCK
    return even(tokens, min(longest, LONGEST_BLOCK))


def chunk_columns(rows: int, width: int, itemsize: int, device: str, num_chunks: int | None = None) -> int:
    """Columns of a tile of SwiGLU in backward; the last one may have fewer, but none has one only.

    A single column of a bf16 matrix, as factor or result, is read at the wrong places by torch 2.9's matmuls on a CPU.
    """
    if num_chunks is not None:
        columns = -(-width // num_chunks)
    else:
        columns = even(width, max(NARROWEST_CHUNK, _tile_elements(itemsize, device) // rows))
        columns = 64 * -(-columns // 64)  # fast for matmuls
    columns = min(width, max(2, columns))
    while width % columns == 1:
        columns += 1
    return columns


def prefers_whole(
    tokens: int,
    hidden: int,
    width: int,
    itemsize: int,
    weight_itemsize: int,
    device: str,
    *,
    saves: bool,
    has_norm: bool,
) -> bool:
    """Whether SwiGLU has so few tokens that its tiles could need more memory than plain linear layers.

    These hold six matrices (tokens, intermediate) in backward of the gating, or five and a weight gradient. Tiles hold
    three weight gradients, dx and their buffers, possibly in addition to gradients of earlier micro-batches.
    ``itemsize`` is that of the matmuls' factors, ``saves`` whether g and u are saved, ``has_norm`` whether the norm is
    part of it.
    """
    rows = backward_rows(tokens, width, itemsize, device, weight_itemsize)
    columns = chunk_columns(rows, width, itemsize, device)
    plain = max(6 * tokens * width * itemsize, 5 * tokens * width * itemsize + hidden * width * weight_itemsize)
    sums = 3 * hidden * width * (weight_itemsize if rows >= tokens else max(4, weight_itemsize))
    tiles = ((3 if saves else 5) * rows * columns + (2 * tokens * width if saves else 0)) * itemsize
    casts = 4 * columns * hidden * itemsize if weight_itemsize != itemsize else 0
    wide = 2 * rows * hidden * 4  # a block of dx in float32, and that of one chunk
    norm = rows * hidden * itemsize + 3 * min(rows, norm_rows(hidden, device)) * hidden * 4 if has_norm else 0
    return plain < sums + tokens * hidden * weight_itemsize + tiles + casts + wide + norm


def loss_rows(tokens: int, vocab: int, itemsize: int, device: str, num_chunks: int | None = None) -> int:
    """Tokens of a chunk of logits."""
    tokens = max(1, tokens)
    if num_chunks is not None:
        return -(-tokens // num_chunks)
    return _rows_within(CHUNK_BYTES.get(device, CHUNK_BYTES["cpu"]), tokens, vocab, itemsize)


def planned_loss_chunks(tokens: int, vocab: int, itemsize: int, device: str) -> int | None:
    """Number of chunks of logits where memory is planned; ``None``: as many as without a plan."""
    if device not in PLANNED_CHUNK_BYTES:
        return None
    usual = loss_rows(tokens, vocab, itemsize, device)
    rows = _rows_within(PLANNED_CHUNK_BYTES[device], tokens, vocab, itemsize)
    return None if rows >= usual else -(-tokens // rows)


def _rows_within(logits_bytes: int, tokens: int, vocab: int, itemsize: int) -> int:
    return min(tokens, max(SMALLEST_CHUNK, logits_bytes // (vocab * itemsize) // 64 * 64))  # fast for matmuls


def logits_stride(vocab: int, device: str) -> int:
    """Elements from one row of logits to the next."""
    multiple = LOGITS_MULTIPLE.get(device, LOGITS_MULTIPLE["cpu"])
    return multiple * -(-vocab // multiple)


def vocab_block(device: str) -> int:
    """Columns of logits that one matmul computes."""
    return VOCAB_BLOCK.get(device, VOCAB_BLOCK["cpu"])


def softmax_rows(vocab: int, itemsize: int) -> int:
    """Tokens whose logits go through softmax at once; ``itemsize`` is that of the softmax."""
    return max(1, GROUP_BYTES // (vocab * itemsize))


def attention_blocks(seq: int) -> list[tuple[int, int]]:
    """Starts and ends of the blocks of queries; each sees the keys before its end."""
    rows = even(seq, ATTENTION_ROWS)
    return [(start, min(start + rows, seq)) for start in range(0, seq, rows)]


def attention_heads(heads: int, seq: int, itemsize: int) -> int:
    """Heads, of all rows of a batch, whose scores of one block exist at once."""
    return even(heads, max(1, ATTENTION_BYTES // (even(seq, ATTENTION_ROWS) * seq * itemsize)))


def span_heads(shape: Sequence[int], kv_heads: int, itemsize: int) -> tuple[int, int]:
    """Rows, and key heads in each, whose scores of one block of queries exist at once in attention within spans.

    ``shape`` is that of queries: rows, heads and positions first.
    """
    batch, heads, seq, *_ = shape
    of_block = heads // kv_heads * even(seq, ATTENTION_ROWS) * seq * itemsize
    some = max(1, ATTENTION_BYTES // of_block)
    return (even(batch, some // kv_heads), kv_heads) if some >= kv_heads else (1, even(kv_heads, some))


def attention_form(
    device: str, itemsize: int, head_dim: int, seq: int, *, mask: str, dropout: float, training: bool = True
) -> AttentionForm:
    """Form of attention that runs. Only ``math`` needs memory that grows with the square of a long sequence.

    Args:
        device: Type of the device.
        itemsize: Of queries, keys and values.
        head_dim: Width of a head.
        seq: Number of queries.
        mask: ``causal`` (also for a query that sees all keys), ``spans`` or ``dense``.
        dropout: Probability of dropping an attention weight.
        training: Whether gradients are needed.

    Returns:
        ``short``: ``ops/attention.py``, which saves probabilities. ``spans``: ``ops/span_attention.py``, in blocks of
        queries. ``flex``: the same with FlexAttention, which needs heads of 16 or more. ``fused``: flash attention, by
        torch or cuDNN (on CUDA: Ampere or newer). It accepts grouped keys. ``efficient``: torch's memory-efficient
        kernel on CUDA, for float32 and for masks. It needs grouped keys expanded to all heads; otherwise torch falls
        back to its plain form. ``math``: torch's plain form, or what torch chooses on a device that is unknown here.
    """
    if mask == "spans":
        return "flex" if device == "cuda" and itemsize <= 4 and head_dim >= 16 else "spans"
    if device == "cpu":
        is_short = mask == "causal" and training and 1 < seq <= LONGEST_SHORT_ATTENTION
        return "math" if dropout else "short" if is_short else "fused"
    if device == "cuda" and itemsize == 2 and head_dim <= 256 and mask == "causal":
        return "fused"
    # its kernels read 16 bytes at once
    return "efficient" if device == "cuda" and itemsize <= 4 and head_dim * itemsize % 16 == 0 else "math"


def _tile_elements(itemsize: int, device: str) -> int:
    return TILE_BYTES.get(device, TILE_BYTES["cpu"]) // itemsize


def slices(total: int, size: int) -> Iterator[slice]:
    """The parts of ``total`` rows or columns, ``size`` each and the rest in the last; in a trace some of them."""
    for start in traced.some_of(range(0, total, size), is_even=total % size == 0):
        yield slice(start, min(start + size, total))
