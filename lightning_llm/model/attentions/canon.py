"""Attention with short causal convolutions: Canon layers (Allen-Zhu 2025, "Physics of Language Models: Part 4.1").

arXiv:2512.17351. A Canon layer adds to each token a weighted sum of itself and the tokens just before it, with weights
for each feature: ``x + convolution(x)``. The paper names the places of it in a block A (the input of attention), B
(queries, keys and values), C (the input of the MLP) and D (inside the MLP). A and B are here: an MLP gets no context,
without which it can neither keep to documents nor decode.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_llm.model.attention import CausalSelfAttention
from lightning_llm.model.config import ModelConfig
from lightning_llm.model.context import Context


class CausalConvolution(nn.Conv1d):
    """A convolution over positions, of each feature on its own, that sees none after its own or of another document.

    In decoding, the cache holds its last ``width - 1`` inputs.

    Args:
        channels: Number of features.
        width: Positions that it sees, its own among them.
        layer: Index of the block.
        name: Of its inputs in the cache.
    """

    def __init__(self, channels: int, width: int, *, layer: int, name: str) -> None:
        super().__init__(channels, channels, width, groups=channels, bias=False)
        self.layer = layer
        self.name = name

    def forward(self, x: Tensor, context: Context) -> Tensor:  # type: ignore[override]
        """(batch, seq, channels) -> (batch, seq, channels)."""
        seq = x.shape[1]
        before = self.kernel_size[0] - 1
        position = torch.arange(seq, device=x.device)
        weight = self.weight[:, 0].to(x.dtype)
        if context.cache is None:
            seen = F.pad(x, (0, 0, before, 0))  # (batch, before + seq, channels)
        else:
            state = context.cache.state(self.layer, self.name, (before, x.shape[-1]), x.dtype)
            seen = torch.cat((state, x), dim=1)
            is_token = context.cache.is_token(seq)
            ends = torch.full((1, 1), seq, device=x.device) if is_token is None else is_token.sum(dim=1, keepdim=True)
            rows = torch.arange(len(x), device=x.device)[:, None]
            state.copy_(seen.detach()[rows, ends + torch.arange(before, device=x.device)])
        out = weight[:, before] * x
        for back in range(1, before + 1):
            earlier = seen[:, before - back : before - back + seq]
            if context.spans is not None:
                earlier = earlier.masked_fill((position - back < context.spans.start)[..., None], 0)
            out = torch.addcmul(out, earlier, weight[:, before - back])
        return out


class CanonAttention(CausalSelfAttention):
    """Full attention with Canon layers at its input (A), at queries, keys and values (B), or both.

    Args:
        config: As for full attention.
        layer: Index of the block.
        places: ``A``, ``B`` or ``AB``.
        width: Positions that a convolution sees, its own among them.
        softcap: As for full attention.
    """

    def __init__(
        self, config: ModelConfig, layer: int, *, places: str = "AB", width: int = 4, softcap: float | None = None
    ) -> None:
        super().__init__(config, layer, softcap=softcap)
        self.widths = [proj.out_features for proj in (self.q_proj, self.k_proj, self.v_proj)]
        channels = {"A": config.hidden_size, "B": sum(self.widths)}
        self.canon = nn.ModuleDict(
            {place: CausalConvolution(channels[place], width, layer=layer, name=f"canon {place}") for place in places}
        )

    def forward(self, x: Tensor, context: Context) -> Tensor:
        return super().forward(x + self.canon["A"](x, context) if "A" in self.canon else x, context)

    def projections(self, x: Tensor, context: Context) -> tuple[Tensor, Tensor, Tensor]:
        if "B" not in self.canon:
            return super().projections(x, context)
        every = torch.cat(super().projections(x, context), dim=-1)
        query, key, value = (every + self.canon["B"](every, context)).split(self.widths, dim=-1)
        return query, key, value
