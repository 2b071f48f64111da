"""One position of a model on a CPU, from weights laid out for it.

A step of decoding is a product of each matrix with one row: it takes as long as reading the matrices. That goes faster
along long rows: a matrix that is wider at its output than at its input is read transposed, and matrices with the same
input are read as one. On one thread of an AMD Zen 5 with torch 2.13, 4096 × 256 took 213 µs so and 544 as ``nn.Linear``
has it, 1408 × 256 took 88 in place of 188; 256 × 704 is faster as it is (61 in place of 89).

The copies (of the projections to query, key and value, of gate and up, and of the head) are held as long as the text is
being generated. Rounding is another than that of the modules; the function is the same.
"""

from collections.abc import Iterator, Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_llm.model.attention import CausalSelfAttention
from lightning_llm.model.kv_cache import KVCache
from lightning_llm.model.mlp import MLP, MemoryOptimizedSwiGLU, SwiGLU
from lightning_llm.model.norm import RMSNorm
from lightning_llm.model.rope import rotation
from lightning_llm.model.transformer import Block, Transformer
from lightning_llm.model.weights import is_hooked, is_plain

FEWEST_STEPS = 8  # that are worth the copies
DTYPES = (torch.float32, torch.float64)  # torch's own product of a bfloat16 matrix and a row wants the usual layout


def can_pack(model: Transformer) -> bool:
    """Whether a model is made of the modules that are known here, on a CPU, and nothing but they would see a step."""
    weight = model.embed_tokens.weight
    if weight.device.type != "cpu" or weight.dtype not in DTYPES or torch.is_autocast_enabled("cpu"):
        return False
    if model.training and model.config.dropout:
        return False
    # a class of the user's own, or a hook, may do something else
    if any(is_hooked(module) or "forward" in module.__dict__ for module in model.modules()):
        return False
    blocks = cast(Sequence[Block], model.layers)
    known = [(model, Transformer), *((block, Block) for block in blocks)]
    known += [(block.self_attn, CausalSelfAttention) for block in blocks]
    if any(type(module) is not kind for module, kind in known):
        return False
    return all(is_plain(module, kind) for module, kind in _read(model))


def _read(model: Transformer) -> Iterator[tuple[nn.Module, type[nn.Module]]]:
    """The modules whose weights are read, and what they have to be."""
    for name, module in model.named_modules():
        if name.endswith("_proj") or name == "lm_head":
            yield module, nn.Linear
        elif name in ("embed_tokens", "embed_positions"):
            yield module, nn.Embedding


class PackedStep:
    """Logits of the next token of each row.

    Args:
        model: One that :func:`can_pack`. Its weights may not change while this is in use.
        cache: Is filled by the steps.
    """

    def __init__(self, model: Transformer, cache: KVCache) -> None:
        config = model.config
        assert config.num_key_value_heads is not None
        assert config.head_dim is not None
        self._model, self._cache = model, cache
        self._heads, self._kv_heads = config.num_attention_heads, config.num_key_value_heads
        self._head_dim = config.head_dim
        self._layers = []
        for block in cast(Sequence[Block], model.layers):
            attention = block.self_attn
            qkv = _Product(attention.q_proj, attention.k_proj, attention.v_proj)
            self._layers.append((block, qkv, _Product(attention.o_proj), _mlp(block.mlp)))
        self._head = _Product(model.lm_head)
        self._turn: tuple[Tensor, Tensor] | None = None
        if config.position == "rope":
            places = torch.arange(cache.max_length)
            cos, sin = rotation(places, self._head_dim, config.rope_theta, cache.dtype, config.rope_scaling)
            self._turn = torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)

    @torch.inference_mode()
    def __call__(self, tokens: Tensor) -> Tensor:
        """(batch,) ids -> (batch, vocab)."""
        model, cache = self._model, self._cache
        positions, mask = cache.positions(1), cache.mask(1)
        x = F.embedding(tokens, model.embed_tokens.weight)  # (batch, hidden)
        if model.config.position == "learned":
            x = x + F.embedding(positions.reshape(-1), model.embed_positions.weight)
        turn = None
        if self._turn is not None:
            cos, sin = (table[positions.reshape(-1)][:, None, None] for table in self._turn)
            turn = cos, sin  # (batch or 1, 1, 1, head_dim)
        for layer, (block, qkv, out, mlp) in enumerate(self._layers):
            mixed = self._attend(layer, block.self_attn, qkv(_normed(block.input_layernorm, x)), turn, mask)
            x = x + out(mixed)
            x = x + mlp(_normed(block.post_attention_layernorm, x))
        cache.advance(1)
        return self._head(_normed(model.norm, x))

    def _attend(
        self,
        layer: int,
        attention: CausalSelfAttention,
        qkv: Tensor,
        turn: tuple[Tensor, Tensor] | None,
        mask: Tensor | None,
    ) -> Tensor:
        """(batch, (heads + 2 kv_heads) × head_dim) -> (batch, heads × head_dim)."""
        batch, heads, kv_heads, head_dim = len(qkv), self._heads, self._kv_heads, self._head_dim
        every = qkv.view(batch, heads + 2 * kv_heads, 1, head_dim)
        turned, value = every[:, : heads + kv_heads], every[:, heads + kv_heads :]
        if not isinstance(attention.q_norm, nn.Identity):
            query, key = turned[:, :heads], turned[:, heads:]
            turned = torch.cat((attention.q_norm(query), attention.k_norm(key)), dim=1)
        if turn is not None:
            cos, sin = turn
            turned = torch.addcmul(turned * cos, turned.roll(head_dim // 2, -1), sin)
        query = turned[:, :heads].reshape(batch, kv_heads, heads // kv_heads, head_dim)
        key, value = self._cache.append(layer, turned[:, heads:], value)
        # the heads of a group are the rows of one product with their common keys
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return mixed.reshape(batch, heads * head_dim)


class _Product:
    """Linear layers with the same input as one, (batch, in) -> (batch, out of all)."""

    def __init__(self, *layers: nn.Linear) -> None:
        weights: list[Tensor] = [layer.weight for layer in layers]
        outputs, inputs = sum(len(weight) for weight in weights), weights[0].shape[1]
        if outputs > inputs:
            self._matrix = torch.empty(inputs, outputs, dtype=weights[0].dtype)
            torch.cat([weight.t() for weight in weights], dim=1, out=self._matrix)
        else:
            self._matrix = weights[0].t() if len(weights) == 1 else torch.cat(weights).t()
        biases: list[Tensor | None] = [layer.bias for layer in layers]
        self._bias = None
        if any(bias is not None for bias in biases):
            pairs = zip(biases, weights, strict=True)
            self._bias = torch.cat([weight.new_zeros(len(weight)) if bias is None else bias for bias, weight in pairs])

    def __call__(self, x: Tensor) -> Tensor:
        return x.mm(self._matrix) if self._bias is None else torch.addmm(self._bias, x, self._matrix)


class _GatedMLP:
    def __init__(self, mlp: SwiGLU) -> None:
        self._both, self._down = _Product(mlp.gate_proj, mlp.up_proj), _Product(mlp.down_proj)

    def __call__(self, x: Tensor) -> Tensor:
        gate, up = self._both(x).chunk(2, dim=-1)
        return self._down(F.silu(gate).mul_(up))


class _PlainMLP:
    def __init__(self, mlp: MLP) -> None:
        self._up, self._activation, self._down = _Product(mlp.up_proj), mlp.activation, _Product(mlp.down_proj)

    def __call__(self, x: Tensor) -> Tensor:
        return self._down(self._activation(self._up(x)))


class _OwnMLP:
    """A class of the user's own, called as it is."""

    def __init__(self, mlp: nn.Module) -> None:
        self._mlp = mlp

    def __call__(self, x: Tensor) -> Tensor:
        out: Tensor = self._mlp(x.unsqueeze(1)).squeeze(1)
        return out


def _mlp(module: nn.Module) -> _GatedMLP | _PlainMLP | _OwnMLP:
    if type(module) in (SwiGLU, MemoryOptimizedSwiGLU):
        return _GatedMLP(module)  # type: ignore[arg-type]
    return _PlainMLP(module) if type(module) is MLP else _OwnMLP(module)


def _normed(norm: nn.Module, x: Tensor) -> Tensor:
    """RMSNorm by four operators: a Function's call takes longer than its work on one row."""
    if type(norm) is not RMSNorm:
        out: Tensor = norm(x)
        return out
    assert norm.eps is not None
    scale = x.square().mean(dim=-1, keepdim=True).add_(norm.eps).rsqrt_()
    return (x * scale).mul_(norm.weight)
