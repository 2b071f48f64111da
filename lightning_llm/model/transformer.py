"""The decoder-only transformer: token ids in, hidden states out.

    ids ─embed_tokens─▶ x ─┬─────────────────────────────▶ + ─┬──────────────────────────────────▶ + ─ … ─norm─▶
                           └─input_layernorm─self_attn─▶───┘  └─post_attention_layernorm─mlp─▶───┘

The picture is that of the usual block; ``block.py`` has others. The head is not applied by ``forward``: the loss
(``loss``) takes the hidden states and the head, so that the logits of all tokens need never exist at once
(``ops.linear_cross_entropy``). ``logits`` applies it.
"""

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from lightning_llm.model.attention import with_blocks
from lightning_llm.model.block import Block, Compilable
from lightning_llm.model.build import build
from lightning_llm.model.config import ModelConfig
from lightning_llm.model.context import Context, CrossLayerState, Mask, checked
from lightning_llm.model.initial_values import drawing
from lightning_llm.model.kv_cache import KVCache
from lightning_llm.model.position import Position
from lightning_llm.model.weights import initialize
from lightning_llm.ops.dispatch import matmul_dtype
from lightning_llm.ops.span_attention import AttentionSpans, dense_mask, spans_of_documents

BlockHook = Callable[[Block], object] | None


class Transformer(Compilable):
    """A decoder-only language model.

    Args:
        config: Its shape. ``vocab_size`` must be known.
        seed: Of the initial values (``model.weights``). ``None``: one draw from torch's global generator.
        on_block: Called with each block as soon as it has its values: to move it, to shard it.

    Attributes:
        embed_positions: The part ``position``.
        layers: The blocks.
        objective: The part ``loss``.

    Raises:
        ValueError: ``vocab_size`` is ``None``, or a part cannot be imported or made.
    """

    def __init__(self, config: ModelConfig, *, seed: int | None = None, on_block: BlockHook = None) -> None:
        super().__init__()
        if config.vocab_size is None:
            raise ValueError("vocab_size is None: give the tokenizer's number of entries")
        self.config = config
        if seed is None:
            seed = int(torch.randint(2**62, (), device="cpu"))
        with drawing(seed, ""):  # so that what torch's constructors draw leaves the global generator alone
            self.embed_tokens = nn.Embedding(config.vocab_rows, config.hidden_size)
            self.embed_positions: Position = build("position", config, seed=seed, path="embed_positions", base=Position)
            self.dropout = nn.Dropout(config.dropout) if config.dropout else nn.Identity()
            self.layers = nn.ModuleList()
            self.norm = build("norm", config, seed=seed, path="norm", size=config.hidden_size)
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_rows, bias=config.lm_head_bias)
            self.objective = build("loss", config, seed=seed, path="objective")
            initialize(self, config, seed)
            self.tie_weights()
            self.null_position: Position | None = None  # of layers that do without the model's
            for layer, of_layer in enumerate(config.layer_configs):
                path = f"layers.{layer}"
                block = build("block", of_layer, seed=seed, path=path, layer=layer, base=Block)
                initialize(block, of_layer, seed, path)
                if of_layer.position != config.position:
                    self.null_position = Position(config)
                if on_block is not None:
                    on_block(block)
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
        # all blocks have one code, which the compiler gives up after so many graphs: a kind of block needs four, for
        # training and for evaluating a full batch, the last one, and a short rest
        config = torch._dynamo.config
        config.recompile_limit = max(config.recompile_limit, 4 * len(self.layers))
        # the blocks are called inside DDP's forward pass: the compiler would take each for the whole model, and cut it
        # where the buckets of gradients end
        config.optimize_ddp = False
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
        if input_ids.dim() != 2:
            raise ValueError(f"input_ids must have shape (batch, seq), got {tuple(input_ids.shape)}")
        seq = input_ids.shape[1]
        longest = self.config.max_position_embeddings
        total = seq if cache is None else cache.length + seq
        if total > longest:
            raise ValueError(f"{total} positions are more than max_position_embeddings {longest}: shorten the input")
        state = None
        if self.is_compiled and cache is None:
            # within one graph the compiler would merge this into every layer, which would compute it again
            positions, _ = self._positions(input_ids, positions, cache, documents)
            state = self.embed_positions.prepare(positions, matmul_dtype(self.embed_tokens.weight))
        return self._call(cache, input_ids, positions, cache, documents, state)

    def _run(
        self,
        input_ids: Tensor,
        positions: Tensor | None,
        cache: KVCache | None,
        documents: Tensor | None,
        state: Any,
    ) -> Tensor:
        x, context = self._embedded(input_ids, positions, cache, documents, state)
        blocks = cast(Sequence[Block], self.layers)
        for layer in blocks:
            layer.prepare(x, context)
            if getattr(layer.mlp, "auxiliary_loss", None) is not None:
                layer.mlp.auxiliary_loss = None  # of the forward pass before
        unplaced = context if self.null_position is None else context._replace(position=self.null_position, state=None)
        branch: Tensor | None = None  # yet to be added to x
        for layer, of_layer in zip(blocks, self.config.layer_configs, strict=True):
            of_block = context if of_layer.position == self.config.position else unplaced
            if isinstance(layer, Block) and layer.leaves_sum(of_block):
                x, branch = layer.terms(x, branch, of_block)
            else:
                x = layer(_sum(x, branch), of_block)
                branch = None
        if cache is not None and self.uses_cache:
            cache.advance(input_ids.shape[1])
        out: Tensor = self.norm(_sum(x, branch))
        return out

    def _embedded(
        self,
        input_ids: Tensor,
        positions: Tensor | None,
        cache: KVCache | None,
        documents: Tensor | None,
        state: Any,
    ) -> tuple[Tensor, Context]:
        """Input of the first block, (batch, seq, hidden), and what all blocks share."""
        position = self.embed_positions
        mask: Mask | None = None if cache is None else cache.mask(input_ids.shape[1])
        positions, spans = self._positions(input_ids, positions, cache, documents)
        x = self.embed_tokens(input_ids)
        x = self.dropout(checked("position", position, position.embed(x, positions), x))
        dtype = matmul_dtype(x)  # of queries, keys and values
        if spans is not None:
            mask = self._mask_of(spans, dtype)
        if state is None:
            state = position.prepare(positions, dtype)
        return x, Context(positions, position, CrossLayerState(), state, cache, spans, mask)

    def _positions(
        self, input_ids: Tensor, positions: Tensor | None, cache: KVCache | None, documents: Tensor | None
    ) -> tuple[Tensor, AttentionSpans | None]:
        """Where the tokens are, and the documents that they see."""
        seq = input_ids.shape[1]
        spans: AttentionSpans | None = None
        if documents is not None:
            if cache is not None or documents.shape != input_ids.shape:
                raise ValueError(
                    f"documents must have the shape {tuple(input_ids.shape)} of input_ids and no cache with them, "
                    f"got {tuple(documents.shape)}{'' if cache is None else ' and a cache'}"
                )
            spans = spans_of_documents(documents)
            positions = torch.arange(seq, device=input_ids.device) - spans.start if positions is None else positions
        if positions is None:
            positions = torch.arange(seq, device=input_ids.device) if cache is None else cache.positions(seq)
        return positions, spans

    @property
    def uses_cache(self) -> bool:
        """Whether every layer adds keys and values to a cache, so that decoding need not see the whole text again."""
        return all(getattr(getattr(layer, "self_attn", None), "uses_cache", False) for layer in self.layers)

    def auxiliary_loss(self) -> Tensor | None:
        """The sum of what MLPs left as ``auxiliary_loss`` in the last forward pass; ``None`` if there is none."""
        left = [getattr(layer.mlp, "auxiliary_loss", None) for layer in self.layers]
        found = [loss for loss in left if loss is not None]
        return torch.stack(found).sum() if found else None

    def _mask_of(self, spans: AttentionSpans, dtype: torch.dtype) -> Mask:
        """Mask of full attention in all layers: made once. Only those that need a mask can drop weights."""
        if self.training and self.config.dropout:
            return dense_mask(spans, dtype)
        return with_blocks(spans, dtype, self.config.head_dim or 0)

    def logits(self, hidden: Tensor) -> Tensor:
        """(…, hidden) -> (…, vocab), through the head."""
        out: Tensor = self.lm_head(hidden)
        return out if self.config.vocab_size == self.config.vocab_rows else out[..., : self.config.vocab_size]


def _sum(x: Tensor, branch: Tensor | None) -> Tensor:
    return x if branch is None else x + branch
