"""Muon for the hidden matrices and AdamW for everything else, as one optimizer.

Muon (Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks") replaces the momentum M of a matrix
by the nearest orthogonal one, U Vᵀ of M = U S Vᵀ, so that every direction of the matrix learns at the same rate:

    B ← μ B + (1 - μ) G                    momentum_buffer
    O ← NewtonSchulz((1 - μ) G + μ B)      Nesterov momentum, orthogonalized
    W ← (1 - lr λ) W - lr 0.2 √max(rows, columns) O

The root makes the update's root mean square that of a typical AdamW step (Liu et al. 2025, "Muon is Scalable for LLM
Training", arXiv:2502.16982, section 2.2), so that one learning rate and one weight decay serve both halves. Embeddings
and heads, whose rows belong to tokens that are seen unevenly often, stay with AdamW.
"""

import math
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from lightning_llm.accounting.hardware import BF16_FEATURES, cpu_features
from lightning_llm.optim.adamw import adamw_step, shard_offset
from lightning_llm.optim.base import Check, GroupOptimizer, ParamGroup, group_by, is_decay_rate, local_shard
from lightning_llm.optim.groups import HIDDEN_MATRICES
from lightning_llm.optim.rounding import round_params_

# Jordan et al. 2024: steep at 0, at the price of singular values that end between 0.68 and 1.21 instead of at 1.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
RMS_OF_ADAMW = 0.2
ALGORITHMS = ("muon", "adamw")
_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
# Of matrices orthogonalized together, which bounds the temporaries. On a CPU a stack that stays in the cache is as fast
# as one matmul per matrix at 384 wide and nearly twice as fast at 128 wide.
_STACK_BYTES = {"cpu": 2**22}
_STACK_BYTES_ELSEWHERE = 2**28


class MuonAdamW(GroupOptimizer):
    """Muon for hidden matrices, AdamW for embeddings, heads, norms and biases.

    Processes that shard the matrices (``DTensor``), or have copies of them (``replicas``), share the work: each gets
    some matrices of a stack from the others, orthogonalizes them, and sends back what the others need.

    Takes the groups of ``lightning_llm.optim.param_groups`` and uses Muon for the one named ``hidden_matrices``. Groups
    made by hand set ``"algorithm": "muon"`` or ``"adamw"``. State: ``momentum_buffer`` (as ``torch.optim.Muon``) or
    ``exp_avg``, ``exp_avg_sq``, ``step``.

    Args:
        params: Groups of parameters.
        lr: Learning rate of Muon and AdamW; a value tuned for AdamW fits both.
        betas: For AdamW: decay rates of the two averages.
        eps: For AdamW: added to the root of the second average.
        weight_decay: Decoupled, for Muon and AdamW: fraction of ``lr`` by which parameters shrink.
        momentum: For Muon: decay rate of the momentum, at least 0 and below 1.
        newton_schulz_steps: For Muon: iterations of ``newton_schulz``.
        newton_schulz_dtype: For Muon: ``bfloat16`` or ``float32``. ``None``: ``bfloat16`` on hardware that multiplies
            it, where it is 4 times as fast, and ``float32`` elsewhere.
        fused: For AdamW, see ``AdamW``.
        state_dtype: For AdamW, see ``AdamW``; Muon's momentum has the dtype of its matrix.
        param_rounding: See ``AdamW``.

    Attributes:
        replicas: One-dimensional device mesh of processes with equal parameters and gradients, as DDP keeps them.
            ``None``: each process works alone.

    Raises:
        ValueError: For options out of range (all at once), a group without an algorithm, parameters that are
            not matrices in a Muon group, complex parameters or sparse gradients.
    """

    checks: ClassVar[dict[str, Check]] = {
        **GroupOptimizer.checks,
        "momentum": (is_decay_rate, "at least 0 and below 1"),
        "newton_schulz_steps": (lambda value: isinstance(value, int) and value >= 1, "a whole number of at least 1"),
        "newton_schulz_dtype": (lambda value: value in (None, *_DTYPES), f"None, {' or '.join(_DTYPES)}"),
    }
    replicas: Any = None

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        *,
        momentum: float = 0.95,
        newton_schulz_steps: int = 5,
        newton_schulz_dtype: Literal["bfloat16", "float32"] | None = None,
        fused: bool | None = None,
        state_dtype: Literal["bfloat16"] | None = None,
        param_rounding: Literal["nearest", "stochastic"] = "nearest",
    ) -> None:
        defaults = {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay, "momentum": momentum}
        defaults |= {"newton_schulz_steps": newton_schulz_steps, "newton_schulz_dtype": newton_schulz_dtype}
        defaults |= {"fused": fused, "state_dtype": state_dtype, "param_rounding": param_rounding}
        super().__init__(params, defaults)

    def add_param_group(self, param_group: ParamGroup) -> None:
        """Adds a group, after choosing its algorithm and checking its options."""
        if "algorithm" not in param_group and "name" in param_group:
            is_hidden = param_group["name"].partition(":")[0] == HIDDEN_MATRICES
            param_group = {**param_group, "algorithm": "muon" if is_hidden else "adamw"}
        if (algorithm := param_group.get("algorithm")) not in ALGORITHMS:
            raise ValueError(
                f"a parameter group has algorithm {algorithm!r}, accepted are 'muon' and 'adamw': "
                "make the groups with lightning_llm.optim.param_groups(model)"
            )
        super().add_param_group(param_group)

    def _check_params(self, group: ParamGroup) -> None:
        super()._check_params(group)
        for param in group["params"]:
            if group["algorithm"] == "muon" and param.ndim != 2:
                shape = tuple(param.shape)
                raise ValueError(f"Muon takes matrices, got a parameter of shape {shape}: use algorithm 'adamw'")

    def step_group(self, group: ParamGroup, offset: int) -> None:
        if group["algorithm"] == "muon":
            muon_step(group, self.state, offset, self.replicas)
        else:
            adamw_step(group, self.state, offset)

    def check_saved(self, state_dict: dict[str, Any]) -> None:
        """Accepts the state of this class, with groups of the same algorithms."""
        super().check_saved(state_dict)
        saved = [group.get("algorithm") for group in state_dict["param_groups"]]
        here = [group["algorithm"] for group in self.param_groups]
        if saved != here:
            raise ValueError(f"the optimizer state has groups with the algorithms {saved}, this optimizer has {here}")
        for group in state_dict["param_groups"]:
            if missing := self.defaults.keys() - group.keys() - {"param_rounding"}:  # newer than the first checkpoints
                raise ValueError(f"the optimizer state has no {min(missing)}: it was not saved by MuonAdamW")


def muon_step(group: ParamGroup, state: defaultdict[Tensor, Any], offset: int = 0, replicas: Any = None) -> None:
    """One Muon step for the matrices of one group that have a gradient.

    Args:
        group: Parameters and options.
        state: Of the optimizer.
        offset: As for ``GroupOptimizer.step_group``.
        replicas: As of :class:`MuonAdamW`.
    """
    offsets: dict[Tensor, int] = {}
    for param in group["params"]:
        offsets[param] = offset + shard_offset(param)
        offset += param.numel()
        if param.grad is not None and not state[param]:
            state[param]["momentum_buffer"] = torch.zeros_like(param)
    for params in _stacks([param for param in group["params"] if param.grad is not None], state, replicas):
        buffers = [local_shard(state[param]["momentum_buffer"]) for param in params]
        grads = [local_shard(param.grad) for param in params]
        torch._foreach_lerp_(buffers, grads, 1 - group["momentum"])
        updates = torch._foreach_lerp(grads, buffers, group["momentum"])
        changes = _orthogonal(torch.stack(updates), params[0], replicas, group).unbind()
        weights = [local_shard(param) for param in params]
        is_rounded = group["param_rounding"] == "stochastic" and weights[0].dtype == torch.bfloat16
        wide = [weight.float() for weight in weights] if is_rounded else weights
        if group["weight_decay"]:
            torch._foreach_mul_(wide, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_add_(wide, changes, alpha=-group["lr"] * RMS_OF_ADAMW * math.sqrt(max(params[0].shape)))
        if is_rounded:
            for param in params:
                state[param]["step"] = state[param].get("step", 0) + 1
            round_params_(weights, wide, offsets=[offsets[param] for param in params], step=state[params[0]]["step"])


def newton_schulz(matrices: Tensor, *, steps: int = 5, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Brings the singular values of each matrix near 1, keeping its singular vectors.

    Quintic Newton-Schulz iteration: X ← a X + (b A + c A²) X with A = X Xᵀ (Jordan et al. 2024). After five steps, in
    exact arithmetic, every singular value above 0.3% of the Frobenius norm is between 0.68 and 1.21.

    Args:
        matrices: (batch, rows, columns), cheapest with rows ≤ columns.
        steps: Number of iterations.
        dtype: Of the matmuls.

    Returns:
        (batch, rows, columns) in the dtype of ``matrices``. Zero stays zero.
    """
    a, b, c = COEFFICIENTS
    norm = torch.linalg.vector_norm(matrices, dim=(-2, -1), keepdim=True)  # at least the largest singular value
    x: Tensor = (matrices / norm.clamp(min=1e-7)).to(dtype)
    for _ in range(steps):
        gram = torch.bmm(x, x.mT)
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a)
    return x.to(matrices.dtype)


@cache
def fastest_dtype(device: torch.device) -> torch.dtype:
    """Fastest dtype of matmuls on a device: bfloat16, but float32 where the hardware does not multiply bfloat16.

    torch multiplies it there one number at a time: on a CPU with AVX2 alone, the Shakespeare model's optimizer step
    takes 18 times as long as in float32, and its whole training step 3.5 times.
    """
    if device.type == "cpu":
        has_bfloat16 = not cpu_features().isdisjoint(BF16_FEATURES)
    else:
        has_bfloat16 = device.type != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.bfloat16 if has_bfloat16 else torch.float32


def _stacks(params: list[Tensor], state: defaultdict[Tensor, Any], replicas: Any) -> Iterator[list[Tensor]]:
    """Matrices of one shape, device, dtype and step: a stack is one matmul instead of many small ones."""
    alike = group_by(params, lambda param: (param.shape, param.device, param.dtype, state[param].get("step")))
    for stack in alike.values():
        mesh = getattr(stack[0], "device_mesh", replicas)
        processes = 1 if mesh is None else mesh.size()
        limit = _STACK_BYTES.get(stack[0].device.type, _STACK_BYTES_ELSEWHERE)
        shares = limit // (stack[0].numel() * stack[0].element_size() * processes)  # matrices of each process
        height = processes * max(1, shares)
        yield from (stack[start : start + height] for start in range(0, len(stack), height))


def _orthogonal(stack: Tensor, like: Any, replicas: Any, group: ParamGroup) -> Tensor:
    """Orthogonalizes matrices, or the rows of them that this process has, in the layout that they came in.

    Args:
        stack: (batch, rows, columns).
        like: One of the parameters.
        replicas: As of :class:`MuonAdamW`.
        group: The options.
    """

    def orthogonalized(matrices: Tensor) -> Tensor:
        is_tall = like.shape[0] > like.shape[1]
        dtype = _DTYPES.get(group["newton_schulz_dtype"]) or fastest_dtype(matrices.device)
        wide = matrices.mT if is_tall else matrices
        done = newton_schulz(wide, steps=group["newton_schulz_steps"], dtype=dtype)
        return done.mT if is_tall else done

    mesh = getattr(like, "device_mesh", replicas)
    if mesh is None:
        return orthogonalized(stack)
    from torch.distributed.tensor import DTensor, Replicate, Shard  # half a second, which only such runs wait for

    shape = torch.Size([len(stack), *like.shape])
    by_matrix = [Shard(0)] * mesh.ndim
    by_row = [
        Shard(kind.dim + 1) if type(kind) is Shard else kind for kind in getattr(like, "placements", [Replicate()])
    ]
    if not all(type(kind) in (Shard, Replicate) for kind in by_row):
        raise ValueError(f"Muon takes whole matrices and shards of them, got a parameter with placements {by_row}")
    layout: dict[str, Any] = {"shape": shape, "stride": (shape[1] * shape[2], shape[2], 1), "run_check": False}
    whole = DTensor.from_local(stack, mesh, by_row, **layout).redistribute(placements=by_matrix)
    done = DTensor.from_local(orthogonalized(whole.to_local()).contiguous(), mesh, by_matrix, **layout)
    return done.redistribute(placements=by_row).to_local()
