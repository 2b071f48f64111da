"""A training step with sizes in place of numbers: the machinery.

What a step holds in memory follows from which tensors exist when, and that from two things: what the code refers to,
and what autograd keeps. So the accounting runs the step: every tensor is a ``Shadow`` that knows its size and holds no
numbers, operators (``shadow_ops.py``) allocate and keep what torch's do, and a small engine goes backward in torch's
order. A storage is counted from its birth until nothing refers to it, as by the meter in ``measure``.

A size is a ``Count``: a number that remembers the sizes it was multiplied from, which gives the formulas.
"""

import heapq
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

FLOAT32, BFLOAT16, INT64, BOOL = 4, 2, 8, 1  # a dtype is its bytes: nothing else about it matters here


class Count(int):
    """A number of elements and the product it came from, such as ``B·T·h``."""

    formula: str

    def __new__(cls, value: int, formula: str = "") -> "Count":
        """``formula`` is how it is written; a bare number by default."""
        made = super().__new__(cls, value)
        made.formula = formula or str(value)
        return made

    def __mul__(self, other: int) -> "Count":
        if other == 1 and not isinstance(other, Count):
            return self
        formula = other.formula if isinstance(other, Count) else str(other)
        return Count(int(self) * int(other), f"{self.formula}·{formula}")


class Storage:
    """Bytes that live as long as a shadow refers to them."""

    def __init__(self, ledger: "Ledger", elements: int, itemsize: int, kind: str, part: str) -> None:
        self.ledger, self.kind, self.part = ledger, kind, part
        self.nbytes = int(elements) * itemsize
        formula = elements.formula if isinstance(elements, Count) else str(elements)
        self.formula = f"{formula} × {itemsize}"
        self.shadows = 0
        ledger.add(self)

    def __del__(self) -> None:
        self.ledger.remove(self)


class Ledger:
    """The bytes alive, by kind and part, and the most there were.

    Attributes:
        moment: Where in the step it is, in words; the caller sets it.
        part: Of the model, whose allocations come now.
        live: Bytes by (kind, part).
        peak: The most bytes that were alive at once since ``reset_peak``.
        peak_moment: When.
        peak_live: ``live`` then.
        prefix: Of the names of moments, while something is computed again.
        trace: For each moment the most bytes that were alive, with gradients and without.
    """

    def __init__(self) -> None:
        self.moment, self.part, self.prefix = "", "", ""
        self.trace: dict[str, tuple[int, int]] = {}
        self.live: Counter[tuple[str, str]] = Counter()
        self.total = 0
        self._facts: dict[int, _Facts] = {}  # not the storages themselves: that would keep them alive
        self.reset_peak()

    def reset_peak(self) -> None:
        """Begins anew from what is alive."""
        self.peak, self.peak_moment, self.peak_live = self.total, self.moment, dict(self.live)

    def enter(self, moment: str, part: str) -> None:
        """What comes now belongs to this moment and this part of the model."""
        self.moment, self.part = self.prefix + moment, part

    def add(self, storage: Storage) -> None:
        """A storage is born."""
        self._facts[id(storage)] = _Facts(storage)
        self._count(storage.kind, storage.part, storage.nbytes)

    def remove(self, storage: Storage) -> None:
        """It died."""
        facts = self._facts.pop(id(storage))
        self._count(facts.kind, facts.part, -facts.nbytes)

    def relabel(self, storage: Storage, kind: str, part: str) -> None:
        """It has become something else, such as a gradient."""
        facts = self._facts[id(storage)]
        self.live[facts.kind, facts.part] -= facts.nbytes
        facts.kind, facts.part = kind, part
        self.live[kind, part] += facts.nbytes

    def keep(self) -> None:
        """What is temporary and alive now is kept for backward."""
        for facts in self._facts.values():
            if facts.kind == "temporary":
                self.live["temporary", facts.part] -= facts.nbytes
                facts.kind = "kept"
                self.live["kept", facts.part] += facts.nbytes

    def terms(self, kind: str) -> Counter[tuple[str, str, int]]:
        """How many storages of a kind there are of each (part, formula, bytes)."""
        return Counter((f.part, f.formula, f.nbytes) for f in self._facts.values() if f.kind == kind)

    def _count(self, kind: str, part: str, change: int) -> None:
        self.live[kind, part] += change
        self.total += change
        if change > 0:
            place, rest = self.moment, self.total - self.live["gradients", ""]
            most = self.trace.get(place, (0, 0))
            if self.total > most[0] or rest > most[1]:
                self.trace[place] = max(self.total, most[0]), max(rest, most[1])
        if self.total > self.peak:
            self.reset_peak()


class _Facts:
    def __init__(self, storage: Storage) -> None:
        self.kind, self.part = storage.kind, storage.part
        self.nbytes, self.formula = storage.nbytes, storage.formula


class Shadow:
    """A tensor without numbers. Two shadows of one storage are views of each other.

    Attributes:
        elements: How many.
        itemsize: Bytes of each.
        node: What made it, if gradients are to flow; with ``slot``, which of its outputs it is.
    """

    def __init__(self, storage: Storage, elements: int, itemsize: int, node: "Node | None" = None, slot: int = 0):
        self.storage, self.elements, self.itemsize, self.node, self.slot = storage, elements, itemsize, node, slot
        storage.shadows += 1

    def __del__(self) -> None:
        self.storage.shadows -= 1

    def view(self, elements: int | None = None) -> "Shadow":
        """Another shadow of the same storage, outside the graph."""
        return Shadow(self.storage, self.elements if elements is None else elements, self.itemsize)


Gradients = Sequence[Shadow | None]


class Node:
    """One step of backward.

    Attributes:
        run: From the gradients of the outputs to those of the inputs. Dropped once it has run, with all it kept.
        inputs: For each input what made it, which of its outputs it is, and its bytes per element; ``None`` where no
            gradient goes.
    """

    def __init__(self, graph: "Graph", run: Callable[[list[Any]], Gradients], inputs: Sequence[Shadow | None]) -> None:
        graph.nodes_made += 1
        self.number = graph.nodes_made
        self.moment, self.part = graph.ledger.moment, graph.ledger.part
        self.run: Callable[[list[Any]], Gradients] | None = run
        self.inputs = [(x.node, x.slot, x.itemsize) if x is not None and x.node is not None else None for x in inputs]


class Leaf(Node):
    """A parameter: takes its gradient, or adds it to the one that is there."""

    def __init__(self, graph: "Graph") -> None:
        super().__init__(graph, self._accumulate, ())
        self.number += 2**62  # torch lets these go first
        self.ledger = graph.ledger
        self.gradient: Shadow | None = None

    def _accumulate(self, gradients: list[Any]) -> Gradients:
        if self.gradient is None:
            self.gradient = gradients.pop()
            self.ledger.relabel(self.gradient.storage, "gradients", "")
        return ()


class Graph:
    """Makes tensors and nodes, and runs them backward.

    Args:
        ledger: Counts the bytes.
        adds_in_place: Whether two gradients of one tensor are added in the first, if nobody else reads it. torch's
            engine does so, but never under a dispatch mode, such as the meter in ``measure``.
    """

    def __init__(self, ledger: Ledger, *, adds_in_place: bool) -> None:
        self.ledger, self.nodes_made, self.adds_in_place = ledger, 0, adds_in_place

    def new(self, elements: int, itemsize: int, kind: str = "temporary", part: str | None = None) -> Shadow:
        """A new tensor, of the ledger's part."""
        storage = Storage(self.ledger, elements, itemsize, kind, self.ledger.part if part is None else part)
        return Shadow(storage, elements, itemsize)

    def record(self, out: Shadow, run: Callable[[list[Any]], Gradients], inputs: Sequence[Shadow | None]) -> Shadow:
        """Says how gradients go from ``out`` to ``inputs``, if one of these wants any."""
        if any(x is not None and x.node is not None for x in inputs):
            out.node, out.slot = Node(self, run, inputs), 0
        return out

    def backward(self, loss: Shadow) -> None:
        """From a scalar to all leaves, the newest node first, freeing on the way."""
        assert loss.node is not None
        waiting = _dependencies(loss.node)
        buffers: dict[Node, dict[int, Shadow]] = {loss.node: {0: self.new(1, loss.itemsize)}}
        ready = [(-loss.node.number, loss.node)]
        loss.node = None
        while ready:
            node = heapq.heappop(ready)[1]
            self.ledger.moment, self.ledger.part = f"backward, {node.moment}", node.part
            arrived = buffers.pop(node)
            gradients: list[Any] = [arrived.pop(slot, None) for slot in range(max(arrived, default=0) + 1)]
            run, node.run = node.run, None
            is_leaf = isinstance(node, Leaf)
            assert run is not None
            results = list(run(gradients))
            if is_leaf:
                node.run = run
            del run  # frees what was kept
            gradients.clear()
            for place, edge in enumerate(node.inputs):
                gradient, results[place] = results[place], None
                if edge is None:
                    continue
                target, slot, itemsize = edge
                if gradient is not None:
                    if gradient.itemsize != itemsize:
                        gradient = self.new(gradient.elements, itemsize)
                    self._arrive(buffers.setdefault(target, {}), slot, gradient)
                del gradient
                waiting[target] -= 1
                if not waiting[target]:
                    heapq.heappush(ready, (-target.number, target))
            node.inputs = []

    def _arrive(self, buffer: dict[int, Shadow], slot: int, gradient: Shadow) -> None:
        if slot not in buffer:
            buffer[slot] = gradient.view()
        elif not self.adds_in_place or buffer[slot].storage.shadows > 1:
            buffer[slot] = self.new(gradient.elements, gradient.itemsize)


def _dependencies(root: Node) -> Counter[Node]:
    counts: Counter[Node] = Counter()
    seen, stack = {root}, [root]
    while stack:
        for edge in stack.pop().inputs:
            if edge is not None:
                counts[edge[0]] += 1
                if edge[0] not in seen:
                    seen.add(edge[0])
                    stack.append(edge[0])
    return counts
