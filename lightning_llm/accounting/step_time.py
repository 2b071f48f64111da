"""How long a step takes, from the config: work over the device's peaks. Made for choosing between settings.

A step is the sum of what it does: matrix products at a share of the device's peak, bytes at a share of its bandwidth,
launches, and what goes over the link between processes. Nothing overlaps. Every share and count that is assumed is a
constant below. The ratios between settings are what matters, and what errs for all settings alike cancels there; the
seconds themselves are worth no more than the assumptions. docs/accounting.md lists them.
"""

import dataclasses
from typing import Literal

from lightning_llm.accounting.flops import layer_products, step_flops
from lightning_llm.accounting.hardware import GIGA, TERA, Device
from lightning_llm.accounting.parameters import parameters_by_part
from lightning_llm.accounting.sharding import reduced_size, root_elements
from lightning_llm.model.config import ModelConfig

PRODUCT_SHARE = 0.6  # of the peak, for large products; assumed
ATTENTION_SHARE = 0.35  # Shah et al. 2024 (FlashAttention-3), section 1: what FlashAttention-2 attains on an H100
BANDWIDTH_SHARE = 0.8  # of the sheet's; assumed
LINK_BANDWIDTH = 100 * GIGA  # bytes per second and direction for each process, within a machine; assumed
LAYER_SECONDS = {"cuda": 200e-6, "cpu": 100e-6}  # launches of a layer, forward and backward, a micro-batch; assumed

# Passes over a tensor of (tokens, width), each a read or a write, as the operators are written in this project
NORM_FORWARD, NORM_BACKWARD = 2, 3  # read x, write y; read dy and x, write dx
RESIDUAL_PASSES = 3 + 3  # read two, write one; two gradients are added likewise
ACTIVATION_FORWARD, ACTIVATION_BACKWARD = 3, 5  # gated: read g and u, write a; read da, g, u, write dg, du
PLAIN_FORWARD, PLAIN_BACKWARD = 2, 3  # GELU and ReLU
ROTATION_PASSES = 8  # of queries and keys: half by half, forward and back
ATTENTION_PASSES = 3  # forward; backward reads and writes about twice that
LOSS_PASSES = {"chunked": 4, "whole": 10}  # over the logits; whole: cast, log-softmax, its gradient, cast, in float32
WEIGHT_PASSES = 4  # of each weight and micro-batch: read in forward, twice in backward, write its gradient
ADD_PASSES = 3  # a further micro-batch's gradient is added to the first's
CLIP_PASSES = 2  # the norm reads, the scaling reads and writes, but not in every step

GENERIC = {
    "cpu": Device(
        name="a generic CPU",
        flops={"float32": 0.2 * TERA, "bfloat16": 0.4 * TERA},
        memory_bytes=float("inf"),
        bandwidth=40 * GIGA,
        source="assumed",
    ),
    "cuda": Device(
        name="a generic GPU",
        flops={"float32": 20 * TERA, "bfloat16": 150 * TERA},
        memory_bytes=float("inf"),
        bandwidth=1000 * GIGA,
        source="assumed",
    ),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pace:
    """What a device and its link do in a second.

    Attributes:
        device: With its peaks.
        kind: ``cpu`` or ``cuda``.
        product_share: Of the peak that products attain.
        link_bandwidth: Bytes per second between processes.
    """

    device: Device
    kind: Literal["cpu", "cuda"]
    product_share: float = PRODUCT_SHARE
    link_bandwidth: float = LINK_BANDWIDTH

    def products(self, precision: str) -> float:
        """Peak FLOP per second of a precision's products.

        Raises:
            ValueError: The device has none in the table.
        """
        dtype = "float32" if precision == "32-true" else "bfloat16"
        if dtype not in self.device.flops:
            raise ValueError(f"{self.device.name} has no {dtype} peak in the table: take --precision 32-true")
        return float(self.device.flops[dtype])


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds of an optimiser step, by what takes them.

    Attributes:
        products: Matrix products of forward and backward, or reading their weights where that takes longer.
        recomputed: Everything that backward does again.
        traffic: Elementwise work: bytes read and written.
        weights: What each micro-batch costs anew: weights cast, gradients added.
        optimizer: Update and clipping.
        launches: Of kernels.
        communication: Between processes.
    """

    products: float
    recomputed: float
    traffic: float
    weights: float
    optimizer: float
    launches: float
    communication: float

    @property
    def seconds(self) -> float:
        """All together."""
        return float(sum(dataclasses.astuple(self)))


def step_time(
    config: ModelConfig,
    pace: Pace,
    *,
    rows: int,
    accumulation: int,
    context_length: int,
    precision: str = "32-true",
    loss_chunks: int | None = None,
    strategy: str = "ddp",
    world_size: int = 1,
    state_per_parameter: float = 2,
    state_itemsize: int | None = None,
) -> StepTime:
    """The time of one optimiser step on one of equally fast processes.

    Args:
        config: ``vocab_size`` must be known.
        pace: Of the device.
        rows: Of a micro-batch on one process.
        accumulation: Micro-batches per step.
        context_length: Tokens per row.
        precision: ``32-true``, ``bf16-true`` or ``bf16-mixed``.
        loss_chunks: As ``LanguageModel`` takes it.
        strategy: ``ddp`` or ``fsdp2``.
        world_size: Processes.
        state_per_parameter: As in ``step_memory``; a mean where parameters differ.
        state_itemsize: As in ``step_memory``.

    Raises:
        ValueError: As ``step_flops``, or the device has no peak for the precision.
    """
    tokens = rows * accumulation * context_length
    storage, product = _sizes(precision)
    peak, bandwidth = pace.products(precision), pace.device.bandwidth * BANDWIDTH_SHARE
    flops = step_flops(config, tokens=tokens, context_length=context_length)
    scores = 3 * flops.by_part["attention_scores"]
    in_products = ((flops.model - scores) / pace.product_share + scores / ATTENTION_SHARE) / peak
    again_scores = tokens * _scores_again(config, context_length)
    again = ((flops.recomputed - again_scores) / pace.product_share + again_scores / ATTENTION_SHARE) / peak
    again += tokens * _passes_again(config) * product / bandwidth
    parameters = sum(parameters_by_part(config).values())
    in_products = max(in_products, accumulation * WEIGHT_PASSES * product * parameters / bandwidth)
    casts = (storage + product) * parameters if storage != product else 0
    weights = accumulation * casts + (accumulation - 1) * ADD_PASSES * storage * parameters
    share = world_size if strategy == "fsdp2" else 1
    state = 2 * state_per_parameter * (state_itemsize or storage)  # read and written
    update = parameters // share * ((3 + CLIP_PASSES) * storage + state)  # parameters read and written, gradients read
    layers = config.num_hidden_layers * accumulation * (1 + _share_again(config) / 3)
    return StepTime(
        products=in_products,
        recomputed=again,
        traffic=tokens * _passes(config, loss_chunks) * product / bandwidth,
        weights=weights / bandwidth,
        optimizer=update / bandwidth,
        launches=layers * LAYER_SECONDS[pace.kind],
        communication=_communicated(config, strategy, world_size, accumulation, precision) / pace.link_bandwidth,
    )


def _sizes(precision: str) -> tuple[int, int]:
    """Bytes of a number in a parameter, and in the factors of products."""
    return (2 if precision == "bf16-true" else 4), (4 if precision == "32-true" else 2)


def _widths(config: ModelConfig) -> tuple[int, int, int]:
    assert config.head_dim is not None
    assert config.num_key_value_heads is not None
    assert config.intermediate_size is not None
    return (
        config.num_attention_heads * config.head_dim,
        config.num_key_value_heads * config.head_dim,
        config.intermediate_size,
    )


def _layer_passes(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """Elements per token that a block reads and writes beside its products, in forward and backward."""
    queries, keys, wide = _widths(config)
    turned = ROTATION_PASSES * (queries + keys) // 2 if config.position == "rope" else 0
    mixed = ATTENTION_PASSES * (queries + keys)
    forward, backward = (
        (ACTIVATION_FORWARD, ACTIVATION_BACKWARD) if config.is_gated else (PLAIN_FORWARD, PLAIN_BACKWARD)
    )
    return {
        "norm": (NORM_FORWARD * config.hidden_size, NORM_BACKWARD * config.hidden_size),
        "attention": (turned + mixed, turned + 2 * mixed),
        "mlp": (forward * wide, backward * wide),
    }


def _passes(config: ModelConfig, loss_chunks: int | None) -> int:
    """Elements per token that a step reads and writes in all layers and the loss, without what is done again."""
    assert config.vocab_size is not None
    parts = _layer_passes(config)
    layer = 2 * sum(parts["norm"]) + sum(parts["attention"]) + sum(parts["mlp"])
    layer += 2 * RESIDUAL_PASSES * config.hidden_size
    loss = LOSS_PASSES["whole" if loss_chunks == 0 else "chunked"] * config.vocab_size
    return layer * config.num_hidden_layers + sum(parts["norm"]) + loss


def _passes_again(config: ModelConfig) -> int:
    """Elements per token that backward reads and writes again."""
    parts, recompute = _layer_passes(config), config.recompute
    attention = parts["norm"][0] + parts["attention"][0] if recompute in ("attention", "block") else 0
    mlp = parts["norm"][0] + parts["mlp"][0] if recompute in ("mlp", "block") else 0
    residual = RESIDUAL_PASSES // 2 * config.hidden_size if recompute == "block" else 0
    levels = sum(
        (parts["mlp"][0] if level else 0) + (parts["norm"][0] if level == 2 else 0)
        for level in config.checkpoint_levels
    )
    return (attention + mlp + residual) * config.num_hidden_layers + levels


def _scores_again(config: ModelConfig, context_length: int) -> int:
    if config.recompute not in ("attention", "block"):
        return 0
    return layer_products(config, context_length)["scores"] * config.num_hidden_layers


def _share_again(config: ModelConfig) -> float:
    """What is done again of a forward pass, as a share of its operators."""
    whole = {"none": 0.0, "mlp": 0.4, "attention": 0.5, "block": 0.9}[config.recompute]
    return whole + 0.2 * sum(map(bool, config.checkpoint_levels)) / config.num_hidden_layers


def _communicated(config: ModelConfig, strategy: str, world_size: int, accumulation: int, precision: str) -> float:
    """Bytes that a process sends in a step; a ring of W passes on (W - 1) / W of what it gathers or scatters."""
    parameters = sum(parameters_by_part(config).values())
    ring = (world_size - 1) / world_size
    storage, product = _sizes(precision)
    if strategy == "ddp":
        return 2 * ring * storage * parameters  # once a step: micro-batches before the last do not synchronise
    twice = 2 * parameters - root_elements(config)  # blocks are gathered again in backward
    return accumulation * ring * (product * twice + reduced_size(precision) * parameters)
