"""A plan in words, as plain values and as a config: what was chosen, why, and the alternatives."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from lightning_llm.accounting.estimate import RunConfig
from lightning_llm.accounting.planner import DECISIONS, Planner, StepPlan
from lightning_llm.io.config_file import Section, merged
from lightning_llm.io.units import shown_size

OPTIONS = {"rows": "micro_batch_size"}  # of a config, where a decision has another name
VIEWS = {"gradient_as_bucket_view": True}
WITH_VIEWS = {"class_path": "lightning.pytorch.strategies.DDPStrategy", "init_args": VIEWS}


def described(plan: StepPlan) -> dict[str, Any]:
    """A plan as plain values, by the names of the options in a config."""
    setting = plan.setting
    return {
        **{OPTIONS.get(name, name): getattr(setting, name) for name in DECISIONS},
        "accumulation": plan.accumulation,
        "checkpoint_level": setting.checkpoint_level,
        "layers_at_level": dict(zip(("2", "1", "0"), setting.counts, strict=True)),
        "memory": dataclasses.asdict(plan.memory),
        "needed": plan.needed,
        "seconds": plan.time.seconds,
        "time": dataclasses.asdict(plan.time),
    }


def summary(plan: StepPlan, budget: str) -> str:
    """A plan in one line."""
    setting = plan.setting
    deep, shallow, rest = setting.counts
    levels = f"{deep} layers at level 2, {shallow} at 1, {rest} at 0, " if deep + shallow else ""
    reserve = plan.needed - plan.memory.peak
    free = f" and {shown_size(reserve)} left free, of {budget}" if reserve else f" of {budget}"
    return (
        f"micro-batches of {setting.rows}, {levels}recompute {setting.recompute}, loss_chunks "
        f"{_shown(setting.loss_chunks)}: predicted peak {shown_size(plan.memory.peak)}{free}"
    )


def chosen_options(plan: StepPlan) -> dict[str, Any]:
    """What a plan sets within a run, by the dotted names of its options."""
    setting = plan.setting
    return {
        "model.architecture.checkpoint_level": setting.checkpoint_level,
        "model.architecture.recompute": setting.recompute,
        "model.loss_chunks": setting.loss_chunks,
        "data.micro_batch_size": setting.rows,
    }


def config_for(run: RunConfig, plan: StepPlan) -> Section:
    """The user's config with the chosen settings, complete for ``fit``."""
    setting, step = plan.setting, run.step
    trainer, model = (dict(run.raw.get(section) or {}) for section in ("trainer", "model"))
    trainer.pop("accumulate_grad_batches", None)  # follows from the micro-batch
    for name in ("memory_budget", "memory_reserve"):  # the chosen setting keeps to it
        model.pop(name, None)
    levels = {"checkpoint_level": setting.checkpoint_level, "recompute": setting.recompute}
    chosen_model: Section = {"architecture": levels, "loss_chunks": setting.loss_chunks}
    if setting.state_dtype is not None:
        optimizer = model.get("optimizer")
        arguments = optimizer.get("init_args") or {} if isinstance(optimizer, dict) else {}
        arguments = {**arguments, "state_dtype": setting.state_dtype}
        chosen_model["optimizer"] = {"class_path": "lightning_llm.optim.AdamW", "init_args": arguments}
    chosen_trainer: Section = {"precision": step.precision}
    if step.world_size > 1:
        has_views = setting.strategy == "ddp" and step.gradient_views
        chosen_trainer["strategy"] = WITH_VIEWS if has_views else setting.strategy
        if trainer.get("devices") in (None, "auto", -1):
            chosen_trainer["devices"] = step.world_size // (trainer.get("num_nodes") or 1)
    chosen = {"model": chosen_model, "data": {"micro_batch_size": setting.rows}, "trainer": chosen_trainer}
    return merged({**run.raw, "model": model, "trainer": trainer}, chosen)


def decisions(planner: Planner, chosen: StepPlan, others: Mapping[str, StepPlan | None], memory: int) -> list[str]:
    """A line for each decision: what it is, and what the best plan that decides otherwise would take."""
    lines = [_levels_line(planner, chosen, memory)] if planner.deepest else []
    for decision, other in others.items():
        choice = getattr(chosen.setting, decision)
        line = f"{OPTIONS.get(decision, decision)} {_shown(choice)}: "
        if other is None:
            lines.append(f"{line}nothing else fits")
            continue
        line += f"the next best, {_shown(getattr(other.setting, decision))}, takes {_cost_against(other, chosen)}"
        lines.append(line + (_larger_rows(planner, chosen, memory) if decision == "rows" else ""))
    return lines


def frontier_table(frontier: Sequence[StepPlan], chosen: StepPlan) -> list[str]:
    """The frontier as lines for a terminal; the chosen plan has a star."""
    head = f"    {'memory':>14} {'s/step':>10}  micro  layers at 2/1/0  recompute  loss_chunks  state     strategy"
    return [head, *(_row(plan, "*" if plan.setting == chosen.setting else " ") for plan in frontier)]


def _row(plan: StepPlan, mark: str) -> str:
    setting = plan.setting
    levels = "/".join(map(str, setting.counts))
    return (
        f"  {mark} {shown_size(plan.needed):>14} {plan.time.seconds:>10.4g}  {setting.rows:>5}  {levels:<15}  "
        f"{setting.recompute:<9}  {_shown(setting.loss_chunks):<11}  {_shown(setting.state_dtype):<8}  "
        f"{setting.strategy}"
    )


def _levels_line(planner: Planner, chosen: StepPlan, memory: int) -> str:
    setting = chosen.setting
    layers, (deep, shallow, rest) = sum(setting.counts), setting.counts
    line = f"checkpoint_level: {deep} of {layers} layers at 2, {shallow} at 1"
    if not deep + shallow:
        return f"{line}: nothing has to be recomputed in the MLPs"
    all_saved = planner.plan(dataclasses.replace(setting, counts=(0, 0, layers)))
    saved, cost = all_saved.memory.peak - chosen.memory.peak, chosen.time.seconds / all_saved.time.seconds - 1
    counts = (deep, shallow - 1, rest + 1) if shallow else (deep - 1, shallow, rest + 1)
    fewer = planner.needed(dataclasses.replace(setting, counts=counts))
    return (
        f"{line}: saves {shown_size(saved)}, costs {cost:.1%} of the time; one layer fewer would need "
        f"{shown_size(fewer)} of {shown_size(memory)}"
    )


def _larger_rows(planner: Planner, chosen: StepPlan, memory: int) -> str:
    larger = [rows for rows in planner.rows if rows > chosen.setting.rows]
    if not larger:
        return "; it is all of a step's rows"
    needed = planner.needed(dataclasses.replace(chosen.setting, rows=larger[0]))
    fits = "fits, but is not faster" if needed <= memory else f"would need {shown_size(needed)}"
    return f"; with nothing else changed {larger[0]} {fits}"


def _cost_against(other: StepPlan, chosen: StepPlan) -> str:
    slower, extra = other.time.seconds / chosen.time.seconds - 1, other.memory.peak - chosen.memory.peak
    word = "more" if extra >= 0 else "less"
    return f"{slower:+.1%} of the time and {shown_size(abs(extra))} {word}"


def _shown(value: object) -> str:
    return "null" if value is None else str(value)
