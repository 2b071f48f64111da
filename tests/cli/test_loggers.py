"""Loggers by config: JSON lines, CSV."""

import csv
import json
from pathlib import Path

import pytest

JSON_LINES = "lightning_llm.training.json_logger.JSONLinesLogger"
CSV = "lightning.pytorch.loggers.CSVLogger"


def yaml_logger(tmp_path, class_path, **options):
    config = tmp_path / "logger.yaml"
    config.write_text(json.dumps({"trainer": {"logger": {"class_path": class_path, "init_args": options}}}))
    return f"--config={config}"


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


@pytest.mark.filterwarnings("ignore:Experiment logs directory")  # Lightning: config.yaml is there already
def test_a_run_logs_csv_by_config(tiny, tmp_path):
    cli = tiny("fit", yaml_logger(tmp_path, CSV, save_dir="runs", name="table"))
    with Path(cli.trainer.log_dir, "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows if row["train_loss"]] == [1, 2, 3, 4, 5, 6]
    assert [int(row["step"]) for row in rows if row["val_loss"]] == [3, 6]
