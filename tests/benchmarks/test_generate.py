"""``bench generate`` on a toy shape: what it writes, and that all variants compute the same model."""

import json

import pytest
import torch

from benchmarks.__main__ import main
from benchmarks.generate import _transformers_model
from lightning_llm.model.config import ModelConfig
from lightning_llm.model.transformer import Transformer

SHAPE = "2x4x2x32x65x4x12"


def test_rows_of_every_variant(tmp_path, capsys):
    path = tmp_path / "rows.json"
    assert main(["generate", "--shapes", SHAPE, "--rounds", "1", "--json", str(path)]) == 0
    rows = json.loads(path.read_text())["rows"]
    assert [row["variant"] for row in rows] == ["recomputed", "transformers", "cached"]
    for row in rows:
        assert row["tokens_per_s"] == pytest.approx(12 / row["total_s"])
        assert row["ratio"] == pytest.approx(row["total_s"] / rows[0]["total_s"])
    assert path.with_suffix(".png").stat().st_size > 5000
    shown = capsys.readouterr().out
    assert f"{rows[2]['tokens_per_s']:,.0f}" in shown
    assert f"{1000 * rows[2]['total_s'] / 12:.2f}" in shown


def test_the_rival_has_the_same_weights():
    torch.manual_seed(0)
    model = Transformer(
        ModelConfig(
            vocab_size=65, hidden_size=32, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=16
        )
    ).eval()
    ids = torch.randint(65, (1, 16))
    with torch.no_grad():
        theirs = _transformers_model(model)(ids).logits
        ours = model.logits(model(ids))
        truth = model.double().logits(model(ids))
    assert (theirs - truth).norm() <= 2 * (ours - truth).norm()  # float32's own error, not that of other weights


def test_a_shape_is_seven_numbers(capsys):
    assert main(["generate", "--shapes", "2x4"]) == 2
    assert "shapes '2x4' must be layers x heads" in capsys.readouterr().err
