"""The rungs of ``bench ladder``: what each one changes, what it needs, and how far rounding may part two of them.

A rung is all that the rungs below it are, and one change. Loads no torch.
"""

import dataclasses
import math
from typing import Any, Literal

Products = Literal["float32", "tf32", "bfloat16"]

# Half the distance of neighbouring numbers, relative: 24, 11 and 8 significant bits.
UNIT_ROUNDOFF: dict[Products, float] = {"float32": 2.0**-24, "tf32": 2.0**-11, "bfloat16": 2.0**-8}
ROUNDINGS_PER_BLOCK = 20  # results written one after another: 2 norms, 7 products, rotation, softmax, gate, sums
ROUNDINGS_OF_HEAD = 5  # the last norm, logits, maximum, sum, logarithm


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """How a step is computed.

    Attributes:
        operators: ``per head``: a loop over heads, scores and mask written out; ``torch``: all heads in one product and
            torch's attention and norm; ``ours``: the package's own.
        products: Of matrices: float32, TF32, or bf16 by autocast.
        optimizer: ``loop``: a tensor at a time, as is the clipping; ``fused``: many at once.
        chunked_loss: Whether the logits of all tokens never exist at once.
        mlp: As in ``ModelConfig``.
        more_rows: The larger batch that the memory of the standard MLP has room for.
        compiled: Each block, in place.
        cuda_graph: Forward and backward, recorded once and played again.
        allocator: Settings for training: glibc keeps freed memory; CUDA's allocator has segments that grow.
        all_devices: DDP; on a CPU a process for each core, with one thread.
    """

    operators: Literal["per head", "torch", "ours"] = "per head"
    products: Products = "float32"
    optimizer: Literal["loop", "fused"] = "loop"
    chunked_loss: bool = False
    mlp: str = "swiglu"
    more_rows: bool = False
    compiled: bool = False
    cuda_graph: bool = False
    allocator: bool = False
    all_devices: bool = False


MORE_ROWS = "larger batch"
CHANGES: dict[str, dict[str, Any]] = {
    "per-head loops": {},
    "all heads at once": {"operators": "torch"},
    "TF32": {"products": "tf32"},
    "bf16": {"products": "bfloat16"},
    "fused optimiser": {"optimizer": "fused"},
    "own operators": {"operators": "ours"},
    "chunked loss": {"chunked_loss": True},
    "memory-optimised MLP": {"mlp": "memory_optimized_swiglu"},
    MORE_ROWS: {"more_rows": True},
    "compiled blocks": {"compiled": True},
    "CUDA graphs": {"cuda_graph": True},
    "allocator settings": {"allocator": True},
    "all devices": {"all_devices": True, "cuda_graph": False},  # NCCL inside of a recorded graph is not measured
}
NEEDS_CUDA = ("TF32", "CUDA graphs")


def lacking(device: str, count: int) -> dict[str, str]:
    """Which rungs there are not on ``count`` devices of this kind, and why not."""
    found = {} if device == "cuda" else dict.fromkeys(NEEDS_CUDA, "it needs CUDA")
    if count < 2:
        found["all devices"] = f"there is one {'GPU' if device == 'cuda' else 'core'}"
    return found


def rungs(left_out: dict[str, str]) -> dict[str, Settings]:
    """The settings of each rung that is left, from the lowest up."""
    settings, found = Settings(), {}
    for name, change in CHANGES.items():
        if name not in left_out:
            settings = found[name] = dataclasses.replace(settings, **change)
    return found


def distinct_rows(rows: int) -> int:
    """How many rows of a batch differ; the rest repeats them. The largest divisor up to a quarter, at least one.

    Mean loss and gradients of a batch of any multiple of them are the same: so a larger batch is the same maths.
    """
    return max(part for part in range(1, max(1, rows // 4) + 1) if rows % part == 0)


def tolerance(layers: int, loss: float, shaken: float) -> float:
    """How far the losses of two rungs may lie apart at any step, in nats.

    One rounding of all weights moves the loss by ``shaken`` (measured: the largest over the steps), and the loss itself
    is rounded to float32. A step rounds ``n`` times in a row, forward and twice that backward; as independent
    roundings do, they add up to √n of one. Two rungs round apart from each other (√2); three standard deviations.

    Args:
        layers: Blocks of the model.
        loss: The loss compared with.
        shaken: By how much rounding every weight up or down by chance, to the products' precision, changed the loss.
    """
    roundings = 3 * (ROUNDINGS_PER_BLOCK * layers + ROUNDINGS_OF_HEAD)
    one = max(shaken, UNIT_ROUNDOFF["float32"] * abs(loss))
    return 3 * math.sqrt(2 * roundings) * one
