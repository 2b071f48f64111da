"""The settings of a training step that its cost depends on, besides the model: one field each.

``memory.py``, ``step_time.py``, the planner, ``estimate`` and ``model.memory_budget`` pass a :class:`StepSettings` on
as it is. A new setting is a field here, what fills it (``training/run_config.py`` from a config, ``settings_of`` in
``training/environment.py`` from a trainer), and the place that uses it.
"""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType

from lightning_llm.io.untrusted import shown

# Defaults of ``TokenDataModule``
CONTEXT_LENGTH = 256  # tokens per row
GLOBAL_BATCH_SIZE = 32  # rows per optimizer step
STRATEGIES = ("ddp", "fsdp2", "fsdp2_deferred")
Affine = tuple[float, float, float]  # a fixed amount, one per token, and one per token and position of its row


PRECISIONS = {"32-true": (4, 4), "bf16-true": (2, 2), "bf16-mixed": (4, 2)}  # bytes: see ``item_sizes``


def item_sizes(precision: str) -> tuple[int, int]:
    """Bytes of a number in a parameter, and in a factor of a matmul.

    Raises:
        ValueError: The precision is unknown.
    """
    if precision not in PRECISIONS:
        raise ValueError(f"precision {shown(precision)} is not covered: choose one of {', '.join(PRECISIONS)}")
    return PRECISIONS[precision]


def weight_dtype(precision: str) -> str:
    """The dtype of the weights under a precision that the accounting covers, by its name in torch."""
    return "bfloat16" if precision == "bf16-true" else "float32"


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeasuredPart:
    """Measurements of a part, for one layer: the second, if there are several.

    Attributes:
        parameters: Number of elements.
        more_parameters: Parameters of all layers beyond as many in each as in this one.
        matrices: Elements in two-dimensional parameters.
        flops: Of matmuls in forward.
        saved: Bytes saved for backward besides the input.
        forward: Bytes of temporaries in forward.
        backward: The same in backward.
    """

    parameters: int
    more_parameters: int
    matrices: int
    flops: Affine
    saved: Affine
    forward: Affine
    backward: Affine


Measured = Mapping[str, MeasuredPart]  # by the kind of part; "block" is all of a block
UNMEASURED: Measured = MappingProxyType({})


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepSettings:
    """A training step on one of several processes.

    Attributes:
        rows: Of a micro-batch on one process.
        context_length: Tokens per row.
        precision: ``32-true``, ``bf16-true`` or ``bf16-mixed``.
        device: ``cpu`` or ``cuda``: they differ in attention, in norms and in the sizes of tiles.
        loss_chunks: As ``LanguageModel`` takes it.
        accumulation: Micro-batches per step.
        document_mask: Attention stays inside documents; the longest fills its row.
        state_per_parameter: Tensors of the optimizer for each parameter, of its shape: 2 for AdamW. A mean where
            parameters differ.
        state_itemsize: Bytes of each of their numbers: 2 for AdamW's ``state_dtype="bfloat16"``. ``None``: those of the
            parameter's dtype.
        measured: Parts that the formulas do not know.
        strategy: ``ddp``, ``fsdp2`` or ``fsdp2_deferred``; with one process all are the same.
        world_size: Processes.
        gradient_views: DDP's gradients are views of its buckets.
    """

    rows: int
    context_length: int
    precision: str = "32-true"
    device: str = "cpu"
    loss_chunks: int | None = None
    accumulation: int = 1
    document_mask: bool = False
    state_per_parameter: float = 2
    state_itemsize: int | None = None
    measured: Measured = dataclasses.field(default_factory=dict, hash=False)
    strategy: str = "ddp"
    world_size: int = 1
    gradient_views: bool = False

    @property
    def single_process(self) -> "StepSettings":
        """Settings for the tensors of one process's step: no optimizer state, and nothing that processes share.

        FSDP2 gathers parameters in bf16 under ``bf16-mixed``; float32 stays in the share.
        """
        is_gathered = self.strategy != "ddp" and self.world_size > 1
        return dataclasses.replace(
            self,
            precision="bf16-true" if is_gathered and self.precision == "bf16-mixed" else self.precision,
            accumulation=min(2, self.accumulation),  # a third micro-batch needs no more than the second
            state_per_parameter=0,
            state_itemsize=None,
            strategy="ddp",
            world_size=1,
            gradient_views=False,
        )


def divisor(micro_batch_size: int | None, devices: int) -> str:
    """Divisor of the global batch, in words."""
    words = f"{devices} device{'s' if devices > 1 else ''}"
    return words if micro_batch_size is None else f"{words} times data.micro_batch_size {micro_batch_size}"


def rows_per_micro_batch(global_batch_size: int, micro_batch_size: int | None, devices: int) -> int:
    """Rows of one micro-batch of one device; by default all of its share of the global batch.

    Raises:
        ValueError: Whole micro-batches do not make up the global batch.
    """
    rows = global_batch_size // devices if micro_batch_size is None else micro_batch_size
    if rows < 1 or global_batch_size % (rows * devices):
        factors = divisor(micro_batch_size, devices)
        raise ValueError(f"data.global_batch_size {global_batch_size} cannot be divided by {factors}: change one")
    return rows
