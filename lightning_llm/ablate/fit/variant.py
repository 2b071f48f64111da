"""A variant of an experiment, or its baseline, as ``fit`` reads it."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lightning_llm.data.datamodule import TokenDataModule, data_attribute


@dataclasses.dataclass
class Variant:
    """The baseline or a variant, as ``fit`` reads it; nothing is trained.

    Attributes:
        name: ``baseline`` or the variant's.
        options: Of ``fit``, resolved.
        model: The LanguageModel, before its transformer is made.
        data: Its data, with the store opened.
        trainer: Its Trainer.
    """

    name: str
    options: dict[str, Any]
    model: Any
    data: Any
    trainer: Any

    @property
    def architecture(self) -> Any:
        """The model's config, with the vocabulary of the data; ``None``: the model is no ``LanguageModel``."""
        config = getattr(self.model, "architecture", None)
        if config is None:
            return None
        return dataclasses.replace(config, vocab_size=config.vocab_size or self.of_data("vocab_size"))

    @property
    def has_token_data(self) -> bool:
        """Whether its data are those of ``TokenDataModule``, whose batches are known from its options."""
        return isinstance(self.data, TokenDataModule)

    @property
    def is_known(self) -> bool:
        """Whether it trains a ``LanguageModel`` on token data: what a step costs can be known before it trains."""
        return self.has_token_data and self.architecture is not None

    def of_data(self, name: str) -> Any:
        """An attribute of its data; ``None`` if data of another class have none of this name."""
        return data_attribute(self.data, name)

    @property
    def steps(self) -> int:
        """Optimizer steps of its run.

        Raises:
            ValueError: The config does not say.
        """
        if self.trainer.max_steps < 1:
            raise ValueError(f"{self.name}: give trainer.max_steps: a comparison needs runs of a known length")
        return int(self.trainer.max_steps)

    @property
    def initial_weights(self) -> str:
        """Where its initial weights come from; empty: they are drawn."""
        return str(getattr(self.model, "init_from", None) or "")


# Reads a variant: its name, its configs, and arguments that follow
ReadVariant = Callable[[str, Sequence[str | Path], Sequence[str]], Variant]
