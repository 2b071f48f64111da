"""What a run reads: one token store, or several of which each gets its share of the sequences."""

import dataclasses
import hashlib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from lightning_llm.data.batches import MixtureReader, WindowReader
from lightning_llm.data.mixture import MixtureOrder
from lightning_llm.data.order import WindowOrder
from lightning_llm.data.token_store import TokenStore

_GOLDEN = 0x9E3779B97F4A7C15


@dataclasses.dataclass(frozen=True)
class Source:
    """A token store and its share.

    Attributes:
        name: What logs call it.
        store: Where its tokens are.
        weight: Share of the run's sequences, relative to the other sources'.
    """

    name: str
    store: TokenStore
    weight: float = 1.0

    def windows(self, context_length: int) -> int:
        """Training windows of an epoch."""
        return (self.store.splits["train"].tokens - 1) // context_length

    def reader(self, split: str, context_length: int, document_start: int | None = None) -> WindowReader:
        """Reads one of its splits."""
        return WindowReader(
            self.store.path / f"{split}.bin",
            dtype=self.store.dtype,
            context_length=context_length,
            vocab_size=self.store.vocab_size,
            document_start=document_start,
            num_tokens=self.store.splits[split].tokens,
        )


def open_mixture(mixture: Mapping[str, float]) -> list[Source]:
    """The sources of ``data.mixture``, in its order.

    Args:
        mixture: Weights by the folders of prepared stores.

    Raises:
        ValueError: If a weight is not above 0, a store cannot be opened, or two were made with different tokenizers.
    """
    if not mixture:
        raise ValueError("data.mixture is empty: give the folders of token stores with their weights")
    wrong = [f"{folder}: {weight}" for folder, weight in mixture.items() if not 0 < weight < math.inf]
    if wrong:
        raise ValueError(f"data.mixture weights must be numbers above 0, got {', '.join(wrong)}")
    stores = [TokenStore.open(folder) for folder in mixture]
    for store in stores[1:]:
        if store.tokenizer_sha256 != stores[0].tokenizer_sha256:
            raise ValueError(
                f"data.mixture: {stores[0].path} ({stores[0].vocab_size} ids) and {store.path} ({store.vocab_size} "
                f"ids) were made with different tokenizers: prepare one with --tokenizer {stores[0].tokenizer_file}"
            )
    weights = mixture.values()
    return [Source(*given) for given in zip(_names([store.path for store in stores]), stores, weights, strict=True)]


def fingerprint(sources: Sequence[Source]) -> str:
    """16 hex digits that name all tokens; that of the store where there is one."""
    if len(sources) == 1:
        return sources[0].store.fingerprint
    return hashlib.sha256("+".join(source.store.fingerprint for source in sources).encode()).hexdigest()[:16]


def train_order(sources: Sequence[Source], context_length: int, seed: int) -> WindowOrder | MixtureOrder:
    """The order of the run; the first source's own is that of a run with it alone."""
    sizes = [source.store.splits["train"].tokens for source in sources]
    orders = [
        WindowOrder(num_tokens=size, context_length=context_length, seed=seed + number * _GOLDEN)
        for number, size in enumerate(sizes)
    ]
    if len(sources) == 1:
        return orders[0]
    return MixtureOrder(orders, sizes, [source.weight for source in sources], seed=seed)


def train_reader(
    sources: Sequence[Source], context_length: int, document_start: int | None
) -> WindowReader | MixtureReader:
    """Reads what :func:`train_order` says."""
    readers = [source.reader("train", context_length, document_start) for source in sources]
    if len(readers) == 1:
        return readers[0]
    return MixtureReader(readers, [source.store.splits["train"].tokens for source in sources])


def _names(paths: Sequence[Path]) -> list[str]:
    """The folders' own names; with a number where two are alike."""
    names = [path.name or str(path) for path in paths]
    return [name if names.count(name) == 1 else f"{name}-{number}" for number, name in enumerate(names, start=1)]
