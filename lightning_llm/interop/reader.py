"""A folder of ``transformers`` as a model of ours: its config checked field by field, its tensors one at a time."""

import dataclasses
import os
import re
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from lightning_llm.data.tokenizers import Tokenizer
from lightning_llm.interop import tokenizer_files
from lightning_llm.interop.families import family_of
from lightning_llm.interop.family import Family, Place
from lightning_llm.interop.fields import Fields
from lightning_llm.interop.weights import DTYPES, Weights
from lightning_llm.io.untrusted import file_in, read_json, shown
from lightning_llm.model.config import ModelConfig
from lightning_llm.model.transformer import Transformer
from lightning_llm.model.weights import only_finite

CONFIG = "config.json"
FIRST = "layers.0."
HEAD, EMBEDDING = "lm_head.weight", "embed_tokens.weight"
# Constants that older versions saved: the rotation, and GPT-2's causal mask.
CONSTANTS = re.compile(r"(.*\.)?(rotary_emb\.inv_freq|attn\.bias|attn\.masked_bias)")
SHOWN = 5

Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class ModelFolder:
    """A folder that was found sound.

    Attributes:
        path: The folder.
        config: The model.
        tokenizer: Content of its ``tokenizer.json``, if it has one.
        notes: What is not taken over and changes no logits.
    """

    path: Path
    config: ModelConfig
    tokenizer: str | None
    notes: list[str]
    _places: list[Place]
    _shapes: dict[str, Shape]
    _weights: Weights

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Name and tensor, one at a time, as ``Transformer`` calls them; the head where it is not the embedding."""
        for place in self._places:
            whole = self._weights.read(place.name)
            whole = whole.t() if place.transposed else whole
            rows = [self._shapes[name][0] for name in place.ours]
            for name, part in zip(place.ours, torch.split(whole, rows), strict=True):
                # memory of its own: a view of a file or of a larger tensor would be saved with all of it
                yield name, part.clone(memory_format=torch.contiguous_format)


def is_model_folder(path: Path) -> bool:
    """Whether a path is meant as such a folder, be it damaged."""
    return (path / CONFIG).is_file()


def read_folder(path: str | os.PathLike[str]) -> ModelFolder:
    """Check a folder; of its tensors only names and shapes are read.

    Args:
        path: With ``config.json``, the weights, and a ``tokenizer.json`` if there is a tokenizer.

    Raises:
        ValueError: It is no model, or one of a family that is not supported, or its config says what cannot be
            honoured (all such fields at once), or tensors are missing, unexpected, of a wrong shape or dtype, or a file
            is cut short, or the tokenizer has more ids than the embedding.
    """
    path = Path(path)
    content = _read_config(path)
    try:
        family = family_of(content)
        fields = Fields(content)
        config = _config(family, fields)
    except ValueError as error:
        raise ValueError(f"{path / CONFIG}: {error}") from error
    weights = Weights(path)
    _unify_names(weights, family)
    shapes = _shapes(config)
    if config.tie_word_embeddings:
        del shapes[HEAD]
    places = family.places(shapes)
    _check_tensors(path, weights, places, shapes, config)
    tokenizer = tokenizer_files.read_tokenizer(path)
    if tokenizer is not None:
        parsed = Tokenizer.from_file(path / tokenizer_files.FILE)  # names the file where it is none
        tokenizer_files.check_size(parsed, config)
        fields.notes += _end_of_text(content, parsed)
    return ModelFolder(path, config, tokenizer, fields.notes, places, shapes, weights)


def load_model(path: str | os.PathLike[str], device: str | torch.device = "cpu") -> tuple[Transformer, str | None]:
    """The model in a folder, in evaluation mode, and its tokenizer.

    Args:
        path: As :func:`read_folder`.
        device: Where the model goes.

    Returns:
        The model, and the content of its ``tokenizer.json``.

    Raises:
        ValueError: As :func:`read_folder`, or weights are NaN or infinite.
    """
    folder = read_folder(path)
    with torch.device("meta"):
        model = Transformer(folder.config)
    model.load_state_dict(
        dict(only_finite(folder.tensors(), path)), assign=True, strict=not folder.config.tie_word_embeddings
    )
    model.tie_weights()
    return model.to(device).eval(), folder.tokenizer


def _shapes(config: ModelConfig) -> dict[str, Shape]:
    """Names and shapes of all tensors. Layers are alike, so that one is made, and their number costs nothing."""
    with torch.device("meta"):
        state = Transformer(dataclasses.replace(config, num_hidden_layers=1)).state_dict()
    return {
        name.replace(FIRST, f"layers.{layer}."): tuple(tensor.shape)
        for name, tensor in state.items()
        for layer in range(config.num_hidden_layers if name.startswith(FIRST) else 1)
    }


def _read_config(path: Path) -> dict[str, object]:
    file = path / CONFIG
    if not path.is_dir():
        raise ValueError(f"{path} is no folder: give one with {CONFIG} and the weights")
    if not file.is_file():
        raise ValueError(f"{path} is no model: it has no {CONFIG}")
    return read_json(file_in(path, CONFIG))


def _config(family: Family, fields: Fields) -> ModelConfig:
    options = family.from_fields(fields)
    fields.finish()
    try:
        config = ModelConfig(**options)
    except ValueError as error:
        fields.faults.append(str(error))
    if fields.faults:
        raise ValueError("; ".join(fields.faults))
    return config


def _unify_names(weights: Weights, family: Family) -> None:
    """Folders of the model without its head, GPT-2's own among them, lack what stands in front of all names."""
    if not any(name.startswith(family.prefix) for name in weights.names):
        weights.rename(lambda name: name if name.startswith("lm_head.") else family.prefix + name)


def _check_tensors(
    path: Path, weights: Weights, places: list[Place], shapes: dict[str, Shape], config: ModelConfig
) -> None:
    wanted = {place.name: _shape_there(place, shapes) for place in places}
    ignored = {name for name in weights.names - wanted.keys() if CONSTANTS.fullmatch(name)}
    if config.tie_word_embeddings and HEAD in weights.names:
        ignored.add(HEAD)
        (embedding,) = (place.name for place in places if place.ours == (EMBEDDING,))
        if embedding in weights.names and not torch.equal(weights.read(HEAD), weights.read(embedding)):
            raise ValueError(f"{path}: {HEAD} differs from {embedding}, though tie_word_embeddings says they are one")
    faults = [
        f"{kind} {_listed(names)}"
        for kind, names in (
            ("missing tensors:", sorted(wanted.keys() - weights.names)),
            ("unexpected tensors:", sorted(weights.names - wanted.keys() - ignored)),
        )
        if names
    ]
    there = sorted(wanted.keys() & weights.names)
    wrong = [name for name in there if weights.shape(name) != wanted[name]]
    faults += [f"{name} is {weights.shape(name)}, config.json says {wanted[name]}" for name in wrong[:SHOWN]]
    dtypes = sorted({weights.dtype(name) for name in there})
    if any(dtype not in DTYPES.values() for dtype in dtypes):
        faults.append(f"tensors are of {', '.join(dtypes)}: only {', '.join(DTYPES.values())} are supported")
    elif len(dtypes) > 1:
        faults.append(f"tensors are of several dtypes ({', '.join(dtypes)}): save the model in one")
    if faults:
        raise ValueError(f"{path}: {'; '.join(faults)}")


def _shape_there(place: Place, shapes: dict[str, Shape]) -> Shape:
    shape = (sum(shapes[name][0] for name in place.ours), *shapes[place.ours[0]][1:])
    return shape[::-1] if place.transposed else shape


def _listed(names: list[str]) -> str:
    more = len(names) - SHOWN
    return ", ".join(shown(name)[1:-1] for name in names[:SHOWN]) + (f" and {more} more" if more > 0 else "")


def _end_of_text(content: dict[str, object], tokenizer: Tokenizer) -> list[str]:
    given = content.get("eos_token_id")
    ends = given if isinstance(given, list) else [given]
    if given is None or tokenizer.eos_token_id in ends:
        return []
    ours = tokenizer.eos_token_id
    known = (
        "no token is known to end a text" if ours is None else f"a text ends with {tokenizer.token(ours)!r} ({ours})"
    )
    return [f"eos_token_id {shown(given)} is not taken over: here {known}"]
