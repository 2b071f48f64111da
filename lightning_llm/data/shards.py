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

import numpy as np

from lightning_llm.data.formats import Advance, ignore_progress
from lightning_llm.data.progress import progress_bar
from lightning_llm.data.token_store import BLOCK, FORMAT, SHARD, TOKENIZER, TokenStore, read_meta, shards_of
from lightning_llm.data.token_store_writer import TokenStoreWriter

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
    shards = _shards(out)
    first = shards[0]
    tokenizer = (first.path / TOKENIZER).read_text(encoding="utf-8")
    total = sum(file.stat().st_size for shard in shards for file in shard.path.glob("*.bin"))
    with (
        progress_bar(total, progress) as phase,
        TokenStoreWriter(out, vocab_size=first.vocab_size, tokenizer=tokenizer, source=first.source) as writer,
    ):
        advance = phase("merging")
        for shard in shards:
            for split in shard.splits:
                _append(writer, shard, split, advance)
        check_splits(writer.tokens)
    store = TokenStore.open(out)
    for shard in shards:
        shutil.rmtree(shard.path)
    return store


def _append(writer: TokenStoreWriter, shard: TokenStore, split: str, advance: Advance = ignore_progress) -> None:
    digest, counts = hashlib.sha256(), shard.splits[split]
    for start in range(0, counts.tokens, BLOCK):
        block = shard.checked_block(split, start)
        digest.update(block.data)
        writer.write(split, block, text_bytes=0)
        advance(block.nbytes)
    if digest.hexdigest() != counts.sha256:
        raise ValueError(
            f"shard {shard.path}: {split}.bin was changed, its sha256 is not that of {SHARD}: make it again"
        )
    writer.write(split, np.empty(0, np.uint16), text_bytes=counts.bytes, documents=counts.documents)


def _shards(out: Path) -> list[TokenStore]:
    """All shards in their order."""
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
        for field, what in (
            ("key", "text, options or versions"),
            ("tokenizer_sha256", "tokenizer"),
            ("vocab_size", "vocabulary"),
        ):
            if meta[field] != metas[0][field]:
                raise ValueError(f"--merge {out}: {folder.name} was made with another {what} than {folders[0].name}")
    return [TokenStore.from_meta(folder, meta) for folder, meta in zip(folders, metas, strict=True)]


def _listed(numbers: list[str]) -> str:
    return ", ".join(numbers if len(numbers) <= _LISTED else [*numbers[:_LISTED], "…"])
