"""The techniques on a tiny model: every one computes the same, and one that does not is found."""

import json
from dataclasses import replace

import pytest
import torch

from benchmarks import technique_process, techniques
from benchmarks.__main__ import main
from benchmarks.technique_process import Settings, distinct_rows
from benchmarks.techniques import BENCH, CHANGES, lacking, tolerance
from lightning_llm.bench.workloads import model_config, sizes_of

SHAPE = "2x2x32x64x16x8x64"
EAGER = [name for name, settings in techniques.techniques(lacking("cpu", 1)).items() if not settings.compiled]


def config_of(shape):
    return model_config(sizes_of(shape, BENCH.sizes, SHAPE))


@pytest.fixture
def in_this_process(monkeypatch):
    """Trains here: a process of its own takes seconds to start, and nothing of it can be broken from here."""
    monkeypatch.setattr(techniques, "in_fresh_processes", lambda function, jobs, **_: [function(jobs[0])])


def run(tmp_path, *words):
    path = tmp_path / "rows.json"
    status = main(["techniques", "--shapes", SHAPE, "--rounds", "1", "--json", str(path), *words])
    return status, {row["variant"]: row for row in json.loads(path.read_text())["rows"]} if path.exists() else {}


@pytest.mark.usefixtures("in_this_process")
def test_every_eager_technique_has_a_whole_row(tmp_path, capsys):
    status, rows = run(tmp_path, "--variants", *EAGER)
    assert status == 0
    left_out = [name for name in EAGER if name not in rows]
    assert left_out in ([], ["larger batch"])
    assert (tmp_path / "rows.png").stat().st_size > 5000
    previous = next(iter(rows.values()))
    for row in rows.values():
        assert row["tokens_per_s"] == pytest.approx(row["rows"] * 16 / row["total_s"])
        assert row["ratio"] == pytest.approx(row["tokens_per_s"] / previous["tokens_per_s"])
        assert row["loss_difference"] <= row["loss_tolerance"] < 1e-3
        assert len(row["losses"]) == technique_process.CURVE
        assert row["losses"][-1] < row["losses"][0] - 0.01  # it trains
        assert row["peak_bytes"] > 0
        assert row["mfu"] is None  # no peak is known of a CPU
        previous = row
    assert rows["per-head loops"]["ratio_to_first"] == 1
    assert rows["chunked loss"]["peak_bytes"] < rows["own operators"]["peak_bytes"]
    assert rows["memory-optimized MLP"]["peak_bytes"] < rows["chunked loss"]["peak_bytes"]
    assert "same losses over 6 steps" in capsys.readouterr().out


def test_a_technique_in_a_process_of_its_own(tmp_path, capsys):
    status, rows = run(tmp_path, "--variants", "fused optimizer")
    assert status == 0
    assert rows["fused optimizer"]["resident_bytes"] > 2**20
    assert rows["fused optimizer"]["dtype"] == "bfloat16"


@pytest.mark.slow
def test_compiled_blocks_and_two_processes(tmp_path, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(techniques.os, "cpu_count", lambda: 2)
    status, rows = run(tmp_path, "--variants", "per-head loops", "compiled blocks", "all devices")
    assert status == 0
    devices = rows["all devices"]
    assert devices["tokens_per_s"] == pytest.approx(2 * devices["rows"] * 16 / devices["total_s"])
    assert rows["compiled blocks"]["peak_bytes"] is None  # what is compiled cannot be seen


@pytest.mark.usefixtures("in_this_process")
@pytest.mark.parametrize("broken", ["scale", "mask", "optimiser"])
def test_wrong_maths_is_reported(tmp_path, capsys, monkeypatch, broken):
    if broken == "scale":
        monkeypatch.setattr(technique_process.F, "scaled_dot_product_attention", _unscaled)
    elif broken == "mask":
        builtin = torch.nn.functional.scaled_dot_product_attention
        monkeypatch.setattr(
            technique_process.F, "scaled_dot_product_attention", lambda q, k, v, is_causal: builtin(q, k, v)
        )
    else:
        monkeypatch.setattr(technique_process, "AdamW", lambda groups, **options: torch.optim.SGD(groups, lr=1e-3))
    name = "fused optimizer" if broken == "optimiser" else "all heads at once"
    status, rows = run(tmp_path, "--variants", "per-head loops", name)
    assert (status, rows) == (2, {})
    error = capsys.readouterr().err.strip()
    assert len(error.splitlines()) == 1
    assert f"the loss of '{name}' at step" in error
    assert "its maths is not the same" in error


def _unscaled(query, key, value, is_causal):
    return (
        torch.nn.functional.softmax(
            (query @ key.mT).masked_fill(~torch.ones(query.shape[-2], key.shape[-2]).bool().tril(), -torch.inf), -1
        )
        @ value
    )


def test_a_larger_batch_of_the_same_rows_is_the_same_maths():
    config = config_of(SHAPE)
    sizes = {"device": "cpu", "context": 16, "period": distinct_rows(8)}
    curves = [technique_process.Training(config, Settings(), rows=rows, **sizes).curve() for rows in (8, 10)]
    assert curves[0] == pytest.approx(curves[1], rel=1e-5)
    assert [distinct_rows(rows) for rows in (1, 6, 8, 12, 64)] == [1, 1, 2, 3, 16]


def test_more_rows_fit_where_the_mlp_is_most_of_the_memory():
    config = config_of("2x2x32x512x16x8x64")
    settings = techniques.techniques({})["larger batch"]
    sizes = {"device": "cpu", "context": 16, "rows": 8, "period": 2}
    found = technique_process.most_rows(config, settings, **sizes)
    assert found > 8
    assert technique_process.most_rows(config, replace(settings, mlp="swiglu"), **sizes) == 8


def test_what_a_device_lacks_is_said():
    assert set(lacking("cpu", 2)) == {"TF32", "CUDA graphs"}
    assert "one GPU" in lacking("cuda", 1)["all devices"]
    assert list(techniques.techniques({})) == list(CHANGES)
    top = techniques.techniques({})["all devices"]
    assert (top.precision, top.compiled, top.cuda_graph) == ("bfloat16", True, False)


def test_tolerance_grows_with_depth_and_with_what_rounding_does():
    assert tolerance(8, 5.0, 1e-5) > tolerance(2, 5.0, 1e-5) > 1e-5
    assert tolerance(2, 5.0, 1e-4) == pytest.approx(10 * tolerance(2, 5.0, 1e-5))
    assert tolerance(2, 5.0, 0.0) > 5 * 2.0**-24  # the loss itself is rounded


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--shapes", "4x4x256"], "must be layers x heads x hidden"),
        (["--shapes", "1x3x32x64x16x4x64"], "hidden_size 32 is not divisible by num_attention_heads 3"),
        (["--variants", "TF32"], "variants 'TF32': there are per-head loops,"),
        (["--dtype", "bfloat16"], "techniques takes only float32"),
    ],
)
def test_mistakes_are_one_line(words, says, capsys):
    assert main(["techniques", *words]) == 2
    error = capsys.readouterr().err.strip()
    assert says in error
    assert len(error.splitlines()) == 1
