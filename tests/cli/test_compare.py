"""``lightning-llm compare``: groups, means and spreads, and what is called an effect."""

import json
from pathlib import Path

import pytest
import torch
import yaml
from torch.utils.tensorboard import SummaryWriter

from lightning_llm.__main__ import main
from lightning_llm.cli.compare import LARGER, SMALLER, UNKNOWN, effects, group_runs, read_results
from lightning_llm.cli.run_table import Run


def make(folder, mlp="swiglu", seed=1, **results):
    folder.mkdir(parents=True)
    config = {"seed_everything": seed, "data": {"seed": seed}, "model": {"architecture": {"mlp": mlp}}}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    (folder / "summary.json").write_text(json.dumps({"val_loss": 2.0, "seconds": 10.0, **results}))
    return folder


@pytest.fixture
def groups():
    def of(*values):
        return group_runs(
            [(_run(number, mlp, seed), {"val_loss": loss}) for number, (mlp, seed, loss) in enumerate(values)]
        )

    return of


def _run(number, mlp, seed):
    return Run(Path(f"runs/a/version_{number}"), {"mlp": mlp, "seed_everything": seed, "width": 8})


def test_runs_are_grouped_by_what_differs_but_their_seeds(groups):
    first, second = groups(("swiglu", 1, 2.0), ("gelu", 1, 3.0), ("swiglu", 2, 2.5), ("swiglu", 3, 3.0))
    assert (first.name, first.options, first.seeds, len(first.runs)) == ("mlp=swiglu", {"mlp": "swiglu"}, 3, 3)
    assert (second.name, second.seeds, len(second.runs)) == ("mlp=gelu", 1, 1)
    assert first.measures["val_loss"].mean == pytest.approx(2.5)
    assert first.measures["val_loss"].spread == pytest.approx(torch.tensor([2.0, 2.5, 3.0]).std().item())
    assert second.measures["val_loss"].spread is None
    assert "seconds" not in first.measures


@pytest.mark.parametrize(
    ("losses", "verdict"),
    [([2.2, 2.3], SMALLER), ([2.8, 2.9], LARGER), ([1.0, 3.5], SMALLER)],
)
def test_an_effect_is_measured_against_the_larger_spread(groups, losses, verdict):
    baseline, other = groups(
        ("swiglu", 1, 2.0), ("swiglu", 2, 2.4), *(("gelu", seed, loss) for seed, loss in enumerate(losses))
    )
    (effect,) = effects(other, baseline)
    assert effect.verdict == verdict
    assert effect.difference == pytest.approx(sum(losses) / 2 - 2.2)


def test_one_seed_each_tells_no_spread(groups):
    baseline, other = groups(("swiglu", 1, 2.0), ("gelu", 1, 3.0))
    assert [effect.verdict for effect in effects(other, baseline)] == [UNKNOWN]


def test_the_same_seed_again_is_no_spread(groups):
    (group,) = groups(("swiglu", 1, 2.0), ("swiglu", 1, 2.0))
    assert (group.seeds, len(group.runs), group.measures["val_loss"].spread) == (1, 2, None)


def test_the_command_says_what_is_smaller_than_the_spread(tmp_path, capsys):
    root = tmp_path / "runs" / "a"
    for number, (mlp, seed, loss, seconds) in enumerate(
        [("swiglu", 1, 2.0, 10), ("swiglu", 2, 2.2, 11), ("gelu", 1, 2.1, 20), ("gelu", 2, 2.15, 21)]
    ):
        make(root / f"version_{number}", mlp, seed, val_loss=loss, seconds=seconds, peak_memory_gib=1.5)
    file = tmp_path / "out.json"
    assert main(["compare", str(root), "--json", str(file)]) == 0
    said = capsys.readouterr().out
    assert "2.1000 ± 0.1414" in said
    assert "validation loss +0.0250 nats/token (+1.2 %): smaller than the spread of 0.1414" in said
    assert "time +10.0 s (+95.2 %): larger than the spread of 0.7" in said
    assert "1.500" in said
    baseline, other = json.loads(file.read_text())
    assert baseline["options"] == {"mlp": "swiglu"}
    assert baseline["measures"]["val_loss"]["mean"] == pytest.approx(2.1)
    assert baseline["effects"] == []
    assert {effect["metric"]: effect["verdict"] for effect in other["effects"]}["val_loss"] == SMALLER


def test_peak_memory_comes_from_the_curves_where_the_summary_has_none(tmp_path):
    run = make(tmp_path / "a" / "version_0")
    with SummaryWriter(run) as writer:
        for name, value in (("memory/forward_peak_gib", 0.5), ("memory/backward_peak_gib", 0.75), ("memory/x_gib", 9)):
            writer.add_scalar(name, value, 1)
    assert read_results(run)["peak_memory_gib"] == pytest.approx(0.75)


def test_runs_of_the_command_line_are_compared(tiny, capsys):
    for seed in (1, 2):
        tiny("fit", **{"seed_everything": seed})
    capsys.readouterr()
    assert main(["compare", "runs"]) == 0
    row = next(line for line in capsys.readouterr().out.splitlines() if "run/version_0" in line)
    assert "±" in row


@pytest.mark.parametrize(
    ("content", "says"),
    [("{", "is damaged"), ("[]", "is damaged"), ('{"val_loss": "low"}', "is damaged"), (None, "has not ended yet")],
)
def test_what_cannot_be_compared_is_one_line(tmp_path, error_line, content, says):
    run = make(tmp_path / "a" / "version_0")
    if content is None:
        (run / "summary.json").unlink()
    else:
        (run / "summary.json").write_text(content)
    assert main(["compare", str(run)]) == 2
    line = error_line()
    assert line.startswith("lightning-llm compare: error: ")
    assert says in line


@pytest.mark.parametrize("words", [[], ["runs", "--jason", "x"], ["nowhere"]])
def test_a_wrong_command_line_is_one_line(words, error_line, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["compare", *words]) == 2
    assert error_line()
