"""The fastest choice of a training step that fits a memory.

The planner chooses only what leaves the training as it is, up to rounding: the micro-batch (the global batch stays),
the checkpoint level of the memory-optimized MLPs, what else is recomputed, DDP or FSDP2. The optimizer's state in
bfloat16 changes results and is chosen only where it is allowed.

For each setting, a step of few rows, one of many, and one of all rows of a process are traced (``memory.py``); the
memory between them is interpolated. More rows take less time, so a setting's best is the most rows that fit. What is
chosen is traced itself: if it does not fit, the search continues with what that shows. A choice is missed only where
the interpolated memory is too large.

All layers have one level. For 33 budgets and models of 125 M and 1.3 B parameters, mixed levels would have been faster
in 8 cases: by 7.3% of the predicted time at most, and by 0.6% on average over all 33.
"""

import bisect
import dataclasses
import math
from collections.abc import Callable
from functools import cache
from itertools import product
from typing import Any

from lightning_llm.accounting.counts import parameters_by_part
from lightning_llm.accounting.hardware import Reserve
from lightning_llm.accounting.memory import MOST_ROWS, lerp, memory_trace, too_little
from lightning_llm.accounting.memory_trace import MemoryTrace
from lightning_llm.accounting.sharding import RankMemory, rank_memory
from lightning_llm.accounting.step_settings import StepSettings, item_sizes, rows_per_micro_batch
from lightning_llm.accounting.step_time import CostModel, StepTime, step_time
from lightning_llm.model.config import ModelConfig, Recompute
from lightning_llm.ops.sizes import CHECKPOINT_LEVELS, planned_loss_chunks
from lightning_llm.optim.catalog import STATE_BYTES

DECISIONS = ("rows", "checkpoint_level", "recompute", "loss_chunks", "state_dtype", "strategy")
FRONTIER_POINTS = 7
MOST_CHOICES = 36  # of the rows of a micro-batch


@dataclasses.dataclass(frozen=True, kw_only=True)
class SearchSpace:
    """Training to plan: what is fixed, and what may be chosen.

    Attributes:
        config: The model; levels and recomputation in it are ignored.
        cost_model: Of the device.
        step: What is fixed of a step: all but its rows and the choices below.
        global_batch_size: Rows of a step of all processes.
        strategies: Those that may be chosen.
        loss_chunks: Those that may be chosen.
        state_dtypes: Of the optimizer; those that may be chosen, the run's own first.
        reserve: Memory of each device that tensors do not get.
    """

    config: ModelConfig
    cost_model: CostModel
    step: StepSettings
    global_batch_size: int
    strategies: tuple[str, ...] = ("ddp",)
    loss_chunks: tuple[int | None, ...] = (None,)
    state_dtypes: tuple[str | None, ...] = (None,)
    reserve: Reserve = dataclasses.field(default_factory=Reserve)


@dataclasses.dataclass(frozen=True)
class StepChoice:
    """One choice.

    Attributes:
        rows: Of a micro-batch.
        checkpoint_level: Of all layers.
        recompute: As in ``ModelConfig``.
        loss_chunks: As ``LanguageModel`` takes it.
        state_dtype: As AdamW takes it.
        strategy: One of ``STRATEGIES``.
    """

    rows: int
    checkpoint_level: int
    recompute: Recompute
    loss_chunks: int | None
    state_dtype: str | None
    strategy: str


@dataclasses.dataclass(frozen=True)
class StepPlan:
    """A choice with what it takes; ``needed`` are the bytes of a device, its reserve included."""

    choice: StepChoice
    accumulation: int
    memory: RankMemory
    needed: int
    time: StepTime


class Planner:
    """Finds the choices of one search space, and remembers what it traced.

    Args:
        space: What is fixed, and what may be chosen.
        tick: Called after each trace, which planning spends its time on.

    Attributes:
        rows: That a micro-batch may have.
        levels: Checkpoint levels that the model can have.

    Raises:
        ValueError: The global batch cannot be divided by the processes, or a part of the model was not measured.
    """

    def __init__(self, space: SearchSpace, tick: Callable[[], object] = lambda: None) -> None:
        share = rows_per_micro_batch(space.global_batch_size, None, space.step.world_size)
        parameters_by_part(space.config, space.step.measured)  # first of all, reports what was not measured
        self.space = space
        self._tick = tick
        if share > MOST_ROWS:
            raise ValueError(f"global_batch_size has {share} rows for each process, expected at most {MOST_ROWS}")
        self.rows = row_counts(share)
        self.levels = _levels_of(space.config)
        self.time_of = cache(self._time)
        self._traces: dict[StepChoice, MemoryTrace] = {}  # by ``_key``
        settings = product(self.levels, self._recomputes(), space.loss_chunks, space.state_dtypes, space.strategies)
        self._settings = [StepChoice(self.rows[-1], *setting) for setting in settings if _is_sensible(*setting[:2])]
        self._settings.sort(key=lambda choice: self.time_of(choice).seconds)

    def with_state(self, *dtypes: str | None) -> "Planner":
        """A planner of the same search space with other dtypes of the optimizer's state, which uses the same traces."""
        planner = Planner(dataclasses.replace(self.space, state_dtypes=dtypes), self._tick)
        planner._traces = self._traces
        return planner

    def _recomputes(self) -> tuple[Recompute, ...]:
        # the memory-optimized MLP has levels for what recomputing an MLP does
        return ("none", "attention", "block") if len(self.levels) > 1 else ("none", "mlp", "attention", "block")

    # -- what a choice takes ------------------------------------------------------------------------------------------

    def step_of(self, choice: StepChoice) -> StepSettings:
        """The settings of its step."""
        return dataclasses.replace(
            self.space.step,
            rows=choice.rows,
            accumulation=self.space.global_batch_size // (self.space.step.world_size * choice.rows),
            loss_chunks=choice.loss_chunks,
            strategy=choice.strategy,
            state_itemsize=STATE_BYTES[choice.state_dtype],
        )

    def memory_of(self, choice: StepChoice) -> RankMemory:
        """The memory of its step; between the rows that are traced, interpolated."""
        return rank_memory(self.space.config, self._trace_of(choice), self.step_of(choice))

    def _time(self, choice: StepChoice) -> StepTime:
        return step_time(configured(self.space.config, choice), self.space.cost_model, self.step_of(choice))

    def needed(self, choice: StepChoice) -> int:
        """Bytes of each device, with what tensors do not get."""
        return self.space.reserve.around(self.memory_of(choice).peak)

    def plan(self, choice: StepChoice) -> StepPlan:
        """The choice with what it takes, its own step traced."""
        choice = self._with_loss_chunks(choice)
        self._traced(choice)
        accumulation = self.step_of(choice).accumulation
        return StepPlan(choice, accumulation, self.memory_of(choice), self.needed(choice), self.time_of(choice))

    def _trace_of(self, choice: StepChoice) -> MemoryTrace:
        accumulated = self.rows[:-1]  # the whole batch at once adds no gradients, and is traced itself
        if self._key(choice) in self._traces or choice.rows == self.rows[-1] or len(accumulated) <= 2:
            return self._traced(choice)
        ends = accumulated[0], accumulated[-1]
        if choice.rows in ends:
            return self._traced(choice)
        at = {rows: dataclasses.replace(choice, rows=rows) for rows in accumulated}
        known = [rows for rows, other in at.items() if rows in ends or self._key(other) in self._traces]
        after = bisect.bisect(known, choice.rows)
        low = known[after - 1]
        high = known[after]
        return lerp(self._traced(at[low]), self._traced(at[high]), choice.rows - low, of=high - low)

    def _traced(self, choice: StepChoice) -> MemoryTrace:
        key = self._key(choice)
        if key not in self._traces:
            step = dataclasses.replace(self.step_of(choice).single_process, loss_chunks=key.loss_chunks)
            self._traces[key] = memory_trace(configured(self.space.config, choice), step)
            self._tick()
        return self._traces[key]

    def _key(self, choice: StepChoice) -> StepChoice:
        """The choice without what a trace does not depend on."""
        is_sharded = choice.strategy != "ddp" and self.space.step.world_size > 1
        return dataclasses.replace(
            self._with_loss_chunks(choice), state_dtype=None, strategy="fsdp2" if is_sharded else "ddp"
        )

    def _with_loss_chunks(self, choice: StepChoice) -> StepChoice:
        """The choice with the number of chunks of the loss, where that is left to the size of the logits."""
        if choice.loss_chunks is not None:
            return choice
        step = self.space.step
        itemsize = item_sizes(step.precision)[1]
        tokens = choice.rows * step.context_length
        chunks = planned_loss_chunks(tokens, self.space.config.vocab_rows, itemsize, step.device)
        return dataclasses.replace(choice, loss_chunks=chunks)

    # -- searching ----------------------------------------------------------------------------------------------------

    def fastest(self, budget: float, allowed: Callable[[StepChoice], bool] = lambda choice: True) -> StepPlan | None:
        """The choice of the least time that needs at most ``budget`` bytes; of equals the one that needs less.

        Args:
            budget: Bytes of a device; ``inf`` for no limit.
            allowed: Whether a choice may be taken.
        """
        while True:
            best: StepChoice | None = None
            for setting in self._settings:
                if best is not None and self.time_of(setting).seconds > self.time_of(best).seconds:
                    break  # not even all rows at once are as fast
                found = self._most_rows(setting, budget, allowed)
                best = min(filter(None, (best, found)), key=self._rank, default=None)
            if best is None:
                return None
            plan = self.plan(best)
            if plan.needed <= budget:
                return plan

    def smallest(self) -> StepPlan:
        """The choice that needs the least memory."""
        fewest = [dataclasses.replace(setting, rows=self.rows[0]) for setting in self._settings]
        least = min(self.memory_of(choice).peak for choice in fewest)
        whole = [setting for setting in self._settings if self._whole_may_fit(setting, least)]
        return self.plan(min((*fewest, *whole), key=lambda choice: self.memory_of(choice).peak))

    def frontier(self, budget: int) -> list[StepPlan]:
        """Plans for memories from the smallest that does to twice the given: less time for more memory."""
        low = self.smallest().needed
        ratio = max(1.0, 2 * budget / low)
        others = [low * ratio ** (step / (FRONTIER_POINTS - 1)) for step in range(1, FRONTIER_POINTS)]
        plans: list[StepPlan] = []
        for limit in sorted((low, *others, budget)):
            plan = self.fastest(limit)
            if plan is not None and (not plans or plan.time.seconds < plans[-1].time.seconds):
                plans.append(plan)
        return plans

    def next_best(self, chosen: StepPlan, budget: float) -> dict[str, StepPlan | None]:
        """For each decision the best plan that decides otherwise; ``None`` where nothing else fits."""

        def unlike(decision: str) -> Callable[[StepChoice], bool]:
            return lambda choice: getattr(choice, decision) != getattr(chosen.choice, decision)

        values: dict[str, set[Any]] = {
            name: {getattr(choice, name) for choice in self._settings} for name in DECISIONS if name != "rows"
        }
        values["rows"] = {*self.rows}
        return {name: self.fastest(budget, unlike(name)) for name in DECISIONS if len(values[name]) > 1}

    def _rank(self, choice: StepChoice) -> tuple[float, int]:
        return self.time_of(choice).seconds, self.memory_of(choice).peak

    def _most_rows(
        self, setting: StepChoice, budget: float, allowed: Callable[[StepChoice], bool]
    ) -> StepChoice | None:
        """The setting with the most rows that fit, which take the least time."""
        choices = [dataclasses.replace(setting, rows=rows) for rows in self.rows]
        choices = [choice for choice in choices if allowed(self._with_loss_chunks(choice))]
        if choices and choices[-1].rows == self.rows[-1]:  # all rows at once may need less than half of them
            whole = choices.pop()
            if self._whole_may_fit(setting, budget) and self.needed(whole) <= budget:
                return whole
        fitting = bisect.bisect_left(choices, True, key=lambda choice: self.needed(choice) > budget)
        return choices[fitting - 1] if fitting else None

    def _whole_may_fit(self, setting: StepChoice, budget: float) -> bool:
        """Whether the whole batch at once, which has no gradients in forward, may fit.

        What its layers save grows with its rows, but for a constant: at least half as much as in proportion to the
        rows. What the loss saves does not: few rows have one chunk of logits, and more rows have chunks of that size.
        """
        few = self._traced(dataclasses.replace(setting, rows=self.rows[0]))
        saved = sum(size for part, size in few.saved.items() if part != "loss")
        return saved * self.rows[-1] / self.rows[0] / 2 < budget


def _levels_of(config: ModelConfig) -> tuple[int, ...]:
    """The checkpoint levels that a model can have."""
    if any(of_layer.mlp != "memory_optimized_swiglu" for of_layer in config.layer_configs):
        return CHECKPOINT_LEVELS[:1]
    return CHECKPOINT_LEVELS if config.norm == "rmsnorm" and config.block != "post" else CHECKPOINT_LEVELS[:2]


def _is_sensible(level: int, recompute: Recompute) -> bool:
    """Level 1 saves nothing where blocks are recomputed: only one of them holds activations at a time."""
    return recompute != "block" or level != 1


def divisors(number: int) -> list[int]:
    """All divisors of a number, in increasing order."""
    low = [divisor for divisor in range(1, math.isqrt(number) + 1) if number % divisor == 0]
    return sorted({*low, *(number // divisor for divisor in low)})


def row_counts(share: int) -> list[int]:
    """The rows that a micro-batch may have: the divisors, but of very many only those a ratio apart."""
    all_divisors = divisors(share)
    if len(all_divisors) <= MOST_CHOICES:
        return all_divisors
    counts = all_divisors[:1]
    ratio = share ** (1 / (MOST_CHOICES - 2))
    for rows in all_divisors[1:-1]:
        counts += [rows] if rows >= ratio * counts[-1] else []
    return [*counts, all_divisors[-1]]


def configured(config: ModelConfig, choice: StepChoice) -> ModelConfig:
    """The model with a choice's level and recomputation."""
    return dataclasses.replace(config, checkpoint_level=choice.checkpoint_level, recompute=choice.recompute)


def choose(planner: Planner, budget: int) -> StepPlan:
    """The fastest plan.

    Raises:
        ValueError: Nothing fits; the message gives the smallest memory that fits.
    """
    plan = planner.fastest(budget)
    if plan is None:
        raise too_little(budget, planner.smallest().needed)
    return plan
