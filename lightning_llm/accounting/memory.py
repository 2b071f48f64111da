"""Memory of a training step, from the config: by category and part of the model, and its peak.

``step_memory`` traces one step: the model of ``symbolic_model.py`` runs forward and backward on symbolic tensors, which
have sizes and no values, and an ``AllocationLog`` counts the bytes that are live at each point. ``symbolic.py`` says
why these are the bytes of a real step. ``extrapolated_memory.py`` has the same for any depth, from a few traces.
"""

import bisect
import dataclasses
from collections.abc import Callable
from typing import Any

from lightning_llm.accounting.settings import StepSettings
from lightning_llm.accounting.symbolic import AllocationLog, Leaf, LiveBytes, TracePoint
from lightning_llm.accounting.symbolic_model import SymbolicModel
from lightning_llm.accounting.symbolic_ops import Operators
from lightning_llm.io.garbage import no_garbage_collection
from lightning_llm.io.units import shown_size
from lightning_llm.model.config import ModelConfig

MOST_ROWS = 2**24  # of a step, for each process; it has at most 504 divisors

Term = tuple[str, str, int]  # part, formula, bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryTrace:
    """A step, point by point, without the optimizer's state.

    Attributes:
        parameters: Bytes of the model's parameters.
        gradients: Bytes of the gradients of all parameters.
        points: The most live bytes at each point in the step.
    """

    parameters: int
    gradients: int
    points: dict[TracePoint, LiveBytes]


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepMemory(MemoryTrace):
    """Bytes of one training step on one device.

    Attributes:
        optimizer_state: Between steps.
        saved: Activations that forward saves for backward, by part of the model.
        terms: The same, term by term: how many there are of each (part, formula, bytes).
        peak: The most live bytes, of everything.
        peak_point: The point in the step at which that is, in words.
        at_peak: What is live then, by category (those of ``measure.timeline``) and part.
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
    saved = {part: size for (category, part), size in log.live.items() if category == "activations" and size}
    terms = dict(log.terms("activations"))
    ops.backward(loss)
    return StepMemory(
        parameters=parameters,
        gradients=gradients,
        points=log.points,
        optimizer_state=state,
        saved=saved,
        terms=terms,
        peak=log.peak + state,
        peak_point=log.peak_point.in_words(),
        at_peak={key: n for key, n in {**log.peak_live, ("optimizer_state", ""): state}.items() if n},
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


def too_little(memory: int, needed: int, what: str = "") -> ValueError:
    """The error where nothing fits: it says how much memory would do."""
    smallest = f"the smallest that fits is {needed:,} bytes ({shown_size(needed)})"
    return ValueError(f"memory of {memory:,} bytes is too little{what}: {smallest}")


def largest_fitting(fits: Callable[[int], bool], limit: int) -> int:
    """The largest number up to ``limit`` that fits, if all smaller ones do; 0 for none. Large ones are tried last."""
    if not fits(1):
        return 0
    low = 1
    while low < limit and fits(min(2 * low, limit)):
        low = min(2 * low, limit)
    return low + bisect.bisect_left(range(low + 1, min(2 * low, limit)), True, key=lambda number: not fits(number))
