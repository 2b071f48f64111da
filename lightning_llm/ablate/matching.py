"""Equal cost on both sides: which option of a variant is changed, to what, and how closely both sides then agree.

``tokens``: the same steps on the same batches. ``flops``: the variant's steps are scaled by the counted FLOPs of a
step. ``time``: they are scaled by an interleaved timing of both sides, measured alone before the plan is frozen; no
clock cuts a run. Inside the timing's noise, they stay as they are. ``parameters``: one option of the variant's
architecture is solved so that the parameters agree.

A schedule follows the scaled steps. The built-in ones know the length of the run, and the steps that a config gives
them are scaled like the run's. Others must do without steps of their own.
"""

import bisect
import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from lightning_llm.ablate import cost
from lightning_llm.ablate.cost import Side
from lightning_llm.ablate.experiment import CLOSE, FLOPS, PARAMETERS, TIME, TOKENS
from lightning_llm.ablate.ratios import TIMED, is_one, median_interval
from lightning_llm.accounting.counts import step_flops
from lightning_llm.io.untrusted import shown
from lightning_llm.model.transformer import Transformer
from lightning_llm.optim.schedules import Constant, Schedule, WarmupCosine, WarmupLinear, WarmupStableDecay
from lightning_llm.training.measured_parts import measure_parts

STEPS, SCHEDULE = "trainer.max_steps", "model.schedule"
SCALED = ("warmup_steps", "decay_steps")  # of a built-in schedule
_BUILT_IN = (Constant, WarmupCosine, WarmupLinear, WarmupStableDecay)
_LARGEST = 64  # times the option's value, where a solution is looked for


@dataclasses.dataclass(frozen=True)
class Matched:
    """What matches a variant with the baseline.

    Attributes:
        options: That the variant gets, by dotted name.
        time_ratio: Of a step of the variant to one of the baseline, if it was timed.
        time_ratio_interval: Of this ratio, with 95 %; ``None`` below six rounds.
    """

    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    time_ratio: float | None = None
    time_ratio_interval: tuple[float, float] | None = None

    @property
    def facts(self) -> dict[str, Any]:
        """What the plan records of it."""
        return {"matched": self.options} | {field: getattr(self, field) for field in TIMED}


def matched(match: str, solved: str | None, base: Side, variant: Side, make: Callable[[str], Side]) -> Matched:
    """What matches a variant with the baseline.

    Args:
        match: What is equal.
        solved: For ``parameters``, the option.
        base: The baseline.
        variant: The variant.
        make: Makes a side, to be timed and used up.

    Raises:
        ValueError: It cannot be matched.
    """
    if match == TOKENS:
        return Matched()
    if match == PARAMETERS:
        assert solved is not None
        return Matched({solved: _solve(solved.rpartition(".")[2], base, variant)})
    if match == FLOPS:
        ours, theirs = flops_of(base), flops_of(variant)
        if ours is None or theirs is None:
            raise ValueError(f"match: flops: the FLOPs of {variant.name} cannot be counted: use match: time")
        return Matched(scaled_options(match, variant, steps_of(base), ours / theirs))
    assert match == TIME
    scaled_options(match, variant, steps_of(base), 2.0)  # it can be scaled: timing takes a while
    *_, (first, second) = cost.time_pair(make(base.name), make(variant.name))
    ratio, interval = second.ratio_to(first), median_interval(second.ratios_to(first))
    scale = 1.0 if is_one(interval) else 1 / ratio
    return Matched(scaled_options(match, variant, steps_of(base), scale), ratio, interval)


def scaled_options(match: str, side: Side, steps: int, scale: float) -> dict[str, Any]:
    """The steps of a run and of its schedule, scaled; empty if that changes nothing.

    Args:
        match: Why, for the message.
        side: With the schedule.
        steps: Of the run.
        scale: For all of them; they are rounded to the nearest, and at least 1.

    Raises:
        ValueError: The schedule has steps that cannot be scaled, since their meaning is not known.
    """
    scaled = max(1, round(steps * scale))
    if scaled == steps:
        return {}
    schedule = side.model.schedule
    found = {STEPS: scaled}
    if schedule is None:
        return found  # the default follows the run
    if type(schedule) in _BUILT_IN:
        given = {name: getattr(schedule, name, None) for name in SCALED}
        new = {name: max(1, round(value * scaled / steps)) for name, value in given.items() if value}
        return found | {f"{SCHEDULE}.init_args.{name}": value for name, value in new.items()}
    if counts := _counts(side):
        advice = f"give shares of the total_steps that Schedule.factor gets, or use match: {TOKENS}"
        raise ValueError(f"match: {match} changes {STEPS} of {side.name}, but {counts} would not follow: {advice}")
    return found


def _counts(side: Side) -> str:
    """What a schedule of an unknown class has that may count steps, in words; empty: nothing.

    Those of torch never learn how long the run is, so that each of them counts steps or validations in some way.
    """
    schedule, given = side.model.schedule, side.options["model"]
    given = given.get("schedule") or (given.get("init_args") or {}).get("schedule")
    given = given if isinstance(given, dict) else {"class_path": given}
    named = f"{SCHEDULE} {given['class_path']}"
    if not isinstance(schedule, Schedule):
        return named
    whole = {name: value for name, value in (given.get("init_args") or {}).items() if _has_counts(value)}
    return f"{', '.join(f'{name} {shown(value)}' for name, value in whole.items())} of {named}" if whole else ""


def _has_counts(value: object) -> bool:
    if isinstance(value, list | tuple):
        return any(map(_has_counts, value))
    return type(value) is int and value > 0


def facts(side: Side) -> dict[str, Any]:
    """What the plan records of a side's cost."""
    flops, tokens = flops_of(side), side.data.tokens_per_step
    known = {"steps": steps_of(side), "parameters": parameters_of(side.architecture), "tokens_per_step": tokens}
    return {**known, "flops_per_token": None if flops is None else flops / tokens}


def closeness(match: str, base: dict[str, Any], side: dict[str, Any]) -> float | None:
    """The variant's part of what is matched, as a ratio to the baseline's; ``None``: it is time, see ``cost.json``."""
    if match == PARAMETERS:
        return float(side["parameters"] / base["parameters"])
    if match == TIME:
        return None
    ours, theirs = (each["steps"] * each["tokens_per_step"] for each in (side, base))
    return float(ours / theirs * (1 if match == TOKENS else side["flops_per_token"] / base["flops_per_token"]))


def steps_of(side: Side) -> int:
    """Optimizer steps of its run.

    Raises:
        ValueError: The config does not say.
    """
    if side.trainer.max_steps < 1:
        raise ValueError(f"{side.name}: give trainer.max_steps: a comparison needs runs of a known length")
    return int(side.trainer.max_steps)


def flops_of(side: Side) -> int | None:
    """FLOPs of its optimizer step, without what is recomputed; ``None`` for parts that cannot be counted."""
    config, tokens = side.architecture, side.data.tokens_per_step
    try:
        length = side.data.context_length
        measured = measure_parts(config, str(side.trainer.precision), length)
        return step_flops(config, tokens=tokens, context_length=length, measured=measured).model
    except ValueError:
        return None


def parameters_of(config: Any) -> int:
    """Of a model of this config, which is built without memory."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in Transformer(config).parameters())


def _solve(option: str, base: Side, variant: Side) -> int:
    """The value of an option of the architecture for which the variant has as many parameters as the baseline."""
    config, wanted = variant.architecture, parameters_of(base.architecture)
    start = getattr(config, option, None)
    if type(start) is not int:
        raise ValueError(f"match: parameters: model.architecture.{option} is no whole number that can be solved for")

    def count(value: int) -> int | None:
        try:
            return parameters_of(dataclasses.replace(config, **{option: value}))
        except (ValueError, TypeError):  # such as a width that the heads do not divide
            return None

    unit = next((unit for unit in range(1, start + 1) if count(start + unit) is not None), 1)
    first = start % unit or unit
    values = range(first, _LARGEST * start, unit)
    place = bisect.bisect_left(values, wanted, key=lambda value: count(value) or 0)
    near = {value: count(value) for value in values[max(0, place - 1) : place + 1]}
    found = min((abs(each / wanted - 1), value) for value, each in near.items() if each) if any(near.values()) else None
    if found is None or found[0] > CLOSE:
        nearest = "" if found is None else f"; the nearest is {found[1]}, {found[0]:.1%} off"
        which = f"model.architecture.{option} of {variant.name}"
        raise ValueError(f"match: parameters: no {which} gives {wanted:,}{nearest}")
    return found[1]
