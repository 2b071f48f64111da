"""What the accounting knows of the parts of a model, one entry for each; whatever has none is measured.

An entry says what a part allocates and saves for backward (the operators of ``symbolic_ops.py`` that it calls, in its
order), how many parameters and matrices it has, from which its FLOPs follow, and its passes over memory. Attention,
positions and the loss are listed by name only: ``symbolic_model.py`` calls their operators, and those of blocks, whose
norms are in ``BUILT_IN``. What has no entry is measured by ``training/measured_parts.py``, as any class of the user's.
"""

import dataclasses
from collections.abc import Callable, Mapping

from lightning_llm.accounting.settings import Measured
from lightning_llm.accounting.symbolic import Count
from lightning_llm.accounting.symbolic import SymbolicTensor as Tensor
from lightning_llm.accounting.symbolic_ops import Linear, Operators, Shape
from lightning_llm.model.config import ModelConfig
from lightning_llm.model.parts import BUILT_IN, NO_NORMS, Norms, name_of, option_of


@dataclasses.dataclass(frozen=True)
class NormCost:
    """A norm of the residual stream.

    Attributes:
        vectors: Its parameters, each as wide as the stream.
        run: From operators, input, parameters and rows to its output.
        passes: Reads and writes of a tensor of the stream's size, in forward and in backward.
    """

    vectors: int
    run: Callable[[Operators, Tensor, list[Tensor], Count], Tensor]
    passes: tuple[int, int] = (2, 3)  # read x, write y; read dy and x, write dx


KNOWN_NORMS = {
    "rmsnorm": NormCost(1, lambda ops, x, weights, rows: ops.rms_norm(x, weights[0], rows)),
    "layernorm": NormCost(2, lambda ops, x, weights, rows: ops.fused_norm(x, weights, rows, statistics=2)),
}

MLP_MATRICES = ("gate_proj", "up_proj", "down_proj")
MLPWeights = Mapping[str, Linear]  # by the names of the matrices


@dataclasses.dataclass(frozen=True)
class MLPCost:
    """A dense MLP, or a mixture of such.

    Attributes:
        run: From operators, input, weights, (tokens, hidden, width), level and the norm's weight to its output; a norm
            only at level 2. ``None``: its memory is measured.
        passes: Reads and writes of a tensor of the intermediate width, in forward and in backward.
        is_one_operator: Recomputed to its end, where others stop before the last matmul.
    """

    run: Callable[[Operators, Tensor, MLPWeights, Shape, int, Tensor | None], Tensor] | None
    passes: tuple[int, int]
    is_one_operator: bool = False


GATED = 3, 5  # forward: read g and u, write a; backward: read da, g, u, write dg, du
PLAIN = 2, 3


def _gated(ops: Operators, x: Tensor, weights: MLPWeights, shape: Shape, level: int, norm: Tensor | None) -> Tensor:
    tokens, hidden, width = shape
    gate = ops.activation(ops.linear(x, weights["gate_proj"], tokens * width))
    inner = ops.multiply(gate, ops.linear(x, weights["up_proj"], tokens * width))
    del gate
    return ops.linear(inner, weights["down_proj"], tokens * hidden)


def _plain(*saves_output: bool) -> MLPCost:
    """An MLP with activations one after another, each of which saves its output or else its input."""

    def run(ops: Operators, x: Tensor, weights: MLPWeights, shape: Shape, level: int, norm: Tensor | None) -> Tensor:
        tokens, hidden, width = shape
        inner = ops.linear(x, weights["up_proj"], tokens * width)
        for saves in saves_output:
            inner = ops.activation(inner, saves_output=saves)
        return ops.linear(inner, weights["down_proj"], tokens * hidden)

    return MLPCost(run, PLAIN)


def _optimized(ops: Operators, x: Tensor, weights: MLPWeights, shape: Shape, level: int, norm: Tensor | None) -> Tensor:
    gate, up, down = (weights[name][0] for name in MLP_MATRICES)
    return ops.swiglu(x, (gate, up, down, norm), shape, saves=level == 0)


KNOWN_MLPS = {
    "swiglu": MLPCost(_gated, GATED),
    "geglu": MLPCost(_gated, GATED),
    "memory_optimized_swiglu": MLPCost(_optimized, GATED, is_one_operator=True),
    "mixture_of_experts": MLPCost(None, GATED),
    "gelu": _plain(False),
    "gelu_tanh": _plain(False),
    "relu": _plain(True),
    "relu2": _plain(True, False),
}

KNOWN = {
    "attention": ("full", "sliding_window"),
    "mlp": tuple(KNOWN_MLPS),
    "norm": tuple(KNOWN_NORMS),
    "position": ("rope", "learned", "none"),
    "block": tuple(name for name, block in BUILT_IN["block"].items() if block.norms != NO_NORMS),
    "loss": ("cross_entropy",),
}
IN_LAYERS = ("block", "attention", "mlp")


@dataclasses.dataclass(frozen=True)
class LayerGroup:
    """Layers of a model that are alike.

    Attributes:
        config: Of these layers.
        indices: Of these layers in the model.
        prefix: Of their parts among those that are measured, such as ``layers[1].``.
    """

    config: ModelConfig
    indices: list[int]
    prefix: str = ""

    @property
    def letter(self) -> str:
        """What their number is called in formulas: L, or L with their first one where there are others."""
        return f"L{self.indices[0] + 1}" if self.prefix else "L"

    def measurements(self, of_model: Measured) -> Measured:
        """What was measured of their parts, by kind."""
        if not self.prefix:
            return of_model
        own = {kind: of_model[self.prefix + kind] for kind in IN_LAYERS if self.prefix + kind in of_model}
        return {kind: part for kind, part in of_model.items() if kind in BUILT_IN and kind not in IN_LAYERS} | own


def layer_groups(config: ModelConfig) -> list[LayerGroup]:
    """The layers of a model, by their configs; equal ones where the config has no ``layers``."""
    if config.layers is None:
        return [LayerGroup(config, list(range(config.num_hidden_layers)))]
    groups: dict[int, LayerGroup] = {}
    for layer, of_layer in enumerate(config.layer_configs):
        groups.setdefault(id(of_layer), LayerGroup(of_layer, [], f"layers[{layer}].")).indices.append(layer)
    return list(groups.values())


def norms_of_block(config: ModelConfig) -> Norms:
    """The names of a block's norms, by place; none of an unlisted one, which is measured with its norms."""
    built_in = BUILT_IN["block"].get(name_of(config.block))
    return NO_NORMS if built_in is None else built_in.norms


def unlisted_parts(config: ModelConfig) -> dict[str, str]:
    """The parts of a model without an entry, by kind, and their names: own ones, and new built-in ones."""
    names = {kind: name_of(getattr(config, kind)) for kind in BUILT_IN}
    return {kind: name for kind, name in names.items() if name not in KNOWN[kind]}


def parts_to_measure(config: ModelConfig) -> dict[str, str]:
    """The parts of a model whose memory has to be measured, by kind, and their names.

    An unlisted block is measured as a whole. Unlisted positions change what attention does. Where layers differ, their
    parts have the prefix of :class:`LayerGroup`.
    """
    if config.layers is not None:
        of_model = {kind: name for kind, name in unlisted_parts(config).items() if kind not in IN_LAYERS}
        return of_model | {
            group.prefix + kind: name
            for group in layer_groups(config)
            for kind, name in parts_to_measure(group.config).items()
            if kind in IN_LAYERS
        }
    names = {kind: name_of(getattr(config, kind)) for kind in BUILT_IN}
    kinds = set(unlisted_parts(config))
    if "mlp" not in kinds and KNOWN_MLPS[names["mlp"]].run is None:
        kinds.add("mlp")
    if "position" in kinds or option_of("attention", config.attention, "softcap") is not None:
        kinds.add("attention")
    if "block" in kinds:
        kinds -= {"attention", "mlp"}
    return {kind: names[kind] for kind in BUILT_IN if kind in kinds}
