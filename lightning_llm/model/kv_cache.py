"""Keys and values of the tokens already seen, so that decoding computes one position a step.

Every row has a length of its own and begins at index 0, so that a token's index in the cache is its position. Prompts
of unequal length are padded on the right: no position of a row sees what is after the row's end, and the row's next
tokens overwrite it.
"""

from collections.abc import Sequence
from copy import copy

import torch
from torch import Tensor

from lightning_llm.model.config import ModelConfig


class KVCache:
    """Keys and values, (batch, kv_heads, max_length, head_dim) for each layer, allocated whole when first written.

    It is for decoding: no gradient flows through what it holds.

    Args:
        config: Of the model that will fill it.
        batch_size: Number of sequences.
        max_length: Most tokens it can hold, at most ``max_position_embeddings``.
        device: Of keys and values.
        dtype: Of keys and values.

    Attributes:
        lengths: Number of positions that are filled, of each row.
        max_length: Most tokens it can hold.
        dtype: Of keys and values.
    """

    def __init__(
        self, config: ModelConfig, batch_size: int, max_length: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.max_length = max_length
        self.dtype = dtype
        self._device = device
        self._batch_size = batch_size
        self._stores: list[dict[str, Tensor]] = [{} for _ in range(config.num_hidden_layers)]
        self._rows: slice | None = None  # of the stores, those that this cache has; all
        self._expected: list[int] | None = None
        self.lengths = [0] * batch_size
        self._ends: tuple[Tensor, Tensor] | None = None  # rows, and where each ends, on the device

    @property
    def length(self) -> int:
        """Positions that the longest row has."""
        return max(self.lengths)

    @property
    def is_even(self) -> bool:
        """Whether all rows are of one length."""
        return min(self.lengths) == max(self.lengths)

    def positions(self, new: int) -> Tensor:
        """Positions of the next tokens: (new,) where all rows are of one length, else (batch, new)."""
        steps = torch.arange(new, device=self._device)
        return steps + self.length if self.is_even else self._rows_and_ends()[1][:, None] + steps

    def mask(self, new: int) -> Tensor | None:
        """Mask of the positions that the next token of each row sees, its own among them.

        Args:
            new: Number of new tokens: several only where all rows are of one length.

        Returns:
            (batch, 1, 1, length + 1), bool; ``None`` where all rows are of one length.

        Raises:
            ValueError: Several tokens for rows of unequal length.
        """
        if self.is_even:
            return None
        if new != 1:
            raise ValueError(f"rows of unequal length take one new position at a time, got {new}")
        positions = torch.arange(self.length + 1, device=self._device)
        return (positions <= self._rows_and_ends()[1][:, None])[:, None, None]

    def append(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Write the new positions of one layer after each row's end and return all positions of that layer.

        ``lengths`` move once per forward pass, by :meth:`advance`: every layer writes at the same positions.

        Args:
            layer: Index of the block.
            key: (batch, kv_heads, new, head_dim).
            value: As ``key``.

        Returns:
            Keys and values, (batch, kv_heads, length + new, head_dim).

        Raises:
            ValueError: There is no room for the new positions.
        """
        return self.extend(layer, "key", key), self.extend(layer, "value", value)

    def extend(self, layer: int, name: str, new: Tensor) -> Tensor:
        """Append like :meth:`append`, for anything that a layer needs of earlier positions.

        Args:
            layer: Index of the block.
            name: Of the tensor, inside its layer.
            new: (batch, heads, new, width): of any heads and width, the same ones at each call.

        Returns:
            (batch, heads, length + new, width).

        Raises:
            ValueError: There is no room for the new positions.
        """
        start = self.length
        end = start + new.shape[-2]
        if end > self.max_length:
            raise ValueError(f"the cache holds {self.max_length} positions, asked to hold {end}")
        stores = self._stores[layer]
        if name not in stores:
            shape = self._batch_size, new.shape[1], self.max_length, new.shape[-1]
            # zeros: masked positions have weight 0, and 0 times uninitialized memory may be NaN
            stores[name] = torch.zeros(shape, device=self._device, dtype=self.dtype)
        store = stores[name] if self._rows is None else stores[name][self._rows]
        if self.is_even:
            store[:, :, start:end] = new.detach()
        else:
            rows, ends = self._rows_and_ends()
            store[rows, :, ends] = new.detach()[:, :, 0].to(self.dtype)
        return store[:, :, :end]

    def state(self, layer: int, name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """State of a layer from one call to the next, whatever the length: (batch, …), to be written in place.

        It is zero where a row is empty, and cannot go back: :meth:`set_lengths` of fewer positions does not change it.

        Args:
            layer: Index of the block.
            name: Of the tensor, inside its layer.
            shape: Without the batch.
            dtype: Of the tensor.
        """
        stores = self._stores[layer]
        if name not in stores:
            stores[name] = torch.zeros(self._batch_size, *shape, device=self._device, dtype=dtype)
        state = stores[name] if self._rows is None else stores[name][self._rows]
        for row, length in enumerate(self.lengths):
            if not length:
                state[row].zero_()
        return state

    def expect(self, lengths: Sequence[int]) -> None:
        """Set how many of the next positions each row has, up to :meth:`advance`; the rest of them is padding."""
        self._expected = list(lengths)

    def is_token(self, new: int) -> Tensor | None:
        """Mask of the next ``new`` positions, true where they are no padding: (batch, new), bool; ``None``: all."""
        if self._expected is None or min(self._expected) == new:
            return None
        lengths = torch.tensor(self._expected, device=self._device)
        return torch.arange(new, device=self._device) < lengths[:, None]

    def advance(self, new: int) -> None:
        """Count ``new`` positions of every row as filled."""
        self._expected = None
        self.lengths = [length + new for length in self.lengths]
        if self._ends is not None:  # not copied again, for which the host would wait
            rows, ends = self._ends
            self._ends = rows, ends + new

    def set_lengths(self, lengths: Sequence[int]) -> None:
        """Set how many positions of each row are filled: fewer than were written where a prompt was padded."""
        self.lengths = list(lengths)
        self._ends = None

    def row(self, index: int) -> "KVCache":
        """An empty cache of one row that shares this one's memory, and has a length of its own."""
        part = copy(self)
        part._rows = slice(index, index + 1)
        part.set_lengths([0])
        return part

    def _rows_and_ends(self) -> tuple[Tensor, Tensor]:
        if self._ends is None:
            rows, ends = torch.tensor([range(len(self.lengths)), self.lengths], device=self._device)
            self._ends = rows, ends
        return self._ends
