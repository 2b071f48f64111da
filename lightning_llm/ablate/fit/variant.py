"""A variant of an experiment, or its baseline, as ``fit`` reads it."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any


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
        """The model's config, with the vocabulary of the data."""
        config = self.model.architecture
        return dataclasses.replace(config, vocab_size=config.vocab_size or self.data.vocab_size)

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
