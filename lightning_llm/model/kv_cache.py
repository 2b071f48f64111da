"""Keys and values of the tokens already seen, so that decoding computes one position a step."""

import torch
from torch import Tensor

from lightning_llm.model.config import ModelConfig


class KVCache:
    """Preallocated keys and values, (batch, kv_heads, max_length, head_dim) for each layer.

    It is for decoding: no gradient flows through what it holds.

    Args:
        config: Of the model that will fill it.
        batch_size: Number of sequences.
        max_length: Most tokens it can hold, at most ``max_position_embeddings``.
        device: Where it lives.
        dtype: Of keys and values.

    Attributes:
        length: Number of positions that are filled.
    """

    def __init__(
        self, config: ModelConfig, batch_size: int, max_length: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        assert config.head_dim is not None
        assert config.num_key_value_heads is not None
        shape = (config.num_hidden_layers, 2, batch_size, config.num_key_value_heads, max_length, config.head_dim)
        self._store = torch.empty(shape, device=device, dtype=dtype)
        self.length = 0

    @property
    def max_length(self) -> int:
        """Most tokens it can hold."""
        return self._store.shape[-2]

    def append(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Write the new positions of one layer and return all positions of that layer.

        ``length`` moves once per forward pass, by :meth:`advance`: every layer writes at the same place.

        Args:
            layer: Index of the block.
            key: (batch, kv_heads, new, head_dim).
            value: As ``key``.

        Returns:
            Keys and values, (batch, kv_heads, length + new, head_dim).

        Raises:
            ValueError: There is no room for the new positions.
        """
        end = self.length + key.shape[-2]
        if end > self.max_length:
            raise ValueError(f"the cache holds {self.max_length} positions, asked to hold {end}")
        keys, values = self._store[layer, 0], self._store[layer, 1]
        keys[:, :, self.length : end] = key.detach()
        values[:, :, self.length : end] = value.detach()
        return keys[:, :, :end], values[:, :, :end]

    def advance(self, new: int) -> None:
        """Count ``new`` positions as filled."""
        self.length += new

    def reset(self) -> None:
        """Forget all positions; the memory stays."""
        self.length = 0
