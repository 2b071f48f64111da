"""Checkpoints of a training loop without Lightning: the state of a model and an optimizer, and the number of steps."""

import os

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_llm.checkpoints import archives
from lightning_llm.checkpoints.archives import Source
from lightning_llm.checkpoints.reading import read_checkpoint
from lightning_llm.checkpoints.schema import PLAIN_LOOP
from lightning_llm.io.schema import refuse
from lightning_llm.io.untrusted import prefixed
from lightning_llm.optim.base import saved_state_problems


def save_checkpoint(model: nn.Module, optimizer: Optimizer, iteration: int, out: Source) -> None:
    """Save the state of a plain training loop.

    Args:
        model: Its parameters and buffers are saved.
        optimizer: Its state is saved.
        iteration: Number of finished steps.
        out: A path, written atomically, or a file open for writing.
    """
    content = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "iteration": iteration}
    if isinstance(out, str | os.PathLike):
        archives.write_atomically(content, out)
    else:
        torch.save(content, out)


def load_checkpoint(src: Source, model: nn.Module, optimizer: Optimizer) -> int:
    """Restore what :func:`save_checkpoint` saved, in place.

    Args:
        src: A path, or a file open for reading.
        model: Gets the parameters and buffers.
        optimizer: Gets the state.

    Returns:
        The number of finished steps.

    Raises:
        ValueError: As :func:`read_checkpoint`, or the file is of another model.
    """
    content = read_checkpoint(src, needs=PLAIN_LOOP)
    refuse(saved_state_problems(optimizer.param_groups, content["optimizer"]), "the checkpoint is of another model")
    with prefixed("the checkpoint is of another model", RuntimeError):
        model.load_state_dict(content["model"])
        optimizer.load_state_dict(content["optimizer"])
    return int(content["iteration"])
