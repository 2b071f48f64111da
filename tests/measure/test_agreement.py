"""The rule: the order of what is compared, what rounding allows, and which tensors mean the same."""

import dataclasses
import math

import numpy as np
import pytest

from lightning_llm.measure.agreement import INPUT_GRADIENT, OUTPUT, findings
from lightning_llm.measure.recorder import RecordedStep

PARTS = ["embed", "layers.0", "layers.0.norm", "layers.0.mlp"]
UNIT = 1e-6


def step(seed=0, **changes):
    """Every module with an output, an input, and gradients; the head's weight is used without a call."""
    rng = np.random.default_rng(seed)
    made = {kind: {name: rng.normal(size=(2, 3)) for name in PARTS} for kind in ("inputs", "outputs")}
    made["input_gradients"] = {name: rng.normal(size=(2, 3)) for name in PARTS[1:]}
    names = ["embed.weight", "layers.0.norm.weight", "layers.0.mlp.down.weight", "head.weight"]
    made["gradients"] = {name: rng.normal(size=4) for name in names}
    return dataclasses.replace(RecordedStep(PARTS, **made), **changes)


def with_errors(reference, size, seed=1):
    rng = np.random.default_rng(seed)
    kinds = ("inputs", "outputs", "input_gradients", "gradients")
    noisy = {
        kind: {name: value + size * rng.normal(size=value.shape) for name, value in getattr(reference, kind).items()}
        for kind in kinds
    }
    return dataclasses.replace(reference, **noisy)


def changed(run, kind, name, factor):
    return dataclasses.replace(run, **{kind: {**getattr(run, kind), name: factor * getattr(run, kind)[name]}})


def test_forward_from_the_first_layer_then_backward_from_the_last():
    found = findings(step(), step(), [], UNIT)
    assert [(one.module, one.what) for one in found] == [
        *((name, OUTPUT) for name in PARTS),
        ("head", "head.weight"),
        *(("layers.0.mlp", what) for what in (INPUT_GRADIENT, "layers.0.mlp.down.weight")),
        *(("layers.0.norm", what) for what in (INPUT_GRADIENT, "layers.0.norm.weight")),
        ("layers.0", INPUT_GRADIENT),
        ("embed", "embed.weight"),
    ]
    assert [one.phase for one in found] == ["forward"] * 4 + ["backward"] * 7
    assert not any(one.ratio for one in found)


def test_twice_the_error_of_a_run_that_only_rounds_is_allowed():
    reference = step()
    noises = [(with_errors(reference, 1e-3), 1.0)]
    assert not any(one.differs for one in findings(with_errors(reference, 1e-3, seed=2), reference, noises, UNIT)[:1])
    larger = findings(with_errors(reference, 1e-2, seed=2), reference, noises, UNIT)
    assert all(one.differs for one in larger if one.what != INPUT_GRADIENT)
    halved = findings(with_errors(reference, 1e-3, seed=2), reference, [(noises[0][0], 0.01)], UNIT)
    assert all(one.differs for one in halved if one.what != INPUT_GRADIENT)


def test_a_unit_of_rounding_is_allowed_where_the_plain_form_is_exact():
    reference = step()
    assert not any(
        one.differs for one in findings(with_errors(reference, UNIT / 10), reference, [(reference, 1.0)], UNIT)
    )
    assert any(one.differs for one in findings(with_errors(reference, 100 * UNIT), reference, [(reference, 1.0)], UNIT))


@pytest.mark.parametrize(
    ("kind", "name", "module"),
    [
        ("outputs", "layers.0.mlp", "layers.0.mlp"),
        ("input_gradients", "layers.0.norm", "layers.0.norm"),
        ("gradients", "layers.0.mlp.down.weight", "layers.0.mlp"),
        ("gradients", "head.weight", "head"),
    ],
)
@pytest.mark.parametrize("factor", [1.01, math.nan])
def test_one_percent_is_found(kind, name, module, factor):
    reference = step()
    (found,) = [one for one in findings(changed(reference, kind, name, factor), reference, [], UNIT) if one.differs]
    assert found.module == module
    assert found.error == pytest.approx(0.01) or math.isnan(factor)


def test_a_gradient_that_is_zero_but_for_rounding_counts_with_its_module():
    reference = step()
    reference.gradients["layers.0.mlp.bias"] = np.zeros(4)
    run = dataclasses.replace(reference, gradients={**reference.gradients, "layers.0.mlp.bias": np.full(4, UNIT / 2)})
    assert not any(one.differs for one in findings(run, reference, [(reference, 1.0)], UNIT))
    assert any(one.differs for one in findings(run, reference, [(reference, 1.0)], UNIT / 100))


def test_a_parameter_without_a_gradient_differs():
    reference = step()
    gradients = {name: value for name, value in reference.gradients.items() if name != "head.weight"}
    run = dataclasses.replace(reference, gradients=gradients)
    assert [one.module for one in findings(run, reference, [], UNIT) if one.differs] == ["head"]


def test_a_module_that_includes_the_norm_before_it_is_compared_with_the_norm():
    reference = step()

    def fused(factor):
        def without(arrays):
            return {name: value for name, value in arrays.items() if name != "layers.0.norm"}

        run = dataclasses.replace(
            reference,
            order=[name for name in PARTS if name != "layers.0.norm"],
            outputs=without(reference.outputs),
            inputs={**without(reference.inputs), "layers.0.mlp": reference.inputs["layers.0.norm"]},
            input_gradients={
                **without(reference.input_gradients),
                "layers.0.mlp": factor * reference.input_gradients["layers.0.norm"],
            },
        )
        return [one for one in findings(run, reference, [], UNIT) if one.what == INPUT_GRADIENT]

    assert [(one.module, one.differs) for one in fused(1.0)] == [("layers.0.mlp", False), ("layers.0", False)]
    assert [(one.module, one.differs) for one in fused(1.01)] == [("layers.0.mlp", True), ("layers.0", False)]


def test_what_a_run_does_not_record_is_left_out():
    reference = step()
    run = RecordedStep(["layers.0"], {}, {"layers.0": reference.outputs["layers.0"]}, {}, {})
    assert [(one.module, one.phase) for one in findings(run, reference, [], UNIT)] == [("layers.0", "forward")]


def test_another_shape_differs():
    reference = step()
    run = dataclasses.replace(reference, outputs={**reference.outputs, "embed": np.zeros((1, 3))})
    assert findings(run, reference, [], UNIT)[0].ratio == math.inf
