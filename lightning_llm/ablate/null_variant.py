"""The null variant: the baseline, whose MLPs are drawn as those of another name would be. Only chance differs."""

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_llm.model.weights import initialize

RENAMED = "renamed"


class RedrawMLP(Callback):
    """Draws the initial values of every MLP again, for a module of another name, before the first step of a new run."""

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """A resumed run has its weights."""
        model: Any = pl_module
        if trainer.ckpt_path is None:
            for layer, block in enumerate(model.transformer.layers):
                initialize(block.mlp, model.architecture, model.seed, f"layers.{layer}.mlp.{RENAMED}")
