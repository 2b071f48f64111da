"""Decoding: one prefill over the prompts, then one position a step, from a cache of keys and values.

Rows may be of unequal length; none of them notices the others. When a row has filled the context, the newest half of it
is read again as a new prompt and decoding goes on. Positions stay within what the model was trained on, and as they
begin anew the kept keys, which were turned by their old positions, cannot be taken over; reading again every half
context costs one more position a step, in large products, than decoding does.
"""

from collections.abc import Iterator, Sequence
from typing import cast, overload

import torch
from torch import Tensor, nn

from lightning_llm.generation.packed_step import FEWEST_STEPS, PackedStep, can_pack
from lightning_llm.generation.sampling import Draws, Sampling, filter_logits, pick
from lightning_llm.model.kv_cache import KVCache
from lightning_llm.model.transformer import Transformer

Prompts = Tensor | Sequence[Sequence[int]]


@overload
def generate(
    model: nn.Module,
    input_ids: Tensor,
    *,
    max_new_tokens: int,
    temperature: float = ...,
    top_k: int | None = ...,
    top_p: float | None = ...,
    min_p: float | None = ...,
    repetition_penalty: float = ...,
    eos_token_id: int | Sequence[int] | None = ...,
    generator: torch.Generator | None = ...,
) -> Tensor: ...


@overload
def generate(
    model: nn.Module,
    input_ids: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    temperature: float = ...,
    top_k: int | None = ...,
    top_p: float | None = ...,
    min_p: float | None = ...,
    repetition_penalty: float = ...,
    eos_token_id: int | Sequence[int] | None = ...,
    generator: torch.Generator | None = ...,
) -> list[list[int]]: ...


def generate(
    model: nn.Module,
    input_ids: Prompts,
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float = 1.0,
    eos_token_id: int | Sequence[int] | None = None,
    generator: torch.Generator | None = None,
) -> Tensor | list[list[int]]:
    """Continue prompts.

    A row does not notice the others: with a generator of the same seed a prompt gives the same tokens alone and in a
    batch. Copies of a prompt within a batch give different ones.

    Args:
        model: A ``Transformer``, or a module that holds one as ``transformer``. Its mode is left as it is: call
            ``eval()`` before, if it has dropout.
        input_ids: (batch, seq) prompts, or a list of prompts of any lengths; at least one token each. Of a prompt
            longer than ``max_position_embeddings`` the end is read.
        max_new_tokens: How many tokens to add at most.
        temperature: See :class:`Sampling`, as for the next four.
        top_k: Likeliest tokens.
        top_p: Probability in all.
        min_p: Probability relative to the likeliest.
        repetition_penalty: On tokens that were there already.
        eos_token_id: A sequence ends with this token, or one of these; in a tensor what would follow is filled with it
            (the first of several). Stops when all have ended.
        generator: Source of randomness: one number is drawn from it. ``None``: torch's global one.

    Returns:
        The prompts and what was added: (batch, seq + new), or for a list of prompts a list of them.

    Raises:
        ValueError: An option out of range, or an empty prompt.
    """
    sampling = Sampling(
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, repetition_penalty=repetition_penalty
    )
    ends = _ends(eos_token_id)
    decoder = Decoder(model, input_ids, max_new_tokens=max_new_tokens, sampling=sampling, generator=generator)
    added: list[list[int]] = [[] for _ in decoder.prompts]
    for tokens in decoder:
        for row, token in tokens.items():
            added[row].append(token)
            if token in ends:
                decoder.end(row)
    if not isinstance(input_ids, Tensor):
        return [prompt + new for prompt, new in zip(decoder.prompts, added, strict=True)]
    longest = max(map(len, added))
    fill = ends[0] if ends else 0
    new = torch.tensor([row + [fill] * (longest - len(row)) for row in added], dtype=input_ids.dtype)
    return torch.cat((input_ids, new.view(len(added), longest).to(input_ids.device)), dim=1)


def stream(
    model: nn.Module,
    input_ids: Tensor,
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float = 1.0,
    eos_token_id: int | Sequence[int] | None = None,
    generator: torch.Generator | None = None,
) -> Iterator[Tensor]:
    """As :func:`generate`, token by token: yields (batch,) ids. Options are checked at the call already."""
    sampling = Sampling(
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, repetition_penalty=repetition_penalty
    )
    decoder = Decoder(model, input_ids, max_new_tokens=max_new_tokens, sampling=sampling, generator=generator)
    return _streamed(decoder, _ends(eos_token_id), input_ids)


def _streamed(decoder: "Decoder", ends: Sequence[int], like: Tensor) -> Iterator[Tensor]:
    for tokens in decoder:
        for row, token in tokens.items():
            if token in ends:
                decoder.end(row)
        fill = ends[0] if ends else 0
        yield torch.tensor(
            [tokens.get(row, fill) for row in range(len(decoder.prompts))], dtype=like.dtype, device=like.device
        )


def _ends(given: int | Sequence[int] | None) -> list[int]:
    return [] if given is None else [given] if isinstance(given, int) else list(given)


class Decoder:
    """Rows on their way. Iterating gives for each step the new token of every row that has not ended.

    Args:
        model: As for :func:`generate`.
        prompts: As for :func:`generate`.
        max_new_tokens: Of each row.
        sampling: How tokens are chosen.
        generator: Source of randomness.

    Attributes:
        prompts: Token ids of each row.

    Raises:
        ValueError: ``max_new_tokens`` below 0, or an empty prompt, or none.
    """

    def __init__(
        self,
        model: nn.Module,
        prompts: Prompts,
        *,
        max_new_tokens: int,
        sampling: Sampling,
        generator: torch.Generator | None = None,
    ) -> None:
        faults = []
        if isinstance(prompts, Tensor):
            if prompts.dim() != 2 or 0 in prompts.shape:
                faults.append(
                    f"input_ids must have shape (batch, seq) with at least one token, got {tuple(prompts.shape)}"
                )
        elif not prompts or not all(map(len, prompts)):
            faults.append(
                f"input_ids must be prompts of at least one token each, got lengths {list(map(len, prompts))}"
            )
        if max_new_tokens < 0:
            faults.append(f"max_new_tokens must be at least 0, got {max_new_tokens}")
        if faults:
            raise ValueError("; ".join(faults))
        self._model = cast(Transformer, getattr(model, "transformer", model))
        self.prompts: list[list[int]] = (
            prompts.tolist() if isinstance(prompts, Tensor) else [[int(token) for token in row] for row in prompts]
        )
        self._max_new_tokens, self._sampling = max_new_tokens, sampling
        self._draws = None if sampling.is_greedy else Draws(self.prompts, generator)
        self._longest = self._model.config.max_position_embeddings
        self._contexts = [prompt[-self._longest :] for prompt in self.prompts]
        self._ended = [False] * len(self.prompts)
        self._seen: Tensor | None = None
        if sampling.repetition_penalty != 1:
            self._seen = torch.zeros(
                len(self.prompts), self._model.config.vocab_size or 0, dtype=torch.bool, device=self._device
            )
            for row, prompt in enumerate(self.prompts):
                self._seen[row, prompt] = True

    def end(self, row: int) -> None:
        """A row is complete: nothing more comes of it."""
        self._ended[row] = True

    def __iter__(self) -> Iterator[dict[int, int]]:
        """Decode once."""
        for step in range(self._max_new_tokens):
            if all(self._ended):
                return
            tokens = self._choose(self._prefill() if step == 0 else self._advance())
            for row, token in enumerate(tokens):
                self._contexts[row].append(token)
            yield {row: token for row, token in enumerate(tokens) if not self._ended[row]}

    @property
    def _device(self) -> torch.device:
        return self._model.embed_tokens.weight.device

    @torch.no_grad()
    def _prefill(self) -> Tensor:
        """Read the prompts, padded on the right, where no position looks: (batch, vocab)."""
        model, lengths = self._model, [len(context) for context in self._contexts]
        room = min(self._longest, max(lengths) + self._max_new_tokens)
        self._cache = KVCache(model.config, len(lengths), room, self._device, _cache_dtype(model.embed_tokens.weight))
        width = max(lengths)
        rows = [context + [0] * (width - len(context)) for context in self._contexts]
        hidden = model(torch.tensor(rows, device=self._device), cache=self._cache)
        self._cache.set_lengths(lengths)
        ends = torch.tensor(lengths, device=self._device) - 1
        packs = self._max_new_tokens >= FEWEST_STEPS and can_pack(model)
        self._packed = PackedStep(model, self._cache) if packs else None
        return model.logits(hidden[torch.arange(len(lengths), device=self._device), ends])

    @torch.no_grad()
    def _advance(self) -> Tensor:
        """Read the newest token of each row: (batch, vocab)."""
        for row, length in enumerate(self._cache.lengths):
            if length == self._longest:
                self._begin_anew(row)
        tokens = torch.tensor([context[-1] for context in self._contexts], device=self._device)
        if self._packed is not None:
            return self._packed(tokens)
        return self._model.logits(self._model(tokens[:, None], cache=self._cache)[:, 0])

    def _begin_anew(self, row: int) -> None:
        """Read the newest half of a context again, all but its last token, which comes with those of the other rows."""
        kept = self._contexts[row][-max(1, self._longest // 2) :]
        self._contexts[row] = kept
        part = self._cache.row(row)
        part.reset()
        if len(kept) > 1 and not self._ended[row]:
            self._model(torch.tensor([kept[:-1]], device=self._device), cache=part)
        lengths = list(self._cache.lengths)
        lengths[row] = part.length
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
