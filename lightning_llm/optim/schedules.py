"""Learning-rate schedules: plain functions of the step, and the same as objects for configs.

The functions give the learning rate itself. The classes give a factor for the optimizer's own learning rate, so that a
config names the rate once; they can be named by class path in YAML. Steps count from 0, where a warm-up gives 0. If you
pass the number of updates already made, the first update has rate 0; pass ``step + 1`` to avoid that.

No torch is imported here.
"""

import abc
import dataclasses
import math
from collections.abc import Iterator
from typing import Any, Literal

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
    if step < warmup_steps:
        return constant_lr(step, max_lr=max_lr, warmup_steps=warmup_steps)
    progress = _progress(step, warmup_steps, decay_steps)
    return min_lr + (1 + math.cos(progress * math.pi)) / 2 * (max_lr - min_lr)


def linear_lr(step: int, *, max_lr: float, min_lr: float, warmup_steps: int, decay_steps: int) -> float:
    """Linear warm-up to ``max_lr`` and a straight line to ``min_lr``; arguments as in ``cosine_lr``."""
    if step < warmup_steps:
        return constant_lr(step, max_lr=max_lr, warmup_steps=warmup_steps)
    return min_lr + (1 - _progress(step, warmup_steps, decay_steps)) * (max_lr - min_lr)


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
    if step < decay_start:
        return constant_lr(step, max_lr=max_lr, warmup_steps=warmup_steps)
    progress = _progress(step, decay_start, decay_steps)
    left = 1 - (math.sqrt(progress) if shape == "sqrt" else progress)
    return min_lr + left * (max_lr - min_lr)


class Schedule(abc.ABC):
    """A learning rate as a factor of the optimizer's own. Derive your own schedules from it."""

    @abc.abstractmethod
    def factor(self, step: int, total_steps: int | None = None) -> float:
        """The factor at ``step`` of a run of ``total_steps``.

        Args:
            step: Number of the step, from 0.
            total_steps: Optimizer steps of the whole run; ``None`` (or below 1) when there is no end.

        Raises:
            ValueError: If the schedule needs an end and none is known.
        """


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Warmup(Schedule):
    """The option of all schedules, and how they are checked."""

    warmup_steps: int = 0

    def __post_init__(self) -> None:
        if faults := list(self._faults()):
            raise ValueError("; ".join(faults))

    def _faults(self) -> Iterator[str]:
        if not _is_whole(self.warmup_steps) or self.warmup_steps < 0:
            yield f"warmup_steps must be a whole number of at least 0, got {self.warmup_steps!r}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Constant(_Warmup):
    """The optimizer's learning rate, after a linear warm-up.

    Attributes:
        warmup_steps: Steps of the warm-up.
    """

    def factor(self, step: int, total_steps: int | None = None) -> float:
        """See ``Schedule.factor``."""
        return constant_lr(step, max_lr=1.0, warmup_steps=self.warmup_steps)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _WarmupDecay(_Warmup):
    """The options of all schedules that decay to a fraction of the learning rate."""

    decay_steps: int | None = None
    min_lr_ratio: float = 0.0

    def _faults(self) -> Iterator[str]:
        yield from super()._faults()
        yield from _fraction_faults("min_lr_ratio", self.min_lr_ratio)
        if self.decay_steps is None:
            return
        if not _is_whole(self.decay_steps) or self.decay_steps < 1:
            yield f"decay_steps must be a whole number of at least 1 or null, got {self.decay_steps!r}"
        elif _is_whole(self.warmup_steps) and self.decay_steps < self.warmup_steps:
            yield f"decay_steps {self.decay_steps} must not be before warmup_steps {self.warmup_steps}"

    def _lrs_and_steps(self, total_steps: int | None) -> dict[str, Any]:
        end = self.decay_steps or total_steps or 0
        if end < 1:
            raise ValueError(
                f"{type(self).__name__} does not know at which step the run ends: give it decay_steps, or set "
                "trainer.max_steps or trainer.max_epochs"
            )
        return {"max_lr": 1.0, "min_lr": self.min_lr_ratio, "warmup_steps": self.warmup_steps, "decay_steps": end}


@dataclasses.dataclass(frozen=True, kw_only=True)
class WarmupCosine(_WarmupDecay):
    """Linear warm-up, then half a cosine down to a fraction of the learning rate.

    Attributes:
        warmup_steps: Steps of the warm-up. A run that ends before is all warm-up.
        decay_steps: The step at which the decay ends. ``None``: the end of the run.
        min_lr_ratio: The final learning rate, as a fraction of the optimizer's.
    """

    min_lr_ratio: float = 0.1

    def factor(self, step: int, total_steps: int | None = None) -> float:
        """See ``Schedule.factor``."""
        return cosine_lr(step, **self._lrs_and_steps(total_steps))


@dataclasses.dataclass(frozen=True, kw_only=True)
class WarmupLinear(_WarmupDecay):
    """Linear warm-up, then a straight line down to a fraction of the learning rate.

    Attributes:
        warmup_steps: Steps of the warm-up. A run that ends before is all warm-up.
        decay_steps: The step at which the decay ends. ``None``: the end of the run.
        min_lr_ratio: The final learning rate, as a fraction of the optimizer's.
    """

    def factor(self, step: int, total_steps: int | None = None) -> float:
        """See ``Schedule.factor``."""
        return linear_lr(step, **self._lrs_and_steps(total_steps))


@dataclasses.dataclass(frozen=True, kw_only=True)
class WarmupStableDecay(_WarmupDecay):
    """Linear warm-up, a stable phase, and a decay over the last part of the run.

    Attributes:
        warmup_steps: Steps of the warm-up. A run that ends before is all warm-up.
        decay_steps: The step at which the decay ends. ``None``: the end of the run.
        min_lr_ratio: The final learning rate, as a fraction of the optimizer's.
        decay_fraction: The part of ``decay_steps`` over which it decays, between 0 and 1.
        shape: Of the decay: ``sqrt`` (1 - √progress) or ``linear``.
    """

    decay_fraction: float = 0.2
    shape: DecayShape = "sqrt"

    def _faults(self) -> Iterator[str]:
        yield from super()._faults()
        yield from _fraction_faults("decay_fraction", self.decay_fraction)
        if self.shape not in ("linear", "sqrt"):
            yield f"shape {self.shape!r} is unknown: choose one of linear, sqrt"

    def factor(self, step: int, total_steps: int | None = None) -> float:
        """See ``Schedule.factor``."""
        options = self._lrs_and_steps(total_steps)
        end = options["decay_steps"]
        start = max(self.warmup_steps, end - round(self.decay_fraction * end))
        return wsd_lr(step, **options, decay_start=start, shape=self.shape)


def _progress(step: int, start: int, end: int) -> float:
    """From 0 at ``start`` to 1 at ``end`` and after it; 0 at ``start`` if that is ``end``."""
    if step > end:
        return 1.0
    return (step - start) / (end - start) if end > start else 0.0


def _fraction_faults(name: str, value: object) -> Iterator[str]:
    if not isinstance(value, int | float) or not 0 <= value <= 1:
        yield f"{name} must be between 0 and 1, got {value!r}"


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
