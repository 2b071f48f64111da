"""``ModelConfig.layers``: what some layers have in place of the model's options. No torch.

The config of a layer is that of the model with the layer's own options. So each is checked as a model would be in which
all layers are like it, and whoever builds or counts a layer needs to know nothing of the others.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

from lightning_llm.io.untrusted import field_name, shown
from lightning_llm.model import parts
from lightning_llm.model.parts import BUILT_IN, name_of

Config = Any  # a ``ModelConfig``, which imports this module

LAYER_OPTIONS = "attention", "mlp", "position", "qk_norm", "num_key_value_heads", "intermediate_size"  # of a layer
NOT_ROTATED: dict[str, Any] = {"partial_rotary_factor": 1.0, "rope_scaling": None}  # where a layer has no positions


def normalized_layers(layers: Any) -> Any:
    """The options of each layer, with parts in their shortest form. Malformed ones are returned as they are."""
    if not _is_list_of_options(layers):
        return layers
    return [
        {
            name: parts.normalized(parts.by_path(name, value)) if name in BUILT_IN else value
            for name, value in options.items()
        }
        for options in layers
    ]


def configs_of_layers(config: Config) -> list[Config]:
    """The config of each layer. Equal layers share one."""
    if config.layers is None:
        return [config] * config.num_hidden_layers
    configs: list[Config] = []
    for layer in range(config.num_hidden_layers):
        first = config.layers.index(config.layers[layer % len(config.layers)])  # that has the same options
        configs.append(_with_own(config, config.layers[first]) if first == layer else configs[first])
    return configs


def layer_form_problems(layers: Any) -> Iterator[str]:
    """Why a normalized value of a config has no options of layers."""
    if layers is None:
        return
    if not _is_list_of_options(layers):
        yield f"layers must be null, or a list with the options of each layer, got {shown(layers)}"
        return
    for index, options in enumerate(layers):
        for name, value in options.items():
            if name not in LAYER_OPTIONS:
                yield f"layers[{index}] has {field_name(name)}, which no layer has: give {', '.join(LAYER_OPTIONS)}"
            elif name in BUILT_IN:
                yield from parts.form_problems(f"layers[{index}].{name}", value)


def layer_problems(config: Config) -> Iterator[str]:
    """Problems with the layers of a config that is sound otherwise."""
    if config.layers is None:
        return
    if len(config.layers) > config.num_hidden_layers:
        given = f"layers has the options of {len(config.layers)} layers"
        yield f"{given}, num_hidden_layers is {config.num_hidden_layers}"
        return
    for index, options in enumerate(config.layers):
        if (position := options.get("position", "none")) not in ("none", config.position):
            own = name_of(config.position)
            yield f"layers[{index}].position must be none, or the model's {own}, got {shown(position)}"
            return
        try:
            _with_own(config, options)
        except ValueError as error:
            yield f"layers[{index}]: {error}"
            return
    attentions = {(name_of(each.attention), each.num_key_value_heads) for each in config.layer_configs}
    for name in sorted({name for name, _ in attentions} & {*BUILT_IN["attention"]}):
        if BUILT_IN["attention"][name].needs_all_layers and len(attentions) > 1:
            yield f"attention {name!r} uses what the first layer leaves: give it to all layers, with as many heads"


def _with_own(config: Config, options: dict[str, Any]) -> Config:
    """The model's config with the options of a layer."""
    is_without = config.position != "none" and options.get("position") == "none"
    return dataclasses.replace(config, layers=None, **(NOT_ROTATED if is_without else {}), **options)


def _is_list_of_options(layers: Any) -> bool:
    return isinstance(layers, list) and {*map(type, layers)} == {dict}
