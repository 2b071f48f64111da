"""When an operator may read the weight of a module instead of calling the module."""

from typing import Any

from torch import nn
from torch.nn.utils import parametrize
from torch.utils.module_tracker import ModuleTracker

from lightning_llm.measure.attribution import AttributedMeter

# Classes whose hooks change nothing. A layer above adds its own.
PASSIVE_HOOK_OWNERS: set[type] = {AttributedMeter, ModuleTracker}  # ModuleTracker: of FlopCounterMode


def is_unmodified(module: nn.Module, *kinds: type[nn.Module]) -> bool:
    """Whether a call of ``module`` computes the formula of its class from its parameters, and nothing else happens.

    An operator that takes ``projection.weight`` skips everything else that happens in a call of the projection: a LoRA
    adapter, a quantized matmul, a hook. Hooks that only watch do not count, so that the memory profiler does not
    change the run. A parametrization (``torch.nn.utils.parametrize``) is plain: ``module.weight`` computes it.

    Args:
        module: With a ``weight``.
        kinds: The classes whose formula the caller knows; a subclass is none of them.

    Returns:
        False for another class, for hooks that may change something, for a ``forward`` set on the object, and for a
        weight that is a tensor subclass with tensors inside (quantized, or a ``DTensor``).
    """
    kind = type(module)
    if kind not in kinds and not (parametrize.is_parametrized(module) and kind.__bases__[0] in kinds):
        return False
    weight = getattr(module, "weight", None)
    return "forward" not in module.__dict__ and not hasattr(weight, "__tensor_flatten__") and not is_hooked(module)


def is_hooked(module: nn.Module) -> bool:
    """Whether a hook of the module itself, or one for all modules, may change what a call of it computes."""
    return any(not _is_passive(hook) for hook in hooks_of(module))


def hooks_of(module: nn.Module) -> list[Any]:
    """All hooks that a call of the module runs, those that only watch too."""
    of_all: Any = nn.modules.module
    hooks: list[Any] = [module._forward_pre_hooks, module._forward_hooks]
    hooks += [module._backward_pre_hooks, module._backward_hooks]
    hooks += [of_all._global_forward_pre_hooks, of_all._global_forward_hooks]
    hooks += [of_all._global_backward_pre_hooks, of_all._global_backward_hooks]
    return [hook for group in hooks for hook in group.values()]


def _is_passive(hook: Any) -> bool:
    owner = getattr(getattr(hook, "func", hook), "__self__", None)  # of a method, or of a partial of one
    return isinstance(owner, tuple(PASSIVE_HOOK_OWNERS))
