"""Triton kernels, and where they can run: on CUDA tensors, or on any tensor under the Triton interpreter."""

import os
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def kernels_for(name: str, tensor: "Tensor") -> ModuleType | None:
    """The kernels of one operator for a tensor's device.

    Args:
        name: File in this folder, without its extension.
        tensor: One of the tensors to work on.

    Returns:
        The module, or ``None`` where PyTorch's operators must do the work: outside CUDA (unless
        ``TRITON_INTERPRET=1``), in float64, and without Triton.
    """
    if not tensor.is_cuda and os.environ.get("TRITON_INTERPRET") != "1":
        return None
    return None if tensor.element_size() == 8 else _import(name)


@cache
def _import(name: str) -> ModuleType | None:
    return import_module(f"{__name__}.{name}") if find_spec("triton") else None
