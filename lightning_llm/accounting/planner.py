"""The fastest choice of a training step that fits a memory.

The planner chooses only what leaves the training as it is, up to rounding: the micro-batch (the global batch stays),
how many layers of the memory-optimized MLP are at level 2 and 1, what else is recomputed, whether the loss is cut into
chunks, DDP or FSDP2. The optimizer's state in bfloat16 changes results and is chosen only where it is allowed.

The search tries all choices but the levels in the order of the time that they would take with every layer at level 0,
and stops where that is more than the best found. For each it takes the levels that fit at the least time: more layers
at a level need less memory and more time, so their numbers are found by bisection. Memory comes from
``ExtrapolatedMemory``, of which a few dozen are enough.
"""

import bisect
import dataclasses
import math
from collections.abc import Callable, Sequence
from functools import cache
from itertools import product

from lightning_llm.accounting.counts import parameters_by_part
from lightning_llm.accounting.extrapolated_memory import Counts, levels_of, memory_by_depth
from lightning_llm.accounting.hardware import Reserve
from lightning_llm.accounting.memory import MOST_ROWS, MemoryTrace, largest_fitting, too_little
from lightning_llm.accounting.settings import StepSettings, rows_per_micro_batch
from lightning_llm.accounting.sharding import SharedMemory, shared_memory
from lightning_llm.accounting.step_time import CostModel, StepTime, step_time
from lightning_llm.model.config import ModelConfig, Recompute
from lightning_llm.ops.sizes import planned_loss_chunks
from lightning_llm.optim.catalog import STATE_BYTES

DECISIONS = ("rows", "recompute", "loss_chunks", "state_dtype", "strategy")
FRONTIER_POINTS = 9
# Of the rows of a micro-batch; with 64, `plan` of 5,040 rows takes twice the time for a plan that is as fast
MOST_CHOICES = 36


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """What is to be trained, and what may be chosen.

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
    loss_chunks: tuple[int | None, ...] = (None, 0)
    state_dtypes: tuple[str | None, ...] = (None,)
    reserve: Reserve = dataclasses.field(default_factory=Reserve)


@dataclasses.dataclass(frozen=True)
class StepChoice:
    """One choice.

    Attributes:
        rows: Of a micro-batch.
        recompute: As in ``ModelConfig``.
        loss_chunks: As ``LanguageModel`` takes it.
        state_dtype: As AdamW takes it.
        strategy: One of ``STRATEGIES``.
        counts: Layers at levels 2, 1 and 0, in this order from the first layer on.
    """

    rows: int
    recompute: Recompute
    loss_chunks: int | None
    state_dtype: str | None
    strategy: str
    counts: Counts

    @property
    def checkpoint_level(self) -> int | list[int]:
        """As ``ModelConfig`` takes it: a number where all layers have the same."""
        levels = levels_of(self.counts)
        return levels[0] if len(set(levels)) == 1 else levels


@dataclasses.dataclass(frozen=True)
class StepPlan:
    """A choice with what it takes; ``needed`` are the bytes of a device, with what tensors do not get."""

    choice: StepChoice
    accumulation: int
    memory: SharedMemory
    needed: int
    time: StepTime


class Planner:
    """Finds the choices of one task, and remembers what it computed.

    Args:
        task: What is fixed, and what may be chosen.
        tick: Called whenever the memory of a choice was computed, which is what planning spends its time on.

    Raises:
        ValueError: The global batch cannot be divided by the processes, or the task is not covered by the accounting.
    """

    def __init__(self, task: Task, tick: Callable[[], object] = lambda: None) -> None:
        share = rows_per_micro_batch(task.global_batch_size, None, task.step.world_size)
        parameters_by_part(task.config, task.step.measured)  # first of all, reports what is not covered
        self.task, self._tick = task, tick
        if share > MOST_ROWS:
            raise ValueError(f"global_batch_size has {share} rows for each process, expected at most {MOST_ROWS}")
        self.rows = row_counts(share)
        self.deepest = 0  # the highest level that the model can have
        if all(config.mlp == "memory_optimized_swiglu" for config in task.config.layer_configs):
            self.deepest = 2 if task.config.norm == "rmsnorm" and task.config.block != "post" else 1
        self.step_of = cache(self._step)
        self.memory_of = cache(self._memory)
        self.time_of = cache(self._time)
        self._by_depth = cache(self._memory_by_depth)
        # the memory-optimized MLP has levels for what recomputing an MLP does
        recomputes: tuple[Recompute, ...] = ("none", "attention", "block")
        if not self.deepest:
            recomputes = ("none", "mlp", "attention", "block")
        decisions = product(self.rows, recomputes, task.loss_chunks, task.state_dtypes, task.strategies)
        counts = (0, 0, task.config.num_hidden_layers)
        choices = [
            StepChoice(rows, recompute, self._loss_chunks(rows, chunks), state_dtype, strategy, counts)
            for rows, recompute, chunks, state_dtype, strategy in decisions
        ]
        self._choices = sorted(choices, key=lambda choice: self.time_of(choice).seconds)  # every layer at level 0

    def _loss_chunks(self, rows: int, chunks: int | None) -> int | None:
        """The number of chunks, where it is left to the size of the logits."""
        step = self.task.step
        itemsize = 4 if step.precision == "32-true" else 2
        if chunks is None:
            return planned_loss_chunks(rows * step.context_length, self.task.config.vocab_rows, itemsize, step.device)
        return chunks

    # -- what a choice takes ------------------------------------------------------------------------------------------

    def _step(self, choice: StepChoice) -> StepSettings:
        return dataclasses.replace(
            self.task.step,
            rows=choice.rows,
            accumulation=self.task.global_batch_size // (self.task.step.world_size * choice.rows),
            loss_chunks=choice.loss_chunks,
            strategy=choice.strategy,
            state_itemsize=STATE_BYTES[choice.state_dtype],
        )

    def _memory(self, choice: StepChoice) -> SharedMemory:
        step = self.step_of(choice)
        trace = self._by_depth(choice.recompute, step.unshared)(choice.counts)
        memory = shared_memory(self.task.config, trace, step)
        self._tick()
        return memory

    def _memory_by_depth(self, recompute: Recompute, step: StepSettings) -> Callable[[Counts], MemoryTrace]:
        return memory_by_depth(dataclasses.replace(self.task.config, recompute=recompute), step)

    def _time(self, choice: StepChoice) -> StepTime:
        return step_time(configured(self.task.config, choice), self.task.cost_model, self.step_of(choice))

    def needed(self, choice: StepChoice) -> int:
        """Bytes of each device, with what tensors do not get."""
        return self.task.reserve.around(self.memory_of(choice).peak)

    def plan(self, choice: StepChoice) -> StepPlan:
        """The choice with what it takes."""
        accumulation = self.step_of(choice).accumulation
        return StepPlan(choice, accumulation, self.memory_of(choice), self.needed(choice), self.time_of(choice))

    # -- searching ----------------------------------------------------------------------------------------------------

    def fastest(self, budget: float, allowed: Callable[[StepChoice], bool] = lambda choice: True) -> StepPlan | None:
        """The choice of the least time that needs at most ``budget`` bytes; of equals the one that needs less.

        Args:
            budget: Bytes of a device; ``inf`` for no limit.
            allowed: Whether a choice may be taken; asked with every layer at level 0.
        """
        best: StepChoice | None = None
        max_rows: dict[StepChoice, int] = {}  # rows, by what else is chosen
        for choice in filter(allowed, self._choices):
            if best is not None and self.time_of(choice).seconds > self.time_of(best).seconds:
                break
            without_rows = dataclasses.replace(choice, rows=self.rows[0])
            if without_rows not in max_rows:
                max_rows[without_rows] = self._most_rows(without_rows, budget)
            if choice.rows <= max_rows[without_rows] or choice.rows == self.rows[-1]:
                fitting = self._fitting(choice, budget)
                best = min([best, *fitting] if best else fitting, key=self._rank, default=None)
        return None if best is None else self.plan(best)

    def smallest(self) -> StepPlan:
        """The choice that needs the least memory, but for a mix of levels that may need 1% less."""
        candidates = [
            dataclasses.replace(choice, counts=counts)
            for choice in self._choices
            if choice.rows in (self.rows[0], self.rows[-1])  # the whole batch has no gradients in forward
            for counts in self._extremes()
        ]
        return self.plan(min(candidates, key=lambda choice: self.memory_of(choice).peak))

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

        open_decisions = [name for name in DECISIONS if len({getattr(choice, name) for choice in self._choices}) > 1]
        return {decision: self.fastest(budget, unlike(decision)) for decision in open_decisions}

    def _rank(self, choice: StepChoice) -> tuple[float, int]:
        return self.time_of(choice).seconds, self.memory_of(choice).peak

    def _fits(self, choice: StepChoice, budget: float) -> bool:
        return self.needed(choice) <= budget

    def _most_rows(self, without_rows: StepChoice, budget: float) -> int:
        """The most rows, of those that need several micro-batches, that fit with any levels; 0 for none."""

        def fits(number: int) -> bool:
            choice = dataclasses.replace(without_rows, rows=self.rows[number - 1])
            by_levels = (dataclasses.replace(choice, counts=counts) for counts in reversed(self._extremes()))
            return any(self._fits(choice, budget) for choice in by_levels)

        number = largest_fitting(fits, len(self.rows) - 1)
        return self.rows[number - 1] if number else 0

    def _fitting(self, choice: StepChoice, budget: float) -> list[StepChoice]:
        """The levels that fit, those of the least time among them."""
        if self._fits(choice, budget):
            return [choice]
        at_level_1 = self._counts_that_fit(lambda count: with_levels(choice, 0, count), budget) if self.deepest else []
        fitting = [with_levels(choice, 0, count) for count in at_level_1[:1]]
        return fitting + (self._fitting_at_level_2(choice, budget) if self.deepest == 2 else [])

    def _fitting_at_level_2(self, choice: StepChoice, budget: float) -> list[StepChoice]:
        """The fewest layers at level 2, and more layers of which fewer are at level 2 where that may take less time."""
        counts = self._counts_that_fit(lambda count: with_levels(choice, count, 0), budget)
        fitting = [with_levels(choice, count, 0) for count in counts[:1]]
        for touched in counts:
            least = min(self.time_of(each).seconds for each in fitting)
            if self.time_of(with_levels(choice, 0, touched)).seconds >= least:
                break
            fitting.append(self._fewest_at_level_2(choice, touched, budget))
        return fitting

    def _fewest_at_level_2(self, choice: StepChoice, touched: int, budget: float) -> StepChoice:
        """So many layers at level 2 or 1, as few of them at level 2 as fit."""

        def split(deep: int) -> StepChoice:
            return with_levels(choice, deep, touched - deep)

        return split(self._fewest(0, touched, split, budget))

    def _counts_that_fit(self, with_count: Callable[[int], StepChoice], budget: float) -> Sequence[int]:
        """From the fewest to the most layers that fit at a level, if the others are at level 0.

        The most are all, or all but the last, which is recomputed at the peak and so may need more.
        """
        layers = self.task.config.num_hidden_layers
        for most in (layers, layers - 1):
            if most and self._fits(with_count(most), budget):
                return range(self._fewest(1, most, with_count, budget), most + 1)
        return []

    def _fewest(self, low: int, high: int, with_count: Callable[[int], StepChoice], budget: float) -> int:
        """The smallest count that fits, if all larger ones do, ``high`` among them."""
        return low + bisect.bisect_left(range(low, high), True, key=lambda n: self._fits(with_count(n), budget))

    def _extremes(self) -> list[Counts]:
        """Levels among which are those of the least memory."""
        layers = self.task.config.num_hidden_layers
        shallow, deep = [(0, layers, 0), (0, layers - 1, 1)], [(layers, 0, 0), (layers - 1, 0, 1)]
        return [(0, 0, layers), *(shallow if self.deepest else []), *(deep if self.deepest == 2 else [])]


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


def with_levels(choice: StepChoice, deep: int, shallow: int) -> StepChoice:
    """The choice with so many layers at level 2, then at level 1, and the others at level 0."""
    return dataclasses.replace(choice, counts=(deep, shallow, sum(choice.counts) - deep - shallow))


def configured(config: ModelConfig, choice: StepChoice) -> ModelConfig:
    """The model with a choice's levels and recomputation."""
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
