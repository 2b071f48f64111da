"""Time and memory of each side's training step, measured alone on the machine: baseline and variant interleaved.

A step is what ``fit`` does: read the batch, forward, backward, clip, update. On a CPU, peak memory is counted operator
by operator (``measure.meter``); on CUDA, by the allocator. Steps run on one device.
"""

import dataclasses
import datetime
import gc
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_llm.ablate.ratios import median_interval
from lightning_llm.accounting.hardware import cpu_name
from lightning_llm.measure.meter import MemoryMeter, tensors_in
from lightning_llm.measure.timer import Timing, interleave
from lightning_llm.optim.groups import param_groups

# Of two equal sides on two loaded cores, the interval of the ratio is ±4.4 % after 20 rounds, ±1.1 % after 200 and
# ±0.9 % after 300; the signs of consecutive ratios are independent.
ROUNDS, LEAST, WARM_UP = 300, 20, 3
BUDGET_S = 60.0  # for both sides together; LEAST rounds are taken in any case


@dataclasses.dataclass
class Side:
    """One side of a comparison, as the command line has made it; nothing is trained.

    Attributes:
        name: ``baseline`` or the variant's.
        options: Of ``fit``, resolved.
        model: The LanguageModel, before its transformer is made.
        data: Its data, with the store opened.
        trainer: Its Trainer.
    """

    name: str
    options: dict[str, Any]
    model: Any
    data: Any
    trainer: Any

    @property
    def architecture(self) -> Any:
        """The model's config, with the vocabulary of the data."""
        config = self.model.architecture
        return dataclasses.replace(config, vocab_size=config.vocab_size or self.data.vocab_size)


class TrainingSteps:
    """Runs training steps of a side.

    Args:
        side: Its model is built.
    """

    def __init__(self, side: Side) -> None:
        self.device = side.trainer.strategy.root_device
        model, data = side.model, side.data
        model.architecture, model.seed = side.architecture, 0
        model.configure_model()
        self._precision, self._clip = side.trainer.precision_plugin, side.trainer
        self.model = self._precision.convert_module(model).to(self.device).train()
        data.setup("fit")
        self._micro_batches, self._batches = data.accumulation, self._endless(data.train_dataloader)
        self.optimizer = model.make_optimizer(param_groups(model))

    def step(self) -> None:
        """One optimizer step."""
        for _ in range(self._micro_batches):
            batch = {name: tensor.to(self.device) for name, tensor in next(self._batches).items()}
            with self._precision.forward_context():
                loss = self.model.loss(batch)
            torch.autograd.backward(loss / self._micro_batches)
        clip = self._clip.gradient_clip_val, self._clip.gradient_clip_algorithm
        self.model.configure_gradient_clipping(self.optimizer, *clip)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def peak_bytes(self) -> int | None:
        """The most that a step holds, with weights and optimizer state; ``None`` where it cannot be seen."""
        self.step()  # the optimizer's state is there from now on
        gc.collect()
        held = [*self.model.parameters(), *self.model.buffers(), *tensors_in(self.optimizer.state)]
        fixed: int = sum(tensor.nbytes for tensor in {id(each): each for each in held}.values())
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            self.step()
            return fixed + int(torch.cuda.max_memory_allocated()) - before
        if getattr(self.model, "compile_mode", None) is not None:
            return None
        with MemoryMeter(exclude=held) as meter:
            self.step()
        return fixed + int(meter.peak_bytes)

    @staticmethod
    def _endless(loader: Callable[[], Any]) -> Iterator[dict[str, Tensor]]:
        while True:
            yield from loader()


def time_pair(baseline: Side, variant: Side, rounds: int = ROUNDS) -> tuple[TrainingSteps, TrainingSteps, list[Timing]]:
    """The steps of both sides and their times, interleaved."""
    sides = TrainingSteps(baseline), TrainingSteps(variant)
    functions = {"baseline": sides[0].step, "variant": sides[1].step}
    limits: dict[str, Any] = {"rounds": rounds, "least": min(rounds, LEAST), "budget_s": BUDGET_S}
    timings = interleave(functions, warmup=WARM_UP, device=sides[0].device, **limits)
    return (*sides, list(timings.values()))


def measure(names: Sequence[str], make: Callable[[str], Side], say: Callable[[str], object]) -> dict[str, Any]:
    """Time and memory of each side.

    Args:
        names: The baseline's first, then the variants'.
        make: Makes a side, which is used up.
        say: Called with a line before each pair.
    """
    found: dict[str, Any] = {}
    rounds, before = ROUNDS, _clock()
    for name in names[1:]:
        say(f"measuring {name} and the {names[0]}, interleaved")
        base, variant, (slow, fast) = time_pair(make(names[0]), make(name), rounds=ROUNDS)
        rounds = min(rounds, len(slow.samples))
        found.setdefault(names[0], _row(base, slow, slow))
        # the machine may be slower now than for the first pair: the ratio is what both sides measured together
        row, scale = _row(variant, fast, slow), found[names[0]]["step_s"]
        times = {
            field.replace("ratio", "step") + "_s": row[field] * scale for field in ("ratio", "ratio_p20", "ratio_p80")
        }
        found[name] = {**row, **times}
        device = base.device
        del base, variant
        gc.collect()
    machine = torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()
    facts = {"machine": machine, "threads": torch.get_num_threads(), "date": datetime.date.today().isoformat()}
    wall_s, others_s = (now - then for now, then in zip(_clock(), before, strict=True))
    facts["other_cores"] = others_s / wall_s if others_s == others_s else None
    return {**facts, "torch": torch.__version__, "rounds": rounds, "sides": found}


def _clock() -> tuple[float, float]:
    """Seconds, and those that all cores together have computed for other programs; NaN where that cannot be seen."""
    own = os.times()
    try:
        words = Path("/proc/stat").read_text(encoding="ascii").splitlines()[0].split()
    except OSError:  # not Linux
        return time.monotonic(), math.nan
    user, nice, system, _, _, irq, soft_irq = map(int, words[1:8])
    busy_s = (user + nice + system + irq + soft_irq) / os.sysconf("SC_CLK_TCK")
    return time.monotonic(), busy_s - own.user - own.system


def _row(steps: TrainingSteps, timing: Timing, base: Timing) -> Mapping[str, Any]:
    found = timing.ratios_to(base)
    ratios = Timing(tuple(found))
    times: dict[str, Any] = {"step_s": timing.median, "step_p20_s": timing.p20, "step_p80_s": timing.p80}
    times |= {"ratio": ratios.median, "ratio_p20": ratios.p20, "ratio_p80": ratios.p80}
    return {**times, "ratio_interval": median_interval(found), "peak_bytes": steps.peak_bytes()}
