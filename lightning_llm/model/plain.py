"""When an operator may read a module's weight instead of calling the module.

An operator that takes ``projection.weight`` skips whatever else happens in a call of the projection: a LoRA adapter, a
quantized matmul, a hook. So it asks :func:`is_plain` first. Hooks that only watch do not count, so that a run under the
memory profiler is the run without it.
"""

from typing import Any

from torch import nn
from torch.nn.utils import parametrize

# Classes whose hooks change nothing, by name: this file imports none of them. A subclass counts as its base.
WATCHERS = frozenset(
    {
        ("lightning_llm.measure.attribution", "AttributedMeter"),
        ("torch.utils.module_tracker", "ModuleTracker"),  # of FlopCounterMode
        ("lightning.pytorch.profilers.pytorch", "RegisterRecordFunction"),  # of trainer.profiler "pytorch"
    }
)


def is_plain(module: nn.Module, *kinds: type[nn.Module]) -> bool:
    """Whether a call of ``module`` computes the formula of its class from its parameters, and nothing else happens.

    A parametrization (``torch.nn.utils.parametrize``) is plain: ``module.weight`` computes it.

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
    every = nn.modules.module
    groups = (
        module._forward_pre_hooks,
        module._forward_hooks,
        module._backward_pre_hooks,
        module._backward_hooks,
        every._global_forward_pre_hooks,
        every._global_forward_hooks,
        every._global_backward_pre_hooks,
        every._global_backward_hooks,
    )
    return any(group and not all(map(_only_watches, group.values())) for group in groups)


def _only_watches(hook: Any) -> bool:
    owner = getattr(getattr(hook, "func", hook), "__self__", None)  # of a method, or of a partial of one
    return any((base.__module__, base.__qualname__) in WATCHERS for base in type(owner).__mro__)
