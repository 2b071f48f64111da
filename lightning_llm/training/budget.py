"""``model.memory_budget``: plan a run that has to fit a given memory, before its model is built.

The planner is that of ``lightning-llm plan``. Here strategy and optimizer are given; it chooses the micro-batch, the
checkpoint levels, what is recomputed, and the chunks of the loss. The same options give the same plan in every process,
and in a resumed run.
"""

import dataclasses
import math
from contextlib import suppress
from typing import Any

import torch

from lightning_llm.accounting.hardware import find_device, reserve_for
from lightning_llm.accounting.measured_parts import measure_parts
from lightning_llm.accounting.plan_report import chosen_options, summary
from lightning_llm.accounting.planner import Planner, SearchSpace, StepPlan, choose, configured
from lightning_llm.accounting.step_settings import weight_dtype
from lightning_llm.accounting.step_time import GENERIC, CostModel
from lightning_llm.data.datamodule import TokenDataModule
from lightning_llm.io.units import byte_size
from lightning_llm.io.untrusted import prefixed
from lightning_llm.measure.gauges import device_memory
from lightning_llm.model.config import ModelConfig
from lightning_llm.model.transformer import Transformer
from lightning_llm.training.environment import settings_of, uses_tf32
from lightning_llm.training.measured_optimizer import state_bytes


class MemoryBudget:
    """The budget of a run and its plan.

    Args:
        size: Of a device, such as ``80GiB``.
        reserve: Of it, what tensors do not get. ``None``: nothing on a CPU, else ``accounting.hardware.reserve_for``.

    Attributes:
        plan: The fastest choice whose predicted peak fits; ``None`` before :meth:`apply`.

    Raises:
        ValueError: ``size`` or ``reserve`` is not a size.
    """

    def __init__(self, size: str, reserve: str | None = None) -> None:
        self.bytes = byte_size(size, "model.memory_budget")
        self.reserve = None if reserve is None else byte_size(reserve, "model.memory_reserve")
        self.size = size
        self.plan: StepPlan | None = None
        self._space: SearchSpace | None = None
        self._overridden: list[str] = []

    @classmethod
    def of(cls, size: str | None, reserve: str | None) -> "MemoryBudget | None":
        """The budget of these options; ``None`` without a size.

        Raises:
            ValueError: There is a reserve and no size; or as the class.
        """
        if size is None and reserve is not None:
            raise ValueError(f"model.memory_reserve {reserve} is a part of memory_budget, which is null: give both")
        return None if size is None else cls(size, reserve)

    def apply(self, model: Any, data: TokenDataModule, trainer: Any) -> StepPlan | None:
        """Plan, and set the options of model and data. A model that is already built keeps its plan.

        Args:
            model: The LanguageModel.
            data: Its data, with the token store.
            trainer: Lightning's trainer.

        Raises:
            ValueError: Nothing fits the budget, or the accounting does not cover the run.
        """
        if not isinstance(data, TokenDataModule):
            raise ValueError(f"model.memory_budget {self.size} sets the micro-batch of a TokenDataModule: leave it out")
        space = _space_of(model, data, trainer, self.reserve)
        if space != self._space and not hasattr(model, "transformer"):
            with prefixed(f"model.memory_budget {self.size}", ValueError):
                plan = choose(Planner(space), int(min(self.bytes, _memory_limit(trainer.strategy.root_device))))
            if self.plan is None:  # later, the options are those of an earlier plan
                self._overridden = _overridden(model, data, plan)
            self.plan = plan
            self._space = space
            model.architecture = configured(model.architecture, plan.choice)
            model.loss_chunks = plan.choice.loss_chunks
        if self.plan is not None:
            data.micro_batch_size = self.plan.choice.rows
        return self.plan

    def __str__(self) -> str:
        """The plan in one line, with the options that it overrides; empty without a plan."""
        overrides = f"; memory_budget overrides {', '.join(self._overridden)}" if self._overridden else ""
        return "" if self.plan is None else summary(self.plan, self.size) + overrides


def optimizer_state_bytes(model: Any, transformer: Transformer) -> int:
    """Bytes of the optimizer state, found by steps without storage.

    Args:
        model: The LanguageModel, which makes the optimizer.
        transformer: On the ``meta`` device; gets gradients.
    """
    parameters = list(transformer.parameters())
    try:
        return state_bytes(model.optimizer_over(model.groups_of(transformer)), parameters)
    except Exception:  # the user's own optimizer, which needs real numbers: assume two moments of the parameters' dtype
        return 2 * sum(p.nbytes for p in parameters)


def _memory_limit(device: torch.device) -> float:
    """Memory of a GPU, which is less than what it is sold as; infinite for a CPU, whose processes share it."""
    return (device_memory(device) or math.inf) if device.type == "cuda" else math.inf


def _space_of(model: Any, data: TokenDataModule, trainer: Any, reserve: int | None) -> SearchSpace:
    """Search space that a run leaves to the planner: the same whether or not an earlier plan has set options."""
    vocab_size = model.architecture.vocab_size or data.vocab_size
    architecture = dataclasses.replace(model.architecture, vocab_size=vocab_size, checkpoint_level=0, recompute="none")
    strategy = trainer.strategy
    cost_model = _cost_model(strategy.root_device, uses_tf32(trainer))
    step = settings_of(trainer, rows=1, context_length=data.context_length, document_mask=data.document_mask)
    with torch.device("meta"):
        transformer = Transformer(architecture).to(getattr(torch, weight_dtype(step.precision)))
    state = optimizer_state_bytes(model, transformer) / sum(p.nbytes for p in transformer.parameters())
    measured = measure_parts(architecture, step.precision, data.context_length)
    return SearchSpace(
        config=architecture,
        cost_model=cost_model,
        step=dataclasses.replace(step, state_per_parameter=state, measured=measured),
        global_batch_size=data.global_batch_size,
        strategies=(step.strategy,),
        reserve=reserve_for(strategy.root_device.type, trainer.world_size, reserve),
    )


def _overridden(model: Any, data: TokenDataModule, plan: StepPlan) -> list[str]:
    """The options that are not at their defaults and that a plan sets to something else, with their values."""
    architecture: ModelConfig = model.architecture
    current = {  # null: at its default
        "data.micro_batch_size": data.micro_batch_size,
        "model.architecture.checkpoint_level": architecture.checkpoint_level or None,
        "model.architecture.recompute": None if architecture.recompute == "none" else architecture.recompute,
        "model.loss_chunks": model.loss_chunks,
    }
    chosen = chosen_options(plan)
    return [f"{name} {value}" for name, value in current.items() if value is not None and value != chosen[name]]


def _cost_model(device: torch.device, tf32: bool) -> CostModel:
    if device.type not in GENERIC:
        raise ValueError(f"memory_budget works on CPUs and CUDA devices, not on {device.type}: set the sizes yourself")
    peaks = GENERIC[device.type]
    if device.type == "cuda":
        with suppress(ValueError):  # no peak is printed from it, and the order of choices is nearly that of any GPU
            peaks = find_device(torch.cuda.get_device_name(device))
    return CostModel(device=peaks, tf32=tf32 and device.type == "cuda")  # a CPU ignores torch's setting
