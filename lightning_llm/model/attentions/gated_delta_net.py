"""Gated DeltaNet: linear attention with a state that fades and is corrected (Yang et al. 2024, arXiv:2412.06464).

"Gated Delta Networks: Improving Mamba2 with Delta Rule", section 3.1. Each head has a state S from keys to values. With
a decay α and a strength β for each token, both between 0 and 1:

    S_t = α_t S_{t-1} (I - β_t k_t k_tᵀ) + β_t v_t k_tᵀ,        o_t = S_t q_t

:func:`gated_delta_rule` computes chunks of tokens at once, as in section 3.3. With g_i the sum of log α from the
chunk's first token to the i-th, and S the state before the chunk, the corrected values ṽ solve a triangular system:

    ṽ_i + β_i Σ_{j<i} exp(g_i - g_j) (k_i · k_j) ṽ_j = β_i (v_i - exp(g_i) S k_i)
    o_i = exp(g_i) S q_i + Σ_{j≤i} exp(g_i - g_j) (q_i · k_j) ṽ_j

All sums stay inside a document.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_llm.model.attentions.canon import CausalConvolution
from lightning_llm.model.config import ModelConfig
from lightning_llm.model.context import Context
from lightning_llm.model.norm import RMSNorm

CHUNK, WIDTH = 64, 4  # tokens that are computed at once, and that the short convolution sees


class GatedDeltaNet(nn.Module):
    """The layer of the paper's figure 1: the state of each head in the place of attention, in any length of text.

    Queries, keys and values pass a short convolution and SiLU; queries and keys have length 1. A gate multiplies the
    normalized output. Decay and strength are functions of the input, and start as in Mamba2. There are no attention
    weights that ``dropout`` could drop.

    Args:
        config: Sizes, and biases of the four projections that attention has too.
        layer: Index of the block.
    """

    uses_cache = True
    residual_outputs = ("o_proj",)

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        assert config.head_dim is not None
        hidden = config.hidden_size
        heads = config.num_attention_heads
        has_bias = config.attention_bias
        self.layer = layer
        self.heads = heads
        self.head_dim = config.head_dim
        width = heads * config.head_dim
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(hidden, width, bias=has_bias) for _ in range(3))
        self.convolution = CausalConvolution(3 * width, WIDTH, layer=layer, name="convolution")
        self.strength_proj, self.decay_proj = (nn.Linear(hidden, heads, bias=False) for _ in range(2))
        self.log_rate = nn.Parameter(torch.empty(heads).uniform_(1, 16).log())
        step = torch.empty(heads).uniform_(math.log(0.001), math.log(0.1)).exp()
        self.step_bias = nn.Parameter(step.expm1().log())  # of which softplus makes the step
        self.gate_proj = nn.Linear(hidden, width, bias=False)
        self.head_norm = RMSNorm(config.head_dim, eps=config.rms_norm_eps)
        self.o_proj = nn.Linear(width, hidden, bias=has_bias)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """Mix positions: (batch, seq, hidden) -> (batch, seq, hidden)."""
        every = torch.cat((self.q_proj(x), self.k_proj(x), self.v_proj(x)), dim=-1)
        every = F.silu(self.convolution(every, context))
        wide = torch.promote_types(x.dtype, torch.float32)
        query, key, value = (self._by_head(part.to(wide)) for part in every.chunk(3, dim=-1))
        strength = torch.sigmoid(self.strength_proj(x).to(wide)).transpose(1, 2)  # (batch, heads, seq)
        step = (self.decay_proj(x).to(wide) + self.step_bias).transpose(1, 2).contiguous()
        step = torch.logaddexp(step, torch.zeros_like(step))  # softplus, whose backward AOTAutograd cannot trace here
        log_decay = -self.log_rate.exp()[:, None] * step
        state = None
        cache = context.cache
        if cache is not None:
            state = cache.state(self.layer, "state", (self.heads, self.head_dim, self.head_dim), wide)
            if (is_token := cache.is_token(x.shape[1])) is not None:  # padding neither fades nor corrects
                strength, log_decay = strength * is_token[:, None], log_decay * is_token[:, None]
        start = None if context.spans is None else context.spans.start
        with torch.autocast(x.device.type, enabled=False):
            query = F.normalize(query, dim=-1) * self.head_dim**-0.5
            key = F.normalize(key, dim=-1)
            mixed, new_state = gated_delta_rule(query, key, value, log_decay, strength, state, start)
        if state is not None:
            state.copy_(new_state.detach())
        gate = F.silu(self.gate_proj(x))
        normed = self.head_norm(mixed).transpose(1, 2).flatten(2).to(gate.dtype)
        out: Tensor = self.o_proj(normed * gate)
        return out

    def _by_head(self, x: Tensor) -> Tensor:
        """(batch, seq, heads × head_dim) -> (batch, heads, seq, head_dim)."""
        return x.view(*x.shape[:2], self.heads, self.head_dim).transpose(1, 2)


def gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    strength: Tensor,
    state: Tensor | None = None,
    start: Tensor | None = None,
    chunk: int = CHUNK,
) -> tuple[Tensor, Tensor]:
    """The outputs of all tokens, and the state after the last.

    Args:
        query: (batch, heads, seq, width).
        key: As ``query``, of length 1.
        value: As ``query``.
        log_decay: (batch, heads, seq), log α, at most 0.
        strength: (batch, heads, seq), β.
        state: (batch, heads, width, width), from keys to values, before the first token. ``None``: zeros.
        start: (batch, seq), the first token of each token's document.
        chunk: Tokens that are computed at once.

    Returns:
        (batch, heads, seq, width), and the state.
    """
    seq = query.shape[2]
    chunk = min(chunk, seq)
    position = torch.arange(seq, device=query.device)
    start = torch.zeros_like(position)[None] if start is None else start
    state = query.new_zeros(*query.shape[:2], query.shape[-1], value.shape[-1]) if state is None else state
    outputs = []
    for first in range(0, seq, chunk):
        part = slice(first, first + chunk)
        q = query[:, :, part]
        k = key[:, :, part]
        v = value[:, :, part]
        beta = strength[:, :, part, None]
        g = log_decay[:, :, part].cumsum(dim=-1)
        begin = start[:, None, part, None]
        places = position[part]
        seen = (places <= places[:, None]) & (places >= begin)  # (batch, 1, chunk, chunk)
        fade = (g[..., :, None] - g[..., None, :]).masked_fill(~seen, -math.inf).exp()
        old = g.exp()[..., None] * (begin < max(first, 1))  # what is left of the state before the chunk
        system = (beta * (k @ k.mT) * fade).tril(-1)
        right_side = beta * (v - (old * k) @ state)
        corrected = torch.linalg.solve_triangular(system, right_side, upper=False, unitriangular=True)
        outputs.append((old * q) @ state + ((q @ k.mT) * fade) @ corrected)
        state = old[:, :, -1:] * state + (fade[:, :, -1, :, None] * k).mT @ corrected
    return torch.cat(outputs, dim=2), state
