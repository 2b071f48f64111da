"""Work that no step waits for: one thread, in order, an error told to whoever asks next."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor


class Background:
    """A queue with one thread. After an error, nothing that was queued behind it is done."""

    def __init__(self) -> None:
        self._executor: ThreadPoolExecutor | None = None
        self._last: Future[None] | None = None

    def add(self, action: Callable[[], object]) -> None:
        """Do ``action`` once all before it is done."""
        if self._executor is None:  # a thread of an executor is joined before the interpreter ends
            self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        before = self._last

        def act() -> None:
            if before is not None:
                before.result()
            action()

        self._last = self._executor.submit(act)

    def wait(self) -> None:
        """Until all is done.

        Raises:
            Exception: What an action has raised; told once.
        """
        last, self._last = self._last, None
        if last is not None:
            last.result()


class MainMemoryCopy:
    """Copies nested containers with their tensors, so that the next step cannot change them.

    The memory of one copy is used again by the next, whose reader must have finished: fresh pages cost more than the
    copying. For tensors on a GPU it is pinned.
    """

    def __init__(self) -> None:
        self._free: dict[object, list[Tensor]] = {}

    def of(self, content: Any) -> Any:
        """The copy. Tensors that share their numbers share them in the copy too.

        Args:
            content: Dictionaries, lists and tuples, of tensors on any device and whatever else.
        """
        copies: dict[object, Tensor] = {}
        used: dict[object, list[Tensor]] = {}

        def copy(part: Any) -> Any:
            if isinstance(part, Tensor):
                same = (part.device, part.data_ptr(), part.shape, part.stride(), part.dtype)
                key = same if part.numel() else id(part)
                if key not in copies:
                    alike = (part.shape, part.dtype, part.is_cuda)
                    free = self._free.get(alike)
                    kept = free.pop() if free else _empty_like(part)
                    used.setdefault(alike, []).append(kept)
                    copies[key] = kept.copy_(part.detach(), non_blocking=True)
                return copies[key]
            if isinstance(part, dict):
                return {key: copy(value) for key, value in part.items()}
            if isinstance(part, list):
                return [copy(each) for each in part]
            if type(part) is tuple:
                return tuple(copy(each) for each in part)
            return part

        with torch.no_grad():
            whole = copy(content)
        self._free = used
        if any(tensor.is_pinned() for tensors in used.values() for tensor in tensors[:1]):
            torch.cuda.synchronize()
        return whole


def _empty_like(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
