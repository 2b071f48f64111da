"""Scales of the initial weights, by the role of a matrix: a difference in scale is a change of its own.

A role is a kind of part, and whether the layer writes to the residual stream. Its scale is the root mean square over
all elements of its matrices: of the assigned standard deviation where ``weights.py`` draws the values, else of the
values themselves. So two models that draw alike have exactly the same scales, whatever their layers are called.
"""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn

from lightning_llm.accounting.parts import layer_groups
from lightning_llm.model.block import Block
from lightning_llm.model.build import build
from lightning_llm.model.config import ModelConfig
from lightning_llm.model.initial_values import RULE, InitialRule
from lightning_llm.model.weights import assigned_stds, initialize, kept_names, residual_paths
from lightning_llm.statistics.pairing import KEPT
from lightning_llm.statistics.pairing import RESIDUAL as WRITES
from lightning_llm.statistics.scales import Scale

RESIDUAL = " output"
LAYER_KINDS = {"self_attn": "attention", "mlp": "MLP"}
HOW = {
    "declared": "its class declares that",
    "output": "the part returns its output",
    "name": "by its name",
    "none": "none is declared, returned or known by its name",
}
MOST_NAMES = 5
OUTSIDE_BLOCKS = {"position": "embed_positions", "norm": "norm", "loss": "objective"}
KINDS = {"embed_tokens": "embedding", "lm_head": "head", "embed_positions": "position"}


def initial_scales(transformer: nn.Module, config: ModelConfig, *, is_loaded: bool = False) -> dict[str, Scale]:
    """The scale of each role of a transformer before its first step; shards are gathered, so all processes must ask.

    Args:
        transformer: With its initial values.
        config: Its shape.
        is_loaded: Whether the values are those of a file, so that none are drawn.
    """
    stds = {} if is_loaded else assigned_stds(transformer, config)
    return _by_role(_squares(transformer, stds, residual_paths(transformer), ""))


def one_of_each_kind(config: ModelConfig, seed: int) -> list[tuple[str, Block, int]]:
    """The first block of each kind, made on the CPU with its initial values: its path, itself, and how many there are.

    Raises:
        ValueError: A part cannot be made, or its initial values are not known: see ``model.initial_values``.
    """
    found = []
    for group in layer_groups(config):
        path = f"layers.{group.indices[0]}"
        block: Block = build("block", group.config, seed=seed, path=path, layer=group.indices[0], base=Block)
        initialize(block, group.config, seed, path)
        found.append((path, block, len(group.indices)))
    return found


def scales_of_blocks(blocks: Iterable[tuple[str, Block, int]], config: ModelConfig) -> dict[str, Scale]:
    """The scale of each role in the blocks of a model, before there is one; ``blocks``: :func:`one_of_each_kind`."""
    found: list[tuple[str, float, int]] = []
    for path, block, times in blocks:
        stds = assigned_stds(block, config, path)
        residual = residual_paths(block, path)
        found += [(role, times * square, times * n) for role, square, n in _squares(block, stds, residual, path)]
    return _by_role(found)


def rules_in_words(blocks: Iterable[tuple[str, Block, int]], config: ModelConfig, seed: int) -> list[str]:
    """A sentence for each custom part: what writes to the residual stream, and what its constructor set.

    Args:
        blocks: :func:`one_of_each_kind`.
        config: Of the model.
        seed: Of the initial values.

    Raises:
        ValueError: As :func:`one_of_each_kind`, for a part outside of the blocks.
    """
    roots = [(path, block) for path, block, _ in blocks]
    for kind, path in OUTSIDE_BLOCKS.items():
        if kind in config.custom_parts:
            size = config.hidden_size if kind == "norm" else None
            roots.append((path, build(kind, config, seed=seed, path=path, size=size)))
    found = ((path, getattr(part, RULE, None)) for root, top in roots for path, part in top.named_modules(prefix=root))
    return [_in_words(path, rule) for path, rule in found if rule is not None and rule.is_custom]


def _in_words(path: str, rule: InitialRule) -> str:
    writes = f"{', '.join(sorted(rule.residual)) or 'no layer'} writes to the residual stream ({HOW[rule.source]})"
    kept = ", ".join(sorted(rule.kept)[:MOST_NAMES]) + ", …" * (len(rule.kept) > MOST_NAMES)
    return f"{path}: {writes}; {f'its constructor set {kept}' if kept else 'the table sets all weights'}"


def scales_of_table(scales: Mapping[str, Scale], config: ModelConfig) -> dict[str, Scale]:
    """The scale that the table gives to each of these roles."""
    residual_std = config.initializer_range / math.sqrt(2 * config.num_hidden_layers)
    return {
        role: Scale(residual_std if role.endswith(RESIDUAL) else config.initializer_range, scale.elements)
        for role, scale in scales.items()
    }


def initial_rules(transformer: nn.Module) -> dict[str, str]:
    """By name of a parameter, ``kept`` where its constructor set it, and ``residual`` where it starts smaller."""
    residual = residual_paths(transformer)
    rules = {name: WRITES for name, _ in transformer.named_parameters() if name.rpartition(".")[0] in residual}
    return rules | dict.fromkeys(kept_names(transformer), KEPT)


def _squares(
    module: nn.Module, stds: Mapping[str, float], residual: Collection[str], name: str
) -> Iterator[tuple[str, float, int]]:
    """The role of each matrix, the sum of its squares, and the number of its elements."""
    for path, parameter in module.named_parameters(name):
        if parameter.dim() < 2:
            continue
        role = _role(path, is_residual=path.rpartition(".")[0] in residual)
        square = stds[path] ** 2 * parameter.numel() if path in stds else _square(parameter)
        yield role, square, parameter.numel()


def _role(path: str, *, is_residual: bool) -> str:
    words = path.split(".")
    kind = LAYER_KINDS.get(words[2], "block") if words[0] == "layers" else KINDS.get(words[0], words[0])
    return f"{kind}{RESIDUAL if is_residual else ''}"


def _square(parameter: Tensor) -> float:
    whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
    return float(whole.detach().to(torch.float32).square().sum(dtype=torch.float64))


def _by_role(squares: Iterable[tuple[str, float, int]]) -> dict[str, Scale]:
    sums: dict[str, tuple[float, int]] = {}
    for role, square, elements in squares:
        total, count = sums.get(role, (0.0, 0))
        sums[role] = total + square, count + elements
    return {role: Scale(math.sqrt(total / count), count) for role, (total, count) in sums.items() if count}
