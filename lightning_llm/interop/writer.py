"""Writes a model as a folder that Hugging Face ``transformers`` loads."""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_llm.data.tokenizers import Tokenizer
from lightning_llm.interop.hf_mapping import HFMapping, TensorMap, mapping_for
from lightning_llm.interop.model_card import RunRecord, model_card
from lightning_llm.interop.reader import CONFIG, HEAD, TOKENIZER, check_tokenizer
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
    """Write a model as a Hugging Face folder: all files, or none.

    Tensors are written one at a time; only one of them is in memory in addition to the model.

    Args:
        model: The model; its weights keep their dtype.
        tokenizer: The content of its ``tokenizer.json``, if it has one.
        out: The folder; must be empty or not exist.
        max_shard_bytes: Bytes of tensors in a file.
        record: Of the run, for the model card.

    Returns:
        The Hugging Face class.

    Raises:
        ValueError: No class computes what the model does, the tokenizer has more ids than the model, or ``out`` is not
            empty.
        OSError: The folder could not be written.
    """
    config, out = model.config, Path(out)
    mapping = mapping_for(config)
    parsed = None if tokenizer is None else Tokenizer.from_str(tokenizer)
    if parsed is not None:
        check_tokenizer(parsed, config)
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise ValueError(f"{out} is not empty: choose another folder or delete it")
    tensors = outgoing(model, mapping)
    temporary = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary.mkdir()
    try:
        write_weights(tensors, temporary, max_shard_bytes)
        for name, content in _json_files(config, mapping, tensors[0].dtype, parsed).items():
            (temporary / name).write_text(json.dumps(content, indent=2, allow_nan=False) + "\n", encoding="utf-8")
        if parsed is not None:
            (temporary / TOKENIZER).write_text(parsed.to_str(), encoding="utf-8")
        card = model_card(config, mapping.architecture, parsed, record or RunRecord())
        (temporary / "README.md").write_text(card, encoding="utf-8")
        os.replace(temporary, out)  # replaces nothing, or an empty folder
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return mapping.architecture


def outgoing(model: Transformer, mapping: HFMapping) -> list[Outgoing]:
    """The tensors of the folder, in order; each is made when it is written."""
    state = model.state_dict()
    if model.config.tie_word_embeddings:
        del state[HEAD]
    maps = mapping.tensor_maps(state)
    assert sorted(name for tensor in maps for name in tensor.ours if name in state) == sorted(state)
    return [_outgoing(tensor, state) for tensor in maps]


def _outgoing(tensor: TensorMap, state: Mapping[str, Tensor]) -> Outgoing:
    parts = [_part(name, state) for name in tensor.ours]
    shape, dtype = (sum(part.shape[0] for part in parts), *parts[0].shape[1:]), parts[0].dtype
    if dtype not in DTYPES:
        raise ValueError(f"tensor {tensor.name} is of {dtype}, which is not exported")

    def make() -> Tensor:
        whole = parts[0] if len(parts) == 1 else torch.cat(parts)
        return whole.t() if tensor.transposed else whole

    return Outgoing(tensor.name, shape[::-1] if tensor.transposed else shape, dtype, make)


def _part(name: str, state: Mapping[str, Tensor]) -> Tensor:
    if name in state:
        return state[name]
    weight = state[f"{name.removesuffix('.bias')}.weight"]  # a bias that the Hugging Face class has and we do not
    return weight.new_zeros(weight.shape[0])


def _json_files(
    config: ModelConfig, mapping: HFMapping, dtype: torch.dtype, tokenizer: Tokenizer | None
) -> dict[str, dict[str, Any]]:
    end = None if tokenizer is None else tokenizer.eos_token_id
    ends = {"bos_token_id": None, "eos_token_id": end}  # null too: a class has its own defaults for missing ids
    precision = str(dtype).removeprefix("torch.")
    described = {
        "architectures": [mapping.architecture],
        "model_type": mapping.model_type,
        **mapping.to_fields(config),
        **ends,
        "use_cache": True,
        "dtype": precision,  # the name in transformers 5
        "torch_dtype": precision,  # and in 4
    }
    # rows that end early are padded with the end of text
    files = {CONFIG: described, "generation_config.json": {**ends, "pad_token_id": end}}
    if tokenizer is not None:
        special = {} if end is None else {"eos_token": tokenizer.token(end)}
        files["special_tokens_map.json"] = special
        files["tokenizer_config.json"] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": config.max_position_embeddings,
            "clean_up_tokenization_spaces": False,  # decoding returns the text as it was written
            "model_input_names": ["input_ids", "attention_mask"],  # else transformers 4 gives generate() a third one
            **special,
        }
    return files
