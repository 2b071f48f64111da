"""Texts continued: ids become text as they come, and a stop string ends a text before it.

Held back is what may still change: the bytes of an unfinished character, and an end that a stop string may begin with.
"""

from collections.abc import Iterator, Sequence
from typing import cast, overload

import torch
from torch import nn

from lightning_llm.data.tokenizers import Tokenizer
from lightning_llm.generation.decoding import Decoder
from lightning_llm.generation.sampling import Sampling
from lightning_llm.model.transformer import Transformer


class StopStrings:
    """Passes text on up to the first stop string.

    Args:
        stops: Strings, none of them empty.

    Attributes:
        is_found: Whether one has come; nothing is passed on after it.

    Raises:
        ValueError: One is empty.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if "" in stops:
            raise ValueError("stop: a stop string must have at least one character, got ''")
        self._stops, self._held = list(stops), ""
        self.is_found = False

    def push(self, text: str) -> str:
        """What of the text so far is surely before a stop string and was not passed on yet."""
        if self.is_found:
            return ""
        text = self._held + text
        # the one that is complete first, so that it does not matter in which pieces the text comes
        found = [(place + len(stop), place) for stop in self._stops if (place := text.find(stop)) >= 0]
        if found:
            self.is_found, self._held = True, ""
            return text[: min(found)[1]]
        keep = max((self._overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """What was held back, at the end."""
        rest, self._held = self._held, ""
        return rest

    @staticmethod
    def _overlap(text: str, stop: str) -> int:
        """How many characters at the end of the text a stop string begins with."""
        return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)


def stream_text(
    model: nn.Module,
    tokenizer: Tokenizer,
    prompts: str | Sequence[str],
    *,
    max_new_tokens: int,
    sampling: Sampling | None = None,
    stop: str | Sequence[str] = (),
    stop_token_ids: Sequence[int] = (),
    generator: torch.Generator | None = None,
) -> Iterator[list[str]]:
    """Continue texts, step by step.

    Args:
        model: As for :func:`~lightning_llm.generation.generate`.
        tokenizer: Of the model.
        prompts: Texts, of any lengths; a ``str`` is one text.
        max_new_tokens: Tokens to add at most to each.
        sampling: How tokens are chosen.
        stop: A text ends before the first of these strings, wherever tokens and bytes are cut; a ``str`` is one.
        stop_token_ids: Tokens that end a text, beside the tokenizer's end of text. They are not part of it.
        generator: Source of randomness.

    Returns:
        For each step what it adds to each text, often nothing. The prompts are not among it.

    Raises:
        ValueError: A prompt that is empty, or that the tokenizer cannot express, or longer than the model's context;
            an option out of range.
    """
    prompts, stop = _listed(prompts), _listed(stop)
    ids = [tokenizer.encode(prompt) for prompt in prompts]
    longest = cast(Transformer, getattr(model, "transformer", model)).config.max_position_embeddings
    for prompt, row in zip(prompts, ids, strict=True):
        if not row:
            raise ValueError("prompt is empty: give at least one character")
        if len(row) > longest:
            raise ValueError(
                f"prompt has {len(row)} tokens, more than the model's context (max_position_embeddings) of {longest}: "
                f"shorten it; it begins {prompt[:20]!r}"
            )
    if wrong := [number for number in stop_token_ids if not 0 <= number < tokenizer.vocab_size]:
        raise ValueError(f"stop token {wrong[0]} is not in the tokenizer's vocabulary of {tokenizer.vocab_size}")
    ends = {*stop_token_ids, tokenizer.eos_token_id}
    decoder = Decoder(model, ids, max_new_tokens=max_new_tokens, sampling=sampling or Sampling(), generator=generator)
    rows = [_Row(tokenizer, stop) for _ in ids]
    return _pieces(decoder, rows, ends)


@overload
def generate_text(  # type: ignore[overload-overlap]  # a str is a sequence of str, but one text here
    model: nn.Module,
    tokenizer: Tokenizer,
    prompts: str,
    *,
    max_new_tokens: int,
    sampling: Sampling | None = None,
    stop: str | Sequence[str] = (),
    stop_token_ids: Sequence[int] = (),
    generator: torch.Generator | None = None,
) -> str: ...
@overload
def generate_text(
    model: nn.Module,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    *,
    max_new_tokens: int,
    sampling: Sampling | None = None,
    stop: str | Sequence[str] = (),
    stop_token_ids: Sequence[int] = (),
    generator: torch.Generator | None = None,
) -> list[str]: ...
def generate_text(
    model: nn.Module,
    tokenizer: Tokenizer,
    prompts: str | Sequence[str],
    *,
    max_new_tokens: int,
    sampling: Sampling | None = None,
    stop: str | Sequence[str] = (),
    stop_token_ids: Sequence[int] = (),
    generator: torch.Generator | None = None,
) -> str | list[str]:
    """What :func:`stream_text` adds to each text in all: a list, or one ``str`` for a prompt that is a ``str``."""
    texts = [""] * len(_listed(prompts))
    for pieces in stream_text(
        model,
        tokenizer,
        prompts,
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        stop=stop,
        stop_token_ids=stop_token_ids,
        generator=generator,
    ):
        texts = [text + piece for text, piece in zip(texts, pieces, strict=True)]
    return texts[0] if isinstance(prompts, str) else texts


def _listed(given: str | Sequence[str]) -> Sequence[str]:
    return [given] if isinstance(given, str) else given


class _Row:
    """One text on its way."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str]) -> None:
        self._stream, self._stops = tokenizer.stream(), StopStrings(stop)
        self._vocab_size = tokenizer.vocab_size
        self._is_flushed = False

    @property
    def is_stopped(self) -> bool:
        return self._stops.is_found

    def push(self, token: int) -> str:
        # a vocabulary may be rounded up: a model that has learnt little draws ids that stand for nothing
        return self._stops.push(self._stream.push(token)) if token < self._vocab_size else ""

    def flush(self) -> str:
        if self._is_flushed or self._stops.is_found:
            return ""
        self._is_flushed = True
        return self._stops.push(self._stream.flush()) + self._stops.flush()


def _pieces(decoder: Decoder, rows: Sequence[_Row], ends: set[int | None]) -> Iterator[list[str]]:
    for tokens in decoder:
        pieces = [""] * len(rows)
        for number, token in tokens.items():
            row = rows[number]
            if token in ends:
                pieces[number] = row.flush()
                decoder.end(number)
                continue
            pieces[number] = row.push(token)
            if row.is_stopped:
                decoder.end(number)
        yield pieces
    yield [row.flush() for row in rows]
