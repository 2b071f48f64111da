"""What all runs of an experiment take: counted, and from a few timed steps of the baseline."""

from typing import NamedTuple

import torch

from lightning_llm.ablate.arm import Arm
from lightning_llm.ablate.cost import TrainingSteps, flops_of, parameters_of
from lightning_llm.ablate.local import runs_at_a_time, threads_for
from lightning_llm.measure.timer import interleave, num_threads

TIMED = 10  # steps of the baseline, for the time of its runs


class Outlay(NamedTuple):
    """What the runs of an experiment take.

    Attributes:
        parameters: Of the baseline.
        steps: Of a run of the baseline.
        flops: Counted, of such a run; ``None``: it has parts that cannot be counted.
        runs: At most; with tuning more where its grid grows.
        seconds: Of all training steps, without validation.
        is_tuned: Whether some of the runs tune.
    """

    parameters: int
    steps: int
    flops: int | None
    runs: int
    seconds: float
    is_tuned: bool = False


def outlay_of(arm: Arm, timed_arm: Arm, runs: int, workers: int | None, *, is_tuned: bool = False) -> Outlay:
    """What the runs of an experiment take.

    Args:
        arm: The baseline.
        timed_arm: The same, which is used up.
        runs: How many.
        workers: The most runs at a time that the user wants.
        is_tuned: Whether some of them tune.
    """
    accelerator = arm.trainer.strategy.root_device.type
    steps = TrainingSteps(timed_arm)
    gpus = torch.cuda.device_count()
    threads = threads_for(accelerator, gpus, steps.run_bytes(), workers)
    with num_threads(threads):
        timing = interleave({"baseline": steps.step}, rounds=TIMED, warmup=2, device=steps.device)["baseline"]
    return Outlay(
        parameters=parameters_of(arm.architecture),
        steps=arm.steps,
        flops=None if (flops := flops_of(arm)) is None else flops * arm.steps,
        runs=runs,
        seconds=timing.median * arm.steps * runs / runs_at_a_time(threads, accelerator, gpus, workers),
        is_tuned=is_tuned,
    )
