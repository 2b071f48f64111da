"""``model.memory_budget``: the plan of a run that is to fit a memory, made before its model is built.

The planner is that of ``lightning-llm plan``. Here strategy and optimiser are given; it chooses the micro-batch, the
levels, what is recomputed, and whether the loss is cut. The same options give the same plan in every process, and in a
run that goes on.
"""

import dataclasses
from typing import Any, Literal, cast

import torch
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy

from lightning_llm.accounting.hardware import Device, byte_size, find_device
from lightning_llm.accounting.plan_report import chosen_options
from lightning_llm.accounting.planner import Plan, Planner, Task, choose
from lightning_llm.accounting.step_time import GENERIC, CostModel
from lightning_llm.data.datamodule import TokenDataModule
from lightning_llm.model.config import ModelConfig
from lightning_llm.model.transformer import Transformer
from lightning_llm.optim.grouping import param_groups


def check_budget(words: str) -> None:
    """Refuse a word that is no size.

    Raises:
        ValueError: It is none.
    """
    try:
        byte_size(words)
    except ValueError as error:
        raise ValueError(f"model.memory_budget {error}") from error


def task_of(model: Any, data: TokenDataModule, trainer: Any) -> Task:
    """What a run leaves to the planner. What an earlier plan has set makes no difference.

    Args:
        model: The LanguageModel.
        data: Its data; the token store is there.
        trainer: Lightning's trainer.

    Raises:
        ValueError: A kind of device, or an option, that the accounting does not know.
    """
    if data.document_mask:
        raise ValueError("memory_budget does not count the masks of data.document_mask: leave one of them out")
    architecture: ModelConfig = model.architecture
    architecture = dataclasses.replace(
        architecture, vocab_size=architecture.vocab_size or data.vocab_size, checkpoint_level=0, recompute="none"
    )
    strategy, precision = trainer.strategy, str(trainer.precision)
    views = isinstance(strategy, DDPStrategy) and bool(strategy._ddp_kwargs.get("gradient_as_bucket_view"))
    dtype = torch.bfloat16 if precision == "bf16-true" else torch.float32
    return Task(
        config=architecture,
        cost_model=_cost_model(strategy.root_device),
        context_length=data.context_length,
        global_batch_size=data.global_batch_size,
        precision=precision,
        world_size=trainer.world_size,
        strategies=("fsdp2" if isinstance(strategy, ModelParallelStrategy) else "ddp",),
        gradient_views=views,
        state_per_parameter=_state_per_parameter(model, architecture, dtype),
    )


def plan_for(task: Task, memory_budget: str) -> Plan:
    """The fastest setting whose predicted peak is within the budget.

    Raises:
        ValueError: Nothing fits (says the least that would do), or the accounting does not cover the run.
    """
    try:
        return choose(Planner(task), byte_size(memory_budget))
    except ValueError as error:
        raise ValueError(f"model.memory_budget {memory_budget}: {error}") from error


def overridden(model: Any, data: TokenDataModule, plan: Plan) -> list[str]:
    """The options that are not at their defaults and that a plan sets to something else, with their values."""
    architecture: ModelConfig = model.architecture
    given = {
        "data.micro_batch_size": data.micro_batch_size,
        "model.architecture.checkpoint_level": architecture.checkpoint_level or None,
        "model.architecture.recompute": None if architecture.recompute == "none" else architecture.recompute,
        "model.loss_chunks": model.loss_chunks,
    }
    chosen = chosen_options(plan)
    return [f"{name} {value}" for name, value in given.items() if value is not None and value != chosen[name]]


def optimizer_state_bytes(model: Any, transformer: Transformer) -> int:
    """Bytes of what the optimiser keeps, found by one step without storage.

    Args:
        model: The LanguageModel, which makes the optimiser.
        transformer: On the ``meta`` device; gets gradients.
    """
    parameters = list(transformer.parameters())
    try:
        optimizer = model.make_optimizer(param_groups(transformer))
        for parameter in parameters:
            parameter.grad = torch.empty_like(parameter)
        optimizer.step()
        return sum(
            t.numel() * t.element_size() for s in optimizer.state.values() for t in s.values() if torch.is_tensor(t)
        )
    except Exception:  # somebody's optimiser that needs real numbers: two float32 moments, as most have
        return 8 * sum(p.numel() for p in parameters)


def _state_per_parameter(model: Any, architecture: ModelConfig, dtype: torch.dtype) -> float:
    """Numbers of the parameters' dtype that the optimiser keeps for each parameter, in the mean."""
    with torch.device("meta"):
        transformer = Transformer(architecture).to(dtype)
    elements = sum(p.numel() for p in transformer.parameters())
    return optimizer_state_bytes(model, transformer) / (elements * dtype.itemsize)


def _cost_model(device: torch.device) -> CostModel:
    if device.type not in GENERIC:
        raise ValueError(f"memory_budget knows CPUs and CUDA devices, not {device.type}: set the sizes yourself")
    known: Device = GENERIC[device.type]
    if device.type == "cuda":
        try:
            known = find_device(torch.cuda.get_device_name(device))
        except ValueError:  # no peak is printed from it, and the order of settings is nearly that of any GPU
            known = GENERIC["cuda"]
    return CostModel(device=known, kind=cast(Literal["cpu", "cuda"], device.type))
