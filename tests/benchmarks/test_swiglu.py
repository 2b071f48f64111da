"""``bench swiglu`` on toy shapes: what each variant saves for backward."""

import json

import pytest

from benchmarks.__main__ import main


def test_swiglu_saves_less_at_each_level(tmp_path, capsys):
    path = tmp_path / "rows.json"
    eager = ["standard", "ours 0", "ours 1", "ours 2", "notebook 1", "checkpoint", "norm + standard"]
    assert (
        main(["swiglu", "--variants", *eager, "--shapes", "2x64x32x128x2", "--rounds", "1", "--json", str(path)]) == 0
    )
    assert path.with_suffix(".png").stat().st_size > 5000
    rows = {row["variant"]: row for row in json.loads(path.read_text())["rows"]}
    saved = {name: row["saved_bytes"] for name, row in rows.items()}
    tokens, hidden, intermediate = 128, 32, 128
    # by hand: g, u, silu(g) and a for each layer, the input of the second, and the output
    assert saved["standard"] == 4 * (2 * 4 * tokens * intermediate + 2 * tokens * hidden)
    assert saved["ours 0"] == 4 * (2 * 2 * tokens * intermediate + 2 * tokens * hidden)
    assert saved["ours 1"] == saved["notebook 1"] == saved["checkpoint"] == 4 * 2 * tokens * hidden
    assert saved["ours 2"] < saved["norm + standard"]
    for row in rows.values():
        assert row["bench"] == "swiglu"
        assert row["total_s"] > 0
        assert row["tokens_per_s"] == pytest.approx(tokens / row["total_s"])
    assert "ours 1" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")  # torch.compile of torch 2.13
def test_all_variants_are_measured_and_what_is_compiled_is_not_guessed(tmp_path):
    path = tmp_path / "rows.json"
    assert main(["swiglu", "--shapes", "2x64x32x128x2", "--rounds", "1", "--json", str(path)]) == 0
    rows = {row["variant"]: row for row in json.loads(path.read_text())["rows"]}
    assert rows["compiled standard"]["peak_bytes"] is None
    assert all(row["total_s"] > 0 for row in rows.values())
