"""The run as TensorBoard's page shows it: which curves share a chart, hyperparameters with results, histograms."""

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.tensorboard.summary import hparams

from lightning_llm.checkpoints.loop_state import step_is_complete
from lightning_llm.training.callbacks.resume_diff import ResumeDiff
from lightning_llm.training.run_options import short_options, shown
from lightning_llm.training.scalar_names import (
    DATA_STALL,
    GRAD_NORM,
    GRADIENTS,
    HFU,
    LEARNING_RATE,
    LIVE,
    MEMORY,
    MEMORY_AT_PEAK,
    MFU,
    PEAK,
    STEP_SECONDS,
    TIME_OF_PHASE,
    TOKENS_PER_SECOND,
    TRAIN_LOSS,
    TRAIN_LOSS_EVAL,
    VAL_BITS_PER_BYTE,
    VAL_LOSS,
    VAL_LOSS_OF_SOURCE,
    VAL_PERPLEXITY,
    WEIGHTS,
)
from lightning_llm.training.writers import tensorboard_writers

# Group -> chart -> the scalars in it, as regular expressions.
LAYOUT = {
    "loss": {
        "training and validation, nats/token": [f"^{TRAIN_LOSS}$", f"^{VAL_LOSS}$"],
        "both texts read the same way, nats/token": [f"^{TRAIN_LOSS_EVAL}$", f"^{VAL_LOSS}$"],
    },
    "optimisation": {
        "learning rate": [f"^{LEARNING_RATE}$"],
        "gradient norm before clipping": [f"^{GRAD_NORM}$"],
    },
    "memory": {
        "peak by phase, GiB": [f"^{MEMORY}[a-z]+{PEAK}$"],
        "in use at the end of each phase, GiB": [f"^{MEMORY}[a-z]+{LIVE}$"],
        "what is in use at the peak, GiB": [f"^{MEMORY_AT_PEAK}.*_gib$"],
    },
    "throughput": {
        "tokens per second": [f"^{TOKENS_PER_SECOND}$"],
        "seconds per step": [f"^{STEP_SECONDS}$"],
        "seconds by phase": [f"^{TIME_OF_PHASE}.*_s$"],
        "waiting for data, percent": [f"^{DATA_STALL}$"],
        "use of the peak, percent (MFU, HFU)": [f"^{MFU}$", f"^{HFU}$"],
    },
    # empty where there is one source only, so it comes last
    "loss by data source": {"validation, nats/token": [f"^{VAL_LOSS_OF_SOURCE}.*"]},
}

# What the HPARAMS tab puts beside the options: the last value of each.
BACKWARD_PEAK = f"{MEMORY}backward{PEAK}"
RESULTS = (VAL_LOSS, VAL_BITS_PER_BYTE, VAL_PERPLEXITY, TRAIN_LOSS_EVAL, TOKENS_PER_SECOND, BACKWARD_PEAK)

TRAINER_OPTIONS = ("max_steps", "max_epochs", "precision", "gradient_clip_val", "devices", "num_nodes", "strategy")


class Dashboard(Callback):
    """Writes the layout of the charts, the hyperparameters and, on demand, histograms, where TensorBoard is logged to.

    Args:
        histograms_every_n_steps: Optimiser steps between two histograms of each weight and of its gradient before
            clipping. They cost time and disk. Null: none.

    Raises:
        ValueError: An interval below 1.
    """

    def __init__(self, histograms_every_n_steps: int | None = None) -> None:
        if histograms_every_n_steps is not None and histograms_every_n_steps < 1:
            raise ValueError(
                f"Dashboard.histograms_every_n_steps must be at least 1, or null for none, "
                f"got {histograms_every_n_steps}"
            )
        self.histograms_every_n_steps = histograms_every_n_steps
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
        """Histograms of the gradients, before clipping."""
        if self._is_due(trainer, ahead=1):
            step = trainer.global_step + 1
            for writer in tensorboard_writers(trainer):
                for name, parameter in pl_module.named_parameters():
                    if parameter.grad is not None:
                        _add_histogram(writer, GRADIENTS + name, parameter.grad, step)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Histograms of the weights, after the step."""
        if self._is_due(trainer) and step_is_complete(trainer):
            for writer in tensorboard_writers(trainer):
                for name, parameter in pl_module.named_parameters():
                    _add_histogram(writer, WEIGHTS + name, parameter, trainer.global_step)

    def _is_due(self, trainer: Trainer, ahead: int = 0) -> bool:
        every = self.histograms_every_n_steps  # first: the number of the step takes Lightning 5 µs
        return every is not None and (trainer.global_step + ahead) % every == 0


def _hyperparameters(trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
    """The options of the command line, else what the module saved of its own; by short names."""
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    given = next((callback.options for callback in callbacks if isinstance(callback, ResumeDiff)), None)
    options = short_options(dict(pl_module.hparams) if given is None else given)
    options["trainer.precision"] = trainer.precision  # what "auto" came to
    kept = {}
    for name, value in options.items():
        section, _, option = name.partition(".")
        if value is not None and (section != "trainer" or option in TRAINER_OPTIONS):
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            kept[name] = value if is_number else shown(value)
    return kept


def _add_histogram(writer: Any, name: str, tensor: Tensor, step: int) -> None:
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor  # of a sharded one, this process's part
    values = local.detach().float()
    values = values[values.isfinite()]  # NumPy refuses the others
    if values.numel():
        writer.add_histogram(name, values, step)
