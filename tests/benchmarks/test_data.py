"""The bench of prepare on a small text."""

import json
from types import SimpleNamespace

import pytest

from benchmarks import data
from benchmarks.__main__ import main


@pytest.mark.slow
def test_rows_tell_speed_and_memory(tmp_path, monkeypatch, capsys, text_file):
    corpus = SimpleNamespace(files=[SimpleNamespace(text=text_file.read_text)])  # the same with each Python
    monkeypatch.setattr(data, "open_corpus", lambda names: corpus)
    path = tmp_path / "rows.json"
    words = [
        "--variants",
        "bpe",
        "tokenizers",
        "byte",
        "batches",
        "--shapes",
        "1MiB",
        "--rounds",
        "1",
        "--json",
        str(path),
    ]
    assert main(["data", *words]) == 0
    rows = {row["variant"]: row for row in json.loads(path.read_text())["rows"]}
    assert rows["byte"]["bytes_per_s"] == pytest.approx((1 << 20) / rows["byte"]["total_s"])
    assert rows["byte"]["tokens_per_s"] == pytest.approx(rows["byte"]["bytes_per_s"])  # a byte is a token
    assert rows["bpe"]["ratio"] == pytest.approx(rows["tokenizers"]["total_s"] / rows["bpe"]["total_s"])
    # the same ids, but for those of the word where training and validation text part
    tokens = {name: rows[name]["tokens_per_s"] * rows[name]["total_s"] for name in ("bpe", "tokenizers")}
    assert abs(tokens["bpe"] - tokens["tokenizers"]) <= 3
    assert rows["batches"]["tokens_per_s"] * rows["batches"]["total_s"] == pytest.approx(5000 * 32 * 1024)
    assert all(20 << 20 < row["resident_bytes"] < 1 << 30 for row in rows.values())
    assert path.with_suffix(".png").stat().st_size > 5000
    assert "resident" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--shapes", "big"], "'big' is not a size: give a number with one of"),
        (["--variants", "words"], "variants 'words': there are byte, char, bpe, tokenizers, batches"),
        (["--dtype", "bfloat16"], "--dtype bfloat16: data takes only float32"),
    ],
)
def test_mistakes_are_one_line(words, says, capsys):
    assert main(["data", *words]) == 2
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1
