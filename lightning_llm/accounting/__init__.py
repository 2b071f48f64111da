"""The cost of a run from its config alone: parameters, FLOPs, memory, device peaks.

The public names are loaded when first used (PEP 562).
"""

from typing import TYPE_CHECKING

from lightning_llm.lazy import lazy

if TYPE_CHECKING:
    from lightning_llm.accounting.counts import StepFlops as StepFlops
    from lightning_llm.accounting.counts import parameters_by_part as parameters_by_part
    from lightning_llm.accounting.counts import step_flops as step_flops
    from lightning_llm.accounting.hardware import DEVICES as DEVICES
    from lightning_llm.accounting.hardware import Device as Device
    from lightning_llm.accounting.hardware import find_device as find_device
    from lightning_llm.accounting.memory import StepMemory as StepMemory
    from lightning_llm.accounting.memory import largest_batch as largest_batch
    from lightning_llm.accounting.memory import step_memory as step_memory
    from lightning_llm.accounting.step_settings import StepSettings as StepSettings
else:
    __getattr__, __dir__, __all__ = lazy(__name__)
