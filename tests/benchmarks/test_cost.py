"""How cost grows, on tiny models; and the parts of a start."""

import json

import pytest

from benchmarks import cost, start_up
from benchmarks.__main__ import main


def rows_of(tmp_path, *words):
    path = tmp_path / "rows.json"
    assert main(["cost", "--rounds", "1", "--json", str(path), *words]) == 0
    assert path.with_suffix(".png").stat().st_size > 5000
    return json.loads(path.read_text())["rows"]


def test_the_slope_of_a_power_law_comes_back():
    values = [2, 4, 8, 32]
    assert cost.slope(values, [3 * value**1.7 for value in values]) == pytest.approx(1.7)
    assert cost.slope(values, [5.0] * 4) == pytest.approx(0, abs=1e-12)
    # not through the ends alone: the middle counts
    assert cost.slope([1, 2, 4, 8], [1, 4, 4, 8]) == pytest.approx(0.9)


@pytest.mark.slow
def test_rows_of_two_axes_are_whole(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(cost, "BASE", {"context": 16, "width": 64, "depth": 1, "vocab": 64, "batch": 1})
    rows = rows_of(tmp_path, "--shapes", "vocab=512-4096", "context=64-256", "--variants", "ours")
    by_axis = {axis: [row for row in rows if row["axis"] == axis] for axis in ("vocab", "context")}
    assert [row["value"] for row in by_axis["vocab"]] == [512, 1024, 2048, 4096]
    for axis, own in by_axis.items():
        for row in own:
            tokens = row["value"] if axis == "context" else 16
            assert row["tokens_per_s"] == pytest.approx(tokens / row["total_s"])
            assert row["time_slope"] == own[0]["time_slope"]
    per_token = [row["peak_bytes"] / row["value"] for row in by_axis["context"]]
    assert by_axis["context"][0]["memory_slope"] == pytest.approx(cost.slope([64, 128, 256], per_token))
    # the gradients of embedding and head are most of it
    assert 0.5 < by_axis["vocab"][0]["memory_slope"] < 1.05
    assert "what is not varied: context 16" in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore")  # transformers' own
def test_transformers_is_measured_too(tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    monkeypatch.setattr(cost, "BASE", {"context": 16, "width": 64, "depth": 1, "vocab": 64, "batch": 1})
    rows = rows_of(tmp_path, "--shapes", "depth=1-2")
    assert [(row["variant"], row["value"]) for row in rows] == [
        (name, value) for name in ("ours", "transformers") for value in (1, 2)
    ]
    assert all(row["peak_bytes"] > 0 for row in rows)
    weights = [
        sum(p.numel() for p in cost._Step(name, cost.BASE, "cpu", "float32").model.parameters())
        for name in ("ours", "transformers")
    ]
    assert weights[0] == weights[1]


@pytest.mark.slow
def test_a_start_is_split_into_its_parts(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)  # the config is that of the clone
    (row, again) = rows_of(tmp_path, "--shapes", "startup")
    assert (row["variant"], again["variant"]) == ("store to be made", "store there")
    for one in (row, again):
        assert tuple(one["parts_s"]) == start_up.PARTS
        assert all(seconds > 0 for seconds in one["parts_s"].values())
        assert one["total_s"] == pytest.approx(sum(one["parts_s"].values()))
        assert one["parts_s"]["imports"] > 0.5  # torch alone takes that
    assert row["parts_s"]["data"] > again["parts_s"]["data"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--shapes", "context=256"], "must be one of context, width, depth, vocab, batch with two sizes"),
        (["--shapes", "length=1-2"], "must be one of context, width, depth, vocab, batch with two sizes"),
        (["--shapes", "context=256-300"], "the second at least twice the first"),
        (["--shapes", "width=100-200"], "a width must be a multiple of 64"),
        (["--variants", "theirs"], "variants 'theirs': there are ours"),
        (["--dtype", "float16"], "cost takes only float32, bfloat16"),
    ],
)
def test_mistakes_are_one_line(words, says, capsys):
    assert main(["cost", *words]) == 2
    error = capsys.readouterr().err.strip()
    assert says in error
    assert len(error.splitlines()) == 1
