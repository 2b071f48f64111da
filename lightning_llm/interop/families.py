"""Where a model lives in ``transformers``: which class computes the same, its fields, the names of its tensors.

===================  ==============================  ==================================================================
class                a model with                    its tensors
===================  ==============================  ==================================================================
LlamaForCausalLM     rmsnorm, rope, SwiGLU           ours behind ``model.``, but for ``lm_head``
Qwen3ForCausalLM     the same with ``qk_norm``       the same
GPT2LMHeadModel      layernorm, learned positions,   ``(in, out)`` in place of ``(out, in)``; q, k and v in one, biases
                     GELU (both forms) or ReLU       always: zeros where we have none
===================  ==============================  ==================================================================
"""

from lightning_llm.interop.family import Family
from lightning_llm.interop.gpt2 import GPT2
from lightning_llm.interop.llama import LLAMA, QWEN3
from lightning_llm.io.untrusted import shown
from lightning_llm.model.config import ModelConfig

FAMILIES: tuple[Family, ...] = (LLAMA, QWEN3, GPT2())


def home_of(config: ModelConfig) -> Family:
    """The family that computes what a model of this config computes.

    Raises:
        ValueError: There is none; with all reasons of the families that come nearest.
    """
    refusals = [(family, family.refusals(config)) for family in FAMILIES]
    fewest = min(len(reasons) for _, reasons in refusals)
    nearest = [(family, reasons) for family, reasons in refusals if len(reasons) == fewest]
    if not fewest:
        return nearest[0][0]
    words = " | ".join(f"{family.architecture} cannot have {'; '.join(reasons)}" for family, reasons in nearest)
    raise ValueError(f"no class of transformers computes what this model does: {words}")


def family_of(content: dict[str, object]) -> Family:
    """The family that a ``config.json`` names.

    Raises:
        ValueError: It names none, or another.
    """
    known = ", ".join(f"{family.architecture} ({family.model_type})" for family in FAMILIES)
    kind, classes = content.get("model_type"), content.get("architectures")
    for family in FAMILIES:
        if kind == family.model_type and (not classes or classes == [family.architecture]):
            return family
    if kind is None and classes is None:
        raise ValueError(f"it has neither model_type nor architectures; the supported ones are {known}")
    found = f"model_type {shown(kind)} with architectures {shown(classes)}"
    raise ValueError(f"{found} is not supported; there are {known}")
