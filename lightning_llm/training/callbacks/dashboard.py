"""The run on TensorBoard's page: which curves share a chart, hyperparameters with results, histograms."""

from collections.abc import Callable
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.tensorboard.summary import hparams

import lightning_llm.training.tensorboard as names
from lightning_llm.checkpoints.loop_state import step_is_complete
from lightning_llm.optim.groups import local
from lightning_llm.training.callbacks.consistency import ResumeDiff
from lightning_llm.training.run_options import short_options, shown
from lightning_llm.training.tensorboard import tensorboard_writers

# Group -> chart -> the scalars in it, as regular expressions.
LAYOUT = {
    "loss": {
        "training and validation, nats/token": [f"^{names.TRAIN_LOSS}$", f"^{names.VAL_LOSS}$"],
        "both texts read the same way, nats/token": [f"^{names.TRAIN_LOSS_EVAL}$", f"^{names.VAL_LOSS}$"],
    },
    "optimization": {
        "learning rate": [f"^{names.LEARNING_RATE}$"],
        "gradient norm before clipping": [f"^{names.GRAD_NORM}$"],
    },
    "memory": {
        "peak by phase, GiB": [f"^{names.MEMORY}[a-z]+{names.PEAK}$"],
        "in use at the end of each phase, GiB": [f"^{names.MEMORY}[a-z]+{names.LIVE}$"],
        "in use at the peak by category, GiB": [f"^{names.MEMORY_AT_PEAK}.*_gib$"],
    },
    "throughput": {
        "tokens per second": [f"^{names.TOKENS_PER_SECOND}$"],
        "seconds per step": [f"^{names.STEP_SECONDS}$"],
        "seconds by phase": [f"^{names.TIME_OF_PHASE}.*_s$"],
        "waiting for data, percent": [f"^{names.DATA_STALL}$"],
        "utilization of the peak, percent (MFU, HFU)": [f"^{names.MFU}$", f"^{names.HFU}$"],
    },
    # empty with a single source, so it comes last
    "loss by data source": {"validation, nats/token": [f"^{names.VAL_LOSS_OF_SOURCE}.*"]},
}

# The HPARAMS tab shows the last value of each next to the options.
BACKWARD_PEAK = f"{names.MEMORY}backward{names.PEAK}"
RESULTS = (
    *(names.VAL_LOSS, names.VAL_BITS_PER_BYTE, names.VAL_PERPLEXITY, names.TRAIN_LOSS_EVAL),
    *(names.TOKENS_PER_SECOND, BACKWARD_PEAK),
)

TRAINER_OPTIONS = ("max_steps", "max_epochs", "precision", "gradient_clip_val", "devices", "num_nodes", "strategy")


class Dashboard(Callback):
    """Writes the layout of the charts, the hyperparameters and, on request, histograms to TensorBoard.

    Args:
        histograms_every_n_steps: Optimizer steps between two histograms of each weight and of its gradient before
            clipping. They cost time and disk. Null: none.

    Raises:
        ValueError: An interval below 1.
    """

    def __init__(self, histograms_every_n_steps: int | None = None) -> None:
        every = self.histograms_every_n_steps = histograms_every_n_steps
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
        """Histograms of the gradients, before clipping."""
        if self._is_due(trainer, ahead=1):
            _add_histograms(trainer, pl_module, names.GRADIENTS, lambda parameter: parameter.grad, ahead=1)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any, **kwargs: Any) -> None:
        """Histograms of the weights, after the step."""
        if self._is_due(trainer) and step_is_complete(trainer):
            _add_histograms(trainer, pl_module, names.WEIGHTS, lambda parameter: parameter)

    def _is_due(self, trainer: Trainer, ahead: int = 0) -> bool:
        every = self.histograms_every_n_steps  # first: the number of the step takes Lightning 5 µs
        return every is not None and (trainer.global_step + ahead) % every == 0


def _hyperparameters(trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
    """The options of the command line, or the module's own hyperparameters, by short names."""
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    given = next((callback.options for callback in callbacks if isinstance(callback, ResumeDiff)), None)
    options = short_options(dict(pl_module.hparams) if given is None else given)
    options["trainer.precision"] = trainer.precision  # as "auto" was resolved
    found = {}
    for name, value in options.items():
        section, _, option = name.partition(".")
        if value is not None and (section != "trainer" or option in TRAINER_OPTIONS):
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            found[name] = value if is_number else shown(value)
    return found


def _add_histograms(
    trainer: Trainer, module: LightningModule, prefix: str, of: Callable[[Tensor], Tensor | None], ahead: int = 0
) -> None:
    for writer in tensorboard_writers(trainer):
        for name, parameter in module.named_parameters():
            tensor = of(parameter)
            if tensor is not None:
                values = local(tensor).detach().float()
                values = values[values.isfinite()]  # NumPy rejects the others
                if values.numel():
                    writer.add_histogram(prefix + name, values, trainer.global_step + ahead)
