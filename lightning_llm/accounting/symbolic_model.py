"""The model on symbolic tensors: transformer, block, attention, MLP, position and loss of ``model/``.

The same calls in the same order as there, so that what Python keeps alive by a name is alive here too.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

from lightning_llm.accounting import parts
from lightning_llm.accounting.counts import Dimensions
from lightning_llm.accounting.settings import LONGEST_MEASURED, Affine, Measured, MeasuredPart, StepSettings
from lightning_llm.accounting.symbolic import FLOAT32, INT64, Count, Gradients
from lightning_llm.accounting.symbolic import SymbolicTensor as Tensor
from lightning_llm.accounting.symbolic_ops import Operators
from lightning_llm.model.config import ModelConfig
from lightning_llm.model.parts import name_of
from lightning_llm.ops.sizes import ATTENTION_ROWS, attention_form

ROOTS = ("position", "loss")
EMBEDDING, NORMS, ATTENTION, MLP, RESIDUAL, LOSS = "embeddings", "norms", "attention", "mlp", "residual stream", "loss"

Function = Callable[[Tensor], Tensor]
CosSin = tuple[Tensor, Tensor] | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layer:
    """A layer's config, sizes and parts that are measured, its weights, and the window and form of its attention."""

    index: int
    config: ModelConfig
    dimensions: Dimensions
    measurements: Measured
    weights: dict[str, Any]
    window: int | None
    form: str


class SymbolicModel:
    """Parameters of a model, and its loss on a micro-batch.

    Args:
        config: The model.
        ops: Device and precision.
        settings: Of the step. With ``document_mask`` each row counts as one document, which needs the most.

    Raises:
        ValueError: As in ``Dimensions.of``, the context is too long for the model, or the attention is not covered.
    """

    def __init__(self, config: ModelConfig, ops: Operators, settings: StepSettings) -> None:
        self.config, self.ops, self.settings = config, ops, settings
        self._enter = ops.log.enter
        measured, to_measure = settings.measured, parts.parts_to_measure(config)
        if missing := [f"{kind} {name!r}" for kind, name in to_measure.items() if kind not in measured]:
            raise ValueError(f"{', '.join(missing)}: the memory cannot be computed from the config, only measured")
        self.measurements = {kind: measured[kind] for kind in to_measure if kind not in parts.IN_LAYERS}
        s = self.s = Dimensions.of(config, measured)
        self.batch, self.seq = Count(settings.rows, "B"), Count(settings.context_length, "T")
        if self.seq > s.positions:
            longer = f"context_length {int(self.seq)} is more than max_position_embeddings {s.positions}"
            raise ValueError(f"{longer}: shorten one or lengthen the other")
        self.tokens = self.batch * self.seq
        self.parameters: list[Tensor] = []
        self.causal_mask: Tensor | None = None
        self.embed_tokens = self._parameter(s.vocab * s.hidden)
        if config.position == "learned":
            self.embed_positions = self._parameter(s.positions * s.hidden)
        self.roots = self._measured_weights(self.measurements, *ROOTS)
        groups = {index: group for group in parts.layer_groups(config) for index in group.indices}
        self.layers = [
            self._layer(index, groups[index], window) for index, window in enumerate(config.attention_windows)
        ]
        self.norm = self._norm()
        head = self.embed_tokens if config.tie_word_embeddings else self._parameter(s.vocab * s.hidden)
        self.lm_head = head, self._parameter(s.vocab) if config.lm_head_bias else None

    def loss(self) -> Tensor:
        """One forward pass, to the scalar."""
        ops, s, documents = self.ops, self.s, self.settings.document_mask
        self._enter("embeddings", EMBEDDING)
        num_positions = self.tokens if documents else self.seq
        positions = ops.new(num_positions, INT64)
        self.spans = ops.new(num_positions, INT64) if documents else None  # every layer saves them
        x = ops.embedding(self.embed_tokens, self.tokens * s.hidden)
        if self.config.position == "learned":
            x = ops.add(x, ops.embedding(self.embed_positions, num_positions * s.hidden))
        if "position" in self.measurements:
            x = self._apply("position", self.measurements["position"], x, self.roots["position"])
        x = ops.dropout(x, self.config.dropout)
        cos_sin = self._cos_sin(num_positions)
        for layer in self.layers:
            x = self._checkpointed("block", partial(self._block, layer, cos_sin), x)
        self._enter("final norm", NORMS)
        hidden = self._normalize(x, self.norm)
        del x, cos_sin, positions
        self._enter("loss", LOSS)
        if "loss" in self.measurements:
            return self._apply(
                "loss", self.measurements["loss"], hidden, [*self.roots["loss"], *filter(None, self.lm_head)]
            )
        if self.settings.loss_chunks == 0:
            return ops.cross_entropy(self._logits(hidden))
        return ops.linear_cross_entropy(hidden, self.lm_head, self.tokens, s.vocab, self.settings.loss_chunks)

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
        if "norm" in self.measurements:
            return [self._parameter(Count(self.measurements["norm"].parameters))]
        return [self._parameter(self.s.hidden) for _ in range(parts.KNOWN_NORMS[name_of(self.config.norm)].vectors)]

    def _measured_weights(self, measured: Measured, *kinds: str) -> dict[str, list[Tensor]]:
        """One parameter for all of each measured part."""
        return {kind: [self._parameter(Count(part.parameters))] for kind, part in measured.items() if kind in kinds}

    def _layer(self, index: int, group: parts.LayerGroup, window: int | None) -> Layer:
        config, measured = group.config, group.measurements(self.settings.measured)
        measured = {kind: measured[kind] for kind in parts.parts_to_measure(config)}
        dimensions = Dimensions.of(config, measured)
        return Layer(
            index=index,
            config=config,
            dimensions=dimensions,
            measurements=measured,
            weights=self._weights(config, dimensions, measured),
            window=window,
            form=self._attention_form(window, measured),
        )

    def _weights(self, config: ModelConfig, s: Dimensions, measured: Measured) -> dict[str, Any]:
        """Of a layer, by name."""
        weights: dict[str, Any] = self._measured_weights(measured, *parts.IN_LAYERS)
        if "block" in measured:
            return weights
        names = [name for names in parts.norms_of_block(config).values() for name in names if name is not None]
        weights |= {name: self._norm() for name in names}
        has_bias = {"attention": config.attention_bias, "mlp": config.mlp_bias}
        for kind, shapes in s.matrices().items():
            if kind not in measured:
                for name, (out, into) in shapes.items():
                    weights[name] = self._parameter(out * into), self._parameter(out) if has_bias[kind] else None
        if config.qk_norm and "attention" not in measured:
            weights |= {"q_norm": [self._parameter(s.head_dim)], "k_norm": [self._parameter(s.head_dim)]}
        return weights

    # -- blocks -------------------------------------------------------------------------------------------------------

    def _checkpointed(self, part: str, function: Function, x: Tensor) -> Tensor:
        return self.ops.checkpoint(function, x) if self.config.recompute == part else function(x)

    def _apply(
        self, kind: str, part: MeasuredPart, x: Tensor, weights: list[Tensor], window: int | None = None
    ) -> Tensor:
        """A part known by measurement alone; ``window``: of its attention."""
        ops = self.ops
        tokens, shapes = int(self.tokens), [y.size for y in (x, *weights)]
        reach = self.seq if window is None else max(LONGEST_MEASURED, window - 1 + ATTENTION_ROWS)

        def size(measure: Affine) -> int:
            fixed, per_token, per_pair = measure
            return max(0, round(fixed + tokens * (per_token + min(int(self.seq), reach) * per_pair)))

        saved = ops.new(size(part.saved), 1)
        ops.scratch((size(part.forward), 1))

        def backward(dy: Tensor, held: list[Tensor]) -> Gradients:
            gradients: Gradients = [ops.new(*shape) for shape in shapes]
            ops.scratch((size(part.backward), 1))
            return gradients

        elements = 1 if kind == "loss" else x.elements
        return ops.apply(ops.new(elements, part.itemsize), [x, *weights], [x, saved], backward)

    def _block(self, layer: Layer, cos_sin: CosSin, x: Tensor) -> Tensor:
        weights = layer.weights
        if "block" in layer.measurements:
            self._enter("attention", ATTENTION, layer.index)
            return self._apply("block", layer.measurements["block"], x, weights["block"])
        after_attention, after_mlp = parts.norms_of_block(self.config)["sums"]
        mixed = self._checkpointed("attention", partial(self._attention, layer, cos_sin), x)
        self._enter("attention", RESIDUAL, layer.index)
        x = self.ops.add(x, mixed)
        del mixed
        x = self._normed(after_attention, x, weights)
        out = self._checkpointed("mlp", partial(self._mlp, layer), x)
        self._enter("mlp", RESIDUAL, layer.index)
        x = self.ops.add(x, out)
        del out
        return self._normed(after_mlp, x, weights)

    def _normed(self, name: str | None, x: Tensor, weights: dict[str, Any]) -> Tensor:
        return x if name is None else self._normalize(x, weights[name])

    def _normalize(self, x: Tensor, weights: list[Tensor]) -> Tensor:
        if "norm" in self.measurements:
            return self._apply("norm", self.measurements["norm"], x, weights)
        return parts.KNOWN_NORMS[name_of(self.config.norm)].run(self.ops, x, weights, self.tokens)

    def _mlp(self, layer: Layer, x: Tensor) -> Tensor:
        config, weights, s = layer.config, layer.weights, layer.dimensions
        level = config.checkpoint_levels[layer.index]
        before, after = parts.norms_of_block(config)["mlp"]
        if before is not None and level < 2:
            self._enter("mlp", NORMS, layer.index)
            x = self._normalize(x, weights[before])
        self._enter("mlp", MLP, layer.index)
        run = None if "mlp" in layer.measurements else parts.KNOWN_MLPS[name_of(config.mlp)].run
        if run is None:
            out = self._apply("mlp", layer.measurements["mlp"], x, weights["mlp"])
        else:
            norm = None if before is None or level < 2 else weights[before][0]
            out = run(self.ops, x, weights, (self.tokens, s.hidden, s.intermediate), level, norm)
        del x
        return self.ops.dropout(self._normed(after, out, weights), config.dropout)

    # -- attention ----------------------------------------------------------------------------------------------------

    def _attention_form(self, window: int | None, measured: Measured) -> str:
        """Which attention runs, in layers with this window."""
        config, ops, head_dim = self.config, self.ops, int(self.s.head_dim)
        if {"attention", "block"} & measured.keys():
            return "measured"
        is_window = window is not None and window < self.seq
        if is_window and config.dropout:
            raise ValueError("attention 'sliding_window' with dropout is not covered by the estimate: set dropout to 0")
        mask = "spans" if self.settings.document_mask or is_window else "causal"
        form = attention_form(ops.device, ops.matmul_size, head_dim, self.seq, mask=mask, dropout=config.dropout)
        if form == "math":
            raise ValueError(f"head_dim {head_dim} is not estimated on {ops.device}: use a multiple of 8")
        return form

    def _attention(self, layer: Layer, cos_sin: CosSin, x: Tensor) -> Tensor:
        weights = layer.weights
        before, after = parts.norms_of_block(self.config)["attention"]
        if before is not None:
            self._enter("attention", NORMS, layer.index)
            x = self._normalize(x, weights[before])
        self._enter("attention", ATTENTION, layer.index)
        if "attention" in layer.measurements:
            out = self._apply("attention", layer.measurements["attention"], x, weights["attention"], layer.window)
        else:
            out = self._self_attention(layer, cos_sin if layer.config.position == "rope" else None, x)
        del x
        return self.ops.dropout(self._normed(after, out, weights), self.config.dropout)

    def _self_attention(self, layer: Layer, cos_sin: CosSin, x: Tensor) -> Tensor:
        ops, s, weights, window, form = self.ops, layer.dimensions, layer.weights, layer.window, layer.form
        query = ops.linear(x, weights["q_proj"], self.tokens * s.heads * s.head_dim)
        key = ops.linear(x, weights["k_proj"], self.tokens * s.kv_heads * s.head_dim)
        value = ops.linear(x, weights["v_proj"], self.tokens * s.kv_heads * s.head_dim)
        if layer.config.qk_norm:
            query = ops.rms_norm(query, weights["q_norm"][0], self.tokens * s.heads)
            key = ops.rms_norm(key, weights["k_norm"][0], self.tokens * s.kv_heads)
        if cos_sin is not None:
            query, key = ops.rotate(query, *cos_sin), ops.rotate(key, *cos_sin)
        if form == "short":
            mixed = self._short_attention(s, query, key, value, is_contiguous=cos_sin is not None)
        elif form == "spans":
            mixed = self._span_attention(s, query, key, value, window, is_contiguous=cos_sin is not None)
        else:
            if form == "efficient" and s.heads > s.kv_heads:
                elements = self.tokens * s.heads * s.head_dim
                key, value = ops.repeat(key, elements), ops.repeat(value, elements)
            mixed = ops.flash_attention(query, key, value, self.tokens * s.heads)
        del query, key, value
        if s.heads > 1 and (form in ("short", "spans") or cos_sin is not None):
            mixed = ops.copy(mixed)  # transpose and flatten; free where the built-in attention got strided queries
        return ops.linear(mixed, weights["o_proj"], self.tokens * s.hidden)

    def _short_attention(
        self, s: Dimensions, query: Tensor, key: Tensor, value: Tensor, *, is_contiguous: bool
    ) -> Tensor:
        ops = self.ops
        is_grouped, is_strided = s.heads > s.kv_heads, s.heads > 1 and self.batch > 1
        if is_grouped:
            elements = self.tokens * s.heads * s.head_dim
            key, value = ops.repeat(key, elements), ops.repeat(value, elements)
        if self.causal_mask is None:
            self.causal_mask = ops.new(self.seq * self.seq, query.itemsize)
        if is_strided and not is_contiguous:
            query = ops.copy(query)
        if is_strided and not is_grouped:
            key = key if is_contiguous else ops.copy(key)
            value = ops.copy(value)
        out = ops.causal_attention(query, key, value, (self.batch * s.heads, self.seq, s.head_dim))
        return ops.copy_gradient(out) if is_strided else out

    def _span_attention(
        self, s: Dimensions, query: Tensor, key: Tensor, value: Tensor, window: int | None, *, is_contiguous: bool
    ) -> Tensor:
        ops = self.ops
        if s.heads > 1 and not is_contiguous:
            query = ops.copy(query)
        if s.kv_heads > 1:
            key = key if is_contiguous else ops.copy(key)
            value = ops.copy(value)
        return ops.span_attention(query, key, value, (self.batch, s.heads, self.seq, s.kv_heads, s.head_dim), window)

    def _cos_sin(self, count: Count) -> CosSin:
        if self.config.position != "rope":
            return None
        half = count * Count(self.config.rotary_dim // 2, "d/2" if self.config.partial_rotary_factor == 1 else "r/2")
        _angles = self.ops.new(half, FLOAT32)
        return self.ops.new(half, self.ops.matmul_size), self.ops.new(half, self.ops.matmul_size)
