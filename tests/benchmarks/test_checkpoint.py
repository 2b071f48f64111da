"""How long saving holds training up, on a small model."""

import json

import pytest

from benchmarks import checkpoint
from benchmarks.__main__ import main


def test_both_ways_and_the_step_beside_are_timed(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "_HIDDEN", 64)
    path = tmp_path / "rows.json"
    assert main(["checkpoint", "--shapes", "1", "--rounds", "2", "--json", str(path)]) == 0
    rows = {row["variant"]: row for row in json.loads(path.read_text())["rows"]}
    assert tuple(rows) == checkpoint.VARIANTS
    for name in checkpoint.VARIANTS[:2]:  # parameters and two averages of them, float32
        assert rows[name]["saved_bytes"] == pytest.approx(12e6, rel=0.1)
        assert rows[name]["bytes_per_s"] > 0
        # held up at most as long as it takes to write
        assert rows[name]["total_p20_s"] <= rows[name]["saved_bytes"] / rows[name]["bytes_per_s"]
    assert path.with_suffix(".png").stat().st_size > 5000


@pytest.mark.parametrize(
    ("words", "says"),
    [(["--shapes", "few"], "must be millions of parameters, such as 30"), (["--variants", "no"], "variants 'no'")],
)
def test_mistakes_are_one_line(words, says, capsys):
    assert main(["checkpoint", *words]) == 2
    assert says in capsys.readouterr().err
