"""The checkpoint of a training loop without Lightning."""

import io

import pytest
import torch

from lightning_llm.optim import AdamW
from lightning_llm.training import load_checkpoint, save_checkpoint
from tests.checkpoints.conftest import step, trained


@pytest.mark.parametrize("kind", ["path", "file"])
def test_a_plain_loop_goes_on_to_the_same_bits(kind, tmp_path):
    model, optimizer = trained()
    out = tmp_path / "loop.pt" if kind == "path" else io.BytesIO()
    save_checkpoint(model, optimizer, 3, out)
    step(model, optimizer)

    fresh = torch.nn.Linear(3, 2)
    its_optimizer = AdamW(fresh.parameters(), lr=0.5)
    if kind == "file":
        out.seek(0)
    assert load_checkpoint(out, fresh, its_optimizer) == 3
    step(fresh, its_optimizer)
    assert torch.equal(fresh.weight, model.weight)


def test_another_model_is_refused(tmp_path):
    model, optimizer = trained()
    save_checkpoint(model, optimizer, 3, tmp_path / "loop.pt")
    other = torch.nn.Linear(4, 2)
    with pytest.raises(ValueError, match="of another model"):
        load_checkpoint(tmp_path / "loop.pt", other, AdamW(other.parameters()))
