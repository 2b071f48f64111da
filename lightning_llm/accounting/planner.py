"""The fastest setting of a training step that fits a memory.

The planner chooses only what leaves the training as it is, up to rounding: the micro-batch (the global batch stays),
how many layers of the memory-optimized MLP are at level 2 and 1, what else is recomputed, whether the loss is cut into
chunks, DDP or FSDP2. The optimizer's state in bfloat16 changes results and is chosen only where it is allowed.

The search tries all choices but the levels in the order of the time that they would take with every layer at level 0,
and stops where that is more than the best found. For each it takes the levels that fit at the least time: more layers
at a level need less memory and more time, so their numbers are found by bisection. Memory comes from
``LayeredMemory``, of which a few dozen are enough.
"""

import bisect
import dataclasses
import math
from collections.abc import Callable
from functools import cache, partial
from itertools import product
from typing import Any

from lightning_llm.accounting.counts import Measured, parameters_by_part
from lightning_llm.accounting.global_batch import rows_per_micro_batch
from lightning_llm.accounting.hardware import Reserve
from lightning_llm.accounting.memory import (
    LEVELS,
    Counts,
    LayeredMemory,
    SharedMemory,
    activation_precision,
    most_that_fit,
    shared_memory,
    too_little,
)
from lightning_llm.accounting.step_time import CostModel, StepTime, step_time
from lightning_llm.model.config import ModelConfig, Recompute

STATE_BYTES = {None: None, "bfloat16": 2}  # of AdamW's state_dtype
DECISIONS = ("rows", "recompute", "loss_chunks", "state_dtype", "strategy")
FRONTIER_POINTS = 9
MOST_ROWS = 2**24  # of a step, for each process; it has at most 504 divisors
MOST_CHOICES = 64  # of the rows of a micro-batch


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """What is to be trained, and what may be chosen.

    Attributes:
        config: The model; levels and recomputation in it are ignored.
        cost_model: Of the device.
        context_length: Tokens per row.
        global_batch_size: Rows of a step.
        precision: ``32-true``, ``bf16-true`` or ``bf16-mixed``.
        world_size: Processes.
        strategies: Of them, those that may be chosen.
        gradient_views: DDP's gradients are views of its buckets.
        loss_chunks: Those that may be chosen.
        state_dtypes: Of the optimizer; those that may be chosen, the run's own first.
        state_per_parameter: As in ``step_memory``; a mean where parameters differ.
        document_mask: As in ``step_memory``.
        reserve: Memory of each device that tensors do not get.
        measured: As in ``step_memory``.
    """

    config: ModelConfig
    cost_model: CostModel
    context_length: int
    global_batch_size: int
    precision: str = "32-true"
    world_size: int = 1
    strategies: tuple[str, ...] = ("ddp",)
    gradient_views: bool = False
    loss_chunks: tuple[int | None, ...] = (None, 0)
    state_dtypes: tuple[str | None, ...] = (None,)
    state_per_parameter: float = 2
    document_mask: bool = False
    reserve: Reserve = dataclasses.field(default_factory=Reserve)
    measured: Measured = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """One choice.

    Attributes:
        rows: Of a micro-batch.
        counts: Layers at levels 2, 1 and 0, in this order from the first layer on.
        recompute: As in ``ModelConfig``.
        loss_chunks: As ``LanguageModel`` takes it.
        state_dtype: As AdamW takes it.
        strategy: One of ``STRATEGIES``.
    """

    rows: int
    counts: Counts
    recompute: Recompute
    loss_chunks: int | None
    state_dtype: str | None
    strategy: str

    @property
    def checkpoint_level(self) -> int | list[int]:
        """As ``ModelConfig`` takes it: a number where all layers have the same."""
        levels = [level for level, count in zip(LEVELS, self.counts, strict=True) for _ in range(count)]
        return levels[0] if len(set(levels)) == 1 else levels


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """A setting with what it takes; ``needed`` are the bytes of a device, with what tensors do not get."""

    setting: Setting
    accumulation: int
    memory: SharedMemory
    needed: int
    time: StepTime


class Planner:
    """Finds settings for one task, and remembers what it computed.

    Args:
        task: What is fixed, and what may be chosen.
        tick: Called whenever the memory of a setting was computed, which is what planning spends its time on.

    Raises:
        ValueError: The global batch cannot be divided by the processes, or the task is not covered by the accounting.
    """

    def __init__(self, task: Task, tick: Callable[[], object] = lambda: None) -> None:
        share = rows_per_micro_batch(task.global_batch_size, None, task.world_size)
        parameters_by_part(task.config, task.measured)  # reports what is not covered before anything else fails on it
        self.task, self._tick = task, tick
        if share > MOST_ROWS:
            raise ValueError(f"global_batch_size has {share} rows for each process, expected at most {MOST_ROWS}")
        self.rows = row_counts(share)
        self.deepest = 0  # the highest level that the model can have
        if task.config.mlp == "memory_optimized_swiglu":
            self.deepest = 2 if task.config.norm == "rmsnorm" and task.config.block != "post" else 1
        self._layered = cache(self._layered_memory)
        self.memory, self.time = cache(self._memory), cache(self._time)
        # the memory-optimized MLP has levels for what recomputing an MLP does
        recompute = ("none", "attention", "block") if self.deepest else ("none", "mlp", "attention", "block")
        choices = product(self.rows, recompute, task.loss_chunks, task.state_dtypes, task.strategies)
        chosen: list[dict[str, Any]] = [dict(zip(DECISIONS, choice, strict=True)) for choice in choices]
        groups = [Setting(**choice, counts=(0, 0, task.config.num_hidden_layers)) for choice in chosen]
        self._groups = sorted(groups, key=lambda group: self.time(group).seconds)

    # -- what a setting takes -----------------------------------------------------------------------------------------

    def accumulation(self, setting: Setting) -> int:
        """Micro-batches per step."""
        return self.task.global_batch_size // (self.task.world_size * setting.rows)

    def _memory(self, setting: Setting) -> SharedMemory:
        """Bytes on each process."""
        task, accumulation = self.task, min(2, self.accumulation(setting))
        precision = activation_precision(task.precision, setting.strategy if task.world_size > 1 else "ddp")
        step = {"rows": setting.rows, "loss_chunks": setting.loss_chunks, "accumulation": accumulation}
        points = self._layered(setting.recompute, precision=precision, **step).at(setting.counts)
        memory = shared_memory(task.config, points, gradient_views=task.gradient_views, **self._options(setting))
        self._tick()
        return memory

    def _layered_memory(self, recompute: Recompute, **settings: Any) -> LayeredMemory:
        config, task = dataclasses.replace(self.task.config, recompute=recompute), self.task
        run = {"context_length": task.context_length, "document_mask": task.document_mask, "measured": task.measured}
        return LayeredMemory(config, device=task.cost_model.kind, **run, **settings)

    def _time(self, setting: Setting) -> StepTime:
        """Seconds of a step."""
        return step_time(
            configured(self.task.config, setting),
            self.task.cost_model,
            rows=setting.rows,
            context_length=self.task.context_length,
            loss_chunks=setting.loss_chunks,
            **self._options(setting),
        )

    def _options(self, setting: Setting) -> dict[str, Any]:
        """What memory and time both depend on."""
        return {
            "precision": self.task.precision,
            "measured": self.task.measured,
            "strategy": setting.strategy,
            "world_size": self.task.world_size,
            "accumulation": self.accumulation(setting),
            "state_per_parameter": self.task.state_per_parameter,
            "state_itemsize": STATE_BYTES[setting.state_dtype],
        }

    def needed(self, setting: Setting) -> int:
        """Bytes of each device, with what tensors do not get."""
        return self.task.reserve.around(self.memory(setting).peak)

    def plan(self, setting: Setting) -> Plan:
        """The setting with all of it."""
        taken: dict[str, Any] = {name: getattr(self, name)(setting) for name in ("memory", "needed", "time")}
        return Plan(setting=setting, accumulation=self.accumulation(setting), **taken)

    # -- searching ----------------------------------------------------------------------------------------------------

    def fastest(self, memory: float, allowed: Callable[[Setting], bool] = lambda group: True) -> Plan | None:
        """The setting of the least time that needs at most ``memory`` bytes; of equals the one that needs less.

        Args:
            memory: Bytes of a device; ``inf`` for no limit.
            allowed: Whether a choice may be taken; asked with every layer at level 0.
        """
        best: Setting | None = None
        most: dict[Setting, int] = {}  # rows, by what else is chosen
        for group in filter(allowed, self._groups):
            if best is not None and self.time(group).seconds > self.time(best).seconds:
                break
            rest = dataclasses.replace(group, rows=self.rows[0])
            if rest not in most:
                most[rest] = self._most_rows(rest, memory)
            if group.rows <= most[rest] or group.rows == self.rows[-1]:
                found = self._fitting(group, memory)
                best = min([best, *found] if best else found, key=self._rank, default=None)
        return None if best is None else self.plan(best)

    def smallest(self) -> Plan:
        """The setting that needs the least memory, but for a mix of levels that may need 1 % less."""
        candidates = [
            dataclasses.replace(group, counts=counts)
            for group in self._groups
            if group.rows in (self.rows[0], self.rows[-1])  # the whole batch has no gradients in forward
            for counts in self._extremes()
        ]
        return self.plan(min(candidates, key=lambda setting: self.memory(setting).peak))

    def frontier(self, memory: int) -> list[Plan]:
        """Plans for memories from the smallest that does to twice the given: less time for more memory."""
        low = self.smallest().needed
        ratio = max(1.0, 2 * memory / low)
        budgets = [low * ratio ** (step / (FRONTIER_POINTS - 1)) for step in range(FRONTIER_POINTS)]
        found: list[Plan] = []
        for budget in sorted((low, *budgets[1:], memory)):
            plan = self.fastest(budget)
            if plan is not None and (not found or plan.time.seconds < found[-1].time.seconds):
                found.append(plan)
        return found

    def next_best(self, chosen: Plan, memory: float) -> dict[str, Plan | None]:
        """For each decision the best plan that decides otherwise; ``None`` where nothing else fits."""

        def unlike(decision: str) -> Callable[[Setting], bool]:
            return lambda group: getattr(group, decision) != getattr(chosen.setting, decision)

        open_decisions = [name for name in DECISIONS if len({getattr(group, name) for group in self._groups}) > 1]
        return {decision: self.fastest(memory, unlike(decision)) for decision in open_decisions}

    def _rank(self, setting: Setting) -> tuple[float, int]:
        return self.time(setting).seconds, self.memory(setting).peak

    def _fits(self, setting: Setting, memory: float) -> bool:
        return self.needed(setting) <= memory

    def _most_rows(self, rest: Setting, memory: float) -> int:
        """The most rows, of those that need several micro-batches, that fit with any levels; 0 for none."""

        def fits(number: int) -> bool:
            group = dataclasses.replace(rest, rows=self.rows[number - 1])
            return any(self._fits(dataclasses.replace(group, counts=own), memory) for own in reversed(self._extremes()))

        number = most_that_fit(fits, len(self.rows) - 1)
        return self.rows[number - 1] if number else 0

    def _fitting(self, group: Setting, memory: float) -> list[Setting]:
        """The levels that fit, those of the least time among them."""
        layers, deepest = self.task.config.num_hidden_layers, self.deepest
        if self._fits(group, memory):
            return [group]

        def at(deep: int, shallow: int) -> Setting:
            return dataclasses.replace(group, counts=(deep, shallow, layers - deep - shallow))

        def fewest(low: int, high: int, at: Callable[[int], Setting]) -> int:
            """The smallest count whose setting fits, if all larger ones do, ``high`` among them."""
            return low + bisect.bisect_left(range(low, high), True, key=lambda count: self._fits(at(count), memory))

        found: list[Setting] = []
        low = most = 0  # layers that fit, at one level alone
        alone: Callable[[int], Setting]
        for level, alone in ((1, partial(at, 0)), (2, partial(at, shallow=0))):
            # all layers, or all but the last, which is recomputed at the peak and so may need more
            counts = [count for count in (layers, layers - 1) if count and level <= deepest]
            most = next((count for count in counts if self._fits(alone(count), memory)), 0)
            if most:
                low = fewest(1, most, alone)
                found.append(alone(low))
        if not most:  # at level 2
            return found
        best = self.time(at(low, 0)).seconds
        for touched in range(low, most + 1):  # more layers, but at level 1, may be cheaper than fewer at level 2
            if self.time(at(0, touched)).seconds >= best:
                break

            def split(deep: int, touched: int = touched) -> Setting:
                return at(deep, touched - deep)

            found.append(split(fewest(0, touched, split)))
            best = min(best, self.time(found[-1]).seconds)
        return found

    def _extremes(self) -> list[Counts]:
        """Levels among which are those of the least memory."""
        layers = self.task.config.num_hidden_layers
        shallow, deep = [(0, layers, 0), (0, layers - 1, 1)], [(layers, 0, 0), (layers - 1, 0, 1)]
        return [(0, 0, layers), *(shallow if self.deepest else []), *(deep if self.deepest == 2 else [])]


def divisors(number: int) -> list[int]:
    """All divisors, increasing."""
    low = [each for each in range(1, math.isqrt(number) + 1) if number % each == 0]
    return sorted({*low, *(number // each for each in low)})


def row_counts(share: int) -> list[int]:
    """The rows that a micro-batch may have: the divisors, but of very many only those at least a quarter apart."""
    found = divisors(share)
    if len(found) <= MOST_CHOICES:
        return found
    kept = found[:1]
    for rows in found[1:-1]:
        kept += [rows] if rows >= 1.25 * kept[-1] else []
    return [*kept, found[-1]]


def configured(config: ModelConfig, setting: Setting) -> ModelConfig:
    """The model with a setting's levels and recomputation."""
    return dataclasses.replace(config, checkpoint_level=setting.checkpoint_level, recompute=setting.recompute)


def choose(planner: Planner, memory: int) -> Plan:
    """The fastest plan.

    Raises:
        ValueError: Nothing fits; the message gives the smallest memory that fits.
    """
    found = planner.fastest(memory)
    if found is None:
        raise too_little(memory, planner.smallest().needed)
    return found
