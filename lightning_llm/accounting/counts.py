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
from collections.abc import Mapping
from types import MappingProxyType

from lightning_llm.model.config import ModelConfig
from lightning_llm.model.parts import BUILT_IN, name_of, option_of

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


MLP_MATRICES = ("gate_proj", "up_proj", "down_proj")
NORMS_OF_A_BLOCK = {"pre": 2, "post": 2, "sandwich": 4}
# The parts whose parameters the formulas know. All others are measured, built in or not.
KNOWN = {
    "attention": ("full", "sliding_window"),
    "mlp": (
        *("swiglu", "memory_optimized_swiglu", "geglu", "mixture_of_experts"),
        *("gelu", "gelu_tanh", "relu", "relu2"),
    ),
    "norm": ("rmsnorm", "layernorm"),
    "position": ("rope", "learned", "none"),
    "block": tuple(NORMS_OF_A_BLOCK),
    "loss": ("cross_entropy",),
}


class Count(int):
    """A number of elements and the product it came from, such as ``B·T·h``."""

    formula: str

    def __new__(cls, value: int, formula: str = "") -> "Count":
        """``formula`` is how it is written; a bare number by default."""
        made = super().__new__(cls, value)
        made.formula = formula or str(value)
        return made

    def __mul__(self, other: int) -> "Count":
        if other == 1 and not isinstance(other, Count):
            return self
        return Count(int(self) * int(other), f"{self.formula}·{getattr(other, 'formula', other)}")


LONGEST_MEASURED = 1280  # tokens of a row in which attention is measured: more than twice those of a short attention
Growth = tuple[float, float, float]  # a fixed amount, one per token, and one per token and position of its row


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeasuredPart:
    """What was measured of a part that the formulas do not know, for one layer: the second, if there are several.

    Attributes:
        parameters: Number of elements.
        more_parameters: What the parameters of all layers have beyond equally many in each.
        matrices: Elements in two-dimensional parameters.
        flops: Of matmuls in forward.
        saved: Bytes saved for backward besides the input.
        forward: Bytes of temporaries in forward.
        backward: The same in backward.
        itemsize: Bytes of each number of the output.
    """

    parameters: int
    more_parameters: int
    matrices: int
    flops: Growth
    saved: Growth
    forward: Growth
    backward: Growth
    itemsize: int


Measured = Mapping[str, MeasuredPart]  # by the kind of part; "block" is all of a block
UNMEASURED: Measured = MappingProxyType({})


def unlisted_parts(config: ModelConfig) -> dict[str, str]:
    """The parts of a model that no formula describes, by kind, and their names: own ones, and new built-in ones."""
    names = {kind: name_of(getattr(config, kind)) for kind in BUILT_IN}
    return {kind: name for kind, name in names.items() if name not in KNOWN[kind]}


def parts_to_measure(config: ModelConfig) -> dict[str, str]:
    """The parts of a model whose memory the formulas do not know, by kind, and their names.

    An unlisted block is measured as a whole. Unlisted positions change what attention does.
    """
    names, unlisted = {kind: name_of(getattr(config, kind)) for kind in BUILT_IN}, unlisted_parts(config)
    kinds = {*unlisted, *(["mlp"] if names["mlp"] == "mixture_of_experts" else [])}
    if "position" in unlisted or option_of("attention", config.attention, "softcap") is not None:
        kinds.add("attention")
    if "block" in unlisted:
        kinds -= {"attention", "mlp"}
    return {kind: names[kind] for kind in BUILT_IN if kind in kinds}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
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
    def of(cls, config: ModelConfig, measured: Measured = UNMEASURED) -> "Sizes":
        """The sizes of a config.

        Raises:
            ValueError: The vocabulary is not known, or no formula describes a part and it was not measured.
        """
        if config.vocab_size is None:
            raise ValueError("vocab_size is null: give the number of token ids (--vocab-size)")
        for kind, name in unlisted_parts(config).items():
            if kind in parts_to_measure(config) and kind not in measured:
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

    def matrices(self) -> dict[str, tuple[Count, Count]]:
        """The linear layers of a block with built-in parts, each (out, in), in the order of the model.

        Of a mixture of experts, those of one expert.
        """
        hidden, wide = self.hidden, self.intermediate
        return {
            "q_proj": (self.queries, hidden),
            "k_proj": (self.keys, hidden),
            "v_proj": (self.keys, hidden),
            "o_proj": (hidden, self.queries),
            **({"gate_proj": (wide, hidden)} if self.is_gated else {}),
            "up_proj": (wide, hidden),
            "down_proj": (hidden, wide),
        }


def parameters_by_part(config: ModelConfig, measured: Measured = UNMEASURED) -> dict[str, int]:
    """The number of parameters of embeddings, attention, MLP, norms and head, summed over layers.

    A tied head has no parameters of its own but its bias. Those of a block of the user's own are ``blocks``, those of
    a loss ``loss``.

    Raises:
        ValueError: As in ``Sizes.of``.
    """
    return {part: sum(terms.values()) for part, terms in parameter_terms(config, measured).items()}


def parameter_terms(config: ModelConfig, measured: Measured = UNMEASURED) -> dict[str, dict[str, int]]:
    """The same, term by term: for each part the products that add up to it, written out, and their values."""
    s = Sizes.of(config, measured)
    layers, hidden, wide = s.layers, s.hidden, s.intermediate
    widening, experts = 2 if s.is_gated else 1, Count(s.experts or 1, "E")  # matrices; of a mixture
    own = {kind: _all_layers(kind, layers, measured[kind]) for kind in unlisted_parts(config) if kind in measured}
    has_attention, has_mlp = not own.keys() & {"attention", "block"}, not own.keys() & {"mlp", "block"}
    has_attention_bias, has_mlp_bias = has_attention and config.attention_bias, has_mlp and config.mlp_bias
    matrices, norms = layers * hidden * wide * (widening + 1), NORMS_OF_A_BLOCK.get(name_of(config.block), 0)
    rows = [
        ("embeddings", True, s.vocab * hidden),
        ("embeddings", config.position == "learned", s.positions * hidden),
        ("embeddings", "position" in own, own.get("position", Count(0))),
        ("attention", has_attention, layers * hidden * s.heads * s.head_dim * 2),  # q and o
        ("attention", has_attention, layers * hidden * s.kv_heads * s.head_dim * 2),  # k and v
        ("attention", has_attention_bias, layers * s.heads * s.head_dim),
        ("attention", has_attention_bias, layers * s.kv_heads * s.head_dim * 2),
        ("attention", has_attention_bias, layers * hidden),
        ("attention", "attention" in own, own.get("attention", Count(0))),
        ("mlp", has_mlp, matrices * experts if s.experts else matrices),
        ("mlp", has_mlp and s.experts is not None, layers * hidden * experts),
        ("mlp", has_mlp_bias, layers * wide * (widening * (s.experts or 1))),
        ("mlp", has_mlp_bias, layers * hidden * (s.experts or 1)),
        ("mlp", "mlp" in own, own.get("mlp", Count(0))),
        ("norms", "block" not in own, layers * norm_elements(config, measured) * norms),
        ("norms", True, norm_elements(config, measured)),
        ("norms", has_attention and config.qk_norm, layers * s.head_dim * 2),
        *([("blocks", True, own["block"])] if "block" in own else []),
        ("head", not config.tie_word_embeddings, s.vocab * hidden),
        ("head", config.lm_head_bias, s.vocab),
        *([("loss", True, own["loss"])] if "loss" in own else []),
    ]
    terms: dict[str, dict[str, int]] = {part: {} for part, _, _ in rows}
    for part, is_there, count in rows:
        if is_there:
            terms[part][count.formula] = int(count)
    return terms


def _all_layers(kind: str, layers: Count, part: MeasuredPart) -> Count:
    """The parameters of a measured part, in all layers if it is in each."""
    if kind not in ("attention", "mlp", "block"):
        return Count(part.parameters, "measured")
    return Count(layers * part.parameters + part.more_parameters, "measured")


def norm_elements(config: ModelConfig, measured: Measured = UNMEASURED) -> Count:
    """Parameters of a norm of the residual stream."""
    if "norm" in unlisted_parts(config):
        return Count(measured["norm"].parameters, "measured")
    hidden = Count(config.hidden_size, LETTERS["hidden"][1])
    return hidden * 2 if config.norm == "layernorm" else hidden  # weight and bias


def hidden_matrix_parameters(config: ModelConfig, measured: Measured = UNMEASURED) -> int:
    """Parameters of the matrices of attention and MLP: the group ``hidden_matrices`` of ``optim.param_groups``."""
    s, own = Sizes.of(config, measured), unlisted_parts(config)
    if "block" in own:
        return config.num_hidden_layers * measured["block"].matrices
    sizes: Counter[str] = Counter()
    for name, (out, into) in s.matrices().items():
        in_mlp = name in MLP_MATRICES
        sizes["mlp" if in_mlp else "attention"] += out * into * ((s.experts or 1) if in_mlp else 1)
    sizes["mlp"] += s.hidden * (s.experts or 0)
    sizes.update({kind: measured[kind].matrices - sizes[kind] for kind in ("attention", "mlp") if kind in own})
    return config.num_hidden_layers * sizes.total()


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
        """Forward and backward."""
        return self.forward + self.backward

    @property
    def hardware(self) -> int:
        """Including recomputation."""
        return self.model + self.recomputed


def step_flops(config: ModelConfig, *, tokens: int, context_length: int, measured: Measured = UNMEASURED) -> StepFlops:
    """The FLOPs of one optimizer step. A mixture of experts counts the experts that a token goes to.

    Args:
        config: ``vocab_size`` must be known.
        tokens: Of the step, summed over micro-batches.
        context_length: Tokens per row; attention is quadratic in it, or linear in a window.
        measured: Parts that the formulas do not know.

    Raises:
        ValueError: As in ``Sizes.of``.
    """
    s, levels, own = Sizes.of(config, measured), config.checkpoint_levels, unlisted_parts(config)
    kinds = Counter(zip(config.attention_windows, levels, strict=True))  # of layers
    layers = {kind: layer_flops(config, min(context_length, kind[0] or context_length), measured) for kind in kinds}

    def total(*names: str) -> int:
        return sum(count * sum(layers[kind][name] for name in names) for kind, count in kinds.items())

    by_part = {
        "attention_projections": total("qkv", "o"),
        "attention_scores": total("scores"),
        "mlp": total("mlp_in", "mlp_out"),
        "lm_head": 2 * s.hidden * s.vocab + (round(measured["loss"].flops[1]) if "loss" in own else 0),
    }
    by_part = {name: tokens * int(flops) for name, flops in by_part.items()}
    forward = sum(by_part.values())
    recomputed = tokens * sum(count * _recomputed(config, layers[kind], kind[1]) for kind, count in kinds.items())
    return StepFlops(forward=forward, backward=2 * forward, recomputed=recomputed, by_part=by_part)


def layer_flops(config: ModelConfig, reach: int, measured: Measured = UNMEASURED) -> dict[str, int]:
    """FLOPs of one block per token: ``qkv``, ``scores``, ``o``, ``mlp_in`` (gate and up) and ``mlp_out`` (down).

    Args:
        config: The model.
        reach: How many positions a token's attention computes scores for.
        measured: Parts that the formulas do not know. Those of a whole block count as attention.
    """
    s, own = Sizes.of(config, measured), unlisted_parts(config)
    flops = {name: 2 * int(out) * int(into) for name, (out, into) in s.matrices().items()}
    experts = s.top_k or 1  # of each token
    found = {
        "qkv": flops["q_proj"] + flops["k_proj"] + flops["v_proj"],
        "scores": 4 * reach * int(s.queries),  # Q Kᵀ and P V
        "o": flops["o_proj"],
        "mlp_in": experts * (flops["up_proj"] + flops.get("gate_proj", 0)) + 2 * int(s.hidden) * (s.experts or 0),
        "mlp_out": experts * flops["down_proj"],
    }
    if "mlp" in own or "block" in own:
        found |= {"mlp_in": round(measured["mlp"].flops[1]) if "block" not in own else 0, "mlp_out": 0}
    if "attention" in own or "block" in own:
        _, per_token, per_pair = measured["block" if "block" in own else "attention"].flops
        found |= {"qkv": round(per_token), "scores": round(reach * per_pair), "o": 0}
    return found


def _recomputed(config: ModelConfig, layer: dict[str, int], level: int) -> int:
    """What backward recomputes in one block.

    Checkpointing stops at the last tensor that backward needs, the input of ``down`` or of ``o``. The memory-optimized
    operator has no such place inside: it runs to its end.
    """
    block = config.recompute == "block"
    again = layer["mlp_in"] if level else 0  # inside the operator, also where the block around it is recomputed
    if block or config.recompute == "mlp":
        again += layer["mlp_in"] + (layer["mlp_out"] if config.mlp == "memory_optimized_swiglu" else 0)
    if block or config.recompute == "attention":
        again += layer["qkv"] + layer["scores"]
    return again + (layer["o"] if block else 0)  # the MLP comes after it
