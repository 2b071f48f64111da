"""What ``benchmarks data`` runs in processes of their own. ``prepare``'s load no torch: its memory would count too."""

import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import tokenizers

from lightning_llm.data.cuts import PIECE_CHARACTERS, cut_at_newlines
from lightning_llm.data.prepare import prepare_store
from lightning_llm.data.tokenizers import Tokenizer
from lightning_llm.measure.gauges import high_water_bytes

_ROWS, _CONTEXT, _NUM_BATCHES = 32, 1024, 5000
_BATCH = 16  # pieces that the library gets at once, as many and as long as `prepare` gives it


class Measured(NamedTuple):
    """What one run took; ``resident_bytes`` is the high-water of its process."""

    seconds: float
    resident_bytes: int
    tokens: int


def measured(job: tuple[str, Path, int]) -> Measured:
    """Prepares, or lets the library encode, the text of a size in a folder; runs in a process of its own."""
    variant, folder, size = job
    source, tokenizer = folder / f"{size}.txt", folder / "tokenizer.json"
    if variant == "tokenizers":
        seconds, tokens = _library(source, Tokenizer.from_file(tokenizer))
    elif variant == "batches":
        seconds, tokens = _batches(source)
    else:
        with tempfile.TemporaryDirectory(dir=folder) as out:
            start = time.perf_counter()
            given = str(tokenizer) if variant == "bpe" else variant
            store = prepare_store(str(source), Path(out) / "store", tokenizer=given)
            seconds, tokens = time.perf_counter() - start, sum(split.tokens for split in store.splits.values())
    return Measured(seconds, high_water_bytes(), tokens)


def _library(source: Path, tokenizer: Tokenizer) -> tuple[float, int]:
    library = tokenizers.Tokenizer.from_str(tokenizer.to_str())
    pieces = list(cut_at_newlines([source.read_text(encoding="utf-8")], PIECE_CHARACTERS))
    tokens, start = 0, time.perf_counter()
    for first in range(0, len(pieces), _BATCH):
        tokens += sum(map(len, library.encode_batch_fast(pieces[first : first + _BATCH], add_special_tokens=False)))
    return time.perf_counter() - start, tokens


def _batches(source: Path) -> tuple[float, int]:
    from lightning_llm.data.batches import TrainBatches, WindowReader
    from lightning_llm.data.order import WindowOrder
    from lightning_llm.data.token_store import Split, TokenStore

    ids = np.fromfile(source, dtype=np.uint8).astype("<u2")
    file, context = source.with_suffix(".bin"), min(_CONTEXT, len(ids) - 1)
    ids.tofile(file)
    split = Split(tokens=len(ids), bytes=len(ids), documents=1, sha256="")
    store = TokenStore(file.parent, 256, "uint16", {file.stem: split}, None, {})
    reader = WindowReader(store, file.stem, context)
    order = WindowOrder(num_tokens=len(ids), context_length=context, seed=0)
    batches = TrainBatches(
        reader, order.starts, global_batch_size=_ROWS, micro_batch_size=_ROWS, length=_NUM_BATCHES, position=lambda: 0
    )
    assert reader.tokens.max() < 256  # reads all of the file
    start = time.perf_counter()
    tokens = sum(batch["input_ids"].numel() for batch in batches)
    return time.perf_counter() - start, tokens
