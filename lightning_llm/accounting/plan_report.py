"""A plan in words, as plain values and as a config: what was chosen, why, and the alternatives."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from lightning_llm.accounting.estimate import RunConfig
from lightning_llm.accounting.planner import DECISIONS, Planner, StepPlan
from lightning_llm.io.config_file import Section, merged
from lightning_llm.io.units import shown_size

OPTION_NAMES = {"rows": "micro_batch_size"}  # of a config, where a decision has another name
WITH_VIEWS = {"class_path": "lightning.pytorch.strategies.DDPStrategy", "init_args": {"gradient_as_bucket_view": True}}


def described(plan: StepPlan) -> dict[str, Any]:
    """A plan as plain values, by the names of the options in a config."""
    choice = plan.choice
    return {
        **{OPTION_NAMES.get(name, name): getattr(choice, name) for name in DECISIONS},
        "accumulation": plan.accumulation,
        "memory": dataclasses.asdict(plan.memory),
        "needed": plan.needed,
        "seconds": plan.time.seconds,
        "time": dataclasses.asdict(plan.time),
    }


def summary(plan: StepPlan, budget: str) -> str:
    """A plan in one line."""
    choice = plan.choice
    level = f"checkpoint_level {choice.checkpoint_level}, " if choice.checkpoint_level else ""
    reserve = plan.needed - plan.memory.peak
    free = f" and {shown_size(reserve)} left free, of {budget}" if reserve else f" of {budget}"
    return (
        f"micro-batches of {choice.rows}, {level}recompute {choice.recompute}, loss_chunks "
        f"{_shown(choice.loss_chunks)}: predicted peak {shown_size(plan.memory.peak)}{free}"
    )


def chosen_options(plan: StepPlan) -> dict[str, Any]:
    """Options that a plan sets within a run, by their dotted names."""
    choice = plan.choice
    return {
        "model.architecture.checkpoint_level": choice.checkpoint_level,
        "model.architecture.recompute": choice.recompute,
        "model.loss_chunks": choice.loss_chunks,
        "data.micro_batch_size": choice.rows,
    }


def config_for(run: RunConfig, plan: StepPlan) -> Section:
    """The user's config with the chosen settings, complete for ``fit``."""
    choice, step = plan.choice, run.step
    trainer, model = (dict(run.raw.get(section) or {}) for section in ("trainer", "model"))
    trainer.pop("accumulate_grad_batches", None)  # follows from the micro-batch
    for name in ("memory_budget", "memory_reserve"):  # the choice keeps to it
        model.pop(name, None)
    levels = {"checkpoint_level": choice.checkpoint_level, "recompute": choice.recompute}
    chosen_model: Section = {"architecture": levels, "loss_chunks": choice.loss_chunks}
    if choice.state_dtype is not None:
        optimizer = model.get("optimizer")
        arguments = optimizer.get("init_args") or {} if isinstance(optimizer, dict) else {}
        arguments = {**arguments, "state_dtype": choice.state_dtype}
        chosen_model["optimizer"] = {"class_path": "lightning_llm.optim.AdamW", "init_args": arguments}
    chosen_trainer: Section = {"precision": step.precision}
    if step.world_size > 1:
        has_views = choice.strategy == "ddp" and step.gradient_views
        chosen_trainer["strategy"] = WITH_VIEWS if has_views else choice.strategy
        if trainer.get("devices") in (None, "auto", -1):
            chosen_trainer["devices"] = step.world_size // (trainer.get("num_nodes") or 1)
    chosen = {"model": chosen_model, "data": {"micro_batch_size": choice.rows}, "trainer": chosen_trainer}
    return merged({**run.raw, "model": model, "trainer": trainer}, chosen)


def decisions(planner: Planner, chosen: StepPlan, others: Mapping[str, StepPlan | None], memory: int) -> list[str]:
    """A line for each decision: what it is, and what the best plan that decides otherwise would take."""
    lines = []
    for decision, other in others.items():
        value = getattr(chosen.choice, decision)
        line = f"{OPTION_NAMES.get(decision, decision)} {_shown(value)}: "
        if other is None:
            lines.append(f"{line}nothing else fits")
            continue
        line += f"the next best, {_shown(getattr(other.choice, decision))}, takes {_cost_against(other, chosen)}"
        lines.append(line + (_larger_rows(planner, chosen, memory) if decision == "rows" else ""))
    return lines


def frontier_table(frontier: Sequence[StepPlan], chosen: StepPlan) -> list[str]:
    """The frontier as lines for a terminal; the chosen plan has a star."""
    head = f"    {'memory':>14} {'s/step':>10}  micro  level  recompute  loss_chunks  state     strategy"
    return [head, *(_row(plan, "*" if plan.choice == chosen.choice else " ") for plan in frontier)]


def _row(plan: StepPlan, mark: str) -> str:
    choice = plan.choice
    level, chunks, state = map(_shown, (choice.checkpoint_level, choice.loss_chunks, choice.state_dtype))
    return (
        f"  {mark} {shown_size(plan.needed):>14} {plan.time.seconds:>10.4g}  {choice.rows:>5}  {level:<5}  "
        f"{choice.recompute:<9}  {chunks:<11}  {state:<8}  {choice.strategy}"
    )


def _larger_rows(planner: Planner, chosen: StepPlan, memory: int) -> str:
    larger = [rows for rows in planner.rows if rows > chosen.choice.rows]
    if not larger:
        return "; it is all of a step's rows"
    needed = planner.plan(dataclasses.replace(chosen.choice, rows=larger[0])).needed  # traced, not interpolated
    fits = "fits, but is not faster" if needed <= memory else f"would need {shown_size(needed)}"
    return f"; with nothing else changed {larger[0]} {fits}"


def _cost_against(other: StepPlan, chosen: StepPlan) -> str:
    slower = other.time.seconds / chosen.time.seconds - 1
    extra = other.memory.peak - chosen.memory.peak
    word = "more" if extra >= 0 else "less"
    return f"{slower:+.1%} of the time and {shown_size(abs(extra))} {word}"


def _shown(value: object) -> str:
    return "null" if value is None else str(value)
