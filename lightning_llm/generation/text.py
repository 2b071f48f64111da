"""Text generation: ids become text as they are generated, and a stop string ends a text before it.

Text that may still change is held back: the bytes of an unfinished character, and a possible start of a stop string.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, TypedDict, cast, overload

import torch
from torch import nn

from lightning_llm.data.tokenizers import Tokenizer
from lightning_llm.generation.decoding import Decoder
from lightning_llm.generation.sampling import Sampling
from lightning_llm.model.transformer import Transformer

if TYPE_CHECKING:
    from typing_extensions import Unpack

Texts = str | Sequence[str]  # a str is one text


class StopStrings:
    """Passes text on up to the first stop string.

    Args:
        stops: Strings, none of them empty.

    Attributes:
        is_found: Whether one has been found; no text is passed on after it.

    Raises:
        ValueError: One is empty.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if "" in stops:
            raise ValueError("stop: a stop string must have at least one character, got ''")
        self._stops = list(stops)
        self._held = ""
        self.is_found = False

    def push(self, text: str) -> str:
        """The new text that is certainly before any stop string."""
        if self.is_found:
            return ""
        text = self._held + text
        # the one that is complete first, so that the pieces in which the text arrives do not matter
        starts = {stop: text.find(stop) for stop in self._stops}
        matches = [(start + len(stop), start) for stop, start in starts.items() if start >= 0]
        if matches:
            self.is_found = True
            self._held = ""
            return text[: min(matches)[1]]
        # how many characters at the end of the text a stop string begins with
        lengths = (n for stop in self._stops for n in range(1, len(stop)) if text.endswith(stop[:n]))
        keep = max(lengths, default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """The text that was held back, at the end."""
        rest, self._held = self._held, ""
        return rest


class TextOptions(TypedDict, total=False):
    """Optional arguments of :func:`stream_text`."""

    sampling: Sampling | None
    stop: Texts
    stop_token_ids: Sequence[int]
    generator: torch.Generator | None


def stream_text(
    model: nn.Module,
    tokenizer: Tokenizer,
    prompts: Texts,
    *,
    max_new_tokens: int,
    sampling: Sampling | None = None,
    stop: Texts = (),
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
        stop_token_ids: Tokens that end a text, besides the tokenizer's end of text. They are not part of it.
        generator: Source of randomness.

    Returns:
        For each step what it adds to each text, often nothing. The prompts are not included.

    Raises:
        ValueError: A prompt that is empty, that the tokenizer cannot encode, or that is longer than the model's
            context; an option out of range.
    """
    prompts, stop = _listed(prompts), _listed(stop)
    ids = [tokenizer.encode_prompt(prompt) for prompt in prompts]
    longest = cast(Transformer, getattr(model, "transformer", model)).config.max_position_embeddings
    for prompt, row in zip(prompts, ids, strict=True):
        if not row:
            raise ValueError("prompt is empty: give at least one character")
        if len(row) > longest:
            limit = f"more than the model's context (max_position_embeddings) of {longest}"
            raise ValueError(f"prompt has {len(row)} tokens, {limit}: shorten it; it begins {prompt[:20]!r}")
    if wrong := [number for number in stop_token_ids if not 0 <= number < tokenizer.vocab_size]:
        raise ValueError(f"stop token {wrong[0]} is not in the tokenizer's vocabulary of {tokenizer.vocab_size}")
    ends = [*stop_token_ids, *([] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id])]
    decoder = Decoder(model, ids, max_new_tokens, sampling or Sampling(), generator, ends)
    return _pieces(decoder, tokenizer, [StopStrings(stop) for _ in ids], ends)


@overload
def generate_text(  # type: ignore[overload-overlap]  # a str is a sequence of str, but one text here
    model: nn.Module, tokenizer: Tokenizer, prompts: str, *, max_new_tokens: int, **options: "Unpack[TextOptions]"
) -> str: ...
@overload
def generate_text(
    model: nn.Module,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    *,
    max_new_tokens: int,
    **options: "Unpack[TextOptions]",
) -> list[str]: ...
def generate_text(
    model: nn.Module, tokenizer: Tokenizer, prompts: Texts, *, max_new_tokens: int, **options: "Unpack[TextOptions]"
) -> str | list[str]:
    """All that :func:`stream_text` adds to each text: a list, or one ``str`` for a prompt that is a ``str``."""
    texts = [""] * len(_listed(prompts))
    for pieces in stream_text(model, tokenizer, prompts, max_new_tokens=max_new_tokens, **options):
        texts = [text + piece for text, piece in zip(texts, pieces, strict=True)]
    return texts[0] if isinstance(prompts, str) else texts


def _listed(texts: Texts) -> Sequence[str]:
    return [texts] if isinstance(texts, str) else texts


def _pieces(
    decoder: Decoder, tokenizer: Tokenizer, stops: Sequence[StopStrings], ends: Sequence[int]
) -> Iterator[list[str]]:
    streams = [tokenizer.stream() for _ in stops]

    def flush(row: int) -> str:
        return stops[row].push(streams[row].flush()) + stops[row].flush()

    for tokens in decoder:
        pieces = [""] * len(stops)
        for row, token in tokens.items():
            if token in ends:
                pieces[row] = flush(row)
            elif token < tokenizer.vocab_size:  # may be rounded up in a model, which then samples ids without a text
                pieces[row] = stops[row].push(streams[row].push(token))
            if stops[row].is_found:
                decoder.end(row)
        yield pieces
    yield list(map(flush, range(len(stops))))
