"""On Ctrl-C, SIGTERM, SIGHUP or SLURM's signal, a run stops at the next step from which it can be resumed exactly.

Lightning's own handlers raise the exception wherever the signal arrives, or save from within the handler, even in the
middle of a step; with several processes, its SIGTERM handler sends a broadcast between those of the training. Here the
handler only records the signal. The run finishes the current optimizer step, and :class:`Interrupted` is raised in
every process at the same step; the checkpoint callback then saves. A second Ctrl-C does not wait. A signal that the
parent of this process ignores, as under ``nohup``, stays ignored.
"""

import os
import signal
import subprocess
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_llm.checkpoints.loop_state import step_is_complete
from lightning_llm.io.processes import ENDING
from lightning_llm.training.distributed import host_group


class Interrupted(Exception):
    """A signal ended the run after a complete optimizer step.

    Args:
        signal_number: Which signal.
        step: Finished optimizer steps.
        requeue: Whether the signal asks for the job to be queued again.
        is_saved: Whether the run has callbacks that save checkpoints.
    """

    def __init__(self, signal_number: int, step: int, requeue: bool = False, is_saved: bool = True) -> None:
        self.signal_number = signal_number
        self.step = step
        self.requeue = requeue
        self.is_saved = is_saved
        super().__init__(f"interrupted by {signal.Signals(signal_number).name} after step {step}")

    @property
    def exit_status(self) -> int:
        """The status that a shell reports for this signal: 130 for Ctrl-C, 143 for SIGTERM, 129 for SIGHUP."""
        return 128 + self.signal_number


class StopOnSignal(Callback):
    """Raises :class:`Interrupted` between two optimizer steps after SIGINT, SIGTERM, SIGHUP or SLURM's signal.

    A signal may reach only some processes, or each at another step. So they vote after every step, in host memory; a
    vote is counted one step later, when it has long arrived: neither the host nor a GPU waits for it.
    """

    def __init__(self) -> None:
        self._received = 0  # the first signal
        self._requeue_signal: int | None = None
        self._before: dict[int, Any] = {}
        self._group: Any = None
        self._vote: tuple[Any, torch.Tensor] | None = None
        self._agreed = 0  # the result of the votes at the end of training
        self._is_training = False

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Record the handlers before Lightning replaces them, which it does even for ignored signals."""
        self._requeue_signal = requeue_signal(trainer)
        numbers = (*ENDING, self._requeue_signal)
        self._before = {number: signal.getsignal(number) for number in numbers if number is not None}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Replace Lightning's handlers; at the end it restores those from before it."""
        self._received = 0
        self._vote = None
        self._agreed = 0
        self._is_training = True
        self._handle(lambda before: before if before is signal.SIG_IGN else self._note)
        self._group = host_group(trainer.strategy)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Outside training, the sanity check included, restore the handlers from before Lightning."""
        if not self._is_training:
            self._handle(lambda before: before)

    on_test_start = on_predict_start = on_validation_start

    def on_train_batch_end(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        """After a complete optimizer step, stop if a signal has arrived."""
        if step_is_complete(trainer):
            self._stop_if_agreed(trainer)

    def on_validation_batch_end(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        """Validation is between two steps: stop at once if a signal has arrived."""
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._stop_if_agreed(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._agreed = self._count()

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """A signal in the last step, or while it was saved, still ends the run: nothing is validated after it."""
        if self._is_training:
            self._is_training = False
            last = torch.tensor(max(self._agreed, self._received))
            if self._group is not None:
                dist.all_reduce(last, op=dist.ReduceOp.MAX, group=self._group)
            self._stop(trainer, int(last))

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Count the last vote, if the other processes still run."""
        if isinstance(exception, Interrupted):
            self._count()

    def _handle(self, handler: Callable[[Any], Any]) -> None:
        if threading.current_thread() is threading.main_thread():
            for number, before in self._before.items():
                if before is not None:  # a handler that is not Python's
                    signal.signal(number, handler(before))

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._received and number == signal.SIGINT:
            before = self._before[number]
            if callable(before):
                before(number, frame)
            raise KeyboardInterrupt
        self._received = self._received or number  # SLURM sends SIGTERM after its own: the first says what to do

    def _stop_if_agreed(self, trainer: Trainer) -> None:
        number = self._received
        if self._group is not None:
            number = self._count()
            vote = torch.tensor(self._received)
            self._vote = dist.all_reduce(vote, op=dist.ReduceOp.MAX, group=self._group, async_op=True), vote
        self._stop(trainer, number)

    def _stop(self, trainer: Trainer, number: int) -> None:
        if number:
            requeue = number == self._requeue_signal
            is_saved = bool(trainer.checkpoint_callbacks)
            raise Interrupted(number, trainer.global_step, requeue=requeue, is_saved=is_saved)

    def _count(self) -> int:
        if self._vote is None:
            return 0
        (work, vote), self._vote = self._vote, None
        work.wait()
        return int(vote)


def requeue_signal(trainer: Trainer) -> int | None:
    """The signal by which SLURM announces the end of the job's time, if Lightning's plugin asks for a requeue."""
    environment = trainer._accelerator_connector.cluster_environment
    if not isinstance(environment, SLURMEnvironment) or not environment.auto_requeue:
        return None
    return environment.requeue_signal or signal.SIGUSR1


def requeue_job() -> str:
    """Ask SLURM to queue this job again.

    Returns:
        The job's number.

    Raises:
        OSError: ``scontrol`` does not exist, or failed.
    """
    job = os.environ["SLURM_JOB_ID"]
    if "SLURM_ARRAY_JOB_ID" in os.environ:
        job = f"{os.environ['SLURM_ARRAY_JOB_ID']}_{os.environ['SLURM_ARRAY_TASK_ID']}"
    done = subprocess.run(["scontrol", "requeue", job], capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"scontrol requeue {job} failed: {done.stderr.strip() or done.returncode}")
    return job
