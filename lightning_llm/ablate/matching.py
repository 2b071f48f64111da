"""Equal cost on both arms: a class for each matching rule, and the table ``MATCHES`` of all of them. No torch.

``tokens``: the same steps on the same batches. ``flops``: the variant's steps are scaled by the counted FLOPs of a
step. ``time``: they are scaled by an interleaved timing of both arms, measured alone before the plan is frozen; no
clock cuts a run. Inside the timing's noise, they stay as they are. ``parameters``: one option of the variant's
architecture is solved so that the parameters agree.

A schedule follows the scaled steps. The built-in ones know the length of the run, and the steps that a config gives
them are scaled like the run's. Others must do without steps of their own.

Your own rule is a subclass of :class:`Match` and a line in ``MATCHES``: files, plans and reports read the table. What
it compares is a fact of each arm (``Match.facts``), which plans and reports hold too.
Counting and timing need torch, which ``ablate.cost`` imports when a rule matches.
"""

import abc
import bisect
import dataclasses
import math
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, ClassVar

from lightning_llm.ablate.arm import BASELINE, Arm
from lightning_llm.ablate.ratios import INTERVAL, is_one, median_interval
from lightning_llm.io.schema import POSITIVE, Schema, whole
from lightning_llm.io.untrusted import shown
from lightning_llm.optim.schedules import SCHEDULES, Schedule

MAX_STEPS, SCHEDULE, ARCHITECTURE_PREFIX = "trainer.max_steps", "model.schedule", "model.architecture."
CLOSE = 0.005  # how far apart equal numbers of parameters may be, as a share
_LARGEST = 64  # times the option's value, where a solution is looked for
_TIMES = " times the baseline's"
Facts = Mapping[str, Any]  # of an arm, as a plan or a report records them


@dataclasses.dataclass(frozen=True)
class Matched:
    """What matches a variant with the baseline.

    Attributes:
        options: That the variant gets, by dotted name.
        facts: Of the variant, that matching has measured.
    """

    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)


class Match(abc.ABC):
    """A matching rule: what is equal on both arms, and how a variant is changed for it.

    Attributes:
        name: Of the rule, in files and reports.
        is_timed: Whether it times steps, which takes the threads of the runs.
        is_solved: Whether a file names an option of the variants' architecture that is solved for.
        caveat: A sentence of the report; empty: none.
        facts: What a plan and a report hold of each arm for this rule, by name; any of it may be ``None``.
    """

    name: ClassVar[str]
    is_timed: ClassVar[bool] = False
    is_solved: ClassVar[bool] = False
    caveat: ClassVar[str] = ""
    facts: ClassVar[Mapping[str, Schema]] = {}

    def counted(self, arm: Arm) -> dict[str, Any]:
        """Those of the ``facts`` that are counted before anything runs."""
        return {}

    @abc.abstractmethod
    def matched(self, base: Arm, variant: Arm, solved: str | None) -> Matched:
        """What matches a variant with the baseline.

        Args:
            base: The baseline.
            variant: The variant.
            solved: The option that is solved for, if ``is_solved``.

        Raises:
            ValueError: It cannot be matched.
        """

    @abc.abstractmethod
    def closeness(self, base: Facts, variant: Facts) -> float | None:
        """The variant's part of what is matched, as a ratio to the baseline's; ``None``: ``cost.json`` has it."""

    def closeness_in_words(self, report: Facts) -> tuple[list[str], str]:
        """How closely each variant of a report is matched, and the unit of these numbers."""
        rows = {name: row for name, row in report["variants"].items() if row["ratio"] is not None}
        solved = {name: "" if row["solved"] is None else f"{row['solved']}, " for name, row in rows.items()}
        return [f"{name} {solved[name]}{row['ratio']:.2f}" for name, row in rows.items()], _TIMES


class Tokens(Match):
    """The same steps on the same batches."""

    name = "tokens"
    facts: ClassVar = {"tokens_per_step": whole(1)}

    def counted(self, arm: Arm) -> dict[str, Any]:
        return {"tokens_per_step": arm.data.tokens_per_step}

    def matched(self, base: Arm, variant: Arm, solved: str | None) -> Matched:
        return Matched()

    def closeness(self, base: Facts, variant: Facts) -> float:
        """Of the tokens of a run."""
        base_tokens, tokens = (arm["steps"] * arm["tokens_per_step"] for arm in (base, variant))
        return float(tokens / base_tokens)


class Flops(Match):
    """Steps scaled by counted FLOPs."""

    name = "flops"
    caveat = "FLOPs leave out the optimizer and recomputation."
    facts: ClassVar = {"flops_per_token": POSITIVE}

    def counted(self, arm: Arm) -> dict[str, Any]:
        from lightning_llm.ablate import cost

        flops = cost.flops_of(arm)
        return {"flops_per_token": None if flops is None else flops / arm.data.tokens_per_step}

    def matched(self, base: Arm, variant: Arm, solved: str | None) -> Matched:
        """The steps are scaled."""
        from lightning_llm.ablate import cost

        base_flops, flops = cost.flops_of(base), cost.flops_of(variant)
        if base_flops is None or flops is None:
            problem = f"the FLOPs of {variant.name} cannot be counted: use match: {Time.name}"
            raise ValueError(f"match: {self.name}: {problem}")
        return Matched(scaled_options(self.name, variant, base.steps, base_flops / flops))

    def closeness(self, base: Facts, variant: Facts) -> float:
        """Of the FLOPs of a run."""
        return Tokens().closeness(base, variant) * float(variant["flops_per_token"] / base["flops_per_token"])


class Time(Match):
    """Steps scaled by an interleaved timing.

    Its facts are the ratio of a step of the variant to one of the baseline, and the 95% interval of this ratio, which
    is not known below six rounds.
    """

    name = "time"
    is_timed = True
    facts: ClassVar = {"time_ratio": POSITIVE, "time_ratio_interval": INTERVAL}

    def matched(self, base: Arm, variant: Arm, solved: str | None) -> Matched:
        """The steps are scaled, unless the ratio of the times cannot be distinguished from 1."""
        from lightning_llm.ablate import cost

        scaled_options(self.name, variant, base.steps, 2.0)  # it can be scaled: timing takes a while
        *_, (first, second) = cost.time_pair(base, variant)
        ratio, interval = second.ratio_to(first), median_interval(second.ratios_to(first))
        scale = 1.0 if is_one(interval) else 1 / ratio
        options = scaled_options(self.name, variant, base.steps, scale)
        return Matched(options, {"time_ratio": ratio, "time_ratio_interval": interval})

    def closeness(self, base: Facts, variant: Facts) -> None:
        """It is measured after the runs."""

    def closeness_in_words(self, report: Facts) -> tuple[list[str], str]:
        """How far training times may be apart; of a plan without intervals, what was measured after the runs."""
        within = {name: matched_within(row, report["baseline"]) for name, row in report["variants"].items()}
        shares = {name: math.ceil(1000 * share - 1e-9) / 1000 for name, share in within.items() if share is not None}
        if shares:  # rounded up
            return [f"{name} within ±{share:.1%}" for name, share in shares.items()], ""
        times = {name: arm["training_s"] for name, arm in report["cost"]["sides"].items()}
        base = times.pop(BASELINE, None)
        return [f"{name} {time / base:.2f}" for name, time in times.items() if base], _TIMES


class Parameters(Match):
    """One option of the architecture is solved for."""

    name = "parameters"
    is_solved = True
    facts: ClassVar = {"parameters": whole(1)}

    def counted(self, arm: Arm) -> dict[str, Any]:
        from lightning_llm.ablate import cost

        return {"parameters": cost.parameters_of(arm.architecture)}

    def matched(self, base: Arm, variant: Arm, solved: str | None) -> Matched:
        """The option is set."""
        assert solved is not None
        return Matched({solved: _solve(solved.removeprefix(ARCHITECTURE_PREFIX), base, variant)})

    def closeness(self, base: Facts, variant: Facts) -> float:
        return float(variant["parameters"] / base["parameters"])


MATCHES: dict[str, Match] = {rule.name: rule for rule in (Tokens(), Flops(), Time(), Parameters())}
FACTS: dict[str, Schema] = {name: schema for rule in MATCHES.values() for name, schema in rule.facts.items()}


def facts_of(arm: Arm, matched: Matched) -> dict[str, Any]:
    """What a plan records of an arm: its steps, and the facts of all rules, whichever one matches."""
    facts = {"steps": arm.steps, **dict.fromkeys(FACTS)}
    for rule in MATCHES.values():
        facts |= rule.counted(arm)
    return facts | matched.facts


def matches_in_words() -> str:
    """The rules, as a command line has them."""
    return ", ".join(
        f"{rule.name}={ARCHITECTURE_PREFIX}NAME" if rule.is_solved else rule.name for rule in MATCHES.values()
    )


def matched_within(row: Facts, base: Facts) -> float | None:
    """How far training times may be apart after matching, as a share of the baseline's; ``None``: that is not known.

    It covers the interval of the time ratio, the steps that were left as they are inside of it, and their rounding.

    Args:
        row: Of a variant in a report or a plan: its steps, and the interval of its time ratio.
        base: The baseline's.
    """
    interval = row.get("time_ratio_interval")
    return None if interval is None else max(abs(end * row["steps"] / base["steps"] - 1) for end in interval)


# ---- steps


def scaled_options(match: str, arm: Arm, steps: int, scale: float) -> dict[str, Any]:
    """The steps of a run and of its schedule, scaled; empty if that changes nothing.

    Args:
        match: Why, for the message.
        arm: With the schedule.
        steps: Of the run.
        scale: For all of them; they are rounded to the nearest, and at least 1.

    Raises:
        ValueError: The schedule has steps that cannot be scaled, since their meaning is not known.
    """
    scaled = max(1, round(steps * scale))
    if scaled == steps:
        return {}
    schedule = arm.model.schedule
    options = {MAX_STEPS: scaled}
    if schedule is None:
        return options  # the default follows the run
    if type(schedule) in SCHEDULES.values():
        old_steps = {name: getattr(schedule, name) for name in schedule.step_options}
        new_steps = {name: max(1, round(value * scaled / steps)) for name, value in old_steps.items() if value}
        return options | {f"{SCHEDULE}.init_args.{name}": value for name, value in new_steps.items()}
    if counts := _counts(arm):
        advice = f"give shares of the total_steps that Schedule.factor gets, or use match: {Tokens.name}"
        raise ValueError(f"match: {match} changes {MAX_STEPS} of {arm.name}, but {counts} would not follow: {advice}")
    return options


def _counts(arm: Arm) -> str:
    """What a schedule of an unknown class has that may count steps, in words; empty: nothing.

    Those of torch never learn how long the run is, so that each of them counts steps or validations in some way.
    """
    options = arm.options["model"]
    options = options.get("schedule") or (options.get("init_args") or {}).get("schedule")
    options = options if isinstance(options, dict) else {"class_path": options}
    title = f"{SCHEDULE} {options['class_path']}"
    if not isinstance(arm.model.schedule, Schedule):
        return title
    counting = {name: value for name, value in (options.get("init_args") or {}).items() if _has_counts(value)}
    return f"{', '.join(f'{name} {shown(value)}' for name, value in counting.items())} of {title}" if counting else ""


def _has_counts(value: object) -> bool:
    if isinstance(value, list | tuple):
        return any(map(_has_counts, value))
    return type(value) is int and value > 0


# ---- parameters


def _solve(option: str, base: Arm, variant: Arm) -> int:
    """The value of an option of the architecture for which the variant has as many parameters as the baseline."""
    from lightning_llm.ablate.cost import parameters_of

    config, target = variant.architecture, parameters_of(base.architecture)
    start = getattr(config, option, None)
    if type(start) is not int:
        option_names = [field.name for field in dataclasses.fields(config)]
        close = get_close_matches(option, option_names, 1)
        hint = f"; did you mean {ARCHITECTURE_PREFIX}{close[0]}?" if close and option not in option_names else ""
        problem = "is no whole number that can be solved for" if option in option_names else "does not exist"
        raise ValueError(f"match: parameters: {ARCHITECTURE_PREFIX}{option} {problem}{hint}")

    def count(value: int) -> int | None:
        try:
            return parameters_of(dataclasses.replace(config, **{option: value}))
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
