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
from functools import cached_property

from lightning_llm.accounting.memory import StepPoints, step_memory
from lightning_llm.accounting.settings import StepSettings
from lightning_llm.accounting.symbolic import ENDS, Bytes, Point
from lightning_llm.io.trust import CLASS_PATH, INIT_ARGS
from lightning_llm.model.config import ModelConfig
from lightning_llm.model.parts import name_of, option_of

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
        window, every = (option_of("attention", config.attention, name) for name in ("window", "every"))
        windowed = {CLASS_PATH: name_of(config.attention), INIT_ARGS: {"window": window}}
        self.every: int | None = every
        alike = config if every is None else dataclasses.replace(config, attention=windowed)
        self._windowed = _EqualLayers(alike, settings)
        self._full = _EqualLayers(dataclasses.replace(config, attention="full"), settings)

    def with_layers(self, counts: Counts) -> StepPoints:
        """The step with so many layers at level 2, then 1, then 0."""
        windowed = self._windowed.with_layers(counts)
        if self.every is None or self.every > sum(counts):
            return windowed
        return self._merged(windowed, self._full.with_layers(counts), counts, self.every)

    @cached_property
    def _extra(self) -> Bytes:
        """What full attention saves beyond that of a window: in each layer, and once (the causal mask)."""
        one, two = (self._full.live_after_layers(n) - self._windowed.live_after_layers(n) for n in (1, 2))
        in_each = two - one
        return in_each, one - in_each

    def _merged(self, windowed: StepPoints, full: StepPoints, counts: Counts, every: int) -> StepPoints:
        """The step with a window in each layer but the last of ``every``, from those with one in each and in none."""
        per_layer, once = self._extra
        points: dict[Point, Bytes] = {}

        def add(point: Point, live: Bytes, extra: int) -> None:
            points[point] = live[0] + extra, live[1] + extra

        layers = sum(counts)
        for point, live in windowed.points.items():
            if point.layer is None:
                is_outside = point.stage == "embeddings"  # before what the layers save, or after it is freed
                has_mask = not is_outside or point.phase != "forward"
                add(point, live, once * has_mask + (0 if is_outside else per_layer * (layers // every)))
        first = 0
        for level, count in zip(LEVELS, counts, strict=True):
            for layer in _ends(range(first, first + count), every):
                before = layer // every  # full layers
                is_full = (layer + 1) % every == 0
                for point, live in _points_of(full if is_full else windowed, level, count, layer - first):
                    has_mask = before > 0 or point.phase != "forward"
                    changed = -per_layer * (layer - before) if is_full else per_layer * before + once * has_mask
                    add(point._replace(layer=layer, level=None), live, changed)
            first += count
        return StepPoints(parameters=windowed.parameters, gradients=windowed.gradients, points=points)


class TracedMemory:
    """``step_memory`` of one setting, for a model whose layers have options of their own: each of them is traced.

    Args:
        config: As of ``ExtrapolatedMemory``.
        settings: Of the step.
    """

    def __init__(self, config: ModelConfig, settings: StepSettings) -> None:
        self._config, self._settings = config, settings

    def with_layers(self, counts: Counts) -> StepPoints:
        """As that of ``ExtrapolatedMemory``."""
        levels = [level for level, count in zip(LEVELS, counts, strict=True) for _ in range(count)]
        config = dataclasses.replace(self._config, num_hidden_layers=len(levels), checkpoint_level=levels)
        return _all_layers(config, self._settings)


def memory_by_depth(config: ModelConfig, settings: StepSettings) -> ExtrapolatedMemory | TracedMemory:
    """``step_memory`` of one setting, for any number of layers at each level; as fast as the layers allow."""
    return ExtrapolatedMemory(config, settings) if config.layers is None else TracedMemory(config, settings)


class _EqualLayers:
    """``step_memory`` of a model in which all layers of one level are alike."""

    def __init__(self, config: ModelConfig, settings: StepSettings) -> None:
        self.config, self.settings = config, settings
        self._traces: dict[Counts, StepPoints] = {}

    def live_after_layers(self, layers: int) -> int:
        """Bytes at the first point after all layers, all of them at level 0."""
        return self._trace((0, 0, layers)).points[Point("forward", "final norm")][0]

    def with_layers(self, counts: Counts) -> StepPoints:
        """As that of ``ExtrapolatedMemory``."""
        shortened = tuple(min(count, LONG) for count in counts)
        base = self._trace(shortened)
        longer = []  # for each long run its further layers, and a trace with one of them
        for run, count in enumerate(counts):
            if count > LONG:
                one_more = tuple(layers + (index == run) for index, layers in enumerate(shortened))
                longer.append((count - LONG, self._trace(one_more)))

        def extended(value: Callable[[StepPoints], int]) -> int:
            return value(base) + sum(further * (value(trace) - value(base)) for further, trace in longer)

        def most(point: Point) -> Bytes:
            return extended(lambda trace: trace.points[point][0]), extended(lambda trace: trace.points[point][1])

        return StepPoints(
            parameters=extended(lambda trace: trace.parameters),
            gradients=extended(lambda trace: trace.gradients),
            points={point: most(point) for point in base.points},
        )

    def _trace(self, counts: Counts) -> StepPoints:
        if counts not in self._traces:
            runs = list(zip(LEVELS, counts, strict=True))
            levels = [level for level, count in runs for _ in range(count)]
            config = dataclasses.replace(self.config, num_hidden_layers=len(levels), checkpoint_level=levels)
            memory = step_memory(config, self.settings)
            named_layers = [(level, _end_names(count, index)) for level, count in runs for index in range(count)]
            points: dict[Point, Bytes] = {}
            for point, live in memory.points.items():
                if point.layer is None:
                    points[point] = live
                else:
                    level, names = named_layers[point.layer]
                    points |= {point._replace(layer=name, level=level): live for name in names}
            self._traces[counts] = StepPoints(parameters=memory.parameters, gradients=memory.gradients, points=points)
        return self._traces[counts]


def _ends(run: range, every: int) -> list[int]:
    """Some layers of a run, the one with the most live bytes among them: bytes change evenly from period to period."""
    fulls = [layer for layer in run if (layer + 1) % every == 0]
    near = {full + step for full in fulls[:2] + fulls[-2:] for step in (-1, 0, 1)}
    return sorted(near & {*run} | {*run[:2], *run[-2:]})


def _points_of(step: StepPoints, level: int, count: int, index: int) -> Iterator[tuple[Point, Bytes]]:
    """The points of one layer of a run: between the second and the last but one, the bytes change evenly."""
    names = _end_names(count, index)
    near, far = (names[0], names[0]) if names else (1, -2)
    for point, size in step.points.items():
        if (point.layer, point.level) == (near, level):
            ends = zip(size, step.points[point._replace(layer=far)], strict=True)
            total, without_gradients = (low + (high - low) * (index - 1) // max(count - LONG, 1) for low, high in ends)
            yield point, (total, without_gradients)


def step_points(config: ModelConfig, settings: StepSettings) -> StepPoints:
    """The points of ``step_memory``, from a few traces. Errors as there, and for over ``MOST_DIFFERENT``."""
    levels = config.checkpoint_levels
    if levels == sorted(levels, reverse=True):
        return memory_by_depth(config, settings).with_layers(tuple(map(levels.count, LEVELS)))
    return _all_layers(config, settings)


def _all_layers(config: ModelConfig, settings: StepSettings) -> StepPoints:
    """The points of ``step_memory``, each layer traced."""
    if config.num_hidden_layers > MOST_DIFFERENT:
        limit = f"levels may rise, or layers differ, in at most {MOST_DIFFERENT} layers"
        raise ValueError(f"num_hidden_layers {config.num_hidden_layers}: {limit}, where settings are searched for")
    return step_memory(config, settings)


def _end_names(count: int, index: int) -> list[int]:
    """The ``ENDS`` of a run that a layer of it is, by its index there; in a run of three, its second is two of them."""
    return [end for end in ENDS if end % count == index and (end >= 0 or count >= LONG) and end < count]
