"""Sums, not means of means: of an evaluation, and of blocks of validation windows."""

import itertools
import json
import math
from types import SimpleNamespace

import pytest
import torch

from lightning_llm.ablate.results import Result
from lightning_llm.ablate.scheduler import Run
from lightning_llm.data.batches import IGNORED, EvalBatches
from lightning_llm.statistics.windows import window_error
from lightning_llm.training import LanguageModelMetrics, evaluation
from lightning_llm.training.evaluation import Evaluation, WindowSums


def test_batches_of_unequal_size_count_by_their_tokens():
    metrics = LanguageModelMetrics()
    metrics.update(torch.tensor(1.0), 30, 2.0)
    metrics.update(torch.tensor(4.0), 10, 2.0)
    result = metrics.compute()
    assert result["loss"] == 1.75
    assert result["perplexity"] == pytest.approx(math.exp(1.75))
    assert result["bits_per_byte"] == pytest.approx(1.75 / math.log(2) / 2)


def test_without_the_text_there_are_no_bits_per_byte():
    metrics = LanguageModelMetrics()
    metrics.update(torch.tensor(1.0), torch.tensor(3))
    assert "bits_per_byte" not in metrics.compute()


def test_a_loss_beyond_the_range_of_exp_is_an_infinite_perplexity():
    metrics = LanguageModelMetrics()
    metrics.update(torch.tensor(1000.0), 1)
    assert metrics.compute()["perplexity"] == math.inf


def test_sums_on_mps_are_on_the_host(monkeypatch):
    moved = []
    monkeypatch.setattr(LanguageModelMetrics, "to", lambda self, device: moved.append(device) or self)
    for device in ("mps", "cuda"):
        Evaluation(SimpleNamespace(device=torch.device(device), trainer=SimpleNamespace(testing=False)))
    assert [torch.device(device).type for device in moved] == ["cpu", "cpu", "cuda", "cuda"]


def test_the_mean_of_no_tokens_changes_nothing():
    metrics = LanguageModelMetrics()
    metrics.update(torch.tensor(1.0), 2)
    metrics.update(torch.tensor(math.nan), 0)
    assert metrics.compute()["loss"] == 1
    metrics.update(torch.tensor(math.nan), 1)
    assert math.isnan(metrics.compute()["loss"])


# ---- blocks of validation windows


@pytest.fixture
def run(tiny, tmp_path):
    """``run("name", option=value, …)``: the summary of a tiny run, and its windows."""

    def of(name, *words, **changes):
        tiny(
            "fit",
            *words,
            **{"trainer.default_root_dir": name, "trainer.max_steps": 2, "trainer.precision": "32-true", **changes},
        )
        folder = tmp_path / name / "run" / "version_0"
        summary = json.loads((folder / "summary.json").read_text())
        return summary, Result(Run(name, 0), folder, summary["val_loss"], "", summary).windows()

    return of


def loss_of(windows):
    return sum(windows["nats"]) / sum(windows["tokens"])


def test_the_blocks_of_a_run_add_up_to_its_loss_whatever_the_batches(run):
    summary, windows = run("a", **{"data.eval_batch_size": 8})
    assert loss_of(windows) == pytest.approx(summary["val_loss"], abs=1e-6)
    assert windows["windows"][:-1] == [8] * (len(windows["windows"]) - 1)
    assert 1 <= windows["windows"][-1] <= 8
    assert windows["tokens"][0] == 8 * 16
    assert (windows["step"], len(windows["nats"])) == (2, len(windows["tokens"]))
    for name, size, chunks in (("b", 5, 3), ("c", 64, 0)):
        _, others = run(name, **{"data.eval_batch_size": size, "model.loss_chunks": chunks})
        assert (others["windows"], others["tokens"]) == (windows["windows"], windows["tokens"])
        assert others["nats"] == pytest.approx(windows["nats"], rel=1e-6)
    _, other = run("d", **{"data.eval_batch_size": 8, "model.architecture.mlp": "relu"})
    found = window_error([(windows, other)])
    assert 0 < found.pair < 0.1
    assert found.blocks == len(windows["nats"])


def test_a_part_of_the_text_and_a_resume(run, tmp_path):
    some = {"data.eval_batch_size": 12, "trainer.limit_val_batches": 3, "trainer.precision": "bf16-true"}
    summary, windows = run("a", **some)
    assert windows["windows"] == [8, 8, 8, 8, 4]
    assert loss_of(windows) == pytest.approx(summary["val_loss"], abs=1e-6)
    summary, windows = run("a", "--ckpt_path=last", **{**some, "trainer.max_steps": 3})
    assert (windows["step"], summary["steps"]) == (3, 3)
    assert loss_of(windows) == pytest.approx(summary["val_loss"], abs=1e-6)
    _, windows = run("a", "--ckpt_path=last", **{**some, "trainer.max_steps": 4, "trainer.limit_val_batches": 0})
    assert windows is None
    assert not list(tmp_path.rglob("windows.json"))  # not those of step 3


def test_long_texts_have_larger_blocks(run, monkeypatch):
    monkeypatch.setattr(evaluation, "MOST_BLOCKS", 10)
    summary, windows = run("a", **{"trainer.limit_val_batches": 9, "data.eval_batch_size": 12})
    assert windows["windows"] == [16] * 6 + [12]
    assert loss_of(windows) == pytest.approx(summary["val_loss"], abs=1e-6)


def losses_of(window):
    """A window's losses and targets: the last window is short."""
    tokens = 5 if window == 20 else 7
    return torch.arange(tokens) + 1000.0 * window, torch.zeros(tokens, dtype=torch.long)


def sums_of(rank, processes, batch_size):
    """Those of one of several processes, whose batches are those of ``every_target_once`` of 20.7 windows."""
    rows = [*(min(batch_size, 20 - first) for first in range(0, 20, batch_size)), 1]
    loader = EvalBatches(lambda number: {}, len(rows), rank=rank, world_size=processes, rows=rows)
    found, firsts = WindowSums([loader], 1.0, "cpu"), [0, *itertools.accumulate(rows)]
    for number in range(rank, len(loader) * processes, processes):
        used = number if number < len(rows) else 0
        parts = [losses_of(window) for window in range(firsts[used], firsts[used + 1])]
        losses, targets = (torch.stack(each) for each in zip(*parts, strict=True))
        if number >= len(rows):
            targets, losses = torch.full_like(targets, IGNORED), torch.zeros_like(losses)
        found.add(losses, targets != IGNORED, 0)
        found.add(losses, targets != IGNORED, 1)  # the training text
    return found


@pytest.mark.parametrize(("processes", "batch_size"), [(1, 3), (2, 3), (2, 8), (3, 20), (4, 1)])
def test_any_processes_give_the_same_blocks(processes, batch_size):
    expected = [losses_of(window)[0].double().sum() for window in range(21)]
    each = [sums_of(rank, processes, batch_size) for rank in range(processes)]
    total = sum(sums._sums[0] for sums in each)
    trainer = SimpleNamespace(strategy=SimpleNamespace(reduce=lambda part, reduce_op: total))
    for sums in each:
        found = sums.record(trainer)
        assert (found["windows"], found["tokens"]) == ([8, 8, 5], [56, 56, 33])
        assert found["nats"] == [float(sum(expected[first : first + 8])) for first in (0, 8, 16)]


def test_a_loss_that_is_not_finite_leaves_no_record():
    sums = sums_of(0, 1, 3)
    trainer = SimpleNamespace(strategy=SimpleNamespace(reduce=lambda part, reduce_op: part))
    assert sums.record(trainer) is not None
    sums._sums[0][3, 1] = float("nan")
    assert sums.record(trainer) is None


def test_rows_without_a_known_place_are_not_summed():
    loader = EvalBatches(lambda number: {}, 2, rank=0, world_size=1, rows=[1, 1])
    unknown = EvalBatches(lambda number: {}, 2, rank=0, world_size=1)
    trainer = SimpleNamespace(limit_val_batches=1.0, val_dataloaders=[loader, unknown])
    assert WindowSums.of(trainer, 1, "cpu") is not None
    assert WindowSums.of(trainer, 2, "cpu") is None
    for others in (None, unknown, []):
        assert WindowSums.of(SimpleNamespace(limit_val_batches=1.0, val_dataloaders=others), 1, "cpu") is None
