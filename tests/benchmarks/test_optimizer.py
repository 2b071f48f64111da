"""Optimizers over the parameters of a tiny model."""

import json

import pytest

from benchmarks import optimizer
from benchmarks.__main__ import main


def test_every_optimizer_is_timed_and_moves_the_weights(tmp_path, monkeypatch):
    path, moved = tmp_path / "rows.json", []
    ready = optimizer._ready

    def watched(make, *args):
        def made(model):
            inner = make(model)
            before, parameters = [p.detach().clone() for p in model.parameters()], list(model.parameters())
            step = inner.step

            def counted():
                step()
                changed = [bool((p != old).any()) for p, old in zip(parameters, before, strict=True) if p.dim() > 1]
                moved.append(all(changed))  # norms are 1: in bfloat16 a step is less than they can tell

            inner.step = counted
            return inner

        return ready(made, *args)

    monkeypatch.setattr(optimizer, "_ready", watched)
    words = ["--shapes", "1x64x65", "--rounds", "2", "--dtype", "float32", "bfloat16", "--json", str(path)]
    assert main(["optimizer", *words]) == 0
    rows = json.loads(path.read_text())["rows"]
    assert [(row["dtype"], row["variant"]) for row in rows] == [
        (dtype, name) for dtype in ("float32", "bfloat16") for name in optimizer.VARIANTS
    ]
    assert all(row["total_s"] > 0 for row in rows)
    assert rows[0]["ratio"] == 1
    assert len(moved) == 2 * (2 + 2) * len(optimizer.VARIANTS)  # dtypes, warm-up and rounds
    assert all(moved)
    assert path.with_suffix(".png").stat().st_size > 5000


@pytest.mark.parametrize(
    ("shape", "says"),
    [
        ("6x384", "must be layers x hidden x vocab"),
        ("0x64x65", "must be layers x hidden x vocab"),
        ("6x100x65", "hidden must be a multiple of 64"),
    ],
)
def test_a_shape_that_is_none_is_one_line(shape, says, capsys):
    assert main(["optimizer", "--shapes", shape]) == 2
    assert says in capsys.readouterr().err
