"""The transfer of learning rates over sizes, with the runs replaced by a known curve."""

import json
import math
from pathlib import Path

import pytest

from benchmarks import ladder
from benchmarks.__main__ import main
from lightning_llm.accounting.sizing import LR

SIZES = (25_000, 50_000, 100_000)


@pytest.fixture
def rows_of(tmp_path, monkeypatch, text_file):
    """``rows_of(octaves)`` runs the benchmark where the best rate is so many octaves off at each size."""
    monkeypatch.chdir(tmp_path)
    find = ladder.find_or_prepare

    def prepared(store, **text):
        return find(path=str(text_file), tokenizer="char", store=store)

    monkeypatch.setattr(ladder, "find_or_prepare", prepared)
    started = []

    def rows(octaves, *words, fail=None, worse=0.0):
        def fit(options, folder, **environment):
            started.append(folder)
            given = dict(word.removeprefix("--").split("=", 1) for word in options)
            size, seed = int(given["size"]), int(given["seed_everything"])
            if fail is not None:
                raise RuntimeError(fail)
            assert given["data.seed"] == given["seed_everything"]
            assert environment == {"OMP_NUM_THREADS": "1"}
            usual = ladder.sizing_for(json_of(given["config"]), size).options[LR]
            place = SIZES.index(size)
            off = math.log2(float(given[LR]) / usual) - octaves * place - 0.01 * seed * (place % 2)
            return {"val_loss": 3 - 0.1 * place + worse * place + off**2}, 1.0

        monkeypatch.setattr(ladder, "fit", fit)
        names = ",".join(f"{size // 1000}k" for size in SIZES)
        status = main(["ladder", "--shapes", f"transfer={names}", "--json", "rows.json", *words])
        found = json.loads(Path("rows.json").read_text())["rows"] if Path("rows.json").exists() else []
        return status, found, len(started)

    return rows


def json_of(config):
    return ladder.read_config(Path(config))


def test_the_tilt_and_its_interval_are_found_and_finished_runs_are_kept(rows_of):
    status, rows, started = rows_of(0.1)
    assert status == 0
    assert started == 3 * 3 * 5 * 2
    assert len({row["variant"].partition(":")[0] for row in rows}) == 3
    for row in rows[2::3]:
        compute = math.log(rows[2]["flops"] / rows[0]["flops"], 4)
        assert row["moved"] == pytest.approx(0.2, abs=0.02)
        assert row["tilt"] == pytest.approx(0.2 / compute, rel=0.15)
        assert row["tilt_low"] < row["tilt"] < row["tilt_high"]
    assert [row["octaves"] for row in rows[:3]] == pytest.approx([0, 0.105, 0.2], abs=0.01)
    assert rows_of(0.1)[2] == started  # none is repeated
    assert Path("rows.png").stat().st_size > 5000


def test_a_tilt_of_the_default_and_a_worse_larger_model_fail(rows_of, capsys):
    assert rows_of(0.4, "--variants", "MuonAdamW")[0] == 2
    assert "the best rate moves by +0.8" in capsys.readouterr().err
