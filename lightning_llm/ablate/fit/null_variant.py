"""The null variant: the baseline, whose MLPs are made again as those of another name. Only chance differs."""

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn

from lightning_llm.checkpoints.sharded import local_rows
from lightning_llm.model.build import build
from lightning_llm.model.weights import initialize, kept_names

RENAMED = "renamed"


class RedrawMLP(Callback):
    """Makes every MLP again under another name, before the first step of a new run, and takes its initial values.

    If that changes no value, because nothing in the MLPs is random, it does so with the attention, else with the
    embedding.
    """

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """A resumed run has its weights."""
        model: Any = pl_module
        if trainer.ckpt_path is None and not _redraw_parts(model, "mlp", "mlp"):
            _ = _redraw_parts(model, "attention", "self_attn") or _redraw_embedding(model)


def _redraw_parts(model: Any, kind: str, attribute: str) -> bool:
    """Whether a value changed."""
    config = model.architecture
    changed = []
    for layer, block in enumerate(model.transformer.layers):
        if not isinstance(old := getattr(block, attribute, None), nn.Module):
            continue  # a custom block need not have it
        path = f"layers.{layer}.{attribute}"
        renamed = f"{path}.{RENAMED}"
        part = build(kind, config.layer_configs[layer], seed=model.seed, path=renamed, layer=layer)
        initialize(part, config, model.seed, renamed)
        # what the constructor of a custom block set in this part, the part by itself would not have
        of_block = kept_names(block, f"layers.{layer}") - kept_names(old, path)
        by_block = {name.removeprefix(f"{path}.") for name in of_block} - kept_names(part)
        values = dict(part.named_parameters())
        names = [name for name, _ in old.named_parameters() if name in values and name not in by_block]
        changed += [_take(old.get_parameter(name), values[name]) for name in names]
    return any(changed)


def _redraw_embedding(model: Any) -> bool:
    config = model.architecture
    old = model.transformer.embed_tokens.weight
    table = nn.Embedding(config.vocab_rows, config.hidden_size)
    initialize(table, config, model.seed, f"embed_tokens.{RENAMED}")
    nn.init.zeros_(table.weight.detach()[config.vocab_size :])
    return _take(old, table.weight)


def _take(old: Tensor, new: Tensor) -> bool:
    """Copy a value in place, of a sharded one this process's rows; whether it is another one, in any process."""
    whole = old.full_tensor() if hasattr(old, "full_tensor") else old
    if torch.equal(whole.detach().cpu(), new.detach().to("cpu", old.dtype)):
        return False
    start, rows = local_rows(old.detach()) if hasattr(old, "to_local") else (0, old.detach())
    rows.copy_(new.detach()[start : start + rows.shape[0]])
    return True
