"""What an experiment will find, and what it takes: what ``ablate power`` prints. No torch."""

from collections.abc import Sequence

from lightning_llm.ablate.experiment import Experiment
from lightning_llm.statistics.design import FEWEST, Design
from lightning_llm.statistics.power import Outlook, outlook
from lightning_llm.statistics.verdict import EQUIVALENT

TIMES_DELTA, TIMES_SPREAD = (0, 0.5, 1, 2, 4), (0, 0.5, 1, 2, 3)  # true differences in the table
ENOUGH = 0.8


def runs_of(experiment: Experiment, expected: Outlook) -> int:
    """How many runs an experiment takes on average, if all variants have the same true difference."""
    variants, first = len(experiment.variants), experiment.looks[0]
    pairs = expected.longest(variants) + variants * expected.pairs  # the baseline trains until the last variant ends
    families = 1 if experiment.tune is None else 2
    return round(1 + first + families * pairs + runs_of_tuning(experiment))


def runs_of_tuning(experiment: Experiment) -> int:
    """How many runs the first grid and the vertices take; 0: nothing is tuned."""
    if (tune := experiment.tune) is None:
        return 0
    return (1 + len(experiment.variants)) * (len(tune["factors"]) + 1) * int(tune["seeds"])


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
        expected = outlook(Design(design.level, design.looks, middle, design.precision), 0.0, spread)
        low, high = (low, middle) if expected.words[EQUIVALENT] >= ENOUGH else (middle, high)
    return high
