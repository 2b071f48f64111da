"""The tokenizer of a folder: ``tokenizer.json``, and what ``transformers`` wants to know beside it."""

from pathlib import Path
from typing import Any

from lightning_llm.data.tokenizer_json import LARGEST_TOKENIZER
from lightning_llm.data.tokenizers import Tokenizer
from lightning_llm.io.untrusted import file_in, read_text
from lightning_llm.model.config import ModelConfig

FILE = "tokenizer.json"
OTHER_FORMATS = (
    *("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "tiktoken.model", "tekken.json"),
    *("vocab.json", "merges.txt", "vocab.txt"),
)


def check_size(tokenizer: Tokenizer, config: ModelConfig) -> None:
    """A tokenizer may have fewer ids than the embedding has rows, not more.

    Raises:
        ValueError: It has more.
    """
    assert config.vocab_size is not None
    if tokenizer.vocab_size > config.vocab_size:
        raise ValueError(
            f"the tokenizer has {tokenizer.vocab_size} ids, more than the {config.vocab_size} rows of the embedding "
            "(vocab_size): they do not belong together"
        )


def read_tokenizer(folder: Path) -> str | None:
    """The content of a folder's ``tokenizer.json``; ``None`` where the folder has no tokenizer at all.

    Raises:
        ValueError: It has one in another format only.
    """
    path = file_in(folder, FILE)
    if path.exists():
        return read_text(path, LARGEST_TOKENIZER)
    found = [name for name in OTHER_FORMATS if (folder / name).is_file()]
    if found:
        raise ValueError(
            f"{folder} has its tokenizer as {', '.join(found)} only; {FILE} is what is read here: "
            f"transformers.AutoTokenizer.from_pretrained({str(folder)!r}).save_pretrained({str(folder)!r}) makes it"
        )
    return None


def settings(tokenizer: Tokenizer, config: ModelConfig) -> dict[str, dict[str, Any]]:
    """The files beside ``tokenizer.json``, by name."""
    special = {}
    if tokenizer.eos_token_id is not None:
        special["eos_token"] = tokenizer.token(tokenizer.eos_token_id)
    beside = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": config.max_position_embeddings,
        "clean_up_tokenization_spaces": False,  # what is decoded is what was written
        "model_input_names": ["input_ids", "attention_mask"],  # else transformers 4 gives generate() a third one
        **special,
    }
    return {"tokenizer_config.json": beside, "special_tokens_map.json": special}
