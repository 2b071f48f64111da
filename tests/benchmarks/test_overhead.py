"""What a step costs outside its four parts, on a few steps."""

import json

import pytest

from benchmarks import overhead
from benchmarks.__main__ import main


@pytest.mark.filterwarnings("ignore")  # Lightning's own advice on its plain Trainer, which is what is measured
def test_every_set_up_is_timed(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(overhead, "WARM_UP", 2)
    path = tmp_path / "rows.json"
    assert main(["overhead", "--shapes", "5", "--rounds", "1", "--json", str(path)]) == 0
    rows = {row["variant"]: row for row in json.loads(path.read_text())["rows"]}
    assert tuple(rows) == overhead.VARIANTS
    assert all(0 < row["total_s"] < 1 for row in rows.values())
    shown = capsys.readouterr().out
    assert all(f"{1000 * row['total_s']:.2f}" in shown for row in rows.values())
    assert path.with_suffix(".png").stat().st_size > 5000


@pytest.mark.parametrize(
    ("words", "says"), [(["--shapes", "few"], "must be steps, such as 300"), (["--variants", "no"], "variants 'no'")]
)
def test_mistakes_are_one_line(words, says, capsys):
    assert main(["overhead", *words]) == 2
    assert says in capsys.readouterr().err
