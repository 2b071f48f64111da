"""The loss that is trained on: from hidden states and the head to a sum over targets, and their count."""

from torch import Tensor, nn
from torch.nn import functional as F

from lightning_llm.model.config import ModelConfig
from lightning_llm.model.weights import is_plain
from lightning_llm.ops.losses import linear_cross_entropy

IGNORED = -100  # the target of tokens that do not count


class CrossEntropy(nn.Module):
    """Cross-entropy of the next token, in nats.

    Args:
        config: With the vocabulary.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.vocab_size = config.vocab_size

    def forward(
        self,
        hidden: Tensor,
        head: nn.Module,
        targets: Tensor,
        weights: Tensor | None = None,
        num_chunks: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The sum over the targets that count, and how many they are.

        Args:
            hidden: (batch, seq, hidden).
            head: ``lm_head``; one that is no plain linear layer is called.
            targets: (batch, seq), token ids; ``IGNORED`` does not count.
            weights: (batch, seq), of each target; ``None``: 1.
            num_chunks: As ``LanguageModel.loss_chunks``.

        Returns:
            Sum and count, scalars in float32.
        """
        count = (targets != IGNORED).sum().float()
        if num_chunks == 0 or not is_plain(head, nn.Linear):  # an adapter on the head has to be called
            logits = head(hidden)[..., : self.vocab_size].flatten(0, -2).float()
            return F.cross_entropy(logits, targets.flatten(), ignore_index=IGNORED, reduction="sum"), count
        assert isinstance(head, nn.Linear)
        total = linear_cross_entropy(
            hidden,
            head.weight,
            targets,
            bias=head.bias,
            ignore_index=IGNORED,
            num_chunks=num_chunks and min(num_chunks, targets.numel()),  # the last batch of a text has fewer
            reduction="sum",
            vocab_size=self.vocab_size,
        )
        return total, count
