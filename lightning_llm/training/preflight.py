"""What can be known to be wrong before the first step. All faults are found before any is reported."""

from collections.abc import Iterable

from lightning_llm.data.datamodule import TokenDataModule
from lightning_llm.model.config import ModelConfig


def data_faults(architecture: ModelConfig, data: TokenDataModule) -> list[str]:
    """Where model and data do not fit together."""
    faults = []
    longest = architecture.max_position_embeddings
    if data.context_length > longest:
        faults.append(
            f"data.context_length {data.context_length} is longer than architecture.max_position_embeddings {longest}: "
            "shorten the one or raise the other"
        )
    if architecture.vocab_size is not None and architecture.vocab_size < data.vocab_size:
        faults.append(
            f"architecture.vocab_size {architecture.vocab_size} is smaller than the {data.vocab_size} ids of the token "
            "store: leave it at null to take the store's"
        )
    return faults


def refuse(faults: Iterable[str]) -> None:
    """Raise a ``ValueError`` that lists all faults, if there are any."""
    listed = list(faults)
    if listed:
        raise ValueError("; ".join(listed))
