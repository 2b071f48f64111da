"""One decoding step on a CPU, from weights in a layout of their own.

A step multiplies each weight matrix by one row, which takes as long as reading the matrix. Reading is faster along long
rows: a matrix whose output is wider than its input is stored transposed, and matrices with the same input are stored as
one. On one thread of an AMD Zen 5 with torch 2.13, 4096 × 256 took 213 µs this way and 544 µs as ``nn.Linear`` stores
it, 1408 × 256 took 88 µs instead of 188; 256 × 704 is faster as it is (61 µs instead of 89).

The copies (of the query, key and value projections, of gate and up, and of the head) exist while text is generated.
The function is that of the modules; rounding differs.
"""

from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_llm.model.attention import CausalSelfAttention
from lightning_llm.model.block import Block
from lightning_llm.model.kv_cache import KVCache
from lightning_llm.model.mlp import MLP, MemoryOptimizedSwiGLU, SwiGLU
from lightning_llm.model.norm import RMSNorm
from lightning_llm.model.position import LearnedPositions, Position, RotaryPositions, rotation
from lightning_llm.model.transformer import Transformer
from lightning_llm.model.unmodified import is_hooked, is_unmodified

FEWEST_STEPS = 8  # fewer are not worth the copies
PACKED_DTYPES = (torch.float32, torch.float64)  # torch's matmul of a bfloat16 matrix and a row needs the usual layout


def can_pack(model: Transformer) -> bool:
    """Whether a model is on a CPU and consists of known modules, without hooks that a packed step would bypass."""
    weight = model.embed_tokens.weight
    if weight.device.type != "cpu" or weight.dtype not in PACKED_DTYPES or torch.is_autocast_enabled("cpu"):
        return False
    blocks = {(type(block), type(getattr(block, "self_attn", None))) for block in model.layers}
    if type(model) is not Transformer or blocks != {(Block, CausalSelfAttention)}:
        return False
    config = model.config
    if config.attention != "full" or config.layers is not None or config.partial_rotary_factor != 1:
        return False
    if type(model.embed_positions) not in (Position, LearnedPositions, RotaryPositions):
        return False
    # a hook, or a class of the user's own, may do something else
    is_bypassed = any(is_hooked(module) or "forward" in module.__dict__ for module in model.modules())
    if is_bypassed or (model.training and model.config.dropout):
        return False
    kinds = {"lm_head": nn.Linear, "embed_tokens": nn.Embedding, "embed_positions": type(model.embed_positions)}
    return all(
        is_unmodified(module, nn.Linear if name.endswith("_proj") else kinds[name])
        for name, module in model.named_modules()
        if name.endswith("_proj") or name in kinds
    )


class PackedStep:
    """Logits of the next token of each row.

    Args:
        model: One for which :func:`can_pack` is true. Its weights may not change while this is in use.
        cache: Filled by the steps.
    """

    def __init__(self, model: Transformer, cache: KVCache) -> None:
        config = model.config
        assert config.num_key_value_heads is not None
        assert config.head_dim is not None
        self._model = model
        self._cache = cache
        self._heads = config.num_attention_heads
        self._kv_heads = config.num_key_value_heads
        self._head_dim = config.head_dim
        self._layers = []
        for block in cast(Sequence[Block], model.layers):
            attention = block.self_attn
            qkv = _packed(attention.q_proj, attention.k_proj, attention.v_proj)
            self._layers.append((block, qkv, _packed(attention.o_proj), _packed_mlp(block.mlp)))
        self._head = _packed(model.lm_head)
        self._rotations: tuple[Tensor, Tensor] | None = None
        if config.position == "rope":
            positions = torch.arange(cache.max_length)
            cos, sin = rotation(positions, self._head_dim, config.rope_theta, cache.dtype, config.rope_scaling)
            self._rotations = torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)

    @torch.inference_mode()
    def __call__(self, tokens: Tensor) -> Tensor:
        """(batch,) ids -> (batch, vocab)."""
        model, cache = self._model, self._cache
        positions = cache.positions(1)
        mask = cache.mask(1)
        x = F.embedding(tokens, model.embed_tokens.weight)  # (batch, hidden)
        if model.config.position == "learned":
            x = x + F.embedding(positions.reshape(-1), cast(nn.Embedding, model.embed_positions).weight)
        cos_sin: tuple[Tensor, ...] = ()
        if self._rotations is not None:  # (batch or 1, 1, 1, head_dim)
            cos_sin = tuple(table[positions.reshape(-1)][:, None, None] for table in self._rotations)
        for layer, (block, qkv, out, mlp) in enumerate(self._layers):
            mixed = self._attention(layer, block.self_attn, qkv(_normed(block.input_layernorm, x)), cos_sin, mask)
            x = x + out(mixed)
            x = x + mlp(_normed(block.post_attention_layernorm, x))
        cache.advance(1)
        return self._head(_normed(model.norm, x))[:, : model.config.vocab_size]

    def _attention(
        self, layer: int, attention: CausalSelfAttention, qkv: Tensor, cos_sin: tuple[Tensor, ...], mask: Tensor | None
    ) -> Tensor:
        """(batch, (heads + 2 kv_heads) × head_dim) -> (batch, heads × head_dim)."""
        batch = len(qkv)
        heads = self._heads
        kv_heads = self._kv_heads
        head_dim = self._head_dim
        every = qkv.view(batch, heads + 2 * kv_heads, 1, head_dim)
        both = every[:, : heads + kv_heads]  # query and key
        value = every[:, heads + kv_heads :]
        if not isinstance(attention.q_norm, nn.Identity):
            both = torch.cat((attention.q_norm(both[:, :heads]), attention.k_norm(both[:, heads:])), dim=1)
        if cos_sin:
            cos, sin = cos_sin
            both = torch.addcmul(both * cos, both.roll(head_dim // 2, -1), sin)
        query = both[:, :heads].reshape(batch, kv_heads, heads // kv_heads, head_dim)
        key, value = self._cache.append(layer, both[:, heads:], value)
        # the heads of a group are the rows of one matmul with their common keys
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return mixed.reshape(batch, heads * head_dim)


Function = Callable[[Tensor], Tensor]


def _packed(*layers: nn.Linear) -> Function:
    """Linear layers with the same input as one, (batch, in) -> (batch, out of all)."""
    weights, biases = [layer.weight for layer in layers], [layer.bias for layer in layers]
    outputs = sum(len(weight) for weight in weights)
    inputs = weights[0].shape[1]
    if outputs > inputs:
        matrix = torch.empty(inputs, outputs, dtype=weights[0].dtype)
        torch.cat([weight.t() for weight in weights], dim=1, out=matrix)
    else:
        matrix = weights[0].t() if len(weights) == 1 else torch.cat(list(weights)).t()
    if all(bias is None for bias in biases):
        return lambda x: x.mm(matrix)
    pairs = zip(biases, weights, strict=True)
    bias = torch.cat([weight.new_zeros(len(weight)) if bias is None else bias for bias, weight in pairs])
    return lambda x: torch.addmm(bias, x, matrix)


def _packed_mlp(mlp: nn.Module) -> Function:
    """An MLP, (batch, hidden) -> (batch, hidden); a class of the user's own is called as it is."""
    if isinstance(mlp, SwiGLU | MemoryOptimizedSwiGLU) and type(mlp) in (SwiGLU, MemoryOptimizedSwiGLU):
        gate_up = _packed(mlp.gate_proj, mlp.up_proj)
        down = _packed(mlp.down_proj)

        def gated(x: Tensor) -> Tensor:
            gate, up = gate_up(x).chunk(2, dim=-1)
            return down(F.silu(gate).mul_(up))

        return gated
    if type(mlp) is MLP:
        up = _packed(mlp.up_proj)
        activation = mlp.activation
        down = _packed(mlp.down_proj)
        return lambda x: down(activation(up(x)))
    return lambda x: cast(Tensor, mlp(x.unsqueeze(1)).squeeze(1))


def _normed(norm: nn.Module, x: Tensor) -> Tensor:
    """RMSNorm as four operators: calling a Function takes longer than its work on one row."""
    if type(norm) is not RMSNorm:
        return cast(Tensor, norm(x))
    assert norm.eps is not None
    scale = x.square().mean(dim=-1, keepdim=True).add_(norm.eps).rsqrt_()
    return (x * scale).mul_(norm.weight)
