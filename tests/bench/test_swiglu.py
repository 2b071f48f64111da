"""``bench swiglu`` on toy shapes: what each variant saves for backward."""

import json

import pytest

from lightning_llm.__main__ import main


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")  # torch.compile of torch 2.13
def test_swiglu_saves_less_at_each_level(tmp_path, capsys):
    path = tmp_path / "rows.json"
    assert main(["bench", "swiglu", "--shapes", "2x64x32x128x2", "--rounds", "1", "--json", str(path)]) == 0
    assert path.with_suffix(".png").stat().st_size > 5000
    rows = {row["variant"]: row for row in json.loads(path.read_text())["rows"]}
    saved = {name: row["saved_bytes"] for name, row in rows.items()}
    tokens, hidden, intermediate = 128, 32, 128
    # by hand: g, u, silu(g) and a for each layer, the input of the second, and the output
    assert saved["standard"] == 4 * (2 * 4 * tokens * intermediate + 2 * tokens * hidden)
    assert saved["ours 0"] == 4 * (2 * 2 * tokens * intermediate + 2 * tokens * hidden)
    assert saved["ours 1"] == saved["notebook 1"] == saved["checkpoint"] == 4 * 2 * tokens * hidden
    assert saved["ours 2"] < saved["norm + standard"]
    assert rows["compiled standard"]["peak_bytes"] is None  # what is compiled cannot be seen: not guessed
    for row in rows.values():
        assert row["bench"] == "swiglu"
        assert row["total_s"] > 0
        assert row["tokens_per_s"] == pytest.approx(tokens / row["total_s"])
    assert "ours 1" in capsys.readouterr().out
