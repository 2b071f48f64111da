"""The token stores that a run reads, and their mixture: which store and which window each sequence comes from.

A run reads one store, or several stores of which each gets its share of the sequences (``data.mixture``).

Sequence ``i`` has the number ``x(i) = (A i + B) mod 2^64``, where ``A / 2^64`` is the golden ratio's fraction and ``B``
comes from the seed. The circle of these numbers is divided into arcs in proportion to the weights, one arc per source.
Golden-ratio steps spread evenly (Knuth, TAOCP volume 3, section 6.4, theorem S), so every stretch of the run has each
source's share to within a few sequences, where random draws would be off by the square root of the length.

The sequence's position in its source's own order is the number of earlier sequences from that source. It is a count of
lattice points, a sum of floors, which Euclid's algorithm finds in O(64) steps. So as with a single source, the batch of
a step is a pure function of (seed, step, global batch size), with O(1) memory.

All sources share one address space, concatenated, so that a window is one number as before.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from lightning_llm.data.batches import Batch, Starts, WindowReader
from lightning_llm.data.order import GOLDEN, WindowOrder
from lightning_llm.data.token_store import TokenStore, sha256

_MODULUS = 1 << 64


@dataclasses.dataclass(frozen=True)
class MixtureSource:
    """A token store and its share.

    Attributes:
        name: Its name in logs.
        store: The tokens.
        weight: Share of the run's sequences, relative to the other sources'. 0: it is validated alone.
    """

    name: str
    store: TokenStore
    weight: float = 1.0

    def windows(self, context_length: int) -> int:
        """Training windows of an epoch; of a source that is not trained on, none."""
        return 0 if not self.weight else (self.store.splits["train"].tokens - 1) // context_length


def open_mixture(mixture: Mapping[str, float]) -> list[MixtureSource]:
    """The sources of ``data.mixture``, weights by folders, in its order. Two folders of one name get a number each.

    Raises:
        ValueError: If a weight is below 0, none is above it, a store cannot be opened, or two were made with different
            tokenizers.
    """
    if not mixture:
        raise ValueError("data.mixture is empty: give the folders of token stores with their weights")
    wrong = [f"{folder}: {weight}" for folder, weight in mixture.items() if not 0 <= weight < math.inf]
    if wrong or not any(mixture.values()):
        found = ", ".join(wrong) or "none above 0"
        raise ValueError(f"data.mixture weights must be 0 or more, and one above 0, got {found}")
    stores = [TokenStore.open(folder) for folder in mixture]
    for store in stores[1:]:
        if store.tokenizer_sha256 != stores[0].tokenizer_sha256:
            raise ValueError(
                f"data.mixture: {stores[0].path} ({stores[0].vocab_size} ids) and {store.path} ({store.vocab_size} "
                f"ids) were made with different tokenizers: prepare one with --tokenizer {stores[0].tokenizer_file}"
            )
    names = [store.path.name or str(store.path) for store in stores]
    names = [name if names.count(name) == 1 else f"{name}-{number}" for number, name in enumerate(names, start=1)]
    return [MixtureSource(*given) for given in zip(names, stores, mixture.values(), strict=True)]


def fingerprint(sources: Sequence[MixtureSource]) -> str:
    """16 hex digits that identify all tokens; for a single store, its own fingerprint."""
    if len(sources) == 1:
        return sources[0].store.fingerprint
    return sha256("+".join(source.store.fingerprint for source in sources).encode())[:16]


def train_order(sources: Sequence[MixtureSource], context_length: int, seed: int) -> "WindowOrder | MixtureOrder":
    """The order of the run. The first source's own order is that of a run with it alone."""
    sizes = _train_sizes(sources)
    orders = [
        WindowOrder(num_tokens=size, context_length=context_length, seed=seed + number * GOLDEN)
        for number, size in enumerate(sizes)
    ]
    return orders[0] if len(orders) == 1 else MixtureOrder(orders, sizes, [s.weight for s in sources], seed=seed)


def train_reader(
    sources: Sequence[MixtureSource], context_length: int, document_start: int | None
) -> Callable[[Starts], Batch]:
    """Reads the windows of :func:`train_order`."""
    readers = [WindowReader(source.store, "train", context_length, document_start) for source in sources]
    return readers[0] if len(readers) == 1 else MixtureReader(readers, _train_sizes(sources))


def _train_sizes(sources: Sequence[MixtureSource]) -> list[int]:
    return [source.store.splits["train"].tokens for source in sources]


class MixtureReader:
    """Reads windows of several token files of these sizes in tokens, addressed as if they were concatenated."""

    def __init__(self, readers: Sequence[WindowReader], sizes: Sequence[int]) -> None:
        self._readers = list(readers)
        self._first_tokens = first_tokens(sizes)

    def __call__(self, starts: Starts) -> Batch:
        """The windows that start at these positions. Errors as of :class:`WindowReader`."""
        first = self._readers[0]
        rows = np.empty((len(starts), first.context_length + 1), dtype=first.tokens.dtype)
        for number, here in enumerate(source_slices(starts, self._first_tokens)):
            if here.size:
                rows[here] = self._readers[number].rows(starts[here] - self._first_tokens[number])
        return first.batch(rows)


class MixtureOrder:
    """The order of the windows of several sources.

    Args:
        orders: The order of each source by itself.
        sizes: Tokens of each source.
        weights: Share of the sequences, for each source; only their ratios count.
        seed: Any whole number.
    """

    def __init__(
        self, orders: Sequence[WindowOrder], sizes: Sequence[int], weights: Sequence[float], *, seed: int
    ) -> None:
        self._orders = list(orders)
        self._first_tokens = first_tokens(sizes)
        self._phase = seed * GOLDEN**2 % _MODULUS
        shares = [0.0, *accumulate(weights)]
        edges = [int(share / shares[-1] * _MODULUS) for share in shares]
        # the last number of all, if sources without a share come last: no run has that many sequences
        self._edges = [0, *(min(edge, _MODULUS - 1) for edge in edges[1:-1]), _MODULUS]

    def starts(self, first: int, count: int) -> Starts:
        """First tokens of the windows of the run's sequences ``first``, ``first + 1`` and so on, shape (count,).

        Positions in the address space of all sources together.
        """
        numbers = np.arange(first, first + count, dtype=np.uint64) * np.uint64(GOLDEN) + np.uint64(self._phase)
        source = np.searchsorted(np.array(self._edges[1:-1], dtype=np.uint64), numbers, side="right")
        starts = np.empty(count, dtype=np.int64)
        for number, order in enumerate(self._orders):
            here = np.flatnonzero(source == number)
            if here.size:
                starts[here] = self._first_tokens[number] + order.starts(self.earlier(number, first), here.size)
        return starts

    def earlier(self, source: int, sequence: int) -> int:
        """How many sequences before number ``sequence`` come from a source.

        Of the numbers x, those with x mod M < e are counted by ⌊x / M⌋ - ⌊(x - e) / M⌋. The first term cancels.
        """
        edges = self._edges[source : source + 2]
        low, high = (_floor_sum(sequence, _MODULUS, GOLDEN, self._phase - edge) for edge in edges)
        return low - high


def first_tokens(sizes: Sequence[int]) -> NDArray[np.int64]:
    """First position of each source in the address space, shape (sources,)."""
    return np.array([0, *accumulate(sizes[:-1])], dtype=np.int64)


def source_slices(starts: Starts, firsts: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """For each source, the indices of the positions in it."""
    source = np.searchsorted(firsts, starts, side="right") - 1
    return [np.flatnonzero(source == number) for number in range(len(firsts))]


def _floor_sum(count: int, modulus: int, step: int, start: int) -> int:
    """The sum of ``(step * i + start) // modulus`` over ``i`` below ``count``, by Euclid's algorithm."""
    total = 0
    while count:
        total += count * (count - 1) // 2 * (step // modulus) + count * (start // modulus)
        step, start = step % modulus, start % modulus
        # Count the lattice points below the line along the other axis.
        count, start = divmod(step * count + start, modulus)
        modulus, step = step, modulus
    return total
