"""Decoding: one prefill over the prompts, then one position per step, from a cache of keys and values.

Each step turns logits into the next token. The order is that of ``transformers``
(``GenerationMixin._get_logits_processor``), so that equal options mean the same:

    repetition penalty ─▶ temperature ─▶ top-k ─▶ top-p ─▶ min-p ─▶ softmax ─▶ a number in [0, 1) picks a token

The random numbers of a row depend on the seed, its prompt, which copy of that prompt it is, and the step, not on the
other rows. So a prompt gives the same text alone and in any batch, and copies of a prompt give several texts.

When a row has filled the context, its newest half is read again as a new prompt and decoding continues. Positions stay
within what the model was trained on. As they start again from 0, the cached keys, rotated by their old positions,
cannot be reused; a prefill every half context costs one more position per step, in larger matmuls than decoding's.
A model with an attention that keeps no cache reads the whole context at each step.
"""

import dataclasses
import hashlib
import warnings
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, TypedDict, cast, overload

import torch
from torch import Tensor, nn

from lightning_llm.generation.packed_step import FEWEST_STEPS, PackedStep, can_pack
from lightning_llm.model.kv_cache import KVCache
from lightning_llm.model.transformer import Transformer

if TYPE_CHECKING:
    from typing_extensions import Unpack

Prompts = Tensor | Sequence[Sequence[int]]
Ends = int | Sequence[int] | None
_DRAWN_AT_ONCE = 64  # random numbers of a row: one call for each takes longer than making them

# ---- from logits to the next token


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
        top_k, top_p, min_p, inf = self.top_k, self.top_p, self.min_p, float("inf")
        ranges = {
            "temperature": ("at least 0 (0: greedy decoding) and finite", 0 <= self.temperature < inf),
            "top_k": ("at least 1", top_k is None or top_k >= 1),
            "top_p": ("above 0 and at most 1", top_p is None or 0 < top_p <= 1),
            "min_p": ("at least 0 and at most 1", min_p is None or 0 <= min_p <= 1),
            "repetition_penalty": ("above 0 and finite (1 changes nothing)", 0 < self.repetition_penalty < inf),
        }
        wrong = {name: accepted for name, (accepted, is_in_range) in ranges.items() if not is_in_range}
        if wrong:
            raise ValueError("; ".join(f"{name} must be {wrong[name]}, got {getattr(self, name)}" for name in wrong))

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


def pick(logits: Tensor, numbers: Tensor | None) -> list[int]:
    """A token for each row: the most likely, or the one whose interval of cumulative probability has the number.

    Args:
        logits: (batch, vocab), filtered.
        numbers: (batch, 1), float64 in [0, 1); ``None`` takes the most likely.

    Returns:
        A token id for each row.

    Raises:
        ValueError: The logits are NaN.
    """
    if numbers is None:
        tokens: list[int] = logits.argmax(dim=-1).tolist()
        are_numbers = bool(logits.isfinite().any(dim=-1).all())
    else:
        reached = logits.softmax(dim=-1).cumsum(dim=-1, dtype=torch.float64)
        places = torch.searchsorted(reached, numbers.to(reached.device) * reached[:, -1:], right=True)
        tokens = places.squeeze(-1).tolist()
        are_numbers = max(tokens) < logits.shape[-1]  # nothing is above NaN
    if not are_numbers:
        raise ValueError("logits are NaN: the model's weights are damaged, or training diverged")
    return tokens


class Draws:
    """The random numbers of each row, step by step.

    Args:
        prompts: Token ids of each row.
        generator: The seed is one draw from it. ``None``: torch's global generator.
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
        """(batch, 1), float64 in [0, 1), on the CPU."""
        if self._used == _DRAWN_AT_ONCE:
            rows = [torch.rand(_DRAWN_AT_ONCE, generator=each, dtype=torch.float64) for each in self._generators]
            self._block, self._used = torch.stack(rows), 0
        self._used += 1
        return self._block[:, self._used - 1 : self._used]


# ---- from prompts to tokens


class GenerationOptions(SamplingOptions, total=False):
    """Optional arguments of :func:`generate`."""

    eos_token_id: Ends
    generator: torch.Generator | None


@overload
def generate(
    model: nn.Module, input_ids: Tensor, *, max_new_tokens: int, **options: "Unpack[GenerationOptions]"
) -> Tensor: ...
@overload
def generate(
    model: nn.Module, input_ids: Sequence[Sequence[int]], *, max_new_tokens: int, **options: "Unpack[GenerationOptions]"
) -> list[list[int]]: ...
def generate(
    model: nn.Module,
    input_ids: Prompts,
    *,
    max_new_tokens: int,
    eos_token_id: Ends = None,
    generator: torch.Generator | None = None,
    **sampling: "Unpack[SamplingOptions]",
) -> Tensor | list[list[int]]:
    """Continue prompts.

    Rows are independent: with a generator of the same seed a prompt gives the same tokens alone and in a batch. Copies
    of a prompt within a batch give different ones.

    Args:
        model: A ``Transformer``, or a module that holds one as ``transformer``. Its mode is left as it is: call
            ``eval()`` before, if it has dropout.
        input_ids: (batch, seq) prompts, or a list of prompts of any lengths; at least one token each. A prompt longer
            than ``max_position_embeddings`` is truncated on the left.
        max_new_tokens: How many tokens to add at most.
        eos_token_id: A sequence ends with this token, or one of these; in a tensor the rest of the row is filled with
            it (the first of several). Stops when all have ended.
        generator: Source of randomness: one number is drawn from it. ``None``: torch's global one.
        sampling: ``temperature``, ``top_k``, ``top_p``, ``min_p``, ``repetition_penalty``: see :class:`Sampling`.

    Returns:
        The prompts and what was added: (batch, seq + new), or for a list of prompts a list of them.

    Raises:
        ValueError: An option out of range, or an empty prompt.
    """
    steps = Decoder(model, input_ids, max_new_tokens, Sampling(**sampling), generator, ends := _listed(eos_token_id))
    added: list[list[int]] = [[] for _ in steps.prompts]
    for tokens in steps:
        for row, token in tokens.items():
            added[row].append(token)
    if not isinstance(input_ids, Tensor):
        return [prompt + new for prompt, new in zip(steps.prompts, added, strict=True)]
    longest = max(map(len, added))
    fill = ends[0] if ends else 0
    new = torch.tensor([row + [fill] * (longest - len(row)) for row in added], dtype=input_ids.dtype)
    return torch.cat((input_ids, new.view(len(added), longest).to(input_ids.device)), dim=1)


def stream(
    model: nn.Module,
    input_ids: Tensor,
    *,
    max_new_tokens: int,
    eos_token_id: Ends = None,
    generator: torch.Generator | None = None,
    **sampling: "Unpack[SamplingOptions]",
) -> Iterator[Tensor]:
    """As :func:`generate`, token by token: yields (batch,) ids. Options are checked when it is called."""
    steps = Decoder(model, input_ids, max_new_tokens, Sampling(**sampling), generator, ends := _listed(eos_token_id))
    fill, rows = ends[0] if ends else 0, range(len(steps.prompts))
    return (input_ids.new_tensor([tokens.get(row, fill) for row in rows]) for tokens in steps)


def _listed(ends: Ends) -> Sequence[int]:
    return [] if ends is None else [ends] if isinstance(ends, int) else ends


class Decoder:
    """Decodes rows. Each step of an iteration gives the new token of every row that has not ended.

    Args:
        model: As for :func:`generate`.
        prompts: As for :func:`generate`.
        max_new_tokens: Of each row.
        sampling: How tokens are chosen.
        generator: Source of randomness.
        ends: Tokens that end a row.

    Attributes:
        prompts: Token ids of each row.

    Raises:
        ValueError: ``max_new_tokens`` below 0, or an empty prompt, or none.
    """

    def __init__(
        self,
        model: nn.Module,
        prompts: Prompts,
        max_new_tokens: int,
        sampling: Sampling,
        generator: torch.Generator | None = None,
        ends: Sequence[int] = (),
    ) -> None:
        if isinstance(prompts, Tensor):
            is_empty, got = prompts.dim() != 2 or 0 in prompts.shape, f"shape {tuple(prompts.shape)}"
        else:
            is_empty, got = not prompts or not all(map(len, prompts)), f"lengths {list(map(len, prompts))}"
        errors = [f"input_ids must be (batch, seq) prompts of at least one token each, got {got}"] if is_empty else []
        if max_new_tokens < 0:
            errors.append(f"max_new_tokens must be at least 0, got {max_new_tokens}")
        if errors:
            raise ValueError("; ".join(errors))
        self._model = cast(Transformer, getattr(model, "transformer", model))
        listed = prompts.tolist() if isinstance(prompts, Tensor) else prompts
        self.prompts = [[int(token) for token in row] for row in listed]
        self._max_new_tokens, self._sampling, self._ends = max_new_tokens, sampling, frozenset(ends)
        self._draws = None if sampling.is_greedy else Draws(self.prompts, generator)
        self._longest = self._model.config.max_position_embeddings
        self._contexts = [prompt[-self._longest :] for prompt in self.prompts]
        self._ended = [False] * len(self.prompts)
        self._device = self._model.embed_tokens.weight.device
        self._uses_cache = getattr(self._model, "uses_cache", True)
        if not self._uses_cache:
            kinds = {type(layer.self_attn).__qualname__ for layer in self._model.layers}
            text = f"attention {', '.join(sorted(kinds))} has no cache: each token is computed from the whole context"
            warnings.warn(text, stacklevel=2)
        self._seen: Tensor | None = None
        if sampling.repetition_penalty != 1:
            shape = len(self.prompts), self._model.config.vocab_size or 0
            self._seen = torch.zeros(shape, dtype=torch.bool, device=self._device)
            for row, prompt in enumerate(self.prompts):
                self._seen[row, prompt] = True

    def end(self, row: int) -> None:
        """End a row: it gets no more tokens."""
        self._ended[row] = True

    def __iter__(self) -> Iterator[dict[int, int]]:
        """Decode once."""
        for step in range(self._max_new_tokens):
            if all(self._ended):
                return
            read = (self._advance if step else self._prefill) if self._uses_cache else self._read_all
            tokens = self._choose(read())
            going = {row: token for row, token in enumerate(tokens) if not self._ended[row]}
            for row, token in enumerate(tokens):
                self._contexts[row].append(token)
                self._ended[row] |= token in self._ends
            yield going

    @torch.no_grad()
    def _prefill(self) -> Tensor:
        """Read the prompts, padded on the right, where no position looks: (batch, vocab)."""
        model, lengths = self._model, [len(context) for context in self._contexts]
        width = max(lengths)
        room = min(self._longest, width + self._max_new_tokens)
        self._cache = KVCache(model.config, len(lengths), room, self._device, _cache_dtype(model.embed_tokens.weight))
        rows = [context + [0] * (width - len(context)) for context in self._contexts]
        hidden = model(torch.tensor(rows, device=self._device), cache=self._cache)
        self._cache.set_lengths(lengths)
        packs = self._max_new_tokens >= FEWEST_STEPS and can_pack(model)
        self._packed = PackedStep(model, self._cache) if packs else None
        ends = torch.tensor(lengths, device=self._device) - 1
        return model.logits(hidden[torch.arange(len(lengths), device=self._device), ends])

    @torch.no_grad()
    def _read_all(self) -> Tensor:
        """Read all contexts, without a cache: (batch, vocab)."""
        for row, context in enumerate(self._contexts):
            if len(context) > self._longest:
                self._contexts[row] = context[-max(1, self._longest // 2) :]
        lengths = [len(context) for context in self._contexts]
        rows = [context + [0] * (max(lengths) - len(context)) for context in self._contexts]
        hidden = self._model(torch.tensor(rows, device=self._device))
        ends = torch.tensor(lengths, device=self._device) - 1
        return self._model.logits(hidden[torch.arange(len(lengths), device=self._device), ends])

    @torch.no_grad()
    def _advance(self) -> Tensor:
        """Read the newest token of each row: (batch, vocab)."""
        for row, length in enumerate(self._cache.lengths):
            if length == self._longest:
                self._read_again(row)
        tokens = torch.tensor([context[-1] for context in self._contexts], device=self._device)
        if self._packed is not None:
            return self._packed(tokens)
        return self._model.logits(self._model(tokens[:, None], cache=self._cache)[:, 0])

    def _read_again(self, row: int) -> None:
        """Read the newest half of a context, except its last token, which is read with those of the other rows."""
        self._contexts[row] = kept = self._contexts[row][-max(1, self._longest // 2) :]
        part = self._cache.row(row)
        if len(kept) > 1 and not self._ended[row]:
            self._model(torch.tensor([kept[:-1]], device=self._device), cache=part)
        lengths = [part.length if each == row else length for each, length in enumerate(self._cache.lengths)]
        self._cache.set_lengths(lengths)

    @torch.no_grad()
    def _choose(self, logits: Tensor) -> list[int]:
        if logits.dtype not in (torch.float32, torch.float64):
            logits = logits.float()
        filtered = filter_logits(logits, self._sampling, self._seen)
        tokens = pick(filtered, None if self._draws is None else self._draws.next())
        if self._seen is not None:
            self._seen[torch.arange(len(tokens)), tokens] = True
        return tokens


def _cache_dtype(weight: Tensor) -> torch.dtype:
    device = weight.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
