"""Sums, not means of means: of an evaluation, and of blocks of validation windows."""

import itertools
import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lightning_llm.ablate.experiment import Experiment
from lightning_llm.ablate.fit.program import Fit
from lightning_llm.ablate.next_runs import RunKey
from lightning_llm.ablate.plan import Plan, PlanRecord
from lightning_llm.ablate.results import Result
from lightning_llm.data.batches import IGNORED, EvalBatches, Share
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
    metrics.update(torch.tensor(math.nan), 1)
    assert math.isnan(metrics.compute()["perplexity"])


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


# ---- recall


def pairs_of(batch):
    """Whether each target's pair with its input is in the row before it."""
    rows = [
        list(zip(*row, strict=True)) for row in zip(batch["input_ids"].tolist(), batch["targets"].tolist(), strict=True)
    ]
    return torch.tensor([[pair in row[:place] for place, pair in enumerate(row)] for row in rows])


def test_the_losses_of_repeated_bigrams_and_of_the_others_are_those_of_their_tokens():
    trainer = SimpleNamespace(testing=False, val_dataloaders=None)
    found = Evaluation(SimpleNamespace(device=torch.device("cpu"), trainer=trainer))
    generator = torch.Generator().manual_seed(0)
    nats, tokens = torch.zeros(2, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
    for rows, seq in ((5, 40), (1, 7), (3, 40)):
        ids = torch.randint(6, (rows, seq + 1), generator=generator)
        batch = {"input_ids": ids[:, :-1], "targets": ids[:, 1:]}
        losses = 9 * torch.rand(rows, seq, generator=generator)
        found.add(losses, batch, 0)
        found.add(losses, batch, 1)  # the training text
        sides = torch.stack([pairs_of(batch), ~pairs_of(batch)])
        nats += (losses.double() * sides).sum((1, 2))
        tokens += sides.sum((1, 2))
    empty = {"input_ids": ids[:, :-1], "targets": torch.full_like(losses, IGNORED, dtype=torch.long)}
    found.add(torch.zeros_like(losses), empty, 0)  # a batch that makes all processes have as many
    results = found.results()
    assert results["val_recall_loss"] == pytest.approx(float(nats[0] / tokens[0]), rel=1e-12)
    assert results["val_other_loss"] == pytest.approx(float(nats[1] / tokens[1]), rel=1e-12)
    assert results["val_recall_share"] == float(tokens[0] / tokens.sum())
    assert results["val_loss"] == pytest.approx(float(nats.sum() / tokens.sum()), abs=1e-6)
    assert not found._metrics["train"].recall.any()


def test_without_repeated_bigrams_there_is_no_loss_of_them():
    trainer = SimpleNamespace(testing=True)
    found = Evaluation(SimpleNamespace(device=torch.device("cpu"), trainer=trainer))
    ids = torch.arange(8)[None]
    found.add(torch.ones(1, 7), {"input_ids": ids[:, :-1], "targets": ids[:, 1:]}, 0)
    results = found.results()
    assert (results["test_other_loss"], results["test_recall_share"]) == (1.0, 0.0)
    assert "test_recall_loss" not in results


FLOAT32 = 2.5e-7  # the last place of a loss between 2 and 4: both sides are of numbers that Lightning logs in float32


def test_a_run_records_losses_that_add_up_to_the_validation_loss(run):
    for number, changes in enumerate(({}, {"trainer.limit_val_batches": 2, "data.eval_batch_size": 5})):
        summary, _ = run(f"run-{number}", **changes)
        share = summary["recall_share"]
        assert 0 < share < 1
        assert summary["recall_loss"] != pytest.approx(summary["other_loss"], abs=1e-4)
        whole = share * summary["recall_loss"] + (1 - share) * summary["other_loss"]
        assert whole == pytest.approx(summary["val_loss"], abs=FLOAT32)


# ---- blocks of validation windows


PLAN = Plan(Path("out"), PlanRecord(experiment=Experiment(name="test", variants={}), variants={}, program="fit"))


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
        return summary, Result(RunKey(name, 0), folder, summary["val_loss"], "", summary, Fit(PLAN)).windows()

    return of


def loss_of(windows):
    return sum(windows["nats"]) / sum(windows["tokens"])


def test_the_blocks_of_a_run_add_up_to_its_loss_whatever_the_batches(run):
    summary, windows = run("a", **{"data.eval_batch_size": 8})
    assert loss_of(windows) == pytest.approx(summary["val_loss"], abs=FLOAT32)
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
    assert windows["windows"] == [8, 8, 8]
    assert loss_of(windows) == pytest.approx(summary["val_loss"], abs=FLOAT32)
    summary, windows = run("a", "--ckpt_path=last", **{**some, "trainer.max_steps": 3})
    assert (windows["step"], summary["steps"]) == (3, 3)
    assert loss_of(windows) == pytest.approx(summary["val_loss"], abs=FLOAT32)
    _, windows = run("a", "--ckpt_path=last", **{**some, "trainer.max_steps": 4, "trainer.limit_val_batches": 0})
    assert windows is None
    assert not list(tmp_path.rglob("windows.json"))  # not those of step 3


def test_long_texts_have_larger_blocks(run, monkeypatch):
    monkeypatch.setattr(evaluation, "MOST_BLOCKS", 10)
    summary, windows = run("a", **{"trainer.limit_val_batches": 13, "data.eval_batch_size": 12})
    assert windows["windows"] == [16] * 6 + [8]
    assert loss_of(windows) == pytest.approx(summary["val_loss"], abs=FLOAT32)


def losses_of(window):
    """A window's losses and targets: the last window is short."""
    tokens = 5 if window == 20 else 7
    return torch.arange(tokens) + 1000.0 * window, torch.zeros(tokens, dtype=torch.long)


def sums_of(rank, processes, batch_size):
    """Those of one of several processes, whose batches are those of ``every_target_once`` of 20.7 windows."""
    rows = [*(min(batch_size, 20 - first) for first in range(0, 20, batch_size)), 1]
    loader = EvalBatches(lambda number: {}, len(rows), Share(rank, processes), rows)
    found, firsts = WindowSums([loader], "cpu"), [0, *itertools.accumulate(rows)]
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
    loader = EvalBatches(lambda number: {}, 2, Share(), rows=[1, 1])
    unknown = EvalBatches(lambda number: {}, 2, Share())
    trainer = SimpleNamespace(val_dataloaders=[loader, unknown])
    assert WindowSums.of(trainer, 1, "cpu") is not None
    assert WindowSums.of(trainer, 2, "cpu") is None
    for others in (None, unknown, []):
        assert WindowSums.of(SimpleNamespace(val_dataloaders=others), 1, "cpu") is None
