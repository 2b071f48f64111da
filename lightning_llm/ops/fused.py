"""Where the Triton kernels can run: on CUDA tensors, or on any under the Triton interpreter."""

import os
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

from torch import Tensor


def kernels(name: str, tensor: Tensor) -> ModuleType | None:
    """The kernels of one operator, for the device where a tensor lies.

    Args:
        name: File in ``kernels/``, without its ending.
        tensor: One of the tensors to work on.

    Returns:
        The module, or ``None`` where the operators of PyTorch must do: off CUDA (unless ``TRITON_INTERPRET=1``), in
        float64, and without Triton.
    """
    if not tensor.is_cuda and os.environ.get("TRITON_INTERPRET") != "1":
        return None
    return None if tensor.element_size() == 8 else _import(name)


@cache
def _import(name: str) -> ModuleType | None:
    return import_module(f"lightning_llm.ops.kernels.{name}") if find_spec("triton") else None
