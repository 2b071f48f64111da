"""How a variant of ``fit`` is changed, so that it costs as much as the baseline by a rule of ``ablate.matching``.

A schedule follows scaled steps. The built-in ones know the length of the run, and the steps that a config gives them
are scaled like the run's. Others must do without steps of their own.

Your own rule is a subclass of ``matching.Match`` with a line in ``MATCHES``, and a function with one in ``MATCHING``.
"""

import bisect
import dataclasses
import math
from collections.abc import Callable
from difflib import get_close_matches
from typing import Any

from lightning_llm.ablate.fit import cost
from lightning_llm.ablate.fit.variant import Variant
from lightning_llm.ablate.matching import ARCHITECTURE_PREFIX, FACTS, Flops, Parameters, Time, Tokens
from lightning_llm.ablate.ratios import is_one, median_interval
from lightning_llm.io.untrusted import shown
from lightning_llm.optim.schedules import SCHEDULES, Schedule

MAX_STEPS = "trainer.max_steps"
SCHEDULE = "model.schedule"
UNEQUAL = 0.01  # how far from equal the cost of a variant with steps of its own may be, as a share
CLOSE = 0.005  # how far apart equal numbers of parameters may be, as a share
_LARGEST = 64  # times the option's value, where a solution is looked for


@dataclasses.dataclass(frozen=True)
class Matched:
    """The options and measurements that match a variant with the baseline.

    Attributes:
        options: That the variant gets, by dotted name.
        facts: Of the variant, that matching has measured.
    """

    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)


def match_tokens(base: Variant, variant: Variant, solved: str | None) -> Matched:
    """The steps, scaled by the tokens of a step; nothing, where these are equal.

    Raises:
        ValueError: The variant gives steps of its own, with other tokens, or the schedule cannot be scaled.
    """
    tokens = [each.of_data("tokens_per_step") for each in (base, variant)]
    scale = 1.0 if None in tokens else tokens[0] / tokens[1]
    return Matched(scaled_options(Tokens.name, variant, base.steps, scale))


def match_flops(base: Variant, variant: Variant, solved: str | None) -> Matched:
    """The steps, scaled by counted FLOPs.

    Raises:
        ValueError: They cannot be counted, or the schedule cannot be scaled.
    """
    base_flops, flops = cost.flops_of(base), cost.flops_of(variant)
    if base_flops is None or flops is None:
        use = f"match: {Time.name}" if base.is_known and variant.is_known else f"match: {Tokens.name}"
        problem = f"the FLOPs of {variant.name} cannot be counted: use {use}"
        raise ValueError(f"match: {Flops.name}: {problem}")
    return Matched(scaled_options(Flops.name, variant, base.steps, base_flops / flops))


def match_time(base: Variant, variant: Variant, solved: str | None) -> Matched:
    """The steps, scaled by a timing, unless the ratio of the times cannot be distinguished from 1.

    Raises:
        ValueError: The schedule cannot be scaled, or the variant gives steps of its own.
    """
    if not (base.is_known and variant.is_known):
        problem = "steps are timed before the first run only for a LanguageModel on token data"
        raise ValueError(f"match: {Time.name}: {problem}: use match: {Tokens.name}, and give trainer.max_steps")
    if variant.steps != base.steps:
        raise ValueError(f"{variant.name} changes {MAX_STEPS}, which match: {Time.name} sets: leave it out")
    scaled_options(Time.name, variant, base.steps, 2.0)  # it can be scaled: timing takes a while
    *_, (first, second) = cost.time_pair(base, variant)
    ratio = second.ratio_to(first)
    interval = median_interval(second.ratios_to(first))
    scale = 1.0 if is_one(interval) else 1 / ratio
    options = scaled_options(Time.name, variant, base.steps, scale)
    return Matched(options, {"time_ratio": ratio, "time_ratio_interval": interval})


def match_parameters(base: Variant, variant: Variant, solved: str | None) -> Matched:
    """One option, solved for; the steps as :func:`match_tokens`.

    Raises:
        ValueError: No value of it gives as many parameters.
    """
    assert solved is not None
    if base.architecture is None or variant.architecture is None:
        raise ValueError(f"match: {Parameters.name}: {solved} is an option of LanguageModel: use match: {Tokens.name}")
    found = _solve(solved.removeprefix(ARCHITECTURE_PREFIX), base, variant)
    return Matched({**match_tokens(base, variant, solved).options, solved: found})


# The baseline, the variant, and the option that is solved for, if the rule solves for one
MATCHING: dict[str, Callable[[Variant, Variant, str | None], Matched]] = {
    Tokens.name: match_tokens,
    Flops.name: match_flops,
    Time.name: match_time,
    Parameters.name: match_parameters,
}


def facts_of(variant: Variant, matched: Matched) -> dict[str, Any]:
    """Facts that a plan records of a variant for the rules, whichever one matches."""
    flops = cost.flops_of(variant)
    tokens = variant.of_data("tokens_per_step")
    counted = {
        "tokens_per_step": tokens,
        "flops_per_token": None if flops is None else flops / tokens,
        "parameters": cost.parameters_of_variant(variant),
    }
    return {**dict.fromkeys(FACTS), **counted, **matched.facts}


# ---- steps


def scaled_options(match: str, variant: Variant, steps: int, scale: float) -> dict[str, Any]:
    """The steps of a run and of its schedule, scaled; empty if that changes nothing.

    Args:
        match: Why, for the message.
        variant: With the schedule.
        steps: Of the run.
        scale: For all of them; they are rounded to the nearest, and at least 1.

    Raises:
        ValueError: The schedule has steps that cannot be scaled, since their meaning is not known; or the variant gives
            another number of steps.
    """
    scaled = max(1, round(steps * scale))
    if variant.steps != steps:
        share = variant.steps / (steps * scale)
        if abs(share - 1) > UNEQUAL:
            advice = f"give {scaled}, or leave it out: match: {match} sets it"
            what = f"{share:.2f} times the {match} of the baseline"
            raise ValueError(f"{variant.name} has {MAX_STEPS} {variant.steps}, which is {what}: {advice}")
        scaled = variant.steps
    if scaled == steps:
        return {}
    schedule = getattr(variant.model, "schedule", None)
    options = {MAX_STEPS: scaled}
    if schedule is None:
        return options  # the default follows the run
    if type(schedule) in SCHEDULES.values():
        old_steps = {name: getattr(schedule, name) for name in schedule.step_options}
        new_steps = {name: max(1, round(value * scaled / steps)) for name, value in old_steps.items() if value}
        return options | {f"{SCHEDULE}.init_args.{name}": value for name, value in new_steps.items()}
    if counts := _counts(variant):
        advice = f"give shares of the total_steps that Schedule.factor gets, or use match: {Tokens.name}"
        raise ValueError(
            f"match: {match} changes {MAX_STEPS} of {variant.name}, but {counts} would not follow: {advice}"
        )
    return options


def _counts(variant: Variant) -> str:
    """The arguments of a schedule of an unknown class that may count steps, in words; empty: none.

    Those of torch never learn how long the run is, so that each of them counts steps or validations in some way.
    """
    options = variant.options["model"]
    options = options.get("schedule") or (options.get("init_args") or {}).get("schedule")
    options = options if isinstance(options, dict) else {"class_path": options}
    title = f"{SCHEDULE} {options['class_path']}"
    if not isinstance(variant.model.schedule, Schedule):
        return title
    counting = {name: value for name, value in (options.get("init_args") or {}).items() if _has_counts(value)}
    return f"{', '.join(f'{name} {shown(value)}' for name, value in counting.items())} of {title}" if counting else ""


def _has_counts(value: object) -> bool:
    if isinstance(value, list | tuple):
        return any(map(_has_counts, value))
    return type(value) is int and value > 0


# ---- parameters


def _solve(option: str, base: Variant, variant: Variant) -> int:
    """The value of an option of the architecture for which the variant has as many parameters as the baseline."""
    config = variant.architecture
    target = cost.parameters_of(base.architecture)
    start = getattr(config, option, None)
    if type(start) is not int:
        option_names = [field.name for field in dataclasses.fields(config)]
        close = get_close_matches(option, option_names, 1)
        hint = f"; did you mean {ARCHITECTURE_PREFIX}{close[0]}?" if close and option not in option_names else ""
        problem = "is no whole number that can be solved for" if option in option_names else "does not exist"
        raise ValueError(f"match: parameters: {ARCHITECTURE_PREFIX}{option} {problem}{hint}")

    def count(value: int) -> int | None:
        try:
            return cost.parameters_of(dataclasses.replace(config, **{option: value}))
        except (ValueError, TypeError):  # such as a width that the heads do not divide
            return None

    unit = next((unit for unit in range(1, start + 1) if count(start + unit) is not None), 1)
    first = start % unit or unit
    values = range(first, _LARGEST * start, unit)
    index = bisect.bisect_left(values, target, key=lambda value: count(value) or 0)
    candidates = {value: count(value) for value in values[max(0, index - 1) : index + 1]}
    distances = [(abs(parameters / target - 1), value) for value, parameters in candidates.items() if parameters]
    distance, nearest = min(distances, default=(math.inf, 0))
    if distance > CLOSE:
        advice = f"; the nearest is {nearest}, {distance:.1%} off" if distances else ""
        which = f"{ARCHITECTURE_PREFIX}{option} of {variant.name}"
        raise ValueError(f"match: parameters: no {which} gives {target:,}{advice}")
    return nearest
