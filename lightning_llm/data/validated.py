"""Windows of the validation text to validate: what ``trainer.limit_val_batches`` means for token stores.

A whole number N stands for N × ``data.global_batch_size`` windows, a fraction for that share of all windows. They are
spaced evenly over the whole text and depend on nothing else: not on micro-batches, devices or workers. So two runs with
the same limit validate the same text, and a part of the text estimates the loss of all of it. No torch.
"""

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_llm.data.tokenizers import Tokenizer

LIMIT = "trainer.limit_val_batches"
Limit = int | float | None


class ServedWindows(float):
    """The limit that Lightning sees while the data serve exactly the windows to validate: all that is served.

    Attributes:
        asked: The limit that the user gave.
    """

    asked: Limit

    def __new__(cls, asked: Limit) -> "ServedWindows":
        limit = super().__new__(cls, 1.0)
        limit.asked = asked
        return limit

    def __reduce__(self) -> tuple[Any, ...]:
        return ServedWindows, (self.asked,)


@dataclasses.dataclass(frozen=True)
class Validated:
    """The windows to validate.

    Attributes:
        of_sources: The numbers of the windows, for each token store.
        windows: How many windows all stores have together.
    """

    of_sources: list[NDArray[np.int64]]
    windows: int

    @property
    def count(self) -> int:
        """How many are validated."""
        return sum(map(len, self.of_sources))

    def in_words(self) -> str:
        """Such as ``32 of 165 windows of the validation text, evenly spaced``."""
        if self.count == self.windows:
            return f"all {self.windows:,} windows of the validation text"
        return f"{self.count:,} of {self.windows:,} windows of the validation text, evenly spaced"


def asked_limit(trainer: Any) -> Any:
    """``trainer.limit_val_batches`` as the user gave it; ``None`` without a trainer."""
    limit = getattr(trainer, "limit_val_batches", None)
    return limit.asked if isinstance(limit, ServedWindows) else limit


def is_whole(limit: Any) -> bool:
    """Whether a limit leaves the whole text: null or the fraction 1.0."""
    return limit is None or (isinstance(limit, float) and limit == 1.0)


def validated_windows(windows: Sequence[int], limit: Limit, global_batch_size: int) -> Validated:
    """The windows to validate: evenly spaced over all stores, as one text, and at least one of each.

    Args:
        windows: How many each store has, the shorter one at the end of its text included.
        limit: ``trainer.limit_val_batches``; not 0.
        global_batch_size: Windows that a whole number counts.

    Raises:
        ValueError: A fraction is less than one window.
    """
    total = sum(windows)
    if limit is None or isinstance(limit, float):
        count = int(total * (1.0 if limit is None else limit) + 1e-9)  # 0.29 × 100 is 28.999…
    else:
        count = min(total, limit * global_batch_size)
    if count < 1:
        raise ValueError(
            f"{LIMIT} {limit} of {total} windows of the validation text is less than one: use at least 1/{total}, "
            "a whole number N for N × data.global_batch_size windows, or 0 for no validation"
        )
    # the last window of each of `count` parts: so N times as many windows contain these
    places = np.arange(1, count + 1, dtype=np.int64) * total // count - 1
    of_sources = []
    first = 0
    for number in windows:
        own = places[(places >= first) & (places < first + number)] - first
        of_sources.append(own if len(own) or not number else np.array([number - 1]))
        first += number
    return Validated(of_sources, total)


def text_bytes(tokenizer: Tokenizer, rows: Sequence[NDArray[Any]], no_text: Collection[int]) -> int:
    """UTF-8 bytes of the text of windows, each without its first token, which is no target.

    Args:
        tokenizer: Of the ids.
        rows: The ids of each window.
        no_text: Ids that stand for no text, such as those around a document.
    """
    if tokenizer.kind in ("char", "byte", "bpe"):
        ids, counts = np.unique(np.concatenate([row[1:] for row in rows]), return_counts=True)
        pairs = zip(ids.tolist(), counts.tolist(), strict=True)
        return sum(count * tokenizer.byte_count(number) for number, count in pairs if number not in no_text)
    size = 0
    for row in rows:  # a token's text depends on the one before it, such as the space between words
        is_text = ~np.isin(row, list(no_text))
        kept = row[is_text]
        before = kept[: int(is_text[0])]
        size += len(tokenizer.decode(kept).encode()) - len(tokenizer.decode(before).encode())
    return size
