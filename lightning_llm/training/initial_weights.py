"""``model.init_from``: weights that a fresh run starts from, of a ``transformers`` folder or one of our checkpoints.

Weights only: step, optimizer and schedule start fresh. Tensors are read and copied one by one.
"""

import dataclasses
import hashlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning.pytorch.utilities import rank_zero_only
from tokenizers import Tokenizer as Backend
from torch import Tensor, nn

from lightning_llm.checkpoints.compatibility import architecture_differences, check_fits, free_fields
from lightning_llm.checkpoints.reading import read_checkpoint, read_outline
from lightning_llm.checkpoints.schema import FORMAT, WEIGHTS, trained_tokenizer
from lightning_llm.checkpoints.sharded import LazyShardedTensor, is_folder, local_rows
from lightning_llm.data.datamodule import data_attribute, tokenizer_of
from lightning_llm.data.tokenizers import Tokenizer
from lightning_llm.interop.reader import is_model_folder, read_folder
from lightning_llm.io.untrusted import prefixed
from lightning_llm.model.config import ModelConfig, config_of_file
from lightning_llm.model.weights import only_finite, with_vocab_rows
from lightning_llm.runs.directory import CHECKPOINTS
from lightning_llm.runs.find import checkpoint_in
from lightning_llm.training.callbacks.inputs import tensor_hash

PREFIX = "transformer."
# Parts of a tokenizer.json that leave the ids of a text as they are: truncation, and what is put around it.
AROUND_THE_TEXT = ("version", "truncation", "padding", "post_processor")


class InitialWeights(NamedTuple):
    """A model to start from.

    Attributes:
        path: Its file or folder.
        config: Its architecture.
        tokenizer: Content of its ``tokenizer.json``, if it has one.
        tensors: Names and tensors, one at a time.
    """

    path: Path
    config: ModelConfig
    tokenizer: str | None
    tensors: Callable[[], Iterator[tuple[str, Tensor]]]

    def fill(self, transformer: nn.Module) -> None:
        """Copy every parameter in place; each process takes its rows of sharded ones.

        Raises:
            ValueError: Names do not agree, or weights are NaN or infinite.
        """
        parameters = dict(transformer.named_parameters(remove_duplicate=False))
        # a head tied to the embedding may be saved or not
        missing = {name for name, parameter in transformer.named_parameters()}
        with torch.no_grad():
            for name, tensor in only_finite(self.tensors(), f"init_from {self.path}"):
                if name not in parameters:
                    raise ValueError(f"init_from {self.path}: unexpected tensor {name}")
                tensor = with_vocab_rows(name, tensor, parameters[name].shape[0])
                check_fits({"state_dict": {name: tensor}}, {name: parameters[name]}, f"of init_from {self.path}")
                rows = parameters[name].detach()
                start, rows = local_rows(rows) if hasattr(rows, "to_local") else (0, rows)
                rows.copy_(tensor[start : start + rows.shape[0]])
                missing.discard(name)
        if missing:
            raise ValueError(f"init_from {self.path}: missing tensors: {', '.join(sorted(missing))}")

    @property
    def fingerprint(self) -> str:
        """The SHA-256 of names and values of all tensors, whatever their file is called."""
        lines = sorted(f"{name} {tensor_hash(tensor)}\n" for name, tensor in self.tensors())
        return hashlib.sha256("".join(lines).encode()).hexdigest()

    def problem(self, wanted: ModelConfig, data: Any) -> str:
        """Why a model of another architecture, or with data of another tokenizer, cannot start from these weights."""
        problems = []
        if wanted.vocab_size is None:
            wanted = dataclasses.replace(wanted, vocab_size=data_attribute(data, "vocab_size"))
        if differences := architecture_differences(self.config, wanted, ignored=free_fields(wanted)):
            problems.append(f"init_from {self.path} has a different architecture: {'; '.join(differences)}")
        used = tokenizer_of(data)
        if used is not None and self.tokenizer is not None and not _are_alike(used.to_str(), self.tokenizer):
            problems.append(
                f"init_from {self.path}: its tokenizer is not that of the data, so that ids mean something else: "
                "lightning-llm prepare … --tokenizer takes its tokenizer.json"
            )
        return "; ".join(problems)


def read_initial_weights(source: str, log: Callable[[str], object] = lambda line: None) -> InitialWeights:
    """Read what ``init_from`` names.

    Args:
        source: A folder with ``config.json``, a checkpoint, or a run directory (its best, else its newest).
        log: Called with a line if another checkpoint is used in place of a damaged one.

    Raises:
        ValueError: It is none of these, or damaged.
    """
    path = Path(source)
    with prefixed(f"init_from {source}", ValueError):
        if is_model_folder(path):
            folder = read_folder(path)
            return InitialWeights(path, folder.config, folder.tokenizer, folder.tensors)
        path = _checkpoint_of(path, log)
        content = read_checkpoint(path, mmap=True, needs=WEIGHTS)

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in content["state_dict"].items():
            if name.startswith(PREFIX):
                yield name.removeprefix(PREFIX), tensor.whole() if isinstance(tensor, LazyShardedTensor) else tensor

    config = ModelConfig(**content["hyper_parameters"]["architecture"])
    return InitialWeights(path, config, trained_tokenizer(content[FORMAT]), tensors)


def start_from(source: str, model: Any) -> None:
    """Copy the weights that ``init_from`` names into a LanguageModel.

    Raises:
        ValueError: They are of another architecture (naming each field) or tokenizer, or cannot be read.
    """
    initial = read_initial_weights(source, _rank_zero_print)
    data = getattr(model.trainer, "datamodule", None)
    if problem := initial.problem(model.architecture, data):
        raise ValueError(problem)
    if initial.tokenizer is not None and (used := tokenizer_of(data)) is not None:
        before, now = (each.begin_of_text or "no token" for each in (Tokenizer.from_str(initial.tokenizer), used))
        if before != now:
            _rank_zero_print(
                f"init_from {source}: texts began with {before} in its training, and begin with {now} in the data; "
                "lightning-llm prepare --begin-of-text changes the data"
            )
    initial.fill(model.transformer)


def check_trust(source: str) -> None:
    """Refuse a model that names code from outside this package, which ``fit`` would run.

    Args:
        source: As in :func:`read_initial_weights`. Its tensors are not read.

    Raises:
        ValueError: It names such code, or cannot be read.
    """
    if is_model_folder(Path(source)):
        return  # its format cannot name code
    with prefixed(f"init_from {source}", ValueError):
        outline = read_outline(_checkpoint_of(Path(source)))
        config_of_file(outline.get("hyper_parameters", {}).get("architecture", {}), "it")


def _checkpoint_of(path: Path, log: Callable[[str], object] = lambda line: None) -> Path:
    """This checkpoint, or a run's best, else newest, that is intact."""
    if not path.is_dir() or is_folder(path):
        return path
    if not any((path / CHECKPOINTS).glob("*.ckpt")):
        raise ValueError("it has neither config.json nor checkpoints: give a model's folder, a checkpoint or a run")
    return checkpoint_in(path, log)


_rank_zero_print = rank_zero_only(lambda line: print(line, file=sys.stderr))


def _are_alike(tokenizer: str, other: str) -> bool:
    """Whether they give a text the same ids."""
    return tokenizer == other or _ids(tokenizer) == _ids(other)  # a large one takes seconds to parse


def _ids(tokenizer: str) -> dict[str, Any]:
    written_alike = Backend.from_str(tokenizer).to_str()  # versions of the library write the same differently
    return {part: content for part, content in json.loads(written_alike).items() if part not in AROUND_THE_TEXT}
