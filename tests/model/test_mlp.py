"""Each MLP against its formula."""

import pytest
import torch

from lightning_llm.model.mlp import MLP, GeGLU
from tests.model.made import built


@pytest.mark.parametrize(
    ("name", "formula"),
    [
        (
            "geglu",
            lambda x, m: m.down_proj(0.5 * m.gate_proj(x) * (1 + torch.erf(m.gate_proj(x) / 2**0.5)) * m.up_proj(x)),
        ),
        ("relu2", lambda x, m: m.down_proj(m.up_proj(x).clamp(min=0) ** 2)),
    ],
)
@pytest.mark.parametrize("bias", [False, True])
def test_an_mlp_is_its_formula(name, formula, bias):
    mlp = built("mlp", mlp=name, mlp_bias=bias)
    assert type(mlp) is (GeGLU if name == "geglu" else MLP)
    x = torch.randn(2, 5, 24, dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(mlp(x), formula(x, mlp))
    assert torch.autograd.gradcheck(mlp, x)
