"""How the architectures of a checkpoint and of the model that loads it may differ."""

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
