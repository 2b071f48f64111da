"""Several token streams as one: which source each sequence of the run comes from, and which of its windows it is.

Sequence ``i`` has the number ``x(i) = (A i + B) mod 2^64``, where ``A / 2^64`` is the golden ratio's fraction and ``B``
comes from the seed; the circle of these numbers is cut into arcs as long as the weights, one arc for each source.
Golden-ratio steps spread evenly (Knuth, TAOCP volume 3, section 6.4, theorem S), so every stretch of the run has each
source's share to within a few sequences, where drawing at random would be off by the square root of the length.

The sequence's place in its source's own order is how many earlier sequences came from there. That is a count of lattice
points, a sum of floors, which Euclid's algorithm finds in O(64) steps: as with one source the batch of a step is a pure
function of (seed, step, global batch size), with O(1) memory.

All sources share one address space, laid end to end, so that a window is one number as before.
"""

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from lightning_llm.data.order import WindowOrder

_MODULUS = 1 << 64
_STEP = 0x9E3779B97F4A7C15


class MixtureOrder:
    """The order of the windows of several streams.

    Args:
        orders: Of each source.
        sizes: Tokens of each source.
        weights: Share of the sequences, for each source; only their ratios count.
        seed: Any whole number.

    Attributes:
        num_windows: Of all sources together.
    """

    def __init__(
        self, orders: Sequence[WindowOrder], sizes: Sequence[int], weights: Sequence[float], *, seed: int
    ) -> None:
        self._orders, self._first_tokens = list(orders), first_tokens(sizes)
        self._phase = seed * _STEP**2 % _MODULUS
        shares = [0.0, *accumulate(weights)]
        self._edges = [int(share / shares[-1] * _MODULUS) for share in shares]
        self.num_windows = sum(order.num_windows for order in orders)

    def starts(self, first: int, count: int) -> NDArray[np.int64]:
        """First tokens of the windows of the run's sequences ``first``, ``first + 1`` and so on, shape (count,).

        Positions in the address space of all sources together.
        """
        numbers = np.arange(first, first + count, dtype=np.uint64) * np.uint64(_STEP) + np.uint64(self._phase)
        inner = np.array(self._edges[1:-1], dtype=np.uint64)
        source = np.searchsorted(inner, numbers, side="right")
        starts = np.empty(count, dtype=np.int64)
        for number, order in enumerate(self._orders):
            here = np.flatnonzero(source == number)
            if here.size:
                starts[here] = self._first_tokens[number] + order.starts(self.earlier(number, first), here.size)
        return starts

    def earlier(self, source: int, sequence: int) -> int:
        """How many sequences before number ``sequence`` come from a source."""
        low, high = self._edges[source : source + 2]
        return self._below(high, sequence) - self._below(low, sequence)

    def _below(self, edge: int, count: int) -> int:
        """How many of the first ``count`` numbers are below ``edge``: x mod M < e is ⌊x / M⌋ - ⌊(x - e) / M⌋."""
        whole, rest = (_floor_sum(count, _MODULUS, _STEP, self._phase - e) for e in (0, edge))
        return whole - rest


def first_tokens(sizes: Sequence[int]) -> NDArray[np.int64]:
    """Where each source begins in the address space, shape (sources,)."""
    return np.array([0, *accumulate(sizes[:-1])], dtype=np.int64)


def source_slices(starts: NDArray[np.int64], firsts: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """For each source, which of the positions lie in it."""
    source = np.searchsorted(firsts, starts, side="right") - 1
    return [np.flatnonzero(source == number) for number in range(len(firsts))]


def _floor_sum(count: int, modulus: int, step: int, start: int) -> int:
    """The sum of ``(step * i + start) // modulus`` over ``i`` below ``count``, as Euclid would take it."""
    total = 0
    while count:
        total += count * (count - 1) // 2 * (step // modulus) + count * (start // modulus)
        step, start = step % modulus, start % modulus
        # Count the lattice points below the line along the other axis.
        count, start = divmod(step * count + start, modulus)
        modulus, step = step, modulus
    return total
