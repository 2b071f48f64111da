"""Memory of a training step on one of several processes.

DDP holds everything on each, and buckets of the gradients' size, which outlive the step; gradients are copied into
them, or views of them. FSDP2 (``fully_shard`` on every block, then on the root) holds a share of 1/W of parameters,
gradients and optimizer state, and gathers what it needs:

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

from lightning_llm.accounting.counts import block_elements, norm_elements, parameters_by_part
from lightning_llm.accounting.memory_trace import MemoryTrace, TracePoint
from lightning_llm.accounting.step_settings import STRATEGIES, Measured, StepSettings, item_sizes
from lightning_llm.model.config import ModelConfig

GATHERED_BLOCKS = 2  # the one that runs, and the one that is prefetched


@dataclasses.dataclass(frozen=True)
class RankMemory:
    """Bytes of a step on one rank.

    Attributes:
        parameters: Its share.
        gradients: Its share.
        optimizer_state: Its share.
        buckets: Of DDP.
        gathered: The most at once, of FSDP2: whole parameters.
        peak: The most live bytes, of everything.
        peak_point: The point in the step at which that is, in words.
    """

    parameters: int
    gradients: int
    optimizer_state: int
    buckets: int
    gathered: int
    peak: int
    peak_point: str


def rank_memory(config: ModelConfig, trace: MemoryTrace, settings: StepSettings) -> RankMemory:
    """The memory of a step on one of several processes.

    Args:
        config: The model, with its true number of layers.
        trace: Of a step, with ``settings.single_process``.
        settings: Of the run.

    Raises:
        ValueError: Another strategy.
    """
    strategy = settings.strategy
    world_size = settings.world_size
    measured = settings.measured
    if strategy not in STRATEGIES:
        raise ValueError(f"strategy {strategy!r} is not covered: choose one of {', '.join(STRATEGIES)}")
    storage, gathered_size = item_sizes(settings.precision)
    elements = sum(parameters_by_part(config, measured).values())
    state = round(elements * settings.state_per_parameter * (settings.state_itemsize or storage))
    if strategy == "ddp" or world_size == 1:
        in_buckets = trace.gradients if world_size > 1 else 0  # as long as training lasts
        has_views = world_size > 1 and settings.gradient_views
        live = {at: most.without_gradients if has_views else most.total for at, most in trace.points.items()}
        point = max(live, key=live.__getitem__)
        peak = live[point] + state + in_buckets
        buckets = 0 if has_views else in_buckets
        return RankMemory(trace.parameters, trace.gradients, state, buckets, 0, peak, point.in_words())
    root = elements_outside_blocks(config, measured)
    untied = dataclasses.replace(config, tie_word_embeddings=False)  # the head counts, tied or not
    head_and_norm = parameters_by_part(untied, measured)["head"] + norm_elements(config, measured)
    block = block_elements(config, measured)
    share = -(-elements * storage // world_size)
    state = -(-state // world_size)
    blocks = min(GATHERED_BLOCKS, config.num_hidden_layers) * block
    is_deferred = strategy == "fsdp2_deferred" and settings.accumulation > 1
    gradients = elements * storage if is_deferred else share

    def needed(point: TracePoint) -> int:
        total, without_gradients, _ = trace.points[point]
        in_block = point.layer is not None
        in_backward = point.phase != "forward"
        gathered = root + (blocks if in_block else 0)
        if in_block and in_backward and point.stage == "attention":  # till then its gradients are temporaries
            gathered += block
        if in_backward and point.stage != "loss":  # likewise
            gathered += head_and_norm
        reduced = block * storage if in_block and in_backward else 0  # of the block before
        in_shares = (total - without_gradients) * storage // (gathered_size * world_size)  # in the parameters' dtype
        held_always = share + state + (gradients if is_deferred else in_shares)
        return without_gradients - trace.parameters + held_always + gathered * gathered_size + reduced

    point = max(trace.points, key=needed)
    gathered = (root + blocks) * gathered_size
    return RankMemory(share, gradients, state, 0, gathered, needed(point), point.in_words())


def elements_outside_blocks(config: ModelConfig, measured: Measured) -> int:
    """Parameters outside the blocks: embeddings, final norm, head."""
    counts = parameters_by_part(config, measured)
    return counts["embeddings"] + counts["head"] + counts.get("loss", 0) + norm_elements(config, measured)
