"""Decoding: one prefill over the prompts, then one position per step, from a cache of keys and values.

Tokens stay on the device, where the next step reads them. On CUDA the host reads a token while the device computes the
next one, so the device never waits; the step after a text's last token is wasted.

When a row has filled the context, its newest half is read again as a new prompt and decoding continues. Positions stay
within what the model was trained on. As they start again from 0, the cached keys, rotated by their old positions,
cannot be reused; a prefill every half context costs one more position per step, in larger matmuls than decoding's.
A model with an attention that keeps no cache reads the whole context at each step.
"""

import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast, overload

import torch
from torch import Tensor, nn

from lightning_llm.generation.packed_step import FEWEST_STEPS, PackedStep, can_pack
from lightning_llm.generation.sampling import Draws, Sampling, SamplingOptions, filter_logits, pick
from lightning_llm.io.options import raise_all
from lightning_llm.model.kv_cache import KVCache
from lightning_llm.model.transformer import Transformer

if TYPE_CHECKING:
    from typing_extensions import Unpack

Prompts = Tensor | Sequence[Sequence[int]]
Ends = int | Sequence[int] | None
_AHEAD = {"cuda": 1}  # steps that a device is given before the host reads a token


class NaNLogits(ValueError):
    """The logits are NaN: the weights are damaged, or training diverged."""


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
    """Generate like :func:`generate`, token by token: yields (batch,) ids. Options are checked when it is called."""
    ends = _listed(eos_token_id)
    steps = Decoder(model, input_ids, max_new_tokens, Sampling(**sampling), generator, ends)
    rows = range(len(steps.prompts))
    fill = ends[0] if ends else 0
    new_tokens = (torch.tensor([tokens.get(row, fill) for row in rows], dtype=input_ids.dtype) for tokens in steps)
    return (tokens.to(input_ids.device, non_blocking=input_ids.is_cuda) for tokens in new_tokens)


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
            is_empty = prompts.dim() != 2 or 0 in prompts.shape
            got = f"shape {tuple(prompts.shape)}"
        else:
            is_empty = not prompts or not all(map(len, prompts))
            got = f"lengths {list(map(len, prompts))}"
        problems = [f"input_ids must be (batch, seq) prompts of at least one token each, got {got}"] if is_empty else []
        if max_new_tokens < 0:
            problems.append(f"max_new_tokens must be at least 0, got {max_new_tokens}")
        raise_all(problems)
        self._model = cast(Transformer, getattr(model, "transformer", model))
        listed = prompts.tolist() if isinstance(prompts, Tensor) else prompts
        self.prompts = [[int(token) for token in row] for row in listed]
        self._max_new_tokens = max_new_tokens
        self._sampling = sampling
        self._ends = frozenset(ends)
        self._longest = self._model.config.max_position_embeddings
        self._contexts = [prompt[-self._longest :] for prompt in self.prompts]
        self._ended = [False] * len(self.prompts)
        self._device = self._model.embed_tokens.weight.device
        # MPS has no float64, and on CUDA torch's cumulative sums are not deterministic
        sums_on_host = self._device.type == "mps" or torch.are_deterministic_algorithms_enabled()
        self._choosing = torch.device("cpu") if sums_on_host and not sampling.is_greedy else self._device
        self._draws = None if sampling.is_greedy else Draws(self.prompts, generator, self._choosing)
        self._uses_cache = getattr(self._model, "uses_cache", True)
        if not self._uses_cache:
            kinds = {type(layer.self_attn).__qualname__ for layer in self._model.layers}
            text = f"attention {', '.join(sorted(kinds))} has no cache: each token is computed from the whole context"
            warnings.warn(text, stacklevel=2)
        self._seen: Tensor | None = None
        if sampling.repetition_penalty != 1:
            shape = len(self.prompts), self._model.config.vocab_size or 0
            self._seen = torch.zeros(shape, dtype=torch.bool, device=self._choosing)
            for row, prompt in enumerate(self.prompts):
                self._seen[row, prompt] = True

    def end(self, row: int) -> None:
        """End a row: it gets no more tokens."""
        self._ended[row] = True

    def __iter__(self) -> Iterator[dict[int, int]]:
        """Decode once; a ``ValueError`` if the logits are NaN."""
        ahead = _AHEAD.get(self._device.type, 0) if self._uses_cache else 0
        unread = deque[tuple[Tensor, torch.cuda.Event | None]]()
        for step in range(self._max_new_tokens):
            # the context of a full row is read again, so all of it must be known
            while unread and (len(unread) > ahead or self._longest in self._cache.lengths):
                yield self._read(*unread.popleft())
            if all(self._ended):
                return
            read = (self._advance if step else self._prefill) if self._uses_cache else self._read_all
            self._tokens = self._choose(read())
            unread.append(_sent_to_host(self._tokens))
        while unread and not all(self._ended):
            yield self._read(*unread.popleft())

    def _read(self, sent: Tensor, arrival: torch.cuda.Event | None) -> dict[int, int]:
        if arrival is not None:
            arrival.synchronize()
        tokens: list[int] = sent.tolist()
        if min(tokens) < 0:
            raise NaNLogits("logits are NaN: the model's weights are damaged, or training diverged")
        going = {row: token for row, token in enumerate(tokens) if not self._ended[row]}
        for row, token in enumerate(tokens):
            self._contexts[row].append(token)
            self._ended[row] |= token in self._ends
        return going

    @torch.no_grad()
    def _prefill(self) -> Tensor:
        """Read the prompts into a cache: (batch, vocab)."""
        model = self._model
        lengths = [len(context) for context in self._contexts]
        room = min(self._longest, max(lengths) + self._max_new_tokens)
        kind = self._device.type
        dtype = model.embed_tokens.weight.dtype
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else dtype
        self._cache = KVCache(model.config, len(lengths), room, self._device, dtype)
        self._cache.expect(lengths)
        logits = self._read_contexts(cache=self._cache)
        self._cache.set_lengths(lengths)
        packs = self._max_new_tokens >= FEWEST_STEPS and can_pack(model)
        self._packed = PackedStep(model, self._cache) if packs else None
        return logits

    @torch.no_grad()
    def _read_all(self) -> Tensor:
        """Read all contexts, without a cache: (batch, vocab)."""
        for row, context in enumerate(self._contexts):
            if len(context) > self._longest:
                self._contexts[row] = context[-max(1, self._longest // 2) :]
        return self._read_contexts()

    def _read_contexts(self, **options: Any) -> Tensor:
        """Logits after each context: (batch, vocab). They are padded on the right, where no position looks."""
        lengths = [len(context) for context in self._contexts]
        rows = [context + [0] * (max(lengths) - len(context)) for context in self._contexts]
        hidden = self._model(torch.tensor(rows, device=self._device), **options)
        ends = torch.tensor(lengths, device=self._device) - 1
        return self._model.logits(hidden[torch.arange(len(lengths), device=self._device), ends])

    @torch.no_grad()
    def _advance(self) -> Tensor:
        """Read the newest token of each row: (batch, vocab)."""
        for row, length in enumerate(self._cache.lengths):
            if length == self._longest:
                self._read_again(row)
        tokens = self._tokens.clamp(min=0)  # no id stands for NaN, which is found when the host reads the tokens
        if self._packed is not None:
            return self._packed(tokens)
        return self._model.logits(self._model(tokens[:, None], cache=self._cache)[:, 0])

    def _read_again(self, row: int) -> None:
        """Read the newest half of a context, except its last token, which is read with those of the other rows."""
        self._contexts[row] = kept = self._contexts[row][-max(1, self._longest // 2) :]
        part = self._cache.row(row)
        if len(kept) > 1 and not self._ended[row]:
            self._model(torch.tensor([kept[:-1]], device=self._device), cache=part)
        lengths = [part.length if other == row else length for other, length in enumerate(self._cache.lengths)]
        self._cache.set_lengths(lengths)

    @torch.no_grad()
    def _choose(self, logits: Tensor) -> Tensor:
        """(batch, vocab) -> (batch,) ids, or -1 where the logits are NaN."""
        logits = logits.to(self._choosing, torch.promote_types(logits.dtype, torch.float32))
        filtered = filter_logits(logits, self._sampling, self._seen)
        tokens = pick(filtered, None if self._draws is None else self._draws.next())
        if self._seen is not None:
            self._seen.scatter_(1, tokens.clamp(min=0)[:, None], True)
        return tokens.to(self._device)


def _sent_to_host(tokens: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
    """(batch,) ids, and on CUDA the event of their arrival: the host waits for this, not for the device."""
    if not tokens.is_cuda:
        return tokens, None
    sent = tokens.to("cpu", non_blocking=True)  # into pinned memory
    return sent, torch.cuda.current_stream(tokens.device).record_event()
