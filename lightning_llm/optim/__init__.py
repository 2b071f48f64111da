"""Optimisers, learning-rate schedules, parameter groups and gradient clipping.

The public names are loaded when first used (PEP 562): the schedules cost no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_llm.optim.adamw import AdamW
    from lightning_llm.optim.clipping import clip_grad_norm_
    from lightning_llm.optim.grouping import check_coverage, param_groups
    from lightning_llm.optim.muon import MuonAdamW
    from lightning_llm.optim.schedules import (
        Constant,
        Schedule,
        WarmupCosine,
        WarmupLinear,
        WarmupStableDecay,
        constant_lr,
        cosine_lr,
        linear_lr,
        wsd_lr,
    )

_PUBLIC = {
    "AdamW": "lightning_llm.optim.adamw",
    "Constant": "lightning_llm.optim.schedules",
    "MuonAdamW": "lightning_llm.optim.muon",
    "Schedule": "lightning_llm.optim.schedules",
    "WarmupCosine": "lightning_llm.optim.schedules",
    "WarmupLinear": "lightning_llm.optim.schedules",
    "WarmupStableDecay": "lightning_llm.optim.schedules",
    "check_coverage": "lightning_llm.optim.grouping",
    "clip_grad_norm_": "lightning_llm.optim.clipping",
    "constant_lr": "lightning_llm.optim.schedules",
    "cosine_lr": "lightning_llm.optim.schedules",
    "linear_lr": "lightning_llm.optim.schedules",
    "param_groups": "lightning_llm.optim.grouping",
    "wsd_lr": "lightning_llm.optim.schedules",
}

__all__ = [
    "AdamW",
    "Constant",
    "MuonAdamW",
    "Schedule",
    "WarmupCosine",
    "WarmupLinear",
    "WarmupStableDecay",
    "check_coverage",
    "clip_grad_norm_",
    "constant_lr",
    "cosine_lr",
    "linear_lr",
    "param_groups",
    "wsd_lr",
]


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module 'lightning_llm.optim' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
