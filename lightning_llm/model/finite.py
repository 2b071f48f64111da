"""Whether the weights of a model are numbers: a model with a single NaN answers everything with NaN."""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor


def only_finite(tensors: Iterable[tuple[str, Tensor]], source: object) -> Iterator[tuple[str, Tensor]]:
    """The same tensors, each looked at once, as it passes.

    Args:
        tensors: Names and tensors.
        source: Where they come from, for the message.

    Raises:
        ValueError: At the first tensor that holds NaN or infinite values.
    """
    for name, tensor in tensors:
        if not torch.isfinite(tensor).all():
            raise ValueError(
                f"{source}: the weights are NaN or infinite, {name} for one: take a checkpoint from before that"
            )
        yield name, tensor
