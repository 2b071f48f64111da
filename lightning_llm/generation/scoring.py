"""The loss of a model on a text that may be longer than its context, with a window that moves by a stride.

Every token except the first of a text is predicted once. A window holds as many tokens as the context; each window
except the first scores its last ``stride`` tokens only, so that each of them has at least ``context - stride`` tokens
before it. A large stride is fast and gives a higher loss; a small one is closer to what the model can do, and slow. The
recipe is that of the documentation of ``transformers``, "Perplexity of fixed-length models"; there the mean over
windows is weighted with one token too few for each window except the first, here every token counts once.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator
from typing import cast

import torch
from torch import nn
from torch.nn import functional as F

from lightning_llm.data.bigrams import repeated_bigrams
from lightning_llm.model.transformer import Transformer

Window = tuple[list[int], int]

# Windows are scored in batches that are large enough for fast matmuls and stay in cache. One thread of an AMD EPYC:
# 40,000 tokens in windows of 128 (4 layers of 128) take 4.4 s one by one, 2.9 s in batches of 1,024 and 4,096 tokens,
# 3.9 s in batches of 16,384; 20,000 in windows of 256 (4 of 256) 7.6, 6.9, 7.9 and 8.5 s. A GPU needs larger batches;
# the best size there was not measured.
TOKENS_AT_ONCE = {"cpu": 1024, "cuda": 16384}
LOGITS_AT_ONCE = 2**23  # 32 MiB in float32


@dataclasses.dataclass(frozen=True)
class Score:
    """Sums over the tokens that were predicted.

    Attributes:
        nats: Their negative log-likelihood.
        tokens: How many.
        bytes: UTF-8 bytes that they stand for; 0 if unknown.
        recall_nats: As ``nats``, of tokens whose pair with the one before them occurred earlier in their window.
        recall_tokens: How many these are.
    """

    nats: float = 0.0
    tokens: int = 0
    bytes: int = 0
    recall_nats: float = 0.0
    recall_tokens: int = 0

    def __add__(self, other: "Score") -> "Score":
        sides = (dataclasses.astuple(self), dataclasses.astuple(other))
        return Score(*(ours + theirs for ours, theirs in zip(*sides, strict=True)))

    @property
    def loss(self) -> float:
        """Nats per token; NaN without tokens."""
        return self.nats / self.tokens if self.tokens else math.nan

    @property
    def recall_loss(self) -> float | None:
        """Nats per token of repeated bigrams; ``None`` if there are none."""
        return self.recall_nats / self.recall_tokens if self.recall_tokens else None

    @property
    def other_loss(self) -> float | None:
        """Nats per token of the other tokens; ``None`` if there are none."""
        others = self.tokens - self.recall_tokens
        return (self.nats - self.recall_nats) / others if others else None

    @property
    def perplexity(self) -> float:
        """The exponential of the loss."""
        return math.exp(self.loss) if not self.loss >= 700 else math.inf

    @property
    def bits_per_byte(self) -> float | None:
        """Comparable between tokenizers; ``None`` if bytes are unknown."""
        return self.nats / math.log(2) / self.bytes if self.bytes else None


def score(model: nn.Module, ids: Iterable[int], *, stride: int | None = None) -> Score:
    """Score one text.

    Args:
        model: A ``Transformer``, or a module that holds one as ``transformer``.
        ids: Its tokens, read as they are needed: only some windows are in memory.
        stride: Tokens that a window scores. ``None``: half the context.

    Returns:
        The sums, without bytes.

    Raises:
        ValueError: ``stride`` is below 1, or not below the context: some token would have no context.
        IndexError: An id is beyond the model's vocabulary.
    """
    transformer = cast(Transformer, getattr(model, "transformer", model))
    context = transformer.config.max_position_embeddings
    stride = max(1, context // 2) if stride is None else stride
    if not 1 <= stride < context:
        raise ValueError(f"stride must be at least 1 and below the model's context of {context}, got {stride}")
    total = Score()
    device = transformer.embed_tokens.weight.device.type
    rows = max(1, TOKENS_AT_ONCE.get(device, TOKENS_AT_ONCE["cpu"]) // context)
    for (_, scored), alike in itertools.groupby(windows(ids, context, stride), lambda one: (len(one[0]), one[1])):
        while some := [window for window, _ in itertools.islice(alike, rows)]:
            total += _score_windows(transformer, some, scored)
    return total


def windows(ids: Iterable[int], context: int, stride: int) -> Iterator[Window]:
    """Windows of at most ``context`` tokens, and how many at the end of each are predicted."""
    window: list[int] = []
    new = 0
    for token in ids:
        if len(window) == context:  # more follow: this window is complete
            yield window, min(new, context - 1)  # a text's first token is not predicted
            window = window[stride:]
            new = 0
        window.append(token)
        new += 1
    if min(new, len(window) - 1) > 0:
        yield window, min(new, len(window) - 1)


@torch.no_grad()
def _score_windows(model: Transformer, windows: list[list[int]], scored: int) -> Score:
    """Score windows of one length, each with ``scored`` predicted tokens at its end."""
    if not scored:
        return Score()
    if max(map(max, windows)) >= (model.config.vocab_size or 0):  # a GPU would report it too late
        raise IndexError(f"a token id is beyond the vocabulary of {model.config.vocab_size}")
    ids = torch.tensor(windows, device=model.embed_tokens.weight.device)
    hidden = model(ids)[:, -scored - 1 : -1].flatten(0, 1)
    targets = ids[:, -scored:].flatten()
    repeated = repeated_bigrams(ids[:, :-1], ids[:, 1:])[:, -scored:].flatten()
    nats = recall_nats = 0.0
    rows = max(1, LOGITS_AT_ONCE // model.lm_head.out_features)
    for part, wanted, is_repeated in zip(*(each.split(rows) for each in (hidden, targets, repeated)), strict=True):
        logits = model.logits(part)
        wide = logits if logits.dtype == torch.float64 else logits.float()
        losses = F.cross_entropy(wide, wanted, reduction="none").cpu().double()
        nats += float(losses.sum())
        recall_nats += float(losses[is_repeated.cpu()].sum())
    return Score(nats, len(targets), 0, recall_nats, int(repeated.sum()))
