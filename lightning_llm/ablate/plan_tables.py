"""Tables before the first run of an experiment: its power and its cost. No torch."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Column, Table

from lightning_llm.ablate import words
from lightning_llm.ablate.experiment import LOOKS, Batch, Experiment
from lightning_llm.ablate.history import Earlier, Spread, spread_of
from lightning_llm.ablate.names import NULL
from lightning_llm.ablate.plan import Plan
from lightning_llm.io.console import Console
from lightning_llm.io.shell import shell_path
from lightning_llm.io.units import shown_duration
from lightning_llm.statistics.design import EQUIVALENT, FEWEST, UNDECIDED, Design
from lightning_llm.statistics.power import PowerAnalysis, power_analysis

TIMES_DELTA, TIMES_SPREAD = (0, 0.5, 1, 2, 4), (0, 0.5, 1, 2, 3)  # true differences in the table
ENOUGH = 0.8
COMMAND = "lightning-llm ablate"


def show_plan(plan: Plan, experiments: Sequence[Earlier], console: Console) -> None:
    """Print what a new plan shares with earlier experiments, and what their spread lets it find.

    Args:
        plan: The new one.
        experiments: Those with the same baseline.
        console: Where to.
    """
    lines = []
    planned = plan.experiment.seeds(plan.experiment.looks[-1])
    for name, seeds in words.not_reused(plan.record.seen, plan.record.reused.runs, planned).items():
        used = f"{name} has used {words.seeds_in_words(seeds)} with this baseline"
        fresh = "Fresh seeds: --first-seed 1000, or seeds: {first: 1000} in a file"
        lines.append(f"note: {used}, so the two experiments are not independent. {fresh}")
    spread = spread_of(experiments)
    pairs = plan.experiment.looks[-1]
    if is_pilot := pairs < LOOKS[0]:
        lines.append(f"{COMMAND}: {pairs} pairs are a pilot: by default, the first test is after {LOOKS[0]}")
    if spread is not None:
        lines.append(f"What the spread of the {spread.whose} of {spread.source} lets this experiment find:")
    elif is_pilot:
        why = "no experiment with this baseline in the same parent folder has measured the spread"
        command = f"{COMMAND} power --from {shell_path(plan.out)} --pairs {LOOKS[-1]}"
        lines.append(f"note: what this pilot can find is not known, since {why}; after it, see {command}")
    console.print_lines(*lines)
    if spread is not None:
        show_power_analysis(plan.experiment, spread, console)


def show_power_analysis(experiment: Experiment, spread: Spread, console: Console) -> None:
    """Print how likely each verdict is, by which look, and how many runs that takes: what ``ablate power`` shows.

    Args:
        experiment: What is planned.
        spread: Standard deviation of the difference of one pair.
        console: Where to.
    """
    if isinstance(experiment.stop, Batch):
        console.print_lines(words.power_of_batch(spread.value, experiment.unit))
        return
    design = experiment.design
    variants = len(experiment.variants)
    goal = "verdict" if design.half_width is None else f"±{design.half_width:g}"
    looks = "/".join(map(str, design.looks))
    by_look = Column(f"{goal} by {looks}, %", min_width=4 * len(design.looks))
    columns = ("true difference", "better or worse", "equivalent", "undecided", by_look, "pairs", "runs")
    table = Table(*columns, box=SIMPLE_HEAD, pad_edge=False)
    for expected in power_analyses(design, spread.value):
        shares = (expected.direction, expected.probabilities[EQUIVALENT], expected.probabilities[UNDECIDED])
        ended = "/".join(f"{100 * share:.0f}" for share in expected.ended.values())
        cells = (*(f"{share:.0%}" for share in shares), ended, f"{expected.pairs:.1f}")
        table.add_row(f"{expected.difference:g}", *cells, str(runs_of(experiment, expected)))
    console.print(table)
    whose = "the variant" if variants == 1 else f"each of {variants} variants"
    lines = [f"Probabilities for {whose}, if a pair's difference has a standard deviation of {spread}."]
    if spread.variant == NULL:
        lines.append("A variant that changes more than initial values usually has a larger one.")
    if grid := experiment.runs_of_tuning():
        lines.append(f"The runs include at least {grid} of tuning, and the tuned pairs.")
    console.print_lines(*lines, *warnings_of(design, spread.value))


def show_cost_estimates(cost_estimates: Mapping[str, Any], console: Console) -> None:
    """Print what experiments take, by name: what ``ablate run --dry-run`` shows."""
    titles = ("experiment", "parameters", "steps", "FLOPs of a run", "runs", "time")
    table = Table(*titles, box=SIMPLE_HEAD, pad_edge=False)
    for name, cost_estimate in cost_estimates.items():
        flops = "–" if cost_estimate.flops is None else f"{cost_estimate.flops:.2e}"
        counts = (f"{cost_estimate.parameters:,}", f"{cost_estimate.steps:,}", flops, f"{cost_estimate.runs:,}")
        table.add_row(name, *counts, shown_duration(cost_estimate.seconds))
    console.print(table)
    total = shown_duration(sum(estimate.seconds for estimate in cost_estimates.values()))
    caveat = "by timed steps of the baseline on this machine, without validation"
    more = (
        "; more if the grid of tuning grows"
        if any(cost_estimate.is_tuned for cost_estimate in cost_estimates.values())
        else ""
    )
    console.print_lines(f"About {total} of training steps at most, {caveat}, start or measurement of cost{more}.")


def runs_of(experiment: Experiment, expected: PowerAnalysis) -> int:
    """How many runs an experiment takes on average, if all variants have the same true difference."""
    variants = len(experiment.variants)
    first = experiment.null_runs
    pairs = expected.longest(variants) + variants * expected.pairs  # the baseline trains until the last variant ends
    families = 1 if experiment.tune is None else 2
    return round(1 + first + families * pairs + experiment.runs_of_tuning())


def power_analyses(design: Design, spread: float) -> Sequence[PowerAnalysis]:
    """At several true differences: shares of delta if there is one, else of the spread."""
    unit, times = (spread, TIMES_SPREAD) if design.delta is None else (design.delta, TIMES_DELTA)
    return [power_analysis(design, unit * factor, spread) for factor in times]


def warnings_of(design: Design, spread: float) -> list[str]:
    """Warnings of what the design cannot reach, one line each."""
    if design.looks[-1] < FEWEST:
        return [f"warning: a verdict needs at least {FEWEST} pairs"]
    if design.delta is None:
        return []
    share = power_analysis(design, 0.0, spread).probabilities[EQUIVALENT]
    if share >= ENOUGH:
        return []
    advice = f"give more pairs, or a delta of about {_delta_for(design, spread):.2g}, which is reached in {ENOUGH:.0%}"
    finding = f"is found to differ by less than delta {design.delta:g} in only {share:.0%} of experiments"
    return [f"warning: a variant that changes nothing {finding}: {advice}"]


def _delta_for(design: Design, spread: float) -> float:
    """The smallest delta for which no difference is found to be smaller in most experiments."""
    low = 0.0
    high = 20 * spread
    for _ in range(12):
        middle = (low + high) / 2
        expected = power_analysis(Design(design.alpha, design.looks, middle, design.half_width), 0.0, spread)
        low, high = (low, middle) if expected.probabilities[EQUIVALENT] >= ENOUGH else (middle, high)
    return high
