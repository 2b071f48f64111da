"""FSDP2 as a strategy of Lightning, with this project's checkpoints."""

from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy, Strategy
from torch import Tensor
from torch.optim import Optimizer

from lightning_llm.checkpoints.reading import read_checkpoint
from lightning_llm.checkpoints.schema import LIGHTNING
from lightning_llm.checkpoints.sharded import Rows, local_rows
from lightning_llm.training.checkpoint_io import AtomicCheckpointIO

NAME = "fsdp2"
DEVICES = ("cpu", "cuda")
_TIMEOUT = timedelta(minutes=30)  # as Lightning


class ShardedStrategy(ModelParallelStrategy):
    """Parameters, gradients and the optimiser's state spread by rows over all processes (FSDP2).

    The model is sharded by ``LanguageModel.configure_model``. A checkpoint is a folder to which each process writes its
    rows (``training.sharded_files``); any number of processes, sharded or not, goes on from it, and from one in a file.

    Args:
        data_parallel_size: Number of processes; ``auto``: all there are.
        save_distributed_checkpoint: False: the first process gathers the whole and writes one file.
        process_group_backend: As in Lightning.
        timeout: As in Lightning: how long a process waits for the others.
    """

    def __init__(
        self,
        data_parallel_size: Literal["auto"] | int = "auto",
        save_distributed_checkpoint: bool = True,
        process_group_backend: str | None = None,
        timeout: timedelta | None = _TIMEOUT,
    ) -> None:
        super().__init__(
            data_parallel_size=data_parallel_size,
            tensor_parallel_size=1,
            save_distributed_checkpoint=save_distributed_checkpoint,
            process_group_backend=process_group_backend,
            timeout=timeout,
        )
        self._asked_size = data_parallel_size
        self._one_file = not save_distributed_checkpoint
        self._files_group: Any = None

    # -- processes ----------------------------------------------------------------------------------------------------

    @property
    def lightning_restore_optimizer(self) -> bool:
        """Lightning hands the optimiser's state over; see :meth:`load_optimizer_state_dict`."""
        return True

    def setup_environment(self) -> None:
        """Meet the other processes.

        Raises:
            ValueError: A number or kind of devices that this strategy is not for.
        """
        world, device = self.num_nodes * self.num_processes, self.root_device
        if device.type not in DEVICES:
            raise ValueError(f"trainer.strategy {NAME} needs devices of {' or '.join(DEVICES)}, got {device.type}")
        if self._asked_size not in ("auto", world):
            raise ValueError(
                f"trainer.strategy {NAME}: data_parallel_size {self._asked_size} with {world} device"
                f"{'s' if world > 1 else ''} in all: leave it out, or change trainer.devices or trainer.num_nodes"
            )
        self._data_parallel_size = world
        super().setup_environment()
        if self._files_group is None and dist.is_initialized():
            # of its own, so that the thread that writes checkpoints and the training never mix up their messages
            self._files_group = dist.new_group(backend="gloo", timeout=self._timeout)

    # -- saving -------------------------------------------------------------------------------------------------------

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Parameters by name, as shards."""
        assert self.lightning_module is not None
        return self.lightning_module.state_dict()

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """As of an unsharded model, by numbers, but with shards for tensors."""
        state: dict[str, Any] = getattr(optimizer, "optimizer", optimizer).state_dict()
        return state

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: _PATH, storage_options: Any | None = None) -> None:
        """Write the shards of this process, and the rest in the first one."""
        files = self.checkpoint_io
        if self._one_file or not isinstance(files, AtomicCheckpointIO):
            whole = _gathered(checkpoint, keep=self.is_global_zero)
            super(ModelParallelStrategy, self).save_checkpoint(whole, filepath, storage_options)
            return
        files.save_shards(
            checkpoint,
            Path(self.broadcast(filepath)),
            process=self.global_rank,
            processes=self.world_size,
            agree=self._any_failed,
        )

    def _any_failed(self, failed: bool) -> bool:
        vote = torch.tensor(int(failed))
        dist.all_reduce(vote, op=dist.ReduceOp.MAX, group=self._files_group)
        return bool(vote)

    # -- loading ------------------------------------------------------------------------------------------------------

    def load_checkpoint(self, checkpoint_path: _PATH, weights_only: bool | None = None) -> dict[str, Any]:
        """Read all but the tensors, which are taken from their files when they are needed."""
        if weights_only is False:
            raise ValueError("weights_only=False would run code from the checkpoint: leave the option out")
        return read_checkpoint(Path(self.broadcast(checkpoint_path)), mmap=True, needs=LIGHTNING)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Take this process's rows of each parameter; that they fit, the module has checked."""
        assert self.lightning_module is not None
        ours, theirs = self.lightning_module.state_dict(), checkpoint["state_dict"]
        with torch.no_grad():
            for name, tensor in ours.items():
                if name in theirs:
                    local = local_rows(tensor)[1] if hasattr(tensor, "to_local") else tensor
                    local.copy_(_rows_for(tensor, theirs[name]))

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Take this process's rows of what the optimiser keeps for each parameter."""
        for optimizer, saved in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            parameters = [param for group in optimizer.param_groups for param in group["params"]]
            numbers = [number for group in saved["param_groups"] for number in group["params"]]
            state = {
                number: dict(_sharded_like(param, saved["state"].get(number, {})))
                for number, param in zip(numbers, parameters, strict=True)
            }
            optimizer.load_state_dict({**saved, "state": {number: own for number, own in state.items() if own}})


def strategy_for(given: Any) -> Any:
    """The strategy that ``trainer.strategy`` means: the word ``fsdp2``, and Lightning's class, are ours.

    Raises:
        ValueError: FSDP1, or a way to be parallel that the model has no plan for.
    """
    if given == NAME:
        return ShardedStrategy()
    if isinstance(given, FSDPStrategy) or (isinstance(given, str) and given.startswith("fsdp")):
        name = given if isinstance(given, str) else type(given).__name__
        raise ValueError(f"trainer.strategy {name} is FSDP1, for which the model has no plan: write {NAME}")
    if not isinstance(given, ModelParallelStrategy) or isinstance(given, ShardedStrategy):
        return given
    if given._tensor_parallel_size not in ("auto", 1):
        raise ValueError(
            f"trainer.strategy ModelParallelStrategy: tensor_parallel_size {given._tensor_parallel_size}: the model "
            f"has no plan for tensor parallelism; leave it out, or write {NAME}"
        )
    return ShardedStrategy(
        data_parallel_size=given._data_parallel_size,
        save_distributed_checkpoint=given._save_distributed_checkpoint,
        process_group_backend=given._process_group_backend,
        timeout=given._timeout,
    )


def is_sharding(strategy: Strategy) -> bool:
    """Whether a strategy spreads the parameters over processes."""
    return isinstance(strategy, ModelParallelStrategy)


def _rows_for(tensor: Any, saved: Rows | Tensor) -> Tensor:
    """This process's rows of what was saved for a tensor, be it sharded here or not."""
    if not hasattr(tensor, "to_local"):
        return saved.whole() if isinstance(saved, Rows) else saved
    start, rows = local_rows(tensor)
    stop = start + rows.shape[0]
    return saved.between(start, stop) if isinstance(saved, Rows) else saved[start:stop]


def _sharded_like(param: Any, saved: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """State of one parameter: what has its shape becomes a shard, what is one number stays."""
    for name, value in saved.items():
        if isinstance(value, Rows | Tensor) and tuple(value.shape) == tuple(param.shape) and hasattr(param, "to_local"):
            rows = _rows_for(param, value).to(param.device, copy=True)
            yield (
                name,
                type(param.data).from_local(
                    rows,
                    param.device_mesh,
                    param.placements,
                    run_check=False,
                    shape=param.shape,
                    stride=param.stride(),
                ),
            )
        elif isinstance(value, Rows):
            yield name, value.whole()
        else:
            yield name, value


def _gathered(content: Any, *, keep: bool) -> Any:
    """With whole tensors for shards, in main memory, one after the other; ``None`` for them where they are not kept."""
    if hasattr(content, "full_tensor"):
        whole = content.full_tensor()
        return whole.cpu() if keep else None
    if isinstance(content, dict):
        return {key: _gathered(value, keep=keep) for key, value in content.items()}
    if isinstance(content, list):
        return [_gathered(each, keep=keep) for each in content]
    return content
