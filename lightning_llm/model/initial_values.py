"""Who gives a parameter its initial value: its part's constructor, or the table of ``weights.py``.

A part is constructed on the CPU in float32, whatever device or dtype is the default, with torch's generator of the CPU,
``random`` and ``numpy.random`` seeded by the model's seed and the part's path. Then it is cast and moved. So what a
constructor draws is a function of seed, path, and its own draws in their order.

*Custom parts.* While a custom part is constructed, the ``reset_parameters`` of torch's ``Linear``, ``Embedding``,
``LayerNorm`` and ``RMSNorm`` draws from a generator of its own, and each value that it sets is recorded by shape and
hash. A parameter of such a layer whose bytes equal a recorded value still has torch's default: the table applies.
Every other parameter was set by the constructor and is kept: zeros, an orthogonal matrix, a scaled copy, a raw
``Parameter``, a convolution. An object's identity or version could not say that: a constructor may copy a layer, and
writing to ``.data`` bumps no version.

*The residual stream.* Layers that write to it start smaller. They are, in this order:

1. what the class declares in ``residual_outputs``, paths of its submodules; ``()``: none;
2. of an attention or MLP, each ``Linear`` whose output the part returns, seen in one forward pass of a copy;
3. those called ``o_proj`` or ``down_proj`` whose output is ``hidden_size`` wide;
4. none.

On the device ``meta`` a constructor runs and nothing else happens: the weights come from a file.
"""

import hashlib
import random
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightning_llm.ops import traced

RESIDUAL_NAMES = ("o_proj", "down_proj")
RULE = "initial_rule"  # the attribute of a part
TABLE_LAYERS = (nn.Linear, nn.Embedding, nn.LayerNorm, nn.RMSNorm)  # those that the table has values for
Source = Literal["declared", "output", "name", "none"]


class InitialRule(NamedTuple):
    """By which rule the parameters of a part get their initial values.

    Attributes:
        kept: Names inside the part of the parameters that keep what its constructor set.
        residual: Paths inside the part of the layers that write to the residual stream.
        source: How these are known: the class declares them; the part returns their output; by their name; there are
            none.
        is_custom: Whether the part's class is from elsewhere.
    """

    kept: frozenset[str] = frozenset()
    residual: frozenset[str] = frozenset()
    source: Source = "declared"
    is_custom: bool = False


class Part(NamedTuple):
    """A part to be made.

    Attributes:
        make: Calls its constructor.
        seed: Of the model.
        path: Its name inside ``Transformer``.
        called: It, in messages.
        is_custom: Whether its class is from elsewhere.
        hidden_size: Width of the residual stream.
        forward: One forward pass of it, for parts whose output is added to the residual stream; ``None`` for others.
    """

    make: Callable[[], nn.Module]
    seed: int
    path: str
    called: str
    is_custom: bool
    hidden_size: int
    forward: Callable[[nn.Module], Any] | None


def seed_of(seed: int, name: str, shape: Iterable[int] = ()) -> int:
    """The seed of one parameter's generator. torch's generator of a CPU takes the lowest 32 bits of it."""
    return int.from_bytes(hashlib.sha256(repr((seed, name, tuple(shape))).encode()).digest()[:7], "big")


@contextmanager
def drawing(seed: int, name: str) -> Iterator[None]:
    """Draw from generators of the module of that name; the global ones are as before afterwards.

    Args:
        seed: Of the model.
        name: The module's name inside ``Transformer``.
    """
    # The global generator of numpy, since a constructor draws from it
    of_python = random.getstate()
    of_numpy = np.random.get_state()  # noqa: NPY002
    own = seed_of(seed, name)
    try:
        with torch.random.fork_rng(devices=()):
            torch.default_generator.manual_seed(own)
            random.seed(own)
            np.random.seed(own % 2**32)  # noqa: NPY002
            yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)  # noqa: NPY002


def construct(part: Part) -> nn.Module:
    """Make a part on the CPU in float32, with its :class:`InitialRule`; then cast and move it to the defaults.

    Raises:
        ValueError: A parameter has no shape, or has other values each time; ``residual_outputs`` names no submodule.
    """
    device = torch.get_default_device()
    dtype = torch.get_default_dtype()
    if device.type == "meta" or traced.current() is not None:  # no values to record
        made = _made_without_values(part)
        _refuse_lazy(made, part)
        return made
    made = _constructed(part)
    if dtype != torch.float32:  # what asks for float32 by itself, such as a table of angles, has it in any model
        with _defaults(torch.device("meta"), dtype):
            wanted = {name: tensor.dtype for name, tensor in _tensors(_made_without_values(part))}
        for name, tensor in _tensors(made):
            tensor.data = tensor.data.to(wanted[name])
    return made if device.type == "cpu" else made.to(device)


def _made_without_values(part: Part) -> nn.Module:
    """The part on the default device, ``meta`` or that of a trace; a constructor that reads values runs on the CPU."""
    try:
        with drawing(part.seed, part.path):
            return part.make()
    except (ValueError, RecursionError):  # of a part inside, which was tried on the CPU itself
        raise
    except Exception:
        if not part.is_custom or torch.get_default_device().type != "meta":
            raise
    with drawing(part.seed, part.path), torch.device("cpu"):
        return part.make().to("meta")


def _constructed(part: Part) -> nn.Module:
    """The part on the CPU, with its rule. A custom one is made twice; the copy is compared with it, and called."""
    outer = Recorder.active
    if outer is not None:  # the outermost custom part decides which parameters keep their values
        made = _made(part, outer)
        outer.inner.append((part, made))
        if not part.is_custom:
            setattr(made, RULE, InitialRule(residual=_declared(made, part)))
        return made
    recorder = Recorder()
    made = _made(part, recorder, is_filled=False)
    if not part.is_custom:
        setattr(made, RULE, InitialRule(residual=_declared(made, part)))
        return made
    again = Recorder()
    copy = _made(part, again, is_filled=True)
    _refuse_changing(made, copy, part)
    inner = [(each, copy_of, found) for (each, copy_of), (_, found) in zip(again.inner, recorder.inner, strict=True)]
    for each, copy_of, found in inner:
        if each.is_custom:
            residual, source = _residual(each, copy_of, ())
            setattr(found, RULE, InitialRule(frozenset(), residual, source, is_custom=True))
    inside = {path for path, module in made.named_modules() if any(module is found for *_, found in inner)}
    residual, source = _residual(part, copy, inside)
    setattr(made, RULE, InitialRule(_kept(made, recorder), residual, source, is_custom=True))
    return made


def _made(part: Part, recorder: "Recorder", *, is_filled: bool | None = None) -> nn.Module:
    with ExitStack() as stack:
        stack.enter_context(drawing(part.seed, part.path))
        stack.enter_context(_defaults(torch.device("cpu"), torch.float32))
        stack.enter_context(recorder.inside(part))
        if part.is_custom and Recorder.active is None:
            stack.enter_context(recorder.recording())
            stack.enter_context(_new_memory(is_filled=bool(is_filled)))
        made = part.make()
    if part.is_custom:
        _refuse_lazy(made, part)
    return made


@contextmanager
def _defaults(device: torch.device, dtype: torch.dtype) -> Iterator[None]:
    usual = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            yield
    finally:
        torch.set_default_dtype(usual)


@contextmanager
def _new_memory(*, is_filled: bool) -> Iterator[None]:
    """Fill what ``torch.empty`` returns with NaN, or leave it: a parameter that nobody sets differs between the two."""
    usual = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    memory: Any = torch.utils.deterministic
    was_filled = memory.fill_uninitialized_memory
    try:
        if is_filled:
            torch.use_deterministic_algorithms(True, warn_only=True)
        memory.fill_uninitialized_memory = is_filled
        with warnings.catch_warnings():
            if is_filled:  # the second time: its own warnings are known, and nondeterministic operators warn too
                warnings.simplefilter("ignore")
            yield
    finally:
        torch.use_deterministic_algorithms(usual[0], warn_only=usual[1])
        memory.fill_uninitialized_memory = was_filled


def _tensors(part: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from part.named_parameters()
    yield from part.named_buffers()


# ---- which parameters keep what their constructor set


class Recorder:
    """Records what torch's own ``reset_parameters`` set while the outermost custom part is constructed.

    Attributes:
        active: That of the part that is being constructed, if any.
        inner: The parts that were built inside of it.
    """

    active: ClassVar["Recorder | None"] = None

    def __init__(self) -> None:
        self.inner: list[tuple[Part, nn.Module]] = []
        self._values: set[tuple[tuple[int, ...], bytes]] = set()
        self._state: Tensor | None = None  # of the generator of torch's layers; None: they draw from the part's

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Within: torch's layers record the values that they set."""
        originals: dict[Any, Any] = {layer: layer.reset_parameters for layer in TABLE_LAYERS}
        Recorder.active = self
        try:
            for layer, original in originals.items():
                layer.reset_parameters = self._recorded(original)
            yield
        finally:
            Recorder.active = None
            for layer, original in originals.items():
                layer.reset_parameters = original

    @contextmanager
    def inside(self, part: Part) -> Iterator[None]:
        """Within: torch's layers draw from a generator of their own; in built-in parts, from the part's."""
        usual = self._state
        own_seed = seed_of(part.seed, f"{part.path}: layers of torch")
        self._state = torch.Generator().manual_seed(own_seed).get_state() if part.is_custom else None
        try:
            yield
        finally:
            self._state = usual

    def has(self, parameter: Tensor) -> bool:
        """Whether a parameter has the bytes of a default of its shape, set for its layer or for one that was copied."""
        return _bytes_of(parameter) in self._values

    def _recorded(self, original: Callable[[Any], None]) -> Callable[[Any], None]:
        def reset_parameters(layer: Any) -> None:
            if self._state is None:
                original(layer)
            else:
                of_part = torch.default_generator.get_state()
                torch.default_generator.set_state(self._state)
                original(layer)
                self._state = torch.default_generator.get_state()
                torch.default_generator.set_state(of_part)
            parameters = [each for each in layer.parameters(recurse=False) if not is_lazy(each) and not each.is_meta]
            self._values.update(map(_bytes_of, parameters))

        return reset_parameters


def _kept(made: nn.Module, recorder: Recorder) -> frozenset[str]:
    """Names of the parameters that do not have torch's default; of tied ones, the first name."""
    kept, seen = set(), set()
    for path, module in made.named_modules():
        for name, parameter in module.named_parameters(path, recurse=False):
            if id(parameter) in seen:
                continue
            seen.add(id(parameter))
            if not isinstance(module, TABLE_LAYERS) or not recorder.has(parameter):
                kept.add(name)
    return frozenset(kept)


def _bytes_of(tensor: Tensor) -> tuple[tuple[int, ...], bytes]:
    return tuple(tensor.shape), hashlib.sha256(_as_bytes(tensor).numpy().data).digest()


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def _refuse_lazy(made: nn.Module, part: Part) -> None:
    for name, parameter in made.named_parameters():
        if is_lazy(parameter):
            raise ValueError(f"{part.called} has a parameter without a shape, {name}: give its layer the input size")


def _refuse_changing(made: nn.Module, again: nn.Module, part: Part) -> None:
    """Refuse values from new memory, a clock, or a generator that is not seeded."""
    values = dict(again.named_parameters())
    for name, parameter in made.named_parameters():
        other = values.get(name)
        is_same = other is not None and other.shape == parameter.shape and other.dtype == parameter.dtype
        if other is None or not is_same or not torch.equal(_as_bytes(parameter), _as_bytes(other)):
            raise ValueError(
                f"{part.called} sets {name} to other values each time it is made with one seed: set all of it, and "
                "draw from the global generators of torch, numpy or random, which are seeded"
            )


# ---- which layers write to the residual stream


def _residual(part: Part, copy: nn.Module, inside: Collection[str]) -> tuple[frozenset[str], Source]:
    """Paths of the layers of a custom part that write to the residual stream, and how they are known.

    Args:
        part: How it was made.
        copy: It, to be called.
        inside: Paths of the parts in it, which have rules of their own.
    """
    if hasattr(copy, "residual_outputs"):
        return _declared(copy, part), "declared"
    linear = {
        path: module
        for path, module in copy.named_modules()
        if isinstance(module, nn.Linear)
        and module.out_features == part.hidden_size
        and not any(path == each or path.startswith(f"{each}.") for each in inside)
    }
    if found := _returned(part, copy, linear):
        return found, "output"
    found = frozenset(path for path in linear if path.rpartition(".")[2] in RESIDUAL_NAMES)
    return found, "name" if found else "none"


def _declared(made: nn.Module, part: Part) -> frozenset[str]:
    """The ``residual_outputs`` of a part; none if it has no such attribute."""
    declared: Any = getattr(made, "residual_outputs", ())
    paths = {path for path, _ in made.named_modules() if path}
    if not isinstance(declared, tuple | list) or not all(isinstance(path, str) for path in declared):
        raise ValueError(f"{part.called}: residual_outputs must be a tuple of paths of submodules, got {declared!r}")
    if unknown := next((path for path in declared if path not in paths), None):
        raise ValueError(
            f"{part.called}: residual_outputs names {unknown!r}, which is no submodule: set it to the paths of the "
            f"layers that write to the residual stream, among {', '.join(sorted(paths))}; () for none"
        )
    return frozenset(declared)


def _returned(part: Part, copy: nn.Module, linear: dict[str, nn.Linear]) -> frozenset[str]:
    """The layers whose output is what the part returns: the same memory, so also after a view."""
    if part.forward is None:
        return frozenset()
    outputs: list[tuple[str, Tensor]] = []  # which keeps their memory from being used again
    hooks = [
        layer.register_forward_hook(lambda _layer, _args, out, path=path: outputs.append((path, out)))
        for path, layer in linear.items()
    ]
    try:
        with drawing(part.seed, part.path), torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            returned = part.forward(copy.eval())
    except Exception:  # two tokens are too few for it, or it is wrong, which training says in a line of its own
        return frozenset()
    finally:
        for hook in hooks:
            hook.remove()
    if not isinstance(returned, Tensor):
        return frozenset()
    place = returned.untyped_storage().data_ptr()
    return frozenset(path for path, out in outputs if out.untyped_storage().data_ptr() == place)
