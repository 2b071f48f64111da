"""How a training command ends early: one line and an exit status for whatever ends it."""

import argparse
import errno
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist
from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_llm.cli import command_line, jobs
from lightning_llm.cli.commands import with_page
from lightning_llm.cli.errors import DISK_FULL, FAILED, NOT_WRITABLE, USER_ERROR, local_in, reason_of, reports
from lightning_llm.cli.interrupts import interrupts
from lightning_llm.cli.parser_words import in_plain_words
from lightning_llm.io.processes import is_first_process
from lightning_llm.measure.attribution import is_out_of_memory
from lightning_llm.runs.directory import CHECKPOINTS, RunDirectory, step_files
from lightning_llm.training.callbacks.non_finite import NonFinite
from lightning_llm.training.callbacks.signals import Interrupted, requeue_job

MISTAKES = (argparse.ArgumentError, ValueError, OSError, MisconfigurationException)


def exit_status_of(error: Exception, command: str, words: Sequence[str]) -> int | None:
    """Print one line about what has ended a command. Call it inside the ``except`` clause.

    Returns:
        The exit status; ``None`` if nobody has expected the error.
    """
    name = f"lightning-llm {command}"
    if isinstance(error, Interrupted):
        _report_interruption(error, name, words)
        return error.exit_status
    if isinstance(error, NonFinite):
        rank_zero_print(with_page(command, f"{name}: stopped: {error}"))
        return FAILED
    if isinstance(error, RuntimeError | MemoryError):
        if lost := jobs.lost_contact(error):  # every process prints it: it may be the only one left
            print(with_page(command, f"{name}: {lost}"), file=sys.stderr)
        elif is_out_of_memory(error):  # the memory profiler has printed what to do
            rank_zero_print(with_page(command, f"{name}: out of memory: {reason_of(error)}"))
        else:
            return None
        return FAILED
    if not isinstance(error, MISTAKES):
        return None
    reason = in_plain_words(str(error)) if isinstance(error, argparse.ArgumentError) else reason_of(error)
    if isinstance(error, OSError) and (advice := _advice(error)):
        reason = f"{reason}; {advice}"
    # before the processes have met, all find the same; after that, it may be the only one that knows
    is_mine = dist.is_initialized() or is_first_process()
    return reports.mistake(command, f"{name}: error: {reason}") if is_mine else USER_ERROR


def _advice(error: OSError) -> str:
    """Advice if files of a run cannot be written; empty if the error is of something else."""
    directory: RunDirectory | None = getattr(local_in(error, "trainer"), "run_directory", None)
    is_full = error.errno in DISK_FULL
    if directory is None or not (is_full or error.errno in NOT_WRITABLE or error.errno == errno.ENOENT):
        return ""
    run = directory.place
    if not is_full and (error.filename is None or not Path(error.filename).is_relative_to(run)):
        return ""
    if not run.exists():
        return "the folder of the run is gone: start again"
    first = "free some space and " if is_full else "" if error.errno == errno.ENOENT else "make it writable and "
    if step_files(run / CHECKPOINTS):
        return f"earlier checkpoints are untouched: {first}resume with --ckpt_path last"
    return f"no checkpoint was saved: {first}start again"


def _report_interruption(interruption: Interrupted, name: str, words: Sequence[str]) -> None:
    interrupts.ignore_signals()
    outcome = "no checkpoint was saved: the run has none"
    if interruption.is_saved:
        outcome = f"nothing is lost. Resume with: {command_line.resume_command(words)}"
    rank_zero_print(f"{name}: {interruption}; {outcome}")
    if interruption.requeue and is_first_process():
        try:
            rank_zero_print(f"SLURM queues job {requeue_job()} again")
        except OSError as error:
            rank_zero_print(f"the job could not be queued again: {reason_of(error)}")


def report_thread_error(failure: threading.ExceptHookArgs) -> None:
    """Errors in TensorBoard's thread, on a full disk for example, are raised again where the run logs next."""
    if not isinstance(failure.exc_value, OSError | SystemExit | None):
        reports.unexpected(interrupts.command, failure.exc_value)


def rank_zero_print(text: str) -> None:
    """Print a line on stderr, once for all processes."""
    if is_first_process():
        print(text, file=sys.stderr)
