"""torch's operators on shadows: what each allocates, and what it keeps for backward.

``Operators`` is one device and one precision. Under autocast it casts as autocast does: the weights of linear layers
once per forward pass (their copies stay alive until its end at least), inputs each time anew.

Activation checkpointing is here as well: forward then keeps nothing, and the first tensor that backward asks for runs
forward again, up to the last tensor that was kept.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from lightning_llm.accounting.symbolic import BFLOAT16, BOOL, FLOAT32, Count, Graph, Leaf, Ledger, Shadow

WEIGHT_CASTS = "weights cast by autocast"
AGAIN = "backward, again "
PRECISIONS = {"32-true": (FLOAT32, FLOAT32), "bf16-true": (BFLOAT16, BFLOAT16), "bf16-mixed": (FLOAT32, BFLOAT16)}

Kept = Callable[[], Shadow]


class Operators(Graph):
    """Operators of one device and precision.

    Attributes:
        device: Type of the device, ``cpu`` or ``cuda``.
        storage_size: Bytes per element of the parameters.
        product_size: Of the factors of matrix products.
    """

    def __init__(self, ledger: Ledger, device: str, precision: str) -> None:
        super().__init__(ledger, adds_in_place=device != "cpu")  # on a CPU, what the meter sees
        self.device = device
        self.storage_size, self.product_size = PRECISIONS[precision]
        self.is_autocast = self.storage_size != self.product_size
        self._casts: dict[int, Shadow] = {}
        self._frames: list[_Frame] = []

    # -- parameters ---------------------------------------------------------------------------------------------------

    def parameter(self, elements: Count) -> Shadow:
        """A parameter; its bytes are of the kind ``parameters``."""
        made = self.new(elements, self.storage_size, kind="parameters", part="")
        made.node = Leaf(self)
        return made

    @contextmanager
    def autocast(self) -> Iterator[None]:
        """The extent of autocast: at its end the cache of cast weights is emptied."""
        outer, self._casts = self._casts, {}
        yield
        self._casts = outer

    # -- keeping for backward -----------------------------------------------------------------------------------------

    def keep(self, tensor: Shadow) -> Kept:
        """Keeps a tensor for backward; the result gives it back."""
        kept = tensor.view()
        return self._frames[-1].keep(kept) if self._frames else lambda: kept

    def checkpoint(self, function: Callable[..., Shadow], *args: Shadow) -> Shadow:
        """``function(*args)``, of which only the arguments are kept."""
        frame = _Frame(self, function, args)
        self._frames.append(frame)
        out = function(*args)
        self._frames.pop()
        return out

    # -- elementwise --------------------------------------------------------------------------------------------------

    def cast(self, x: Shadow, itemsize: int) -> Shadow:
        """``x.to(dtype)``."""
        if x.itemsize == itemsize:
            return x
        return self.record(self.new(x.elements, itemsize), lambda g: [g[0]], [x])  # the engine casts back

    def like(self, x: "Shadow | _Size", itemsize: int | None = None) -> Shadow:
        """``empty_like``."""
        return self.new(x.elements, x.itemsize if itemsize is None else itemsize)

    def add(self, x: Shadow, y: Shadow) -> Shadow:
        """``x + y``, in the wider dtype."""
        out = self.like(x, max(x.itemsize, y.itemsize))
        return self.record(out, lambda g: [g[0].view(), g[0].view()], [x, y])

    def subtract(self, x: Shadow, y: Shadow) -> Shadow:
        """``x - y``."""
        return self.record(self.like(x), lambda g: [g[0].view(), self.like(g[0])], [x, y])

    def scale(self, x: Shadow, factor: Shadow) -> Shadow:
        """``x * factor`` with a factor that wants no gradient and is broadcast."""
        kept = self.keep(factor)

        def run(g: list[Any]) -> list[Shadow]:
            factor = kept()
            out = self.like(g[0])
            del factor
            return [out]

        return self.record(self.like(x), run, [x])

    def multiply(self, x: Shadow, y: Shadow) -> Shadow:
        """``x * y``, both of which are kept."""
        return self.record(self.like(x), self._using([x, y], lambda g: [self.like(g), self.like(g)]), [x, y])

    def activation(self, x: Shadow, *, keeps_output: bool = False) -> Shadow:
        """SiLU and GELU keep their input, ReLU its output."""
        out = self.like(x)
        return self.record(out, self._using([out if keeps_output else x], lambda g: [self.like(g)]), [x])

    def dropout(self, x: Shadow, probability: float) -> Shadow:
        """On a CPU the mask is as large as its input, on CUDA a byte per element."""
        if not probability:
            return x
        mask = self.like(x, None if self.device == "cpu" else BOOL)
        return self.record(self.like(x), self._using([mask], lambda g: [self.like(g)]), [x])

    def copy(self, x: Shadow) -> Shadow:
        """``contiguous`` or ``reshape`` where the strides demand a copy; the gradient is a view."""
        return self.record(self.like(x), lambda g: [g[0].view()], [x])

    def copy_both_ways(self, x: Shadow) -> Shadow:
        """A view whose gradient must be copied."""
        return self.record(x.view(), lambda g: [self.like(g[0])], [x])

    def halves(self, x: Shadow, half: int) -> tuple[Shadow, Shadow]:
        """``x.chunk(2)``: two views, whose gradients are joined in a new tensor."""
        left, right = x.view(half), x.view(half)
        size = _Size(x.elements, x.itemsize)
        self.record(left, lambda _: [self.like(size)], [x])
        right.node, right.slot = left.node, 1
        return left, right

    def join(self, left: Shadow, right: Shadow, elements: int) -> Shadow:
        """``torch.cat``: the gradients are views."""
        out = self.new(elements, left.itemsize)
        half = left.elements
        return self.record(out, lambda g: [g[0].view(half), g[0].view(half)], [left, right])

    # -- products -----------------------------------------------------------------------------------------------------

    def linear(self, x: Shadow, weight: Shadow, bias: Shadow | None, out_elements: int) -> Shadow:
        """``F.linear``: keeps its input and its weight as they were multiplied."""
        x, weight = self._cast_input(x), self._cast_weight(weight)
        bias = None if bias is None else self._cast_weight(bias)
        out = self.new(out_elements, self.product_size)
        sizes = [None if t is None else _Size(t.elements, t.itemsize) for t in (x, weight, bias)]

        def run(_: Shadow) -> list[Shadow | None]:
            return [None if size is None else self.like(size) for size in sizes]

        return self.record(out, self._using([x, weight], run), [x, weight, bias])

    def embedding(self, weight: Shadow, out_elements: int) -> Shadow:
        """A look-up: the gradient is as large as the table."""
        size = _Size(weight.elements, weight.itemsize)
        return self.record(self.new(out_elements, weight.itemsize), lambda _: [self.like(size)], [weight])

    def _cast_input(self, x: Shadow) -> Shadow:
        return self.cast(x, self.product_size) if self.is_autocast else x

    def _cast_weight(self, weight: Shadow) -> Shadow:
        if not self.is_autocast:
            return weight
        if id(weight) not in self._casts:
            part, self.ledger.part = self.ledger.part, WEIGHT_CASTS
            self._casts[id(weight)] = self.cast(weight, self.product_size)
            self.ledger.part = part
        return self._casts[id(weight)]

    def _using(self, tensors: Sequence[Shadow], run: Callable[[Any], Any]) -> Callable[[list[Any]], Any]:
        """A backward that takes out what was kept, then runs."""
        kept = [self.keep(tensor) for tensor in tensors]

        def backward(gradients: list[Any]) -> Any:
            held = [get() for get in kept]
            results = run(gradients[0])
            del held
            return results

        return backward


class _Size:
    """What ``like`` needs to know of a tensor that it must not keep alive."""

    def __init__(self, elements: int, itemsize: int) -> None:
        self.elements, self.itemsize = elements, itemsize


class _Enough(Exception):
    """The last tensor that backward needs has been computed again."""


class _Frame:
    """One checkpointed call."""

    def __init__(self, operators: Operators, function: Callable[..., Shadow], args: Sequence[Shadow]) -> None:
        self.operators, self.function = operators, function
        self.args = [arg.view() for arg in args]
        self.again: list[Shadow | None] | None = None  # what was kept, computed again
        self.count = 0

    def keep(self, tensor: Shadow) -> Kept:
        """The promise of a tensor, numbered."""
        place, self.count = self.count, self.count + 1
        del tensor

        def get() -> Shadow:
            if self.again is None:
                self._run_again()
            assert self.again is not None
            found, self.again[place] = self.again[place], None
            assert found is not None
            return found

        return get

    def _run_again(self) -> None:
        operators, self.again = self.operators, []
        ledger = operators.ledger
        moment, part, prefix = ledger.moment, ledger.part, ledger.prefix
        ledger.prefix = AGAIN
        recorder = _Recorder(self.again, self.count)
        operators._frames.append(recorder)  # type: ignore[arg-type]
        try:
            with operators.autocast():
                args = [arg.view() for arg in self.args]
                for arg in args:
                    arg.node = Leaf(operators)
                self.function(*args)
        except _Enough:
            pass
        operators._frames.pop()
        operators._casts = {}
        ledger.moment, ledger.part, ledger.prefix = moment, part, prefix
        self.args = []


class _Recorder:
    """Takes what is computed again."""

    def __init__(self, kept: list[Shadow | None], enough: int) -> None:
        self.kept, self.enough = kept, enough

    def keep(self, tensor: Shadow) -> Kept:
        self.kept.append(tensor.view())
        if len(self.kept) == self.enough:
            raise _Enough
        return lambda: tensor
