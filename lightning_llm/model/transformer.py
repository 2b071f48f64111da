"""The decoder-only transformer: token ids in, hidden states out.

    ids ─embed_tokens─▶ x ─┬─────────────────────────────▶ + ─┬──────────────────────────────────▶ + ─ … ─norm─▶
                           └─input_layernorm─self_attn─▶───┘  └─post_attention_layernorm─mlp─▶───┘

The head is not applied by ``forward``: the loss takes the hidden states and the head's weight, so that the logits of
all tokens need never exist at once (``ops.linear_cross_entropy``). ``logits`` applies it.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_llm.model.attention import CausalSelfAttention, Rotation, document_mask, positions_in_documents, rotation
from lightning_llm.model.config import ModelConfig
from lightning_llm.model.kv_cache import KVCache
from lightning_llm.model.mlp import build_mlp
from lightning_llm.model.norm import build_norm
from lightning_llm.model.weights import drawing, initialize
from lightning_llm.ops.conventions import matmul_dtype


class Compilable(nn.Module):
    """A module whose forward pass, ``_run``, can be compiled in place."""

    _run: Callable[..., Tensor]

    def __init__(self) -> None:
        super().__init__()
        self._compiled: Callable[..., Tensor] | None = None

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the forward pass without a cache, in place. Arguments as for ``torch.compile``.

        Unlike that of ``nn.Module`` it excludes hooks, by which FSDP2 gathers the weights, and takes the module as an
        argument: blocks of the same settings, and copies of one, share the code compiled for the first.
        """
        self._compiled = torch.compile(type(self)._run, *args, **kwargs)

    @property
    def is_compiled(self) -> bool:
        """Whether :meth:`compile` was called."""
        return self._compiled is not None

    def _call(self, cache: KVCache | None, *args: Any) -> Tensor:
        # a cache grows with every call, and each length would be compiled again
        run = type(self)._run if self._compiled is None or cache is not None else self._compiled
        return run(self, *args)


class Block(Compilable):
    """A pre-norm block: attention, then the MLP, each added to the residual stream (Xiong et al. 2020).

    Args:
        config: Of the transformer.
        layer: Index of the block.
        seed: Of the initial values.
    """

    def __init__(self, config: ModelConfig, layer: int, seed: int) -> None:
        super().__init__()
        self.input_layernorm = build_norm(config)
        self.self_attn = CausalSelfAttention(config, layer)
        self.post_attention_layernorm = build_norm(config)
        with drawing(seed, f"layers.{layer}.mlp"):
            self.mlp = build_mlp(config, layer)
        self.norm_in_mlp = config.checkpoint_levels[layer] == 2
        self.recompute = config.recompute
        self.dropout = nn.Dropout(config.dropout) if config.dropout else nn.Identity()
        initialize(self, config, seed, f"layers.{layer}")

    def forward(
        self, x: Tensor, *, rotation: Rotation | None = None, cache: KVCache | None = None, mask: Tensor | None = None
    ) -> Tensor:
        """(batch, seq, hidden) -> (batch, seq, hidden). The rest as for :class:`CausalSelfAttention`."""
        return self._call(cache, x, rotation, cache, mask)

    def _run(self, x: Tensor, rotation: Rotation | None, cache: KVCache | None, mask: Tensor | None) -> Tensor:
        return self._part("block", self._parts, x, rotation, cache, mask)

    def _parts(self, x: Tensor, rotation: Rotation | None, cache: KVCache | None, mask: Tensor | None) -> Tensor:
        x = x + self._part("attention", self._attention, x, rotation, cache, mask)
        return x + self._part("mlp", self._mlp, x)

    def _attention(self, x: Tensor, rotation: Rotation | None, cache: KVCache | None, mask: Tensor | None) -> Tensor:
        mixed = self.self_attn(self.input_layernorm(x), rotation=rotation, cache=cache, mask=mask)
        out: Tensor = self.dropout(mixed)
        return out

    def _mlp(self, x: Tensor) -> Tensor:
        norm = self.post_attention_layernorm
        out: Tensor = self.dropout(self.mlp(x, norm) if self.norm_in_mlp else self.mlp(norm(x)))
        return out

    def _part(self, name: str, function: Callable[..., Tensor], *args: Any) -> Tensor:
        if self.recompute == name and self.training and torch.is_grad_enabled():
            out: Tensor = checkpoint(function, *args, use_reentrant=False)
            return out
        return function(*args)


class Transformer(Compilable):
    """A decoder-only language model.

    Args:
        config: Its shape. ``vocab_size`` must be known.
        seed: Of the initial values (``model.weights``). ``None``: one draw from torch's global generator.
        place: Called with each block as soon as it has its values: to move it, to shard it.

    Raises:
        ValueError: ``vocab_size`` is ``None``, or the config's MLP cannot be imported.
    """

    def __init__(
        self, config: ModelConfig, *, seed: int | None = None, place: Callable[[Block], object] = lambda block: None
    ) -> None:
        super().__init__()
        if config.vocab_size is None:
            raise ValueError("vocab_size is None: give the tokenizer's number of entries")
        self.config = config
        if seed is None:
            seed = int(torch.randint(2**62, (), device="cpu"))
        with drawing(seed, ""):  # so that what torch's constructors draw leaves the global generator alone
            self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
            if config.position == "learned":
                self.embed_positions = nn.Embedding(config.max_position_embeddings, config.hidden_size)
            self.dropout = nn.Dropout(config.dropout) if config.dropout else nn.Identity()
            self.layers = nn.ModuleList()
            self.norm = build_norm(config)
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=config.lm_head_bias)
            initialize(self, config, seed)
            self.tie_weights()
            for layer in range(config.num_hidden_layers):
                block = Block(config, layer, seed)
                place(block)
                self.layers.append(block)

    def tie_weights(self) -> None:
        """Let the head share the embedding's weight, if the config says so; again after weights were assigned."""
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight

    def compile_blocks(self, mode: str = "default") -> None:
        """Let ``torch.compile`` compile the blocks, in place, at their first call; generation does not use it.

        Args:
            mode: As for ``torch.compile``.
        """
        for layer in self.layers:
            layer.compile(mode=mode)

    def forward(
        self,
        input_ids: Tensor,
        *,
        positions: Tensor | None = None,
        cache: KVCache | None = None,
        documents: Tensor | None = None,
    ) -> Tensor:
        """Hidden states after the last norm.

        Args:
            input_ids: (batch, seq), int64 token ids.
            positions: (seq,) or (batch, seq); ``None`` counts from 0, or from where each row of the cache ends.
            cache: Keys and values of earlier positions, which these are added to. Where its rows are of unequal
                length, one new position at a time.
            documents: (batch, seq), for each token the number of its document in the row. Attention stays inside it,
                and positions (unless given) count from its beginning, as if each were run alone.

        Returns:
            (batch, seq, hidden).

        Raises:
            ValueError: ``input_ids`` is not two-dimensional, or more positions than ``max_position_embeddings``, or
                ``documents`` with a cache or of another shape, or several positions after unequal rows of a cache.
        """
        return self._call(cache, input_ids, positions, cache, documents)

    def _run(
        self, input_ids: Tensor, positions: Tensor | None, cache: KVCache | None, documents: Tensor | None
    ) -> Tensor:
        if input_ids.dim() != 2:
            raise ValueError(f"input_ids must have shape (batch, seq), got {tuple(input_ids.shape)}")
        seq, longest = input_ids.shape[1], self.config.max_position_embeddings
        total = seq if cache is None else cache.length + seq
        if total > longest:
            raise ValueError(f"{total} positions are more than max_position_embeddings {longest}: shorten the input")
        mask = None if cache is None else cache.mask(seq)
        if documents is not None:
            if cache is not None or documents.shape != input_ids.shape:
                raise ValueError(
                    f"documents must have the shape {tuple(input_ids.shape)} of input_ids and no cache with them, "
                    f"got {tuple(documents.shape)}{'' if cache is None else ' and a cache'}"
                )
            positions = positions_in_documents(documents) if positions is None else positions
        if positions is None:
            positions = torch.arange(seq, device=input_ids.device) if cache is None else cache.positions(seq)
        x = self.embed_tokens(input_ids)
        if self.config.position == "learned":
            x = x + self.embed_positions(positions)
        x = self.dropout(x)
        cos_sin, dtype, config = None, matmul_dtype(x), self.config  # dtype: of queries, keys and values
        if config.position == "rope":
            assert config.head_dim is not None
            cos_sin = rotation(positions, config.head_dim, config.rope_theta, dtype, config.rope_scaling)
        if documents is not None:
            mask = document_mask(documents, dtype)
        for layer in self.layers:
            x = layer(x, rotation=cos_sin, cache=cache, mask=mask)
        if cache is not None:
            cache.advance(seq)
        out: Tensor = self.norm(x)
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        """(…, hidden) -> (…, vocab), through the head."""
        out: Tensor = self.lm_head(hidden)
        return out
