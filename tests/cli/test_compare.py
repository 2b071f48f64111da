"""``lightning-llm compare``: groups, means and spreads, pairs, intervals and verdicts."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import yaml
from torch.utils.tensorboard import SummaryWriter

from lightning_llm.__main__ import main
from lightning_llm.ablate import Report
from lightning_llm.ablate.names import AGAIN, BASELINE, NULL, PLAN
from lightning_llm.ablate.next_runs import RunKey
from lightning_llm.ablate.report.from_experiment import report_of
from lightning_llm.ablate.report.from_runs import (
    NO_BITS,
    OTHER_TEXT,
    OTHER_WINDOWS,
    THREADS_DIFFER,
    compare_runs,
    group_runs,
    metric_values,
)
from lightning_llm.ablate.report.sections import SPREAD, TENSORS_ONLY
from lightning_llm.ablate.report.words import ONE_RUN, share_of, simultaneous
from lightning_llm.ablate.results import load_experiment
from lightning_llm.cli.training_output import TrainingSummary
from lightning_llm.runs.find import find_runs
from lightning_llm.runs.status import FAILED, FINISHED, INTERRUPTED, RUNNING, read_summary, unfinished
from lightning_llm.statistics.design import WORSE
from lightning_llm.training.callbacks import StopOnSignal
from lightning_llm.training.metrics import LOSSES, METRICS
from tests.ablate import conftest as ablate_conftest
from tests.tiny_run import killed_process

HASHES = {"batches": "00ff", "validation_batches": "11ee", "initial_values": {"embed": "8x4 float32 aa"}}


def make(folder, mlp="swiglu", seed=1, **results):
    folder.mkdir(parents=True)
    config = {"seed_everything": seed, "data": {"seed": seed}, "model": {"architecture": {"mlp": mlp}}}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    (folder / "summary.json").write_text(json.dumps({"val_loss": 2.0, "seconds": 10.0, **results}))
    return folder


def reports(capsys, *words):
    """The reports of ``compare --format json``."""
    assert main(["compare", *map(str, words), "--format", "json"]) == 0
    content = json.loads(capsys.readouterr().out)
    return [msgspec.convert(one, Report) for one in (content if isinstance(content, list) else [content])]


def cells(printed, *begin):
    """The cells of the only line of a table that begins with these."""
    lines = [re.split(" {2,}", line.strip()) for line in printed.splitlines()]
    (found,) = (line for line in lines if tuple(line[: len(begin)]) == begin)
    return found[len(begin) :]


def several(root, **changes):
    """Two MLPs with four seeds each; ``changes`` are those of the second one's summaries."""
    losses = {"swiglu": (2.0, 2.2, 2.1, 2.1), "gelu": (2.1, 2.31, 2.19, 2.2)}
    for mlp, each in losses.items():
        for seed, loss in enumerate(each):
            results = {**HASHES, "seconds": 10 + seed + 10 * (mlp == "gelu"), "peak_memory_gib": 1.5, "val_loss": loss}
            make(root / f"{mlp}-{seed}", mlp, seed, **{**results, **(changes if mlp == "gelu" else {})})
    return root


def test_the_command_gives_intervals_and_a_verdict(tmp_path, capsys):
    root = several(tmp_path / "runs")
    runs = [str(root / f"{mlp}-{seed}") for mlp in ("swiglu", "gelu") for seed in range(4)]
    assert main(["compare", *runs]) == 0
    said = capsys.readouterr().out
    assert cells(said, "mlp=swiglu", "4")[0] == "2.1000 ± 0.0816"
    assert SPREAD in said
    assert cells(said, "mlp=gelu", "validation loss, nats/token") == [
        *("4", "+0.1000", "+0.0870 to +0.1130", "0.0001", "worse")
    ]
    assert cells(said, "mlp=gelu", "time, s") == ["4 and 4", "+10.0", "+7.8 to +12.2", "<0.0001", "worse"]
    assert cells(said, "mlp=gelu", "peak memory, GiB")[-2:] == ["1.0000", "undecided"]
    both = "mlp=gelu versus mlp=swiglu"
    assert (
        f"{both}, validation loss: worse; difference +0.1000 (+0.0870 to +0.1130) nats/token after 4 pairs; warning: "
        "too few pairs for the sign-flip test (its p is at least 0.12, and must be at most 0.05).\n"
    ) in said
    assert f"{both}: standard deviation of a pair 0.0082 (" in said
    assert "correlation 1.00 (" in said
    assert f"{both}, time: worse; difference +10.0 (+87.0%) (+7.8 to +12.2) s after 4 and 4 unpaired runs.\n" in said
    assert f"{both}, peak memory: neither better nor worse is shown; difference +0.000 (+0.000 to +0.000) GiB" in said
    (report,) = reports(capsys, *runs)
    baseline, other = report.variants.values()
    assert (baseline.options, baseline.folders) == ({"mlp": "swiglu"}, runs[:4])
    assert (other.runs, other.seeds, other.parameters) == (4, 4, 32)
    assert baseline.means["val_loss"].value == pytest.approx(2.1)
    loss, *_ = report.rows
    assert (loss.metric, loss.verdict, loss.pairs, loss.note) == ("val_loss", WORSE, 4, "")
    assert loss.interval == pytest.approx([0.0870, 0.1130], abs=1e-4)
    assert [(pair.seed, pair.baseline, pair.variant) for pair in loss.by_seed][1] == (1, 2.2, 2.31)


def test_the_table_is_printed_for_papers_and_programs(tmp_path, capsys):
    root = several(tmp_path / "runs")
    begins = {
        "markdown": "| mlp=swiglu | validation loss, nats/token | 4 | -0.1000 | -0.1130 to -0.0870 |",
        "latex": r"mlp=swiglu & validation loss, nats/token & 4 & $-0.1000$ & $-0.1130$ to $-0.0870$ &",
        "csv": "mlp=swiglu,mlp=gelu,result,,val_loss,nats/token,4,2.2",
    }
    for format, begin in begins.items():
        assert main(["compare", str(root), "--format", format]) == 0
        assert any(line.startswith(begin) for line in capsys.readouterr().out.splitlines()), format


def test_the_time_of_captured_steps_is_not_compared_with_that_of_others(tmp_path, capsys):
    root = several(tmp_path / "runs", capture=True)
    assert main(["compare", *(str(root / f"{mlp}-{seed}") for mlp in ("swiglu", "gelu") for seed in range(4))]) == 0
    said = capsys.readouterr().out
    both = "mlp=gelu versus mlp=swiglu"
    assert f"{both}, time: no verdict; times of runs with and without trainer.capture are not compared.\n" in said
    assert cells(said, "mlp=gelu", "time, s")[-1] == "no verdict"
    assert f"{both}, validation loss: worse; difference +0.1000" in said
    assert f"{both}, peak memory: neither better nor worse is shown; difference +0.000" in said


def test_the_parts_of_the_loss_are_compared_in_pairs(tmp_path, capsys, monkeypatch):
    parts = {"swiglu": ((1.0, 1.1, 1.2, 1.4), 2.5), "gelu": ((1.5, 1.61, 1.69, 1.9), 2.5)}
    for mlp, (losses, other) in parts.items():
        for seed, loss in enumerate(losses):
            make(tmp_path / f"{mlp}-{seed}", mlp, seed, **{**HASHES, "recall_loss": loss, "other_loss": other + seed})
    words = ["compare", *sorted(map(str, tmp_path.glob("*-*"))), "--baseline", f"{tmp_path}/swiglu-0"]
    assert main([*words, "--delta", "9"]) == 0
    said = capsys.readouterr().out
    both = "mlp=gelu versus mlp=swiglu"
    assert re.search(rf"{both}, recall loss: worse; difference \+0.5000 \(.* nats/token after 4 pairs", said)
    other = re.search(rf"{both}, other loss: (.*)", said)[1]
    assert other.startswith("neither better nor worse is shown; ")  # delta is of the loss
    assert other.endswith("after 4 pairs; the change has no effect on the output, so more seeds tell nothing.")
    group = cells(said, "mlp=swiglu", "4")
    assert group[1:3] == ["1.1750 ± 0.1708", "4.0000 ± 1.2910"]
    (report,) = reports(capsys, *words[1:])
    assert [row.metric for row in report.rows] == ["val_loss", "recall_loss", "other_loss", "seconds"]
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    assert main(words) == 0
    said = capsys.readouterr().out
    assert "recall loss: worse; difference +0.5000" in said
    assert "1.1750 ±" not in said


def test_several_groups_share_the_level(tmp_path, capsys):
    root = several(tmp_path / "runs")
    for seed, loss in enumerate((2.101, 2.309, 2.19, 2.2)):
        make(root / f"relu-{seed}", "relu", seed, **{**HASHES, "val_loss": loss})
    assert main(["compare", str(root), "--delta", "0.02", "--paired"]) == 0
    said = capsys.readouterr().out
    assert f"Intervals and p are adjusted for 2 comparisons. {simultaneous(0.95)}\n" in said
    assert "97.5% interval" in said
    assert "mlp=relu versus mlp=gelu, validation loss: differs by less than 0.02, in either direction; " in said
    assert cells(said, "mlp=relu", "validation loss, nats/token")[-1] == "equivalent"
    assert "mlp=swiglu versus mlp=gelu, validation loss: better, by more than 0.02; difference -0.1000" in said


def test_pairs_that_must_be_pairs_and_are_not_are_one_line(tmp_path, capsys, error_line):
    root = several(tmp_path / "runs", initial_values={"embed": "8x4 float32 bb"})
    runs = [str(root / name) for name in ("swiglu-0", "swiglu-1", "gelu-0", "gelu-1")]
    assert main(["compare", *runs]) == 0
    assert (
        "not paired: seed 0: their initial values differ: embed; a verdict needs at least 4 runs"
        in capsys.readouterr().out
    )
    assert main(["compare", *runs, "--paired"]) == 2
    assert error_line() == (
        "lightning-llm compare: error: mlp=gelu and mlp=swiglu are no pairs: seed 0: their initial values differ: "
        "embed; leave out --paired (docs/dashboard.md)"
    )


@pytest.mark.parametrize("delta", ["0", "-1", "nan"])
def test_a_delta_out_of_range_is_one_line(tmp_path, error_line, delta):
    assert main(["compare", str(several(tmp_path / "runs")), "--delta", delta]) == 2
    assert f"delta must be above 0, got {float(delta)}" in error_line()


@pytest.mark.parametrize(
    ("difference", "base", "says"),
    [
        (0.04, 0.022, ""),
        (-0.04, 10.0, ""),
        (0.2, 1.0, " (+20.0%)"),
        (-0.25, 1.25, " (-20.0%)"),
        (3.0, 0.02, ""),
        (3.0, 0.0, ""),
    ],
)
def test_values_that_print_as_zero_have_no_percentage(tmp_path, capsys, difference, base, says):
    for mlp, seconds in (("swiglu", base), ("gelu", base + difference)):
        make(tmp_path / mlp, mlp, **{**HASHES, "seconds": seconds})
    (report,) = reports(capsys, tmp_path / "swiglu", tmp_path / "gelu")
    row = report.row("mlp=gelu", metric="seconds")
    assert share_of(row) == says
    assert f"difference {difference:+.1f}{says} s after" in str(report)


def test_options_that_a_resume_changed_are_named_with_both_values(tiny, capsys):
    tiny("fit", **{"trainer.max_steps": 3, "model.optimizer.lr": 0.001})
    tiny("fit", "--ckpt_path=last", **{"trainer.max_steps": 6, "model.optimizer.lr": 0.002})
    tiny("fit", "--ckpt_path=last", **{"trainer.max_steps": 6, "model.optimizer.lr": 0.004})
    tiny("fit", **{"model.optimizer.lr": 0.002})
    capsys.readouterr()
    assert main(["compare", "runs"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("changed on resume: ")]
    lr = "model.optimizer.init_args.lr"
    assert lines == [
        f"changed on resume: runs/run/version_0, step 3: {lr}: 0.001 -> 0.002",
        "changed on resume: runs/run/version_0, step 3: trainer.max_steps: 3 -> 6",
        f"changed on resume: runs/run/version_0, step 6: {lr}: 0.002 -> 0.004",
    ]


def test_peak_memory_comes_from_the_curves_where_the_summary_has_none(tmp_path):
    run = make(tmp_path / "a" / "version_0")
    with SummaryWriter(run) as writer:
        for name, value in (("memory/forward_peak_gib", 0.5), ("memory/backward_peak_gib", 0.75), ("memory/x_gib", 9)):
            writer.add_scalar(name, value, 1)
    assert metric_values(run, read_summary(run, METRICS))["peak_memory_gib"] == pytest.approx(0.75)


def test_runs_of_the_command_line_are_compared(tiny, capsys):
    for seed in (1, 2):
        for lr in (0.001, 0.002):
            few = {"trainer.max_steps": 2, "trainer.limit_val_batches": 1}
            tiny("fit", **{"seed_everything": seed, "model.optimizer.lr": lr, **few})
    capsys.readouterr()
    assert main(["compare", "runs", "--paired"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert "±" in next(line for line in said if "0.001" in line)
    assert "after 2 pairs" in next(line for line in said if "validation loss: " in line and "; difference" in line)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", "is damaged"),
        ("[]", "is damaged"),
        ('{"val_loss": "low"}', "is damaged"),
        ('{"val_loss": true}', "val_loss is True, expected a finite number"),
        (f'{{"val_loss": {10**400}}}', "val_loss is 10000"),
        ('{"seconds": [1]}', "seconds is [1], expected a finite number"),
        ('{"changed_on_resume": [3]}', "changed_on_resume[0] is 3, expected text"),
        ('{"batches_at": {"1a": "0"}}', "batches_at is {'1a': '0'}, expected texts by step"),
        ('{"batches_at": {"1": 0}}', "batches_at is {'1': 0}, expected texts by step"),
        ('{"steps": [3]}', "steps is [3], expected a finite number"),
        ('{"package": 3}', "package is 3, expected text"),
        ('{"batches": 3}', "batches is 3, expected text"),
        ('{"initial_values": {"a": 1}}', "initial_values is {'a': 1}, expected texts by name"),
        ('{"threads": "\\u001b[31m"}', "threads is '\\x1b[31m', expected a whole number"),
        ('{"a": "\\ud800"}', "half of a surrogate pair"),
        ("[" * 100_000, "nested too deeply"),
        ("\udcff", "is not UTF-8 text"),
        (None, "has not ended yet"),
    ],
)
def test_what_cannot_be_compared_is_one_line(tmp_path, error_line, content, says):
    run = make(tmp_path / "a" / "version_0")
    if content is None:
        (run / "summary.json").unlink()
    else:
        (run / "summary.json").write_text(content, errors="surrogateescape")
    assert main(["compare", str(run)]) == 2
    line = error_line()
    assert line.startswith("lightning-llm compare: error: ")
    assert says in line


@pytest.mark.parametrize(
    "words", [[], ["runs", "--jason", "x"], ["nowhere"], ["runs", "--format", "xml"], ["runs", "--json", "x"]]
)
def test_a_wrong_command_line_is_one_line(words, error_line, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["compare", *words]) == 2
    assert error_line()


def changed(folder, seed=1, *, trainer=None, **model):
    make(folder, seed=seed)
    config = {"seed_everything": seed, "model": model, "trainer": {"max_steps": 10, **(trainer or {})}}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    return folder


def named(*folders):
    """What the groups of these runs are called."""
    return [group.name for group in group_runs([(run, {}) for run in find_runs([str(folder) for folder in folders])])]


@pytest.mark.parametrize(
    ("first", "second", "names"),
    [
        ({"lr": 0.00012345671}, {"lr": 0.00012345672}, ["lr=0.00012345671", "lr=0.00012345672"]),
        ({"part": "/a/one/x.txt"}, {"part": "/a/two/x.txt"}, ["part=one/x.txt", "part=two/x.txt"]),
        ({"mlp": {"class_path": "a.b.C"}}, {"mlp": {"class_path": "a.d.C"}}, ["mlp=b.C", "mlp=d.C"]),
        ({"part": 1}, {"part": "1"}, ["part=1", 'part="1"']),
        ({"part": None}, {"part": "null"}, ["part=null", 'part="null"']),
        ({"part": True}, {"part": 1}, ["part=true", "part=1"]),
        ({"part": ["a b"]}, {"part": ["a", "b"]}, ['part=["a b"]', 'part=["a", "b"]']),
        ({"config_of_mine": 1}, {"config_of_mine": 2}, ["config_of_mine=1", "config_of_mine=2"]),
    ],
)
def test_two_values_are_two_groups_with_two_names(tmp_path, first, second, names):
    assert named(changed(tmp_path / "a", **first), changed(tmp_path / "b", **second)) == names


def test_long_values_are_not_cut(tmp_path):
    names = named(changed(tmp_path / "a", part="x" * 200), changed(tmp_path / "b", part="x" * 199 + "y"))
    assert [name[-201:] for name in names] == ["=" + "x" * 200, "=" + "x" * 199 + "y"]


def test_equal_numbers_are_one_group(tmp_path):
    assert len(named(changed(tmp_path / "a", clip=1), changed(tmp_path / "b", clip=1.0))) == 1


def test_long_descriptions_of_folders_of_one_name_stay_apart(tmp_path):
    wide = {f"an_option_of_the_model_{n}": n for n in range(20)}
    names = named(changed(tmp_path / "a" / "x" / "version_0"), changed(tmp_path / "b" / "x" / "version_0", **wide))
    assert len(set(names)) == 2


AVERAGING = "lightning.pytorch.callbacks.EMAWeightAveraging"


def averaging(decay, path=AVERAGING):
    return {"callbacks": [{"class_path": path, "init_args": {"decay": decay, "device": None}}]}


def test_callbacks_that_may_change_a_result_are_compared(tmp_path):
    showing = [
        {"class_path": "lightning_llm.training.callbacks.SampleText", "init_args": {"every_n_steps": 5}},
        {"class_path": "lightning.pytorch.callbacks.progress.tqdm_progress.TQDMProgressBar"},
        {"class_path": "lightning.pytorch.callbacks.LearningRateMonitor"},
    ]
    folders = [
        changed(tmp_path / "a"),
        changed(tmp_path / "b", trainer={"callbacks": showing}),
        changed(tmp_path / "c", trainer=averaging(0.9)),
        changed(tmp_path / "d", trainer=averaging(0.99)),
        changed(tmp_path / "e", trainer=averaging(0.9, "my.own.LearningRateMonitor")),
    ]
    assert named(*folders) == [
        "trainer.callbacks=[]",
        "trainer.callbacks=[EMAWeightAveraging], trainer.callbacks.EMAWeightAveraging.decay=0.9",
        "trainer.callbacks=[EMAWeightAveraging], trainer.callbacks.EMAWeightAveraging.decay=0.99",
        "trainer.callbacks=[LearningRateMonitor]",
    ]
    assert len(named(*folders[:2])) == 1


@pytest.mark.filterwarnings("ignore:You're using the WeightAveraging callback")
def test_averaged_weights_of_a_run_are_compared(finished, tiny, capsys):
    tiny("fit", **{"trainer.callbacks": averaging(0.5)["callbacks"]})
    capsys.readouterr()
    assert main(["compare", "runs"]) == 0
    assert "trainer.callbacks=[EMAWeightAveraging] versus trainer.callbacks=[]" in capsys.readouterr().out


def test_threads_are_groups_and_said(tmp_path, capsys):
    for number, threads in enumerate((1, 2, 2)):
        folder = make(tmp_path / "runs" / f"version_{number}", seed=number)
        (folder / "summary.json").write_text(json.dumps({"val_loss": 2.0, "threads": threads}))
    assert main(["compare", str(tmp_path / "runs")]) == 0
    said = capsys.readouterr().out
    assert "threads=2 versus threads=1" in said
    assert said.count(THREADS_DIFFER) == 1


# ---- texts, tokenizers, sizes


def on_text(folder, mlp="swiglu", tokenizer="char", text="my.txt", initial="8x4", **results):
    """A run on a text, with the hashes of what it used."""
    values = {
        "initial_values": {"embed": f"{initial} float32 aa"},
        "batches": text,
        "validation_batches": text + tokenizer,
    }
    make(folder, mlp, **{**HASHES, **values, "bits_per_byte": 2.0, **results})
    data = {"seed": 1, "path": text, "tokenizer": tokenizer, "vocab_size": 4096}
    config = {"seed_everything": 1, "data": data, "model": {"architecture": {"mlp": mlp}}}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    return str(folder)


def test_each_text_has_its_own_table(tmp_path, capsys, error_line):
    other = on_text(tmp_path / "a", text="other.txt", val_loss=9.0)
    swiglu, relu = (on_text(tmp_path / mlp, mlp, val_loss=loss) for mlp, loss in (("swiglu", 2.0), ("relu", 2.5)))
    assert main(["compare", other, swiglu, relu]) == 0
    said = capsys.readouterr().out
    titles = ["Runs on data.path other.txt", "Runs on data.path my.txt"]
    assert [line for line in said.splitlines() if line.startswith("Runs on data")] == titles
    assert {line.partition(",")[0] for line in said.splitlines() if " versus " in line} == {
        "mlp=relu versus mlp=swiglu"
    }
    assert "mlp=relu versus mlp=swiglu, validation loss: neither better nor worse is shown; difference +0.5000" in said
    assert said.count(OTHER_TEXT) == 1
    assert main(["compare", swiglu, relu]) == 0
    assert OTHER_TEXT not in capsys.readouterr().out
    assert [report.name for report in reports(capsys, other, swiglu)] == ["data.path other.txt", "data.path my.txt"]
    assert main(["compare", other, swiglu, relu, "--paired"]) == 2
    assert "has no other group to be compared with; leave out --paired" in error_line()


def test_a_difference_of_one_run_points_to_ablate(tmp_path, capsys):
    for mlp, loss in (("swiglu", 2.0), ("relu", 2.5), ("gelu", 2.25)):
        make(tmp_path / mlp, mlp, **{**HASHES, "val_loss": loss})
    assert main(["compare", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "one pair: no interval" in said
    assert said.count(ONE_RUN) == 1
    assert "Simultaneous" not in said
    assert main(["compare", str(several(tmp_path / "runs"))]) == 0
    assert ONE_RUN not in capsys.readouterr().out


def test_other_numbers_of_steps_are_reported(tmp_path, capsys):
    assert main(["compare", str(several(tmp_path / "runs", steps=200))]) == 0
    assert "steps are not" not in capsys.readouterr().out  # those of the baseline are not recorded
    for run in sorted((tmp_path / "runs").glob("swiglu-*/summary.json")):
        run.write_text(json.dumps({**json.loads(run.read_text()), "steps": 1000}))
    runs = [str(run) for mlp in ("swiglu", "gelu") for run in sorted((tmp_path / "runs").glob(f"{mlp}-*"))]
    assert main(["compare", *runs]) == 0
    assert "mlp=gelu versus mlp=swiglu: steps are not equal: 200 versus 1,000.\n" in capsys.readouterr().out
    run.write_text(json.dumps({**json.loads(run.read_text()), "steps": 100}))
    assert main(["compare", *runs]) == 0
    assert "\nmlp=gelu: steps are not equal: 200 versus 100 and 1,000.\n" in capsys.readouterr().out


def test_experiments_in_a_folder_of_runs_are_listed(tmp_path, capsys):
    several(tmp_path / "runs")
    for name in ("first", "second"):
        (tmp_path / "runs" / name / "runs").mkdir(parents=True)
        (tmp_path / "runs" / name / PLAN).write_text("{}")
    assert main(["compare", str(tmp_path / "runs")]) == 0
    root = tmp_path / "runs"
    said = capsys.readouterr().out
    assert f"not compared: {root}/first, {root}/second: experiments, each of which is compared alone\n" in said


def test_the_same_validation_batches_are_the_same_text(tmp_path, capsys):
    first = on_text(tmp_path / "a", text="my.txt")
    second = on_text(tmp_path / "b", "relu", text="copy.txt", validation_batches="my.txtchar", batches="my.txt")
    assert main(["compare", first, second, "--paired"]) == 0
    assert "1 pair" in capsys.readouterr().out


def test_other_validation_windows_get_no_verdict(tmp_path, capsys):
    """Runs on one text, each side with its own windows of it."""
    for side, mlp in enumerate(("swiglu", "relu")):
        for seed in range(4):
            on_text(tmp_path / f"{mlp}{seed}", mlp, validation_batches=f"{side}", val_loss=2.0 + side + seed / 1000)
    assert main(["compare", str(tmp_path), "--delta", "0.1"]) == 0
    said = capsys.readouterr().out
    assert f"validation loss: no verdict; {OTHER_WINDOWS}" in said
    assert not re.search("(loss|nats/token).*(better|worse|equivalent)", said.partition("pair")[2])
    (report,) = reports(capsys, tmp_path, "--delta", "0.1")
    (row,) = (row for row in report.rows if row.metric in LOSSES)
    assert (row.metric, row.verdict, row.difference) == ("val_loss", "no verdict", None)


def test_other_tokenizers_have_no_verdict_on_a_part_of_the_text(tmp_path, capsys):
    runs = [on_text(tmp_path / name, tokenizer=name, val_loss=2.0) for name in ("char", "byte")]
    config = yaml.safe_load((tmp_path / "byte" / "config.yaml").read_text())
    (tmp_path / "byte" / "config.yaml").write_text(yaml.safe_dump({**config, "trainer": {"limit_val_batches": 2}}))
    assert main(["compare", *runs]) == 0
    said = capsys.readouterr().out
    assert f"validation loss: no verdict; {OTHER_WINDOWS}" in said
    assert NO_BITS not in said
    assert not re.search("bits/byte +[0-9]+ +[+-]|bits/byte after", said)


def test_the_baseline_can_be_named(tmp_path, capsys, error_line):
    swiglu, relu, other = (
        on_text(tmp_path / name, name, text=text) for name, text in (("swiglu", "a"), ("relu", "a"), ("gelu", "b"))
    )
    assert main(["compare", swiglu, other, "--baseline", relu]) == 0
    assert "mlp=swiglu versus mlp=relu" in capsys.readouterr().out
    assert main(["compare", swiglu, "--baseline", str(tmp_path)]) == 2
    assert f"--baseline {tmp_path} holds 3 runs: give one of them" in error_line()
    (tmp_path / "relu" / "summary.json").unlink()
    assert main(["compare", swiglu, "--baseline", relu]) == 2
    assert f"--baseline {relu} has not finished: has not ended yet" in error_line()


def test_other_tokenizers_are_compared_in_bits_per_byte(tmp_path, capsys):
    char = on_text(tmp_path / "a", val_loss=2.0, bits_per_byte=2.5, recall_loss=1.5)
    byte = on_text(tmp_path / "b", tokenizer="byte", val_loss=1.0, bits_per_byte=3.0, recall_loss=1.0)
    assert main(["compare", char, byte, "--paired", "--delta", "0.1"]) == 0
    said = capsys.readouterr().out
    assert "validation loss: neither better nor worse is shown; difference +0.5000 bits/byte after 1 pair" in said
    assert not re.search("nats/token +[0-9]+ +[+-]|nats/token after", said)
    (report,) = reports(capsys, char, byte)
    assert {row.metric for row in report.rows} == {"bits_per_byte", "seconds"}
    assert (report.metric, report.unit) == ("bits_per_byte", "bits/byte")
    none = on_text(tmp_path / "c", tokenizer="bpe", bits_per_byte=None)
    assert main(["compare", char, none]) == 0
    assert f": {NO_BITS}\n" in capsys.readouterr().out


@pytest.mark.parametrize(("shape", "says"), [("808x1", False), ("809x1", True), ("2x2x300", True)])
def test_models_of_other_sizes_are_reported(tmp_path, capsys, shape, says):
    first, second = on_text(tmp_path / "a", initial="800"), on_text(tmp_path / "b", "relu", initial=shape)
    assert main(["compare", first, second]) == 0
    assert ("parameters are not equal: " in capsys.readouterr().out) == says


def test_groups_are_named_by_what_differs_between_them(tmp_path, capsys):
    runs = [
        changed(tmp_path / str(number), mlp=mlp, lr=lr) for number, (mlp, lr) in enumerate([(1, 1), (1, 2), (3, 1)])
    ]
    assert main(["compare", *map(str, runs)]) == 0
    said = capsys.readouterr().out
    assert "\nlr=2 versus lr=1, validation loss: " in said
    assert "\nmlp=3 versus mlp=1, validation loss: " in said


def in_terminal(capsys, monkeypatch, *words, width=80):
    """What a terminal of so many columns shows."""
    with monkeypatch.context() as patch:
        patch.setenv("COLUMNS", str(width))
        patch.setattr("sys.stdout.isatty", lambda: True, raising=False)
        assert main(["compare", *map(str, words)]) == 0
    return re.sub("\x1b\\[[0-9;]*m", "", capsys.readouterr().out)


def table_lines(said):
    """The lines of tables."""
    return [line.rstrip() for line in said.splitlines() if line.startswith(" ") and line.strip()]


def test_a_narrow_table_cuts_no_word_and_no_number(tmp_path, capsys, monkeypatch):
    several(tmp_path)
    for run in tmp_path.glob("gelu-*/config.yaml"):
        run.write_text(run.read_text().replace("gelu", "memory_optimized_swiglu"))
    lines = table_lines(in_terminal(capsys, monkeypatch, tmp_path, "--baseline", tmp_path / "swiglu-0"))
    assert max(map(len, lines)) <= 80
    assert "…" not in "".join(lines)
    words = ["memory_", "optimized_", "swiglu", "2.1000 ± 0.0816", "nats/token", "validation loss,", "+0.1000"]
    for word in [*words, "+0.0870 to +0.1130", "worse", "1.500 ± 0.000", "undecided"]:
        assert any(word in line for line in lines), word
    wide = table_lines(in_terminal(capsys, monkeypatch, tmp_path, "--baseline", tmp_path / "swiglu-0", width=200))
    assert any("mlp=memory_optimized_swiglu   validation loss, nats/token   4" in line for line in wide)


def test_long_names_stand_below_a_narrow_table_with_one_number_each(tmp_path, capsys, monkeypatch):
    same = {f"option_{letter}": letter * 9 for letter in "bcdefg"}
    runs = [changed(tmp_path / "a", **same, rope_theta=0), changed(tmp_path / "b", **same, rope_theta=1)]
    runs.append(changed(tmp_path / "c", **dict.fromkeys(same, "x"), rope_theta=2))
    said = in_terminal(capsys, monkeypatch, *runs)
    lines = table_lines(said)
    assert max(map(len, lines)) <= 80
    names = list(reports(capsys, *runs)[0].variants)
    assert [any(line.split()[:3] == [number, "1", "2.0000"] for line in lines) for number in "123"] == [True] * 3
    assert not any(line.split()[0] == "1" and "validation loss" in line for line in lines)
    assert any(line.split()[:3] == ["3", "validation", "loss,"] for line in lines)
    legend = [f"{number}: {name}" for number, name in enumerate(names, 1)]
    assert [line for line in said.splitlines() if re.match("[0-9]+: ", line)] == [*legend, *legend[1:]]
    assert "1: " not in "\n".join(table_lines(in_terminal(capsys, monkeypatch, *runs, width=600)))


def test_comparing_needs_no_torch(tmp_path):
    run = make(tmp_path / "a", peak_memory_gib=1.0)
    code = f"import sys; from lightning_llm.__main__ import main; main(['compare', {str(run)!r}])"
    code += "; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


# ---- experiments

experiment = ablate_conftest.experiment


def test_an_experiment_is_compared_by_its_plan(experiment, capsys, tmp_path, error_line):
    plan = experiment({"wider": {"effect": -0.02}}, looks=(4,), delta=0.005)
    for name, seeds in ((BASELINE, 4), (AGAIN, 1), (NULL, 4), ("wider", 4)):
        for seed in range(seeds):
            train(plan, name, seed)
    assert main(["compare", str(plan.out)]) == 0
    said = capsys.readouterr().out
    loaded = report_of(load_experiment(plan.out))
    assert reports(capsys, plan.out) == [loaded]
    assert loaded.row("wider").difference == pytest.approx(-0.02, rel=0.01)
    assert loaded.variants[BASELINE].runs == loaded.row("wider").pairs == 4
    assert "wider: better, by more than 0.005; difference -0.0200 (" in said
    assert not (plan.out / "report.json").exists()  # it only reads
    assert main(["compare", str(plan.out / "runs")]) == 0
    assert capsys.readouterr().out == said
    assert main(["compare", str(plan.out), "--delta", "0.1"]) == 2
    assert "is an experiment" in error_line()


def train(plan, name, seed):
    """A run as the stand-in for ``fit`` writes it."""
    asked = yaml.safe_load(plan.config(name).read_text())
    values = {"embed": "2x2 float32 00", "layers.0.mlp.up": f"2x2 float32 {asked.get('drawn', '00')}"}
    loss = 3.0 + 0.01 * seed + asked["effect"] * (1 + 0.001 * (seed % 3))
    folder = plan.run_dir(RunKey(name, seed))
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("{}")
    summary = {"val_loss": loss, "seconds": 1.0, "steps": 6, **HASHES, "initial_values": values}
    (folder / "summary.json").write_text(json.dumps(summary))


# ---- runs without a result


@pytest.mark.parametrize(
    ("facts", "says"),
    [
        (None, "has not ended yet, or was killed; step 40"),
        ({"status": FAILED, "reason": "step 7: the loss is NaN"}, "failed (step 7: the loss is NaN); step 40"),
        ({"status": INTERRUPTED, "step": 41, "val_loss": 2.5}, "interrupted; step 41, last validation loss 2.5000"),
        ({"status": RUNNING, "val_loss": None, "process": os.getpid()}, "still trains; step 40"),
        ({"status": RUNNING, "val_loss": 2.25, "process": -1}, "killed; step 40, last validation loss 2.2500"),
        ({"status": RUNNING, "host": "elsewhere"}, "still trains on elsewhere, or was killed; step 40"),
    ],
)
def test_runs_without_a_result_are_named_and_not_averaged(tmp_path, capsys, facts, says):
    root = tmp_path / "runs"
    make(root / "version_0", val_loss=2.0)
    other = make(root / "version_1", val_loss=9.0)
    (other / "checkpoints").mkdir()
    (other / "checkpoints" / "step-00000040.ckpt").touch()
    if facts is None:
        (other / "summary.json").unlink()
    else:  # the summary is of an earlier end: the run went on
        process = killed_process() if facts.get("process") == -1 else facts.get("process")
        (other / "status.json").write_text(json.dumps({"host": socket.gethostname(), **facts, "process": process}))
    assert main(["compare", str(root)]) == 0
    said = capsys.readouterr().out
    assert f"not compared: {other}: {says}\n" in said
    assert "9.0" not in said
    assert "2.0000" in said
    assert main(["compare", str(other)]) == 2
    assert f"no run has finished: {other}: {says}" in capsys.readouterr().err


def test_a_run_says_how_it_ended(tiny, monkeypatch):
    def status():
        return json.loads(Path("runs/run/version_0/status.json").read_text())

    def fail(*args):
        raise RuntimeError("two\nlines")

    with monkeypatch.context() as patch:
        patch.setattr(StopOnSignal, "on_train_batch_end", fail)
        with pytest.raises(RuntimeError):
            tiny("fit", **{"trainer.max_steps": 3})
    assert unfinished(Path("runs/run/version_0")) == "failed (two lines); step 1"
    shutil.rmtree("runs")
    with monkeypatch.context() as patch:
        patch.setattr(TrainingSummary, "finish", lambda *args: None)  # killed after its last validation
        tiny("fit")
    assert (status()["status"], status()["step"]) == (RUNNING, 6)
    loss = status()["val_loss"]
    tiny("fit", ckpt_path="last")
    assert (status()["status"], status()["val_loss"]) == (FINISHED, pytest.approx(loss))
    assert unfinished(Path("runs/run/version_0")) is None


def test_older_summaries_with_infinity_are_read(tmp_path):
    run = make(tmp_path / "a", val_loss=float("inf"))
    assert metric_values(run, read_summary(run, METRICS)) == {"seconds": 10.0}


# ---- memory of a sampled step


def test_memory_differs_where_the_models_do(text_file, tmp_path, monkeypatch, capsys):
    """By as much as two MLPs save for backward, at both points in the step, and in no other module."""
    monkeypatch.chdir(tmp_path)
    hidden, width, context, rows, layers = 32, 96, 16, 4, 2
    shape = {"hidden_size": hidden, "intermediate_size": width, "num_hidden_layers": layers, "num_attention_heads": 2}
    data = {"path": str(text_file), "tokenizer": "char", "context_length": context, "global_batch_size": rows}
    for name, mlp in (("standard", "swiglu"), ("ours", "memory_optimized_swiglu")):
        config = {"model": {"architecture": {**shape, "mlp": mlp}}, "data": data, "trainer": {"accelerator": "cpu"}}
        Path(f"{name}.yaml").write_text(yaml.safe_dump(config))
        words = ["--config", f"{name}.yaml", "--config", "memory-profile", "--trainer.precision=32-true"]
        assert main(["fit", *words]) == 0
    capsys.readouterr()
    assert main(["compare", "runs/standard", "runs/ours"]) == 0
    said = capsys.readouterr().out
    assert "At the peak of step 3" in said
    assert "Saved by forward when the last backward of step 3 begins" in said
    assert TENSORS_ONLY in said
    assert re.search(r"MiB +mlp=swiglu +mlp=memory_optimized_swiglu +difference", said)
    (report,) = reports(capsys, "runs/standard", "runs/ours")
    first, second = report.memory.variants.values()
    assert report.memory.step == 3
    saved = layers * 2 * 4 * rows * context * width
    assert first["saved"]["bytes"] - second["saved"]["bytes"] == saved
    assert first["peak"]["bytes"] > second["peak"]["bytes"]
    sizes, others = first["saved"]["by_module"], second["saved"]["by_module"]
    assert {name for name in sizes | others if sizes.get(name) != others.get(name)} == {"layers.0.mlp", "layers.1.mlp"}


def sampled(run, size=1):
    """A step of a run whose memory was sampled, with so many bytes in module ``a``."""
    point = {"bytes": size, "by_kind": {}, "by_module": {"a": size}}
    (run / "memory").mkdir()
    (run / "memory" / "step-2.json").write_text(json.dumps({"peak": point, "saved": point}))


def test_memory_that_one_group_sampled_is_in_the_json_alone(tmp_path, capsys):
    root = several(tmp_path / "runs")
    sampled(root / "gelu-0")
    assert main(["compare", str(root)]) == 0
    assert TENSORS_ONLY not in capsys.readouterr().out
    memory = reports(capsys, root)[0].memory
    assert memory.step == 2
    assert {name: points["peak"]["bytes"] for name, points in memory.variants.items()} == {"mlp=gelu": 1}


def test_three_groups_with_memory_are_called_by_numbers(tmp_path, capsys):
    runs = [make(tmp_path / f"{mlp}-0", mlp) for mlp in ("swiglu", "gelu", "relu")]
    for number, run in enumerate(runs):
        sampled(run, (number + 1) << 20)
    assert main(["compare", *map(str, runs)]) == 0
    said = capsys.readouterr().out
    assert "\n1: mlp=swiglu\n2: mlp=gelu\n3: mlp=relu\n" in said
    assert re.search(r"MiB +1 +2 +2 - 1 +3 +3 - 1 *\n", said)
    assert re.search(r"\n all +1.0 +2.0 +\+1.0 +3.0 +\+2.0 *\n", said)


def test_a_folder_of_the_current_one_gives_no_run_its_memory(tmp_path, monkeypatch, capsys):
    """Only the folder of a run has its memory."""
    several(tmp_path / "runs")
    sampled(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert reports(capsys, "runs")[0].memory is None


def test_the_second_of_two_texts_has_the_notes(tmp_path):
    for text in ("one", "two"):
        config = {"data": {"path": f"{text}.txt"}, "model": {"architecture": {"mlp": "gelu"}}}
        run = make(tmp_path / "runs" / text)
        (run / "config.yaml").write_text(yaml.safe_dump(config))
    (make(tmp_path / "runs" / "three") / "summary.json").unlink()
    first, second = compare_runs([str(tmp_path / "runs")], None, None, must_pair=False)
    assert [first.name, second.name] == ["data.path one.txt", "data.path two.txt"]
    assert first.notes == []
    assert second.notes[0] == OTHER_TEXT
    assert second.notes[1].startswith(f"not compared: {tmp_path / 'runs' / 'three'}: has not ended yet")


def test_a_pair_is_called_by_its_seed_or_by_both(tmp_path, capsys):
    for mlp in ("swiglu", "gelu"):
        make(tmp_path / f"{mlp}-0", mlp, 7, **HASHES)
        config = {"seed_everything": 1, "data": {"seed": 2}, "model": {"architecture": {"mlp": mlp}}}
        (make(tmp_path / f"{mlp}-1", **HASHES) / "config.yaml").write_text(yaml.safe_dump(config))
    row, *_ = reports(capsys, tmp_path)[0].rows
    assert [pair.seed for pair in row.by_seed] == [7, "1, 2"]


def test_a_seed_that_ran_twice_counts_once_in_the_table(tmp_path, capsys):
    """The mean and the spread are over seeds, as in the difference below the table."""
    for number, (seed, loss) in enumerate(((0, 1.0), (0, 3.0), (1, 4.0))):
        make(tmp_path / f"gelu-{number}", "gelu", seed, val_loss=loss)
    assert main(["compare", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert re.search(r"group +runs +seeds", said)
    assert re.search(r"3 +2 +3.0000 ± 1.4142", said)
