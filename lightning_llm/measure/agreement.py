"""Whether two runs of a step computed the same, module by module, as far as rounding can tell.

The reference is a run in float64. A run in its own precision may be as far from it as rounding explains, times two:

- as far as the plain form of the model is in the same precision;
- as far as the results in float64 move where every weight moves by half a unit of rounding, about as far as rounding
  moves it, which covers sums that cancel;
- a unit of rounding of the whole module's gradient, or of an output; several of a sum over all tokens, such as the loss
  and the gradient of a norm's weight: a compiler may add in another order.

What differs by more is listed in the order in which it was computed: forward from the first layer, then backward from
the last. The first of these modules is where the two part.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from lightning_llm.measure.attribution import module_label
from lightning_llm.measure.recorder import Array, RecordedStep

FACTOR = 2.0  # of what rounding explains
UNITS_OF_A_SUM = 8  # the loss's is small by chance in some runs; norms' weights had 7 in a model compiled as one
OUTPUT, INPUT_GRADIENT = "output", "gradient of its input"
Rounding = tuple[RecordedStep, float]  # a run whose distance from the reference is rounding, and what to multiply it by


class Finding(NamedTuple):
    """One tensor that a module has computed.

    Attributes:
        module: Such as ``layers.1.mlp``.
        phase: ``forward`` or ``backward``.
        what: ``OUTPUT``, ``INPUT_GRADIENT``, or the name of a parameter, whose gradient it is.
        error: Its distance from float64, relative to its size.
        allowed: What rounding allows, likewise.
    """

    module: str
    phase: str
    what: str
    error: float
    allowed: float

    @property
    def ratio(self) -> float:
        """The error, in units of what is allowed; infinite if it is NaN."""
        ratio = self.error / self.allowed if self.allowed else np.inf if self.error else 0.0
        return float(np.inf if np.isnan(ratio) else ratio)

    @property
    def differs(self) -> bool:
        """Whether it is more than rounding explains."""
        return self.ratio > 1


def findings(run: RecordedStep, reference: RecordedStep, noises: Sequence[Rounding], unit: float) -> list[Finding]:
    """Compare a run with the reference, in the order in which a step computes.

    Args:
        run: In any precision. What it did not record is left out: a compiled block has no parts.
        reference: In float64.
        noises: What rounding explains.
        unit: The unit of rounding of the run's precision.
    """
    compare = _Comparison(reference, noises, unit)
    found = [
        compare(label, "forward", OUTPUT, run.outputs[label], "outputs", label)
        for label in reference.outputs
        if label in run.outputs
    ]
    for label in reversed(_with_uncalled(reference)):
        if label in run.input_gradients and (same := _with_same_input(label, run, compare)):
            gradient = run.input_gradients[label]
            found.append(compare(label, "backward", INPUT_GRADIENT, gradient, "input_gradients", same))
        names = [name for name in reference.gradients if _owner(name) == label]
        size = np.sqrt(sum(_norm(reference.gradients[name]) ** 2 for name in names))
        for name in names if run.gradients else ():
            gradient = run.gradients.get(name, np.zeros(()))
            found.append(compare(label, "backward", name, gradient, "gradients", name, size))
    return found


class _Comparison:
    def __init__(self, reference: RecordedStep, noises: Sequence[Rounding], unit: float) -> None:
        self.reference = reference
        self._noises = noises
        self._unit = unit

    def __call__(
        self, label: str, phase: str, what: str, value: Array, kind: str, key: str, size: float = 0.0
    ) -> Finding:
        """A tensor of the run, and that of the reference: of a kind of array, by a key there."""
        truth: Array = getattr(self.reference, kind)[key]
        scale = _norm(truth) or size or 1.0
        rounding = [
            factor * _distance(getattr(step, kind)[key], truth)
            for step, factor in self._noises
            if key in getattr(step, kind)
        ]
        unit = self._unit * (UNITS_OF_A_SUM if truth.ndim <= 1 else 1)
        allowed = FACTOR * max([unit * max(size, _norm(truth)), *rounding])
        return Finding(label, phase, what, _distance(value, truth) / scale, allowed / scale)


def _with_same_input(label: str, run: RecordedStep, compare: _Comparison) -> str | None:
    """The reference's module with the same input: a module that includes the norm before it has that norm's."""
    reference = compare.reference
    uncalled = [other for other in reference.order if other not in run.order]
    for other in (label, *uncalled):
        if other in reference.input_gradients and reference.inputs[other].shape == run.inputs[label].shape:
            finding = compare(label, "forward", "input", run.inputs[label], "inputs", other)
            if not finding.differs:
                return other
    return None


def _with_uncalled(reference: RecordedStep) -> list[str]:
    """The modules in forward order, with those whose parameters are used without a call: after the one before it."""
    order = list(reference.order)
    before = ""
    for label in dict.fromkeys(map(_owner, reference.gradients)):
        if label not in order:
            order.insert(order.index(before) + 1 if before else 0, label)
        before = label
    return order


def _owner(parameter: str) -> str:
    return module_label(parameter.rpartition(".")[0])


def _norm(array: Array) -> float:
    return float(np.linalg.norm(array))


def _distance(array: Array, truth: Array) -> float:
    """Infinite for another shape: then it is no tensor of the same meaning."""
    return _norm(array - truth) if array.shape == truth.shape else float("inf")
