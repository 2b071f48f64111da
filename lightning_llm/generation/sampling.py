"""From logits to the next token.

The order is that of ``transformers``
(``GenerationMixin._get_logits_processor``), so that equal options mean the same:

    repetition penalty ─▶ temperature ─▶ top-k ─▶ top-p ─▶ min-p ─▶ softmax ─▶ a number in [0, 1) picks a token

The random numbers of a row depend on the seed, its prompt, which copy of that prompt it is, and the step, not on the
other rows. So a prompt gives the same text alone and in any batch, and copies of a prompt give several texts.
"""

import dataclasses
import hashlib
from collections.abc import Sequence
from typing import Any, TypedDict

import torch
from torch import Tensor

from lightning_llm.io.options import raise_all

LEAST, MOST = 1e-6, 1e6  # beyond them logits overflow float32, and look like those of damaged weights
_DRAWN_AT_ONCE = 64  # random numbers of a row: one call for each takes longer than making them


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is chosen.

    Attributes:
        temperature: Divides the logits; 0 always takes the most likely token.
        top_k: Sample among the ``top_k`` most likely tokens only.
        top_p: Sample among the fewest tokens whose probabilities reach ``top_p`` (Holtzman et al. 2020, "The Curious
            Case of Neural Text Degeneration", section 3.1).
        min_p: Sample among tokens at least ``min_p`` times as likely as the most likely one (Nguyen et al. 2024,
            "Turning Up the Heat: Min-p Sampling for Creative and Coherent LLM Outputs", section 3).
        repetition_penalty: Logits of tokens that are in the prompt or were generated are divided by it if positive,
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
        top_k = self.top_k
        top_p = self.top_p
        min_p = self.min_p
        inf = float("inf")
        penalty = self.repetition_penalty
        ranges = {
            "temperature": (
                f"0 (greedy decoding), or at least {LEAST} and finite",
                self.temperature == 0 or LEAST <= self.temperature < inf,
            ),
            "top_k": ("at least 1", top_k is None or top_k >= 1),
            "top_p": ("above 0 and at most 1", top_p is None or 0 < top_p <= 1),
            "min_p": ("at least 0 and at most 1", min_p is None or 0 <= min_p <= 1),
            "repetition_penalty": (f"from {LEAST} to {MOST} (1 changes nothing)", LEAST <= penalty <= MOST),
        }
        wrong = {name: accepted for name, (accepted, is_in_range) in ranges.items() if not is_in_range}
        raise_all(f"{name} must be {accepted}, got {getattr(self, name)}" for name, accepted in wrong.items())

    @property
    def is_greedy(self) -> bool:
        """Whether no random number is needed."""
        return self.temperature == 0


class SamplingOptions(TypedDict, total=False):
    """The fields of :class:`Sampling` as keyword arguments."""

    temperature: float
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float


def filter_logits(logits: Tensor, sampling: Sampling, seen: Tensor | None = None) -> Tensor:
    """Logits to sample from; what is ruled out is minus infinity, and the most likely token never is.

    Args:
        logits: (batch, vocab), float32 or float64. Not modified.
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
        # a token stays while those before it do not reach top_p: the most likely one always stays
        beyond = probabilities.cumsum(dim=-1) - probabilities >= sampling.top_p
        logits = logits.masked_fill(beyond.scatter(-1, order, beyond), float("-inf"))
    if sampling.min_p:
        probabilities = logits.softmax(dim=-1)
        unlikely = probabilities < sampling.min_p * probabilities.amax(dim=-1, keepdim=True)
        logits = logits.masked_fill(unlikely, float("-inf"))
    return logits


def pick(logits: Tensor, numbers: Tensor | None) -> Tensor:
    """A token for each row: the most likely, or the one whose interval of cumulative probability has the number.

    Args:
        logits: (batch, vocab), filtered.
        numbers: (batch, 1), float64 in [0, 1), on the device of the logits; ``None`` takes the most likely.

    Returns:
        (batch,) token ids on that device; -1 where the logits are NaN.
    """
    if numbers is None:
        tokens = logits.argmax(dim=-1)
        is_number = logits.isfinite().any(dim=-1)
    else:
        reached = logits.softmax(dim=-1).cumsum(dim=-1, dtype=torch.float64)
        tokens = torch.searchsorted(reached, numbers * reached[:, -1:], right=True).squeeze(-1)
        is_number = tokens < logits.shape[-1]  # nothing is above NaN
    return torch.where(is_number, tokens, -1)


class Draws:
    """The random numbers of each row, step by step.

    Args:
        prompts: Token ids of each row.
        generator: The seed is one draw from it. ``None``: torch's global generator.
        device: Of the numbers, which are made on the CPU.
    """

    def __init__(self, prompts: Sequence[Sequence[int]], generator: torch.Generator | None, device: Any) -> None:
        self._device = device
        seed_device = "cpu" if generator is None else generator.device
        seed = int(torch.randint(2**62, (), device=seed_device, generator=generator))
        copies: dict[tuple[int, ...], int] = {}
        self._generators = []
        for prompt in map(tuple, prompts):
            copies[prompt] = copies.get(prompt, -1) + 1
            content = repr((seed, copies[prompt], prompt)).encode()
            digest = int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")
            self._generators.append(torch.Generator().manual_seed(digest % 2**63))
        self._block = torch.empty(0)
        self._used = _DRAWN_AT_ONCE

    def next(self) -> Tensor:
        """(batch, 1), float64 in [0, 1)."""
        if self._used == _DRAWN_AT_ONCE:
            rows = [torch.rand(_DRAWN_AT_ONCE, generator=each, dtype=torch.float64) for each in self._generators]
            self._block = torch.stack(rows).to(self._device)
            self._used = 0
        self._used += 1
        return self._block[:, self._used - 1 : self._used]
