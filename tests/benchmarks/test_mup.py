"""The coordinate check and the transfer of learning rates, small."""

from dataclasses import replace

import pytest
import torch

from benchmarks import mup
from benchmarks.__main__ import main
from lightning_llm.bench.rows import Row


@pytest.fixture
def rows_of(measured, tmp_path, monkeypatch, text_file):
    for name, value in {"CONTEXT": 16, "BATCH": 4, "STEPS": 4, "CHECK_STEPS": 3, "VALIDATION": 1}.items():
        monkeypatch.setattr(mup, name, value)
    monkeypatch.setattr(mup, "SEEDS", range(1))
    monkeypatch.setattr(mup, "RATES", [2**-9, 2**-6, 4.0])
    monkeypatch.setattr(mup, "BENCH", replace(mup.BENCH, check=lambda rows: None))

    def rows(*words):
        found = measured("mup", "--text", str(text_file), *words)
        assert (tmp_path / "rows.png").stat().st_size > 5000
        return found

    return rows


def test_activations_of_every_part_change_alike_with_mup_and_not_without(rows_of):
    rows = rows_of("--shapes", "coordinates=16-128")
    parts = ["embed_tokens", "norm", "lm_head"]
    parts += [f"layers.{layer}{part}" for layer in (0, 1) for part in ("", ".self_attn", ".mlp")]
    assert set(rows) == {f"{variant}: {part}" for variant in mup.VARIANTS for part in parts}
    for part in parts:
        ours, usual = rows[f"mup: {part}"], rows[f"standard: {part}"]
        assert ours["widths"] == [16, 32, 64, 128]
        assert ours["changes"][0] == usual["changes"][0] > 0  # the base width
        assert abs(ours["slope"]) < 0.25, part
    assert rows["standard: layers.1.mlp"]["slope"] > 1


def test_the_best_rate_of_each_width_is_found(rows_of):
    rows = rows_of("--shapes", "transfer=16-32")
    assert list(rows) == ["standard: 16", "standard: 32", "mup: 16", "mup: 32"]
    assert rows["standard: 16"]["losses"] == rows["mup: 16"]["losses"]  # measured once
    assert rows["standard: 32"]["losses"] != rows["mup: 32"]["losses"]
    for row in rows.values():
        assert row["val_loss"] == min(row["losses"])
        assert row["best_lr"] == row["rates"][row["losses"].index(row["val_loss"])] < 4  # 4 diverges


def test_without_a_text_it_is_the_source_of_python(monkeypatch):
    monkeypatch.setattr(mup, "CHARACTERS", 5000)
    tokens = mup.read_tokens(None)
    assert len(tokens) == 5000
    assert torch.equal(tokens.unique(), torch.arange(int(tokens.max()) + 1))


def test_the_verdict_is_that_of_the_limits():
    fine = [Row(variant="mup: norm", slope=-0.1), Row(variant="mup: 64", moved=0), Row(variant="mup: 256", moved=-1)]
    fine += [Row(variant="standard: norm", slope=3.0), Row(variant="standard: 64", moved=0)]
    mup.check([*fine, Row(variant="standard: 256", moved=-2)])
    wrong = [Row(variant="mup: 512", moved=2), Row(variant="standard: 256", moved=-1)]
    message = r"^mup: lm_head: slope \+0\.110, .*; mup: the best rate moves by 2 points, .*; standard: .* by 1 points"
    with pytest.raises(RuntimeError, match=message):
        mup.check([*fine, Row(variant="mup: lm_head", slope=0.11), *wrong])


@pytest.mark.parametrize("shape", ["transfer", "coordinates=64-100", "coordinates=60-120", "speed=64-128"])
def test_a_shape_that_is_none_is_one_line(shape, capsys):
    assert main(["mup", "--shapes", shape]) == 2
    assert "must be coordinates or transfer with two widths, multiples of 8" in capsys.readouterr().err
