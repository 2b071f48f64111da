"""Targets that end a bigram that their window has had before: a model can recall them from its context.

Arora et al. 2023, "Zoology" (arXiv 2312.04927, section 3), split a loss in this way: most of what attention-free models
lose to attention is at such tokens ("AR hits"). They also leave out bigrams that are frequent in training, which a
model may know by heart; here, all repeated bigrams count, so that the split is a function of the text alone.
"""

import torch
from torch import Tensor

from lightning_llm.data.batches import IGNORED


def repeated_bigrams(input_ids: Tensor, targets: Tensor, documents: Tensor | None = None) -> Tensor:
    """Whether each pair of an input and its target has occurred earlier in the row.

    Args:
        input_ids: (batch, seq).
        targets: (batch, seq). Where one is ignored, the pair is that of the input and the next one.
        documents: (batch, seq), the document of each input, if attention stays inside it: pairs of others do not count.

    Returns:
        (batch, seq), bool.
    """
    following = torch.where(targets == IGNORED, input_ids.roll(-1, dims=1), targets)
    base = torch.maximum(input_ids.max(), following.max()) + 1
    pairs = input_ids * base + following
    if documents is not None:
        pairs = pairs + documents * base**2
    ordered, places = pairs.sort(dim=1, stable=True)  # equal pairs become neighbors, the first one first
    is_repeated = torch.zeros_like(ordered, dtype=torch.bool)
    is_repeated[:, 1:] = ordered[:, 1:] == ordered[:, :-1]
    return torch.empty_like(is_repeated).scatter_(1, places, is_repeated)
