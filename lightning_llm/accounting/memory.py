"""Memory of a training step, from the config: by kind and part, and the peak with the moment at which it occurs."""

import dataclasses
from collections.abc import Callable
from typing import Any

from lightning_llm.accounting.symbolic import Leaf, Ledger
from lightning_llm.accounting.symbolic_model import ShadowModel, sizes_of
from lightning_llm.accounting.symbolic_ops import PRECISIONS, Operators
from lightning_llm.model.config import ModelConfig

Term = tuple[str, str, int]  # part, formula, bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepMemory:
    """Bytes of one training step on one device.

    Attributes:
        parameters: Of the model.
        gradients: Of all parameters.
        optimizer_state: Between steps.
        kept: Activations that forward leaves for backward, by part.
        terms: The same, term by term: how many there are of each (part, formula, bytes).
        peak: The most at once, all included.
        peak_moment: When.
        at_peak: What is alive then, by kind and part.
        moments: For each moment the most bytes at once, with gradients and without.
    """

    parameters: int
    gradients: int
    optimizer_state: int
    kept: dict[str, int]
    terms: dict[Term, int]
    peak: int
    peak_moment: str
    at_peak: dict[tuple[str, str], int]
    moments: dict[str, tuple[int, int]]

    @property
    def step_peak(self) -> int:
        """The peak without what is always there: parameters and optimiser state."""
        return self.peak - self.parameters - self.optimizer_state


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
) -> StepMemory:
    """The memory of any step but the first, in Lightning's order.

    Args:
        config: ``vocab_size`` must be known.
        rows: Of a micro-batch.
        context_length: Tokens per row.
        precision: ``32-true``, ``bf16-true`` or ``bf16-mixed``.
        device: ``cpu`` or ``cuda``: they differ in attention, in norms and in the sizes of tiles.
        loss_chunks: As ``LanguageModel`` takes it.
        accumulation: Micro-batches per step.
        state_per_parameter: Tensors that the optimiser keeps for each parameter, of its shape: 2 for AdamW.
        state_itemsize: Bytes of each of their numbers: 2 for AdamW's ``state_dtype="bfloat16"``. ``None``: those of the
            parameter's dtype.

    Raises:
        ValueError: The vocabulary is not known, the MLP is the user's own class, the precision is unknown, or the
            setting is not covered: dropout on a CPU.
    """
    if precision not in PRECISIONS:
        raise ValueError(f"precision {precision!r} is not covered: choose one of {', '.join(PRECISIONS)}")
    if config.dropout and device == "cpu":
        raise ValueError("dropout on a CPU is not covered by the estimate: set dropout to 0, or name a GPU by --device")
    ledger = Ledger()
    ops = Operators(ledger, device, precision)
    model = ShadowModel(config, sizes_of(config, rows, context_length), ops, loss_chunks)
    leaves = [p.node for p in model.parameters if isinstance(p.node, Leaf)]
    state = [
        ops.new(p.elements, state_itemsize or p.itemsize, "optimizer state", "")
        for p in model.parameters * state_per_parameter
    ]
    for parameter, leaf in zip(model.parameters, leaves, strict=True):  # of the step before
        leaf.gradient = ops.new(parameter.elements, parameter.itemsize, "gradients", "")
    always = {kind: ledger.live[kind, ""] for kind in ("parameters", "gradients", "optimizer state")}
    ledger.reset_peak()
    ledger.trace = {}
    with ops.autocast():
        loss = model.loss()
    if accumulation == 1:  # else it is a further micro-batch, which needs more than the first
        for leaf in leaves:
            leaf.gradient = None  # zero_grad comes between forward and backward
    ledger.keep()
    kept = {part: size for (kind, part), size in ledger.live.items() if kind == "kept" and size}
    terms = ledger.terms("kept")
    ops.backward(loss)
    del loss
    del state
    return StepMemory(
        parameters=always["parameters"],
        gradients=always["gradients"],
        optimizer_state=always["optimizer state"],
        kept=kept,
        terms=dict(terms),
        peak=ledger.peak,
        peak_moment=ledger.peak_moment,
        at_peak={key: size for key, size in ledger.peak_live.items() if size},
        moments=ledger.trace,
    )


def largest_batch(config: ModelConfig, memory: int, *, extra: int = 0, **settings: Any) -> int:
    """The most rows of a micro-batch whose step fits a memory.

    Args:
        config: The model.
        memory: Bytes.
        extra: Bytes that are needed besides, such as the buckets of DDP.
        settings: As ``step_memory`` takes them, without ``rows``.

    Raises:
        ValueError: Not even one row fits; the message says what would do.
    """
    return most_rows(lambda rows: step_memory(config, rows=rows, **settings).peak + extra, memory)


def most_rows(needed: Callable[[int], int], memory: int) -> int:
    """The most rows whose bytes, as ``needed`` tells them, are at most ``memory``; errors as in ``largest_batch``."""
    smallest = needed(1)
    if smallest > memory:
        raise ValueError(
            f"memory of {memory:,} bytes is too little for one row: the smallest that would do is {smallest:,} bytes "
            f"({smallest / 2**30:.2f} GiB)"
        )
    low, high = 1, 2
    while needed(high) <= memory and high < 2**24:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if needed(middle) <= memory else (low, middle)
    return low
