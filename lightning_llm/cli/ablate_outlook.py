"""What an experiment will find, and what it takes: printed by ``ablate power``, and before the first run."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Column, Table

from lightning_llm.io.console import Console
from lightning_llm.statistics.design import FEWEST, Design
from lightning_llm.statistics.power import Outlook, outlook
from lightning_llm.statistics.verdict import EQUIVALENT, UNDECIDED

TIMES_DELTA, TIMES_SPREAD = (0, 0.5, 1, 2, 4), (0, 0.5, 1, 2, 3)  # true differences in the table
ENOUGH = 0.8


def show_outlook(asked: Mapping[str, Any], spread: float, console: Console) -> None:
    """Print how likely each verdict is, by which look, and how many runs that takes.

    Args:
        asked: Of a plan: ``variants``, ``looks``, ``delta``, ``alpha``, ``precision`` and ``tune``.
        spread: Standard deviation of the difference of one pair.
        console: Where to.
    """
    design, variants = design_of(asked), len(asked["variants"])
    goal = "verdict" if design.precision is None else f"±{design.precision:g}"
    looks = "/".join(map(str, design.looks))
    by_look = Column(f"{goal} by {looks}, %", min_width=4 * len(design.looks))
    columns = ("true difference", "better or worse", "equivalent", "undecided", by_look, "pairs", "runs")
    table = Table(*columns, box=SIMPLE_HEAD, pad_edge=False)
    for found in outlooks(design, spread):
        words = (found.direction, found.words[EQUIVALENT], found.words[UNDECIDED])
        ended = "/".join(f"{100 * share:.0f}" for share in found.ended.values())
        cells = (*(f"{each:.0%}" for each in words), ended, f"{found.pairs:.1f}")
        table.add_row(f"{found.difference:g}", *cells, str(runs_of(asked, found)))
    console.print(table)
    whose = "the variant" if variants == 1 else f"each of {variants} variants"
    lines = [f"Probabilities for {whose}, if a pair's difference has a standard deviation of {spread:.4g}."]
    if tune := asked["tune"]:
        grid = (1 + variants) * (len(tune["factors"]) + 1) * tune["seeds"]
        lines.append(f"The runs include at least {grid} of tuning, and the tuned pairs.")
    for line in (*lines, *warnings_of(design, spread)):
        console.print(line, soft_wrap=True, highlight=False)


def runs_of(asked: Mapping[str, Any], found: Outlook) -> int:
    """How many runs an experiment takes on average, if all variants have the same true difference."""
    variants, tune, first = len(asked["variants"]), asked["tune"], int(asked["looks"][0])
    pairs = found.longest(variants) + variants * found.pairs  # the baseline trains until the last variant ends
    if not tune:
        return round(1 + first + pairs)
    grid = (1 + variants) * (len(tune["factors"]) + 1) * int(tune["seeds"])
    return round(1 + first + 2 * pairs + grid)


def design_of(asked: Mapping[str, Any]) -> Design:
    """The design of each comparison of a plan."""
    return Design(asked["alpha"] / len(asked["variants"]), tuple(asked["looks"]), asked["delta"], asked["precision"])


def outlooks(design: Design, spread: float) -> Sequence[Outlook]:
    """At several true differences: shares of delta if there is one, else of the spread."""
    unit, times = (spread, TIMES_SPREAD) if design.delta is None else (design.delta, TIMES_DELTA)
    return [outlook(design, unit * each, spread) for each in times]


def warnings_of(design: Design, spread: float) -> list[str]:
    """What the design cannot reach, one line each."""
    if design.looks[-1] < FEWEST:
        return [f"warning: a verdict takes at least {FEWEST} pairs"]
    if design.delta is None:
        return []
    share = outlook(design, 0.0, spread).words[EQUIVALENT]
    if share >= ENOUGH:
        return []
    advice = f"give more pairs, or a delta of about {_delta_for(design, spread):.2g}, which is reached in {ENOUGH:.0%}"
    return [
        f"warning: a variant that changes nothing is found to differ by less than delta {design.delta:g} in only "
        f"{share:.0%} of experiments: {advice}"
    ]


def _delta_for(design: Design, spread: float) -> float:
    """The smallest delta for which no difference is found to be smaller in most experiments."""
    low, high = 0.0, 20 * spread
    for _ in range(12):
        middle = (low + high) / 2
        found = outlook(Design(design.level, design.looks, middle, design.precision), 0.0, spread)
        low, high = (low, middle) if found.words[EQUIVALENT] >= ENOUGH else (middle, high)
    return high
