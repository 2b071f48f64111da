"""Which job of torchrun or SLURM this process belongs to, and whether it goes on where an earlier attempt ended."""

import os

NAMELESS = ("", "none")  # what torchrun has for a job without --rdzv-id


def this_job() -> str | None:
    """The job's name, the same in all of its processes and attempts; ``None`` where nothing started this process."""
    run = os.environ.get("TORCHELASTIC_RUN_ID")
    if run is not None:
        return f"torchrun-{run or NAMELESS[-1]}"
    slurm = os.environ.get("SLURM_JOB_ID")
    return None if slurm is None else f"slurm-{slurm}"


def restarts() -> int:
    """How often the job was started again after a failure or a requeue."""
    name = "TORCHELASTIC_RESTART_COUNT" if "TORCHELASTIC_RUN_ID" in os.environ else "SLURM_RESTART_COUNT"
    return int(os.environ.get(name, "0"))


def may_have_run_before() -> bool:
    """Whether an earlier attempt of this job may have left a checkpoint.

    torchrun does not count a new start after a host has left or come; but the name that ``--rdzv-id`` gives is the
    job's own. Without a name only the count can tell.
    """
    return restarts() > 0 or os.environ.get("TORCHELASTIC_RUN_ID", "") not in NAMELESS


def check_restarts() -> None:
    """Refuse torchrun's restarts where none of them could work.

    torch keeps one store over all attempts, in which a new one finds the addresses of the processes before it and waits
    for them until its time is up (pytorch#135712; seen with torch 2.13 and gloo).

    Raises:
        ValueError: torchrun may restart, and was not told to make a new store each time.
    """
    allowed = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))
    if allowed > 0 and os.environ.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE") != "1":
        raise ValueError(
            f"torchrun --max-restarts {allowed}: a restart would find the addresses of dead processes; "
            "export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 before torchrun, which then makes a new store each time"
        )
