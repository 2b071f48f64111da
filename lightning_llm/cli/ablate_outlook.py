"""The table of ``ablate power``, which is printed before the first run too."""

from rich.box import SIMPLE_HEAD
from rich.table import Column, Table

from lightning_llm.ablate.experiment import Experiment
from lightning_llm.ablate.history import Spread
from lightning_llm.ablate.outlook import outlooks, runs_of, runs_of_tuning, warnings_of
from lightning_llm.io.console import Console
from lightning_llm.statistics.verdict import EQUIVALENT, UNDECIDED


def show_outlook(experiment: Experiment, spread: Spread, console: Console) -> None:
    """Print how likely each verdict is, by which look, and how many runs that takes.

    Args:
        experiment: What is planned.
        spread: Standard deviation of the difference of one pair.
        console: Where to.
    """
    design, variants = experiment.design, len(experiment.variants)
    goal = "verdict" if design.precision is None else f"±{design.precision:g}"
    looks = "/".join(map(str, design.looks))
    by_look = Column(f"{goal} by {looks}, %", min_width=4 * len(design.looks))
    columns = ("true difference", "better or worse", "equivalent", "undecided", by_look, "pairs", "runs")
    table = Table(*columns, box=SIMPLE_HEAD, pad_edge=False)
    for expected in outlooks(design, spread.value):
        shares = (expected.direction, expected.words[EQUIVALENT], expected.words[UNDECIDED])
        ended = "/".join(f"{100 * share:.0f}" for share in expected.ended.values())
        cells = (*(f"{share:.0%}" for share in shares), ended, f"{expected.pairs:.1f}")
        table.add_row(f"{expected.difference:g}", *cells, str(runs_of(experiment, expected)))
    console.print(table)
    whose = "the variant" if variants == 1 else f"each of {variants} variants"
    lines = [f"Probabilities for {whose}, if a pair's difference has a standard deviation of {spread}."]
    if grid := runs_of_tuning(experiment):
        lines.append(f"The runs include at least {grid} of tuning, and the tuned pairs.")
    for line in (*lines, *warnings_of(design, spread.value)):
        console.print(line, soft_wrap=True, highlight=False)
