"""Text generation: one prefill over the prompt, then one position a step, from a cache of keys and values.

When the context is full, the newest half of it is read again as a new prompt and decoding goes on: positions stay
within what the model was trained on, and the cost of reading again is spread over half a context of new tokens.
"""

from collections.abc import Iterator
from typing import cast

import torch
from torch import Tensor, nn

from lightning_llm.model.kv_cache import KVCache
from lightning_llm.model.transformer import Transformer


def generate(
    model: nn.Module,
    input_ids: Tensor,
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    eos_token_id: int | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Continue prompts of equal length.

    Args:
        model: A ``Transformer``, or a module that holds one as ``transformer``. Its mode is left as it is: call
            ``eval()`` before, if it has dropout.
        input_ids: (batch, seq) prompts, at least one token each.
        max_new_tokens: How many tokens to add at most.
        temperature: Divides the logits; 0 always takes the likeliest token.
        top_k: Sample among the ``top_k`` likeliest tokens only.
        top_p: Sample among the fewest tokens whose probabilities reach ``top_p`` (Holtzman et al. 2020, "The Curious
            Case of Neural Text Degeneration", section 3.1).
        eos_token_id: A sequence ends with this token; what would follow is filled with it. Stops when all have ended.
        generator: Source of randomness, on the model's device. ``None``: torch's global one.

    Returns:
        (batch, seq + new), the prompts and what was added.

    Raises:
        ValueError: An option out of range, or an empty prompt.
    """
    steps = stream(
        model,
        input_ids,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        eos_token_id=eos_token_id,
        generator=generator,
    )
    return torch.cat([input_ids, *(tokens.unsqueeze(1) for tokens in steps)], dim=1)


def stream(
    model: nn.Module,
    input_ids: Tensor,
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    eos_token_id: int | None = None,
    generator: torch.Generator | None = None,
) -> Iterator[Tensor]:
    """As :func:`generate`, token by token: yields (batch,) ids. Options are checked at the call already."""
    faults = []
    if input_ids.dim() != 2 or input_ids.shape[1] == 0:
        faults.append(f"input_ids must have shape (batch, seq) with at least one token, got {tuple(input_ids.shape)}")
    if max_new_tokens < 0:
        faults.append(f"max_new_tokens must be at least 0, got {max_new_tokens}")
    if not temperature >= 0:
        faults.append(f"temperature must be at least 0 (0 takes the likeliest token), got {temperature}")
    if top_k is not None and top_k < 1:
        faults.append(f"top_k must be at least 1, got {top_k}")
    if top_p is not None and not 0 < top_p <= 1:
        faults.append(f"top_p must be above 0 and at most 1, got {top_p}")
    if faults:
        raise ValueError("; ".join(faults))
    transformer = cast(Transformer, getattr(model, "transformer", model))
    return _decode(transformer, input_ids, max_new_tokens, temperature, top_k, top_p, eos_token_id, generator)


@torch.no_grad()
def _decode(
    model: Transformer,
    input_ids: Tensor,
    max_new_tokens: int,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    eos_token_id: int | None,
    generator: torch.Generator | None,
) -> Iterator[Tensor]:
    if not max_new_tokens:
        return
    longest, weight = model.config.max_position_embeddings, model.embed_tokens.weight
    length = min(longest, input_ids.shape[1] + max_new_tokens)
    cache = KVCache(model.config, input_ids.shape[0], length, weight.device, _cache_dtype(weight))
    context = input_ids[:, -longest:]
    unread, ended = context, torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)
    for _ in range(max_new_tokens):
        if cache.length + unread.shape[1] > longest:
            cache.reset()
            unread = context = context[:, -max(1, longest // 2) :]
        logits = model.logits(model(unread, cache=cache)[:, -1]).float()
        unread = sample(logits, temperature, top_k, top_p, generator).unsqueeze(1)
        if eos_token_id is not None:
            unread = unread.masked_fill(ended.unsqueeze(1), eos_token_id)
            ended |= unread.squeeze(1) == eos_token_id
        context = torch.cat((context, unread), dim=1)
        yield unread.squeeze(1)
        if eos_token_id is not None and bool(ended.all()):
            return


def sample(
    logits: Tensor, temperature: float, top_k: int | None, top_p: float | None, generator: torch.Generator | None
) -> Tensor:
    """Draw one token per row: (batch, vocab) -> (batch,)."""
    if temperature == 0:
        return logits.argmax(dim=-1)
    logits = logits / temperature
    if top_k is not None and top_k < logits.shape[-1]:
        weakest = logits.topk(top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < weakest, float("-inf"))
    if top_p is not None and top_p < 1:
        ordered, order = logits.sort(dim=-1, descending=True)
        probabilities = ordered.softmax(dim=-1)
        # a token stays while those before it do not reach top_p: the likeliest one always stays
        beyond = probabilities.cumsum(dim=-1) - probabilities >= top_p
        logits = logits.masked_fill(beyond.scatter(-1, order, beyond), float("-inf"))
    return torch.multinomial(logits.softmax(dim=-1), 1, generator=generator).squeeze(-1)


def _cache_dtype(weight: Tensor) -> torch.dtype:
    device = weight.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
