"""Shards of a token store: what several hosts made, each of its share of the text, becomes one store.

A shard is a folder beside the store to be, ``DIR.shard-3-of-16``, with train.bin, val.bin, tokenizer.json and, instead
of meta.json, shard.json, so that nobody takes it for a store. Documents lie in the shards in their order, so that one
shard after another is the store that one process makes, to the byte.
"""

import hashlib
import itertools
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from lightning_llm.data.formats import Advance, ignore_progress
from lightning_llm.data.progress import progress_bar
from lightning_llm.data.token_store import (
    FORMAT,
    SHARD,
    TOKENIZER,
    TokenStore,
    read_meta,
    read_tokens,
    sha256,
    shards_of,
)
from lightning_llm.data.token_store_writer import TokenStoreWriter

_BLOCK = 1 << 22  # tokens that are copied at once
_LISTED = 8  # missing shards that a message names


def shard_folder(out: Path, index: int, count: int) -> Path:
    """Where shard ``index`` of ``count`` of a store lies."""
    return out.with_name(f"{out.name}.shard-{index}-of-{count}")


def check_splits(tokens: Mapping[str, int]) -> None:
    """Refuses a store without training or validation text.

    Raises:
        ValueError: If there is none.
    """
    if missing := [split for split in ("train", "val") if not tokens[split]]:
        raise ValueError(f"too little text: nothing is left for the {' and the '.join(missing)} split")


def merge_shards(out: str | Path, *, progress: bool = False) -> TokenStore:
    """Makes a store of its shards, and then removes them.

    Args:
        out: Folder of the store.
        progress: Show a bar, in bytes, where the terminal can.

    Returns:
        The store, opened.

    Raises:
        ValueError: If a shard is missing, damaged or made from something else, if ``out`` exists, or the disk is full.
            The shards are left as they are.
    """
    out = Path(out)
    if out.exists():
        raise ValueError(f"{out} exists already: remove it or choose another folder")
    folders, metas = _shards(out)
    first = metas[0]
    tokenizer = (folders[0] / TOKENIZER).read_text(encoding="utf-8")
    total = sum(file.stat().st_size for folder in folders for file in folder.glob("*.bin"))
    with (
        progress_bar(total, progress) as phase,
        TokenStoreWriter(out, vocab_size=first["vocab_size"], tokenizer=tokenizer, source=first["source"]) as writer,
    ):
        advance = phase("merging")
        for folder, meta in zip(folders, metas, strict=True):
            for split, counts in meta["splits"].items():
                _append(writer, folder, split, counts, meta["dtype"], advance)
        check_splits(writer.tokens)
    store = TokenStore.open(out)
    for folder in folders:
        shutil.rmtree(folder)
    return store


def _append(
    writer: TokenStoreWriter,
    folder: Path,
    split: str,
    counts: dict[str, Any],
    dtype: str,
    advance: Advance = ignore_progress,
) -> None:
    digest = hashlib.sha256()
    for start in range(0, counts["tokens"], _BLOCK):
        block = read_tokens(folder / f"{split}.bin", dtype, start, _BLOCK)
        digest.update(block.data)
        writer.write(split, block, text_bytes=0)
        advance(block.nbytes)
    if digest.hexdigest() != counts["sha256"]:
        raise ValueError(f"shard {folder}: {split}.bin was changed, its sha256 is not that of {SHARD}: make it again")
    writer.write(split, np.empty(0, np.uint16), text_bytes=counts["bytes"], documents=counts["documents"])


def _shards(out: Path) -> tuple[list[Path], list[dict[str, Any]]]:
    """The folders of all shards in their order, and what their ``shard.json`` says."""
    found = {folder: read_meta(folder, SHARD, f"{FORMAT}, shard") for folder in shards_of(out)}
    if not found:
        raise ValueError(f"--merge {out}: there is no shard {shard_folder(out, 1, 1).name[:-6]}I-of-N beside it")
    counts = sorted({meta["shard"][1] for meta in found.values()})
    if len(counts) > 1:
        raise ValueError(f"--merge {out}: its shards are of {' and of '.join(map(str, counts))}: remove the wrong ones")
    absent = (n for n in range(1, counts[0] + 1) if shard_folder(out, n, counts[0]) not in found)
    if missing := [str(index) for index in itertools.islice(absent, _LISTED + 1)]:  # a wrong count may be any number
        raise ValueError(
            f"--merge {out}: of {counts[0]} shards {_listed(missing)} {'is' if len(missing) == 1 else 'are'} missing: "
            f"lightning-llm prepare … --out {out} --shard {missing[0]}/{counts[0]}"
        )
    folders = [shard_folder(out, index, counts[0]) for index in range(1, counts[0] + 1)]
    metas = [found[folder] for folder in folders]
    for folder, meta in zip(folders, metas, strict=True):
        for field, what in (("key", "text, options or versions"), ("tokenizer_sha256", "tokenizer")):
            if meta[field] != metas[0][field]:
                raise ValueError(f"--merge {out}: {folder.name} was made with another {what} than {folders[0].name}")
        if sha256((folder / TOKENIZER).read_bytes()) != meta["tokenizer_sha256"]:
            raise ValueError(f"--merge {out}: {TOKENIZER} of {folder.name} was changed: make the shard again")
    return folders, metas


def _listed(numbers: list[str]) -> str:
    return ", ".join(numbers if len(numbers) <= _LISTED else [*numbers[:_LISTED], "…"])
