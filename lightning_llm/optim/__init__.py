"""Optimizers, learning-rate schedules, parameter groups and gradient clipping.

The public names are loaded when first used (PEP 562): the schedules cost no torch.
"""

from typing import TYPE_CHECKING

from lightning_llm.lazy import lazy

if TYPE_CHECKING:
    from lightning_llm.optim.adamw import AdamW as AdamW
    from lightning_llm.optim.clipping import clip_grad_norm_ as clip_grad_norm_
    from lightning_llm.optim.groups import GroupRule as GroupRule
    from lightning_llm.optim.groups import apply_group_factors as apply_group_factors
    from lightning_llm.optim.groups import check_coverage as check_coverage
    from lightning_llm.optim.groups import param_groups as param_groups
    from lightning_llm.optim.muon import MuonAdamW as MuonAdamW
    from lightning_llm.optim.schedules import *  # noqa: F403
else:
    __getattr__, __dir__, _ = lazy(__name__)
