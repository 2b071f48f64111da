"""A model as a folder that ``transformers`` loads."""

import json
import os
import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_llm.data.tokenizers import Tokenizer
from lightning_llm.interop import tokenizer_files
from lightning_llm.interop.families import home_of
from lightning_llm.interop.family import Family, Place
from lightning_llm.interop.model_card import RunRecord, model_card
from lightning_llm.interop.weights import DTYPES, Outgoing, write_weights
from lightning_llm.model.config import ModelConfig
from lightning_llm.model.transformer import Transformer

MAX_SHARD_BYTES = 5 * 10**9


def export_model(
    model: Transformer,
    tokenizer: str | None,
    out: str | os.PathLike[str],
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    record: RunRecord | None = None,
) -> str:
    """Write a model as ``transformers`` reads it: all files, or none.

    Tensors are written one by one; beside the model there is never more than one of them in memory.

    Args:
        model: The model; its weights keep their dtype.
        tokenizer: The content of its ``tokenizer.json``, if it has one.
        out: The folder; must not exist, or be empty.
        max_shard_bytes: Bytes of tensors in a file.
        record: Of the run, for the model card.

    Returns:
        The class of ``transformers`` that it is now.

    Raises:
        ValueError: No class computes what the model does, the tokenizer has more ids than the model, or ``out`` holds
            something.
        OSError: It could not be written.
    """
    config, out = model.config, Path(out)
    family = home_of(config)
    parsed = None if tokenizer is None else Tokenizer.from_str(tokenizer)
    if parsed is not None:
        tokenizer_files.check_size(parsed, config)
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise ValueError(f"{out} holds something already: give another folder, or remove it")
    tensors = outgoing(model, family)
    temporary = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary.mkdir()
    try:
        write_weights(tensors, temporary, max_shard_bytes)
        for name, content in _json_files(config, family, tensors[0].dtype, parsed).items():
            (temporary / name).write_text(json.dumps(content, indent=2, allow_nan=False) + "\n", encoding="utf-8")
        if parsed is not None:
            (temporary / tokenizer_files.FILE).write_text(parsed.to_str(), encoding="utf-8")
        card = model_card(config, family.architecture, parsed, record or RunRecord())
        (temporary / "README.md").write_text(card, encoding="utf-8")
        os.replace(temporary, out)  # onto nothing, or onto an empty folder
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return family.architecture


def outgoing(model: Transformer, family: Family) -> list[Outgoing]:
    """The tensors of the folder, in order; none is made yet."""
    state = model.state_dict()
    if model.config.tie_word_embeddings:
        del state["lm_head.weight"]
    places = family.places(state)
    assert sorted(name for place in places for name in place.ours if name in state) == sorted(state)
    return [_outgoing(place, state) for place in places]


def _outgoing(place: Place, state: Mapping[str, Tensor]) -> Outgoing:
    parts = [_part(name, state) for name in place.ours]
    shape = (sum(part.shape[0] for part in parts), *parts[0].shape[1:])
    if parts[0].dtype not in DTYPES:
        raise ValueError(f"tensor {place.name} is of {parts[0].dtype}, which is not exported")
    make = partial(_made, parts, place.transposed)
    return Outgoing(place.name, shape[::-1] if place.transposed else shape, parts[0].dtype, make)


def _part(name: str, state: Mapping[str, Tensor]) -> Tensor:
    if name in state:
        return state[name]
    weight = state[f"{name.removesuffix('.bias')}.weight"]  # a bias that is always there, and that we do not have
    return weight.new_zeros(weight.shape[0])


def _made(parts: list[Tensor], transposed: bool) -> Tensor:
    whole = parts[0] if len(parts) == 1 else torch.cat(parts)
    return whole.t() if transposed else whole


def _json_files(
    config: ModelConfig, family: Family, dtype: torch.dtype, tokenizer: Tokenizer | None
) -> dict[str, dict[str, Any]]:
    end = None if tokenizer is None else tokenizer.eos_token_id
    ends = {"bos_token_id": None, "eos_token_id": end}  # null too: a class has ids of its own where they are left out
    precision = str(dtype).removeprefix("torch.")
    described = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        **family.to_fields(config),
        **ends,
        "use_cache": True,
        "dtype": precision,  # the name in transformers 5
        "torch_dtype": precision,  # and in 4
    }
    # rows that end early are filled with the end of text
    files = {"config.json": described, "generation_config.json": {**ends, "pad_token_id": end}}
    return files if tokenizer is None else {**files, **tokenizer_files.settings(tokenizer, config)}
