"""Record of a run at its end: ``summary.json``, with which ``compare`` takes it into account.

``fit`` writes it after its last validation. A run that Python starts, with our Trainer or Lightning's, gets
``SummaryFile`` from our Trainer or from the model, and its summary has the options too, since there is no config.
"""

import os
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from lightning_llm.data.datamodule import TokenDataModule, data_attribute
from lightning_llm.data.validated import asked_limit
from lightning_llm.io.atomic import remove_path, write_json
from lightning_llm.io.trust import path_of
from lightning_llm.runs.directory import SUMMARY, WINDOWS, run_dir_of
from lightning_llm.runs.status import FINISHED, write_status
from lightning_llm.training import metrics
from lightning_llm.training.callbacks.inputs import InputHashes
from lightning_llm.training.callbacks.memory_profiler import MemoryProfiler
from lightning_llm.training.callbacks.progress import StatusFile
from lightning_llm.training.callbacks.resume_diff import ResumeDiff
from lightning_llm.training.callbacks.run_checkpoints import RunCheckpoints
from lightning_llm.training.callbacks.throughput import TrainingLog
from lightning_llm.training.environment import attention_of, environment_of

OF_TRAINER = ("max_steps", "max_epochs", "precision", "gradient_clip_val", "limit_train_batches")


def callback_of(trainer: Trainer, kind: type[Callback]) -> Any:
    """The first callback of this class, or ``None``."""
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    return next((callback for callback in callbacks if isinstance(callback, kind)), None)


def write_summary(trainer: Trainer, model: LightningModule, data: Any, run: Path | None, **more: Any) -> dict[str, Any]:
    """The results of a run, which the first process writes to its folder. Every process must call it.

    Args:
        trainer: After the last validation.
        model: With the sums of that validation.
        data: The data module.
        run: The run directory; ``None``: nothing is written.
        more: Further fields.
    """
    steps = trainer.global_step
    results = {name: float(value) for name, value in trainer.callback_metrics.items()}
    evaluation = getattr(model, "evaluation", None)
    checkpoints = callback_of(trainer, RunCheckpoints)
    inputs = callback_of(trainer, InputHashes)
    windows = None if evaluation is None else evaluation.windows(trainer)  # every process must ask
    newest = None if checkpoints is None else checkpoints.newest
    attention = attention_of(trainer, getattr(model, "architecture", None), data_attribute(data, "context_length"))
    summary = {
        metrics.VAL_LOSS: results.get(metrics.VAL_LOSS),  # none with trainer.limit_val_batches 0
        "perplexity": results.get(metrics.VAL_PERPLEXITY),
        "bits_per_byte": results.get(metrics.VAL_BITS_PER_BYTE),
        "recall_loss": results.get(metrics.VAL_RECALL_LOSS),
        "other_loss": results.get(metrics.VAL_OTHER_LOSS),
        "recall_share": results.get(metrics.VAL_RECALL_SHARE),
        metrics.TRAIN_LOSS_EVAL: results.get(metrics.TRAIN_LOSS_EVAL),
        "best_val_loss": None if checkpoints is None else checkpoints.best_loss,
        "steps": steps,
        **({} if (tokens := data_attribute(data, "tokens_per_step")) is None else {"tokens": steps * tokens}),
        "seconds": round(getattr(callback_of(trainer, StatusFile), "seconds", 0.0), 3),
        **environment_of(trainer),
        **({} if attention is None else {"attention": attention}),
        "changed_on_resume": getattr(callback_of(trainer, ResumeDiff), "changes", []),
        "peak_memory_gib": getattr(callback_of(trainer, MemoryProfiler), "highest_gib", None),
        "checkpoint": None if newest is None else str(newest),
        **({} if inputs is None else inputs.record(steps)),
        **more,
    }
    if run is not None and trainer.is_global_zero:
        remove_path(run / WINDOWS)  # of an earlier end
        if windows is not None and summary[metrics.VAL_LOSS] is not None:
            write_json(run / WINDOWS, {"step": steps, **windows}, indent=None)
        write_json(run / SUMMARY, summary)
        write_status(run, FINISHED, step=steps, val_loss=summary[metrics.VAL_LOSS])
    return summary


class SummaryFile(StatusFile):
    """The record of a run that Python starts: ``status.json`` while it trains, and ``summary.json`` at its end."""

    def folder_of(self, trainer: Trainer) -> Path | None:
        """A folder of the run's own; a run without one has no record."""
        logger = next(iter(trainer.loggers), None)
        if not (hasattr(trainer, "run_dir") or isinstance(logger, TensorBoardLogger | CSVLogger)):
            return None
        folder = run_dir_of(trainer)
        if logger is not None and folder is not None:
            _ = getattr(logger, "experiment", None)  # the logger makes its folder before a file is in it
        return folder

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The run has ended well: an exception does not lead here."""
        if self._folder is None:
            return
        data = getattr(trainer, "datamodule", None)
        more = {"validated_step": self.validated_step, "options": options_of(trainer, pl_module, data)}
        write_summary(trainer, pl_module, data, self._folder, **more)


def missing_callbacks(trainer: Trainer) -> list[Callback]:
    """Callbacks that a run needs for ``compare`` and does not have: with Lightning's own trainer, all of them."""
    needed = {InputHashes: InputHashes, TrainingLog: TrainingLog, StatusFile: SummaryFile}
    missing = [make() for base, make in needed.items() if callback_of(trainer, base) is None]
    return [] if trainer.barebones else missing


def options_of(trainer: Trainer, model: LightningModule, data: Any) -> dict[str, Any]:
    """Known options of a run without a config, in the form of one."""
    seed = getattr(model, "seed", None)
    seed = os.environ.get("PL_GLOBAL_SEED") if seed is None else seed  # of Lightning's seed_everything
    return {
        "model": {**_own_class(model), **model.hparams},
        "data": {**_own_class(data), **(data.options if isinstance(data, TokenDataModule) else {})},
        "trainer": {**{name: getattr(trainer, name) for name in OF_TRAINER}, "limit_val_batches": asked_limit(trainer)},
        "seed_everything": None if seed is None else int(seed),
    }


def _own_class(made: Any) -> dict[str, str]:
    path = path_of(type(made))
    return {} if made is None or path.startswith("lightning_llm.") else {"class_path": path}
