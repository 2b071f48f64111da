"""Options of variants: names by their values."""

import pytest

from lightning_llm.ablate.options import varied


def names(*words):
    """Of variants with one option each."""
    return list(varied([[word] for word in words]))


def test_variants_of_the_command_line_are_named_by_their_values():
    found = varied([["model.architecture.mlp=relu2"], ["model.optimizer.lr=1e-3"], ["data.mixture={a: 1, b: 2}"]])
    assert list(found) == ["relu2", "lr=1e-3", "mixture={a: 1; b: 2}"]
    assert found["relu2"] == {"model.architecture.mlp": "relu2"}
    mlps = ["own.mlps.ScaledMishGLU", "relu", "model.qk_norm=true"]
    assert names(f"m.mlp={mlps[0]}", f"m.mlp={mlps[1]}", mlps[2]) == ["ScaledMishGLU", "relu", "qk_norm=true"]
    assert names("a.norm=post", "a.block=post") == ["norm=post", "block=post"]  # the value is not enough
    assert names("a.mlp=x.Own", "a.mlp=y.Own") == ["mlp=Own", "mlp=y.Own"]
    assert names("a.mlp=null", "a.mlp=baseline") == ["mlp=null", "mlp=baseline"]  # names that are taken


def test_a_variant_of_several_options_has_all_their_names():
    found = varied([["a.mlp=relu", "b.lr=0.1"], ["a.mlp=relu", "b.lr=0.2"], ["a.mlp=relu"]])
    assert list(found) == ["relu+lr=0.1", "relu+lr=0.2", "relu"]
    assert found["relu+lr=0.2"] == {"a.mlp": "relu", "b.lr": "0.2"}


@pytest.mark.parametrize(
    ("variants", "says"),
    [
        ([["mlp"]], "must be OPTION=VALUE"),
        ([["a.x=1"], ["b.x=1"]], "--vary b.x=1: the variant x=1 is given twice"),
        ([["a.x=1", "a.y=2"], ["a.x=1", "a.y=2"]], r"--vary a.x=1 a.y=2: the variant x=1\+y=2 is given twice"),
        ([["a.x=1", "a.x=2"]], "--vary and --with give a.x twice: a variant has one value of it"),
    ],
)
def test_what_is_no_variant_is_named(variants, says):
    with pytest.raises(ValueError, match=says):
        varied(variants)
