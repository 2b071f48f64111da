"""Optimizers of other packages, named by their import path: they train, and resume to the same bits."""

import pytest

from tests.cli.test_resume import CONSTANT, killed_after
from tests.tiny_run import assert_same_weights, weights

OTHERS = {  # by import path: options
    "pytorch_optimizer.SOAP": {"lr": 0.003, "precondition_frequency": 2},
    "pytorch_optimizer.ScheduleFreeAdamW": {"lr": 0.01, "warmup_steps": 2},
}


@pytest.mark.parametrize(("path", "arguments"), OTHERS.items())
def test_an_optimizer_of_another_package_resumes_to_the_same_bits(path, arguments, tiny, monkeypatch):
    options = {"model.optimizer": path, **CONSTANT}
    options |= {f"model.optimizer.{name}": value for name, value in arguments.items()}
    whole = tiny("fit", **options, **{"trainer.default_root_dir": "whole"})
    killed_after(monkeypatch, tiny, 5, **options)  # saved at 3
    rest = tiny("fit", "--ckpt_path=last", **options)
    assert_same_weights(weights(whole), weights(rest))


def test_muon_of_torch_takes_matrices_alone_and_the_command_says_so(tiny, error_line):
    with pytest.raises(SystemExit):
        tiny("fit", **{"model.optimizer": "torch.optim.Muon", "model.optimizer.lr": 0.02})
    assert "model.optimizer: Muon only supports 2D parameters" in error_line()
