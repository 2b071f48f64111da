"""Distributed jobs: which attempt of a torchrun or SLURM job this is, and processes that cannot be reached.

The settings of a job are checked before torch is imported, so it is imported where it is used.
"""

import os
import re
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning_llm.runs.find import checkpoint_in, newest_run

NAMELESS = ("", "none")  # torchrun's name for a job without --rdzv-id
GLOO = re.compile(r"third_party/gloo/\S+\] (.+?)(?:\. This is typically| ?\[|$)", re.DOTALL)
# gloo's message, without a source, to all other waiting exchanges when one has timed out (tcp/unbound_buffer.cc)
TIMED_OUT_BESIDE = "Application timeout caused pair closure"


def this_job() -> str | None:
    """The job's name, the same in all of its processes and attempts; ``None`` if this process belongs to none."""
    if (run := os.environ.get("TORCHELASTIC_RUN_ID")) is not None:
        return f"torchrun-{run or NAMELESS[-1]}"
    slurm = os.environ.get("SLURM_JOB_ID")
    return None if slurm is None else f"slurm-{slurm}"


def restarts() -> int:
    """How often the job was started again after a failure or a requeue."""
    name = "TORCHELASTIC_RESTART_COUNT" if "TORCHELASTIC_RUN_ID" in os.environ else "SLURM_RESTART_COUNT"
    return int(os.environ.get(name, "0"))


def may_have_run_before() -> bool:
    """Whether an earlier attempt of this job may have left a checkpoint.

    torchrun does not count a new start after a host has left or joined; but the name that ``--rdzv-id`` gives belongs
    to the job alone. Without a name only the count can tell.
    """
    return restarts() > 0 or os.environ.get("TORCHELASTIC_RUN_ID", "") not in NAMELESS


def checkpoint_of_earlier_attempt(folder: Path, log: Callable[[str], object]) -> Path | None:
    """The checkpoint to resume from where SLURM or torchrun starts a job again, whatever had ended it; else none.

    Args:
        folder: Where the runs of the job are.
        log: Called with a line if another checkpoint than the newest is used, or none.
    """
    job = this_job()
    if job is None or not may_have_run_before():
        return None
    if (run := newest_run(folder, job=job)) is not None:
        return checkpoint_in(run, log, prefer_best=False)
    if restarts():
        log(f"job {job} was started again; it left no checkpoint in {folder}: starting from scratch")
    return None


def check_restarts() -> None:
    """Refuse torchrun's restarts if none of them could work.

    torch keeps one store over all attempts, in which a new one finds the addresses of the processes before it and waits
    for them until it times out (pytorch#135712; seen with torch 2.13 and gloo).

    Raises:
        ValueError: torchrun may restart, and was not told to make a new store each time.
    """
    allowed = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))
    if allowed > 0 and os.environ.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE") != "1":
        raise ValueError(
            f"torchrun --max-restarts {allowed}: a restart would find the addresses of dead processes; "
            "export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 before torchrun, which then makes a new store each time"
        )


def check_address() -> None:
    """Refuse a host of the first process that cannot be resolved, before waiting for it.

    Raises:
        ValueError: ``MASTER_ADDR`` is neither an address nor a name that is known here.
    """
    if address := os.environ.get("MASTER_ADDR"):
        try:
            socket.getaddrinfo(address, None)
        except OSError as error:
            problem = f"where process 0 runs, is not known on {socket.gethostname()}: {error.strerror}"
            raise ValueError(f"MASTER_ADDR {address!r}, {problem}; give its name or address") from error


def waiting_line(trainer: Any) -> str:
    """Line that a run on several nodes prints before it waits for the other processes."""
    environment = trainer.strategy.cluster_environment
    timeout = getattr(trainer.strategy, "_timeout", None)
    limit = "" if timeout is None else f", at most {timeout} (hours:minutes:seconds; the strategy's timeout)"
    others = f"the {trainer.world_size} processes of {trainer.num_nodes} nodes"
    address = f"{environment.main_address}:{environment.main_port}"
    return f"process {trainer.global_rank} on {socket.gethostname()} waits for {others} at {address}{limit}"


def lost_contact(error: BaseException) -> str | None:
    """One line about a broken connection between processes, or ``None`` if the error is something else.

    torch raises a plain ``RuntimeError`` for errors of gloo, and a ``DistError`` for those of its store and NCCL.
    """
    import torch.distributed as dist
    from lightning.fabric.utilities.rank_zero import rank_zero_only

    message = str(error)
    if match := GLOO.search(message):
        reason = match[1]
    elif message == TIMED_OUT_BESIDE:
        reason = "Timed out waiting in another exchange with them"
    elif isinstance(error, dist.DistError):
        reason = message
    else:
        return None
    rank = getattr(rank_zero_only, "rank", 0)  # Lightning has torn down the environment's by now
    if dist.is_initialized():
        what, then = "has lost the others", "start the job again: it resumes from its last checkpoint"
    else:
        address = f"{os.environ.get('MASTER_ADDR', '127.0.0.1')}:{os.environ.get('MASTER_PORT', '?')}"
        what = f"could not reach the others at {address}"
        then = "they may be down, or process 0 still prepares the data: `lightning-llm prepare` does that beforehand"
    return f"process {rank} on {socket.gethostname()} {what}: {' '.join(reason.split())[:300]}; {then}"
