"""The places in which runs train on this machine: each is a GPU, or a set of cores.

Small models train best with one core each: on two cores, two one-thread runs take 32.7 s together where one two-thread
run takes 22 s alone. All runs of an experiment have one number of threads, since it changes their bits.
"""

import math
import os
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from lightning_llm.ablate.plan import Plan
from lightning_llm.measure.gauges import host_memory

VISIBLE = "CUDA_VISIBLE_DEVICES"
MEMORY_SHARE = 0.8  # of the host's memory, for all runs together


class Slot(NamedTuple):
    """A place for one run at a time.

    Attributes:
        cores: Those that its run may use; empty: all.
        environment: What its run finds besides the variables of this process.
    """

    cores: Sequence[int] = ()
    environment: Mapping[str, str] = {}


def cores() -> list[int]:
    """The cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def visible_gpus() -> list[str]:
    """The GPUs that runs may use, as ``CUDA_VISIBLE_DEVICES`` names them."""
    import torch

    visible = os.environ.get(VISIBLE)
    return visible.split(",") if visible else [str(number) for number in range(torch.cuda.device_count())]


def threads_for(accelerator: str, num_gpus: int, need_bytes: int, max_runs: int | None) -> int:
    """Threads of each run: the cores that a slot gets. On CPUs a slot is one core, or more if memory is short.

    Args:
        accelerator: ``cpu`` or ``cuda``.
        num_gpus: How many there are.
        need_bytes: Host memory of a run.
        max_runs: The most runs at a time that the user wants.
    """
    available = len(cores())
    threads = available // runs_at_a_time(1, accelerator, num_gpus, max_runs)
    if accelerator == "cuda" or (memory := host_memory()) is None:
        return max(1, threads)
    fitting = max(1, int(MEMORY_SHARE * memory) // need_bytes)
    return max(threads, math.ceil(available / fitting))


def runs_at_a_time(threads: int, accelerator: str, num_gpus: int, max_runs: int | None) -> int:
    """How many runs of so many threads each have a slot; other arguments as in :func:`threads_for`."""
    count = num_gpus if accelerator == "cuda" else len(cores()) // threads
    return max(1, min(count, max_runs or count))


def slots_for(plan: Plan, max_runs: int | None) -> list[Slot]:
    """The slots of a plan's runs on this machine.

    Raises:
        ValueError: The plan needs a GPU, and there is none.
    """
    is_cuda = plan.record.accelerator == "cuda"
    gpus = visible_gpus() if is_cuda else []
    if is_cuda and not gpus:
        raise ValueError(f"{plan.out} was planned for GPUs, and none is visible here: continue it where one is")
    threads = plan.record.threads
    most = plan.record.most_runs
    max_runs = max_runs if most is None else min(most, max_runs or most)
    per_run = plan.record.gpus_per_run
    gpus = [",".join(gpus[first : first + per_run]) for first in range(0, len(gpus) - per_run + 1, per_run)]
    if is_cuda and not gpus:
        raise ValueError(f"{plan.out}: --gpus-per-run {per_run} is more than the {len(visible_gpus())} visible here")
    available = cores()
    count = runs_at_a_time(threads, plan.record.accelerator, len(gpus), max_runs)
    sets = [available[number * threads : (number + 1) * threads] or available for number in range(count)]
    if is_cuda:
        return [Slot(cores, {VISIBLE: gpu}) for cores, gpu in zip(sets, gpus, strict=False)]
    return [Slot(cores) for cores in sets]
