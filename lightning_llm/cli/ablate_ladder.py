"""``lightning-llm ablate`` with a ladder: its sizes are planned together and carried out one after another."""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_llm.ablate.ladder import (
    LADDER,
    PROMISES,
    Ladder,
    check_reach,
    freeze_ladder,
    promise_of,
    promised_sizes,
    read_ladder,
    store_promise,
    with_tuned,
)
from lightning_llm.ablate.ladder_report import HEAD, lines_of, promise_for, table_of, tuned_factors, write_ladder_report
from lightning_llm.ablate.plan import PLAN, Plan
from lightning_llm.ablate.results import load_experiment
from lightning_llm.ablate.reuse import REUSES
from lightning_llm.ablate.screen import show_outlays, show_table
from lightning_llm.cli import ablate_run
from lightning_llm.io.console import Console
from lightning_llm.io.shell import shell_path

if TYPE_CHECKING:
    from lightning_llm.ablate.setup import Setup


def climb(ladder: Ladder, options: argparse.Namespace) -> None:
    """Carry out the experiments of a ladder, the smallest size first; all of them are read and planned before.

    With ``tune``, the larger ones are planned when the smallest has ended.
    """
    setups: dict[str, Setup] = {}
    if (ladder.out / LADDER).exists():
        frozen, _ = read_ladder(ladder.out)
        if frozen.asked != ladder.asked:
            advice = f"give another --out, or finish that one: lightning-llm ablate run {shell_path(ladder.out)}"
            raise ValueError(f"{ladder.out} has another ladder: {advice}")
    else:
        setups = {size: _set_up(ladder, size, options) for size in (*ladder.sizes, ladder.target) if size}
        computes = {size: setup.compute for size, setup in setups.items()}
        check_reach(ladder, computes)
        if options.dry_run:
            show_outlays({size: setups[size].outlay(options.workers) for size in ladder.sizes}, Console())
            return
        freeze_ladder(ladder, computes)
    groups = [ladder.sizes] if ladder.tuned_option is None else [ladder.sizes[:1], ladder.sizes[1:]]
    for sizes in groups:
        for plan in [_plan_of(ladder, size, options, setups.get(size)) for size in sizes]:
            ablate_run.carry_out(plan, options.workers, options.slurm)
        if sizes is not groups[-1] and load_experiment(ladder.folder(ladder.smallest)).state.needed:
            ablate_run.say([f"run this again when {ladder.folder(ladder.smallest)} has ended: its tuning comes first"])
            return
    if options.slurm is None:
        write_ladder(ladder.out)


def _plan_of(
    ladder: Ladder, size: str, options: argparse.Namespace, setup: "Setup | None" = None, promise: str = ""
) -> Plan:
    """The plan of a size: that of its folder, or a new one."""
    if (ladder.folder(size) / PLAN).exists():
        return Plan.read(ladder.folder(size))
    more = {"promise": promise} if promise else None
    setup = setup or _set_up(ladder, size, options, more)
    if (option := ladder.tuned_option) is not None and size != ladder.smallest:
        from lightning_llm.ablate.setup import tuned_value

        factors = tuned_factors(ladder)
        values = {name: tuned_value(arm, option) * factors[name] for name, arm in setup.arms.items()}
        experiment = with_tuned(ladder.experiment(size), option, values)
        setup = ablate_run.set_up(experiment, [], reuse=_reuse(options), more=more, quiet=True)
    return setup.plan(options.workers)


def _set_up(ladder: Ladder, size: str, options: argparse.Namespace, more: Mapping[str, Any] | None = None) -> "Setup":
    path = options.folder if options.action == "extend" else Path(options.experiment)
    source = path / LADDER if path.is_dir() else path
    return ablate_run.set_up(ladder.experiment(size), [], source=source, reuse=_reuse(options), more=more)


def _reuse(options: argparse.Namespace) -> str:
    return getattr(options, "reuse", None) or REUSES[0]


def write_ladder(out: Path) -> None:
    """Write the report of a ladder, and print it."""
    report, page = write_ladder_report(*read_ladder(out))
    show_table([row for row, _ in table_of(report)], HEAD, lines_of(report), Console())
    print(f"Written: {page}")


def extend_ladder(options: argparse.Namespace) -> None:
    """Store the prediction of a further size, then train it."""
    ladder, computes = read_ladder(options.folder)
    ladder = ladder.with_target(options.size, promised_sizes(ladder))
    if (stored := promise_of(ladder, options.size)) is None:
        computes[options.size] = _set_up(ladder, options.size, options).compute
        check_reach(ladder, computes)
        digest = store_promise(ladder, promise_for(ladder, computes))
        ablate_run.say([f"stored the prediction for {options.size}: {ladder.out / PROMISES / options.size}.json"])
    else:
        digest = stored["hash"]
    plan = _plan_of(ladder, options.size, options, promise=digest)
    ablate_run.carry_out(plan, options.workers, options.slurm)
    if options.slurm is None:
        write_ladder(ladder.out)
