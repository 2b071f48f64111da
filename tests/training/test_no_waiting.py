"""A step reads no value from its device: on ``meta``, which has none, it runs through, and any read is an error."""

import pytest
import torch
from lightning.pytorch import Callback

from lightning_llm import LanguageModel, ModelConfig
from lightning_llm.model.mlp import MemoryOptimizedSwiGLU
from lightning_llm.optim import AdamW, clip_grad_norm_, param_groups

SIZES = {"vocab_size": 101, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}


@pytest.fixture(autouse=True)
def _no_autocast(monkeypatch):
    """There is none for ``meta``."""
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device=None: False)


def step(**changes):
    model = LanguageModel(ModelConfig(**{**SIZES, **changes}))
    with torch.device("meta"):
        model.configure_model()
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    optimizer = AdamW(param_groups(model), lr=0.01, fused=False)
    ids = torch.zeros(4, 33, dtype=torch.int64, device="meta")
    for _ in range(2):
        model.loss({"input_ids": ids[:, :-1], "targets": ids[:, 1:]}).backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(
    "changes", [{}, {"checkpoint_level": 2, "dropout": 0.1}, {"mlp": "swiglu", "recompute": "block"}], ids=str
)
def test_a_step_waits_for_nothing(changes):
    step(**changes)


class NoWaiting(Callback):
    """Between two log steps, every wait of the host for the GPU is an error."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        is_log_step = (trainer.global_step + 1) % trainer.log_every_n_steps == 0
        torch.cuda.set_sync_debug_mode("default" if is_log_step else "error")

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("capture", [False, True])
def test_fit_waits_for_the_gpu_at_log_steps_alone(tiny, capture):
    options = {"trainer.accelerator": "gpu", "trainer.log_every_n_steps": 3, "trainer.val_check_interval": 6}
    waiting = {"trainer.callbacks": [{"class_path": f"{__name__}.NoWaiting"}], "trainer.capture": capture}
    assert tiny("fit", **options, **waiting).trainer.global_step == 6


def test_a_value_that_is_read_is_found(monkeypatch):
    forward = MemoryOptimizedSwiGLU.forward
    monkeypatch.setattr(
        MemoryOptimizedSwiGLU, "forward", lambda self, x, *norm: forward(self, x * x.sum().item(), *norm)
    )
    with pytest.raises((RuntimeError, NotImplementedError), match="meta"):
        step(checkpoint_level=2)
