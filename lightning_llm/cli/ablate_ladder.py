"""``lightning-llm ablate`` with a ladder: its sizes are planned together and carried out one after another."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from lightning_llm.ablate.experiment import Experiment
from lightning_llm.ablate.ladder import (
    LADDER,
    PREDICTIONS,
    at_size,
    check_reach,
    folder_of_size,
    freeze_ladder,
    predicted_sizes,
    prediction_of,
    read_ladder,
    store_prediction,
    with_further,
    with_tuned,
)
from lightning_llm.ablate.names import PLAN
from lightning_llm.ablate.plan import Plan
from lightning_llm.ablate.plan_tables import show_cost_estimates
from lightning_llm.ablate.report.from_sizes import ladder_report, prediction_for, tuned_factors
from lightning_llm.ablate.report.report import show_written
from lightning_llm.ablate.results import load_experiment
from lightning_llm.ablate.reuse import REUSES
from lightning_llm.cli import ablate_run
from lightning_llm.io.console import Console
from lightning_llm.io.shell import shell_path

if TYPE_CHECKING:
    from lightning_llm.ablate.fit.planning import FitDraft


def run_ladder(ladder: Experiment, options: argparse.Namespace) -> None:
    """Carry out an experiment at all of its sizes, the smallest first; all of them are read and planned before.

    With ``tune``, the larger ones are planned when the smallest has ended.
    """
    out = Path(ladder.folder)
    drafts: dict[str, FitDraft] = {}
    if (out / LADDER).exists():
        frozen, _ = read_ladder(out)
        if frozen != replace(ladder, out=str(out)):
            advice = f"give another --out, or finish that one: lightning-llm ablate run {shell_path(out)}"
            raise ValueError(f"{out} has another ladder: {advice}")
    else:
        drafts = {size: _draft_of(ladder, size, options) for size in (*ladder.sizes, ladder.predict) if size}
        computes = {size: draft.compute for size, draft in drafts.items()}
        check_reach(ladder, computes)
        if options.dry_run:
            show_cost_estimates({size: drafts[size].cost_estimate(options.workers) for size in ladder.sizes}, Console())
            return
        freeze_ladder(ladder, computes)
    groups = [ladder.sizes] if ladder.tune is None else [ladder.sizes[:1], ladder.sizes[1:]]
    for sizes in groups:
        for plan in [_plan_of(ladder, size, options, drafts.get(size)) for size in sizes]:
            ablate_run.run_experiment(plan, options.workers, options.slurm)
        smallest = folder_of_size(ladder, ladder.sizes[0])
        if sizes is not groups[-1] and load_experiment(smallest).state.needed:
            ablate_run.print_notes([f"run this again when {smallest} has ended: its tuning comes first"])
            return
    if options.slurm is None:
        write_ladder(out)


def _plan_of(
    ladder: Experiment, size: str, options: argparse.Namespace, draft: "FitDraft | None" = None, prediction: str = ""
) -> Plan:
    """The plan of a size: that of its folder, or a new one."""
    if (folder_of_size(ladder, size) / PLAN).exists():
        return Plan.read(folder_of_size(ladder, size))
    from lightning_llm.ablate.planning import plan_of

    draft = draft or _draft_of(ladder, size, options)
    if ladder.tune is not None and size != ladder.sizes[0]:
        option = ladder.tune.option
        factors = tuned_factors(ladder)
        values = {name: value * factors[name] for name, value in draft.tuned_values(option).items()}
        draft = ablate_run.draft_of(with_tuned(at_size(ladder, size), option, values), quiet=True)
    reuse = getattr(options, "reuse", None) or REUSES[0]
    return plan_of(draft, options.workers, reuse=reuse, prediction=prediction)


def _draft_of(ladder: Experiment, size: str, options: argparse.Namespace) -> "FitDraft":
    path = options.folder if options.action == "extend" else Path(options.experiment)
    source = path / LADDER if path.is_dir() else path
    return ablate_run.draft_of(at_size(ladder, size), source=source)


def write_ladder(out: Path) -> None:
    """Write the report of a ladder, and print it."""
    show_written(ladder_report(*read_ladder(out)))


def extend_ladder(options: argparse.Namespace) -> None:
    """Store the prediction of a further size, then train it."""
    ladder, computes = read_ladder(options.folder)
    size = options.size
    ladder = with_further(ladder, size, predicted_sizes(ladder))
    prediction = prediction_of(ladder, size)
    if prediction is None:
        computes[size] = _draft_of(ladder, size, options).compute
        check_reach(ladder, computes)
        prediction = store_prediction(ladder, prediction_for(ladder, computes))
        ablate_run.print_notes([f"stored the prediction for {size}: {options.folder / PREDICTIONS / size}.json"])
    plan = _plan_of(ladder, size, options, prediction=prediction.hash)
    ablate_run.run_experiment(plan, options.workers, options.slurm)
    if options.slurm is None:
        write_ladder(options.folder)
