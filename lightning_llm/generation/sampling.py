"""From logits to the next token: what is filtered, in which order, and where the random numbers come from.

The order is that of ``transformers`` (``GenerationMixin._get_logits_processor``), so that equal options mean the same:

    repetition penalty ─▶ temperature ─▶ top-k ─▶ top-p ─▶ min-p ─▶ softmax ─▶ a number in [0, 1) picks a token

The random numbers of a row follow from the seed, its prompt, which copy of that prompt it is, and the step: not from
the rows beside it. So a prompt gives the same text alone and in any batch, and copies of a prompt give several texts.
"""

import dataclasses
import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

_DRAWN_AT_ONCE = 64  # random numbers of a row: one call for each takes longer than making them


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is chosen.

    Attributes:
        temperature: Divides the logits; 0 always takes the likeliest token.
        top_k: Sample among the ``top_k`` likeliest tokens only.
        top_p: Sample among the fewest tokens whose probabilities reach ``top_p`` (Holtzman et al. 2020, "The Curious
            Case of Neural Text Degeneration", section 3.1).
        min_p: Sample among tokens at least ``min_p`` times as likely as the likeliest (Nguyen et al. 2024, "Turning Up
            the Heat: Min-p Sampling for Creative and Coherent LLM Outputs", section 3).
        repetition_penalty: Logits of tokens that stand in the prompt or were generated are divided by it if positive,
            else multiplied (Keskar et al. 2019, "CTRL", section 4.1; there for the generated only). 1 changes nothing.

    Raises:
        ValueError: Options out of range, all of them at once.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        faults = []
        if not 0 <= self.temperature < float("inf"):
            faults.append(
                f"temperature must be at least 0 (0 takes the likeliest token) and finite, got {self.temperature}"
            )
        if self.top_k is not None and self.top_k < 1:
            faults.append(f"top_k must be at least 1, got {self.top_k}")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            faults.append(f"top_p must be above 0 and at most 1, got {self.top_p}")
        if self.min_p is not None and not 0 <= self.min_p <= 1:
            faults.append(f"min_p must be at least 0 and at most 1, got {self.min_p}")
        if not 0 < self.repetition_penalty < float("inf"):
            faults.append(
                f"repetition_penalty must be above 0 and finite (1 changes nothing), got {self.repetition_penalty}"
            )
        if faults:
            raise ValueError("; ".join(faults))

    @property
    def is_greedy(self) -> bool:
        """Whether no random number is needed."""
        return self.temperature == 0


def filter_logits(logits: Tensor, sampling: Sampling, seen: Tensor | None = None) -> Tensor:
    """Logits as they are sampled from; what is ruled out is minus infinity, and the likeliest token never is.

    Args:
        logits: (batch, vocab), float32 or float64. Left as they are.
        sampling: The options. At temperature 0 only the penalty is applied.
        seen: (batch, vocab), bool: which tokens the penalty is for.

    Returns:
        (batch, vocab).
    """
    if seen is not None:
        penalty = sampling.repetition_penalty
        logits = torch.where(seen, torch.where(logits < 0, logits * penalty, logits / penalty), logits)
    if sampling.is_greedy:
        return logits
    if sampling.temperature != 1:
        logits = logits / sampling.temperature
    if sampling.top_k is not None and sampling.top_k < logits.shape[-1]:
        weakest = logits.topk(sampling.top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < weakest, float("-inf"))
    if sampling.top_p is not None and sampling.top_p < 1:
        ordered, order = logits.sort(dim=-1, descending=True, stable=True)
        probabilities = ordered.softmax(dim=-1)
        # a token stays while those before it do not reach top_p: the likeliest one always stays
        beyond = probabilities.cumsum(dim=-1) - probabilities >= sampling.top_p
        logits = logits.masked_fill(beyond.scatter(-1, order, beyond), float("-inf"))
    if sampling.min_p:
        probabilities = logits.softmax(dim=-1)
        unlikely = probabilities < sampling.min_p * probabilities.amax(dim=-1, keepdim=True)
        logits = logits.masked_fill(unlikely, float("-inf"))
    return logits


def pick(logits: Tensor, numbers: Tensor | None) -> list[int]:
    """A token for each row: the likeliest, or where the number falls among the probabilities, one after another.

    Args:
        logits: (batch, vocab), filtered.
        numbers: (batch, 1), float64 in [0, 1); ``None`` takes the likeliest.

    Returns:
        A token id for each row.

    Raises:
        ValueError: The logits are no numbers.
    """
    if numbers is None:
        if not bool(logits.isfinite().any(dim=-1).all()):
            raise ValueError("the model's logits are no numbers (NaN): its weights are damaged, or training diverged")
        likeliest: list[int] = logits.argmax(dim=-1).tolist()
        return likeliest
    reached = logits.softmax(dim=-1).cumsum(dim=-1, dtype=torch.float64)
    places = torch.searchsorted(reached, numbers.to(reached.device) * reached[:, -1:], right=True)
    tokens: list[int] = places.squeeze(-1).tolist()
    if max(tokens) >= logits.shape[-1]:  # nothing is above NaN
        raise ValueError("the model's logits are no numbers (NaN): its weights are damaged, or training diverged")
    return tokens


class Draws:
    """The random numbers of each row, step by step.

    Args:
        prompts: Token ids of each row.
        generator: What the seed is taken from, with one draw. ``None``: torch's global generator.
    """

    def __init__(self, prompts: Sequence[Sequence[int]], generator: torch.Generator | None) -> None:
        device = "cpu" if generator is None else generator.device
        seed = int(torch.randint(2**62, (), device=device, generator=generator))
        copies: dict[tuple[int, ...], int] = {}
        self._generators = []
        for prompt in map(tuple, prompts):
            copies[prompt] = copies.get(prompt, -1) + 1
            content = repr((seed, copies[prompt], prompt)).encode()
            digest = int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")
            self._generators.append(torch.Generator().manual_seed(digest % 2**63))
        self._block, self._used = torch.empty(0), _DRAWN_AT_ONCE

    def next(self) -> Tensor:
        """(batch, 1), float64 in [0, 1), in main memory."""
        if self._used == _DRAWN_AT_ONCE:
            rows = [torch.rand(_DRAWN_AT_ONCE, generator=each, dtype=torch.float64) for each in self._generators]
            self._block, self._used = torch.stack(rows), 0
        self._used += 1
        return self._block[:, self._used - 1 : self._used]
