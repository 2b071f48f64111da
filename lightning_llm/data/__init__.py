"""Text to token stores, token stores to batches. Names load when first used; only those that need torch import it."""

from typing import TYPE_CHECKING

from lightning_llm.lazy import lazy

if TYPE_CHECKING:
    from lightning_llm.data.batches import sample_batch as sample_batch
    from lightning_llm.data.datamodule import TokenDataModule as TokenDataModule
    from lightning_llm.data.find_store import find_or_prepare as find_or_prepare
    from lightning_llm.data.order import WindowOrder as WindowOrder
    from lightning_llm.data.order import window_starts as window_starts
    from lightning_llm.data.prepare import prepare_store as prepare_store
    from lightning_llm.data.token_store import TokenStore as TokenStore
    from lightning_llm.data.tokenizers import Tokenizer as Tokenizer
else:
    __getattr__, __dir__, __all__ = lazy(__name__)
