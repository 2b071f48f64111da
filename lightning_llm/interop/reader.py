"""A Hugging Face folder as a model of ours: checks its config field by field, reads its tensors one at a time."""

import dataclasses
import os
import re
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from lightning_llm.data.tokenizer_json import LARGEST_TOKENIZER
from lightning_llm.data.tokenizers import Tokenizer
from lightning_llm.interop.config_json import Fields
from lightning_llm.interop.hf_mapping import HFMapping, TensorMap, mapping_in
from lightning_llm.interop.weights import DTYPE_NAMES, Stored, stored_weights
from lightning_llm.io.untrusted import file_in, prefixed, read_json, read_text, shown
from lightning_llm.model.config import ModelConfig
from lightning_llm.model.transformer import Transformer
from lightning_llm.model.weights import only_finite

CONFIG = "config.json"
TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
FIRST = "layers.0."
HEAD, EMBEDDING = "lm_head.weight", "embed_tokens.weight"
# Constants that older versions saved: the rotation, and GPT-2's causal mask.
CONSTANTS = re.compile(r"(.*\.)?(rotary_emb\.inv_freq|attn\.bias|attn\.masked_bias)")
SHOWN = 5
OTHER_TOKENIZERS = (
    *("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "tiktoken.model", "tekken.json"),
    *("vocab.json", "merges.txt", "vocab.txt"),
)

Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class ModelFolder:
    """A folder that passed all checks.

    Attributes:
        path: The folder.
        config: The model.
        tokenizer: Content of its ``tokenizer.json``, if it has one.
        notes: Fields of its config that are ignored and change no logits.
    """

    path: Path
    config: ModelConfig
    tokenizer: str | None
    notes: list[str]
    _maps: list[TensorMap]
    _shapes: dict[str, Shape]
    _weights: dict[str, Stored]

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Our name and the tensor, one at a time; without a head that is tied to the embedding."""
        for tensor in self._maps:
            whole = self._weights[tensor.name].read()
            whole = whole.t() if tensor.transposed else whole
            rows = [self._shapes[name][0] for name in tensor.ours]
            for name, part in zip(tensor.ours, torch.split(whole, rows), strict=True):
                # a copy: a view of a file or of a larger tensor would be saved with all of it
                yield name, part.clone(memory_format=torch.contiguous_format)


def is_model_folder(path: Path) -> bool:
    """Whether a path is such a folder, even if damaged."""
    return (path / CONFIG).is_file()


def read_folder(path: str | os.PathLike[str]) -> ModelFolder:
    """Check a folder; reads only names and shapes of its tensors.

    Args:
        path: Folder with ``config.json``, the weights, and optionally a ``tokenizer.json``.

    Raises:
        ValueError: It is no model, or its class is not supported, or its config has fields that cannot be honored
            (lists all of them), or tensors are missing, unexpected, of a wrong shape or dtype, or a file is truncated,
            or the tokenizer has more ids than the embedding.
    """
    path = Path(path)
    if not path.is_dir():
        raise ValueError(f"{path} is not a folder: give one with {CONFIG} and the weights")
    if not is_model_folder(path):
        raise ValueError(f"{path} is not a model: it has no {CONFIG}")
    content = read_json(file_in(path, CONFIG))
    with prefixed(str(path / CONFIG), ValueError):
        mapping = mapping_in(content)
        fields = Fields(content)
        config = _config(mapping, fields)
    weights = stored_weights(path)
    prefix = mapping.prefix
    if not any(name.startswith(prefix) for name in weights):  # saved without its head, such as GPT-2 itself
        weights = {name if name.startswith("lm_head.") else prefix + name: each for name, each in weights.items()}
    shapes = _shapes(config)
    if config.tie_word_embeddings:
        del shapes[HEAD]
    maps = mapping.tensor_maps(shapes)
    _check_tensors(path, weights, maps, shapes, config)
    tokenizer = _read_tokenizer(path)
    if tokenizer is not None:
        parsed = Tokenizer.from_file(path / TOKENIZER)  # its errors name the file
        check_tokenizer(parsed, config)
        parsed, notes = _with_boundaries(path, content, parsed)
        tokenizer = parsed.to_str()
        fields.notes += notes
    return ModelFolder(path, config, tokenizer, fields.notes, maps, shapes, weights)


def load_model(path: str | os.PathLike[str], device: str | torch.device = "cpu") -> tuple[Transformer, str | None]:
    """The model in a folder, in evaluation mode, and its tokenizer.

    Args:
        path: As :func:`read_folder`.
        device: Device of the model.

    Returns:
        The model, and the content of its ``tokenizer.json``.

    Raises:
        ValueError: As :func:`read_folder`, or weights are NaN or infinite.
    """
    folder = read_folder(path)
    with torch.device("meta"):
        model = Transformer(folder.config)
    weights = dict(only_finite(folder.tensors(), path))
    model.load_state_dict(weights, assign=True, strict=not folder.config.tie_word_embeddings)
    model.tie_weights()
    return model.to(device).eval(), folder.tokenizer


def _shapes(config: ModelConfig) -> dict[str, Shape]:
    """Names and shapes of all tensors. Layers are alike: one is built, so that their number costs nothing."""
    with torch.device("meta"):
        state = Transformer(dataclasses.replace(config, num_hidden_layers=1)).state_dict()
    return {
        name.replace(FIRST, f"layers.{layer}."): tuple(tensor.shape)
        for name, tensor in state.items()
        for layer in range(config.num_hidden_layers if name.startswith(FIRST) else 1)
    }


def _config(mapping: HFMapping, fields: Fields) -> ModelConfig:
    options = mapping.from_fields(fields)
    fields.finish()
    try:
        config = ModelConfig(**options)
    except ValueError as error:
        fields.problems.append(str(error))
    if fields.problems:
        raise ValueError("; ".join(fields.problems))
    return config


def _check_tensors(
    path: Path, weights: dict[str, Stored], maps: list[TensorMap], shapes: dict[str, Shape], config: ModelConfig
) -> None:
    wanted = {tensor.name: _shape_of(tensor, shapes) for tensor in maps}
    missing, unexpected = wanted.keys() - weights.keys(), weights.keys() - wanted.keys()
    unexpected = {name for name in unexpected if not CONSTANTS.fullmatch(name)}
    if config.tie_word_embeddings and HEAD in weights:
        unexpected.discard(HEAD)
        (embedding,) = (tensor.name for tensor in maps if tensor.ours == (EMBEDDING,))
        if embedding in weights and not torch.equal(weights[HEAD].read(), weights[embedding].read()):
            raise ValueError(f"{path}: {HEAD} differs from {embedding}, though tie_word_embeddings says they are one")
    sets = {"missing": missing, "unexpected": unexpected}
    problems = [f"{kind} tensors: {_listed(names)}" for kind, names in sets.items() if names]
    found = {name: weights[name] for name in sorted(wanted.keys() & weights.keys())}
    wrong = [name for name, tensor in found.items() if tensor.shape != wanted[name]]
    problems += [f"{name} is {found[name].shape}, config.json says {wanted[name]}" for name in wrong[:SHOWN]]
    dtypes = sorted({tensor.dtype for tensor in found.values()})
    if not {*dtypes} <= {*DTYPE_NAMES.values()}:
        problems.append(f"tensors are of {', '.join(dtypes)}: only {', '.join(DTYPE_NAMES.values())} are supported")
    elif len(dtypes) > 1:
        problems.append(f"tensors are of several dtypes ({', '.join(dtypes)}): save the model in one")
    if problems:
        raise ValueError(f"{path}: {'; '.join(problems)}")


def _shape_of(tensor: TensorMap, shapes: dict[str, Shape]) -> Shape:
    shape = (sum(shapes[name][0] for name in tensor.ours), *shapes[tensor.ours[0]][1:])
    return shape[::-1] if tensor.transposed else shape


def _listed(names: set[str]) -> str:
    more = len(names) - SHOWN
    return ", ".join(shown(name)[1:-1] for name in sorted(names)[:SHOWN]) + (f" and {more} more" if more > 0 else "")


def check_tokenizer(tokenizer: Tokenizer, config: ModelConfig) -> None:
    """Check that a tokenizer has at most as many ids as the embedding has rows.

    Raises:
        ValueError: It has more.
    """
    assert config.vocab_size is not None
    if tokenizer.vocab_size > config.vocab_size:
        more = f"has {tokenizer.vocab_size} ids, more than the {config.vocab_size} rows of the embedding (vocab_size)"
        raise ValueError(f"the tokenizer {more}: they do not belong together")


def _read_tokenizer(folder: Path) -> str | None:
    """The content of a folder's ``tokenizer.json``; ``None`` if the folder has no tokenizer at all.

    Raises:
        ValueError: It has one in another format only.
    """
    path = file_in(folder, TOKENIZER)
    if path.exists():
        return read_text(path, LARGEST_TOKENIZER)
    if found := [name for name in OTHER_TOKENIZERS if (folder / name).is_file()]:
        command = f"transformers.AutoTokenizer.from_pretrained({str(folder)!r}).save_pretrained({str(folder)!r})"
        other = f"{folder} has its tokenizer as {', '.join(found)} only"
        raise ValueError(f"{other}; {TOKENIZER} is what is read here: {command} makes it")
    return None


def _with_boundaries(path: Path, content: dict[str, object], tokenizer: Tokenizer) -> tuple[Tokenizer, list[str]]:
    """The tokenizer with the tokens around a text that the model was trained with, and notes on them."""
    notes = []
    given = content.get("eos_token_id")
    end = tokenizer.eos_token_id
    if given is not None and end not in (given if isinstance(given, list) else [given]):
        first = given[0] if isinstance(given, list) and given else given
        if type(first) is int and (name := tokenizer.added_tokens.get(first)):
            tokenizer = tokenizer.with_boundaries(end_of_text=name)
            notes.append(f"a text ends with {name!r} ({first}), the eos_token_id of {CONFIG}")
        else:
            known = "no token is known to end a text"
            known = known if end is None else f"a text ends with {tokenizer.token(end)!r} ({end})"
            notes.append(f"eos_token_id {shown(given)} is not imported: here {known}")
    tokenizer = _with_begin(path, tokenizer)
    if before := tokenizer.boundaries.before:
        name = tokenizer.token(before[-1])
        notes.append(f"each text begins with {name!r} ({before[-1]}), the bos token of its tokenizer")
    return tokenizer, notes


def _with_begin(path: Path, tokenizer: Tokenizer) -> Tokenizer:
    """``add_bos_token`` in ``tokenizer_config.json`` overrides the ``tokenizer.json``, as in transformers."""
    file = file_in(path, TOKENIZER_CONFIG)
    settings = read_json(file) if file.exists() else {}
    adds, name = settings.get("add_bos_token"), settings.get("bos_token")
    name = name.get("content") if isinstance(name, dict) else name
    if adds is False:
        return tokenizer.without_begin()
    if adds is True and isinstance(name, str) and not tokenizer.boundaries.before:
        with prefixed(str(file), ValueError):
            return tokenizer.with_boundaries(begin_of_text=name)
    return tokenizer
