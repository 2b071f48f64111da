"""Gated attention against its formula in float64."""

import pytest
import torch

from tests.model.made import attention_run, with_arguments, written_out

DOCUMENTS = torch.tensor([[0] * 5 + [1] * 8])


@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["one", "documents"])
@pytest.mark.parametrize("per", ["element", "head"])
def test_it_is_its_formula(per, documents):
    options = {"attention": with_arguments("gated", per=per, softcap=0.7), "position": "none"}
    attention, x, got = attention_run(documents, **options)
    gate = 1 / (1 + (-x @ attention.gate_proj.weight.T).exp())
    assert gate.shape[-1] == {"element": 40, "head": 4}[per]
    gate = gate if per == "element" else gate.repeat_interleave(10, dim=-1)
    torch.testing.assert_close(got, written_out(attention, x, softcap=0.7, documents=documents, gate=gate))
