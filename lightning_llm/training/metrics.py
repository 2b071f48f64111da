"""Loss, perplexity and bits per byte over a whole data set, from sums.

Means of means are wrong as soon as batches differ in size, and logits kept for a perplexity metric cost another
tokens × vocab. So the state is two sums, reduced once over all processes: nats and tokens.
"""

import math

import torch
from torch import Tensor
from torchmetrics import Metric


class LanguageModelMetrics(Metric):
    """Sums of nats and tokens; ``compute`` gives loss, perplexity and, where the bytes are known, bits per byte.

    Args:
        bytes_per_token: UTF-8 bytes of text that one token stands for, on average over the data set; ``None`` where
            the text is not known.
    """

    full_state_update = False
    nats: Tensor
    tokens: Tensor

    def __init__(self, bytes_per_token: float | None = None) -> None:
        super().__init__()
        self.bytes_per_token = bytes_per_token
        # float64: a float32 sum of 10^8 losses would lose the digits that tell two runs apart
        self.add_state("nats", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("tokens", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, mean_loss: Tensor, tokens: Tensor | int) -> None:
        """Add a batch.

        Args:
            mean_loss: Scalar, nats per token over the batch.
            tokens: Number of tokens that the mean was taken over.
        """
        self.nats += mean_loss.detach().double() * tokens
        self.tokens += tokens

    def compute(self) -> dict[str, float]:
        """``loss`` (nats per token), ``perplexity``, and ``bits_per_byte`` where the bytes are known."""
        loss = (self.nats / self.tokens).item()
        result = {"loss": loss, "perplexity": math.exp(loss) if loss < 700 else math.inf}
        if self.bytes_per_token is not None:
            result["bits_per_byte"] = loss / math.log(2) / self.bytes_per_token
        return result
