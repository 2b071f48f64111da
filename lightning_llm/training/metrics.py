"""Loss, perplexity and bits per byte over a whole data set, from sums.

Means of means are wrong as soon as batches differ in size, and logits kept for a perplexity metric cost another
tokens × vocab. So the state is sums, reduced once over all processes: nats, tokens and bytes of text.
"""

import math

import torch
from torch import Tensor
from torchmetrics import Metric


class LanguageModelMetrics(Metric):
    """Sums of nats, tokens and bytes; ``compute`` gives loss, perplexity and, where bytes are known, bits per byte."""

    full_state_update = False
    nats: Tensor
    tokens: Tensor
    bytes: Tensor

    def __init__(self) -> None:
        super().__init__()
        # float64: a float32 sum of 10^8 losses would lose the digits that tell two runs apart
        self.add_state("nats", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("tokens", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")
        self.add_state("bytes", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, mean_loss: Tensor, tokens: Tensor | int, bytes_per_token: float | None = None) -> None:
        """Add a batch.

        Args:
            mean_loss: Scalar, nats per token over the batch; the mean of nothing may be anything.
            tokens: Number of tokens that the mean was taken over.
            bytes_per_token: UTF-8 bytes of text that one of them stands for, on average over its data set; ``None``
                where the text is not known.
        """
        tokens = torch.as_tensor(tokens, device=self.nats.device)
        self.nats += torch.where(tokens > 0, mean_loss.detach().double() * tokens, 0.0)
        self.tokens += tokens
        self.bytes += tokens * (bytes_per_token or 0.0)

    def compute(self) -> dict[str, float]:
        """``loss`` (nats per token), ``perplexity``, and ``bits_per_byte`` where the bytes are known."""
        loss = (self.nats / self.tokens).item()
        result = {"loss": loss, "perplexity": math.exp(loss) if loss < 700 else math.inf}
        if self.bytes > 0:
            result["bits_per_byte"] = (self.nats / math.log(2) / self.bytes).item()
        return result
