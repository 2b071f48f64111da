"""Loss, perplexity and bits per byte of an evaluation: over a split, and over each of its sources.

Means of means are wrong when batches differ in size, and logits saved for a perplexity metric cost another
tokens × vocab. So the state is sums, reduced once over all processes: nats, tokens and bytes of text.
"""

import itertools
import math
from collections.abc import Sequence

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torchmetrics import Metric

from lightning_llm.data.batches import IGNORED
from lightning_llm.data.datamodule import TokenDataModule, offered
from lightning_llm.data.mixture import Source


class LanguageModelMetrics(Metric):
    """Sums of nats, tokens and bytes; ``compute`` returns loss, perplexity and, if bytes are known, bits per byte."""

    full_state_update = False
    nats: Tensor
    tokens: Tensor
    bytes: Tensor

    def __init__(self) -> None:
        super().__init__()
        # float64: a float32 sum of 10^8 losses would lose the digits that tell two runs apart
        for name, dtype in (("nats", torch.float64), ("tokens", torch.int64), ("bytes", torch.float64)):
            self.add_state(name, torch.zeros((), dtype=dtype), dist_reduce_fx="sum")

    def update(self, mean_loss: Tensor, tokens: Tensor | int, bytes_per_token: float | None = None) -> None:
        """Add a batch.

        Args:
            mean_loss: Scalar, nats per token over the batch; ignored if ``tokens`` is 0.
            tokens: Number of tokens in that mean.
            bytes_per_token: UTF-8 bytes of text per token, on average over the data set; ``None`` if the text is not
                known.
        """
        tokens = torch.as_tensor(tokens, device=self.nats.device)
        self.nats += torch.where(tokens > 0, mean_loss.detach().double() * tokens, 0.0)
        self.tokens += tokens
        self.bytes += tokens * (bytes_per_token or 0.0)

    def compute(self) -> dict[str, float]:
        """``loss`` (nats per token), ``perplexity``, and ``bits_per_byte`` if the bytes are known."""
        loss = (self.nats / self.tokens).item()
        result = {"loss": loss, "perplexity": math.exp(loss) if loss < 700 else math.inf}
        if self.bytes > 0:
            result["bits_per_byte"] = (self.nats / math.log(2) / self.bytes).item()
        return result


class Evaluation:
    """The sums of one validation or test.

    The data loaders are those of each source for the first split, then of each for the second; with the user's own
    data, one for each split. The splits are ``test``, or ``val`` and ``train``.

    Args:
        module: The LightningModule that evaluates.
    """

    def __init__(self, module: LightningModule) -> None:
        data = getattr(module.trainer, "datamodule", None)
        splits = ("test",) if module.trainer.testing else ("val", "train")
        sources: Sequence[Source | None] = data.sources if isinstance(data, TokenDataModule) else [None]
        self._loaders: list[tuple[list[str], float | None]] = []  # names of metrics, bytes per token
        for split, source in itertools.product(splits, sources):
            if source is None or split == "train":
                self._loaders.append(([split], None if split == "train" else offered(data, "bytes_per_token")))
            else:
                parts = [f"{split}/{source.name}"] if len(sources) > 1 else []
                self._loaders.append(([split, *parts], source.store.bytes_per_token(split)))
        names = dict.fromkeys(name for loader, _ in self._loaders for name in loader)
        self._metrics = {name: LanguageModelMetrics().to(module.device) for name in names}

    def add(self, mean_loss: Tensor, targets: Tensor, loader: int) -> None:
        """Add a batch of one of the data loaders. Targets of -100 do not count."""
        if loader >= len(self._loaders):
            raise ValueError(f"the data have more than {len(self._loaders)} loaders for this evaluation: return fewer")
        tokens = (targets != IGNORED).sum()
        names, bytes_per_token = self._loaders[loader]
        for name in names:
            self._metrics[name].update(mean_loss, tokens, bytes_per_token)

    def results(self) -> dict[str, float]:
        """Over all processes: ``val_loss``, ``val_perplexity``, ``val_bits_per_byte``, ``val_loss/SOURCE`` and so on.

        The loss of the training text, read like the validation text, is ``train_loss_eval``.
        """
        results = {}
        for name, metric in self._metrics.items():
            if not metric.update_called:  # on any process: the user's own data had no second loader
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

    def log(self, module: LightningModule) -> None:
        """Log the results; a ``barebones`` trainer logs nothing."""
        metrics, trainer = self.results(), module.trainer
        if trainer.barebones:
            return
        # what Lightning logs is what validate() and test() return; within fit its step count is one behind
        is_fitting = trainer.state.fn == "fit"
        module.log_dict(metrics, logger=False if is_fitting else None)  # True would warn if there is no logger
        if is_fitting and not trainer.sanity_checking:
            for logger in module.loggers:
                logger.log_metrics(metrics, step=module.global_step)
