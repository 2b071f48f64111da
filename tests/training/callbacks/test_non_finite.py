"""A loss that turns NaN or infinite stops the run; what was saved before stays good."""

from pathlib import Path

import pytest
import torch

from lightning_llm.checkpoints.reading import read_checkpoint
from lightning_llm.runs.directory import step_files
from lightning_llm.training import LanguageModel

RUN = Path("runs/run/version_0")


def poison(monkeypatch, at_step, value, where="loss"):
    original = LanguageModel.training_step

    def step(self, batch, batch_idx):
        loss = original(self, batch, batch_idx)
        if self.global_step + 1 == at_step:
            if where == "loss":
                return loss * value
            # a finite loss whose gradient is not
            return loss + 0 * (next(self.parameters()).sum() * 0 + 0).sqrt()
        return loss

    monkeypatch.setattr(LanguageModel, "training_step", step)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("every", [1, 4, 6])
def test_it_stops_names_the_step_and_keeps_the_last_good_state(tiny, monkeypatch, capsys, value, every):
    poison(monkeypatch, 5, value)
    with pytest.raises(SystemExit) as leaving:
        tiny("fit", **{"trainer.log_every_n_steps": every, "data.micro_batch_size": 4})
    assert leaving.value.code == 1
    error = capsys.readouterr().err
    assert f"train_loss is {value} in step 5, micro-batch 0" in error
    assert "Traceback" not in error
    last = RUN / "checkpoints/step-00000003.ckpt"
    assert f"the last good checkpoint is {last}" in error
    assert step_files(RUN / "checkpoints") == [last]
    for name in (last, last.with_name("best.ckpt")):
        assert all(weight.isfinite().all() for weight in read_checkpoint(name)["state_dict"].values())


def test_the_batch_is_in_the_file_that_is_named(tiny, monkeypatch, capsys):
    seen = {}
    poison(monkeypatch, 5, float("nan"))
    poisoned = LanguageModel.training_step

    def noting(self, batch, batch_idx):
        seen.setdefault(self.global_step + 1, batch["input_ids"].clone())
        return poisoned(self, batch, batch_idx)

    monkeypatch.setattr(LanguageModel, "training_step", noting)
    with pytest.raises(SystemExit):
        tiny("fit", **{"trainer.log_every_n_steps": 6})
    path = RUN / "non-finite-step-00000005.pt"
    assert f"its batch is in {path}" in capsys.readouterr().err
    content = torch.load(path, weights_only=True)
    assert content["step"] == 5
    assert torch.equal(content["input_ids"], seen[5])
    assert torch.equal(content["targets"][:, :-1], seen[5][:, 1:])


def test_a_gradient_that_is_no_number_stops_the_run_before_it_is_saved(tiny, monkeypatch, capsys):
    poison(monkeypatch, 3, 0, where="gradient")
    with pytest.raises(SystemExit) as leaving:
        tiny("fit", **{"trainer.log_every_n_steps": 6})
    assert leaving.value.code == 1
    assert "grad_norm is nan in step 3" in capsys.readouterr().err
    assert not step_files(RUN / "checkpoints")


def test_nothing_is_read_from_the_device_between_two_log_steps(tiny, monkeypatch):
    """As many reads of a scalar with ten steps as with twenty, where neither logs nor saves in between."""
    reads = []
    for steps in (10, 20):
        count, original = [], torch.Tensor.isfinite

        def counted(self, count=count, original=original):
            count.append(1)
            return original(self)

        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "isfinite", counted)
            tiny(
                "fit",
                **{"trainer.max_steps": steps, "trainer.val_check_interval": steps, "trainer.log_every_n_steps": steps},
            )
        reads.append(len(count))
    assert reads[0] == reads[1]
