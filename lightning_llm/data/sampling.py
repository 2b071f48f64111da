"""Random windows of a token array, for raw training loops that keep no order."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def sample_batch(
    tokens: NDArray[np.integer[Any]] | Tensor,
    batch_size: int,
    context_length: int,
    device: str | torch.device,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor]:
    """Windows that start anywhere, each start equally likely, drawn with replacement.

    Args:
        tokens: Ids, shape (tokens,), of any integer type; a memory map is read only where a window lies.
        batch_size: Number of windows.
        context_length: Tokens per window.
        device: Where the batch goes, such as ``cpu`` or ``cuda:0``.
        generator: Source of the starts. ``None``: torch's global one.

    Returns:
        Inputs and targets, int64, both of shape (batch_size, context_length); a target is the token behind its input.

    Raises:
        ValueError: If there is no window: fewer than ``context_length + 1`` tokens.
    """
    num_starts = len(tokens) - context_length
    if num_starts < 1 or context_length < 1 or batch_size < 1:
        raise ValueError(
            f"cannot take {batch_size} windows of context_length {context_length} from {len(tokens)} tokens: "
            f"both must be at least 1, and a window with its last target needs {context_length + 1} tokens"
        )
    where = generator.device if generator is not None else torch.device("cpu")
    starts = torch.randint(num_starts, (batch_size, 1), generator=generator, device=where).cpu()
    places = starts + torch.arange(context_length + 1)  # (batch, seq + 1)
    if isinstance(tokens, Tensor):
        windows = tokens[places.to(tokens.device)].long()
    else:
        windows = torch.from_numpy(np.asarray(tokens[places.numpy()]).astype(np.int64))
    windows = windows.to(device)
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()
