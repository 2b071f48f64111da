"""The ``README.md`` of an exported model: what it is, how it was trained, how well, how to load it."""

import dataclasses
import json
import math
from typing import Any

import yaml

from lightning_llm.data.tokenizers import Tokenizer
from lightning_llm.model.config import ModelConfig

METRICS = {
    "val_loss": "validation loss at the end (nats per token)",
    "best_val_loss": "best validation loss (nats per token)",
    "perplexity": "validation perplexity at the end",
    "bits_per_byte": "validation bits per byte at the end",
    "train_loss": "loss on training text at the end (nats per token)",
    "steps": "optimizer steps",
    "tokens": "tokens seen",
    "seconds": "seconds of training",
}
NOT_OF_THE_MODEL = ("default_root_dir", "logger", "callbacks")


@dataclasses.dataclass(frozen=True)
class RunRecord:
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


def model_card(config: ModelConfig, architecture: str, tokenizer: Tokenizer | None, record: RunRecord) -> str:
    """The text of the card.

    Args:
        config: Of the model.
        architecture: Its class in ``transformers``.
        tokenizer: Its tokenizer.
        record: Of its run.
    """
    parts = [
        "---\nlibrary_name: transformers\npipeline_tag: text-generation\ntags: [lightning-llm]\n---",
        f"# A language model, as `{architecture}`",
        "Trained with lightning-llm, exported by `lightning-llm export`.",
        _loading(tokenizer),
        "## Model",
        _table({name: value for name, value in config.to_dict().items() if value is not None}),
        _tokenizer(tokenizer),
    ]
    if record.metrics is not None:
        known = {label: record.metrics.get(name) for name, label in METRICS.items()}
        parts += ["## Metrics", _table({label: value for label, value in known.items() if _is_measured(value)})]
    if record.checkpoint is not None:
        parts.append(f"The weights are those of `{record.checkpoint}`, saved at optimizer step {record.step}.")
    if record.config is None:
        parts += ["## Training", "The checkpoint was not in a run directory: its data and training are unknown."]
    else:
        parts += ["## Data", _yaml({"data": _known(record.config.get("data") or {})})]
        rest = {name: _known(record.config.get(name) or {}) for name in ("model", "trainer")}
        rest["model"].pop("architecture", None)
        seed = {"seed_everything": record.config.get("seed_everything")}
        parts += ["## Training", _yaml({**seed, **rest})]
    return "\n\n".join(parts) + "\n"


def _loading(tokenizer: Tokenizer | None) -> str:
    names = "AutoModelForCausalLM" if tokenizer is None else "AutoModelForCausalLM, AutoTokenizer"
    lines = [f"from transformers import {names}", "", 'model = AutoModelForCausalLM.from_pretrained("FOLDER")']
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
        try:
            if tokenizer.encode(text):
                return text
        except ValueError:
            pass
    return tokenizer.decode([0])


def _tokenizer(tokenizer: Tokenizer | None) -> str:
    if tokenizer is None:
        return "There is no tokenizer: it was trained on ids."
    end = tokenizer.eos_token_id
    return f"Tokenizer: {tokenizer.vocab_size} ids, kind {tokenizer.kind}, " + (
        "no end of text." if end is None else f"end of text `{tokenizer.token(end)}` ({end})."
    )


def _table(rows: dict[str, Any]) -> str:
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {_shown(value)} |" for name, value in rows.items())])


def _is_measured(value: Any) -> bool:
    """Whether a value was measured: otherwise it is null in a summary, or infinite."""
    return value is not None and math.isfinite(value)


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    return f"{value:,}" if type(value) is int else f"`{json.dumps(value)}`" if isinstance(value, dict) else str(value)


def _known(section: object) -> dict[str, Any]:
    """A section without null values and without paths on the machine of the run."""
    found = section if isinstance(section, dict) else {}
    return {n: value for n, value in found.items() if value is not None and n not in NOT_OF_THE_MODEL}


def _yaml(content: dict[str, Any]) -> str:
    return f"```yaml\n{yaml.safe_dump(content, sort_keys=False, allow_unicode=True)}```"
