"""Loss, perplexity and bits per byte of an evaluation: over a split, and over each of its sources.

Means of means are wrong when batches differ in size, and logits saved for a perplexity metric cost another
tokens × vocab. So the state is sums, reduced once over all processes: nats, tokens and bytes of text. The loss of a
split is also divided into that of the tokens whose bigram its window has had before, and that of the others.
"""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torchmetrics import Metric

from lightning_llm.data.batches import IGNORED, Batch, EvalBatches
from lightning_llm.data.bigrams import repeated_bigrams
from lightning_llm.data.datamodule import TokenDataModule, data_attribute
from lightning_llm.data.mixture import MixtureSource
from lightning_llm.statistics.windows import MOST_BLOCKS, WINDOWS
from lightning_llm.training.metrics import TRAIN_LOSS_EVAL


class LanguageModelMetrics(Metric):
    """Sums of nats, tokens and bytes; ``compute`` returns loss, perplexity and, if bytes are known, bits per byte."""

    full_state_update = False
    nats: Tensor
    tokens: Tensor
    bytes: Tensor
    recall: Tensor  # (2, 2): nats and tokens of repeated bigrams, and of the others

    def __init__(self) -> None:
        super().__init__()
        # float64: a float32 sum of 10^8 losses would lose the digits that tell two runs apart
        for name, dtype in (("nats", torch.float64), ("tokens", torch.int64), ("bytes", torch.float64)):
            self.add_state(name, torch.zeros((), dtype=dtype), dist_reduce_fx="sum")
        self.add_state("recall", torch.zeros(2, 2, dtype=torch.float64), dist_reduce_fx="sum")

    def update(
        self,
        mean_loss: Tensor,
        tokens: Tensor | int,
        bytes_per_token: float | None = None,
        recall: Tensor | None = None,
    ) -> None:
        """Add a batch.

        Args:
            mean_loss: Scalar, nats per token over the batch; ignored if ``tokens`` is 0.
            tokens: Number of tokens in that mean.
            bytes_per_token: UTF-8 bytes of text per token, on average over all that is evaluated; ``None`` if the text
                is not known.
            recall: See :func:`recall_sums`; ``None``: not known.
        """
        tokens = torch.as_tensor(tokens, device=self.nats.device)
        mean_loss = mean_loss.detach().to(self.nats.device)
        self.nats += torch.where(tokens > 0, mean_loss.double() * tokens, 0.0)
        self.tokens += tokens
        self.bytes += tokens * (bytes_per_token or 0.0)
        if recall is not None:
            self.recall += recall.to(self.recall)

    def compute(self) -> dict[str, float]:
        """``loss`` (nats per token), ``perplexity``, and ``bits_per_byte`` if the bytes are known.

        ``recall_loss`` and ``other_loss`` are those of tokens whose bigram occurred before in the window, and of the
        others, if there are any; ``recall_share`` is the share of the former.
        """
        loss = (self.nats / self.tokens).item()
        result = {"loss": loss, "perplexity": math.exp(loss) if not loss >= 700 else math.inf}
        if self.bytes > 0:
            result["bits_per_byte"] = (self.nats / math.log(2) / self.bytes).item()
        sums = self.recall.tolist()
        tokens = float(self.recall[:, 1].sum())
        for name, (nats, count) in zip(("recall_loss", "other_loss"), sums, strict=True):
            result |= {name: nats / count} if count else {}
        return result | ({"recall_share": sums[0][1] / tokens} if tokens else {})


def recall_sums(losses: Tensor, counted: Tensor, batch: Batch) -> Tensor:
    """Nats and tokens where the bigram occurred before in the window, and of the others, (2, 2).

    Args:
        losses: (batch, seq), of each target in nats.
        counted: (batch, seq), which of them count.
        batch: ``input_ids``, ``targets`` and, if attention stays inside them, ``documents``.
    """
    repeated = repeated_bigrams(batch["input_ids"], batch["targets"], batch.get("documents"))
    sides = torch.stack([counted & repeated, counted & ~repeated])  # (2, batch, seq)
    nats = torch.where(sides, losses.detach(), 0.0).sum((1, 2), dtype=_sum_dtype(losses))
    return torch.stack([nats, sides.sum((1, 2)).to(nats.dtype)], dim=1)


def _sum_dtype(losses: Tensor) -> torch.dtype:
    """The dtype of sums of losses: float64, which MPS does not have."""
    return torch.float32 if losses.device.type == "mps" else torch.float64


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
        sources: Sequence[MixtureSource | None] = data.sources if isinstance(data, TokenDataModule) else [None]
        self._loaders: list[tuple[list[str], float | None]] = []  # names of metrics, bytes per token
        bytes_of_val = (
            data.validated_bytes(module.trainer) if isinstance(data, TokenDataModule) and "val" in splits else []
        )
        for split, (number, source) in itertools.product(splits, enumerate(sources)):
            if source is None or split == "train":
                self._loaders.append(([split], None if split == "train" else data_attribute(data, "bytes_per_token")))
            else:
                parts = [f"{split}/{source.name}"] if len(sources) > 1 else []
                known = bytes_of_val[number] if split == "val" else source.store.bytes_per_token(split)
                self._loaders.append(([split, *parts], known))
        names = dict.fromkeys(name for loader, _ in self._loaders for name in loader)
        device = "cpu" if module.device.type == "mps" else module.device  # MPS has no float64
        self._metrics = {name: LanguageModelMetrics().to(device) for name in names}
        self._windows = None if module.trainer.testing else WindowSums.of(module.trainer, len(sources), device)

    def add(self, losses: Tensor, batch: Batch, loader: int) -> None:
        """Add a batch of one of the data loaders.

        Args:
            losses: (batch, seq), of each target in nats.
            batch: ``targets``, (batch, seq); those of -100 do not count. With ``input_ids``, recall is measured too.
            loader: Number of the data loader.
        """
        if loader >= len(self._loaders):
            raise ValueError(f"the data have more than {len(self._loaders)} loaders for this evaluation: return fewer")
        counted = batch["targets"] != IGNORED
        tokens = counted.sum()
        mean_loss = losses.detach().sum(dtype=_sum_dtype(losses)) / tokens
        names, bytes_per_token = self._loaders[loader]
        for name in names:
            is_split = name in ("val", "test") and "input_ids" in batch
            recall = recall_sums(losses, counted, batch) if is_split else None
            self._metrics[name].update(mean_loss, tokens, bytes_per_token, recall)
        if self._windows is not None:
            self._windows.add(losses, counted, loader)

    def windows(self, trainer: Any) -> dict[str, list[Any]] | None:
        """The sums of blocks of validation windows, see ``statistics.windows``; every process must ask.

        Returns:
            ``None`` for a test, and for data loaders whose rows have no known place in the text.
        """
        return None if self._windows is None else self._windows.record(trainer)

    def results(self) -> dict[str, float]:
        """Over all processes: ``val_loss``, ``val_perplexity``, ``val_recall_loss``, ``val_loss/SOURCE`` and so on.

        The loss of the training text, read like the validation text, is ``train_loss_eval``.
        """
        results = {}
        for name, metric in self._metrics.items():
            if not metric.update_called:  # on any process: the user's own data had no second loader
                continue
            split, _, source = name.partition("/")
            values = metric.compute()
            if split == "train":
                results[TRAIN_LOSS_EVAL] = values["loss"]
            elif source:
                results[f"{split}_loss/{source}"] = values["loss"]
            else:
                results |= {f"{split}_{key}": value for key, value in values.items()}
        return results

    def log(self, module: LightningModule) -> None:
        """Log the results; a ``barebones`` trainer logs nothing."""
        metrics = self.results()
        trainer = module.trainer
        if trainer.barebones:
            return
        # what Lightning logs is what validate() and test() return; within fit its step count is one behind
        is_fitting = trainer.state.fn == "fit"
        module.log_dict(metrics, logger=False if is_fitting else None)  # True would warn if there is no logger
        if is_fitting and not trainer.sanity_checking:
            for logger in module.loggers:
                logger.log_metrics(metrics, step=module.global_step)


class WindowSums:
    """Nats and tokens of each window of the validation text, by its place in it: any processes and batches give these.

    Args:
        loaders: Of each source.
        device: Where the sums are, in float64.
    """

    def __init__(self, loaders: Sequence[EvalBatches], device: Any) -> None:
        used = [loader.rows or [] for loader in loaders]
        self._firsts = [[0, *itertools.accumulate(rows)] for rows in used]  # windows before each batch of all processes
        self._shares = [loader.share for loader in loaders]
        self._added = [0] * len(loaders)  # batches of this process
        self._sums = [torch.zeros(sum(rows), 2, dtype=torch.float64, device=device) for rows in used]

    @classmethod
    def of(cls, trainer: Any, sources: int, device: Any) -> "WindowSums | None":
        """The sums for the validation of a trainer; ``None`` if the place of a row is not known."""
        dataloaders = getattr(trainer, "val_dataloaders", None)
        loaders = dataloaders[:sources] if isinstance(dataloaders, list) else []
        is_known = bool(loaders) and all(isinstance(loader, EvalBatches) and loader.rows for loader in loaders)
        return cls(loaders, device) if is_known else None

    def add(self, losses: Tensor, counted: Tensor, loader: int) -> None:
        """Add a batch of one of the loaders, in its order; those of the training text are left out."""
        if loader >= len(self._sums):
            return
        share, firsts = self._shares[loader], self._firsts[loader]
        number = share.rank + share.world_size * self._added[loader]
        self._added[loader] += 1
        if number + 1 < len(firsts):  # else it is there to make all processes have as many
            sums = self._sums[loader][firsts[number] : firsts[number + 1]]
            sums[:, 0] = counted.sum(1)
            sums[:, 1] = losses.detach().sum(1, dtype=_sum_dtype(losses))

    def record(self, trainer: Any) -> dict[str, list[Any]] | None:
        """For each block its ``windows``, ``tokens`` and ``nats``; ``None`` without any, or if a loss is not finite."""
        size = WINDOWS
        windows = [len(sums) for sums in self._sums]
        while sum(-(-count // size) for count in windows) > MOST_BLOCKS:
            size *= 2
        blocks: dict[str, list[Any]] = {"windows": [], "tokens": [], "nats": []}
        whole = trainer.strategy.reduce(torch.cat(self._sums), reduce_op="sum").cpu()
        if not whole.isfinite().all():
            return None
        for sums in whole.split(windows):
            for block in sums.split(size):
                if tokens := int(block[:, 0].sum()):
                    blocks["windows"].append(int((block[:, 0] > 0).sum()))
                    blocks["tokens"].append(tokens)
                    blocks["nats"].append(float(block[:, 1].sum()))
        return blocks if blocks["windows"] else None
