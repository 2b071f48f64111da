"""The order of training: which windows of the token stream make up which optimizer step.

The run is one endless list of sequences. Sequence ``i`` is window ``i mod W`` of epoch ``i div W`` in that epoch's own
order, where ``W`` is the number of windows of ``context_length`` targets that fit the stream; optimizer step ``t``
takes the sequences ``t * global_batch_size`` up to ``(t + 1) * global_batch_size``. So the batch of a step is a
function of (seed, step, global batch size) and of nothing else: not of devices, workers, micro-batches or of what ran
before. To resume is to continue counting.

Each epoch has a key, made from the seed and the epoch's number. The key gives

1. the epoch's offset: the stream has ``num_tokens - 1`` targets, ``W * context_length`` of them are used, and the
   few that are over (less than one window) are left out partly before the first window and partly behind the last;
2. the epoch's permutation of the windows: a Feistel network (Luby and Rackoff 1988, "How to construct pseudorandom
   permutations from pseudorandom functions") on the smallest power of two that holds ``W``, walked again where it
   leads outside (cycle walking: Black and Rogaway 2002, "Ciphers with arbitrary finite domains", section 3).

Nothing is stored per window, so a stream of 10^12 tokens costs as little as one of 10^3.
"""

import numpy as np
from numpy.typing import NDArray

# Luby and Rackoff need four rounds for 2^n inputs; a domain of a few bits mixes worse, hence twice as many.
ROUNDS = 8
GOLDEN = 0x9E3779B97F4A7C15  # the golden ratio's fraction times 2^64
_MASK = (1 << 64) - 1

UInt64 = NDArray[np.uint64]


class WindowOrder:
    """The order of the windows of one token stream.

    Args:
        num_tokens: Length of the stream, in tokens.
        context_length: Targets per window; a window reads ``context_length + 1`` tokens.
        seed: Any whole number.

    Attributes:
        num_windows: Windows of an epoch, ``(num_tokens - 1) // context_length``.

    Raises:
        ValueError: If the stream is shorter than one window and its last target.
    """

    def __init__(self, *, num_tokens: int, context_length: int, seed: int) -> None:
        if context_length < 1:
            raise ValueError(f"context_length must be at least 1, got {context_length}")
        check_window(num_tokens, context_length, "the text")
        self.context_length = context_length
        self.num_windows, self._left_out = divmod(num_tokens - 1, context_length)
        self._seed = np.array([seed & _MASK], dtype=np.uint64)
        bits = (self.num_windows - 1).bit_length()
        self._right_bits = np.uint64(bits // 2)
        self._right_mask = np.uint64((1 << bits // 2) - 1)
        self._left_mask = np.uint64((1 << (bits - bits // 2)) - 1)

    def starts(self, first: int, count: int) -> NDArray[np.int64]:
        """First tokens of the windows of the run's sequences ``first``, ``first + 1`` and so on.

        Args:
            first: Number of the first sequence, counted from the start of the run.
            count: How many sequences, at least one.

        Returns:
            Positions in the stream, shape (count,). The inputs of such a window are the tokens from ``start`` on, its
            targets those from ``start + 1`` on, ``context_length`` of each.
        """
        epoch, window = np.divmod(np.arange(first, first + count, dtype=np.int64), self.num_windows)
        epochs = np.arange(epoch[0], epoch[-1] + 1)
        keys = self._epoch_keys(epochs.astype(np.uint64))  # (1 + rounds, epochs)
        keys = keys[:, epoch - epochs[0]] if len(epochs) != 1 else keys  # (1 + rounds, count), or 1 for all
        offset = (keys[0] % np.uint64(self._left_out + 1)).astype(np.int64)
        place = self._permuted(window.astype(np.uint64), keys[1:]).astype(np.int64)
        starts: NDArray[np.int64] = offset + place * self.context_length
        return starts

    def _epoch_keys(self, epochs: UInt64) -> UInt64:
        """Key of the offset and of each round, one column per epoch."""
        epoch_keys = _mixed(_mixed(self._seed + np.uint64(GOLDEN)) + epochs)
        steps = np.array([k * GOLDEN & _MASK for k in range(1, ROUNDS + 2)], dtype=np.uint64)
        keys: UInt64 = _mixed(epoch_keys + steps[:, None])
        return keys

    def _permuted(self, window: UInt64, keys: UInt64) -> UInt64:
        """Where the permutations with these keys (rounds, 1 or windows) put these windows."""
        place = self._feistel(window, keys)
        while (outside := np.flatnonzero(place >= np.uint64(self.num_windows))).size:
            place[outside] = self._feistel(place[outside], keys if keys.shape[1] == 1 else keys[:, outside])
        return place

    def _feistel(self, value: UInt64, keys: UInt64) -> UInt64:
        left = value >> self._right_bits
        right = value & self._right_mask
        for number, key in enumerate(keys):  # the halves alternate: each round is undone by itself
            if number % 2:
                right = right ^ (_mixed(left + key) & self._right_mask)
            else:
                left = left ^ (_mixed(right + key) & self._left_mask)
        whole: UInt64 = (left << self._right_bits) | right
        return whole


def check_window(num_tokens: int, context_length: int, text: str, option: str = "data.context_length") -> None:
    """Refuse a text that is shorter than a window.

    Raises:
        ValueError: It is; ``text`` names it.
    """
    if num_tokens < context_length + 1:
        raise ValueError(
            f"{option} {context_length} is too long for {text}: it has {num_tokens} tokens, a window and "
            f"its last target need {context_length + 1}; take more text or a shorter context"
        )


def window_starts(
    step: int, *, seed: int, global_batch_size: int, context_length: int, num_tokens: int
) -> NDArray[np.int64]:
    """First tokens of the windows of optimizer step ``step``, shape (global_batch_size,).

    Micro-batches and ranks take slices of it. See :class:`WindowOrder` for the arguments and errors.
    """
    order = WindowOrder(num_tokens=num_tokens, context_length=context_length, seed=seed)
    return order.starts(step * global_batch_size, global_batch_size)


def _mixed(value: UInt64) -> UInt64:
    """The finaliser of SplitMix64 (Steele, Lea and Flood 2014, figure 16): every bit in moves every bit out."""
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: UInt64 = value ^ (value >> np.uint64(31))
    return mixed
