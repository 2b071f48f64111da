"""How long a step takes, from the config: work over the device's peaks. Made for choosing between settings.

A step is the sum of what it does: matmuls at a share of the device's peak, bytes at a share of its bandwidth, kernel
launches, and what goes over the link between processes. Nothing overlaps. Every share and count that is assumed is a
constant below. The ratios between settings are what matters: an error that all settings share cancels there. The
seconds themselves are worth no more than the assumptions, which docs/accounting.md lists.
"""

import dataclasses
from functools import partial

from lightning_llm.accounting.counts import Dimensions, parameters_by_part, step_flops
from lightning_llm.accounting.hardware import GIGA, TERA, Device, matmul_precision
from lightning_llm.accounting.parts import KNOWN_MLPS, KNOWN_NORMS, layer_groups, norms_of_block, unlisted_parts
from lightning_llm.accounting.sharding import elements_outside_blocks
from lightning_llm.accounting.step_settings import Affine, MeasuredPart, StepSettings, item_sizes
from lightning_llm.model.config import ModelConfig
from lightning_llm.model.parts import name_of

MATMUL_SHARE = 0.6  # of the peak, for large matmuls; assumed
ATTENTION_SHARE = 0.35  # Shah et al. 2024 (FlashAttention-3), section 1: what FlashAttention-2 reaches on an H100
BANDWIDTH_SHARE = 0.8  # of the sheet's; assumed
LINK_BANDWIDTH = 100 * GIGA  # bytes per second and direction for each process, within a machine; assumed
LAYER_SECONDS = {"cuda": 200e-6, "cpu": 100e-6}  # launches of a layer, forward and backward, a micro-batch; assumed

# Passes over a tensor of (tokens, width), each a read or a write; those of norms and MLPs are in parts.py
RESIDUAL_PASSES = 3 + 3  # read two, write one; two gradients are added likewise
ROTATION_PASSES = 8  # of queries and keys: half by half, forward and back
ATTENTION_PASSES = 3  # forward; backward reads and writes about twice that
LOSS_PASSES = {"chunked": 4, "whole": 10}  # over the logits; whole: cast, log-softmax, its gradient, cast, in float32
WEIGHT_PASSES = 4  # of each weight and micro-batch: read in forward, twice in backward, write its gradient
ADD_PASSES = 3  # a further micro-batch's gradient is added to the first's
CLIP_PASSES = 2  # the norm reads, the scaling reads and writes, but not in every step

# Of what each way to recompute repeats, as a share of a forward pass's operators; and of a checkpoint level
RECOMPUTED_SHARE = {"none": 0.0, "mlp": 0.4, "attention": 0.5, "block": 0.9}
LEVEL_SHARE = 0.2

_generic = partial(Device, memory_bytes=float("inf"), source="assumed")
GENERIC = {
    "cpu": _generic(name="a generic CPU", flops={"float32": 0.2 * TERA, "bfloat16": 0.4 * TERA}, bandwidth=40 * GIGA),
    "cuda": _generic(
        name="a generic GPU",
        flops={"float32": 20 * TERA, "bfloat16": 150 * TERA, "tf32": 75 * TERA},
        bandwidth=1000 * GIGA,
    ),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class CostModel:
    """Rates of a device and its link, per second.

    Attributes:
        device: With its peaks.
        matmul_share: Of the peak that matmuls reach.
        link_bandwidth: Bytes per second between processes.
        tf32: Matmuls of float32 run in TF32.
    """

    device: Device
    matmul_share: float = MATMUL_SHARE
    link_bandwidth: float = LINK_BANDWIDTH
    tf32: bool = False

    def peak(self, precision: str) -> float:
        """Peak FLOPs per second of matmuls in a precision.

        Raises:
            ValueError: The device has none in the table.
        """
        return self.device.peak(matmul_precision(precision, tf32=self.tf32))


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds of an optimizer step, by what takes them.

    Attributes:
        matmuls: Of forward and backward, or reading their weights where that takes longer.
        recomputed: Everything that backward recomputes.
        traffic: Elementwise work: bytes read and written.
        weights: What each micro-batch costs again: weights cast, gradients added.
        optimizer: Update and clipping.
        launches: Of kernels.
        communication: Between processes.
    """

    matmuls: float
    recomputed: float
    traffic: float
    weights: float
    optimizer: float
    launches: float
    communication: float

    @property
    def seconds(self) -> float:
        """Seconds of the whole step, without any overlap."""
        return float(sum(dataclasses.astuple(self)))


def step_time(config: ModelConfig, cost_model: CostModel, settings: StepSettings) -> StepTime:
    """The time of one optimizer step on one of equally fast processes.

    Args:
        config: ``vocab_size`` must be known.
        cost_model: Of the device.
        settings: Of the step.

    Raises:
        ValueError: As in ``step_flops``, the precision is unknown, or the device has no peak for it.
    """
    accumulation = settings.accumulation
    world_size = settings.world_size
    measured = settings.measured
    tokens = settings.rows * accumulation * settings.context_length
    storage, factor = item_sizes(settings.precision)
    peak = cost_model.peak(settings.precision)
    bandwidth = cost_model.device.bandwidth * BANDWIDTH_SHARE
    flops = step_flops(config, tokens=tokens, context_length=settings.context_length, measured=measured)
    scores = flops.by_part["attention_scores"]
    repeated_scores = scores if config.recompute in ("attention", "block") else 0
    parameters = sum(parameters_by_part(config, measured).values())
    layers = config.num_hidden_layers

    def matmul_seconds(total: int, scores: int) -> float:
        return ((total - scores) / cost_model.matmul_share + scores / ATTENTION_SHARE) / peak

    passes, repeated_passes = _passes(config, settings, factor)
    reading_weights = accumulation * WEIGHT_PASSES * factor * parameters / bandwidth
    casts = (storage + factor) * parameters if storage != factor else 0
    share = 1 if settings.strategy == "ddp" else world_size
    state = 2 * settings.state_per_parameter * (settings.state_itemsize or storage)  # read and written
    update = parameters // share * ((3 + CLIP_PASSES) * storage + state)  # parameters read and written, gradients read
    leveled = sum(map(bool, config.checkpoint_levels)) / layers
    repeated = RECOMPUTED_SHARE[config.recompute] + LEVEL_SHARE * leveled
    ring = (world_size - 1) / world_size  # a ring of W passes on this much of what it gathers or scatters
    if settings.strategy == "ddp":
        sent = 2 * ring * storage * parameters  # once per step: micro-batches before the last do not synchronize
    else:  # blocks are gathered again in backward
        twice = 2 * parameters - elements_outside_blocks(config, measured)
        reductions = 1 if settings.strategy == "fsdp2_deferred" else accumulation
        sent = ring * (accumulation * factor * twice + reductions * storage * parameters)
    return StepTime(
        matmuls=max(matmul_seconds(flops.model, 3 * scores), reading_weights),
        recomputed=matmul_seconds(flops.recomputed, repeated_scores) + tokens * repeated_passes * factor / bandwidth,
        traffic=tokens * passes * factor / bandwidth,
        weights=(accumulation * casts + (accumulation - 1) * ADD_PASSES * storage * parameters) / bandwidth,
        optimizer=update / bandwidth,
        launches=layers * accumulation * (1 + repeated / 3) * LAYER_SECONDS[settings.device],
        communication=sent / cost_model.link_bandwidth,
    )


Passes = tuple[float, float]  # elements per token: in forward, and in forward and backward


def _passes(config: ModelConfig, settings: StepSettings, itemsize: int) -> Passes:
    """Elements per token that a step reads and writes besides its matmuls: once, and again where it recomputes."""
    if "loss" in unlisted_parts(config):
        loss = _measured_passes(settings.measured["loss"], settings.context_length, itemsize)[1]
    else:
        loss = LOSS_PASSES["whole" if settings.loss_chunks == 0 else "chunked"] * config.vocab_rows
    total = loss + _norm_passes(config, settings, itemsize)[1]
    repeated_total = 0.0
    levels = config.checkpoint_levels
    for group in layer_groups(config):
        of_layer = dataclasses.replace(settings, measured=group.measurements(settings.measured))
        at_levels = [levels[index] for index in group.indices]
        layer, repeated = _layer_passes(group.config, of_layer, itemsize, at_levels)
        total += len(at_levels) * layer
        repeated_total += repeated
    return total, repeated_total


def _norm_passes(config: ModelConfig, settings: StepSettings, itemsize: int) -> Passes:
    if "norm" in unlisted_parts(config):
        return _measured_passes(settings.measured["norm"], settings.context_length, itemsize)
    return _passes_of_width(KNOWN_NORMS[name_of(config.norm)].passes, config.hidden_size)


def _layer_passes(config: ModelConfig, settings: StepSettings, itemsize: int, levels: list[int]) -> Passes:
    """Passes of one layer, and those that recomputation repeats in all layers like it."""
    recompute, measured = config.recompute, settings.measured
    s = Dimensions.of(config, measured)
    unlisted = {
        kind: _measured_passes(measured[kind], settings.context_length, itemsize)
        for kind in unlisted_parts(config)
        if kind in measured
    }
    heads = int(s.queries) + int(s.keys)
    rotated = ROTATION_PASSES * heads // 2 if config.position == "rope" else 0
    normed, whole_normed = _passes_of_width(KNOWN_NORMS["rmsnorm"].passes, heads if config.qk_norm else 0)
    attended = rotated + ATTENTION_PASSES * heads
    built_in: dict[str, Passes] = {
        "attention": (attended + normed, 2 * rotated + 3 * ATTENTION_PASSES * heads + whole_normed)
    }
    if "block" in unlisted:
        unlisted |= {"attention": unlisted["block"], "mlp": (0.0, 0.0)}
    elif "mlp" not in unlisted:
        built_in["mlp"] = _passes_of_width(KNOWN_MLPS[name_of(config.mlp)].passes, s.intermediate * (s.top_k or 1))
    passes: dict[str, Passes] = built_in | unlisted
    norm, whole_norm = _norm_passes(config, settings, itemsize)
    attention, whole_attention = passes["attention"]
    mlp, whole_mlp = passes["mlp"]
    norms = {place: sum(map(bool, names)) for place, names in norms_of_block(config).items()}
    layer = sum(norms.values()) * whole_norm + whole_attention + whole_mlp + 2 * RESIDUAL_PASSES * s.hidden
    repeated: float = norms["attention"] * norm + attention if recompute in ("attention", "block") else 0
    repeated += norms["mlp"] * norm + mlp if recompute in ("mlp", "block") else 0
    repeated += norms["sums"] * norm + RESIDUAL_PASSES // 2 * s.hidden if recompute == "block" else 0
    in_levels = sum(mlp * (level > 0) + norm * (level == 2) for level in levels)
    return layer, repeated * len(levels) + in_levels


def _passes_of_width(passes: tuple[int, int], width: int) -> Passes:
    return float(passes[0] * width), float(sum(passes) * width)


def _measured_passes(part: MeasuredPart, context_length: int, itemsize: int) -> Passes:
    """Passes of a measured part per token, forward and total: each byte that it allocates is written and read."""

    def per_token(*measures: Affine) -> float:
        return 2 * sum(per_token + per_pair * context_length for _, per_token, per_pair in measures) / itemsize

    forward = per_token(part.saved, part.forward)
    return forward, forward + per_token(part.backward)
