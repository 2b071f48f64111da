"""Several processes: FSDP2 as a strategy of Lightning, the transformer that it shards, and process groups.

FSDP2 (``torch.distributed.fsdp.fully_shard``) spreads parameters over processes by rows. Each block is a unit: its
weights are gathered before its forward and again before its backward, and resharded after both. What is in no block
(embedding, last norm, head) is the unit of the transformer itself, the root. It stays gathered from the root's forward
to the end of backward: the loss takes ``lm_head.weight`` outside of any forward (``ops.linear_cross_entropy``). The
root is the transformer and not the LightningModule: Lightning calls ``training_step`` and not the module, so hooks on
the LightningModule's forward would never run.

The initial weights are those of an unsharded model of the same seed, bit for bit. No process ever holds them all: each
block is sharded as soon as it is built.
"""

import gc
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_llm.checkpoints.reading import read_checkpoint
from lightning_llm.checkpoints.schema import LIGHTNING
from lightning_llm.checkpoints.sharded import LazyShardedTensor, local_rows, split, write_sharded
from lightning_llm.model.config import ModelConfig
from lightning_llm.model.transformer import Transformer
from lightning_llm.optim.base import local_shard
from lightning_llm.optim.muon import MuonAdamW
from lightning_llm.training.checkpoint_io import AtomicCheckpointIO, refuse_code

NAME, DEFERRED = "fsdp2", "fsdp2_deferred"
DEVICES = ("cpu", "cuda")


class ShardedStrategy(ModelParallelStrategy):
    """Parameters, gradients and optimizer state sharded by rows over all processes (FSDP2).

    ``LanguageModel.configure_model`` shards the model. A checkpoint is a folder to which each process writes its rows
    (``checkpoints.sharded``). Any number of processes, sharded or not, resumes from it, and from one in a file.

    Args:
        data_parallel_size: Number of processes; ``auto``: all.
        defer_reduction: Reduce the gradients once per step, after its last micro-batch, instead of after each. Until
            then every process holds the gradients of all parameters. ``fsdp2_deferred`` sets it.
        options: Others of ``ModelParallelStrategy``. ``save_distributed_checkpoint=False``: the first process gathers
            all rows and writes one file.

    Raises:
        ValueError: ``tensor_parallel_size`` is above 1: the model has no plan for it.
    """

    def __init__(
        self, data_parallel_size: Literal["auto"] | int = "auto", *, defer_reduction: bool = False, **options: Any
    ) -> None:
        tensor_parallel_size = options.pop("tensor_parallel_size", 1)
        if tensor_parallel_size not in ("auto", 1):
            raise ValueError(
                f"trainer.strategy ModelParallelStrategy: tensor_parallel_size {tensor_parallel_size}: the model "
                f"has no plan for tensor parallelism; leave it out, or write {NAME}"
            )
        super().__init__(data_parallel_size, tensor_parallel_size=1, **options)
        self.kind = DEFERRED if defer_reduction else NAME
        self._files_group: Any = None

    @contextmanager
    def block_backward_sync(self) -> Generator[None]:
        """Skip the gradient sync of a micro-batch that is not its step's last, if ``kind`` defers it."""
        sharded = [part for part in self.model.modules() if isinstance(part, FSDPModule)] if self.model else []
        if self.kind == DEFERRED:
            for part in sharded:
                part.set_requires_gradient_sync(False, recurse=False)
        try:
            yield
        finally:
            for part in sharded:
                part.set_requires_gradient_sync(True, recurse=False)

    @property
    def lightning_restore_optimizer(self) -> bool:
        """Lightning passes the optimizer state to :meth:`load_optimizer_state_dict`."""
        return True

    def setup_environment(self) -> None:
        """Meet the other processes.

        Raises:
            ValueError: A number or kind of devices that this strategy does not support.
        """
        world = self.num_nodes * self.num_processes
        device = self.root_device
        if device.type not in DEVICES:
            raise ValueError(f"trainer.strategy {NAME} needs devices of {' or '.join(DEVICES)}, got {device.type}")
        if self._data_parallel_size not in ("auto", world):
            raise ValueError(
                f"trainer.strategy {NAME}: data_parallel_size {self._data_parallel_size} with a total of {world} device"
                f"{'s' if world > 1 else ''}: leave it out, or change trainer.devices or trainer.num_nodes"
            )
        self._data_parallel_size = world
        super().setup_environment()

    # ---- saving

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Parameters by name, as shards."""
        assert self.lightning_module is not None
        return self.lightning_module.state_dict()

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """State as of an unsharded model, by numbers, but with shards for tensors."""
        state: dict[str, Any] = getattr(optimizer, "optimizer", optimizer).state_dict()
        return state

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        """Write the shards of this process, and in the first process the rest."""
        files = self.checkpoint_io
        if not self._save_distributed_checkpoint or not isinstance(files, AtomicCheckpointIO):
            gathered = _gathered(checkpoint, keep=self.is_global_zero)
            super(ModelParallelStrategy, self).save_checkpoint(gathered, filepath, storage_options)
            return
        path = Path(self.broadcast(filepath))
        rank, world = self.global_rank, self.world_size
        if files.asynchronous and world > 1:
            # a thread writes: with a group of its own, it and the training never mix up their messages
            self._files_group = self._files_group or dist.new_group(backend="gloo", timeout=self._timeout)
        shards: dict[str, dict[str, Any]] = {}
        rest = split(checkpoint, shards)

        def write(content: Any) -> None:
            main, own = content
            write_sharded(main, own, path, process=rank, processes=world, agree=self._any_failed)

        files.write(write, (rest if rank == 0 else {}, shards))

    def _any_failed(self, failed: bool) -> bool:
        vote = torch.tensor(int(failed))
        if (group := self._files_group or host_group(self)) is not None:
            dist.all_reduce(vote, op=dist.ReduceOp.MAX, group=group)
        return bool(vote)

    # ---- loading

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Read all but the tensors, which are read from their files when they are needed."""
        refuse_code(weights_only)
        return read_checkpoint(Path(self.broadcast(checkpoint_path)), mmap=True, needs=LIGHTNING)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Read this process's rows of each parameter; the module has checked that they fit."""
        assert self.lightning_module is not None
        saved = checkpoint["state_dict"]
        with torch.no_grad():
            for name, tensor in self.lightning_module.state_dict().items():
                if name in saved:
                    local_shard(tensor).copy_(_rows_for(tensor, saved[name]))

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Read this process's rows of the optimizer state of each parameter."""
        for optimizer, saved in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            parameters = [param for group in optimizer.param_groups for param in group["params"]]
            numbers = [number for group in saved["param_groups"] for number in group["params"]]
            state = {
                number: {name: _sharded_like(param, value) for name, value in saved["state"][number].items()}
                for number, param in zip(numbers, parameters, strict=True)
                if saved["state"].get(number)
            }
            optimizer.load_state_dict({**saved, "state": state})


def strategy_for(option: Any) -> Any:
    """The strategy that ``trainer.strategy`` means: the word ``fsdp2``, and Lightning's class, are ours.

    Raises:
        ValueError: FSDP1, or a kind of parallelism that the model has no plan for.
    """
    if option in (NAME, DEFERRED):
        return ShardedStrategy(defer_reduction=option == DEFERRED)
    if isinstance(option, FSDPStrategy) or (isinstance(option, str) and option.startswith("fsdp")):
        name = option if isinstance(option, str) else type(option).__name__
        raise ValueError(f"trainer.strategy {name} is FSDP1, which this model does not support: write {NAME}")
    if not isinstance(option, ModelParallelStrategy) or isinstance(option, ShardedStrategy):
        return option
    return ShardedStrategy(
        option._data_parallel_size,
        tensor_parallel_size=option._tensor_parallel_size,
        save_distributed_checkpoint=option._save_distributed_checkpoint,
        process_group_backend=option._process_group_backend,
        timeout=option._timeout,
    )


def _rows_for(tensor: Tensor, saved: LazyShardedTensor | Tensor) -> Tensor:
    """This process's rows of a saved tensor, whether it is sharded here or not."""
    if not isinstance(tensor, DTensor):
        return saved.whole() if isinstance(saved, LazyShardedTensor) else saved
    start, rows = local_rows(tensor)
    stop = start + rows.shape[0]
    return saved.between(start, stop) if isinstance(saved, LazyShardedTensor) else saved[start:stop]


def _sharded_like(param: Tensor, saved: Any) -> Any:
    """A saved value of one parameter's optimizer state: a tensor of its shape becomes a shard."""
    is_alike = isinstance(saved, LazyShardedTensor | Tensor) and tuple(saved.shape) == tuple(param.shape)
    if not is_alike or not isinstance(param, DTensor):
        return saved.whole() if isinstance(saved, LazyShardedTensor) else saved
    rows = _rows_for(param, saved).to(param.device, copy=True)
    options: dict[str, Any] = {"shape": param.shape, "stride": param.stride(), "run_check": False}
    return DTensor.from_local(rows, param.device_mesh, param.placements, **options)


def _gathered(content: Any, *, keep: bool) -> Any:
    """With gathered tensors for shards, in host memory, one after the other; ``None`` for them without ``keep``."""
    if isinstance(content, DTensor):
        whole = content.full_tensor()
        return whole.cpu() if keep else None
    if isinstance(content, dict):
        return {key: _gathered(value, keep=keep) for key, value in content.items()}
    return [_gathered(each, keep=keep) for each in content] if isinstance(content, list) else content


# ---- the transformer


def build_for(model: Any) -> Transformer:
    """The transformer of a LanguageModel; with FSDP2 sharded over the processes, with the seed of the first."""
    if model.device_mesh is None:
        return Transformer(model.architecture, seed=model.seed)
    trainer: Trainer = model.trainer
    strategy = cast(ModelParallelStrategy, trainer.strategy)
    seed = strategy.broadcast(int(torch.randint(2**62, ())) if model.seed is None else model.seed)
    param_dtype = torch.bfloat16 if str(trainer.precision) == "bf16-mixed" else None
    mesh = strategy.device_mesh["data_parallel"]
    return build_sharded(model.architecture, mesh, strategy.root_device, seed=seed, param_dtype=param_dtype)


def build_sharded(
    config: ModelConfig, mesh: DeviceMesh, device: torch.device, *, seed: int, param_dtype: torch.dtype | None = None
) -> Transformer:
    """A transformer, sharded over the processes of a mesh.

    Args:
        config: Its shape.
        mesh: One-dimensional.
        device: Where the shards go.
        seed: Of the initial values.
        param_dtype: In which the weights are gathered and the blocks compute; gradients are summed in float32 and
            the shards keep their dtype. ``None``: their own dtype throughout.
    """
    policy = MixedPrecisionPolicy(param_dtype, None if param_dtype is None else torch.float32)
    transformer = Transformer(
        config, seed=seed, on_block=lambda block: fully_shard(block.to(device), mesh=mesh, mp_policy=policy)
    ).to(device)
    fully_shard(transformer, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    return transformer


def is_sharded(module: nn.Module) -> bool:
    """Whether a parameter of ``module`` is spread over processes."""
    return any(isinstance(param, DTensor) for param in module.parameters())


# ---- process groups


def host_group(strategy: Any) -> Any:
    """A group of all processes for tensors in host memory, for the main thread; all must ask for it.

    It is the default group if that is gloo's. Otherwise all callers share one, with the timeout of the default group:
    by itself, torch waits half an hour for a lost process.

    Returns:
        The group; ``None`` if there is a single process.
    """
    if not dist.is_initialized() or strategy.world_size == 1:
        return None
    if "cpu:gloo" in dist.get_backend_config():
        return dist.group.WORLD
    return _gloo_group(dist.group.WORLD, getattr(strategy, "_timeout", None))


@lru_cache(maxsize=1)
def _gloo_group(default: Any, timeout: Any) -> Any:
    """A group of gloo's with the processes of the default group."""
    return dist.new_group(backend="gloo", timeout=timeout)


def share_work(optimizer: Any, trainer: Trainer) -> Any:
    """Let the processes of DDP, which have the same parameters, share the work of Muon; returns the optimizer."""
    if isinstance(optimizer, MuonAdamW) and isinstance(trainer.strategy, DDPStrategy) and trainer.world_size > 1:
        optimizer.replicas = init_device_mesh(trainer.strategy.root_device.type, (trainer.world_size,))
    return optimizer


def leave_groups() -> None:
    """End the process groups while Python still runs, and with them gloo's threads.

    A thread that frees its last tensor while Python ends asks for Python's lock then, and the process aborts after
    its work is done (pytorch#179291; seen twice, with two processes on a loaded machine). Whatever holds a group, such
    as a wrapped model, must be out of reach when this is called. Groups of sharded models stay, held by caches of
    torch; they had their last tensor long before.
    """
    _gloo_group.cache_clear()
    if dist.is_initialized():
        gc.collect()  # a group ends with the last object that holds it, which may hold itself: a Trainer
        dist.destroy_process_group()
