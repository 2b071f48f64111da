"""What is in a token store: how long its documents are."""

from collections import Counter
from collections.abc import Iterator

import numpy as np

from lightning_llm.data.token_store import TokenStore, read_tokens

_BLOCK = 1 << 22  # tokens that are scanned at once


def document_lengths(store: TokenStore, split: str) -> Counter[int] | None:
    """How many documents of a split have each length in tokens, the end of text not counted.

    Reads the whole split, in blocks. ``None`` where documents are not marked by an end-of-text id.

    Raises:
        ValueError: If the store has no such split.
    """
    total, eos = len(store.tokens(split)), store.eos_token_id
    if eos is None:
        return None
    lengths: Counter[int] = Counter()
    begin = 0
    for start in range(0, total, _BLOCK):
        block = read_tokens(store.path / f"{split}.bin", store.dtype, start, _BLOCK)
        ends = np.flatnonzero(block == eos) + start
        if len(ends):
            found, counts = np.unique(np.diff(ends, prepend=begin - 1) - 1, return_counts=True)
            lengths.update(dict(zip(found.tolist(), counts.tolist(), strict=True)))
            begin = int(ends[-1]) + 1
    if begin < total:
        lengths[total - begin] += 1
    return lengths


def by_powers_of_two(lengths: Counter[int]) -> Iterator[tuple[int, int, int]]:
    """A histogram: first and last length of each bin, 0, 1, 2 to 3, 4 to 7 and so on, and its documents."""
    bins: Counter[int] = Counter()
    for length, count in lengths.items():
        bins[length.bit_length()] += count
    for bits in range(min(bins, default=0), max(bins, default=-1) + 1):
        yield 1 << bits >> 1, (1 << bits) - 1, bins[bits]
