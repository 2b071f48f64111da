"""How large the operators' tiles and chunks are. No torch: the accounting reads the same numbers.

Sizes are in bytes where a cache or an allocation is meant, in rows (tokens) or columns where a product is. ``device``
is a device's type; what is not listed is treated as a CPU.
"""

# One buffer of a tile of SwiGLU. On 2 cores of an AMD EPYC (Zen 5) at 4,096 tokens and 1024/4096, products of such
# tiles are as fast as whole ones to 2 %; tiles of half the width are 5 to 10 % slower. A GPU wants more work at once.
TILE_BYTES = {"cpu": 8 * 2**20, "cuda": 64 * 2**20}
LONGEST_BLOCK = 8192  # tokens
SHORTEST_BLOCK = 256
NARROWEST_CHUNK = 256
NORM_ROWS = 256  # normalised at once: their float32 copies stay in cache

# Logits of one chunk of the loss. 2 cores of an AMD EPYC (Zen 5), vocabulary 50,257: 320 tokens in float32, whose
# products are as fast as those of 1,024 tokens; those of 128 are 20 % slower.
CHUNK_BYTES = {"cpu": 64 * 2**20, "cuda": 256 * 2**20}
SMALLEST_CHUNK = 256  # tokens
# Columns of one product. There, 4,096 tokens in float32: 1.8 s in such blocks, 2.1 s in one.
VOCAB_BLOCK = {"cpu": 2048, "cuda": 16384}
GROUP_BYTES = 3 * 2**20  # logits that softmax and its gradient are computed for at once, so that they stay in cache

# Longest sequence of the attention that keeps its probabilities; beyond, the built-in's O(seq) memory is worth more.
LONGEST_SHORT_ATTENTION = 512


def even(total: int, most: int) -> int:
    """The size of pieces of ``total`` that are as even as possible and at most ``most``."""
    return -(-total // -(-total // most))


def forward_rows(tokens: int, width: int, itemsize: int, device: str) -> int:
    """Tokens of a tile of SwiGLU in forward, at the full intermediate width."""
    return even(tokens, max(SHORTEST_BLOCK, 2 * _tile_elements(itemsize, device) // width))


def backward_rows(tokens: int) -> int:
    """Tokens of a tile of SwiGLU in backward."""
    return even(tokens, LONGEST_BLOCK)


def chunk_columns(rows: int, width: int, itemsize: int, device: str, num_chunks: int | None = None) -> int:
    """Columns of a tile of SwiGLU in backward."""
    if num_chunks is not None:
        return -(-width // num_chunks)
    columns = even(width, max(NARROWEST_CHUNK, _tile_elements(itemsize, device) // rows))
    return min(width, 64 * -(-columns // 64))  # products like such widths


def loss_rows(tokens: int, vocab: int, itemsize: int, device: str, num_chunks: int | None = None) -> int:
    """Tokens of a chunk of logits."""
    tokens = max(1, tokens)
    if num_chunks is not None:
        return -(-tokens // num_chunks)
    budget = CHUNK_BYTES.get(device, CHUNK_BYTES["cpu"]) // (vocab * itemsize)
    return min(tokens, max(SMALLEST_CHUNK, budget // 64 * 64))  # products like such heights


def vocab_block(device: str) -> int:
    """Columns of logits that one product computes."""
    return VOCAB_BLOCK.get(device, VOCAB_BLOCK["cpu"])


def softmax_rows(vocab: int, itemsize: int) -> int:
    """Tokens whose logits go through softmax at once; ``itemsize`` is that of the softmax."""
    return max(1, GROUP_BYTES // (vocab * itemsize))


def _tile_elements(itemsize: int, device: str) -> int:
    return TILE_BYTES.get(device, TILE_BYTES["cpu"]) // itemsize
