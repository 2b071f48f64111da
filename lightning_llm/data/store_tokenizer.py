"""The tokenizer of a store as its ids were made with it, and the tokens around its documents.

What is in the ids counts, not what a file says about them: a store may be older than the option, or its text may have
the tokens itself.
"""

from collections.abc import Iterator

import numpy as np

from lightning_llm.data.token_store import BLOCK, TokenStore
from lightning_llm.data.tokenizers import Tokenizer


def open_tokenizer(store: TokenStore) -> Tokenizer | None:
    """The tokenizer of a store; ``None`` for raw files. It begins a text with a token only if the store does."""
    if store.tokenizer_file is None:
        return None
    tokenizer = Tokenizer.from_file(store.tokenizer_file)
    before = tokenizer.boundaries.before
    first = tuple(store.read("train", 0, len(before)).tolist())
    is_trained = first == before or before == (store.eos_token_id,)  # the end of one text begins the next
    return tokenizer if is_trained else tokenizer.without_begin()


def end_of_documents(store: TokenStore, tokenizer: Tokenizer | None) -> int | None:
    """The id between the documents of a store: the recorded one, or one that its text has itself. ``None`` if none."""
    if store.eos_token_id is not None or tokenizer is None or tokenizer.eos_token_id is None:
        return store.eos_token_id
    return tokenizer.eos_token_id if any(_counts(store, tokenizer.eos_token_id)) else None


def _counts(store: TokenStore, number: int) -> Iterator[int]:
    """How often an id occurs in each block of the training split."""
    for start in range(0, store.splits["train"].tokens, BLOCK):
        yield int(np.count_nonzero(store.read("train", start, BLOCK) == number))


def boundary_lines(store: TokenStore) -> Iterator[str]:
    """Lines for a user on what begins and ends the documents of a store; none for a single plain text."""
    if (tokenizer := open_tokenizer(store)) is None:
        return
    if before := tokenizer.boundaries.before:
        yield f"documents begin with {_named(tokenizer, before[-1])}; --begin-of-text chooses another token, or none"
    end = end_of_documents(store, tokenizer)
    if end is not None and store.eos_token_id is None:
        times = sum(_counts(store, end))
        yield f"the training text has {_named(tokenizer, end)} {times:,} times: data.document_mask can use it"
    elif end is not None:
        yield f"documents end with {_named(tokenizer, end)}; --end-of-text chooses another token, or none"
    elif max(split.documents for split in store.splits.values()) > 1:
        reason = ", since its tokenizer has no known end-of-text token" if tokenizer.eos_token_id is None else ""
        yield f"documents follow each other without a mark{reason}; --end-of-text names one"


def _named(tokenizer: Tokenizer, number: int) -> str:
    return f"{tokenizer.token(number)!r} ({number})"
