"""What a process says when it cannot reach the others, or has lost them."""

import os
import re
import socket
from typing import Any

import torch.distributed as dist
from lightning.fabric.utilities.rank_zero import rank_zero_only

GLOO = re.compile(r"third_party/gloo/\S+\] (.+?)(?:\. This is typically| ?\[|$)", re.DOTALL)
# what gloo says, naming no source, to all else that waits when one exchange has timed out (tcp/unbound_buffer.cc)
TIMED_OUT_BESIDE = "Application timeout caused pair closure"


def lost_contact(error: BaseException) -> str | None:
    """One line about a broken connection between processes, or ``None`` if the error is something else.

    torch raises a plain ``RuntimeError`` for what gloo finds, and a ``DistError`` for what its store and NCCL find.
    """
    message = str(error)
    if found := GLOO.search(message):
        reason = found[1]
    elif message == TIMED_OUT_BESIDE:
        reason = "Timed out waiting in another exchange with them"
    elif isinstance(error, dist.DistError):
        reason = message
    else:
        return None
    rank = getattr(rank_zero_only, "rank", 0)  # the environment's, Lightning has torn down by now
    master = f"{os.environ.get('MASTER_ADDR', '127.0.0.1')}:{os.environ.get('MASTER_PORT', '?')}"
    if dist.is_initialized():
        what, then = "has lost the others", "start the job again: it goes on from its last checkpoint"
    else:
        what = f"could not reach the others at {master}"
        then = "they may be down, or process 0 still prepares the data: `lightning-llm prepare` does that beforehand"
    return f"process {rank} on {socket.gethostname()} {what}: {' '.join(reason.split())[:300]}; {then}"


def check_address() -> None:
    """Refuse a host of the first process that cannot be found, before waiting for it.

    Raises:
        ValueError: ``MASTER_ADDR`` is no address and no name that is known here.
    """
    address = os.environ.get("MASTER_ADDR")
    if not address:
        return
    try:
        socket.getaddrinfo(address, None)
    except OSError as error:
        raise ValueError(
            f"MASTER_ADDR {address!r}, where process 0 runs, is not known on {socket.gethostname()}: {error.strerror}; "
            "give its name or address"
        ) from error


def waiting_line(trainer: Any) -> str:
    """What a run on several nodes says before it waits for them."""
    environment, timeout = trainer.strategy.cluster_environment, getattr(trainer.strategy, "_timeout", None)
    limit = "" if timeout is None else f", at most {timeout} (hours:minutes:seconds; the strategy's timeout)"
    return (
        f"process {trainer.global_rank} on {socket.gethostname()} waits for the {trainer.world_size} processes of "
        f"{trainer.num_nodes} nodes at {environment.main_address}:{environment.main_port}{limit}"
    )
