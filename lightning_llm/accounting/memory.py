"""Memory of a training step of a model: by category and part of the model, and its peak.

``tracing.py`` traces the step of a model with three layers and with four. From one to the other, the live bytes at a
point in the step, say in the backward of the MLP of the last layer, grow by what one more layer holds; so those of any
depth follow. This holds for layers that are alike. Others, such as those with a window in every second one, are all
traced.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

from lightning_llm.accounting.memory_trace import LiveBytes, MemoryTrace, NeedsValues, Table, TracePoint
from lightning_llm.accounting.parts import unlisted_parts
from lightning_llm.accounting.step_settings import StepSettings, item_sizes
from lightning_llm.io.garbage import no_garbage_collection
from lightning_llm.io.units import shown_size
from lightning_llm.model.config import ModelConfig

MOST_ROWS = 2**24  # of a step, for each process; it has at most 504 divisors
SHALLOW, DEEPER = 3, 4  # layers that show all there is to equal ones: the first, the last, and one or two between
ENDS = (0, 1, -2, -1)  # layers of a deep model whose points are known; between them bytes change evenly


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepMemory(MemoryTrace):
    """Bytes of one training step on one device.

    Attributes:
        optimizer_state: Between steps.
        peak: The most live bytes, of everything.
        peak_point: The point in the step at which that is, in words.
        at_peak: What is live then, by category (those of ``measure.timeline``) and part.
    """

    optimizer_state: int
    peak: int
    peak_point: str
    at_peak: Table

    @property
    def step_peak(self) -> int:
        """The peak without what is always live: parameters and optimizer state."""
        return self.peak - self.parameters - self.optimizer_state


def step_memory(config: ModelConfig, settings: StepSettings | None = None, **options: Any) -> StepMemory:
    """The memory of a step of ``LanguageModel``, which frees the gradients when the optimizer has stepped.

    Args:
        config: ``vocab_size`` must be known.
        settings: Of the step. What processes share has no influence here.
        options: Those of :class:`~lightning_llm.accounting.step_settings.StepSettings`, such as ``rows`` and
            ``context_length``, instead of ``settings`` or in place of some of them.

    Raises:
        ValueError: The vocabulary is not known, the precision is unknown, or the context is too long.
    """
    settings = StepSettings(**options) if settings is None else dataclasses.replace(settings, **options)
    trace = memory_trace(config, settings.single_process)
    itemsize = item_sizes(settings.precision)[0]
    elements = trace.parameters // itemsize
    state = round(settings.state_per_parameter * elements * (settings.state_itemsize or itemsize))
    point = max(trace.points, key=lambda point: trace.points[point].total)
    at_peak = {**trace.points[point].table, ("optimizer_state", ""): state}
    return StepMemory(
        **vars(trace),
        optimizer_state=state,
        peak=trace.points[point].total + state,
        peak_point=point.in_words(),
        at_peak={key: size for key, size in at_peak.items() if size},
    )


@no_garbage_collection()
def memory_trace(config: ModelConfig, settings: StepSettings) -> MemoryTrace:
    """The trace of a step of a model of any depth; arguments and errors as in :func:`step_memory`.

    A step that depends on values is run on one row and on two, and extrapolated to others.
    """
    item_sizes(settings.precision)  # refuses an unknown one
    depth = config.num_hidden_layers
    if depth <= DEEPER or not has_equal_layers(config):
        return _trace(config, settings)
    shallow, deeper = (_by_ends(_trace(with_depth(config, layers), settings), layers) for layers in (SHALLOW, DEEPER))
    return _numbered(lerp(shallow, deeper, depth - SHALLOW), depth)


def has_equal_layers(config: ModelConfig) -> bool:
    """Whether all layers but the first are alike: by the config, and by the parameters of parts of the user's own."""
    if config.layers is not None or len({*config.checkpoint_levels}) > 1 or len({*config.attention_windows}) > 1:
        return False
    if not unlisted_parts(config):
        return True
    from lightning_llm.accounting.tracing import layer_shapes

    _, *later = layer_shapes(config)
    return all(shapes == later[0] for shapes in later)


def with_depth(config: ModelConfig, layers: int) -> ModelConfig:
    """The model with so many layers; those of ``config`` are alike."""
    levels = config.checkpoint_levels[:1] * layers
    return dataclasses.replace(config, num_hidden_layers=layers, checkpoint_level=levels)


def _trace(config: ModelConfig, settings: StepSettings) -> MemoryTrace:
    from lightning_llm.accounting.tracing import trace_step  # torch, which help and mistakes do not wait for

    try:
        return trace_step(config, settings)
    except NeedsValues:
        one, two = (trace_step(config, dataclasses.replace(settings, rows=rows), has_values=True) for rows in (1, 2))
        return dataclasses.replace(lerp(one, two, settings.rows - 1), is_extrapolated=True)


def _by_ends(trace: MemoryTrace, depth: int) -> MemoryTrace:
    """The trace with layers called by the ``ENDS`` that they are; the middle one of three is two of them."""
    points: dict[TracePoint, LiveBytes] = {}
    for point, live in trace.points.items():
        layer = point.layer
        ends = [layer] if layer is None else [end for end in ENDS if layer in (end, depth + end)]
        points |= {point._replace(layer=end): live for end in ends}
    return dataclasses.replace(trace, points=points)


def _numbered(trace: MemoryTrace, depth: int) -> MemoryTrace:
    """The trace with layers called by their numbers."""
    points = {
        point if point.layer is None else point._replace(layer=point.layer % depth): live
        for point, live in trace.points.items()
    }
    return dataclasses.replace(trace, points=points)


def lerp(start: MemoryTrace, end: MemoryTrace, weight: int, *, of: int = 1) -> MemoryTrace:
    """Linear interpolation, or extrapolation between traces, as ``torch.lerp``; the weight is ``weight / of``."""

    def number(of_start: int, of_end: int) -> int:
        return of_start + weight * (of_end - of_start) // of

    def table(of_start: dict[Any, int], of_end: dict[Any, int]) -> dict[Any, int]:
        return {key: number(of_start.get(key, 0), of_end.get(key, 0)) for key in dict.fromkeys([*of_start, *of_end])}

    points = {
        point: LiveBytes(
            number(live.total, more.total),
            number(live.without_gradients, more.without_gradients),
            table(live.table, more.table),
        )
        for point, live in start.points.items()
        if (more := end.points.get(point)) is not None
    }
    return dataclasses.replace(
        end,
        parameters=number(start.parameters, end.parameters),
        gradients=number(start.gradients, end.gradients),
        saved=table(start.saved, end.saved),
        points=points,
    )


def largest_batch(
    config: ModelConfig, memory: int, settings: StepSettings | None = None, *, extra: int = 0, **options: Any
) -> int:
    """The most rows of a micro-batch whose step fits a memory.

    Args:
        config: The model.
        memory: Bytes.
        settings: As in ``step_memory``; their rows do not matter.
        extra: Bytes that are needed besides, such as the buckets of DDP.
        options: As in ``step_memory``, without ``rows``.

    Raises:
        ValueError: Not even one row fits; the message says how much memory one row needs.
    """
    return most_rows(lambda rows: step_memory(config, settings, **options, rows=rows).peak + extra, memory)


def most_rows(needed: Callable[[int], int], memory: int) -> int:
    """The most rows whose bytes, as ``needed`` tells them, are at most ``memory``; errors as in ``largest_batch``.

    Bytes grow nearly evenly with rows, so each guess follows from the slope between the last two.
    """
    rows = 1
    size = needed(1)
    too_many = MOST_ROWS + 1
    if size > memory:
        raise too_little(memory, size, " for one row")
    per_row = max(1, needed(2) - size)
    while too_many - rows > 1:
        guess = min(too_many - 1, rows + max(1, (memory - size) // per_row))
        found = needed(guess)
        per_row = max(1, (found - size) // (guess - rows))
        if found > memory:
            too_many = guess
        else:
            rows, size = guess, found
    return rows


def too_little(memory: int, needed: int, what: str = "") -> ValueError:
    """The error where nothing fits: it says how much memory would do."""
    smallest = f"the smallest that fits is {needed:,} bytes ({shown_size(needed)})"
    return ValueError(f"memory of {memory:,} bytes is too little{what}: {smallest}")
