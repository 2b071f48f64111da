"""``lightning-llm plan --config FILE --memory 80GiB``: the fastest setting that fits, and a config for ``fit``.

The search is in ``accounting/planner.py``; docs/accounting.md lists what the predicted time assumes.
"""

import argparse
import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from lightning_llm.accounting.estimate import RunConfig
from lightning_llm.accounting.plan_report import config_for, decisions, described, frontier_table
from lightning_llm.accounting.planner import Planner, SearchSpace, StepPlan, choose
from lightning_llm.accounting.step_settings import STRATEGIES
from lightning_llm.accounting.step_time import GENERIC, LINK_BANDWIDTH, MATMUL_SHARE, CostModel
from lightning_llm.cli.estimate import add_run_options
from lightning_llm.cli.subcommand import OneLineParser, size_option, subcommand
from lightning_llm.io.atomic import write_json, write_text
from lightning_llm.io.shell import shell_path
from lightning_llm.io.units import GIB, shown_size
from lightning_llm.training.run_config import RunOptions, read_run

PATIENCE = 1.0  # seconds before progress is shown
TRACES = 24  # about as many as a plan with its frontier needs


def _options(parser: OneLineParser) -> None:
    add_run_options(parser)
    add = parser.add_argument
    add("--memory", type=size_option, required=True, metavar="SIZE", help="memory of each device, e.g. 80GiB")
    state = "allow AdamW's state in bfloat16, which changes results slightly; no other choice does"
    add("--allow-bf16-state", action="store_true", help=state)
    share = "fraction of the device's peak that large matmuls reach (default: %(default)s, assumed)"
    add("--matmul-share", type=float, default=MATMUL_SHARE, metavar="U", help=share)
    link = "bytes per second between processes (default: 100GB, assumed)"
    add("--link-bandwidth", type=size_option, default=int(LINK_BANDWIDTH), metavar="SIZE", help=link)
    add("--out", type=Path, metavar="FILE", help="write your config with the chosen settings")
    add("--overwrite", action="store_true", help="let --out replace an existing file")
    add("--png", type=Path, metavar="FILE", help="plot the frontier: memory against time")


@subcommand(_options)
def run_plan(options: argparse.Namespace) -> None:
    """Find the fastest settings of a run that fit in a device's memory, and write their config."""
    if options.out is not None and options.out.exists() and not options.overwrite:
        raise ValueError(f"--out {options.out} exists: choose another file, or add --overwrite")
    run = read_run(RunOptions.of(options))
    space = search_space_of(run, options)
    memory = space.cost_model.device.memory_within(options.memory)
    with progress() as tick:
        planner = Planner(space, tick)
        chosen = _choose(planner, run, memory)
        others = planner.next_best(chosen, memory)
        frontier = planner.frontier(memory)
        of_decisions = decisions(planner, chosen, others, memory)  # traces the next larger micro-batch
    print("\n".join(_heading(run, planner, chosen, memory, asked=options.memory)))
    print("\n".join(of_decisions))
    print("\n".join(["", "memory against time", *frontier_table(frontier, chosen)]))
    if options.json is not None:
        plans = {
            "chosen": described(chosen),
            "next_best": {name: None if plan is None else described(plan) for name, plan in others.items()},
            "frontier": [described(plan) for plan in frontier],
        }
        write_json(options.json, {"memory": memory, **plans, "assumed": _assumed(run, space.cost_model)})
    if options.png is not None:
        draw(frontier, chosen, options.png)
    if options.out is not None:
        header = f"# Made by lightning-llm plan for {shown_size(memory)} on {space.cost_model.device.name}.\n"
        body = yaml.safe_dump(config_for(run, chosen), sort_keys=False, default_flow_style=None, width=120)
        write_text(options.out, header + body)
        print(f"\n  lightning-llm fit --config {shell_path(options.out)}")


def _heading(run: RunConfig, planner: Planner, chosen: StepPlan, memory: int, *, asked: int) -> Iterator[str]:
    """The run, what is assumed, and the predicted peak and time."""
    step = planner.space.step
    device = planner.space.cost_model.device
    size = shown_size(memory)
    rows = f"{planner.rows[-1] * step.world_size} rows of {step.context_length} tokens a step"
    yield f"{rows}, {step.precision}, on {step.world_size} × {device.name} with {size} each"
    yield from [*([run.sizing.in_words()] if run.sizing else []), *run.notes]
    if run.precision_reason:
        yield f"precision auto is {step.precision}: {run.precision_reason}"
    if device.source == "assumed":
        yield "the peaks of this device are assumed: trust the order of settings more than their seconds"
    if memory < asked:
        yield f"{shown_size(asked)} is more than {device.name} reports, which is {size}"
    if reserve := chosen.needed - chosen.memory.peak:
        yield f"the plan leaves {shown_size(reserve)} of it free: {run.reserve} (--reserve SIZE changes this)"
    yield f"\npredicted peak {shown_size(chosen.memory.peak)}, at {chosen.memory.peak_point}"
    yield f"predicted time {chosen.time.seconds:.4g} s a step, {chosen.accumulation} micro-batches\n"


def _assumed(run: RunConfig, cost: CostModel) -> dict[str, Any]:
    return {
        "precision": run.step.precision if run.precision_reason else None,
        "matmul_share": cost.matmul_share,
        "link_bandwidth": cost.link_bandwidth,
        "device": cost.device.name,
        "device_source": cost.device.source,
        "reserve": dataclasses.asdict(run.reserve),
    }


def search_space_of(run: RunConfig, options: argparse.Namespace) -> SearchSpace:
    """The planner's input.

    Raises:
        ValueError: An option out of range.
    """
    if not 0 < options.matmul_share <= 1:
        raise ValueError(f"--matmul-share must be above 0 and at most 1, got {options.matmul_share}")
    if options.link_bandwidth <= 0:
        raise ValueError("--link-bandwidth must be above 0")
    if options.allow_bf16_state and not run.optimizer.is_own_adamw:
        raise ValueError(f"--allow-bf16-state is for lightning_llm.optim.AdamW, the optimizer is {run.optimizer.name}")
    strategies = STRATEGIES if options.strategy is None else (options.strategy,)
    may_change_state = options.allow_bf16_state and run.optimizer.state_dtype is None
    return SearchSpace(
        config=run.config,
        step=run.step,
        global_batch_size=run.global_batch_size,
        cost_model=CostModel(
            device=run.device or GENERIC["cpu"],
            matmul_share=options.matmul_share,
            link_bandwidth=options.link_bandwidth,
            tf32=run.tf32,
        ),
        strategies=strategies if run.step.world_size > 1 else ("ddp",),
        loss_chunks=tuple(dict.fromkeys((None, run.step.loss_chunks))),
        state_dtypes=(None, "bfloat16") if may_change_state else (run.optimizer.state_dtype,),
        reserve=run.reserve,
    )


def draw(frontier: Sequence[StepPlan], chosen: StepPlan, path: Path) -> None:
    """Memory against time as a PNG; the color of a plan says what is recomputed."""
    from lightning_llm.io.charts import chart, legend

    groups: dict[str, list[tuple[float, float]]] = {}
    for plan in frontier:
        parts = [f"MLPs at level {plan.choice.checkpoint_level}"] if plan.choice.checkpoint_level else []
        parts += [f"recompute {plan.choice.recompute}"] if plan.choice.recompute != "none" else []
        kind = ", ".join(parts) or "nothing recomputed"
        groups.setdefault(kind, []).append((plan.needed / GIB, plan.time.seconds))
    with chart(path, "Predicted memory and time of a step", height=3.6) as [[axis]]:
        for kind, places in groups.items():
            axis.plot(*zip(*places, strict=True), "o", label=kind)
        axis.plot(chosen.needed / GIB, chosen.time.seconds, "k*", ms=16, mfc="none", label="chosen")
        axis.set(xlabel="memory of a device, GiB (lower is better)", ylabel="time, s/step (lower is better)")
        axis.margins(0.1)  # a point at the edge would be cut
        axis.set(xlim=(0, None), ylim=(0, None))
        axis.grid()
        legend(axis, fontsize=9)


@contextmanager
def progress() -> Iterator[Callable[[], None]]:
    """A progress bar, shown if planning takes longer than a second; yields what to call after each trace."""
    from rich.progress import Progress

    from lightning_llm.io.console import Console

    bar = Progress(console=Console(stderr=True), transient=True)
    started = time.perf_counter()
    task = bar.add_task("planning", total=TRACES)

    def tick() -> None:
        bar.advance(task)
        done = int(bar.tasks[0].completed)
        if not bar.live.is_started and time.perf_counter() - started > PATIENCE:
            bar.update(task, total=max(TRACES, 2 * done))
            bar.start()
        elif done >= (bar.tasks[0].total or 0):
            bar.update(task, total=done + 1)

    try:
        yield tick
    finally:
        bar.stop()


def _choose(planner: Planner, run: RunConfig, memory: int) -> StepPlan:
    try:
        return choose(planner, memory)
    except ValueError as error:
        if run.optimizer.is_own_adamw and planner.space.state_dtypes == (None,):
            saving = planner.with_state("bfloat16").fastest(memory)
            if saving is not None:
                enough = f"{saving.needed:,} bytes are enough: add --allow-bf16-state"
                advice = f"with AdamW's state in bfloat16, which changes results slightly, {enough}"
                raise ValueError(f"{error}; {advice}") from error
        raise
