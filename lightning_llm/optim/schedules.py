"""Learning-rate schedules: plain functions of the step, and the same as objects for configs.

The functions give the learning rate itself. The classes give a factor for the optimizer's own learning rate, so that a
config names the rate once; they can be named by class path in YAML. Steps count from 0, where a warm-up gives 0. If you
pass the number of updates already made, the first update has rate 0; pass ``step + 1`` to avoid that.

To add a schedule, write its class and add it to :data:`SCHEDULES`. One that decays after a warm-up derives from
``_WarmupDecay`` and says only how much of the rate is left. No torch is imported here.
"""

import abc
import dataclasses
import math
from collections.abc import Callable
from typing import Any, ClassVar, Literal

from lightning_llm.io.options import check_options, number, option

DecayShape = Literal["linear", "sqrt"]


def constant_lr(step: int, *, max_lr: float, warmup_steps: int = 0) -> float:
    """Linear warm-up from 0 to ``max_lr`` over ``warmup_steps``, then ``max_lr`` forever."""
    return step / warmup_steps * max_lr if step < warmup_steps else max_lr


def cosine_lr(step: int, *, max_lr: float, min_lr: float, warmup_steps: int, decay_steps: int) -> float:
    """Linear warm-up, half a cosine, then the minimum (Loshchilov and Hutter 2017, "SGDR", equation 5, with warm-up).

    With t the step, T_w ``warmup_steps`` and T_c ``decay_steps``:

        t < T_w          t / T_w · max
        T_w ≤ t ≤ T_c    min + (1 + cos((t - T_w) / (T_c - T_w) · π)) / 2 · (max - min)
        T_c < t          min

    Args:
        step: Number of the step, from 0.
        max_lr: The rate at the end of the warm-up.
        min_lr: The rate from the end of the decay on.
        warmup_steps: The step at which the warm-up ends.
        decay_steps: The step, counted from 0, at which the decay ends.
    """
    return _decayed_lr(step, _cosine_left, min_lr, max_lr, warmup_steps, start=warmup_steps, end=decay_steps)


def linear_lr(step: int, *, max_lr: float, min_lr: float, warmup_steps: int, decay_steps: int) -> float:
    """Linear warm-up to ``max_lr`` and a straight line to ``min_lr``; arguments as in ``cosine_lr``."""
    return _decayed_lr(step, _linear_left, min_lr, max_lr, warmup_steps, start=warmup_steps, end=decay_steps)


def wsd_lr(
    step: int,
    *,
    max_lr: float,
    min_lr: float,
    warmup_steps: int,
    decay_start: int,
    decay_steps: int,
    shape: DecayShape = "sqrt",
) -> float:
    """Warm-up, a stable phase, and a decay at the end (Hu et al. 2024, "MiniCPM", arXiv:2404.06395, section 4).

    Args:
        step: Number of the step, from 0.
        max_lr: The rate of the stable phase.
        min_lr: The rate from the end of the decay on.
        warmup_steps: The step at which the warm-up ends.
        decay_start: The step at which the stable phase ends.
        decay_steps: The step, counted from 0, at which the decay ends.
        shape: Of the decay: ``linear``, or ``sqrt`` for 1 - √progress (Hägele et al. 2024, "Scaling Laws and
            Compute-Optimal Training Beyond Fixed Training Durations", arXiv:2405.18392, section 3: it does better).
    """
    return _decayed_lr(step, _DECAYS[shape], min_lr, max_lr, warmup_steps, start=decay_start, end=decay_steps)


def _decayed_lr(
    step: int, left: Callable[[float], float], min_lr: float, max_lr: float, warmup_steps: int, *, start: int, end: int
) -> float:
    """Warm-up, then the higher of two rates until the decay starts, then the lower one once the decay has ended."""
    if step < start:
        return constant_lr(step, max_lr=max_lr, warmup_steps=warmup_steps)
    progress = min(1.0, (step - start) / (end - start)) if end > start else float(step > end)
    return min_lr + left(progress) * (max_lr - min_lr)


# How much of the way from the lower to the higher rate is left, from 1 to 0, by the progress of the decay, from 0 to 1.


def _cosine_left(progress: float) -> float:
    return (1 + math.cos(progress * math.pi)) / 2


def _linear_left(progress: float) -> float:
    return 1 - progress


def _sqrt_left(progress: float) -> float:
    return 1 - math.sqrt(progress)


_DECAYS: dict[DecayShape, Callable[[float], float]] = {"linear": _linear_left, "sqrt": _sqrt_left}


class Schedule(abc.ABC):
    """A learning rate as a factor of the optimizer's own. Derive your own schedules from it.

    Attributes:
        step_options: Of a built-in schedule, the options that count steps: ``ablate`` scales them with the run.
    """

    step_options: ClassVar[tuple[str, ...]] = ()

    @abc.abstractmethod
    def factor(self, step: int, total_steps: int | None = None) -> float:
        """The factor at ``step`` of a run of ``total_steps``.

        Args:
            step: Number of the step, from 0.
            total_steps: Optimizer steps of the whole run; ``None`` (or below 1) when there is no end.

        Raises:
            ValueError: If the schedule needs an end and none is known.
        """


def _fraction(default: float) -> Any:
    return number(default, "between 0 and 1", lambda value: 0 <= value <= 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Warmup(Schedule):
    """The option of all schedules, and how options are checked."""

    step_options: ClassVar[tuple[str, ...]] = ("warmup_steps",)
    warmup_steps: int = option(0, "a whole number of at least 0", lambda value: type(value) is int and value >= 0)

    def __post_init__(self) -> None:
        check_options(self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Constant(_Warmup):
    """The optimizer's learning rate, after a linear warm-up.

    Attributes:
        warmup_steps: Steps of the warm-up.
    """

    def factor(self, step: int, total_steps: int | None = None) -> float:
        """The share of the warm-up that is done, then 1."""
        return constant_lr(step, max_lr=1.0, warmup_steps=self.warmup_steps)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _WarmupDecay(_Warmup):
    """The options of all schedules that decay to a fraction of the learning rate."""

    step_options = ("warmup_steps", "decay_steps")
    min_lr_ratio: float = _fraction(0.0)
    decay_steps: int | None = option(
        None, "a whole number of at least 1 or null", lambda value: value is None or (type(value) is int and value >= 1)
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.decay_steps is not None and self.decay_steps < self.warmup_steps:
            raise ValueError(f"decay_steps {self.decay_steps} must not be before warmup_steps {self.warmup_steps}")

    @abc.abstractmethod
    def left(self, progress: float) -> float:
        """How much of the way down is left, from 1 to 0, by the progress of the decay, from 0 to 1."""

    def decay_start(self, end: int) -> int:
        """The step at which the decay to step ``end`` starts."""
        return self.warmup_steps

    def factor(self, step: int, total_steps: int | None = None) -> float:
        """The learning rate where the optimizer's own is 1."""
        end = self.decay_steps or total_steps or 0
        if end < 1:
            raise ValueError(
                f"{type(self).__name__} does not know at which step the run ends: give it decay_steps, or set "
                "trainer.max_steps or trainer.max_epochs"
            )
        start = self.decay_start(end)
        return _decayed_lr(step, self.left, self.min_lr_ratio, 1.0, self.warmup_steps, start=start, end=end)


@dataclasses.dataclass(frozen=True, kw_only=True)
class WarmupCosine(_WarmupDecay):
    """Linear warm-up, then half a cosine down to a fraction of the learning rate.

    Attributes:
        warmup_steps: Steps of the warm-up. A run that ends before is all warm-up.
        min_lr_ratio: The final learning rate, as a fraction of the optimizer's.
        decay_steps: The step at which the decay ends. ``None``: the end of the run.
    """

    min_lr_ratio: float = _fraction(0.1)
    left = staticmethod(_cosine_left)


@dataclasses.dataclass(frozen=True, kw_only=True)
class WarmupLinear(_WarmupDecay):
    """Linear warm-up, then a straight line down to a fraction of the learning rate.

    Attributes:
        warmup_steps: Steps of the warm-up. A run that ends before is all warm-up.
        min_lr_ratio: The final learning rate, as a fraction of the optimizer's.
        decay_steps: The step at which the decay ends. ``None``: the end of the run.
    """

    left = staticmethod(_linear_left)


@dataclasses.dataclass(frozen=True, kw_only=True)
class WarmupStableDecay(_WarmupDecay):
    """Linear warm-up, a stable phase, and a decay over the last part of the run.

    Attributes:
        warmup_steps: Steps of the warm-up. A run that ends before is all warm-up.
        min_lr_ratio: The final learning rate, as a fraction of the optimizer's.
        decay_steps: The step at which the decay ends. ``None``: the end of the run.
        decay_fraction: The part of ``decay_steps`` over which it decays, between 0 and 1.
        shape: Of the decay: ``sqrt`` (1 - √progress) or ``linear``.
    """

    decay_fraction: float = _fraction(0.2)
    shape: DecayShape = "sqrt"

    def left(self, progress: float) -> float:
        return _DECAYS[self.shape](progress)

    def decay_start(self, end: int) -> int:
        """After the warm-up and the stable phase."""
        return max(self.warmup_steps, end - round(self.decay_fraction * end))


# Every schedule by its name: what checkpoints restore, docs/config.md lists and this package exports.
SCHEDULES: dict[str, type[Schedule]] = {
    "WarmupCosine": WarmupCosine,
    "WarmupLinear": WarmupLinear,
    "WarmupStableDecay": WarmupStableDecay,
    "Constant": Constant,
}
