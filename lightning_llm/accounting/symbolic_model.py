"""The model on shadows: ``model/transformer.py``, ``model/attention.py``, ``model/mlp.py`` and ``LanguageModel.loss``.

The same calls in the same order as there, so that what Python keeps alive by a name is alive here too.
"""

import dataclasses

from lightning_llm.accounting import symbolic_custom as custom
from lightning_llm.accounting.symbolic import FLOAT32, INT64, Count, Shadow
from lightning_llm.accounting.symbolic_ops import Operators
from lightning_llm.model.config import BUILT_IN_MLPS, ModelConfig
from lightning_llm.ops.sizes import LONGEST_SHORT_ATTENTION

EMBEDDING, NORMS, ATTENTION, MLP, RESIDUAL, LOSS = "embeddings", "norms", "attention", "mlp", "residual stream", "loss"


@dataclasses.dataclass(frozen=True)
class Sizes:
    """All sizes that formulas are written in.

    Attributes:
        tokens: batch × seq.
        hidden: h.
        width: Intermediate width of the MLP, i.
        queries: heads × head_dim.
        keys: kv_heads × head_dim.
        scores: heads × seq × seq, of one row.
        vocab: V.
    """

    batch: Count
    seq: Count
    hidden: Count
    intermediate: Count
    heads: Count
    kv_heads: Count
    head_dim: Count
    vocab: Count

    @property
    def tokens(self) -> Count:
        """Of a micro-batch."""
        return self.batch * self.seq


def sizes_of(config: ModelConfig, rows: int, seq: int) -> Sizes:
    """The sizes of a config and a micro-batch.

    Raises:
        ValueError: The vocabulary is not known, the MLP is the user's own, or the context is too long for the model.
    """
    assert config.intermediate_size is not None
    assert config.num_key_value_heads is not None
    assert config.head_dim is not None
    if config.vocab_size is None:
        raise ValueError("vocab_size is null: give the number of token ids (--vocab-size)")
    if config.mlp not in BUILT_IN_MLPS:
        raise ValueError(f"mlp {config.mlp!r} is a class of its own: what it keeps cannot be told from the config")
    if seq > config.max_position_embeddings:
        raise ValueError(
            f"context_length {seq} is more than max_position_embeddings {config.max_position_embeddings}: "
            "shorten one or lengthen the other"
        )
    return Sizes(
        batch=Count(rows, "B"),
        seq=Count(seq, "T"),
        hidden=Count(config.hidden_size, "h"),
        intermediate=Count(config.intermediate_size, "i"),
        heads=Count(config.num_attention_heads, "H"),
        kv_heads=Count(config.num_key_value_heads, "K"),
        head_dim=Count(config.head_dim, "d"),
        vocab=Count(config.vocab_size, "V"),
    )


class ShadowModel:
    """Parameters of a model, and its loss.

    Args:
        config: The model.
        sizes: What ``sizes_of`` made of it.
        ops: Device and precision.
        loss_chunks: As ``LanguageModel`` takes it.
    """

    def __init__(self, config: ModelConfig, sizes: Sizes, ops: Operators, loss_chunks: int | None) -> None:
        self.config, self.s, self.ops, self.loss_chunks = config, sizes, ops, loss_chunks
        self.parameters: list[Shadow] = []
        self._triangle: Shadow | None = None
        self.embed_tokens = self._parameter(sizes.vocab * sizes.hidden)
        if config.position == "learned":
            positions = Count(config.max_position_embeddings, "P")
            self.embed_positions = self._parameter(positions * sizes.hidden)
        self.layers = [self._layer_parameters() for _ in range(config.num_hidden_layers)]
        self.norm = self._norm_parameters()
        tied = config.tie_word_embeddings
        self.lm_head = self.embed_tokens if tied else self._parameter(sizes.vocab * sizes.hidden)
        self.lm_head_bias = self._parameter(sizes.vocab) if config.lm_head_bias else None

    def loss(self) -> Shadow:
        """One forward pass, to the scalar."""
        ops, s = self.ops, self.s
        self._enter("embeddings", EMBEDDING)
        positions = ops.new(s.seq, INT64)
        x = ops.embedding(self.embed_tokens, s.tokens * s.hidden)
        if self.config.position == "learned":
            x = ops.add(x, ops.embedding(self.embed_positions, s.seq * s.hidden))
        x = ops.dropout(x, self.config.dropout)
        turn = self._rotation(x)
        for layer in range(len(self.layers)):
            x = self._block(layer, x, turn)
        self._enter("final norm", NORMS)
        hidden = self._normalize(x, self.norm, s.tokens)
        del x, turn, positions
        self._enter("loss", LOSS)
        return self._loss(hidden)

    # -- parameters ---------------------------------------------------------------------------------------------------

    def _parameter(self, elements: Count) -> Shadow:
        made = self.ops.parameter(elements)
        self.parameters.append(made)
        return made

    def _linear_parameters(self, out: Count, into: Count, *, bias: bool) -> list[Shadow | None]:
        return [self._parameter(out * into), self._parameter(out) if bias else None]

    def _norm_parameters(self) -> list[Shadow]:
        return [self._parameter(self.s.hidden) for _ in range(2 if self.config.norm == "layernorm" else 1)]

    def _layer_parameters(self) -> dict[str, list[Shadow | None]]:
        s, config = self.s, self.config
        width, kv_width = s.heads * s.head_dim, s.kv_heads * s.head_dim
        made: dict[str, list[Shadow | None]] = {"input_layernorm": [*self._norm_parameters()]}
        for name, out, into in (
            ("q_proj", width, s.hidden),
            ("k_proj", kv_width, s.hidden),
            ("v_proj", kv_width, s.hidden),
            ("o_proj", s.hidden, width),
        ):
            made[name] = self._linear_parameters(out, into, bias=config.attention_bias)
        if config.qk_norm:
            made |= {"q_norm": [self._parameter(s.head_dim)], "k_norm": [self._parameter(s.head_dim)]}
        made["post_attention_layernorm"] = [*self._norm_parameters()]
        shapes = {"gate_proj": (s.intermediate, s.hidden)} if config.is_gated else {}
        shapes |= {"up_proj": (s.intermediate, s.hidden), "down_proj": (s.hidden, s.intermediate)}
        made |= {n: self._linear_parameters(*shape, bias=config.mlp_bias) for n, shape in shapes.items()}
        return made

    # -- blocks -------------------------------------------------------------------------------------------------------

    def _enter(self, moment: str, part: str) -> None:
        self.ops.ledger.enter(moment, part)

    def _block(self, layer: int, x: Shadow, turn: "Turn") -> Shadow:
        if self.config.recompute == "block":
            return self.ops.checkpoint(lambda x: self._whole(layer, x, turn), x)
        return self._whole(layer, x, turn)

    def _whole(self, layer: int, x: Shadow, turn: "Turn") -> Shadow:
        ops = self.ops

        def attention(x: Shadow) -> Shadow:
            return self._attention(layer, x, turn)

        def mlp(x: Shadow) -> Shadow:
            return self._mlp(layer, x)

        mixed = ops.checkpoint(attention, x) if self.config.recompute == "attention" else attention(x)
        self._enter(f"layer {layer}, attention", RESIDUAL)
        x = ops.add(x, mixed)
        del mixed
        out = ops.checkpoint(mlp, x) if self.config.recompute == "mlp" else mlp(x)
        self._enter(f"layer {layer}, mlp", RESIDUAL)
        return ops.add(x, out)

    def _normalize(self, x: Shadow, weights: list[Shadow], rows: Count) -> Shadow:
        if self.config.norm == "layernorm":
            return custom.fused_norm(self.ops, x, weights, rows, statistics=2)
        return custom.rms_norm(self.ops, x, weights[0], rows)

    def _mlp(self, layer: int, x: Shadow) -> Shadow:
        ops, s, own = self.ops, self.s, self.layers[layer]
        level = self.config.checkpoint_levels[layer]
        norm = [w for w in own["post_attention_layernorm"] if w is not None]
        if level < 2:
            self._enter(f"layer {layer}, mlp", NORMS)
            x = self._normalize(x, norm, s.tokens)
        self._enter(f"layer {layer}, mlp", MLP)
        if self.config.mlp == "memory_optimized_swiglu":
            gate, up, down = (own[f"{name}_proj"][0] for name in ("gate", "up", "down"))
            assert gate is not None
            assert up is not None
            assert down is not None
            weights = (gate, up, down, norm[0] if level == 2 else None)
            out = custom.swiglu(
                ops, x, weights, tokens=s.tokens, hidden=s.hidden, width=s.intermediate, keep=level == 0
            )
            del x
        else:
            out = self._linear(self._activated(x, own), own["down_proj"], s.tokens * s.hidden)
        return ops.dropout(out, self.config.dropout)

    def _activated(self, x: Shadow, own: dict[str, list[Shadow | None]]) -> Shadow:
        ops, wide = self.ops, self.s.tokens * self.s.intermediate
        if self.config.is_gated:
            return ops.multiply(
                ops.activation(self._linear(x, own["gate_proj"], wide)), self._linear(x, own["up_proj"], wide)
            )
        return ops.activation(self._linear(x, own["up_proj"], wide), keeps_output=self.config.mlp == "relu")

    def _linear(self, x: Shadow, weights: list[Shadow | None], elements: Count) -> Shadow:
        weight, bias = weights
        assert weight is not None
        return self.ops.linear(x, weight, bias, elements)

    # -- attention ----------------------------------------------------------------------------------------------------

    def _attention(self, layer: int, x: Shadow, turn: "Turn") -> Shadow:
        ops, s, own = self.ops, self.s, self.layers[layer]
        self._enter(f"layer {layer}, attention", NORMS)
        x = self._normalize(x, [w for w in own["input_layernorm"] if w is not None], s.tokens)
        self._enter(f"layer {layer}, attention", ATTENTION)
        query_size, key_size = s.tokens * s.heads * s.head_dim, s.tokens * s.kv_heads * s.head_dim
        query = self._linear(x, own["q_proj"], query_size)
        key = self._linear(x, own["k_proj"], key_size)
        value = self._linear(x, own["v_proj"], key_size)
        if self.config.qk_norm:
            query = self._head_norm(query, own["q_norm"], s.tokens * s.heads)
            key = self._head_norm(key, own["k_norm"], s.tokens * s.kv_heads)
        is_contiguous = turn is not None
        if turn is not None:
            query, key = self._rotate(query, turn), self._rotate(key, turn)
        mixed = self._mix(query, key, value, is_contiguous=is_contiguous)
        del query, key, value
        if s.heads > 1 and (self._is_short or turn is not None):
            mixed = ops.copy(mixed)  # transpose and flatten; free where the built-in attention got strided queries
        out = self._linear(mixed, own["o_proj"], s.tokens * s.hidden)
        del x, mixed
        return ops.dropout(out, self.config.dropout)

    @property
    def _is_short(self) -> bool:
        return self.ops.device == "cpu" and 1 < self.s.seq <= LONGEST_SHORT_ATTENTION

    def _head_norm(self, x: Shadow, weights: list[Shadow | None], rows: Count) -> Shadow:
        assert weights[0] is not None
        return custom.rms_norm(self.ops, x, weights[0], rows)

    def _mix(self, query: Shadow, key: Shadow, value: Shadow, *, is_contiguous: bool) -> Shadow:
        ops, s = self.ops, self.s
        assert not self.config.dropout or ops.device != "cpu"
        groups = s.heads // s.kv_heads
        whole = s.tokens * s.heads * s.head_dim
        if self._is_short:
            if groups > 1:
                key, value = self._repeat(key, whole), self._repeat(value, whole)
            if self._triangle is None:
                self._triangle = ops.new(s.seq * s.seq, query.itemsize)
            is_strided = s.heads > 1 and s.batch > 1
            query = ops.copy(query) if is_strided and not is_contiguous else query
            key = ops.copy(key) if is_strided and not is_contiguous and groups == 1 else key
            value = ops.copy(value) if is_strided and groups == 1 else value
            out = custom.causal_attention(
                ops, query, key, value, heads=s.batch * s.heads, seq=s.seq, head_dim=s.head_dim
            )
            return ops.copy_both_ways(out) if is_strided else out
        return self._flash(query, key, value)

    def _flash(self, query: Shadow, key: Shadow, value: Shadow) -> Shadow:
        """The built-in one that keeps O(seq): its output and one number for each row of scores."""
        ops, s = self.ops, self.s
        shapes = [(t.elements, t.itemsize) for t in (query, key, value)]
        out = ops.like(query)
        sums = ops.new(s.tokens * s.heads, FLOAT32)
        run = ops._using([query, key, value, out, sums], lambda _: [ops.new(*shape) for shape in shapes])
        return ops.record(out, run, [query, key, value])

    def _repeat(self, x: Shadow, elements: Count) -> Shadow:
        """``repeat_interleave``: the gradients of a group are summed."""
        size = (x.elements, x.itemsize)
        return self.ops.record(self.ops.new(elements, x.itemsize), lambda _: [self.ops.new(*size)], [x])

    def _rotation(self, x: Shadow) -> "Turn":
        if self.config.position != "rope":
            return None
        size = self.ops.product_size
        half = self.s.seq * Count(self.s.head_dim // 2, "d/2")
        angles = self.ops.new(half, FLOAT32)
        cos = self.ops.new(half, size)
        sin = self.ops.new(half, size)
        del angles
        return cos, sin

    def _rotate(self, x: Shadow, turn: "Turn") -> Shadow:
        assert turn is not None
        ops, (cos, sin) = self.ops, turn
        elements = x.elements
        left, right = ops.halves(x, elements // 2)
        first = ops.scale(left, cos)
        first = ops.subtract(first, ops.scale(right, sin))
        second = ops.scale(right, cos)
        second = ops.add(second, ops.scale(left, sin))
        return ops.join(first, second, elements)

    # -- loss ---------------------------------------------------------------------------------------------------------

    def _loss(self, hidden: Shadow) -> Shadow:
        ops, s = self.ops, self.s
        if self.loss_chunks == 0:
            return self._whole_loss(self._linear(hidden, [self.lm_head, self.lm_head_bias], s.tokens * s.vocab))
        return custom.linear_cross_entropy(
            ops, hidden, self.lm_head, self.lm_head_bias, tokens=s.tokens, vocab=s.vocab, num_chunks=self.loss_chunks
        )

    def _whole_loss(self, logits: Shadow) -> Shadow:
        """``F.cross_entropy``: keeps the logarithms of all probabilities."""
        ops = self.ops
        logits = ops.cast(logits, FLOAT32)
        log_probabilities = ops.like(logits)
        size = (log_probabilities.elements, FLOAT32)
        ops.record(log_probabilities, ops._using([log_probabilities], lambda _: [ops.new(*size)]), [logits])
        out = ops.new(1, FLOAT32)
        return ops.record(out, ops._using([log_probabilities], lambda _: [ops.new(*size)]), [log_probabilities])


Turn = tuple[Shadow, Shadow] | None
