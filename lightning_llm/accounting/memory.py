"""Memory of a training step, from the config: by category and part of the model, and its peak.

``step_memory`` traces one step. ``LayeredMemory`` needs a few traces of shallow models for any number of layers, so
that a planner can ask for thousands of settings: layers of one level behave alike. At a given point in the step, say
the backward of the MLP of the second layer of a run of equal layers, the live bytes are a constant for each layer of
each run, plus the same temporaries. So they are affine in the lengths of the runs, and within a run affine in the
layer: its ends and their neighbors have the largest. Traces with three layers in each run, and with four in one of
them, give every coefficient. The result is that of ``step_memory`` to the byte (``tests/accounting/test_layered.py``).

``shared_memory`` is that of one of several processes. DDP holds everything on each, and buckets of the gradients' size,
which outlive the step; gradients are copied into them, or views of them. FSDP2 (``fully_shard`` on every block, then on
the root) holds a share of 1/W of parameters, gradients and optimizer state, and gathers what it needs:

- the root's own parameters (embedding, final norm, head) from the start of forward to the end of backward;
- a block's while it runs, and those of the next one, which is prefetched. In forward a block's copies are freed after
  it, in backward they are gathered again;
- in backward the whole gradients of a block, and the buffer from which those of the block before are reduced and
  scattered, in float32 under ``bf16-mixed``; the gradients of head and final norm from the loss to the end.

FSDP2 cuts the first dimension and rounds the share up. Here the share is n/W: exact where W divides the first
dimensions, and else too small by less than one row of each matrix. The scheme is that of Zhao et al. 2023, "PyTorch
FSDP" (arXiv:2304.11277), section 3.
"""

import bisect
import dataclasses
import re
from collections.abc import Callable
from typing import Any

from lightning_llm.accounting.counts import UNMEASURED, Measured, norm_elements, parameters_by_part
from lightning_llm.accounting.hardware import shown_size
from lightning_llm.accounting.symbolic import AllocationLog, Leaf
from lightning_llm.accounting.symbolic_model import SymbolicModel
from lightning_llm.accounting.symbolic_ops import Operators, item_sizes
from lightning_llm.io.garbage import no_garbage_collection
from lightning_llm.model.config import ModelConfig

LEVELS = (2, 1, 0)  # the order of the runs: what early layers save lives the longest, so they save the least
LONG = 3  # layers that show all there is to a run: its first, its last, and one between
MOST_ROWS = 2**24
MOST_DIFFERENT = 200  # layers, where each has to be traced again for each number of rows
STRATEGIES = ("ddp", "fsdp2", "fsdp2_deferred")
GATHERED_BLOCKS = 2  # the one that runs, and the one that is prefetched

Term = tuple[str, str, int]  # part, formula, bytes
Counts = tuple[int, int, int]  # layers at levels 2, 1 and 0
Bytes = tuple[int, int]  # the most live bytes at a point in the step: with gradients, without


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepPoints:
    """A step, point by point, without the optimizer's state.

    Attributes:
        parameters: Bytes of the model's parameters.
        gradients: Bytes of the gradients of all parameters.
        points: The most live bytes at each point in the step, with gradients and without. ``LayeredMemory`` names the
            points of a layer by its place in its run.
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

    @property
    def kept(self) -> dict[str, int]:
        """The former name of ``saved``, until 0.2."""
        return self.saved

    @property
    def peak_moment(self) -> str:
        """The former name of ``peak_point``, until 0.2."""
        return self.peak_point


@no_garbage_collection()
def step_memory(
    config: ModelConfig,
    *,
    rows: int,
    context_length: int,
    precision: str = "32-true",
    device: str = "cpu",
    loss_chunks: int | None = None,
    accumulation: int = 1,
    state_per_parameter: int = 2,
    state_itemsize: int | None = None,
    measured: Measured = UNMEASURED,
    document_mask: bool = False,
) -> StepMemory:
    """The memory of a step of ``LanguageModel``, which frees the gradients when the optimizer has stepped.

    Args:
        config: ``vocab_size`` must be known.
        rows: Of a micro-batch.
        context_length: Tokens per row.
        precision: ``32-true``, ``bf16-true`` or ``bf16-mixed``.
        device: ``cpu`` or ``cuda``: they differ in attention, in norms and in the sizes of tiles.
        loss_chunks: As ``LanguageModel`` takes it.
        accumulation: Micro-batches per step.
        state_per_parameter: Tensors of the optimizer for each parameter, of its shape: 2 for AdamW.
        state_itemsize: Bytes of each of their numbers: 2 for AdamW's ``state_dtype="bfloat16"``. ``None``: those of the
            parameter's dtype.
        measured: Parts that the formulas do not know.
        document_mask: Attention stays inside documents; the longest fills its row.

    Raises:
        ValueError: The vocabulary is not known, a part has to be measured, the precision is unknown, or the
            setting is not covered: dropout on a CPU or with ``document_mask``, or a ``head_dim`` for which torch has no
            kernel that saves memory.
    """
    if config.dropout and (document_mask or device == "cpu"):
        where, fix = ("on a CPU", "name a GPU by --device") if device == "cpu" else ("with document_mask", "unset that")
        raise ValueError(f"dropout {where} is not covered by the estimate: set dropout to 0, or {fix}")
    log = AllocationLog()
    ops = Operators(log, device, precision)
    model = SymbolicModel(config, ops, rows, context_length, measured, documents=document_mask)
    state = state_per_parameter * sum(int(p.elements) * (state_itemsize or p.itemsize) for p in model.parameters)
    leaves = [p.node for p in model.parameters if isinstance(p.node, Leaf)]
    parameters = gradients = log.live["parameters", ""]
    if accumulation > 1:  # a further micro-batch, which needs more than the first: gradients are added to
        for parameter, leaf in zip(model.parameters, leaves, strict=True):
            leaf.gradient = ops.new(*parameter.size, "gradients", "")
    log.reset_peak()
    log.points = {}
    loss = model.loss(loss_chunks)
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


def largest_batch(config: ModelConfig, memory: int, *, extra: int = 0, **settings: Any) -> int:
    """The most rows of a micro-batch whose step fits a memory.

    Args:
        config: The model.
        memory: Bytes.
        extra: Bytes that are needed besides, such as the buckets of DDP.
        settings: As ``step_memory`` takes them, without ``rows``.

    Raises:
        ValueError: Not even one row fits; the message says how much memory one row needs.
    """
    return most_rows(lambda rows: step_memory(config, rows=rows, **settings).peak + extra, memory)


def most_rows(needed: Callable[[int], int], memory: int) -> int:
    """The most rows whose bytes, as ``needed`` tells them, are at most ``memory``; errors as in ``largest_batch``."""
    rows = most_that_fit(lambda rows: needed(rows) <= memory, MOST_ROWS)
    if not rows:
        raise too_little(memory, needed(1), " for one row")
    return rows


def too_little(memory: int, least: int, what: str = "") -> ValueError:
    """The error where nothing fits: it says how much memory would do."""
    smallest = f"the smallest that fits is {least:,} bytes ({shown_size(least)})"
    return ValueError(f"memory of {memory:,} bytes is too little{what}: {smallest}")


def most_that_fit(fits: Callable[[int], bool], most: int) -> int:
    """The largest number up to ``most`` that fits, if all smaller ones do; 0 for none. Large ones are tried last."""
    if not fits(1):
        return 0
    low = 1
    while low < most and fits(min(2 * low, most)):
        low = min(2 * low, most)
    return low + bisect.bisect_left(range(low + 1, min(2 * low, most)), True, key=lambda number: not fits(number))


class LayeredMemory:
    """``step_memory`` of one setting, for any number of layers at each level.

    Args:
        config: Its number of layers and their levels do not matter.
        settings: As ``step_memory`` takes them.
    """

    def __init__(self, config: ModelConfig, **settings: Any) -> None:
        self.config, self.settings = config, settings
        self._traces: dict[Counts, StepPoints] = {}

    def at(self, counts: Counts) -> StepPoints:
        """The step with so many layers at level 2, then 1, then 0."""
        if len(set(self.config.attention_windows)) > 1:  # layers of one level differ
            _check_different(sum(counts))
            return self._trace(counts)
        base_counts = deep, shallow, rest = tuple(min(count, LONG) for count in counts)
        base = self._trace((deep, shallow, rest))
        longer = []  # for each long run its further layers, and a trace with one of them
        for run, count in enumerate(counts):
            if count > LONG:
                deep, shallow, rest = (own + (place == run) for place, own in enumerate(base_counts))
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
            memory = step_memory(config, **self.settings)
            places = [place for level, count in zip(LEVELS, counts, strict=True) for place in _places(level, count)]
            points = {
                re.sub(r"layer \d+", place, name): size
                for name, size in memory.points.items()
                for layer in [re.search(r"layer (\d+)", name)]
                for place in (places[int(layer[1])] if layer else [""])
            }
            self._traces[counts] = StepPoints(parameters=memory.parameters, gradients=memory.gradients, points=points)
        return self._traces[counts]


def step_points(config: ModelConfig, **settings: Any) -> StepPoints:
    """The points of ``step_memory``, from a few traces. Errors as there, and for over ``MOST_DIFFERENT``."""
    levels = config.checkpoint_levels
    if levels == sorted(levels, reverse=True):
        deep, shallow, rest = map(levels.count, LEVELS)
        return LayeredMemory(config, **settings).at((deep, shallow, rest))
    _check_different(len(levels))
    return step_memory(config, **settings)


def _check_different(layers: int) -> None:
    if layers > MOST_DIFFERENT:
        alike = f"at most {MOST_DIFFERENT} layers may differ in window, or have levels that rise"
        raise ValueError(f"num_hidden_layers {layers}: {alike}, where the rows that fit are searched for")


def _places(level: int, count: int) -> list[list[str]]:
    """Names for each layer of a run, by its place there; a layer may have several."""
    if count < LONG:
        return [[f"layer {layer} of those at level {level}"] for layer in range(count)]
    names = [(0, "first"), (1, "second"), (count - 2, "last but one"), (count - 1, "last")]
    return [[f"the {name} layer at level {level}" for own, name in names if own == layer] for layer in range(count)]


# ---- several processes


@dataclasses.dataclass(frozen=True)
class SharedMemory:
    """Bytes on one process.

    Attributes:
        parameters: Its share.
        gradients: Its share.
        optimizer_state: Its share.
        buckets: Of DDP.
        gathered: The most at once, of FSDP2: whole parameters.
        peak: The most live bytes, of everything.
        peak_point: The point in the step at which that is.
    """

    parameters: int
    gradients: int
    optimizer_state: int
    buckets: int
    gathered: int
    peak: int
    peak_point: str


def activation_precision(precision: str, strategy: str) -> str:
    """The precision of a step's activations: FSDP2 gathers in bf16; float32 stays in the share."""
    return "bf16-true" if precision == "bf16-mixed" and strategy != "ddp" else precision


def shared_memory(
    config: ModelConfig,
    step: StepPoints,
    *,
    precision: str,
    measured: Measured = UNMEASURED,
    strategy: str = "ddp",
    world_size: int = 1,
    accumulation: int = 1,
    gradient_views: bool = False,
    state_per_parameter: float = 2,
    state_itemsize: int | None = None,
) -> SharedMemory:
    """The memory of a step on one of several processes.

    Args:
        config: The model, with its true number of layers.
        step: Its points, in ``activation_precision``.
        precision: Of the run.
        measured: As in ``step_memory``.
        strategy: ``ddp``, ``fsdp2`` or ``fsdp2_deferred``; with one process all are the same.
        world_size: Processes.
        accumulation: Micro-batches per step.
        gradient_views: DDP's gradients are views of its buckets.
        state_per_parameter: As in ``step_memory``; a mean where parameters differ.
        state_itemsize: As in ``step_memory``.

    Raises:
        ValueError: Another strategy.
    """
    if strategy not in STRATEGIES:
        raise ValueError(f"strategy {strategy!r} is not covered: choose one of {', '.join(STRATEGIES)}")
    storage, gathered_size = item_sizes(precision)
    elements = sum(parameters_by_part(config, measured).values())
    state = round(elements * state_per_parameter * (state_itemsize or storage))
    if strategy == "ddp" or world_size == 1:
        in_buckets = step.gradients if world_size > 1 else 0  # as long as training lasts
        has_views = world_size > 1 and gradient_views
        point = max(step.points, key=lambda name: step.points[name][has_views])
        peak = step.points[point][has_views] + state + in_buckets
        buckets = 0 if has_views else in_buckets
        return SharedMemory(step.parameters, step.gradients, state, buckets, 0, peak, point)
    root, head_and_norm = root_elements(config, measured), _head_and_norm(config, measured)
    block = (elements - root) // config.num_hidden_layers
    share, state = -(-elements * storage // world_size), -(-state // world_size)
    blocks = min(GATHERED_BLOCKS, config.num_hidden_layers) * block
    is_deferred = strategy == "fsdp2_deferred" and accumulation > 1
    gradients = elements * storage if is_deferred else share

    def needed(point: str) -> int:
        total, rest = step.points[point]
        in_block, in_backward = "layer" in point, point.startswith("backward")
        gathered = root + (blocks if in_block else 0)
        if in_block and in_backward and point.endswith("attention"):  # till then its gradients are temporaries
            gathered += block
        if in_backward and point != "backward, loss":  # likewise
            gathered += head_and_norm
        reduced = block * storage if in_block and in_backward else 0  # of the block before
        in_shares = (total - rest) * storage // (gathered_size * world_size)  # reduced in the parameters' dtype
        held = share + state + (gradients if is_deferred else in_shares)
        return rest - step.parameters + held + gathered * gathered_size + reduced

    point = max(step.points, key=needed)
    return SharedMemory(share, gradients, state, 0, (root + blocks) * gathered_size, needed(point), point)


def root_elements(config: ModelConfig, measured: Measured) -> int:
    """Parameters outside the blocks: embeddings, final norm, head."""
    counts = parameters_by_part(config, measured)
    return counts["embeddings"] + counts["head"] + counts.get("loss", 0) + norm_elements(config, measured)


def _head_and_norm(config: ModelConfig, measured: Measured) -> int:
    """Of head and final norm, whether the head is tied or not."""
    untied = dataclasses.replace(config, tie_word_embeddings=False)
    return parameters_by_part(untied, measured)["head"] + norm_elements(config, measured)
