"""The digest of a checkpoint, which tells whether two runs are bit-identical."""

import hashlib
import os
from typing import Any

import torch

from lightning_llm.checkpoints.reading import read_checkpoint


def digest(path: str | os.PathLike[str]) -> str:
    """The sha256 of a checkpoint's weights and optimizer state: two runs with the same digest have the same bits.

    Args:
        path: A checkpoint that ``lightning-llm fit`` has written.

    Raises:
        ValueError: As :func:`read_checkpoint`.
    """
    content, total = read_checkpoint(path, needs=("state_dict", "optimizer_states")), hashlib.sha256()
    _add(total, [content["state_dict"], content["optimizer_states"]])
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
