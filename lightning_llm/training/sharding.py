"""A transformer whose parameters are spread over processes by rows (FSDP2, ``torch.distributed.fsdp.fully_shard``).

Each block is a unit: its weights are gathered before its forward and again before its backward, and freed after both.
What is in no block (embedding, last norm, head) is the unit of the transformer itself, the root. It stays gathered from
the root's forward to the end of backward: the loss takes ``lm_head.weight`` outside of any forward
(``ops.linear_cross_entropy``), and finds it whole. The root is the transformer and not the LightningModule, since
Lightning calls ``training_step`` and not the module, so that hooks on the LightningModule's forward would never run.

The first weights are those of an unsharded model of the same seed, to the bit. No process ever holds them all: while
the model is built, each block is emptied as soon as it is whole, which leaves torch's generator where it would have
been; then each is filled as ``model.weights`` says, in its order, and cut.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.modules.module import register_module_module_registration_hook

from lightning_llm.model.config import ModelConfig
from lightning_llm.model.transformer import Block, Transformer
from lightning_llm.model.weights import initialize

# What ``initialize`` fills; parameters of other modules keep what their own constructor gave them.
FILLED = (nn.Linear, nn.Embedding, nn.RMSNorm, nn.LayerNorm)


def build_sharded(
    config: ModelConfig, mesh: DeviceMesh, device: torch.device, *, param_dtype: torch.dtype | None = None
) -> Transformer:
    """A transformer, sharded over the processes of a mesh. All must be at the same place of the same random numbers.

    Args:
        config: Its shape.
        mesh: One-dimensional.
        device: Where the shards go, and where the first weights are drawn.
        param_dtype: In which the weights are gathered and the blocks compute; gradients are summed up in float32 and
            the shards stay what they are. ``None``: their own dtype throughout.
    """
    with device, _emptied_once_whole():
        transformer = Transformer(config)
    policy = MixedPrecisionPolicy()
    if param_dtype is not None:
        policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=torch.float32)
    for part in _parts(transformer):
        _materialize(part, device)
        transformer.tie_weights()  # before the head draws: the last to draw decides, as in an unsharded model
        initialize(part, config)
        if isinstance(part, Block):
            fully_shard(part, mesh=mesh, mp_policy=policy)
    fully_shard(transformer, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    return transformer


def build_for(strategy: ModelParallelStrategy, config: ModelConfig, mesh: DeviceMesh, precision: str) -> Transformer:
    """A transformer sharded over the processes of a strategy, all of which draw what the first would."""
    device = strategy.root_device
    torch.set_rng_state(strategy.broadcast(torch.get_rng_state()))
    if device.type == "cuda":
        torch.cuda.set_rng_state(strategy.broadcast(torch.cuda.get_rng_state(device)), device)
    return build_sharded(config, mesh, device, param_dtype=torch.bfloat16 if precision == "bf16-mixed" else None)


def is_sharded(module: nn.Module) -> bool:
    """Whether a parameter of ``module`` is spread over processes."""
    return any(hasattr(param, "to_local") for param in module.parameters())


def _parts(transformer: Transformer) -> Iterator[nn.Module]:
    """In the order in which ``initialize`` meets them."""
    for child in transformer.children():
        if isinstance(child, nn.ModuleList):
            yield from child
        else:
            yield child


@contextmanager
def _emptied_once_whole() -> Iterator[None]:
    """Each block, and each other part of a transformer, loses its storage when it is put in its place."""

    def empty(parent: nn.Module, name: str, part: nn.Module | None) -> None:
        if isinstance(part, Block) or (isinstance(parent, Transformer) and part is not None):
            for module in part.modules():
                if isinstance(module, FILLED):
                    _replace(module, torch.device("meta"))

    handle = register_module_module_registration_hook(empty)
    try:
        yield
    finally:
        handle.remove()


def _materialize(part: nn.Module, device: torch.device) -> None:
    for module in part.modules():
        if isinstance(module, FILLED):
            _replace(module, device)


def _replace(module: nn.Module, device: torch.device) -> None:
    for name, param in module.named_parameters(recurse=False):
        if device.type == "meta" or param.is_meta:
            empty: Any = torch.empty_like(param, device=device)
            setattr(module, name, nn.Parameter(empty, requires_grad=param.requires_grad))
