"""How the architectures of a checkpoint and of the model that loads it may differ."""

from typing import Any

from lightning_llm.checkpoints.checks import ARCHITECTURE, RESUME, check_fits, validate
from lightning_llm.checkpoints.loop_state import rescale_batch_progress
from lightning_llm.checkpoints.recipes import warn_without_recipe
from lightning_llm.model.config import ModelConfig
from lightning_llm.optim.groups import param_groups

# What may differ between a checkpoint and the model that loads it: the parameters and their meaning stay the same.
EXECUTION_FIELDS = frozenset({"checkpoint_level", "recompute", "dropout"})
SAME_PARAMETERS = ({"swiglu", "memory_optimized_swiglu"},)


def free_fields(architecture: ModelConfig) -> frozenset[str]:
    """What may differ between a model and the one whose weights it starts from."""
    # RoPE has no parameters: it serves any length
    length = {"max_position_embeddings"} if architecture.position == "rope" else set()
    return EXECUTION_FIELDS | {"initializer_range"} | length


def architecture_differences(
    saved: ModelConfig, wanted: ModelConfig, *, ignored: frozenset[str] = EXECUTION_FIELDS
) -> list[str]:
    """The fields that make two models' parameters differ in number, shape or meaning, each with both values."""
    differences = []
    for name, ours in wanted.to_dict().items():
        theirs = getattr(saved, name)
        if name in ignored or ours == theirs or (name == "vocab_size" and ours is None):
            continue
        if name == "mlp" and any({ours, theirs} <= same for same in SAME_PARAMETERS):
            continue
        differences.append(f"{name} is {theirs} there and {ours} here")
    return differences


def prepare_loading(checkpoint: dict[str, Any], model: Any) -> None:
    """Refuse a checkpoint that does not fit a ``LanguageModel``; adapt its counters to the run that resumes.

    Args:
        checkpoint: As Lightning is about to load it; changed in place.
        model: The LanguageModel, with its weights made.

    Raises:
        ValueError: It lacks something, or is of another architecture (naming every field that differs), or its weights
            or the optimizer state are of other shapes.
    """
    trainer = model._trainer
    is_fitting = trainer is not None and trainer.state.fn == "fit"
    if trainer is None:  # load_from_checkpoint: hyper_parameters hold the caller's arguments by now
        warn_without_recipe(checkpoint)
    else:
        needs = RESUME if is_fitting else (ARCHITECTURE,)
        validate(checkpoint, trainer.ckpt_path, needs, of_tensors=False)
    saved = ModelConfig(**checkpoint["hyper_parameters"]["architecture"])
    if differences := architecture_differences(saved, model.architecture):
        raise ValueError(f"the checkpoint is of another architecture: {'; '.join(differences)}")
    if trainer is not None and model.strict_loading:  # else torch compares them
        is_ours = type(model).configure_optimizers.__module__.startswith("lightning_llm.")  # else its order is unknown
        groups = param_groups(model) if is_fitting and is_ours else ()
        check_fits(checkpoint, model.state_dict(), trainer.ckpt_path, groups)
    if is_fitting:
        rescale_batch_progress(checkpoint, trainer.accumulate_grad_batches)
