"""Memory of a step that several processes share: what DDP adds, and what FSDP2 leaves on each.

DDP holds everything on every process, and copies of all gradients in its buckets. FSDP2 (``fully_shard`` on every
block, then on the root) holds a share of 1/W of parameters, gradients and optimizer state, and gathers what it needs:

- the root's own parameters (embedding, final norm, head) from the start of forward to the end of backward;
- a block's while it runs, and those of the next one, which is prefetched. In forward a block's copies are freed after
  it, in backward they are gathered again;
- in backward the whole gradients of a block, and the buffer from which those of the block before are reduced and
  scattered, in float32 under ``bf16-mixed``; the gradients of head and final norm from the loss to the end.

FSDP2 cuts the first dimension and rounds the share up. Here the share is n/W: exact where W divides the first
dimensions, and else too small by less than one row of each matrix. The scheme is that of Zhao et al. 2023, "PyTorch
FSDP" (arXiv:2304.11277), section 3.
"""

import dataclasses

from lightning_llm.accounting.counts import parameters_by_part
from lightning_llm.accounting.memory import StepPoints
from lightning_llm.accounting.symbolic_ops import PRECISIONS
from lightning_llm.model.config import ModelConfig

STRATEGIES = ("ddp", "fsdp2")
GATHERED_BLOCKS = 2  # the one that runs, and the one that is prefetched


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
    return "bf16-true" if (precision, strategy) == ("bf16-mixed", "fsdp2") else precision


def shared_memory(
    config: ModelConfig,
    step: StepPoints,
    *,
    precision: str,
    strategy: str = "ddp",
    world_size: int = 1,
    gradient_views: bool = False,
    state_per_parameter: float = 2,
    state_itemsize: int | None = None,
) -> SharedMemory:
    """The memory of a step on one of several processes.

    Args:
        config: The model, with its true number of layers.
        step: Its points, in ``activation_precision``.
        precision: Of the run.
        strategy: ``ddp`` or ``fsdp2``; with one process both are the same.
        world_size: Processes.
        gradient_views: DDP's gradients are views of its buckets.
        state_per_parameter: As in ``step_memory``; a mean where parameters differ.
        state_itemsize: As in ``step_memory``.

    Raises:
        ValueError: Another strategy.
    """
    if strategy not in STRATEGIES:
        raise ValueError(f"strategy {strategy!r} is not covered: choose one of {', '.join(STRATEGIES)}")
    storage, gathered_size = PRECISIONS[precision]
    elements = sum(parameters_by_part(config).values())
    state = round(elements * state_per_parameter * (state_itemsize or storage))
    if strategy == "ddp" or world_size == 1:
        buckets = step.gradients if world_size > 1 and not gradient_views else 0
        point = max(step.points, key=lambda name: step.points[name][0])
        peak = step.points[point][0] + state + buckets
        return SharedMemory(step.parameters, step.gradients, state, buckets, 0, peak, point)
    root, head_and_norm = root_elements(config), _head_and_norm(config)
    block = (elements - root) // config.num_hidden_layers
    share, state = -(-elements * storage // world_size), -(-state // world_size)
    blocks = min(GATHERED_BLOCKS, config.num_hidden_layers) * block

    def needed(point: str) -> int:
        total, rest = step.points[point]
        in_block, in_backward = "layer" in point, point.startswith("backward")
        gathered = root + (blocks if in_block else 0)
        if in_block and in_backward and point.endswith("attention"):  # till then its gradients are temporaries
            gathered += block
        if in_backward and point != "backward, loss":  # likewise
            gathered += head_and_norm
        reduced = block * storage if in_block and in_backward else 0  # of the block before
        held = share + state + (total - rest) // world_size
        return rest - step.parameters + held + gathered * gathered_size + reduced

    point = max(step.points, key=needed)
    return SharedMemory(share, share, state, 0, (root + blocks) * gathered_size, needed(point), point)


def root_elements(config: ModelConfig) -> int:
    """Parameters outside the blocks: embeddings, final norm, head."""
    counts = parameters_by_part(config)
    return counts["embeddings"] + counts["head"] + _norm_elements(config)


def _head_and_norm(config: ModelConfig) -> int:
    """Of head and final norm, whether the head is tied or not."""
    untied = dataclasses.replace(config, tie_word_embeddings=False)
    return parameters_by_part(untied)["head"] + _norm_elements(config)


def _norm_elements(config: ModelConfig) -> int:
    return config.hidden_size * (2 if config.norm == "layernorm" else 1)
