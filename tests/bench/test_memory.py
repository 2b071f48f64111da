"""``bench memory``: two configs side by side, exact where the MLPs differ."""

import json
import sys

import pytest
import yaml

from lightning_llm.__main__ import main

HIDDEN, INTERMEDIATE, SEQ, BATCH, LAYERS = 32, 96, 16, 4, 2


@pytest.fixture
def configs(text_file, tmp_path, monkeypatch, quick_processes):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "executable", quick_processes.python)  # the runs are processes of the command
    for variable, value in quick_processes.environment.items():
        monkeypatch.setenv(variable, value)
    for name, mlp in (("standard", "swiglu"), ("ours", "memory_optimized_swiglu")):
        architecture = {
            "hidden_size": HIDDEN,
            "intermediate_size": INTERMEDIATE,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": 2,
            "mlp": mlp,
        }
        data = {"path": str(text_file), "tokenizer": "char", "context_length": SEQ, "global_batch_size": BATCH}
        trainer = {"accelerator": "cpu", "callbacks": []}
        config = {"model": {"architecture": architecture}, "data": data, "trainer": trainer}
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(config))
    return ["--config", "standard.yaml", "--config", "ours.yaml"]


def test_the_differences_are_the_mlps(configs, tmp_path, capsys):
    assert main(["bench", "memory", *configs, "--json", "out/rows.json", "--", "--trainer.precision=32-true"]) == 0
    rows = json.loads((tmp_path / "out/rows.json").read_text())["rows"]
    assert (tmp_path / "out/rows.png").stat().st_size > 20_000
    assert [(row["bench"], row["variant"]) for row in rows] == [("memory", "standard.yaml"), ("memory", "ours.yaml")]
    saved = LAYERS * 2 * 4 * BATCH * SEQ * INTERMEDIATE
    assert rows[0]["saved_bytes"] - rows[1]["saved_bytes"] == saved
    assert rows[0]["peak_bytes"] > rows[1]["peak_bytes"]
    first, second = (row["saved"]["by_module"] for row in rows)
    differing = {name for name in first | second if first.get(name) != second.get(name)}
    assert differing == {f"layers.{layer}.mlp" for layer in range(LAYERS)}
    said = capsys.readouterr().out
    assert "ours - standard" in said
    assert "layers.1.mlp" in said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ours.yaml", "out", "standard.yaml", "stores"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "bench memory compares runs: give --config at least two different files"),
        (["--config", "ours.yaml", "--config", "ours.yaml"], "at least two different files"),
        (["--config", "ours.yaml", "--config", "none.yaml"], "config 'none.yaml' is no file and no shipped config"),
    ],
)
def test_a_users_mistake_is_one_line(configs, words, says, capsys):
    assert main(["bench", "memory", *words]) == 2
    error = capsys.readouterr().err.strip()
    assert says in error
    assert len(error.splitlines()) == 1


@pytest.mark.slow
def test_a_run_that_fails_says_why(configs, capsys):
    assert main(["bench", "memory", *configs, "--", "--data.context_length=0"]) == 2
    error = capsys.readouterr().err.strip()
    assert "fit --config standard.yaml failed" in error
    assert "context_length" in error
