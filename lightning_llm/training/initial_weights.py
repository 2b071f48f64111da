"""What a fresh run may begin with instead of random weights: a folder of ``transformers``, or a checkpoint of ours.

Weights only: step, optimiser and schedule begin anew. Tensors are read and copied one by one.
"""

import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer as Backend
from torch import Tensor, nn

from lightning_llm.checkpoints.compatibility import check_fits
from lightning_llm.checkpoints.reading import BEST, read_checkpoint, read_outline, step_files
from lightning_llm.checkpoints.schema import FORMAT, WEIGHTS
from lightning_llm.checkpoints.sharded import Rows, is_folder, local_rows
from lightning_llm.interop.reader import is_model_folder, read_folder
from lightning_llm.model.config import ModelConfig, config_of_file
from lightning_llm.model.finite import only_finite

PREFIX = "transformer."
# What a tokenizer.json says beyond the ids of a text: how much of it is used at once, and what is put around it.
AROUND_THE_TEXT = ("version", "truncation", "padding", "post_processor")


@dataclasses.dataclass(frozen=True)
class InitialWeights:
    """A model to begin with.

    Attributes:
        path: Where it lies.
        config: Its shape.
        tokenizer: Content of its ``tokenizer.json``, if it has one.
        tensors: Names and tensors, one at a time.
    """

    path: Path
    config: ModelConfig
    tokenizer: str | None
    tensors: Callable[[], Iterator[tuple[str, Tensor]]]

    def fill(self, transformer: nn.Module) -> None:
        """Give every parameter its value, in place; of sharded ones each process takes its rows.

        Raises:
            ValueError: Names do not agree, or weights are NaN or infinite.
        """
        parameters = dict(transformer.named_parameters(remove_duplicate=False))
        # a head that is the embedding may be saved with it or not
        missing = {name for name, parameter in transformer.named_parameters()}
        with torch.no_grad():
            for name, tensor in only_finite(self.tensors(), f"init_from {self.path}"):
                if name not in parameters:
                    raise ValueError(f"init_from {self.path}: unexpected tensor {name}")
                check_fits({"state_dict": {name: tensor}}, {name: parameters[name]}, f"of init_from {self.path}")
                start, rows = 0, parameters[name].detach()
                if hasattr(rows, "to_local"):
                    start, rows = local_rows(rows)
                rows.copy_(tensor[start : start + rows.shape[0]])
                missing.discard(name)
        if missing:
            raise ValueError(f"init_from {self.path}: missing tensors: {', '.join(sorted(missing))}")

    def tokenizer_fault(self, used: str | None) -> str:
        """What is wrong where the data were made by another tokenizer: ids would mean something else. Else empty."""
        if used is None or self.tokenizer is None or _ids(used) == _ids(self.tokenizer):
            return ""
        return (
            f"init_from {self.path}: its tokenizer is not that of the data, so that ids mean something else: "
            "lightning-llm prepare … --tokenizer takes its tokenizer.json"
        )


def read_initial_weights(given: str) -> InitialWeights:
    """What ``init_from`` names.

    Args:
        given: A folder with ``config.json``, a checkpoint, or a run directory (its best, else its newest).

    Raises:
        ValueError: It is nothing of these, or damaged.
    """
    path = Path(given)
    try:
        if is_model_folder(path):
            folder = read_folder(path)
            return InitialWeights(path, folder.config, folder.tokenizer, folder.tensors)
        path = _checkpoint_of(path)
        content = read_checkpoint(path, mmap=True, needs=WEIGHTS)
    except ValueError as error:
        raise ValueError(f"init_from {given}: {error}") from error
    state = {n.removeprefix(PREFIX): t for n, t in content["state_dict"].items() if n.startswith(PREFIX)}
    config = ModelConfig(**content["hyper_parameters"]["architecture"])
    return InitialWeights(path, config, content[FORMAT]["tokenizer"], lambda: _whole(state))


def check_trust(given: str) -> None:
    """Refuse a model that names code from outside this package, for ``fit`` on a machine that is not to run it.

    Args:
        given: As of :func:`read_initial_weights`. Its tensors are not read.

    Raises:
        ValueError: It names such code, or cannot be read.
    """
    if is_model_folder(Path(given)):
        return  # its format has no words for code
    try:
        saved = read_outline(_checkpoint_of(Path(given))).get("hyper_parameters", {}).get("architecture", {})
        config_of_file(saved, "it")
    except ValueError as error:
        raise ValueError(f"init_from {given}: {error}") from error


def _whole(state: dict[str, Tensor | Rows]) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in state.items():
        yield name, tensor.whole() if isinstance(tensor, Rows) else tensor


def _checkpoint_of(given: Path) -> Path:
    """A checkpoint, or the best, else the newest, of a run."""
    if not given.is_dir() or is_folder(given):
        return given
    folder = given / "checkpoints"
    found = [*step_files(folder), *([folder / BEST] if (folder / BEST).exists() else [])]
    if not found:
        raise ValueError("it holds neither config.json nor checkpoints: give a model's folder, a checkpoint or a run")
    return found[-1]


def _ids(tokenizer: str) -> dict[str, Any]:
    written_alike = Backend.from_str(tokenizer).to_str()  # versions of the library write the same differently
    return {part: content for part, content in json.loads(written_alike).items() if part not in AROUND_THE_TEXT}
