"""Live tensor bytes, on any device: what an allocator would have had to hold, counted exactly.

A ``TorchDispatchMode`` sees every operator, in forward, in backward and inside a custom ``autograd.Function``. Each
storage that appears as a result is counted once, at its full size, until it dies, which a weak reference to it tells:

    with MemoryMeter(exclude=[model, batch]) as meter:
        with meter.phase("forward"):
            loss = model(batch)
        saved = meter.live_bytes             # what forward left behind: activations saved for backward, and the loss
        with meter.phase("backward"):
            loss.backward()
    meter.peak_bytes, meter.phases["backward"].peak_bytes

Storages that were there before are not counted, whether given as ``exclude`` or only met as an argument. Not seen are
an operator's own workspace, an allocator's rounding and fragments. It is for eager code: what ``torch.compile`` made
runs eagerly under the meter (torch 2.13), so that the number is not that of the compiled code.
"""

import contextlib
import dataclasses
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

Result = TypeVar("Result")

# torch.tensor(...) fills a new tensor out of sight and shows it first as the argument of one of these.
_LIFTS = (torch.ops.aten.lift_fresh.default, torch.ops.aten.lift.default)


@dataclasses.dataclass(eq=False)  # two phases with the same numbers are two
class Phase:
    """Live bytes of one part of the program, all without what was excluded.

    Attributes:
        start_bytes: Alive when it began.
        peak_bytes: The most that was alive at once.
        end_bytes: Alive when it ended; ``None`` while it runs.
    """

    start_bytes: int
    peak_bytes: int
    end_bytes: int | None = None


@dataclasses.dataclass
class Watched:
    """A storage that is alive, and its bytes. ``account`` says among whose bytes it is counted."""

    reference: "weakref.ref[torch.UntypedStorage]"
    nbytes: int
    account: str


class WithoutCompiler:
    """Base of modes that see operators: torch's default imports its compiler at the first one, for two seconds."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


class MemoryMeter(WithoutCompiler, TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of tensor storages that are created while it is entered, for as long as they live.

    After leaving it nothing new is counted, but deaths are: ``live_bytes`` then says what is still held. It may be
    entered again, and several meters may be nested. Sharded parameters (``DTensor``) count by their local shard.

    Args:
        exclude: Tensors and modules (parameters and buffers) that are there already: counted apart.

    Attributes:
        peak_bytes: The most that ``live_bytes`` was since the start or the last ``reset_peak``.
        phases: The latest ``Phase`` of each name.
    """

    def __init__(self, exclude: Iterable[Tensor | nn.Module] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak_bytes = 0
        self.phases: dict[str, Phase] = {}
        self._bytes = {"created": 0, "excluded": 0, "met": 0}
        self._watched: dict[int, Watched] = {}
        self._open_phases: list[Phase] = []
        for item in exclude:
            tensors = [*item.parameters(), *item.buffers()] if isinstance(item, nn.Module) else [item]
            for tensor in tensors:
                for part in parts_of(tensor):
                    self._watch(part, "excluded")

    @property
    def live_bytes(self) -> int:
        """Bytes alive now of storages created under the meter."""
        return self._bytes["created"]

    @property
    def excluded_bytes(self) -> int:
        """Bytes alive now of the storages given as ``exclude``."""
        return self._bytes["excluded"]

    def reset_peak(self) -> None:
        """Starts the peak again from what is live now."""
        self.peak_bytes = self.live_bytes

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[Phase]:
        """Measures a part of the program; phases may be nested. The record is also ``phases[name]``."""
        record = self.phases[name] = Phase(start_bytes=self.live_bytes, peak_bytes=self.live_bytes)
        self._open_phases.append(record)
        try:
            yield record
        finally:
            self._open_phases.remove(record)
            record.end_bytes = self.live_bytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # a DTensor, say: its own dispatch comes first, then its inner tensors come by here
        kwargs = kwargs or {}
        for tensor in tensors_in((args, kwargs)) if func not in _LIFTS else ():
            self._watch(tensor, "met")
        result = func(*args, **kwargs)
        for tensor in tensors_in(result):
            self._watch(tensor, "created")
        return result

    def _watch(self, tensor: Tensor, account: str) -> None:
        """Counts a storage under ``account`` when it is seen for the first time, and its change of size later."""
        if tensor.layout != torch.strided:
            return  # has no storage of its own; what it is made of came by before
        storage = tensor.untyped_storage()
        key = id(storage)
        nbytes = storage.nbytes()
        watched = self._watched.get(key)
        if watched is None:
            reference = weakref.ref(storage, lambda _: self._forget(key))
            watched = self._watched[key] = self._begin(reference, account)
        if nbytes != watched.nbytes:
            self._count(watched, nbytes - watched.nbytes)
            watched.nbytes = nbytes

    def _begin(self, reference: "weakref.ref[torch.UntypedStorage]", account: str) -> Watched:
        """The record of a storage that is seen for the first time; ``attribution.py`` writes more into it."""
        return Watched(reference, 0, account)

    def _forget(self, key: int) -> None:
        watched = self._watched.pop(key)
        self._count(watched, -watched.nbytes)

    def _count(self, watched: Watched, change: int) -> None:
        self._bytes[watched.account] += change
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        for phase in self._open_phases:
            phase.peak_bytes = max(phase.peak_bytes, self.live_bytes)


def tensors_in(structure: Any) -> Iterator[Tensor]:
    """The tensors in any structure of dictionaries, lists and tuples."""
    # torch's ``tree_leaves`` takes four times as long, and comes twice for each operator
    if isinstance(structure, Tensor):
        yield structure
    elif isinstance(structure, dict):
        yield from tensors_in((*structure.values(),))
    elif isinstance(structure, list | tuple):
        for item in structure:
            if isinstance(item, Tensor):
                yield item
            elif isinstance(item, list | tuple | dict):
                yield from tensors_in(item)


def parts_of(tensor: Any) -> Iterator[Tensor]:
    """The plain tensors that a wrapper such as ``DTensor`` holds, else the tensor itself."""
    if hasattr(tensor, "__tensor_flatten__"):
        for name in tensor.__tensor_flatten__()[0]:
            yield from parts_of(getattr(tensor, name))
    elif isinstance(tensor, Tensor):  # a DTensor names its mesh as a part, too
        yield tensor


def memory_of(
    first: Callable[[], Result], then: Callable[[Result], object], held: Sequence[Tensor | nn.Module], device: str
) -> tuple[int, int]:
    """Bytes alive between two calls, and the most alive in both, beyond what is held."""
    if device == "cuda":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()  # libraries' buffers too, which are no part of a step
        torch.cuda.reset_peak_memory_stats()
        out = first()
        saved = torch.cuda.memory_allocated() - before
        then(out)
        return saved, torch.cuda.max_memory_allocated() - before
    with MemoryMeter(exclude=held) as meter:
        out = first()
        saved = meter.live_bytes
        then(out)
    return saved, int(meter.peak_bytes)
