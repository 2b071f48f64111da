"""A training step with sizes in place of numbers: tensors, autograd, activation checkpointing.

What a step holds in memory follows from which tensors exist when, and that from two things: what the code refers to,
and what autograd saves. So the accounting runs the step. Every tensor is a ``SymbolicTensor`` that knows its size and
holds no numbers, operators (``symbolic_ops.py``) allocate and save what torch's do, and ``Graph`` runs backward in
torch's order. A storage counts from its allocation until nothing refers to it, as under the meter in ``measure``.
"""

import contextlib
import dataclasses
import heapq
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal, NamedTuple

from lightning_llm.io.untrusted import shown

FLOAT32, BFLOAT16, INT64, BOOL = 4, 2, 8, 1  # a dtype is its bytes: nothing else about it matters here
PRECISIONS = {"32-true": (FLOAT32, FLOAT32), "bf16-true": (BFLOAT16, BFLOAT16), "bf16-mixed": (FLOAT32, BFLOAT16)}
PHASES = {"forward": "", "recomputing": "backward, recomputing ", "backward": "backward, "}  # in words
ENDS = {0: "first", 1: "second", -2: "last but one", -1: "last"}

Size = tuple[int, int]  # elements, and bytes of each
StepPhase = Literal["forward", "recomputing", "backward"]
Stage = Literal["embeddings", "attention", "mlp", "final norm", "loss"]


class LiveBytes(NamedTuple):
    """The most live bytes at a point in the step, and the most of them without gradients."""

    total: int
    without_gradients: int


class TracePoint(NamedTuple):
    """A point in the step: what runs, and in which phase.

    Attributes:
        phase: Recomputing is a part of backward.
        stage: What runs: a part of a layer, or what is before or after the layers.
        layer: Its number, or, if ``level`` is given, its place among the layers at that level, one of ``ENDS``.
        level: Checkpoint level of the layers that ``extrapolated_memory.py`` takes together.
    """

    phase: StepPhase
    stage: Stage
    layer: int | None = None
    level: int | None = None

    def in_words(self) -> str:
        """For reports, such as ``backward, recomputing layer 3, mlp``."""
        if self.layer is None:
            return PHASES[self.phase] + self.stage
        layer = f"layer {self.layer}" if self.level is None else f"the {ENDS[self.layer]} layer at level {self.level}"
        return f"{PHASES[self.phase]}{layer}, {self.stage}"


def item_sizes(precision: str) -> tuple[int, int]:
    """Bytes of a number in a parameter, and in a factor of a matmul.

    Raises:
        ValueError: The precision is unknown.
    """
    if precision not in PRECISIONS:
        raise ValueError(f"precision {shown(precision)} is not covered: choose one of {', '.join(PRECISIONS)}")
    return PRECISIONS[precision]


class Count(int):
    """A number of elements and the product it came from, such as ``B·T·h``."""

    formula: str

    def __new__(cls, value: int, formula: str = "") -> "Count":
        """``formula`` is how it is written; a bare number by default."""
        count = super().__new__(cls, value)
        count.formula = formula or str(value)
        return count

    def __mul__(self, other: int) -> "Count":
        if other == 1 and not isinstance(other, Count):
            return self
        return Count(int(self) * int(other), f"{self.formula}·{getattr(other, 'formula', other)}")


@dataclasses.dataclass(eq=False, slots=True)
class Storage:
    """Bytes that live as long as a tensor refers to them."""

    log: "AllocationLog"
    nbytes: int
    formula: str
    category: str
    part: str
    tensors: int = 0


class AllocationLog:
    """Live bytes by category and part of the model, and their peak.

    Attributes:
        point: The point in the step; the caller sets it.
        part: The part of the model that allocates now.
        phase: Of the points that are entered: forward, or recomputing.
        live: Bytes by (category, part).
        peak: The most live bytes since ``reset_peak``.
        peak_point: When.
        peak_live: ``live`` then.
        points: The most live bytes at each point in the step.
    """

    def __init__(self) -> None:
        self.phase: StepPhase = "forward"
        self.point, self.part = TracePoint(self.phase, "embeddings"), ""
        self.points: dict[TracePoint, LiveBytes] = {}
        self.live: Counter[tuple[str, str]] = Counter()
        self.total = 0
        self._storages: dict[Storage, None] = {}
        self.reset_peak()

    def reset_peak(self) -> None:
        """Starts again from what is live."""
        self.peak, self.peak_point, self.peak_live = self.total, self.point, dict(self.live)

    def enter(self, stage: Stage, part: str, layer: int | None = None) -> None:
        """What follows belongs to this stage of the step and this part of the model."""
        self.point, self.part = TracePoint(self.phase, stage, layer), part

    def add(self, storage: Storage) -> None:
        """A storage is allocated."""
        self._storages[storage] = None
        self._count(storage, storage.nbytes)
        total, without_gradients = self.total, self.total - self.live["gradients", ""]
        most = self.points.get(self.point, LiveBytes(0, 0))
        self.points[self.point] = LiveBytes(max(total, most.total), max(without_gradients, most.without_gradients))
        if total > self.peak:
            self.reset_peak()

    def remove(self, storage: Storage) -> None:
        """A storage is freed."""
        del self._storages[storage]
        self._count(storage, -storage.nbytes)

    def relabel(self, storage: Storage, category: str, part: str) -> None:
        """A storage has become something else, such as a gradient."""
        self._count(storage, -storage.nbytes)
        storage.category, storage.part = category, part
        self._count(storage, storage.nbytes)

    def save_temporaries(self) -> None:
        """What is temporary and live now is saved for backward."""
        for storage in self._storages:
            if storage.category == "temporary":
                self.relabel(storage, "activations", storage.part)

    def terms(self, category: str) -> Counter[tuple[str, str, int]]:
        """How many storages of a category there are of each (part, formula, bytes)."""
        return Counter((s.part, s.formula, s.nbytes) for s in self._storages if s.category == category)

    def _count(self, storage: Storage, change: int) -> None:
        self.live[storage.category, storage.part] += change
        self.total += change


class SymbolicTensor:
    """A tensor without numbers. Two of one storage are views of each other.

    Attributes:
        elements: How many.
        itemsize: Bytes of each.
        node: What made it, if gradients are to flow; with ``slot``, which of its outputs it is.
    """

    def __init__(self, storage: Storage, elements: int, itemsize: int, node: "Node | None" = None, slot: int = 0):
        self.storage = storage
        self.elements = elements
        self.itemsize = itemsize
        self.node = node
        self.slot = slot
        storage.tensors += 1

    def __del__(self) -> None:
        self.storage.tensors -= 1
        if not self.storage.tensors:
            self.storage.log.remove(self.storage)

    @property
    def size(self) -> Size:
        """Elements, and bytes of each: all that an operator needs of a tensor that it must not keep alive."""
        return self.elements, self.itemsize

    def view(self, elements: int | None = None) -> "SymbolicTensor":
        """Another tensor of the same storage, outside the graph."""
        return SymbolicTensor(self.storage, self.elements if elements is None else elements, self.itemsize)


Gradients = list[SymbolicTensor | None]
Inputs = Sequence[SymbolicTensor | None]
Backward = Callable[[SymbolicTensor, list[SymbolicTensor]], Gradients]
Saved = Callable[[], SymbolicTensor]


class Node:
    """One step of backward.

    Attributes:
        run: From the gradients of the outputs to those of the inputs. Dropped after it has run, with all it saved.
        inputs: For each input what made it, which of its outputs it is, and its bytes per element; ``None`` where no
            gradient goes.
    """

    def __init__(self, graph: "Graph", run: Callable[[list[SymbolicTensor]], Gradients] | None, inputs: Inputs) -> None:
        graph.nodes_made += 1
        self.number = graph.nodes_made
        self.point, self.part = graph.log.point, graph.log.part
        self.run = run
        self.inputs = [(x.node, x.slot, x.itemsize) if x is not None and x.node is not None else None for x in inputs]

    def backward(self, gradients: list[SymbolicTensor]) -> Gradients:
        """Run once, and free what was saved."""
        run, self.run = self.run, None
        assert run is not None
        return run(gradients)


class Leaf(Node):
    """A parameter: takes its gradient, or adds it to the one that is there."""

    def __init__(self, graph: "Graph") -> None:
        super().__init__(graph, None, ())
        self.number += 2**62  # torch lets these go first
        self.log = graph.log
        self.gradient: SymbolicTensor | None = None

    def backward(self, gradients: list[SymbolicTensor]) -> Gradients:
        """Take the first gradient as the parameter's own; later ones are added to it."""
        if self.gradient is None:
            self.gradient = gradients[0]
            self.log.relabel(self.gradient.storage, "gradients", "")
        return []


class Graph:
    """Makes tensors and nodes, and runs them backward.

    Args:
        log: Counts the bytes.
        adds_in_place: Whether two gradients of one tensor are added in the first, if nothing else reads it. torch's
            engine does so, but never under a dispatch mode, such as the meter in ``measure``.
    """

    def __init__(self, log: AllocationLog, *, adds_in_place: bool) -> None:
        self.log, self.nodes_made, self.adds_in_place = log, 0, adds_in_place
        self.weight_casts: dict[int, SymbolicTensor] = {}  # autocast's cache
        self.checkpoints: list[_Checkpoint] = []

    def new(self, elements: int, itemsize: int, category: str = "temporary", part: str | None = None) -> SymbolicTensor:
        """A new tensor, of the log's part."""
        formula = f"{getattr(elements, 'formula', elements)} × {itemsize}"
        part = self.log.part if part is None else part
        storage = Storage(self.log, int(elements) * itemsize, formula, category, part)
        self.log.add(storage)
        return SymbolicTensor(storage, elements, itemsize)

    def scratch(self, *sizes: Size) -> None:
        """Allocates all of these, and frees them."""
        _held = [self.new(*size) for size in sizes]

    def apply(
        self, out: SymbolicTensor, inputs: Inputs, saves: Inputs = (), backward: Backward | None = None
    ) -> SymbolicTensor:
        """Records one operator.

        Args:
            out: Its output.
            inputs: Where gradients go.
            saves: What it saves for backward.
            backward: From the output's gradient and what was saved to the inputs' gradients; by default a new tensor
                for each.
        """
        input_sizes = [None if x is None else x.size for x in inputs]
        saved = [self.save(x) for x in saves if x is not None]

        def run(gradients: list[SymbolicTensor]) -> Gradients:
            held = [get() for get in saved]
            if backward is not None:
                return backward(gradients[0], held)
            return [None if size is None else self.new(*size) for size in input_sizes]

        if any(x is not None and x.node is not None for x in inputs):
            out.node, out.slot = Node(self, run, inputs), 0
        return out

    def save(self, tensor: SymbolicTensor) -> Saved:
        """Saves a tensor for backward; the result returns it."""
        view = tensor.view()
        return self.checkpoints[-1].save(view) if self.checkpoints else lambda: view

    def checkpoint(self, function: Callable[[SymbolicTensor], SymbolicTensor], x: SymbolicTensor) -> SymbolicTensor:
        """``function(x)``, of which only ``x`` is saved."""
        self.checkpoints.append(_Checkpoint(self, function, x))
        out = function(x)
        self.checkpoints.pop()
        return out

    def backward(self, loss: SymbolicTensor) -> None:
        """From a scalar to all leaves, the newest node first, freeing on the way."""
        assert loss.node is not None
        waiting = _dependencies(loss.node)
        buffers: dict[Node, dict[int, SymbolicTensor]] = {loss.node: {0: self.new(1, loss.itemsize)}}
        ready = [(-loss.node.number, loss.node)]
        loss.node = None
        while ready:
            node = heapq.heappop(ready)[1]
            self.log.point, self.log.part = node.point._replace(phase="backward"), node.part
            results = list(node.backward(list(buffers.pop(node).values())))
            for index, edge in enumerate(node.inputs):
                gradient, results[index] = results[index], None
                if edge is None:
                    continue
                target, slot, itemsize = edge
                if gradient is not None:
                    if gradient.itemsize != itemsize:
                        gradient = self.new(gradient.elements, itemsize)
                    self._accumulate(buffers.setdefault(target, {}), slot, gradient)
                del gradient
                waiting[target] -= 1
                if not waiting[target]:
                    heapq.heappush(ready, (-target.number, target))
            node.inputs = []

    def _accumulate(self, buffer: dict[int, SymbolicTensor], slot: int, gradient: SymbolicTensor) -> None:
        if slot not in buffer:
            buffer[slot] = gradient.view()
        elif not self.adds_in_place or buffer[slot].storage.tensors > 1:
            buffer[slot] = self.new(*gradient.size)


def _dependencies(root: Node) -> Counter[Node]:
    counts: Counter[Node] = Counter()
    stack = [root]
    while stack:
        for edge in stack.pop().inputs:
            if edge is not None:
                if not counts[edge[0]]:
                    stack.append(edge[0])
                counts[edge[0]] += 1
    return counts


class _Enough(Exception):
    """The last tensor that backward needs has been recomputed."""


class _Checkpoint:
    """One checkpointed call: forward saves its input alone, and the first tensor that backward asks for runs it again.

    The second run stops at the last tensor that was saved.
    """

    def __init__(self, graph: Graph, function: Callable[[SymbolicTensor], SymbolicTensor], x: SymbolicTensor) -> None:
        self.graph, self.function = graph, function
        self.x: SymbolicTensor | None = x.view()
        self.recomputed: list[SymbolicTensor | None] | None = None
        self.count = 0

    def save(self, tensor: SymbolicTensor) -> Saved:
        """In forward a promise of the tensor, by its number; when it is recomputed, the tensor."""
        if self.recomputed is not None:
            self.recomputed.append(tensor)
            if len(self.recomputed) == self.count:
                raise _Enough
            return lambda: tensor
        self.count += 1
        return partial(self._get, self.count - 1)

    def _get(self, index: int) -> SymbolicTensor:
        if self.recomputed is None:
            self._recompute()
        assert self.recomputed is not None
        tensor, self.recomputed[index] = self.recomputed[index], None
        assert tensor is not None
        return tensor

    def _recompute(self) -> None:
        graph, log = self.graph, self.graph.log
        self.recomputed = []
        point, part = log.point, log.part
        log.phase = "recomputing"
        graph.checkpoints.append(self)
        assert self.x is not None
        self.x.node = Leaf(graph)
        with contextlib.suppress(_Enough):
            self.function(self.x)
        graph.checkpoints.pop()
        graph.weight_casts = {}
        log.point, log.part, log.phase = point, part, "forward"
        self.x = None
