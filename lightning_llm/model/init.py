"""Initial weights, as one table.

=========================================  ==========================================================================
parameter                                  initial value
=========================================  ==========================================================================
embed_tokens, embed_positions              normal, standard deviation ``initializer_range``
q, k, v, gate, up projections, lm_head     normal, standard deviation ``initializer_range``
o_proj, down_proj (they write to the       normal, ``initializer_range / sqrt(2 · num_hidden_layers)``, so that the
residual stream)                           stream's variance does not grow with depth (Radford et al. 2019, "GPT-2",
                                           section 2.3)
biases                                     0
weights of norms                           1
=========================================  ==========================================================================

A module from elsewhere (a user's MLP) keeps what its own constructor gave it, but for linear layers, to which the
table applies by name.
"""

import math

from torch import nn

from lightning_llm.model.config import ModelConfig

RESIDUAL_PROJECTIONS = ("o_proj", "down_proj")


def initialize(model: nn.Module, config: ModelConfig) -> None:
    """Give every parameter of ``model`` its initial value, in place, from torch's global generator."""
    residual_std = config.initializer_range / math.sqrt(2 * config.num_hidden_layers)
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            is_residual = name.rpartition(".")[2] in RESIDUAL_PROJECTIONS
            nn.init.normal_(module.weight, std=residual_std if is_residual else config.initializer_range)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=config.initializer_range)
        elif isinstance(module, nn.RMSNorm | nn.LayerNorm):
            nn.init.ones_(module.weight)
            if isinstance(module, nn.LayerNorm):
                nn.init.zeros_(module.bias)
