"""Parameters and FLOPs of a model from its config, and the sizes that all formulas are written in.

A size is a ``Count``: a number that remembers the product it came from, which gives the formulas of ``--explain``. The
letters are those of ``docs/accounting.md``: V vocabulary, h hidden, i intermediate, H heads, K key and value heads, d
width of a head, P positions, L layers.

FLOPs are those of matrix multiplications, 2 m k n each. Elementwise work, norms, softmax and the embedding's lookup are
bound by bandwidth and not counted. Attention counts all pairs of positions, the masked ones too, as Chowdhery et al.
2022 ("PaLM", appendix B) do for the utilization they define. Backward takes two matmuls for each one in forward.
``model`` FLOPs are what the math asks for; ``hardware`` FLOPs add what is recomputed to save memory. Utilization by the
first (MFU) says how fast the run is, by the second (HFU) how busy the device is.
"""

import dataclasses
from collections import Counter

from lightning_llm.accounting import parts
from lightning_llm.accounting.parts import LayerGroup, layer_groups, unlisted_parts
from lightning_llm.accounting.step_settings import UNMEASURED, Measured, MeasuredPart
from lightning_llm.model.config import ModelConfig
from lightning_llm.model.parts import name_of, option_of


class Count(int):
    """A number of elements and the product it came from, such as ``V·h``."""

    formula: str

    def __new__(cls, value: int, formula: str = "") -> "Count":
        """``formula`` is how it is written; a bare number by default."""
        count = super().__new__(cls, value)
        count.formula = formula or str(value)
        return count

    def __mul__(self, other: int) -> "Count":
        if other == 1 and not isinstance(other, Count):
            return self
        return Count(int(self) * int(other), f"{self.formula}·{getattr(other, 'formula', other)}")


LETTERS = {  # of each size: its field in the config, and how it is written
    "vocab": ("vocab_rows", "V"),
    "hidden": ("hidden_size", "h"),
    "intermediate": ("intermediate_size", "i"),
    "heads": ("num_attention_heads", "H"),
    "kv_heads": ("num_key_value_heads", "K"),
    "head_dim": ("head_dim", "d"),
    "positions": ("max_position_embeddings", "P"),
    "layers": ("num_hidden_layers", "L"),
}
PARTS = ("embeddings", "attention", "mlp", "norms", "blocks", "head", "loss")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dimensions:
    """All sizes of a model that formulas are written in."""

    vocab: Count
    hidden: Count
    intermediate: Count
    heads: Count
    kv_heads: Count
    head_dim: Count
    positions: Count
    layers: Count
    is_gated: bool
    experts: int | None
    top_k: int | None

    @classmethod
    def of(cls, config: ModelConfig, measured: Measured = UNMEASURED) -> "Dimensions":
        """The sizes of a config.

        Raises:
            ValueError: The vocabulary is not known, or no formula describes a part and it was not measured.
        """
        if config.vocab_size is None:
            raise ValueError("vocab_size is null: give the number of token ids (--vocab-size)")
        for kind, name in unlisted_parts(config).items():
            if kind in parts.parts_to_measure(config) and kind not in measured:
                raise ValueError(f"{kind} {name!r} has no formula: its cost can only be measured")
        sizes = {name: Count(getattr(config, field), letter) for name, (field, letter) in LETTERS.items()}
        experts, top_k = (option_of("mlp", config.mlp, name) for name in ("num_experts", "top_k"))
        return cls(**sizes, is_gated=config.is_gated, experts=experts, top_k=top_k)

    @property
    def queries(self) -> Count:
        """Width of all query heads."""
        return self.heads * self.head_dim

    @property
    def keys(self) -> Count:
        """Width of all key heads."""
        return self.kv_heads * self.head_dim

    def matrices(self) -> dict[str, dict[str, tuple[Count, Count]]]:
        """The linear layers of a block with built-in parts, by part, each (out, in), in the order of the model.

        Of a mixture of experts, those of one expert.
        """
        hidden, wide = self.hidden, self.intermediate
        return {
            "attention": {
                "q_proj": (self.queries, hidden),
                "k_proj": (self.keys, hidden),
                "v_proj": (self.keys, hidden),
                "o_proj": (hidden, self.queries),
            },
            "mlp": {
                **({"gate_proj": (wide, hidden)} if self.is_gated else {}),
                "up_proj": (wide, hidden),
                "down_proj": (hidden, wide),
            },
        }


def parameters_by_part(config: ModelConfig, measured: Measured = UNMEASURED) -> dict[str, int]:
    """The number of parameters of embeddings, attention, MLP, norms and head, summed over layers.

    A tied head has no parameters of its own but its bias. Those of a block of the user's own are ``blocks``, those of
    a loss ``loss``.

    Raises:
        ValueError: As in ``Dimensions.of``.
    """
    return {part: sum(terms.values()) for part, terms in parameter_terms(config, measured).items()}


def parameter_terms(config: ModelConfig, measured: Measured = UNMEASURED) -> dict[str, dict[str, int]]:
    """The same, term by term: for each part the products that add up to it, written out, and their values."""
    s = Dimensions.of(config, measured)
    unlisted = unlisted_parts(config)
    terms: dict[str, list[Count]] = {part: [] for part in PARTS}
    terms["embeddings"].append(s.vocab * s.hidden)
    if config.position == "learned":
        terms["embeddings"].append(s.positions * s.hidden)
    if "position" in unlisted:
        terms["embeddings"].append(Count(measured["position"].parameters, "measured"))
    for group in layer_groups(config):
        for part, of_layers in _layer_terms(group, group.measurements(measured)).items():
            terms[part] += of_layers
    terms["norms"].append(norm_elements(config, measured))
    if not config.tie_word_embeddings:
        terms["head"].append(s.vocab * s.hidden)
    if config.lm_head_bias:
        terms["head"].append(s.vocab)
    if "loss" in unlisted:
        terms["loss"].append(Count(measured["loss"].parameters, "measured"))
    shown = {part: counts for part, counts in terms.items() if counts or part not in ("blocks", "loss")}
    return {part: {count.formula: int(count) for count in counts} for part, counts in shown.items()}


def _layer_terms(group: LayerGroup, measured: Measured) -> dict[str, list[Count]]:
    """The parameters of all layers of a group, by part."""
    config = group.config
    unlisted = unlisted_parts(group.config)
    s = dataclasses.replace(Dimensions.of(config, measured), layers=Count(len(group.indices), group.letter))

    def all_layers(kind: str) -> list[Count]:
        part = measured[kind]
        return [Count(s.layers * part.parameters + part.more_parameters, "measured")]

    terms: dict[str, list[Count]] = {"attention": [], "mlp": [], "norms": [], "blocks": []}
    if "block" in unlisted:
        return {**terms, "blocks": all_layers("block")}
    count = sum(name is not None for names in parts.norms_of_block(config).values() for name in names)
    terms["norms"] = [s.layers * norm_elements(config, measured) * count]
    if config.qk_norm and "attention" not in unlisted:
        terms["norms"].append(s.layers * s.head_dim * 2)
    terms["attention"] = all_layers("attention") if "attention" in unlisted else _attention_terms(config, s)
    terms["mlp"] = all_layers("mlp") if "mlp" in unlisted else _mlp_terms(config, s)
    return terms


def _attention_terms(config: ModelConfig, s: Dimensions) -> list[Count]:
    terms = [
        s.layers * s.hidden * s.heads * s.head_dim * 2,  # q and o
        s.layers * s.hidden * s.kv_heads * s.head_dim * 2,  # k and v
    ]
    if config.attention_bias:
        terms += [s.layers * s.heads * s.head_dim, s.layers * s.kv_heads * s.head_dim * 2, s.layers * s.hidden]
    return terms


def _mlp_terms(config: ModelConfig, s: Dimensions) -> list[Count]:
    widening = 2 if s.is_gated else 1  # matrices to the intermediate width
    terms = [s.layers * s.hidden * s.intermediate * (widening + 1)]
    if s.experts is not None:
        experts = Count(s.experts, "E")
        terms = [terms[0] * experts, s.layers * s.hidden * experts]  # and the router
    if config.mlp_bias:
        count = s.experts or 1
        terms += [s.layers * s.intermediate * (widening * count), s.layers * s.hidden * count]
    return terms


def block_elements(config: ModelConfig, measured: Measured = UNMEASURED) -> int:
    """Parameters of a block: the mean of layers that are alike, and the most of any such."""
    return max(
        sum(int(term) for terms in _layer_terms(group, group.measurements(measured)).values() for term in terms)
        // len(group.indices)
        for group in layer_groups(config)
    )


def norm_elements(config: ModelConfig, measured: Measured = UNMEASURED) -> Count:
    """Parameters of a norm of the residual stream."""
    if "norm" in unlisted_parts(config):
        return Count(measured["norm"].parameters, "measured")
    return Count(config.hidden_size, LETTERS["hidden"][1]) * parts.KNOWN_NORMS[name_of(config.norm)].vectors


def hidden_matrix_parameters(config: ModelConfig, measured: Measured = UNMEASURED) -> int:
    """Parameters of the matrices of attention and MLP: the group ``hidden_matrices`` of ``optim.param_groups``."""
    return sum(
        len(group.indices) * _matrix_parameters(group.config, group.measurements(measured))
        for group in layer_groups(config)
    )


def _matrix_parameters(config: ModelConfig, measured: Measured) -> int:
    """Elements of one layer's matrices."""
    s = Dimensions.of(config, measured)
    unlisted = unlisted_parts(config)
    if "block" in unlisted:
        return measured["block"].matrices
    sizes = {kind: sum(int(out * into) for out, into in shapes.values()) for kind, shapes in s.matrices().items()}
    if s.experts:
        sizes["mlp"] = sizes["mlp"] * s.experts + s.hidden * s.experts
    sizes |= {kind: measured[kind].matrices for kind in sizes if kind in unlisted}
    return sum(sizes.values())


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepFlops:
    """FLOPs of forward and backward over a number of tokens.

    Attributes:
        forward: Matmuls of the forward pass.
        backward: Twice as many.
        recomputed: What backward recomputes of forward.
        by_part: Forward's, split into ``attention_projections``, ``attention_scores``, ``mlp`` and ``lm_head``.
    """

    forward: int
    backward: int
    recomputed: int
    by_part: dict[str, int]

    @property
    def model(self) -> int:
        """FLOPs of forward and backward, without recomputation."""
        return self.forward + self.backward

    @property
    def hardware(self) -> int:
        """FLOPs of forward and backward, with recomputation."""
        return self.model + self.recomputed


def step_flops(config: ModelConfig, *, tokens: int, context_length: int, measured: Measured = UNMEASURED) -> StepFlops:
    """The FLOPs of one optimizer step. A mixture of experts counts the experts that a token goes to.

    Args:
        config: ``vocab_size`` must be known.
        tokens: Of the step, summed over micro-batches.
        context_length: Tokens per row; attention is quadratic in it, or linear in a window.
        measured: Parts that the formulas do not know.

    Raises:
        ValueError: As in ``Dimensions.of``.
    """
    s = Dimensions.of(config, measured)
    windows, levels = config.attention_windows, config.checkpoint_levels
    in_layers = Counter[str]()
    recomputed = 0
    for group in layer_groups(config):
        for (window, level), count in Counter((windows[layer], levels[layer]) for layer in group.indices).items():
            reach = min(context_length, window or context_length)
            flops = layer_flops(group.config, reach, group.measurements(measured))
            in_layers.update({name: count * number for name, number in flops.items()})
            recomputed += tokens * count * _recomputed(group.config, flops, level)
    by_part = {
        "attention_projections": in_layers["qkv"] + in_layers["o"],
        "attention_scores": in_layers["scores"],
        "mlp": in_layers["mlp_in"] + in_layers["mlp_out"],
        "lm_head": 2 * s.hidden * s.vocab,
    }
    if "loss" in unlisted_parts(config):
        by_part["lm_head"] = round(measured["loss"].flops[1])  # it calls the head
    by_part = {name: tokens * int(flops) for name, flops in by_part.items()}
    forward = sum(by_part.values())
    return StepFlops(forward=forward, backward=2 * forward, recomputed=recomputed, by_part=by_part)


def layer_flops(config: ModelConfig, reach: int, measured: Measured = UNMEASURED) -> dict[str, int]:
    """FLOPs of one block per token: ``qkv``, ``scores``, ``o``, ``mlp_in`` (gate and up) and ``mlp_out`` (down).

    Args:
        config: The model.
        reach: How many positions a token's attention computes scores for.
        measured: Parts that the formulas do not know. Those of a whole block count as attention.
    """
    s = Dimensions.of(config, measured)
    unlisted = unlisted_parts(config)
    matrices = {name: shape for shapes in s.matrices().values() for name, shape in shapes.items()}
    flops = {name: 2 * int(out) * int(into) for name, (out, into) in matrices.items()}
    experts = s.top_k or 1  # of each token
    per_token = {
        "qkv": flops["q_proj"] + flops["k_proj"] + flops["v_proj"],
        "scores": 4 * reach * int(s.queries),  # Q Kᵀ and P V
        "o": flops["o_proj"],
        "mlp_in": experts * (flops["up_proj"] + flops.get("gate_proj", 0)) + 2 * int(s.hidden) * (s.experts or 0),
        "mlp_out": experts * flops["down_proj"],
    }
    if "block" in unlisted:
        per_token |= {**_attention_flops(measured["block"], reach), "mlp_in": 0, "mlp_out": 0}
        return per_token
    if "mlp" in unlisted:
        per_token |= {"mlp_in": round(measured["mlp"].flops[1]), "mlp_out": 0}
    if "attention" in unlisted:
        per_token |= _attention_flops(measured["attention"], reach)
    return per_token


def _attention_flops(part: MeasuredPart, reach: int) -> dict[str, int]:
    _, per_token, per_pair = part.flops
    return {"qkv": round(per_token), "scores": round(reach * per_pair), "o": 0}


def _recomputed(config: ModelConfig, flops_of_layer: dict[str, int], level: int) -> int:
    """FLOPs that backward recomputes in one block.

    Checkpointing stops at the last tensor that backward needs, the input of ``down`` or of ``o``. The memory-optimized
    operator has no such place inside: it runs to its end.
    """
    is_block = config.recompute == "block"
    mlp = parts.KNOWN_MLPS.get(name_of(config.mlp))
    runs_to_end = mlp is not None and mlp.is_one_operator
    # inside the operator, also where the block around it is recomputed
    flops = flops_of_layer["mlp_in"] if level else 0
    if is_block or config.recompute == "mlp":
        flops += flops_of_layer["mlp_in"] + (flops_of_layer["mlp_out"] if runs_to_end else 0)
    if is_block or config.recompute == "attention":
        flops += flops_of_layer["qkv"] + flops_of_layer["scores"]
    return flops + (flops_of_layer["o"] if is_block else 0)  # the MLP comes after it
