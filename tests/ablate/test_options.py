"""Options of variants: names by their values."""

import pytest

from lightning_llm.ablate.options import varied


def test_variants_of_the_command_line_are_named_by_their_values():
    found = varied(["model.architecture.mlp=relu2", "model.optimizer.lr=1e-3", "data.mixture={a: 1, b: 2}"])
    assert list(found) == ["relu2", "lr=1e-3", "mixture={a: 1; b: 2}"]
    assert found["relu2"] == {"model.architecture.mlp": "relu2"}
    mlps = ["own.mlps.ScaledMishGLU", "relu", "model.qk_norm=true"]
    assert list(varied([f"m.mlp={mlps[0]}", f"m.mlp={mlps[1]}", mlps[2]])) == ["ScaledMishGLU", "relu", "qk_norm=true"]
    assert list(varied(["a.norm=post", "a.block=post"])) == ["norm=post", "block=post"]  # the value is not enough
    assert list(varied(["a.mlp=x.Own", "a.mlp=y.Own"])) == ["mlp=Own", "mlp=y.Own"]
    assert list(varied(["a.mlp=null", "a.mlp=baseline"])) == ["mlp=null", "mlp=baseline"]  # names that are taken
    for words, says in ((["mlp"], "must be OPTION=VALUE"), (["a.x=1", "b.x=1"], "the variant x=1 is given twice")):
        with pytest.raises(ValueError, match=says):
            varied(words)
