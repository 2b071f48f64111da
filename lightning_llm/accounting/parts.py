"""Entries of known parts for the formulas of parameters, FLOPs and time; parts without an entry are measured.

An MLP's or a norm's entry has its passes over memory; its matrices follow from the config. The other kinds are listed
by name only. What has no entry is measured by ``accounting/measured_parts.py``, as any class of the user's. Memory
needs no entry: it is traced.
"""

import dataclasses

from lightning_llm.accounting.step_settings import Measured
from lightning_llm.model.config import ModelConfig
from lightning_llm.model.parts import BUILT_IN, NO_NORMS, Norms, name_of


@dataclasses.dataclass(frozen=True)
class NormCost:
    """A norm of the residual stream.

    Attributes:
        vectors: Its parameters, each as wide as the stream.
        passes: Reads and writes of a tensor of the stream's size, in forward and in backward.
    """

    vectors: int
    passes: tuple[int, int] = (2, 3)  # read x, write y; read dy and x, write dx


@dataclasses.dataclass(frozen=True)
class MLPCost:
    """A dense MLP, or a mixture of such.

    Attributes:
        passes: Reads and writes of a tensor of the intermediate width, in forward and in backward.
        is_one_operator: Recomputed to its end, where others stop before the last matmul.
    """

    passes: tuple[int, int]
    is_one_operator: bool = False


KNOWN_NORMS = {"rmsnorm": NormCost(1), "layernorm": NormCost(2)}
GATED = MLPCost((3, 5))  # forward: read g and u, write a; backward: read da, g, u, write dg, du
PLAIN = MLPCost((2, 3))
KNOWN_MLPS = {
    "swiglu": GATED,
    "geglu": GATED,
    "memory_optimized_swiglu": dataclasses.replace(GATED, is_one_operator=True),
    "mixture_of_experts": GATED,
    "gelu": PLAIN,
    "gelu_tanh": PLAIN,
    "relu": PLAIN,
    "relu2": PLAIN,
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
        """Symbol for their number in formulas: L, or L with the number of their first one where there are others."""
        return f"L{self.indices[0] + 1}" if self.prefix else "L"

    def measurements(self, of_model: Measured) -> Measured:
        """Measurements of their parts, by kind."""
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
    """The parts of a model that no formula describes, by kind, and their names.

    An unlisted block is measured as a whole. Where layers differ, their parts have the prefix of :class:`LayerGroup`.
    """
    if config.layers is not None:
        of_model = {kind: name for kind, name in unlisted_parts(config).items() if kind not in IN_LAYERS}
        return of_model | {
            group.prefix + kind: name
            for group in layer_groups(config)
            for kind, name in parts_to_measure(group.config).items()
            if kind in IN_LAYERS
        }
    found = unlisted_parts(config)
    return {kind: name for kind, name in found.items() if "block" not in found or kind not in ("attention", "mlp")}
