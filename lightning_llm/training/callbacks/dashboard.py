"""A run in TensorBoard: the logger, charts, hyperparameters with results, histograms."""

import time
from collections.abc import Mapping
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.tensorboard.summary import hparams

from lightning_llm.checkpoints.loop_state import step_is_complete
from lightning_llm.io.untrusted import is_number
from lightning_llm.optim.base import local_shard
from lightning_llm.runs.directory import RunDirectory, is_rank_zero
from lightning_llm.runs.event_files import put_events_before
from lightning_llm.runs.options import short_options, shown_option
from lightning_llm.training import metrics
from lightning_llm.training.callbacks.resume_diff import ResumeDiff

# Group -> chart -> the scalars in it, as regular expressions. Where it can, a chart has one curve for each run:
# TensorBoard colors runs, not curves. All curves are in its tab of scalars. A line of a title has room for 45 letters.
LAYOUT = {
    "loss": {
        "training and validation, nats/token": [f"^{metrics.TRAIN_LOSS}$", f"^{metrics.VAL_LOSS}$"],
        "both texts evaluated the same way, nats/token": [f"^{metrics.TRAIN_LOSS_EVAL}$", f"^{metrics.VAL_LOSS}$"],
    },
    "optimization": {
        "learning rate": [f"^{metrics.LEARNING_RATE}$", f"^{metrics.LEARNING_RATE}/"],
        "gradient norm before clipping": [f"^{metrics.GRAD_NORM}$"],
    },
    "memory": {
        "peak in backward, GiB (CPU: whole process)": [f"^{metrics.MEMORY}backward{metrics.PEAK}$"],
        "saved activations at the peak, GiB": [f"^{metrics.MEMORY_AT_PEAK}activations_gib$"],
    },
    "throughput": {
        "tokens per second": [f"^{metrics.TOKENS_PER_SECOND}$"],
        "seconds by phase": [f"^{metrics.TIME_OF_PHASE}.*_s$"],
        "waiting for data, percent": [f"^{metrics.DATA_STALL}$"],
        "utilization of the peak, percent (MFU, HFU)": [f"^{metrics.MFU}$", f"^{metrics.HFU}$"],
    },
    "recall": {
        "recall loss and other loss, nats/token": [f"^{metrics.VAL_RECALL_LOSS}$", f"^{metrics.VAL_OTHER_LOSS}$"]
    },
    # last, since most runs have a single source
    "loss by data source": {"validation, nats/token (needs data.mixture)": [f"^{metrics.VAL_LOSS}/.*"]},
}

# The HPARAMS tab shows the last value of each next to the options.
VALIDATED = (
    *(metrics.VAL_LOSS, metrics.VAL_BITS_PER_BYTE, metrics.VAL_PERPLEXITY, metrics.TRAIN_LOSS_EVAL),
    *(metrics.VAL_RECALL_LOSS, metrics.VAL_OTHER_LOSS),
)
RESULTS = (*VALIDATED, metrics.TOKENS_PER_SECOND, f"{metrics.MEMORY}backward{metrics.PEAK}")

TRAINER_OPTIONS = ("max_steps", "max_epochs", "precision", "gradient_clip_val", "devices", "num_nodes", "strategy")


class RunLogger(TensorBoardLogger):
    """Lightning's logger for TensorBoard, in the run directory that the Trainer chooses.

    Args:
        run: The folder.
    """

    def __init__(self, run: RunDirectory) -> None:
        super().__init__(run.root, name="", default_hp_metric=False)
        self._run = run

    def resume_after(self, step: int) -> None:
        """Hide what was logged after this step before the run was killed: it will be logged again."""
        self._kwargs["purge_step"] = step + 1

    @property
    def log_dir(self) -> str:
        """The run directory, where the event files are."""
        return str(self._run.path)

    @property
    def root_dir(self) -> str:
        """The folder for runs of one kind."""
        return str(self._run.path.parent)

    save_dir = root_dir  # with the name and the version, the run directory

    @property
    def version(self) -> str:
        """Name of the run directory."""
        return self._run.path.name

    @property
    def experiment(self) -> Any:
        """The ``SummaryWriter`` of the event files."""
        if "purge_step" in self._kwargs and self._experiment is None and is_rank_zero():
            put_events_before(self._run.path, int(time.time()))
        return super().experiment


class Dashboard(Callback):
    """Writes the layout of the charts, the hyperparameters and, on request, histograms to TensorBoard.

    Args:
        histograms_every_n_steps: Optimizer steps between two histograms of each weight and of its gradient before
            clipping. They cost time and disk. Null: none.

    Raises:
        ValueError: An interval below 1.
    """

    def __init__(self, histograms_every_n_steps: int | None = None) -> None:
        self.histograms_every_n_steps = every = histograms_every_n_steps
        if every is not None and every < 1:
            raise ValueError(f"Dashboard.histograms_every_n_steps must be at least 1, or null for none, got {every}")
        self._end_of_session: Any = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The layout, and the hyperparameters: their tab stays empty unless results are announced at the start."""
        hyperparameters = _hyperparameters(trainer, pl_module)
        experiment, start, self._end_of_session = hparams(hyperparameters, dict.fromkeys(RESULTS))  # type: ignore[no-untyped-call]
        layout = {group: {title: ["Multiline", tags] for title, tags in of.items()} for group, of in LAYOUT.items()}
        for writer in tensorboard_writers(trainer):
            writer.add_custom_scalars(layout)
            for summary in (experiment, start):
                writer._get_file_writer().add_summary(summary)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Close the session of the hyperparameters; its results are the last entries of their curves."""
        for writer in tensorboard_writers(trainer):
            writer._get_file_writer().add_summary(self._end_of_session)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        if self._is_due(trainer, ahead=1):
            gradients = {name: weight.grad for name, weight in pl_module.named_parameters() if weight.grad is not None}
            _add_histograms(trainer, metrics.GRADIENTS, gradients, trainer.global_step + 1)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any, **kwargs: Any) -> None:
        if self._is_due(trainer) and step_is_complete(trainer):
            _add_histograms(trainer, metrics.WEIGHTS, dict(pl_module.named_parameters()), trainer.global_step)

    def _is_due(self, trainer: Trainer, ahead: int = 0) -> bool:
        every = self.histograms_every_n_steps  # first: the number of the step takes Lightning 5 µs
        return every is not None and (trainer.global_step + ahead) % every == 0


def tensorboard_writers(trainer: Trainer) -> list[Any]:
    """The ``SummaryWriter`` of each TensorBoard logger, for text, images and histograms; none on other processes."""
    if not trainer.is_global_zero:
        return []
    return [logger.experiment for logger in trainer.loggers if isinstance(logger, TensorBoardLogger)]


def _hyperparameters(trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
    """The options of the command line, or the module's own hyperparameters, by short names."""
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    recorded = next((callback.options for callback in callbacks if isinstance(callback, ResumeDiff)), None)
    options = short_options(dict(pl_module.hparams) if recorded is None else recorded)
    options["trainer.precision"] = trainer.precision  # as "auto" was resolved
    hyperparameters = {}
    for name, value in options.items():
        section, _, option = name.partition(".")
        if value is not None and (section != "trainer" or option in TRAINER_OPTIONS):
            hyperparameters[name] = value if is_number(value) else shown_option(value)
    return hyperparameters


def _add_histograms(trainer: Trainer, prefix: str, tensors: Mapping[str, Tensor], step: int) -> None:
    for writer in tensorboard_writers(trainer):
        for name, tensor in tensors.items():
            values = local_shard(tensor).detach().float()
            values = values[values.isfinite()]  # NumPy rejects the others
            if values.numel():
                writer.add_histogram(prefix + name, values, step)
