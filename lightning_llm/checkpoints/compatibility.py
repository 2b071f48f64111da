"""How the architectures of a checkpoint and of the model that loads it may differ."""

from collections.abc import Iterable, Mapping
from typing import Any

from lightning_llm.checkpoints.checks import ARCHITECTURE, RESUME, check_fits, validate
from lightning_llm.model.config import ModelConfig

# What may differ between a checkpoint and the model that loads it: the parameters and their meaning stay the same.
EXECUTION_FIELDS = frozenset({"checkpoint_level", "recompute", "dropout"})
SAME_PARAMETERS = ({"swiglu", "memory_optimized_swiglu"},)


def free_fields(architecture: ModelConfig) -> frozenset[str]:
    """What may differ between a model and the one whose weights it begins with."""
    # a rotation has no parameters: it goes on as far as it is asked to
    length = {"max_position_embeddings"} if architecture.position == "rope" else set()
    return EXECUTION_FIELDS | {"initializer_range"} | length


def architecture_differences(
    saved: ModelConfig, wanted: ModelConfig, *, ignored: frozenset[str] = EXECUTION_FIELDS
) -> list[str]:
    """The fields that make two models' parameters differ in number, shape or meaning, as ``name saved -> wanted``."""
    differences = []
    for name, ours in wanted.to_dict().items():
        theirs = getattr(saved, name)
        if name in ignored or ours == theirs or (name == "vocab_size" and ours is None):
            continue
        if name == "mlp" and any({ours, theirs} <= same for same in SAME_PARAMETERS):
            continue
        differences.append(f"{name} is {theirs} there and {ours} here")
    return differences


def check_loaded(checkpoint: Mapping[str, Any], model: Any, groups: Iterable[dict[str, Any]]) -> None:
    """Refuse what Lightning is about to load into a ``LanguageModel``.

    Args:
        checkpoint: All of it.
        model: The LanguageModel, with its weights made.
        groups: Of its optimizer's parameters, if their order is known.

    Raises:
        ValueError: It lacks something, or is of another architecture (naming every field that differs), or its weights
            or the optimizer state are of other shapes.
    """
    trainer = model._trainer
    if trainer is not None:  # else it holds the caller's arguments by now
        needs = RESUME if trainer.state.fn == "fit" else (ARCHITECTURE,)
        validate(checkpoint, trainer.ckpt_path, needs, of_tensors=False)
    saved = ModelConfig(**checkpoint["hyper_parameters"]["architecture"])
    if differences := architecture_differences(saved, model.architecture):
        raise ValueError(f"the checkpoint is of another architecture: {'; '.join(differences)}")
    if trainer is not None and model.strict_loading:  # else torch compares them
        check_fits(checkpoint, model.state_dict(), trainer.ckpt_path, groups)
