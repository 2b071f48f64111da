"""The sums of one evaluation: over a split, and over each of its sources where there are several."""

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_llm.data.mixture import Source
from lightning_llm.training.metrics import LanguageModelMetrics


class Evaluation:
    """What validation or test adds up, batch by batch.

    Args:
        splits: ``val`` and ``train``, or ``test``: the data loaders are those of each source for the first, then of
            each for the second.
        sources: Of the data; none where the loaders are the user's own, one for each split.
        device: Where the sums are.
    """

    def __init__(self, splits: Sequence[str], sources: Sequence[Source], device: torch.device) -> None:
        self._loaders: list[tuple[list[LanguageModelMetrics], float | None]] = []
        self._metrics: dict[str, LanguageModelMetrics] = {}
        for split in splits:
            whole = self._metrics[split] = LanguageModelMetrics().to(device)
            for source in sources or (None,):
                metrics, known = [whole], None
                if source is not None:
                    known = source.store.bytes_per_token(split) if split != "train" else None
                    if len(sources) > 1 and split != "train":
                        part = self._metrics[f"{split}/{source.name}"] = LanguageModelMetrics().to(device)
                        metrics.append(part)
                self._loaders.append((metrics, known))

    def add(self, mean_loss: Tensor, tokens: Tensor, loader: int) -> None:
        """Add a batch of one of the data loaders. ``mean_loss`` may be anything where ``tokens`` is 0."""
        metrics, bytes_per_token = self._loaders[loader]
        for metric in metrics:
            metric.update(mean_loss, tokens, bytes_per_token)

    def results(self) -> dict[str, float]:
        """Of all processes: ``val_loss``, ``val_perplexity``, ``val_bits_per_byte``, ``val_loss/SOURCE`` and the like.

        The training text's loss, read like the validation text's, is ``train_loss_eval``.
        """
        results = {}
        for name, metric in self._metrics.items():
            if not metric.update_called:  # on any process: the user's own loaders had no second one
                continue
            split, _, source = name.partition("/")
            found = metric.compute()
            if split == "train":
                results["train_loss_eval"] = found["loss"]
            elif source:
                results[f"{split}_loss/{source}"] = found["loss"]
            else:
                results |= {f"{split}_{key}": value for key, value in found.items()}
        return results
