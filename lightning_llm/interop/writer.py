"""Writes a model as a folder that Hugging Face ``transformers`` loads.

Its ``README.md``, the model card, says what the model is, how it was trained, how well, and how to load it.
"""

import dataclasses
import json
import math
import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from lightning_llm.data.tokenizers import Tokenizer
from lightning_llm.interop.hf_mapping import HFMapping, TensorMap, mapping_for
from lightning_llm.interop.reader import CONFIG, HEAD, TOKENIZER, check_tokenizer
from lightning_llm.interop.weights import DTYPE_NAMES, Outgoing, write_weights
from lightning_llm.io.atomic import atomic_path, write_json, write_text
from lightning_llm.model.config import ModelConfig
from lightning_llm.model.transformer import Transformer
from lightning_llm.model.weights import with_vocab_rows

MAX_SHARD_BYTES = 5 * 10**9
METRICS = {
    "val_loss": "validation loss at the end (nats per token)",
    "best_val_loss": "best validation loss (nats per token)",
    "perplexity": "validation perplexity at the end",
    "bits_per_byte": "validation bits per byte at the end",
    "train_loss_eval": "loss on training text at the end (nats per token)",
    "steps": "optimizer steps",
    "tokens": "tokens seen",
    "seconds": "seconds of training",
}
OF_THE_LOSS = "objective."  # such parameters have no part in the logits
NOT_OF_THE_MODEL = ("default_root_dir", "logger", "callbacks")


@dataclasses.dataclass(frozen=True)
class SourceRun:
    """The run that made a model, as far as it is known.

    Attributes:
        checkpoint: Name of the exported checkpoint.
        step: Optimizer step of that checkpoint.
        metrics: ``summary.json`` of the run.
        config: ``config.yaml`` of the run.
    """

    checkpoint: str | None = None
    step: int | None = None
    metrics: dict[str, Any] | None = None
    config: dict[str, Any] | None = None


def export_model(
    model: Transformer,
    tokenizer: str | None,
    out: str | os.PathLike[str],
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    record: SourceRun | None = None,
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
    config = model.config
    out = Path(out)
    mapping = mapping_for(config)
    parsed = None if tokenizer is None else Tokenizer.from_str(tokenizer)
    if parsed is not None:
        check_tokenizer(parsed, config)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} is not empty: choose another folder or delete it")
    tensors = outgoing(model, mapping)
    with atomic_path(out) as folder:
        folder.mkdir()
        write_weights(tensors, folder, max_shard_bytes)
        for name, content in _json_files(config, mapping, tensors[0].dtype, parsed).items():
            write_json(folder / name, content)
        if parsed is not None:
            write_text(folder / TOKENIZER, parsed.to_str())
        write_text(folder / "README.md", model_card(config, mapping.architecture, parsed, record or SourceRun()))
    return mapping.architecture


def outgoing(model: Transformer, mapping: HFMapping) -> list[Outgoing]:
    """The tensors of the folder, in order; each is made when it is written."""
    vocab_size = model.config.vocab_size
    saved = {name: tensor for name, tensor in model.state_dict().items() if not name.startswith(OF_THE_LOSS)}
    state = {name: with_vocab_rows(name, tensor, vocab_size) for name, tensor in saved.items()}
    if model.config.tie_word_embeddings:
        del state[HEAD]
    maps = mapping.tensor_maps(state)
    names = [name for tensor in maps for name in tensor.ours]
    for name in set(names) - state.keys():  # a bias that the Hugging Face class has and we do not
        weight = state[f"{name.removesuffix('.bias')}.weight"]
        state[name] = weight.new_zeros(len(weight))
    assert sorted(names) == sorted(state)
    return [_outgoing(tensor, [state[name] for name in tensor.ours]) for tensor in maps]


def _outgoing(tensor: TensorMap, parts: list[Tensor]) -> Outgoing:
    shape = (sum(map(len, parts)), *parts[0].shape[1:])
    dtype = parts[0].dtype
    if dtype not in DTYPE_NAMES:
        raise ValueError(f"tensor {tensor.name} is of {dtype}, which is not exported")

    def make() -> Tensor:
        whole = parts[0] if len(parts) == 1 else torch.cat(parts)
        return whole.t() if tensor.transposed else whole

    return Outgoing(tensor.name, shape[::-1] if tensor.transposed else shape, dtype, make)


def _json_files(
    config: ModelConfig, mapping: HFMapping, dtype: torch.dtype, tokenizer: Tokenizer | None
) -> dict[str, dict[str, Any]]:
    end = None if tokenizer is None else tokenizer.eos_token_id
    before = () if tokenizer is None else tokenizer.boundaries.before
    begin = before[-1] if before else None
    ends = {"bos_token_id": begin, "eos_token_id": end}  # null too: a class has its own defaults for missing ids
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
        ids = {"bos_token": begin, "eos_token": end}
        special = {name: tokenizer.token(number) for name, number in ids.items() if number is not None}
        files["special_tokens_map.json"] = special
        files["tokenizer_config.json"] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": config.max_position_embeddings,
            "clean_up_tokenization_spaces": False,  # decoding returns the text as it was written
            "model_input_names": ["input_ids", "attention_mask"],  # else transformers 4 gives generate() a third one
            **special,
        }
    return files


# ---- the model card


def model_card(config: ModelConfig, architecture: str, tokenizer: Tokenizer | None, record: SourceRun) -> str:
    """The text of the card.

    Args:
        config: Of the model.
        architecture: Its class in ``transformers``.
        tokenizer: Its tokenizer.
        record: Of its run.
    """
    trained = record.config
    metrics = {label: (record.metrics or {}).get(name) for name, label in METRICS.items()}
    measured = {label: value for label, value in metrics.items() if value is not None and math.isfinite(value)}
    parts = [
        "---\nlibrary_name: transformers\npipeline_tag: text-generation\ntags: [lightning-llm]\n---",
        f"# A language model, as `{architecture}`",
        "Trained with lightning-llm, exported by `lightning-llm export`.",
        _loading(tokenizer),
        "## Model",
        _table({name: value for name, value in config.to_dict().items() if value is not None}),
        _described(tokenizer),
    ]
    if record.metrics is not None:
        parts += ["## Metrics", _table(measured)]
    if record.checkpoint is not None:
        parts.append(f"The weights are those of `{record.checkpoint}`, saved at optimizer step {record.step}.")
    if trained is None:
        parts += ["## Training", "The checkpoint was not in a run directory: its data and training are unknown."]
    else:
        data, model, trainer = (_known(trained.get(name)) for name in ("data", "model", "trainer"))
        model.pop("architecture", None)
        training = {"seed_everything": trained.get("seed_everything"), "model": model, "trainer": trainer}
        parts += ["## Data", _yaml({"data": data}), "## Training", _yaml(training)]
    return "\n\n".join(parts) + "\n"


def _loading(tokenizer: Tokenizer | None) -> str:
    lines = ["from transformers import AutoModelForCausalLM" + ("" if tokenizer is None else ", AutoTokenizer"), ""]
    lines += ['model = AutoModelForCausalLM.from_pretrained("FOLDER")']
    if tokenizer is not None:
        lines += [
            'tokenizer = AutoTokenizer.from_pretrained("FOLDER")',
            f'prompt = tokenizer({json.dumps(_prompt(tokenizer), ensure_ascii=False)}, return_tensors="pt")',
            "ids = model.generate(input_ids=prompt.input_ids, max_new_tokens=50, do_sample=False)",
            "print(tokenizer.decode(ids[0]))",
        ]
    return "\n".join(["```python", *lines, "```"])


def _prompt(tokenizer: Tokenizer) -> str:
    """A text that the tokenizer can encode: kind ``char`` knows only the characters of its corpus."""
    for text in ("Once upon a time", "The"):
        with suppress(ValueError):
            if tokenizer.encode(text):
                return text
    return tokenizer.decode([0])


def _described(tokenizer: Tokenizer | None) -> str:
    if tokenizer is None:
        return "There is no tokenizer: it was trained on ids."
    end = tokenizer.eos_token_id
    words = "no end of text" if end is None else f"end of text `{tokenizer.token(end)}` ({end})"
    if before := tokenizer.boundaries.before:
        words = f"each text begins with `{tokenizer.token(before[-1])}` ({before[-1]}), {words}"
    return f"Tokenizer: {tokenizer.vocab_size} ids, kind {tokenizer.kind}, {words}."


def _table(rows: dict[str, Any]) -> str:
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {_shown(value)} |" for name, value in rows.items())])


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    return f"{value:,}" if type(value) is int else f"`{json.dumps(value)}`" if isinstance(value, dict) else str(value)


def _known(section: object) -> dict[str, Any]:
    """A section without null values and without paths on the machine of the run."""
    found = section if isinstance(section, dict) else {}
    return {n: value for n, value in found.items() if value is not None and n not in NOT_OF_THE_MODEL}


def _yaml(content: dict[str, Any]) -> str:
    text = yaml.safe_dump(content, sort_keys=False, allow_unicode=True)
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))  # nothing in the text ends it
    return f"{fence}yaml\n{text}{fence}"
