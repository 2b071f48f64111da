"""A fraction of ``val_check_interval`` is whole optimizer steps; bits per byte are those of the validated tokens."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from lightning_llm.data.token_store import TokenStore
from lightning_llm.data.tokenizers import Tokenizer
from lightning_llm.data.validated import text_bytes
from lightning_llm.runs.event_files import read_curves


@pytest.mark.parametrize(
    ("fraction", "steps", "expected"), [(0.35, 10, [3, 6, 9]), (0.1, 3, [1, 2, 3]), (0.29, 100, [29, 58, 87])]
)
@pytest.mark.parametrize("micro_batch_size", [None, 1])
def test_a_fraction_is_whole_steps(tiny, fraction, steps, expected, micro_batch_size):
    few = {"data.global_batch_size": 3, "data.micro_batch_size": micro_batch_size, "trainer.limit_val_batches": 1}
    tiny("fit", **{**few, "trainer.max_steps": steps, "trainer.val_check_interval": fraction})
    (run,) = {path.parent for path in Path("runs").rglob("events.*")}
    found = [step for step, _ in read_curves(run, lambda name: name == "val_loss")["val_loss"]]
    assert found[: len(expected)] == expected
    assert set(found) - set(expected) <= {steps}  # at the end


def test_bits_per_byte_are_of_the_validated_tokens(tiny, tmp_path):
    text = "".join(f"some plain text {number}\n" for number in range(300))
    (tmp_path / "wide.txt").write_text(text + "漢字仮名交じり文の例です" * 30 + text[:300])
    options = {"data.path": str(tmp_path / "wide.txt"), "trainer.limit_val_batches": 1, "data.global_batch_size": 3}
    tiny("fit", **{**options, "data.tokenizer": "char", "data.store": None, "trainer.max_steps": 1})
    (summary,) = (json.loads(path.read_text()) for path in Path("runs").rglob("summary.json"))
    (folder,) = (path.parent for path in Path().rglob("meta.json") if "wide" in str(path))
    store, tokenizer = TokenStore.open(folder), Tokenizer.from_file(folder / "tokenizer.json")
    windows = json.loads(next(Path("runs").rglob("windows.json")).read_text())
    tokens = store.tokens("val")
    context = next(n for n in range(1, 400) if sum(windows["tokens"]) <= 3 * n)
    total = -(-(len(tokens) - 1) // context)
    rows = [
        tokens[place * context : place * context + context + 1] for place in (k * total // 3 - 1 for k in (1, 2, 3))
    ]
    right = summary["val_loss"] * sum(windows["tokens"]) / math.log(2)
    right /= len("".join(tokenizer.decode(row[1:]) for row in rows).encode())
    assert summary["bits_per_byte"] == pytest.approx(right, rel=1e-6)
    whole = summary["val_loss"] / math.log(2) / store.bytes_per_token("val")
    assert abs(whole / right - 1) > 0.02  # else the test would not tell


def test_bytes_of_windows_leave_out_first_tokens_and_ends_of_text():
    tokenizer = Tokenizer.train_bpe(["some text é"] * 3, 262)
    ids = tokenizer.encode("some é")
    end = tokenizer.encode_batch([""])[0].dtype.type(tokenizer.eos_token_id)
    rows = [tokenizer.encode_batch(["some é"])[0]]
    first = tokenizer.byte_count(ids[0])
    assert text_bytes(tokenizer, rows, ()) == len("some é".encode()) - first
    assert text_bytes(tokenizer, [np.append(rows[0], end)], (int(end),)) == len("some é".encode()) - first
