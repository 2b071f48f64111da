"""Lightning's Trainer with this project's defaults."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.pytorch.accelerators import Accelerator, CUDAAccelerator
from lightning.pytorch.callbacks import ModelCheckpoint, ProgressBar
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from lightning.pytorch.plugins import LayerSync, Precision
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.strategies import ModelParallelStrategy, Strategy

from lightning_llm.accounting.sizing import Sizing
from lightning_llm.checkpoints.reading import read_checkpoint
from lightning_llm.checkpoints.schema import RESUME, RESUME_PLAIN
from lightning_llm.io.options import raise_all
from lightning_llm.runs.directory import CHECKPOINTS, RunDirectory
from lightning_llm.training.callbacks.dashboard import Dashboard, RunLogger
from lightning_llm.training.callbacks.inputs import InputHashes
from lightning_llm.training.callbacks.memory_profiler import MemoryProfiler
from lightning_llm.training.callbacks.non_finite import StopOnNonFinite
from lightning_llm.training.callbacks.progress import StatusFile, StepProgressBar
from lightning_llm.training.callbacks.run_checkpoints import RunCheckpoints, refuse_names_of_ours
from lightning_llm.training.callbacks.signals import StopOnSignal
from lightning_llm.training.callbacks.summary_file import SummaryFile, callback_of
from lightning_llm.training.callbacks.throughput import TrainingLog
from lightning_llm.training.capture import capture_problems
from lightning_llm.training.checkpoint_io import AtomicCheckpointIO
from lightning_llm.training.distributed import strategy_for
from lightning_llm.training.environment import choose_precision
from lightning_llm.training.json_logger import JSONLinesLogger
from lightning_llm.training.launcher import bring_results_back
from lightning_llm.training.preflight import Check, check_accelerator, check_nodes, check_options, check_run
from lightning_llm.training.quiet import quieten
from lightning_llm.training.schedule_free import evaluated

Plugin = Precision | ClusterEnvironment | CheckpointIO | LayerSync  # as in Lightning
NOTHING = nullcontext()
STEP_HOOKS = (
    *("on_train_batch_start", "on_train_batch_end", "on_before_zero_grad"),
    *("on_before_backward", "on_after_backward", "on_before_optimizer_step"),
)
FLOAT16 = ("16", "16-mixed", "16-true", "transformer-engine", "transformer-engine-float16")


class Trainer(pl.Trainer):
    """Lightning's Trainer, whose checkpoints are written atomically and read without running code.

    Args:
        accelerator: As in Lightning.
        precision: ``auto`` is ``bf16-mixed`` on hardware with bf16 and ``32-true`` elsewhere. Others as in Lightning:
            ``32-true``, ``bf16-true``, ….
        default_root_dir: Folder for run directories: ``<default_root_dir>/<experiment>/version_<n>``, one for each
            run, with any logger.
        run_dir: The folder of this run, in place of one in ``default_root_dir``. It must not exist, unless a run in it
            is resumed. A logger that names its own folder writes only its own files there.
        logger: Null or true: TensorBoard, in the run directory. False: none. Another logger chooses where its own files
            go; the run's other files go to the run directory.
        callbacks: Added to the project's own: checkpoints (unless ``enable_checkpointing`` is false), the progress bar,
            the training log, the memory profiler and the dashboard (unless one of the same kind is given), the hashes
            of what the run used, and the clean stop on Ctrl-C, SIGTERM and SIGHUP. With ``barebones`` none is added.
        plugins: As in Lightning.
        strategy: As in Lightning; also ``fsdp2``: shard parameters, gradients and optimizer state over all processes.
        max_steps: Optimizer steps of the whole run; -1: as many as ``max_epochs`` gives.
        val_check_interval: Optimizer steps between two validations (a whole number), or a fraction of the run,
            rounded down to whole steps.
        enable_progress_bar: Whether to show progress.
        enable_model_summary: Whether to print Lightning's table of modules too.
        num_sanity_val_steps: Validation batches to try before the first step.
        tf32: Whether matmuls of float32 may round their factors to TF32, which has 10 bits of fraction instead of 23
            and is several times as fast; on NVIDIA GPUs since Ampere. Null: torch's setting, by default false.
        capture: Whether to record forward and backward as CUDA graphs and replay them, which spares the host the launch
            of each kernel: for small models, on one GPU. Batches of another shape than the one before run as without.
        kwargs: As in Lightning.
    """

    def __init__(
        self,
        *,
        accelerator: str | Accelerator = "auto",
        precision: str | int | None = "auto",
        default_root_dir: str = "runs",
        run_dir: str | None = None,
        logger: Logger | list[Logger] | bool | None = None,
        callbacks: list[pl.Callback] | pl.Callback | None = None,
        plugins: list[Plugin] | Plugin | None = None,
        strategy: str | Strategy = "auto",
        max_steps: int = -1,
        val_check_interval: int | float | None = None,
        enable_progress_bar: bool | None = None,
        enable_model_summary: bool = False,
        num_sanity_val_steps: int = 0,
        tf32: bool | None = None,
        capture: bool = False,
        **kwargs: Any,
    ) -> None:
        kwargs |= {"val_check_interval": val_check_interval, "num_sanity_val_steps": num_sanity_val_steps}
        quieten()
        listed = _listed(callbacks)
        check_options(kwargs, listed)
        self.checks: list[Check] = []
        self.tf32 = tf32
        self.capture = capture
        check_accelerator(accelerator)
        precision, self.precision_reason = _precision_for(precision, accelerator)
        self.run_directory = _run_directory_for(logger, default_root_dir, run_dir)
        self._has_run = self._is_agreed = False
        self.sizing: Sizing | None = None  # what set the options, if size did
        if not kwargs.get("barebones"):  # there, Lightning refuses what would cost time, and says what
            logger = RunLogger(self.run_directory) if logger in (None, True) else logger
            has_checkpoints = kwargs.get("enable_checkpointing") is not False
            listed = _with_defaults(listed, progress=enable_progress_bar is not False, checkpoints=has_checkpoints)
        if isinstance(val_check_interval, int):  # counted over the whole run, not within an epoch
            kwargs["check_val_every_n_epoch"] = None
        strategy = strategy_for(strategy)
        if isinstance(strategy, ModelParallelStrategy):  # weights gathered in inference mode could not be trained on
            kwargs["inference_mode"] = False
        listed_plugins = _listed(plugins)
        if not any(isinstance(plugin, CheckpointIO) for plugin in listed_plugins):
            listed_plugins.append(AtomicCheckpointIO())
        kwargs |= {"accelerator": accelerator, "strategy": strategy, "plugins": listed_plugins, "logger": logger}
        kwargs |= {"enable_progress_bar": enable_progress_bar, "enable_model_summary": enable_model_summary}
        kwargs["callbacks"] = listed
        super().__init__(precision=precision, default_root_dir=default_root_dir, max_steps=max_steps, **kwargs)  # type: ignore[arg-type]
        bring_results_back(self.strategy)
        check_nodes(self._accelerator_connector.cluster_environment, self.num_nodes)
        if type(self.profiler) is PassThroughProfiler:  # type: ignore[has-type]
            self.profiler = NoProfiler()
        skip_empty_hooks(self.callbacks)  # type: ignore[attr-defined]

    @property
    def run_dir(self) -> Path | None:
        """Where the files of this run go; ``None`` before ``fit``, and with ``fast_dev_run`` or ``barebones``.

        The first process decides. The first access is a broadcast: every process must make it.
        """
        if not self._has_run:
            return None
        if not self._is_agreed:
            self.run_directory.take(self.strategy.broadcast(self.run_directory.path))
            self._is_agreed = True
        return self.run_directory.path

    @property
    def log_dir(self) -> str | None:
        """The run directory; if the first logger has numbered folders of its own, the logger's."""
        run = self.run_dir
        if run is None or (self.loggers and isinstance(self.loggers[0], TensorBoardLogger | CSVLogger)):
            return super().log_dir
        return str(run)

    def fit(self, *args: Any, **kwargs: Any) -> None:
        """Train as Lightning's Trainer does, in a run directory that no other process writes to.

        Raises:
            ValueError: Another process trains in it; or a ModelCheckpoint would overwrite the run's own checkpoints; or
                ``capture`` cannot record the step.
        """
        raise_all(capture_problems(args[0] if args else kwargs.get("model"), self))
        if callback_of(self, StatusFile) is None and not self.barebones:
            self.callbacks.append(SummaryFile())  # type: ignore[attr-defined]
        was_open = self.run_directory.is_open
        self.open_run()
        try:
            super().fit(*args, **kwargs)
        except BaseException:
            self.run_directory.close()
            raise
        if not was_open:
            self.run_directory.close()

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """Save like Lightning; of a schedule-free optimizer, the weights are those to evaluate."""
        with evaluated(self):
            super().save_checkpoint(*args, **kwargs)

    def open_run(self) -> None:
        """Claim the run directory and keep others out, until ``fit`` ends; does nothing the second time.

        Raises:
            ValueError: As :meth:`fit`.
        """
        if self.fast_dev_run or self.barebones:  # type: ignore[attr-defined]
            return
        others = [callback for callback in self.checkpoint_callbacks if isinstance(callback, ModelCheckpoint)]
        for callback in others:
            refuse_names_of_ours(callback)
        for logger in self.loggers:
            if isinstance(logger, TensorBoardLogger) and not isinstance(logger, RunLogger):
                folder = Path(logger.log_dir)
                if folder.parent.parent.resolve() == self.run_directory.root.resolve():
                    self.run_directory.prefer(folder)  # so that the dashboard finds config and events in one place
        self.run_directory.open()
        self._has_run = True
        for callback in others:
            callback.dirpath = callback.dirpath or str(self.run_directory.path / CHECKPOINTS)

    @property
    def val_check_batch(self) -> int | float | None:
        """Micro-batches between two validations, as Lightning counts them."""
        return self._val_check_batch

    @val_check_batch.setter
    def val_check_batch(self, value: int | float | None) -> None:
        """From the option, in whole optimizer steps; Lightning sets it when it has loaded the data."""
        if isinstance(value, int):  # not None, before there are data, nor infinite, without a length
            accumulation = self.accumulate_grad_batches
            if isinstance(self.val_check_interval, int):
                steps = value
            else:  # a fraction of the run, or of an epoch
                steps = max(1, int(self.fit_loop.max_batches / accumulation * self.val_check_interval + 1e-9))
            value = steps * accumulation
        self._val_check_batch = value

    def check(
        self, model: pl.LightningModule, datamodule: Any, ckpt_path: str | None = None, weights_only: bool | None = None
    ) -> None:
        """Run the checks that ``fit`` runs before its first step, without training; the findings are in ``checks``.

        Args:
            model: The LanguageModel.
            datamodule: Its data.
            ckpt_path: The checkpoint that ``fit`` would resume from.
            weights_only: As in ``fit``.
        """
        self.checks = self.preflight(model, datamodule)
        if ckpt_path is not None:
            needs = RESUME_PLAIN if getattr(model, "architecture", None) is None else RESUME
            step = read_checkpoint(ckpt_path, mmap=True, needs=needs)["global_step"]
            self.checks.append(Check("checkpoint", f"step {step}: {ckpt_path}"))

    def preflight(self, model: Any, datamodule: Any) -> list[Check]:
        """All checks; nothing is started."""
        return list(check_run(model, datamodule, self, self.run_directory.place))


def skip_empty_hooks(callbacks: list[pl.Callback]) -> None:
    """Spare every step the hooks that do nothing, by which Lightning's loop passes where a hook is not callable.

    Of 13 callbacks, 61 of 78 hooks in a step are empty. Those of the user's own callbacks stay: the user's code may
    call them.
    """
    for callback in callbacks:
        if not type(callback).__module__.startswith("lightning_llm."):
            continue
        for name in STEP_HOOKS:
            if getattr(callback, name) == getattr(pl.Callback, name).__get__(callback):
                setattr(callback, name, None)


class NoProfiler(PassThroughProfiler):
    """Unlike Lightning's, makes no generator for each of the 70 to 90 hooks of a step (0.08 ms per step)."""

    def profile(self, action_name: str) -> Any:
        """A context that does nothing."""
        return NOTHING


def _listed(option: Any) -> list[Any]:
    if option is None:
        return []
    return list(option) if isinstance(option, list | tuple) else [option]


def _precision_for(precision: Any, accelerator: Any) -> tuple[Any, str]:
    """The precision, and why it is this one."""
    if precision in ("auto", None):
        return choose_precision(accelerator)
    has_gpu = accelerator != "cpu" and (CUDAAccelerator.is_available() or torch.backends.mps.is_available())
    if str(precision) in FLOAT16 and not has_gpu:
        raise ValueError(f"trainer.precision {precision} needs a GPU: use bf16-mixed, bf16-true or 32-true")
    return precision, "as asked for"


def _run_directory_for(logger: Any, root: str, run_dir: str | None) -> RunDirectory:
    """Directory of a logger that chooses it, or a new one in ``root``; named, if ``run_dir`` names it."""
    chosen = (one.run for one in _listed(logger) if isinstance(one, JSONLinesLogger))
    directory = next(chosen, None) or RunDirectory(root)
    if run_dir is not None:
        directory.request(Path(run_dir))
    return directory


def _with_defaults(callbacks: list[Any], *, progress: bool, checkpoints: bool) -> list[Any]:
    """The user's callbacks, and ours of which there is none of the same kind."""
    defaults: list[pl.Callback] = [TrainingLog(), MemoryProfiler(), Dashboard()]
    defaults += [RunCheckpoints()] if checkpoints else []
    missing = [one for one in defaults if not any(isinstance(callback, type(one)) for callback in callbacks)]
    if progress and not any(isinstance(callback, ProgressBar) for callback in callbacks):
        missing.append(StepProgressBar())
    # InputHashes is first: what others save at the end of a step contains that step. StopOnSignal is last: it ends the
    # run after the others have seen the step
    return [InputHashes(), StopOnNonFinite(), *missing, *callbacks, StopOnSignal()]
