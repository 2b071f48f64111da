"""Steps that are traced: they run on tensors without values, on a CPU, and stand for a device that is named here.

``accounting/tracing.py`` builds the model on fake tensors and runs a step to learn what it allocates. What the
operators allocate depends on the device, so they ask :func:`device_type` and not the tensor. No torch.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

Tile = TypeVar("Tile")


@dataclasses.dataclass(eq=False)
class TraceContext:
    """One traced step.

    Attributes:
        device: The type of the device that the step is meant for.
        attention: Stands for its kernels of attention: from queries, keys, values, and the name of the form.
        has_all_tiles: Whether loops run over all tiles; else over some, which allocate what all do.
    """

    device: str
    attention: Callable[..., Any]
    has_all_tiles: bool


# not a context variable: torch.compile guards a global, and has no guard for those
_current: TraceContext | None = None


def current() -> TraceContext | None:
    """The trace that runs; ``None``: the operators compute."""
    return _current


def some_of(tiles: Sequence[Tile], *, is_even: bool) -> Sequence[Tile]:
    """The tiles that a loop runs over; in a trace those that show what all allocate, unless it wants them all.

    That is the first, the last, and unless that is as large as the others (``is_even``), the second, which begins with
    what the first has left.
    """
    first = 1 if is_even else 2
    is_whole = _current is None or _current.has_all_tiles or len(tiles) <= first
    return tiles if is_whole else [*tiles[:first], tiles[-1]]


def device_type(tensor: Any) -> str:
    """The type of the tensor's device, or in a trace that of the device that is meant."""
    if _current is not None:
        return _current.device
    kind: str = tensor.device.type
    return kind


@contextlib.contextmanager
def tracing(device: str, attention: Callable[..., Any], *, has_all_tiles: bool = False) -> Iterator[TraceContext]:
    """Operators inside belong to a trace of a step; arguments as the attributes of :class:`TraceContext`."""
    global _current
    before, _current = _current, TraceContext(device, attention, has_all_tiles)
    try:
        yield _current
    finally:
        _current = before
