"""What benches measure: shapes as sizes, models of these sizes, and stores of random tokens."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lightning_llm.data.token_store import dtype_for
from lightning_llm.data.token_store_writer import TokenStoreWriter
from lightning_llm.data.tokenizers import Tokenizer
from lightning_llm.interop.hf_mapping import mapping_for
from lightning_llm.io.untrusted import number_in
from lightning_llm.model.config import ModelConfig

HEAD_DIM = 64  # where a shape has no number of heads
FIELDS = {
    **{"vocab": "vocab_size", "hidden": "hidden_size", "intermediate": "intermediate_size"},
    **{"layers": "num_hidden_layers", "heads": "num_attention_heads", "kv_heads": "num_key_value_heads"},
    **{"context": "max_position_embeddings", "tied": "tie_word_embeddings"},
}
ShapeSizes = dict[str, int]


def sizes_of(text: str, names: Sequence[str], example: str, set_names: Iterable[str] = ()) -> ShapeSizes:
    """The sizes of a shape, numbers with an x between them.

    Args:
        text: Such as ``4096x768x50257``.
        names: Of the sizes.
        example: A shape, for the error.
        set_names: Names of sets of shapes, for the error.

    Raises:
        ValueError: It is no such shape.
    """
    parts = text.split("x") if text else []
    if len(parts) != len(names) or not all(map(number_in, parts)):
        named = "".join(f", or {name}" for name in set_names)
        wanted = f"must be {' x '.join(names)}, such as {example}{named}" if names else "are not options of this bench"
        raise ValueError(f"shapes {text!r} {wanted}")
    return dict(zip(names, map(int, parts), strict=True))


def model_config(sizes: ShapeSizes, **fields: Any) -> ModelConfig:
    """A Llama-style model of these sizes; ``fields`` are its further options."""
    sizes = {"heads": max(1, sizes["hidden"] // HEAD_DIM), **sizes}
    named: dict[str, Any] = {field: sizes[name] for name, field in FIELDS.items() if name in sizes}
    return ModelConfig(**named, **fields)


def llama(config: ModelConfig, **options: Any) -> Any:
    """``LlamaForCausalLM`` of the installed transformers, of the same sizes."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**mapping_for(config).to_fields(config), **options))


def make_store(path: Path, *, vocab: int, tokens: int) -> str:
    """Make a token store of random ids, a quarter of which are the validation split too; returns its path."""
    ids = np.random.default_rng(0).integers(0, vocab, tokens).astype(dtype_for(vocab))
    tokenizer, source = Tokenizer.train_byte().to_str(), {"fingerprint": "random"}
    with TokenStoreWriter(path, vocab_size=vocab, tokenizer=tokenizer, source=source) as writer:
        for split, tokens_of_split in (("train", ids), ("val", ids[: tokens // 4])):
            writer.write(split, tokens_of_split, text_bytes=len(tokens_of_split), documents=1)
    return str(path)
