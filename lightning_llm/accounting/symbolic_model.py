"""The model on symbolic tensors: ``model/transformer.py``, ``attention.py``, ``mlp.py``, and ``LanguageModel.loss``.

The same calls in the same order as there, so that what Python keeps alive by a name is alive here too.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from lightning_llm.accounting.counts import Count, MeasuredMLP, Sizes
from lightning_llm.accounting.symbolic import FLOAT32, INT64
from lightning_llm.accounting.symbolic import SymbolicTensor as Tensor
from lightning_llm.accounting.symbolic_ops import Operators
from lightning_llm.model.config import ModelConfig
from lightning_llm.ops.sizes import attention_form

EMBEDDING, NORMS, ATTENTION, MLP, RESIDUAL, LOSS = "embeddings", "norms", "attention", "mlp", "residual stream", "loss"

Function = Callable[[Tensor], Tensor]
CosSin = tuple[Tensor, Tensor] | None


class SymbolicModel:
    """Parameters of a model, and its loss on a micro-batch.

    Args:
        config: The model.
        ops: Device and precision.
        rows: Of the micro-batch.
        seq: Tokens per row.
        mlp: Of a class that the formulas do not know.
        documents: Whether attention stays inside documents. Each row counts as one document, which needs the most.

    Raises:
        ValueError: As in ``Sizes.of``, the context is too long for the model, or the attention is not covered.
    """

    def __init__(
        self, config: ModelConfig, ops: Operators, rows: int, seq: int, mlp: MeasuredMLP | None, *, documents: bool
    ) -> None:
        self.config, self.ops, self.measured_mlp, self.documents = config, ops, mlp, documents
        s = self.s = Sizes.of(config, mlp)
        if seq > s.positions:
            longer = f"context_length {seq} is more than max_position_embeddings {s.positions}"
            raise ValueError(f"{longer}: shorten one or lengthen the other")
        self.batch, self.seq = Count(rows, "B"), Count(seq, "T")
        self.tokens = self.batch * self.seq
        shape, mask = (int(s.head_dim), seq), "spans" if documents else "causal"
        self.form = attention_form(ops.device, ops.matmul_size, *shape, mask=mask, dropout=config.dropout)
        if self.form == "math":
            raise ValueError(f"head_dim {s.head_dim} is not estimated on {ops.device}: use a multiple of 8")
        self.parameters: list[Tensor] = []
        self.causal_mask: Tensor | None = None
        self.embed_tokens = self._parameter(s.vocab * s.hidden)
        if config.position == "learned":
            self.embed_positions = self._parameter(s.positions * s.hidden)
        self.layers = [self._layer() for _ in range(config.num_hidden_layers)]
        self.norm = self._norm()
        head = self.embed_tokens if config.tie_word_embeddings else self._parameter(s.vocab * s.hidden)
        self.lm_head = head, self._parameter(s.vocab) if config.lm_head_bias else None

    def loss(self, loss_chunks: int | None) -> Tensor:
        """One forward pass, to the scalar; ``loss_chunks`` as ``LanguageModel`` takes it."""
        ops, s = self.ops, self.s
        self._enter("embeddings", EMBEDDING)
        places = self.tokens if self.documents else self.seq
        positions = ops.new(places, INT64)
        self.spans = ops.new(places, INT64) if self.documents else None  # every layer saves them
        x = ops.embedding(self.embed_tokens, self.tokens * s.hidden)
        if self.config.position == "learned":
            x = ops.add(x, ops.embedding(self.embed_positions, places * s.hidden))
        x = ops.dropout(x, self.config.dropout)
        cos_sin = self._cos_sin(places)
        for layer in range(len(self.layers)):
            x = self._checkpointed("block", partial(self._block, layer, cos_sin), x)
        self._enter("final norm", NORMS)
        hidden = self._normalize(x, self.norm)
        del x, cos_sin, positions
        self._enter("loss", LOSS)
        if loss_chunks == 0:
            return ops.cross_entropy(self._logits(hidden))
        return ops.linear_cross_entropy(hidden, self.lm_head, self.tokens, s.vocab, loss_chunks)

    def _logits(self, hidden: Tensor) -> Tensor:
        logits = self.ops.linear(hidden, self.lm_head, self.tokens * self.s.vocab)
        if self.config.vocab_size in (None, self.config.vocab_rows):
            return logits
        return self.ops.apply(logits.view(self.tokens * self.config.vocab_size), [logits])

    # -- parameters ---------------------------------------------------------------------------------------------------

    def _parameter(self, elements: Count) -> Tensor:
        self.parameters.append(self.ops.parameter(elements))
        return self.parameters[-1]

    def _norm(self) -> list[Tensor]:
        return [self._parameter(self.s.hidden) for _ in range(2 if self.config.norm == "layernorm" else 1)]

    def _layer(self) -> dict[str, Any]:
        s, config, mlp = self.s, self.config, self.measured_mlp
        made: dict[str, Any] = {"input_layernorm": self._norm(), "post_attention_layernorm": self._norm()}
        for name, (out, into) in s.matrices().items():
            in_mlp = name in ("gate_proj", "up_proj", "down_proj")
            has_bias = config.mlp_bias if in_mlp else config.attention_bias
            if mlp is None or not in_mlp:
                made[name] = self._parameter(out * into), self._parameter(out) if has_bias else None
        if config.qk_norm:
            made |= {"q_norm": [self._parameter(s.head_dim)], "k_norm": [self._parameter(s.head_dim)]}
        if mlp is not None:
            made["mlp"] = [self._parameter(Count(mlp.parameters))]
        return made

    # -- blocks -------------------------------------------------------------------------------------------------------

    def _enter(self, point: str, part: str) -> None:
        self.ops.log.enter(point, part)

    def _checkpointed(self, part: str, function: Function, x: Tensor) -> Tensor:
        return self.ops.checkpoint(function, x) if self.config.recompute == part else function(x)

    def _block(self, layer: int, cos_sin: CosSin, x: Tensor) -> Tensor:
        mixed = self._checkpointed("attention", partial(self._attention, layer, cos_sin), x)
        self._enter(f"layer {layer}, attention", RESIDUAL)
        x = self.ops.add(x, mixed)
        del mixed
        out = self._checkpointed("mlp", partial(self._mlp, layer), x)
        self._enter(f"layer {layer}, mlp", RESIDUAL)
        return self.ops.add(x, out)

    def _normalize(self, x: Tensor, weights: list[Tensor]) -> Tensor:
        if self.config.norm == "layernorm":
            return self.ops.fused_norm(x, weights, self.tokens, statistics=2)
        return self.ops.rms_norm(x, weights[0], self.tokens)

    def _mlp(self, layer: int, x: Tensor) -> Tensor:
        ops, s, own, kind = self.ops, self.s, self.layers[layer], self.config.mlp
        level, norm = self.config.checkpoint_levels[layer], own["post_attention_layernorm"]
        if level < 2:
            self._enter(f"layer {layer}, mlp", NORMS)
            x = self._normalize(x, norm)
        self._enter(f"layer {layer}, mlp", MLP)
        wide = self.tokens * s.intermediate
        if self.measured_mlp is not None:
            out = ops.measured_mlp(x, self.measured_mlp, own["mlp"][0], self.tokens)
        elif kind == "memory_optimized_swiglu":
            gate, up, down = (own[f"{name}_proj"][0] for name in ("gate", "up", "down"))
            weights = (gate, up, down, norm[0] if level == 2 else None)
            out = ops.swiglu(x, weights, (self.tokens, s.hidden, s.intermediate), saves=level == 0)
            del x
        else:
            if s.is_gated:
                gate = ops.activation(ops.linear(x, own["gate_proj"], wide))
                inner = ops.multiply(gate, ops.linear(x, own["up_proj"], wide))
                del gate
            else:
                inner = ops.activation(ops.linear(x, own["up_proj"], wide), saves_output=kind == "relu")
            out = ops.linear(inner, own["down_proj"], self.tokens * s.hidden)
            del inner
        return ops.dropout(out, self.config.dropout)

    # -- attention ----------------------------------------------------------------------------------------------------

    def _attention(self, layer: int, cos_sin: CosSin, x: Tensor) -> Tensor:
        ops, s, own = self.ops, self.s, self.layers[layer]
        self._enter(f"layer {layer}, attention", NORMS)
        x = self._normalize(x, own["input_layernorm"])
        self._enter(f"layer {layer}, attention", ATTENTION)
        query = ops.linear(x, own["q_proj"], self.tokens * s.heads * s.head_dim)
        key = ops.linear(x, own["k_proj"], self.tokens * s.kv_heads * s.head_dim)
        value = ops.linear(x, own["v_proj"], self.tokens * s.kv_heads * s.head_dim)
        if self.config.qk_norm:
            query = ops.rms_norm(query, own["q_norm"][0], self.tokens * s.heads)
            key = ops.rms_norm(key, own["k_norm"][0], self.tokens * s.kv_heads)
        if cos_sin is not None:
            query, key = self._rotate(query, *cos_sin), self._rotate(key, *cos_sin)
        if self.form == "short":
            mixed = self._short_attention(query, key, value, is_contiguous=cos_sin is not None)
        elif self.form == "spans":
            mixed = self._span_attention(query, key, value, is_contiguous=cos_sin is not None)
        else:
            if self.form == "efficient" and s.heads > s.kv_heads:
                whole = self.tokens * s.heads * s.head_dim
                key, value = ops.repeat(key, whole), ops.repeat(value, whole)
            mixed = ops.flash_attention(query, key, value, self.tokens * s.heads)
        del query, key, value
        if s.heads > 1 and (self.form in ("short", "spans") or cos_sin is not None):
            mixed = ops.copy(mixed)  # transpose and flatten; free where the built-in attention got strided queries
        out = ops.linear(mixed, own["o_proj"], self.tokens * s.hidden)
        del x, mixed
        return ops.dropout(out, self.config.dropout)

    def _short_attention(self, query: Tensor, key: Tensor, value: Tensor, *, is_contiguous: bool) -> Tensor:
        ops, s = self.ops, self.s
        is_grouped, is_strided = s.heads > s.kv_heads, s.heads > 1 and self.batch > 1
        if is_grouped:
            whole = self.tokens * s.heads * s.head_dim
            key, value = ops.repeat(key, whole), ops.repeat(value, whole)
        if self.causal_mask is None:
            self.causal_mask = ops.new(self.seq * self.seq, query.itemsize)
        if is_strided and not is_contiguous:
            query, key = ops.copy(query), key if is_grouped else ops.copy(key)
        if is_strided and not is_grouped:
            value = ops.copy(value)
        out = ops.causal_attention(query, key, value, (self.batch * s.heads, self.seq, s.head_dim))
        return ops.copy_gradient(out) if is_strided else out

    def _span_attention(self, query: Tensor, key: Tensor, value: Tensor, *, is_contiguous: bool) -> Tensor:
        ops, s = self.ops, self.s
        if not is_contiguous:
            query, key = ops.copy(query) if s.heads > 1 else query, ops.copy(key) if s.kv_heads > 1 else key
        value = ops.copy(value) if s.kv_heads > 1 else value
        return ops.span_attention(query, key, value, (self.batch, s.heads, self.seq, s.kv_heads, s.head_dim))

    def _cos_sin(self, places: Count) -> CosSin:
        if self.config.position != "rope":
            return None
        half = places * Count(self.s.head_dim // 2, "d/2")
        _angles = self.ops.new(half, FLOAT32)
        return self.ops.new(half, self.ops.matmul_size), self.ops.new(half, self.ops.matmul_size)

    def _rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ops, elements = self.ops, x.elements
        left, right = ops.halves(x, elements // 2)
        first = ops.scale(left, cos)
        first = ops.subtract(first, ops.scale(right, sin))
        second = ops.scale(right, cos)
        second = ops.add(second, ops.scale(left, sin))
        return ops.join(first, second, elements)
