"""Ctrl-C, SIGTERM, SIGHUP and SLURM's signal end a run at the next moment at which it can be resumed exactly.

Lightning's own ways let the exception fly from wherever the signal hits, or save from within the handler, in the
middle of a step too; on several processes its SIGTERM handler sends a broadcast between whatever the others send. Here
the signal is only noted, the optimiser step at hand is finished, and then :class:`Interrupted` is raised in every
process at the same step; the checkpoint callback saves on its way out. Ctrl-C after that does not wait. A signal that
the parent of this process ignores, as ``nohup`` does, stays ignored.
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
from lightning_llm.training.distributed import host_group

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(Exception):
    """A signal ended the run after a whole optimiser step.

    Args:
        signal_number: Which signal.
        step: Optimiser steps done.
        requeue: Whether the signal asks for the job to be queued again.
        is_saved: Whether the run has callbacks that save checkpoints.
    """

    def __init__(self, signal_number: int, step: int, requeue: bool = False, is_saved: bool = True) -> None:
        self.signal_number, self.step, self.requeue, self.is_saved = signal_number, step, requeue, is_saved
        super().__init__(f"interrupted by {signal.Signals(signal_number).name} after step {step}")

    @property
    def exit_status(self) -> int:
        """What a shell reports for a program ended by this signal: 130 for Ctrl-C, 143 for SIGTERM, 129 for SIGHUP."""
        return 128 + self.signal_number


class StopOnSignal(Callback):
    """Raises :class:`Interrupted` between two optimiser steps once SIGINT, SIGTERM, SIGHUP or SLURM's signal has come.

    A signal may reach one process of several, or each at another step. So they vote after every step, on a group of
    their own that works in main memory; a vote is counted one step later, when it has long arrived: neither the host
    nor a GPU waits for it.
    """

    def __init__(self) -> None:
        self._received = 0
        self._requeue_signal: int | None = None
        self._before: dict[int, Any] = {}
        self._group: Any = None
        self._vote: tuple[Any, torch.Tensor] | None = None
        self._agreed = 0  # what the votes of a run that has come to its end have said
        self._is_training = False

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Note what the signals did before Lightning sets its handlers, which it does even for ignored ones."""
        self._requeue_signal = requeue_signal(trainer)
        numbers = (*SIGNALS, self._requeue_signal)
        self._before = {number: signal.getsignal(number) for number in numbers if number is not None}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take the signals over from Lightning, which gives back what was before it."""
        self._received, self._vote, self._agreed, self._is_training = 0, None, 0, True
        self._handle(lambda before: before if before is signal.SIG_IGN else self._note)
        self._group = host_group(trainer)

    def on_sanity_check_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave the signals to whoever had them before Lightning."""
        self._handle(lambda before: before)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Where nothing is trained: as for the sanity check."""
        if trainer.state.fn != "fit":
            self._handle(lambda before: before)

    on_test_start = on_predict_start = on_sanity_check_start

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """After a whole optimiser step: stop if asked to."""
        if step_is_complete(trainer):
            self._stop_if_agreed(trainer)

    def on_validation_batch_end(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        """Validation lies between two steps: stop at once if asked to."""
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._stop_if_agreed(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Let the last vote arrive."""
        self._agreed = self._count()

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """What came in the last step, or while it was saved, still ends the run: nothing is validated after it."""
        if self._is_training:
            self._is_training = False
            last = torch.tensor(max(self._agreed, self._received))
            if self._group is not None:
                dist.all_reduce(last, op=dist.ReduceOp.MAX, group=self._group)
            self._stop(trainer, int(last))

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Let the last vote arrive, if the others are still there."""
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
            requeue, is_saved = number == self._requeue_signal, bool(trainer.checkpoint_callbacks)
            raise Interrupted(number, trainer.global_step, requeue=requeue, is_saved=is_saved)

    def _count(self) -> int:
        if self._vote is None:
            return 0
        (work, vote), self._vote = self._vote, None
        work.wait()
        return int(vote)


def requeue_signal(trainer: Trainer) -> int | None:
    """The signal by which SLURM announces the end of the job's time, where Lightning's plugin asks for a requeue."""
    environment = trainer._accelerator_connector.cluster_environment
    if not isinstance(environment, SLURMEnvironment) or not environment.auto_requeue:
        return None
    return environment.requeue_signal or signal.SIGUSR1


def requeue_job() -> str:
    """Ask SLURM to queue this job again.

    Returns:
        The job's number.

    Raises:
        OSError: ``scontrol`` is not there, or refused.
    """
    job = os.environ["SLURM_JOB_ID"]
    if "SLURM_ARRAY_JOB_ID" in os.environ:
        job = f"{os.environ['SLURM_ARRAY_JOB_ID']}_{os.environ['SLURM_ARRAY_TASK_ID']}"
    done = subprocess.run(["scontrol", "requeue", job], capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"scontrol requeue {job} failed: {done.stderr.strip() or done.returncode}")
    return job
