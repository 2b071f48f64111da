"""Metrics as JSON lines: each at once, none twice."""

import json
from pathlib import Path

import pytest

from lightning_llm.training.json_logger import JSONLinesLogger
from tests.cli.test_loggers import JSON_LINES, yaml_logger


def lines(logger):
    return [json.loads(line) for line in Path(logger.log_dir, "metrics.jsonl").read_text().splitlines()]


def log(logger, *entries):
    for step, metrics in entries:
        logger.log_metrics(metrics, step)


def test_an_entry_is_a_line_at_once(tmp_path):
    logger = JSONLinesLogger(str(tmp_path), "mine")
    assert logger.log_dir == logger.save_dir == str(tmp_path / "mine" / "version_0")
    log(logger, (1, {"a": 0.5}))
    assert lines(logger) == [{"step": 1, "a": 0.5}]
    log(logger, (2, {"a": float("nan"), "b": float("inf")}))
    assert lines(logger)[1:] == [{"step": 2, "a": None, "b": None}]


def test_each_run_gets_the_next_number(tmp_path):
    for number in (0, 3, 10):
        (tmp_path / "run" / f"version_{number}").mkdir(parents=True)
    (tmp_path / "run" / "version_old").mkdir()
    assert JSONLinesLogger(str(tmp_path)).version == 11
    assert JSONLinesLogger(str(tmp_path), version="best").log_dir == str(tmp_path / "run" / "best")


OLD = [(2, {"train": 1.0}), (3, {"val": 1.5}), (4, {"train": 2.0}), (4, {"val": 2.5}), (6, {"train": 3.0})]


@pytest.mark.parametrize(
    ("first", "kept"),
    [
        ((4, {"train": 9.0}), 2),  # gone on from step 3: what follows comes again
        ((4, {"val": 9.0}), 3),  # gone on from step 4, with a validation that was owed
        ((3, {"val": 9.0}), 1),
        ((3, {"other": 9.0}), 2),
        ((8, {"train": 9.0}), 5),
        ((1, {"train": 9.0}), 0),
    ],
)
def test_going_on_cuts_what_comes_again(tmp_path, first, kept):
    log(JSONLinesLogger(str(tmp_path), version=0), *OLD)
    again = JSONLinesLogger(str(tmp_path), version=0)
    log(again, first)
    expected = [{"step": step, **metrics} for step, metrics in [*OLD[:kept], first]]
    assert lines(again) == expected


def test_a_half_written_line_is_cut(tmp_path):
    logger = JSONLinesLogger(str(tmp_path), version=0)
    log(logger, *OLD)
    with Path(logger.log_dir, "metrics.jsonl").open("a") as file:
        file.write('{"step": 8, "tr')
    again = JSONLinesLogger(str(tmp_path), version=0)
    log(again, (8, {"train": 4.0}))
    assert lines(again) == [{"step": step, **metrics} for step, metrics in [*OLD, (8, {"train": 4.0})]]


@pytest.mark.parametrize(
    "line", ["[]", "null", "{", '{"step": "x"}', '{"step": NaN}', '{"step": -1}', '{"step": true}', "[" * 100_000]
)
def test_a_run_that_goes_on_cuts_metrics_at_a_damaged_line(tmp_path, line):
    folder = tmp_path / "run" / "version_0"
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text(f'{{"step": 1, "loss": 2.0}}\n{line}\n{{"step": 2, "loss": 1.0}}\n')
    JSONLinesLogger(str(tmp_path), version=0).log_metrics({"loss": 0.5}, step=3)
    assert (folder / "metrics.jsonl").read_text() == '{"step": 1, "loss": 2.0}\n{"step": 3, "loss": 0.5}\n'


def test_a_run_logs_json_lines_by_config(tiny, tmp_path):
    cli = tiny("fit", yaml_logger(tmp_path, JSON_LINES, name="mine"))
    run = Path("runs/mine/version_0")
    assert Path(cli.trainer.log_dir) == run
    entries = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [entry["step"] for entry in entries if "train_loss" in entry] == [1, 2, 3, 4, 5, 6]
    assert [entry["step"] for entry in entries if "val_loss" in entry] == [3, 6]
    last = next(entry for entry in reversed(entries) if "val_loss" in entry)
    assert last["val_loss"] == pytest.approx(json.loads((run / "summary.json").read_text())["val_loss"])
    assert (run / "config.yaml").is_file()
    assert list((run / "checkpoints").iterdir())
    assert not list(run.glob("events*"))


def names_by_step(file):
    """What each line holds, but for the memory of a validation: it waits for the next entry, perhaps of another run."""
    entries = map(json.loads, file.read_text().splitlines())
    return [(e["step"], sorted(name for name in e if not name.startswith("memory/validation"))) for e in entries]


def test_a_resumed_run_has_no_line_twice(tiny, tmp_path):
    options = yaml_logger(tmp_path, JSON_LINES, name="mine", version=0)
    file = Path("runs/mine/version_0/metrics.jsonl")
    tiny("fit", options)
    whole = names_by_step(file)
    tiny("fit", options, "--ckpt_path=runs/mine/version_0/checkpoints/step-00000003.ckpt")
    again = names_by_step(file)
    assert again == whole
