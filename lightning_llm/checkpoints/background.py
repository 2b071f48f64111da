"""Work that no training step waits for: one thread, in order. The next caller gets its error."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor


class Background:
    """A queue with one thread. After an error, actions that are already queued are dropped."""

    def __init__(self) -> None:
        self._executor: ThreadPoolExecutor | None = None
        self._last: Future[None] | None = None

    def add(self, action: Callable[[], object]) -> None:
        """Run ``action`` after all earlier ones."""
        if self._executor is None:  # a thread of an executor is joined before the interpreter ends
            self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        before = self._last

        def act() -> None:
            if before is not None:
                before.result()
            action()

        self._last = self._executor.submit(act)

    def wait(self) -> None:
        """Wait until all is done.

        Raises:
            Exception: What an action has raised; reported once.
        """
        last, self._last = self._last, None
        if last is not None:
            last.result()


class HostCopy:
    """Copies nested containers with their tensors to host memory, so that the next step cannot change them.

    Each copy reuses the memory of the previous one, whose reader must have finished: fresh pages cost more than the
    copying. For tensors on a GPU the memory is pinned.
    """

    def __init__(self) -> None:
        self._free: dict[object, list[Tensor]] = {}

    def of(self, content: Any) -> Any:
        """The copy. Tensors that share their storage share it in the copy too.

        Args:
            content: Dictionaries, lists and tuples of tensors on any device and of other values.
        """
        copies: dict[object, Tensor] = {}
        used: dict[object, list[Tensor]] = {}

        def copy_tensor(tensor: Tensor) -> Tensor:
            same = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
            key = same if tensor.numel() else id(tensor)
            if key not in copies:
                alike = shape, dtype, is_pinned = tensor.shape, tensor.dtype, tensor.is_cuda
                free = self._free.get(alike)
                target = free.pop() if free else torch.empty(shape, dtype=dtype, pin_memory=is_pinned)
                used.setdefault(alike, []).append(target)
                copies[key] = target.copy_(tensor.detach(), non_blocking=tensor.is_cuda)  # others wait
            return copies[key]

        def copy(part: Any) -> Any:
            if isinstance(part, Tensor):
                return copy_tensor(part)
            if isinstance(part, dict):
                return {key: copy(value) for key, value in part.items()}
            return type(part)(map(copy, part)) if type(part) in (list, tuple) else part

        with torch.no_grad():
            whole = copy(content)
        self._free = used
        if any(tensor.is_pinned() for tensors in used.values() for tensor in tensors[:1]):
            torch.cuda.synchronize()
        return whole
