"""How likely a model finds a text that may be longer than its context: a window that moves on by strides.

Every token but the first of a text is predicted once. A window holds as many tokens as the context; each window but the
first scores its last ``stride`` tokens only, so that each of them has at least ``context - stride`` tokens before it. A
large stride is quick and gives a higher loss; a small one is nearer to what the model can do, and slow. The recipe is
that of the documentation of ``transformers``, "Perplexity of fixed-length models"; there the mean over windows is
weighted with one token too few for each window but the first, here every token counts once.
"""

import dataclasses
import math
from collections.abc import Iterable, Iterator
from typing import cast

import torch
from torch import nn
from torch.nn import functional as F

from lightning_llm.model.transformer import Transformer

Window = tuple[list[int], int]


@dataclasses.dataclass(frozen=True)
class Score:
    """Sums over the tokens that were predicted.

    Attributes:
        nats: Their negative log-likelihood.
        tokens: How many.
        bytes: UTF-8 bytes that they stand for; 0 where that is not known.
    """

    nats: float = 0.0
    tokens: int = 0
    bytes: int = 0

    def __add__(self, other: "Score") -> "Score":
        return Score(self.nats + other.nats, self.tokens + other.tokens, self.bytes + other.bytes)

    @property
    def loss(self) -> float:
        """Nats per token; no number where there is no token."""
        return self.nats / self.tokens if self.tokens else math.nan

    @property
    def perplexity(self) -> float:
        """The exponential of the loss."""
        return math.exp(self.loss) if not self.loss >= 700 else math.inf

    @property
    def bits_per_byte(self) -> float | None:
        """Comparable between tokenizers; ``None`` where bytes are not known."""
        return self.nats / math.log(2) / self.bytes if self.bytes else None


def score(model: nn.Module, ids: Iterable[int], *, stride: int | None = None) -> Score:
    """Score one text.

    Args:
        model: A ``Transformer``, or a module that holds one as ``transformer``.
        ids: Its tokens, read as they are needed: a window of them is held.
        stride: Tokens that a window scores. ``None``: half the context.

    Returns:
        The sums, without bytes.

    Raises:
        ValueError: ``stride`` is below 1, or not below the context: then some token would have nothing before it.
    """
    transformer = cast(Transformer, getattr(model, "transformer", model))
    context = transformer.config.max_position_embeddings
    stride = max(1, context // 2) if stride is None else stride
    if not 1 <= stride < context:
        raise ValueError(f"stride must be at least 1 and below the model's context of {context}, got {stride}")
    total = Score()
    for window, scored in windows(ids, context, stride):
        total += _score_window(transformer, window, scored)
    return total


def windows(ids: Iterable[int], context: int, stride: int) -> Iterator[Window]:
    """Windows of at most ``context`` tokens, and how many at the end of each are predicted from what is before them."""
    window: list[int] = []
    new = 0
    for token in ids:
        if len(window) == context:  # there is more: this window is done
            yield window, min(new, context - 1)  # a text's first token follows from nothing
            window, new = window[stride:], 0
        window.append(token)
        new += 1
    if min(new, len(window) - 1) > 0:
        yield window, min(new, len(window) - 1)


@torch.no_grad()
def _score_window(model: Transformer, window: list[int], scored: int) -> Score:
    if not scored:
        return Score()
    ids = torch.tensor([window], device=model.embed_tokens.weight.device)
    hidden = model(ids)[0, -scored - 1 : -1]
    logits = model.logits(hidden)
    wide = logits if logits.dtype == torch.float64 else logits.float()
    nats = F.cross_entropy(wide, ids[0, -scored:], reduction="none")
    return Score(float(nats.double().sum()), scored)
