"""The cost of a variant of ``fit``: parameters and FLOPs, counted; time and memory of a step, measured alone.

Baseline and variant are timed interleaved. A step is what ``fit`` does: read the batch, forward, backward, clip,
update. On a CPU, peak memory is counted operator by operator (``measure.meter``); on CUDA, by the allocator. Steps run
on one device.
"""

import copy
import datetime
import gc
import itertools
import math
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from lightning_llm.ablate.fit.variant import Variant
from lightning_llm.ablate.ratios import Cost, StepCost, median_interval
from lightning_llm.accounting.counts import step_flops
from lightning_llm.accounting.hardware import cpu_name
from lightning_llm.accounting.measured_parts import measure_parts
from lightning_llm.measure.gauges import resident_bytes
from lightning_llm.measure.meter import memory_of, tensors_in
from lightning_llm.measure.timer import Timing, interleave
from lightning_llm.model.transformer import Transformer
from lightning_llm.training.capture import CapturedLoss

# Of two equal variants on two loaded cores, the interval of the ratio is ±4.4% after 20 rounds, ±1.1% after 200 and
# ±0.9% after 300; the signs of consecutive ratios are independent.
ROUNDS = 300
LEAST_ROUNDS = 20
WARM_UP = 3
BUDGET_S = 60.0  # for both variants together; LEAST_ROUNDS rounds are taken in any case


class TrainingSteps:
    """Runs training steps of a copy of a variant."""

    def __init__(self, variant: Variant) -> None:
        self.device = variant.trainer.strategy.root_device
        model = copy.deepcopy(variant.model)  # the model has no weights yet
        data = copy.copy(variant.data)
        model.architecture = variant.architecture
        model.seed = 0
        model.configure_model()
        self._precision = variant.trainer.precision_plugin
        self._clip = variant.trainer.gradient_clip_val, variant.trainer.gradient_clip_algorithm
        self.model = self._precision.convert_module(model).to(self.device).train()
        self._loss_of = CapturedLoss(self.model) if getattr(variant.trainer, "capture", False) else self.model.loss
        data.setup("fit")
        self._micro_batches = data.accumulation
        self._batches = itertools.chain.from_iterable(data.train_dataloader() for _ in itertools.count())
        self.optimizer = model.optimizer_over(model.groups_of(model))

    def step(self) -> None:
        """Train one optimizer step, over all its micro-batches."""
        for _ in range(self._micro_batches):
            batch = {name: tensor.to(self.device) for name, tensor in next(self._batches).items()}
            with self._precision.forward_context():
                loss = self._loss_of(batch)
            torch.autograd.backward(loss / self._micro_batches)
        self.model.configure_gradient_clipping(self.optimizer, *self._clip)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def peak_bytes(self) -> int | None:
        """The most that a step holds, with weights and optimizer state; ``None`` where it cannot be seen."""
        self.step()  # the optimizer's state is there from now on
        gc.collect()
        tensors = [*self.model.parameters(), *self.model.buffers(), *tensors_in(self.optimizer.state)]
        fixed: int = sum(tensor.nbytes for tensor in {id(tensor): tensor for tensor in tensors}.values())
        if self.device.type != "cuda" and getattr(self.model, "compile_mode", None) is not None:
            return None
        return fixed + memory_of(self.step, lambda _: None, tensors, self.device.type)[1]

    def run_bytes(self) -> int:
        """Host memory of a run: what this process has, and twice the peak of a step."""
        return resident_bytes() + 2 * (self.peak_bytes() or 0)


def flops_of(variant: Variant) -> int | None:
    """FLOPs of its optimizer step, without what is recomputed; ``None`` for parts that cannot be counted."""
    config = variant.architecture
    tokens, length = (variant.of_data(name) for name in ("tokens_per_step", "context_length"))
    if config is None or tokens is None or length is None:
        return None
    try:
        measured = measure_parts(config, str(variant.trainer.precision), length)
        return step_flops(config, tokens=tokens, context_length=length, measured=measured).model
    except ValueError:
        return None


def parameters_of_variant(variant: Variant) -> int:
    """The parameters of its model."""
    if variant.architecture is None:
        return sum(parameter.numel() for parameter in variant.model.parameters())
    return parameters_of(variant.architecture)


def parameters_of(config: Any) -> int:
    """The parameters of a model of this config, which is built without memory."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in Transformer(config).parameters())


def time_pair(
    baseline: Variant, variant: Variant, rounds: int = ROUNDS
) -> tuple[TrainingSteps, TrainingSteps, list[Timing]]:
    """The steps of both variants and their times, interleaved."""
    steps = TrainingSteps(baseline), TrainingSteps(variant)
    functions = {"baseline": steps[0].step, "variant": steps[1].step}
    limits: dict[str, Any] = {"rounds": rounds, "least": min(rounds, LEAST_ROUNDS), "budget_s": BUDGET_S}
    timings = interleave(functions, warmup=WARM_UP, device=steps[0].device, **limits)
    return (*steps, list(timings.values()))


def measure(plan: str, names: Sequence[str], make: Callable[[str], Variant], log: Callable[[str], object]) -> Cost:
    """Time and memory of each variant, as ``cost.json`` holds them.

    Args:
        plan: The hash of the plan.
        names: The baseline's first, then the variants'.
        make: Makes a variant.
        log: Called with a line before each pair.
    """
    costs: dict[str, StepCost] = {}
    rounds = ROUNDS
    start = _clock()
    for name in names[1:]:
        log(f"measuring {name} and the {names[0]}, interleaved")
        base, variant, (base_timing, variant_timing) = time_pair(make(names[0]), make(name), rounds=ROUNDS)
        rounds = min(rounds, len(base_timing.samples))
        if names[0] not in costs:
            costs[names[0]] = _cost(base, base_timing, Timing((1.0,) * len(base_timing.samples)))
        ratios = Timing(tuple(variant_timing.ratios_to(base_timing)))
        # the machine may be slower now than for the first pair: the ratio is what both measured together
        base_s = costs[names[0]].step_s
        costs[name] = _cost(variant, Timing(tuple(ratio * base_s for ratio in ratios.samples)), ratios)
        device = base.device
        del base, variant
        gc.collect()
    machine = torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()
    wall_s, others_s = (now - then for now, then in zip(_clock(), start, strict=True))
    return Cost(
        plan=plan,
        machine=machine,
        threads=torch.get_num_threads(),
        date=datetime.date.today().isoformat(),
        torch=str(torch.__version__),
        rounds=rounds,
        other_cores=others_s / wall_s if others_s == others_s else None,
        variants=costs,
    )


def _clock() -> tuple[float, float]:
    """Seconds, and those that all cores together have computed for other programs; NaN where that cannot be seen."""
    process_times = os.times()
    try:
        fields = Path("/proc/stat").read_text(encoding="ascii").splitlines()[0].split()
    except OSError:  # not Linux
        return time.monotonic(), math.nan
    user, nice, system, _, _, irq, soft_irq = map(int, fields[1:8])
    busy_s = (user + nice + system + irq + soft_irq) / os.sysconf("SC_CLK_TCK")
    return time.monotonic(), busy_s - process_times.user - process_times.system


def _cost(steps: TrainingSteps, timing: Timing, ratios: Timing) -> StepCost:
    """The cost of a step of a variant, by its times and their ratios to the baseline's."""
    return StepCost(
        step_s=timing.median,
        step_p20_s=timing.p20,
        step_p80_s=timing.p80,
        ratio=ratios.median,
        ratio_p20=ratios.p20,
        ratio_p80=ratios.p80,
        ratio_interval=median_interval(ratios.samples),
        peak_bytes=steps.peak_bytes(),
    )
