"""Equal cost for baseline and variant: the matching rules, and the table ``MATCHES`` of all of them. No torch.

``tokens``: the same steps on the same batches. ``flops``: the variant's steps are scaled by the counted FLOPs of a
step. ``time``: they are scaled by an interleaved timing of both, measured alone before the plan is frozen; no clock
cuts a run. Inside the timing's noise, they stay as they are. ``parameters``: one option of the variant's architecture
is solved so that the parameters agree.

A rule says what is compared, from the facts that a plan records of each variant, and how close that is. How a variant
is changed for it, its program knows (for ``fit``: ``ablate.fit.matching``).
"""

import abc
import math
from collections.abc import Mapping
from typing import Any, ClassVar, Protocol

ARCHITECTURE_PREFIX = "model.architecture."
_TIMES = " times the baseline's"
Facts = Mapping[str, Any]  # of a variant, as a plan records them


class Matched(Protocol):
    """Facts of a variant or of the baseline, for the sentence about matched costs."""

    @property
    def steps(self) -> int | None:
        """Optimizer steps of a run."""

    @property
    def solved(self) -> float | None:
        """Value of the option that was solved for."""

    @property
    def ratio(self) -> float | None:
        """How closely the cost that is matched agrees with the baseline's."""

    @property
    def time_ratio_interval(self) -> tuple[float, float] | None:
        """The 95% interval of the time ratio."""

    @property
    def training_s(self) -> float | None:
        """Seconds of all steps, measured alone."""


class Match(abc.ABC):
    """A matching rule.

    Attributes:
        name: In files and reports.
        is_timed: Whether it times steps, which takes the threads of the runs.
        is_solved: Whether a file names an option of the variants' architecture that is solved for.
        caveat: A sentence of the report; empty: none.
        facts: What plans and reports hold of each variant for this rule; a program may know none of it.
    """

    name: ClassVar[str]
    is_timed: ClassVar[bool] = False
    is_solved: ClassVar[bool] = False
    caveat: ClassVar[str] = ""
    facts: ClassVar[tuple[str, ...]] = ()

    @abc.abstractmethod
    def closeness(self, base: Facts, variant: Facts) -> float | None:
        """The variant's part of what is matched, as a ratio to the baseline's; ``None``: ``cost.json`` has it."""

    def closeness_in_words(self, base: Matched, variants: Mapping[str, Matched]) -> tuple[list[str], str]:
        """How closely each variant of a report is matched, and the unit of these numbers."""
        closeness = []
        for name, variant in variants.items():
            solved = "" if variant.solved is None else f"{variant.solved:g}, "
            closeness += [] if variant.ratio is None else [f"{name} {solved}{variant.ratio:.2f}"]
        return closeness, _TIMES


class Tokens(Match):
    """The same steps on the same batches."""

    name = "tokens"
    facts = ("tokens_per_step",)

    def closeness(self, base: Facts, variant: Facts) -> float | None:
        """The ratio of the tokens of a run; ``None``: data of another class do not say how many a step has."""
        if None in (base["tokens_per_step"], variant["tokens_per_step"]):
            return None
        base_tokens, tokens = (each["steps"] * each["tokens_per_step"] for each in (base, variant))
        return float(tokens / base_tokens)


class Flops(Match):
    """Steps scaled by counted FLOPs."""

    name = "flops"
    caveat = "FLOPs leave out the optimizer and recomputation."
    facts = ("flops_per_token",)

    def closeness(self, base: Facts, variant: Facts) -> float:
        """The ratio of the FLOPs of a run."""
        tokens = Tokens().closeness(base, variant)
        assert tokens is not None  # what has no tokens has no FLOPs
        return tokens * float(variant["flops_per_token"] / base["flops_per_token"])


class Time(Match):
    """Steps scaled by an interleaved timing.

    Its facts are the ratio of a step of the variant to one of the baseline, and the 95% interval of this ratio, which
    is not known below six rounds.
    """

    name = "time"
    is_timed = True
    facts = ("time_ratio", "time_ratio_interval")

    def closeness(self, base: Facts, variant: Facts) -> None:
        """It is measured after the runs."""

    def closeness_in_words(self, base: Matched, variants: Mapping[str, Matched]) -> tuple[list[str], str]:
        """How far training times may be apart; of a plan without intervals, what was measured after the runs."""
        within = {name: matched_within(variant, base) for name, variant in variants.items()}
        shares = {name: math.ceil(1000 * share - 1e-9) / 1000 for name, share in within.items() if share is not None}
        if shares:  # rounded up
            return [f"{name} within ±{share:.1%}" for name, share in shares.items()], ""
        base_s = base.training_s or math.nan
        times = {
            name: variant.training_s for name, variant in variants.items() if variant.training_s and base.training_s
        }
        return [f"{name} {seconds / base_s:.2f}" for name, seconds in times.items()], _TIMES


class Parameters(Match):
    """One option of the architecture is solved for."""

    name = "parameters"
    is_solved = True
    facts = ("parameters",)

    def closeness(self, base: Facts, variant: Facts) -> float:
        """The ratio of the parameters."""
        return float(variant["parameters"] / base["parameters"])


MATCHES: dict[str, Match] = {rule.name: rule for rule in (Tokens(), Flops(), Time(), Parameters())}
FACTS: tuple[str, ...] = tuple(fact for rule in MATCHES.values() for fact in rule.facts)


def matches_in_words() -> str:
    """The rules, as a command line has them."""
    return ", ".join(
        f"{rule.name}={ARCHITECTURE_PREFIX}NAME" if rule.is_solved else rule.name for rule in MATCHES.values()
    )


def matched_within(variant: Matched, base: Matched) -> float | None:
    """How far training times may be apart after matching, as a share of the baseline's; ``None``: that is not known.

    It covers the interval of the time ratio, the steps that were left as they are inside of it, and their rounding.

    Args:
        variant: Its steps, and the interval of its time ratio.
        base: The baseline's steps.
    """
    interval = variant.time_ratio_interval
    if interval is None or variant.steps is None or base.steps is None:
        return None
    return max(abs(end * variant.steps / base.steps - 1) for end in interval)
