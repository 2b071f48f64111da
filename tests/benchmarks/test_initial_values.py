"""What equal initial values are worth: the two ways to draw them, small."""

import json

import pytest

from benchmarks import initial_values, mup
from benchmarks.__main__ import main
from lightning_llm.bench.rows import Row


def test_shared_tensors_start_equal_by_name_and_not_from_one_generator(tmp_path, monkeypatch, text_file):
    for name, value in {"CONTEXT": 16, "BATCH": 2, "VALIDATION": 1}.items():
        monkeypatch.setattr(mup, name, value)
    path = tmp_path / "rows.json"
    assert main(["initial-values", "--shapes", "3x2", "--text", str(text_file), "--json", str(path)]) == 0
    assert path.with_suffix(".png").stat().st_size > 5000
    rows = {row["variant"]: row for row in json.loads(path.read_text())["rows"]}
    assert list(rows) == [f"{side}, {draw}" for draw in initial_values.DRAWS for side in ("close", "far")]
    for name, row in rows.items():
        assert row["shared"] == 15  # all but the tensors of two MLPs
        assert (row["equal"] == 15) == name.endswith("by name"), name
        differences = [b - a for a, b in zip(row["baseline_losses"], row["losses"], strict=True)]
        assert row["difference"] == pytest.approx(sum(differences) / 3)
        assert len(set(row["losses"])) == 3


def test_one_generator_draws_with_the_same_scales():
    named, drawn = (
        initial_values.build("baseline", draw, vocab=61, seed=5).transformer for draw in initial_values.DRAWS
    )
    for (name, ours), theirs in zip(named.named_parameters(), drawn.parameters(), strict=True):
        assert ours.std().item() == pytest.approx(theirs.std().item(), rel=0.1), name


def test_the_verdict_is_about_initial_values_by_name():
    rows = [Row(variant="close, one generator", shared=15, equal=10), Row(variant="far, by name", shared=15, equal=15)]
    initial_values.check(rows)
    with pytest.raises(RuntimeError, match=r"^close, by name: tensors that both"):
        initial_values.check([*rows, Row(variant="close, by name", shared=15, equal=14)])
