"""The fastest setting of a training step that fits a memory.

What may be chosen leaves the training as it is, up to rounding: the micro-batch (the global batch stays), how many
layers of the optimised MLP are at level 2 and 1, what else is recomputed, whether the loss is cut into chunks, DDP or
FSDP2. The optimiser's state in bfloat16 changes results and is chosen only where it is allowed.

The search goes through the choices but the levels in the order of the time that they would take with every layer at
level 0, and stops where that is more than the best found. Of each it takes the levels that fit at the least time: more
layers at a level need less memory and more time, so their numbers are found by bisection. Memory comes from
``LayeredMemory``, of which a few dozen are enough.
"""

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product

from lightning_llm.accounting.hardware import shown_size
from lightning_llm.accounting.layered import Counts, LayeredMemory
from lightning_llm.accounting.parameters import parameters_by_part
from lightning_llm.accounting.sharding import SharedMemory, shared_memory, walk_precision
from lightning_llm.accounting.step_time import Pace, StepTime, step_time
from lightning_llm.model.config import ModelConfig, Recompute

STATE_BYTES = {None: None, "bfloat16": 2}  # of AdamW's state_dtype
DECISIONS = ("rows", "recompute", "loss_chunks", "state_dtype", "strategy")
FRONTIER_POINTS = 9


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """What is to be trained, and what may be chosen.

    Attributes:
        config: The model; levels and recomputation in it are not looked at.
        pace: Of the device.
        context_length: Tokens per row.
        global_batch_size: Rows of a step.
        precision: ``32-true``, ``bf16-true`` or ``bf16-mixed``.
        world_size: Processes.
        strategies: Of them, those that may be chosen.
        gradient_views: DDP's gradients are views of its buckets.
        loss_chunks: Those that may be chosen.
        state_dtypes: Of the optimiser; those that may be chosen, the plan's own first.
        state_per_parameter: As in ``step_memory``; a mean where parameters differ.
    """

    config: ModelConfig
    pace: Pace
    context_length: int
    global_batch_size: int
    precision: str = "32-true"
    world_size: int = 1
    strategies: tuple[str, ...] = ("ddp",)
    gradient_views: bool = False
    loss_chunks: tuple[int | None, ...] = (None, 0)
    state_dtypes: tuple[str | None, ...] = (None,)
    state_per_parameter: float = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """One choice.

    Attributes:
        rows: Of a micro-batch.
        counts: Layers at levels 2, 1 and 0, in this order from the first layer on.
        recompute: As in ``ModelConfig``.
        loss_chunks: As ``LanguageModel`` takes it.
        state_dtype: As AdamW takes it.
        strategy: ``ddp`` or ``fsdp2``.
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
        levels = [level for level, count in zip((2, 1, 0), self.counts, strict=True) for _ in range(count)]
        return levels[0] if len(set(levels)) == 1 else levels


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """A setting with what it takes."""

    setting: Setting
    accumulation: int
    memory: SharedMemory
    time: StepTime


class Planner:
    """Finds settings for one task, remembering what it computed.

    Args:
        task: What is fixed, and what may be chosen.
        tick: Called whenever memory was walked through; planning takes as long as these walks.

    Raises:
        ValueError: The global batch cannot be divided by the processes, or the task is not covered by the accounting.
    """

    def __init__(self, task: Task, tick: Callable[[], object] = lambda: None) -> None:
        whole, processes = task.global_batch_size, task.world_size
        if whole % processes:
            raise ValueError(
                f"global_batch_size {whole} cannot be divided by {processes} processes: change one of them"
            )
        parameters_by_part(task.config)  # says what is not covered before anything else stumbles over it
        self.task, self._tick = task, tick
        share = whole // processes
        self.rows = [rows for rows in range(1, share + 1) if share % rows == 0]
        self._walks: dict[tuple[object, ...], LayeredMemory] = {}
        self._memories: dict[Setting, SharedMemory] = {}
        self._times: dict[Setting, StepTime] = {}
        self._groups = sorted(self._all_groups(), key=lambda group: self.time(group).seconds)

    # -- what a setting takes -----------------------------------------------------------------------------------------

    def accumulation(self, setting: Setting) -> int:
        """Micro-batches per step."""
        return self.task.global_batch_size // (self.task.world_size * setting.rows)

    def memory(self, setting: Setting) -> SharedMemory:
        """Bytes on each process."""
        if setting not in self._memories:
            task, is_accumulating = self.task, self.accumulation(setting) > 1
            precision = walk_precision(task.precision, setting.strategy if task.world_size > 1 else "ddp")
            key = (setting.rows, setting.recompute, setting.loss_chunks, is_accumulating, precision)
            if key not in self._walks:
                self._walks[key] = LayeredMemory(
                    dataclasses.replace(task.config, recompute=setting.recompute),
                    rows=setting.rows,
                    context_length=task.context_length,
                    precision=precision,
                    device=task.pace.kind,
                    loss_chunks=setting.loss_chunks,
                    accumulation=2 if is_accumulating else 1,
                )
            self._memories[setting] = shared_memory(
                task.config,
                self._walks[key].at(setting.counts),
                precision=task.precision,
                strategy=setting.strategy,
                world_size=task.world_size,
                gradient_views=task.gradient_views,
                state_per_parameter=task.state_per_parameter,
                state_itemsize=STATE_BYTES[setting.state_dtype],
            )
            self._tick()
        return self._memories[setting]

    def time(self, setting: Setting) -> StepTime:
        """Seconds of a step."""
        if setting not in self._times:
            task = self.task
            self._times[setting] = step_time(
                configured(task.config, setting),
                task.pace,
                rows=setting.rows,
                accumulation=self.accumulation(setting),
                context_length=task.context_length,
                precision=task.precision,
                loss_chunks=setting.loss_chunks,
                strategy=setting.strategy,
                world_size=task.world_size,
                state_per_parameter=task.state_per_parameter,
                state_itemsize=STATE_BYTES[setting.state_dtype],
            )
        return self._times[setting]

    def plan(self, setting: Setting) -> Plan:
        """The setting with both."""
        return Plan(
            setting=setting,
            accumulation=self.accumulation(setting),
            memory=self.memory(setting),
            time=self.time(setting),
        )

    # -- searching ----------------------------------------------------------------------------------------------------

    def fastest(self, memory: float, allowed: Callable[[Setting], bool] = lambda group: True) -> Plan | None:
        """The setting of the least time whose peak is at most ``memory`` bytes; of equals the one that needs less.

        Args:
            memory: Bytes of one process; ``inf`` for no limit.
            allowed: Whether a choice may be taken; asked with every layer at level 0.
        """
        best: Setting | None = None
        most: dict[Setting, int] = {}  # rows, by what else is chosen
        for group in self._groups:
            if best is not None and self.time(group).seconds > self.time(best).seconds:
                break
            if not allowed(group):
                continue
            rest = dataclasses.replace(group, rows=self.rows[0])
            if rest not in most:
                most[rest] = self._most_rows(rest, memory)
            if group.rows > most[rest]:
                continue
            for found in self._fitting(group, memory):
                if best is None or self._rank(found) < self._rank(best):
                    best = found
        return None if best is None else self.plan(best)

    def smallest(self) -> Plan:
        """The setting that needs the least memory, but for a mix of levels that may need 1 % less."""
        first = min(self.rows)
        candidates = [
            dataclasses.replace(group, counts=counts)
            for group in self._groups
            if group.rows == first
            for counts in self._extremes()
        ]
        return self.plan(min(candidates, key=lambda setting: self.memory(setting).peak))

    def frontier(self, memory: int) -> list[Plan]:
        """Plans for memories from the smallest that does to twice the given: less time for more memory."""
        low = self.smallest().memory.peak
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
        found = {}
        for decision in DECISIONS:
            own = getattr(chosen.setting, decision)
            if len({getattr(group, decision) for group in self._groups}) > 1:
                found[decision] = self.fastest(memory, _unlike(decision, own))
        return found

    def _rank(self, setting: Setting) -> tuple[float, int]:
        return self.time(setting).seconds, self.memory(setting).peak

    def _fits(self, setting: Setting, memory: float) -> bool:
        return self.memory(setting).peak <= memory

    def _most_rows(self, rest: Setting, memory: float) -> int:
        """The most rows that fit with any levels; walking through many more would take long."""

        def fits(place: int) -> bool:
            group = dataclasses.replace(rest, rows=self.rows[place])
            return any(self._fits(dataclasses.replace(group, counts=own), memory) for own in reversed(self._extremes()))

        if not fits(0):
            return 0
        low, high = 0, 1
        while high < len(self.rows) and fits(high):
            low, high = high, 2 * high
        high = min(high, len(self.rows))
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return self.rows[low]

    def _fitting(self, group: Setting, memory: float) -> Iterator[Setting]:
        """The levels that fit, those of the least time among them."""
        layers, deepest = self.task.config.num_hidden_layers, self._deepest
        if self._fits(group, memory):
            yield group
            return
        if not deepest:
            return

        def at(deep: int, shallow: int) -> Setting:
            counts = (deep, shallow, layers - deep - shallow) if deepest == 2 else (0, deep, layers - deep)
            return dataclasses.replace(group, counts=counts)

        if deepest == 2 and (most := self._most_that_fit(layers, lambda count: at(0, count), memory)):
            yield at(0, self._fewest(1, most, lambda count: at(0, count), memory))
        most = self._most_that_fit(layers, lambda count: at(count, 0), memory)
        if not most:
            return
        fewest = self._fewest(1, most, lambda count: at(count, 0), memory)
        yield at(fewest, 0)
        if deepest == 1:
            return
        best = self.time(at(fewest, 0)).seconds
        for touched in range(fewest, most + 1):  # more layers, but at level 1, may be cheaper than fewer at level 2
            if self.time(at(0, touched)).seconds >= best:
                break
            deep = self._fewest(0, touched, partial(_split, at, touched), memory)
            yield (found := at(deep, touched - deep))
            best = min(best, self.time(found).seconds)

    def _most_that_fit(self, layers: int, at: Callable[[int], Setting], memory: float) -> int:
        """All layers, or all but the last, which is computed again at the peak and so may need more; or 0."""
        return next((count for count in (layers, layers - 1) if count and self._fits(at(count), memory)), 0)

    def _fewest(self, low: int, high: int, at: Callable[[int], Setting], memory: float) -> int:
        """The smallest count whose setting fits, if all larger ones do, ``high`` among them."""
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if self._fits(at(middle), memory) else (middle + 1, high)
        return low

    @property
    def has_levels(self) -> bool:
        """Whether there are levels to choose."""
        return self._deepest > 0

    @property
    def _deepest(self) -> int:
        """The highest level that the model can have."""
        config = self.task.config
        return 0 if config.mlp != "memory_optimized_swiglu" else 2 if config.norm == "rmsnorm" else 1

    def _extremes(self) -> list[Counts]:
        """Levels among which are those of the least memory."""
        layers = self.task.config.num_hidden_layers
        shallow, deep = [(0, layers, 0), (0, layers - 1, 1)], [(layers, 0, 0), (layers - 1, 0, 1)]
        return [(0, 0, layers), *(shallow if self._deepest else []), *(deep if self._deepest == 2 else [])]

    def _all_groups(self) -> Iterator[Setting]:
        task = self.task
        # the optimised MLP has levels for what recomputing an MLP does
        recompute: tuple[Recompute, ...] = ("none", "attention", "block")
        if not self._deepest:
            recompute = ("none", "mlp", "attention", "block")
        for rows, again, chunks, state, strategy in product(
            self.rows, recompute, task.loss_chunks, task.state_dtypes, task.strategies
        ):
            yield Setting(
                rows=rows,
                counts=(0, 0, task.config.num_hidden_layers),
                recompute=again,
                loss_chunks=chunks,
                state_dtype=state,
                strategy=strategy,
            )


def configured(config: ModelConfig, setting: Setting) -> ModelConfig:
    """The model with a setting's levels and recomputation."""
    return dataclasses.replace(config, checkpoint_level=setting.checkpoint_level, recompute=setting.recompute)


def choose(planner: Planner, memory: int) -> Plan:
    """The fastest plan.

    Raises:
        ValueError: Nothing fits; the message says the least that would do.
    """
    found = planner.fastest(memory)
    if found is None:
        least = planner.smallest().memory.peak
        raise ValueError(
            f"memory of {memory:,} bytes is too little: the smallest that would do is {least:,} bytes "
            f"({shown_size(least)})"
        )
    return found


def _split(at: Callable[[int, int], Setting], touched: int, deep: int) -> Setting:
    return at(deep, touched - deep)


def _unlike(decision: str, own: object) -> Callable[[Setting], bool]:
    return lambda group: getattr(group, decision) != own
