"""Memory of a training step for any number of layers at each checkpoint level, from a few traces of shallow models.

A planner asks for thousands of settings, and layers of one level behave alike. At a given point in the step, say the
backward of the MLP of the second layer of a run of equal layers, the live bytes are a constant for each layer of each
run, plus the same temporaries. So they are affine in the lengths of the runs, and within a run affine in the layer: its
ends and their neighbors have the largest. Traces with three layers in each run, and with four in one of them, give
every coefficient. Where some layers have a window and the others attend to all positions, both models of equal layers
are extrapolated: each layer is that of one of them, but for what the attention of the layers before it saves. The
result is that of ``step_memory`` to the byte (``tests/accounting/test_extrapolated_memory.py``). Layers that differ
otherwise, by ``layers`` of the config, are all traced.
"""

import dataclasses
from collections.abc import Callable, Iterator

from lightning_llm.accounting.memory import MemoryTrace, step_memory
from lightning_llm.accounting.settings import StepSettings
from lightning_llm.accounting.symbolic import ENDS, LiveBytes, TracePoint
from lightning_llm.io.trust import CLASS_PATH, INIT_ARGS
from lightning_llm.model.config import ModelConfig
from lightning_llm.model.parts import arguments_of, name_of, option_of

LEVELS = (2, 1, 0)  # the order of the runs: what early layers save lives the longest, so they save the least
LONG = 3  # layers that show all there is to a run: its first, its last, and one between
MOST_DIFFERENT = 200  # layers whose levels rise: each of them is traced again for each number of rows

Counts = tuple[int, ...]  # layers at levels 2, 1 and 0


class ExtrapolatedMemory:
    """``step_memory`` of one setting, for any number of layers at each level.

    Args:
        config: Its number of layers and their levels do not matter.
        settings: Of the step.
    """

    def __init__(self, config: ModelConfig, settings: StepSettings) -> None:
        self.every: int | None = option_of("attention", config.attention, "every")
        windowed = full = config.attention
        if self.every is not None:
            options = {name: value for name, value in arguments_of(config.attention).items() if name != "every"}
            windowed = {CLASS_PATH: name_of(config.attention), INIT_ARGS: dict(options)}
            options.pop("window", None)
            full = {CLASS_PATH: "full", INIT_ARGS: options}
        self._windowed = _EqualLayers(dataclasses.replace(config, attention=windowed), settings)
        self._full = _EqualLayers(dataclasses.replace(config, attention=full), settings)

    def with_layers(self, counts: Counts) -> MemoryTrace:
        """The step with so many layers at level 2, then 1, then 0."""
        windowed = self._windowed.with_layers(counts)
        if self.every is None or self.every > sum(counts):
            return windowed
        return self._merged(windowed, self._full.with_layers(counts), counts, self.every)

    def _merged(self, windowed: MemoryTrace, full: MemoryTrace, counts: Counts, every: int) -> MemoryTrace:
        """The step whose last of ``every`` layers is full and others windowed, from traces of layers that are alike.

        Full layers save more than windowed ones, and the first of them makes the causal mask, which lives to the end.
        """
        after_one, after_two = (self._full.live_after(n) - self._windowed.live_after(n) for n in (1, 2))
        per_layer = after_two - after_one
        mask = after_one - per_layer
        points = {
            point: _with_extra(live, _extra_outside_layers(point, mask, per_layer * (sum(counts) // every)))
            for point, live in windowed.points.items()
            if point.layer is None
        }
        first = 0
        for level, count in zip(LEVELS, counts, strict=True):
            for layer in _layers_at_peaks(range(first, first + count), every):
                full_before = layer // every
                is_full = (layer + 1) % every == 0
                for point, live in _points_of(full if is_full else windowed, level, count, layer - first):
                    if is_full:  # traced with full layers alone before it
                        extra = -per_layer * (layer - full_before)
                    else:
                        has_mask = full_before > 0 or point.phase != "forward"
                        extra = per_layer * full_before + (mask if has_mask else 0)
                    points[point._replace(layer=layer, level=None)] = _with_extra(live, extra)
            first += count
        return MemoryTrace(parameters=windowed.parameters, gradients=windowed.gradients, points=points)


def memory_by_depth(config: ModelConfig, settings: StepSettings) -> Callable[[Counts], MemoryTrace]:
    """``step_memory`` of one setting, for any number of layers at each level; as fast as the layers allow."""
    if config.layers is None:
        return ExtrapolatedMemory(config, settings).with_layers
    return lambda counts: _all_layers(_with_levels(config, counts), settings)


class _EqualLayers:
    """``step_memory`` of a model in which all layers of one level are alike."""

    def __init__(self, config: ModelConfig, settings: StepSettings) -> None:
        self.config, self.settings = config, settings
        self._traces: dict[Counts, MemoryTrace] = {}

    def live_after(self, layers: int) -> int:
        """Bytes at the first point after all layers, all of them at level 0."""
        return self._trace((0, 0, layers)).points[TracePoint("forward", "final norm")].total

    def with_layers(self, counts: Counts) -> MemoryTrace:
        shortened = tuple(min(count, LONG) for count in counts)
        base = self._trace(shortened)
        longer = []  # for each long run its further layers, and a trace with one of them
        for run, count in enumerate(counts):
            if count > LONG:
                one_more = tuple(layers + (index == run) for index, layers in enumerate(shortened))
                longer.append((count - LONG, self._trace(one_more)))

        def extended(value: Callable[[MemoryTrace], int]) -> int:
            return value(base) + sum(further * (value(trace) - value(base)) for further, trace in longer)

        def live(point: TracePoint) -> LiveBytes:
            total = extended(lambda trace: trace.points[point].total)
            return LiveBytes(total, extended(lambda trace: trace.points[point].without_gradients))

        return MemoryTrace(
            parameters=extended(lambda trace: trace.parameters),
            gradients=extended(lambda trace: trace.gradients),
            points={point: live(point) for point in base.points},
        )

    def _trace(self, counts: Counts) -> MemoryTrace:
        """A trace whose points name layers by their level and their place among the layers at that level."""
        if counts not in self._traces:
            memory = step_memory(_with_levels(self.config, counts), self.settings)
            runs = zip(LEVELS, counts, strict=True)
            layers = [(level, _ends_at(index, count)) for level, count in runs for index in range(count)]
            points: dict[TracePoint, LiveBytes] = {}
            for point, live in memory.points.items():
                if point.layer is None:
                    points[point] = live
                else:
                    level, ends = layers[point.layer]
                    points |= {point._replace(layer=end, level=level): live for end in ends}
            self._traces[counts] = MemoryTrace(parameters=memory.parameters, gradients=memory.gradients, points=points)
        return self._traces[counts]


def memory_trace(config: ModelConfig, settings: StepSettings) -> MemoryTrace:
    """The trace of ``step_memory``, from a few shallow ones. Errors as there, and for over ``MOST_DIFFERENT``."""
    levels = config.checkpoint_levels
    if levels == sorted(levels, reverse=True):
        return memory_by_depth(config, settings)(tuple(map(levels.count, LEVELS)))
    return _all_layers(config, settings)


def _all_layers(config: ModelConfig, settings: StepSettings) -> MemoryTrace:
    """The trace of ``step_memory``, of all layers."""
    if config.num_hidden_layers > MOST_DIFFERENT:
        limit = f"levels may rise, or layers differ, in at most {MOST_DIFFERENT} layers"
        raise ValueError(f"num_hidden_layers {config.num_hidden_layers}: {limit}, where settings are searched for")
    return step_memory(config, settings)


def levels_of(counts: Counts) -> list[int]:
    """The level of each layer."""
    return [level for level, count in zip(LEVELS, counts, strict=True) for _ in range(count)]


def _with_levels(config: ModelConfig, counts: Counts) -> ModelConfig:
    levels = levels_of(counts)
    return dataclasses.replace(config, num_hidden_layers=len(levels), checkpoint_level=levels)


def _with_extra(live: LiveBytes, extra: int) -> LiveBytes:
    return LiveBytes(live.total + extra, live.without_gradients + extra)


def _extra_outside_layers(point: TracePoint, mask: int, saved: int) -> int:
    """What full layers add at a point outside the layers: their mask, and what they all save."""
    if point.stage != "embeddings":
        return mask + saved
    return 0 if point.phase == "forward" else mask  # before the first layer, and after the last is freed


def _ends_at(index: int, count: int) -> list[int]:
    """The ``ENDS`` of a run of ``count`` layers that are its layer ``index``.

    For example [0] for the first, [-1] for the last of three, [1, -2] for the one between, and [] in the middle of
    five. Runs of one or two have no last ones.
    """
    return [index] if count < LONG else [end for end in ENDS if index in (end, count + end)]


def _layers_at_peaks(run: range, every: int) -> list[int]:
    """Some layers of a run, the one with the most live bytes among them: bytes change evenly from period to period.

    For example 0, 1, 2, 3, 4, 6, 7, 8, 9 of layers 0 to 9 where every second is full.
    """
    full = [layer for layer in run if (layer + 1) % every == 0]
    near_full = {layer + step for layer in full[:2] + full[-2:] for step in (-1, 0, 1)}
    return sorted(near_full & {*run} | {*run[:2], *run[-2:]})


def _points_of(trace: MemoryTrace, level: int, count: int, index: int) -> Iterator[tuple[TracePoint, LiveBytes]]:
    """The points of one layer of a run: between the second and the last but one, the bytes change evenly."""
    ends = _ends_at(index, count)
    for point, live in trace.points.items():
        if (point.layer, point.level) == (ends[0] if ends else 1, level):
            if not ends:
                pairs = zip(live, trace.points[point._replace(layer=-2)], strict=True)
                live = LiveBytes(*(low + (high - low) * (index - 1) // (count - LONG) for low, high in pairs))
            yield point, live
