"""The digest of a checkpoint, which tells whether two runs are bit-identical."""

import hashlib
import os
from typing import Any

import torch

from lightning_llm.checkpoints.reading import read_checkpoint


def digest(path: str | os.PathLike[str]) -> str:
    """The sha256 of weights and optimizer state that ``fit`` has saved: two runs with the same one have the same bits.

    Raises:
        ValueError: As :func:`read_checkpoint`.
    """
    content = read_checkpoint(path, needs=("state_dict", "optimizer_states"))
    return digest_of([content["state_dict"], content["optimizer_states"]])


def digest_of(value: Any) -> str:
    """The sha256 of a part of a checkpoint."""
    total = hashlib.sha256()
    _add(total, value)
    return total.hexdigest()


def _add(total: Any, value: Any) -> None:
    """Add a nested value to a sha256: names in sorted order, shapes and bytes of tensors."""
    if isinstance(value, dict):
        for name in sorted(value, key=str):
            total.update(f"{name}\0".encode())
            _add(total, value[name])
    elif isinstance(value, list | tuple):
        for each in value:
            _add(total, each)
    elif isinstance(value, torch.Tensor):
        total.update(f"{value.dtype} {tuple(value.shape)}\0".encode())
        total.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    else:
        total.update(f"{value!r}\0".encode())
