"""Memory of a training step, from the config: by category and part of the model, and its peak.

``step_memory`` traces one step. ``ExtrapolatedMemory`` needs a few traces of shallow models for any number of layers,
so that a planner can ask for thousands of settings: layers of one level behave alike. At a given point in the step, say
the backward of the MLP of the second layer of a run of equal layers, the live bytes are a constant for each layer of
each run, plus the same temporaries. So they are affine in the lengths of the runs, and within a run affine in the
layer: its ends and their neighbors have the largest. Traces with three layers in each run, and with four in one of
them, give every coefficient. Where some layers have a window and the others attend to all positions, both models of
equal layers are extrapolated: each layer is that of one of them, but for what the attention of the layers before it
saves. The result is that of ``step_memory`` to the byte (``tests/accounting/test_memory.py``).
"""

import bisect
import dataclasses
import re
from collections.abc import Callable, Iterator
from functools import cache, cached_property
from typing import Any

from lightning_llm.accounting.settings import StepSettings
from lightning_llm.accounting.symbolic import AllocationLog, Leaf
from lightning_llm.accounting.symbolic_model import SymbolicModel
from lightning_llm.accounting.symbolic_ops import Operators
from lightning_llm.io.garbage import no_garbage_collection
from lightning_llm.io.units import shown_size
from lightning_llm.model.config import ModelConfig
from lightning_llm.model.parts import CLASS_PATH, INIT_ARGS, name_of, option_of

LEVELS = (2, 1, 0)  # the order of the runs: what early layers save lives the longest, so they save the least
PLACES = ("first", "second", "last but one", "last")  # in a run of at least LONG layers
LONG = 3  # layers that show all there is to a run: its first, its last, and one between
MOST_ROWS = 2**24
MOST_DIFFERENT = 200  # layers whose levels rise: each of them is traced again for each number of rows

Term = tuple[str, str, int]  # part, formula, bytes
Counts = tuple[int, int, int]  # layers at levels 2, 1 and 0
Bytes = tuple[int, int]  # the most live bytes at a point in the step: with gradients, without


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepPoints:
    """A step, point by point, without the optimizer's state.

    Attributes:
        parameters: Bytes of the model's parameters.
        gradients: Bytes of the gradients of all parameters.
        points: The most live bytes at each point in the step, with gradients and without. ``ExtrapolatedMemory`` names
            the points of a layer by its place in its run.
    """

    parameters: int
    gradients: int
    points: dict[str, Bytes]


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepMemory(StepPoints):
    """Bytes of one training step on one device.

    Attributes:
        optimizer_state: Between steps.
        saved: Activations that forward saves for backward, by part of the model.
        terms: The same, term by term: how many there are of each (part, formula, bytes).
        peak: The most live bytes, of everything.
        peak_point: The point in the step at which that is.
        at_peak: What is live then, by category and part.
    """

    optimizer_state: int
    saved: dict[str, int]
    terms: dict[Term, int]
    peak: int
    peak_point: str
    at_peak: dict[tuple[str, str], int]

    @property
    def step_peak(self) -> int:
        """The peak without what is always live: parameters and optimizer state."""
        return self.peak - self.parameters - self.optimizer_state


@no_garbage_collection()
def step_memory(config: ModelConfig, settings: StepSettings | None = None, **options: Any) -> StepMemory:
    """The memory of a step of ``LanguageModel``, which frees the gradients when the optimizer has stepped.

    Args:
        config: ``vocab_size`` must be known.
        settings: Of the step. What processes share has no influence here.
        options: Those of :class:`~lightning_llm.accounting.settings.StepSettings`, such as ``rows`` and
            ``context_length``, instead of ``settings`` or in place of some of them.

    Raises:
        ValueError: The vocabulary is not known, a part has to be measured, the precision is unknown, or the
            setting is not covered: dropout on a CPU or with ``document_mask``, or a ``head_dim`` for which torch has no
            kernel that saves memory.
    """
    settings = StepSettings(**options) if settings is None else dataclasses.replace(settings, **options)
    if config.dropout and (settings.document_mask or settings.device == "cpu"):
        is_cpu = settings.device == "cpu"
        where, fix = ("on a CPU", "name a GPU by --device") if is_cpu else ("with document_mask", "unset that")
        raise ValueError(f"dropout {where} is not covered by the estimate: set dropout to 0, or {fix}")
    log = AllocationLog()
    ops = Operators(log, settings.device, settings.precision)
    model = SymbolicModel(config, ops, settings)
    state_bytes = sum(int(p.elements) * (settings.state_itemsize or p.itemsize) for p in model.parameters)
    state = round(settings.state_per_parameter * state_bytes)
    leaves = [p.node for p in model.parameters if isinstance(p.node, Leaf)]
    parameters = gradients = log.live["parameters", ""]
    if settings.accumulation > 1:  # a further micro-batch, which needs more than the first: gradients are added to
        for parameter, leaf in zip(model.parameters, leaves, strict=True):
            leaf.gradient = ops.new(*parameter.size, "gradients", "")
    log.reset_peak()
    log.points = {}
    loss = model.loss()
    ops.weight_casts = {}  # autocast ends
    log.save_temporaries()
    saved = {part: size for (category, part), size in log.live.items() if category == "saved" and size}
    terms = dict(log.terms("saved"))
    ops.backward(loss)
    return StepMemory(
        parameters=parameters,
        gradients=gradients,
        points=log.points,
        optimizer_state=state,
        saved=saved,
        terms=terms,
        peak=log.peak + state,
        peak_point=log.peak_point,
        at_peak={key: n for key, n in {**log.peak_live, ("optimizer state", ""): state}.items() if n},
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
    """The most rows whose bytes, as ``needed`` tells them, are at most ``memory``; errors as in ``largest_batch``."""
    rows = largest_fitting(lambda rows: needed(rows) <= memory, MOST_ROWS)
    if not rows:
        raise too_little(memory, needed(1), " for one row")
    return rows


def too_little(memory: int, least: int, what: str = "") -> ValueError:
    """The error where nothing fits: it says how much memory would do."""
    smallest = f"the smallest that fits is {least:,} bytes ({shown_size(least)})"
    return ValueError(f"memory of {memory:,} bytes is too little{what}: {smallest}")


def largest_fitting(fits: Callable[[int], bool], most: int) -> int:
    """The largest number up to ``most`` that fits, if all smaller ones do; 0 for none. Large ones are tried last."""
    if not fits(1):
        return 0
    low = 1
    while low < most and fits(min(2 * low, most)):
        low = min(2 * low, most)
    return low + bisect.bisect_left(range(low + 1, min(2 * low, most)), True, key=lambda number: not fits(number))


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
        return _merged(windowed, self._full.with_layers(counts), counts, self.every, *self._more)

    @cached_property
    def _more(self) -> Bytes:
        """What full attention saves beyond that of a window: in each layer, and once (the causal mask)."""
        one, two = (self._full.live_after_layers(n) - self._windowed.live_after_layers(n) for n in (1, 2))
        in_each = two - one
        return in_each, one - in_each


class _EqualLayers:
    """``step_memory`` of a model in which all layers of one level are alike."""

    def __init__(self, config: ModelConfig, settings: StepSettings) -> None:
        self.config, self.settings = config, settings
        self._traces: dict[Counts, StepPoints] = {}

    def live_after_layers(self, layers: int) -> int:
        """Bytes at the first point after all layers, of which none is at a level."""
        return self._trace((0, 0, layers)).points["final norm"][0]

    def with_layers(self, counts: Counts) -> StepPoints:
        """As that of ``ExtrapolatedMemory``."""
        shortened: Counts = (min(counts[0], LONG), min(counts[1], LONG), min(counts[2], LONG))
        base = self._trace(shortened)
        longer = []  # for each long run its further layers, and a trace with one of them
        for run, count in enumerate(counts):
            if count > LONG:
                deep, shallow, rest = (layers + (place == run) for place, layers in enumerate(shortened))
                longer.append((count - LONG, self._trace((deep, shallow, rest))))

        def extended(value: Callable[[StepPoints], int]) -> int:
            return value(base) + sum(more * (value(trace) - value(base)) for more, trace in longer)

        def point(name: str) -> Bytes:
            return extended(lambda trace: trace.points[name][0]), extended(lambda trace: trace.points[name][1])

        return StepPoints(
            parameters=extended(lambda trace: trace.parameters),
            gradients=extended(lambda trace: trace.gradients),
            points={name: point(name) for name in base.points},
        )

    def _trace(self, counts: Counts) -> StepPoints:
        if counts not in self._traces:
            levels = [level for level, count in zip(LEVELS, counts, strict=True) for _ in range(count)]
            config = dataclasses.replace(self.config, num_hidden_layers=len(levels), checkpoint_level=levels)
            memory = step_memory(config, self.settings)
            places = [place for level, count in zip(LEVELS, counts, strict=True) for place in _places(level, count)]
            points: dict[str, Bytes] = {}
            for name, size in memory.points.items():
                layer = re.search(r"layer (\d+)", name)
                for place in places[int(layer[1])] if layer else [""]:
                    points[re.sub(r"layer \d+", place, name)] = size
            self._traces[counts] = StepPoints(parameters=memory.parameters, gradients=memory.gradients, points=points)
        return self._traces[counts]


def _merged(windowed: StepPoints, full: StepPoints, counts: Counts, every: int, more: int, once: int) -> StepPoints:
    """The step of layers with a window, but for the last of every few, which attends to all positions.

    Args:
        windowed: The step in which every layer has the window.
        full: The step in which none has.
        counts: Layers at level 2, 1 and 0.
        every: Of how many layers the last is full.
        more: Bytes that a full layer saves beyond one with a window.
        once: Bytes that the first full layer saves for all.
    """
    points: dict[str, Bytes] = {}

    def add(name: str, size: Bytes, more: int) -> None:
        points[name] = size[0] + more, size[1] + more

    layers = sum(counts)
    for name, size in windowed.points.items():
        if "layer" not in name and name != "embeddings":
            is_saved = name != "backward, embeddings"
            add(name, size, once + more * (layers // every) * is_saved)
    add("embeddings", windowed.points["embeddings"], 0)
    first = 0
    for level, count in zip(LEVELS, counts, strict=True):
        for layer in _ends(range(first, first + count), every):
            before = layer // every  # full layers
            is_full = (layer + 1) % every == 0
            for name, size in _points_of(full if is_full else windowed, level, count, layer - first):
                has_mask = before > 0 or name.startswith("backward")
                changed = -more * (layer - before) if is_full else more * before + once * has_mask
                add(name.format(layer), size, changed)
        first += count
    return StepPoints(parameters=windowed.parameters, gradients=windowed.gradients, points=points)


def _ends(run: range, every: int) -> list[int]:
    """Some layers of a run, the one with the most live bytes among them: bytes change evenly from period to period."""
    fulls = [layer for layer in run if (layer + 1) % every == 0]
    near = {full + step for full in fulls[:2] + fulls[-2:] for step in (-1, 0, 1)}
    return sorted(near & {*run} | {*run[:2], *run[-2:]})


def _points_of(step: StepPoints, level: int, count: int, place: int) -> Iterator[tuple[str, Bytes]]:
    """The points of one layer of a run, with ``{}`` for its number: evenly between the second and the last but one."""
    names = _places(level, count)[place]
    near, far = (names[0],) * 2 if names else (f"the {which} layer at level {level}" for which in PLACES[1:3])
    for name, size in step.points.items():
        if near in name:
            ends = zip(size, step.points[name.replace(near, far)], strict=True)
            most, rest = (low + (high - low) * (place - 1) // max(count - LONG, 1) for low, high in ends)
            yield name.replace(near, "layer {}"), (most, rest)


def step_points(config: ModelConfig, settings: StepSettings) -> StepPoints:
    """The points of ``step_memory``, from a few traces. Errors as there, and for over ``MOST_DIFFERENT``."""
    levels = config.checkpoint_levels
    if levels == sorted(levels, reverse=True):
        deep, shallow, rest = map(levels.count, LEVELS)
        return ExtrapolatedMemory(config, settings).with_layers((deep, shallow, rest))
    if len(levels) > MOST_DIFFERENT:
        most = f"levels may rise in at most {MOST_DIFFERENT} layers"
        raise ValueError(f"num_hidden_layers {len(levels)}: {most}, where the rows that fit are searched for")
    return step_memory(config, settings)


@cache
def _places(level: int, count: int) -> list[list[str]]:
    """Names for each layer of a run, by its place there; a layer may have several."""
    if count < LONG:
        return [[f"layer {layer} of those at level {level}"] for layer in range(count)]
    names = list(zip((0, 1, count - 2, count - 1), PLACES, strict=True))
    return [[f"the {name} layer at level {level}" for place, name in names if place == layer] for layer in range(count)]
