"""How RoPE may be stretched beyond the context of pre-training: the options of each way, and their checks. No torch.

``position.py`` has the stretched periods.
"""

import math
from collections.abc import Iterator
from typing import Any

from lightning_llm.io.untrusted import shown
from lightning_llm.model.parts import is_positive

# The options of each way, by Hugging Face's names: those that it needs, those that it may have.
ROPE_SCALINGS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "linear": (("factor",), ()),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"), ()),
    "yarn": (
        ("factor", "original_max_position_embeddings"),
        ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    ),
}
_ASCENDING = {"llama3": ("low_freq_factor", "high_freq_factor"), "yarn": ("beta_slow", "beta_fast")}


def scaling_problems(scaling: dict[str, Any]) -> Iterator[str]:
    """Problems with ``ModelConfig.rope_scaling``."""
    rope_type = scaling.get("rope_type")
    if not isinstance(rope_type, str) or rope_type not in ROPE_SCALINGS:
        choices = f"choose one of {', '.join(ROPE_SCALINGS)}, or leave rope_scaling out"
        yield f"rope_scaling.rope_type {shown(rope_type)} is not supported: {choices}"
        return
    needed, optional = ROPE_SCALINGS[rope_type]
    options = set(scaling) - {"rope_type"}
    problems = [f"rope_scaling of type {rope_type} lacks {name}" for name in needed if name not in options]
    unknown = sorted(shown(str(name))[1:-1] for name in options - {*needed, *optional})
    problems += [f"rope_scaling.{name} is unknown to type {rope_type}" for name in unknown]
    numbers = sorted(options & {*needed, *optional} - {"truncate"})
    wrong = [name for name in numbers if not is_positive(scaling[name])]
    problems += [f"rope_scaling.{name} must be a number above 0, got {shown(scaling[name])}" for name in wrong]
    if not isinstance(truncate := scaling.get("truncate", True), bool):
        problems.append(f"rope_scaling.truncate must be true or false, got {shown(truncate)}")
    low, high = _ASCENDING.get(rope_type, ("", ""))
    if not problems and {low, high} <= options and not scaling[low] < scaling[high]:
        problems.append(f"rope_scaling.{low} {scaling[low]} must be below {high} {scaling[high]}")
    yield from problems


def attention_factor(scaling: dict[str, Any]) -> float:
    """Factor of ``yarn`` for cosines and sines, and so, squared, for the scores; 1 for others.

    Peng et al. 2023, "YaRN", arXiv:2309.00071, section 3.4.
    """

    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1 if factor > 1 else 1.0

    if scaling["rope_type"] != "yarn":
        return 1.0
    factor = float(scaling["factor"])
    if (explicit := scaling.get("attention_factor")) is not None:
        return float(explicit)
    above, below = scaling.get("mscale"), scaling.get("mscale_all_dim")
    return mscale(above) / mscale(below) if above and below else mscale(1)
