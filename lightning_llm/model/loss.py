"""The loss that is trained on: from hidden states and the head to a sum over targets, and their count."""

from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_llm.data.batches import IGNORED
from lightning_llm.model.config import ModelConfig
from lightning_llm.model.unmodified import is_unmodified
from lightning_llm.ops.losses import check_token_weights, linear_cross_entropy


class CrossEntropy(nn.Module):
    """Cross-entropy of the next token, in nats.

    Args:
        config: With the vocabulary.
        z_loss: Weight of log² Z of each target (Chowdhery et al. 2022, "PaLM", section 5; Zoph et al. 2022, "ST-MoE").
        label_smoothing: The probability that all tokens share in the target distribution (Szegedy et al. 2016).
    """

    def __init__(self, config: ModelConfig, *, z_loss: float = 0.0, label_smoothing: float = 0.0) -> None:
        super().__init__()
        self.vocab_size = config.vocab_size
        self.z_loss = z_loss
        self.label_smoothing = label_smoothing

    def forward(
        self,
        hidden: Tensor,
        head: nn.Module,
        targets: Tensor,
        weights: Tensor | None = None,
        num_chunks: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The sum over the targets that count, and how many they are, or the sum of their weights.

        Args:
            hidden: (batch, seq, hidden).
            head: ``lm_head``; one that is no plain linear layer is called.
            targets: (batch, seq), token ids; ``IGNORED`` does not count.
            weights: (batch, seq), of each target, at least 0; ``None``: 1.
            num_chunks: As ``LanguageModel.loss_chunks``.

        Returns:
            Sum and count, scalars in float32 at least.
        """
        check_token_weights(weights, targets, "weights of a batch")
        counted = targets != IGNORED
        wide = torch.promote_types(hidden.dtype, torch.float32)
        count = counted.sum().to(wide) if weights is None else weights.to(wide).where(counted, 0).sum()
        return self._losses(hidden, head, targets, weights, num_chunks, "sum"), count

    def token_losses(self, hidden: Tensor, head: nn.Module, targets: Tensor, num_chunks: int | None = None) -> Tensor:
        """The loss of each target, (batch, seq), in float32 at least; 0 where it does not count."""
        return self._losses(hidden, head, targets, None, num_chunks, "none")

    def _losses(
        self,
        hidden: Tensor,
        head: nn.Module,
        targets: Tensor,
        weights: Tensor | None,
        num_chunks: int | None,
        reduction: Literal["sum", "none"],
    ) -> Tensor:
        if num_chunks == 0 or not is_unmodified(head, nn.Linear):  # an adapter on the head has to be called
            logits = head(hidden).to(torch.promote_types(hidden.dtype, torch.float32))
            return self._all_at_once(logits, targets, weights, reduction)
        assert isinstance(head, nn.Linear)
        return linear_cross_entropy(
            hidden,
            head.weight,
            targets,
            bias=head.bias,
            ignore_index=IGNORED,
            num_chunks=num_chunks and min(num_chunks, targets.numel()),  # the last batch of a text has fewer
            reduction=reduction,
            z_loss=self.z_loss,
            vocab_size=self.vocab_size,
            label_smoothing=self.label_smoothing,
            token_weights=weights,
        )

    def _all_at_once(self, logits: Tensor, targets: Tensor, weights: Tensor | None, reduction: str) -> Tensor:
        shape = targets.shape
        logits = logits[..., : self.vocab_size].flatten(0, -2)
        targets = targets.flatten()
        is_sum = weights is None and not self.z_loss and reduction == "sum"
        options: Any = {"reduction": "sum" if is_sum else "none", "label_smoothing": self.label_smoothing}
        losses = F.cross_entropy(logits, targets, ignore_index=IGNORED, **options)
        if is_sum:
            return losses
        if self.z_loss:
            losses = losses + self.z_loss * logits.logsumexp(-1).square().where(targets != IGNORED, 0)
        losses = losses if weights is None else losses * weights.flatten()
        return losses.sum() if reduction == "sum" else losses.view(shape)
