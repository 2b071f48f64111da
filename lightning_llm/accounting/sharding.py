"""Memory of a step that several processes share: what DDP adds, and what FSDP2 leaves on each.

DDP holds everything on every process, and copies of all gradients in its buckets. FSDP2 (``fully_shard`` on every
block, then on the root) holds a share of 1/W of parameters, gradients and optimiser state, and gathers what it needs:

- the root's own parameters (embedding, final norm, head) from the start of forward to the end of backward;
- a block's while it runs, and beside them those of the next one, which is gathered ahead. In forward a block's copies
  are freed behind it, in backward they come again;
- in backward the whole gradients of a block, and the buffer from which those of the block before are reduced and
  scattered, in float32 under ``bf16-mixed``; the gradients of head and final norm from the loss to the end.

FSDP2 cuts the first dimension and rounds the share up. Here the share is n/W: exact where W divides the first
dimensions, and else too small by less than one row of each matrix. The scheme is that of Zhao et al. 2023, "PyTorch
FSDP" (arXiv:2304.11277), section 3.
"""

import dataclasses

from lightning_llm.accounting.layered import StepMoments
from lightning_llm.accounting.parameters import parameters_by_part
from lightning_llm.accounting.symbolic import BFLOAT16, FLOAT32
from lightning_llm.model.config import ModelConfig

STRATEGIES = ("ddp", "fsdp2")
GATHERED_BLOCKS = 2  # the one that runs, and the one that is fetched ahead


@dataclasses.dataclass(frozen=True)
class SharedMemory:
    """Bytes on one process.

    Attributes:
        parameters: Its share.
        gradients: Its share.
        optimizer_state: Its share.
        buckets: Of DDP.
        gathered: At most at once, of FSDP2: whole parameters.
        peak: The most at once, all included.
        peak_moment: When.
    """

    parameters: int
    gradients: int
    optimizer_state: int
    buckets: int
    gathered: int
    peak: int
    peak_moment: str


def walk_precision(precision: str, strategy: str) -> str:
    """The precision that a step's activations have: FSDP2 gathers in bf16; float32 stays in the share."""
    return "bf16-true" if (precision, strategy) == ("bf16-mixed", "fsdp2") else precision


def shared_memory(
    config: ModelConfig,
    step: StepMoments,
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
        step: Its moments, in ``walk_precision``.
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
    storage = BFLOAT16 if precision == "bf16-true" else FLOAT32
    counts = parameters_by_part(config)
    elements = sum(counts.values())
    state = round(elements * state_per_parameter * (state_itemsize or storage))
    if strategy == "ddp" or world_size == 1:
        buckets = step.gradients if world_size > 1 and not gradient_views else 0
        moment, (peak, _) = max(step.moments.items(), key=lambda item: item[1][0])
        return SharedMemory(step.parameters, step.gradients, state, buckets, 0, peak + state + buckets, moment)
    product = FLOAT32 if precision == "32-true" else BFLOAT16
    root = root_elements(config)
    block = (elements - root) // config.num_hidden_layers
    share, state = -(-elements * storage // world_size), -(-state // world_size)
    blocks = min(GATHERED_BLOCKS, config.num_hidden_layers)

    def extra(moment: str) -> int:
        in_block, in_backward = "layer" in moment, moment.startswith("backward")
        size = (root + (blocks * block if in_block else 0)) * product
        if in_block and in_backward:
            size += block * reduced_size(precision)  # of the block before
            size += block * product if moment.endswith("attention") else 0  # till then it is among the temporaries
        if in_backward and moment != "backward, loss":  # likewise
            size += _head_and_norm(config, root) * product
        return size

    def needed(moment: str) -> int:
        total, rest = step.moments[moment]
        return rest - step.parameters + share + state + (total - rest) // world_size + extra(moment)

    moment, peak = max(((moment, needed(moment)) for moment in step.moments), key=lambda item: item[1])
    return SharedMemory(share, share, state, 0, (root + blocks * block) * product, peak, moment)


def reduced_size(precision: str) -> int:
    """Bytes of a number in the gradients that FSDP2 reduces and scatters."""
    return BFLOAT16 if precision == "bf16-true" else FLOAT32


def root_elements(config: ModelConfig) -> int:
    """Parameters outside the blocks: embeddings, final norm, head."""
    counts = parameters_by_part(config)
    return counts["embeddings"] + counts["head"] + config.hidden_size * (2 if config.norm == "layernorm" else 1)


def _head_and_norm(config: ModelConfig, root: int) -> int:
    assert config.vocab_size is not None
    positions = config.max_position_embeddings * config.hidden_size if config.position == "learned" else 0
    return root - positions - (0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size)
