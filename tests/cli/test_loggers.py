"""Loggers by config, and where the run's own files go with each."""

import csv
import json
import os
import socket
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest

from lightning_llm.__main__ import main
from lightning_llm.cli import compare, inference
from lightning_llm.cli.train import cli_main

JSON_LINES = "lightning_llm.training.json_logger.JSONLinesLogger"
CSV = "lightning.pytorch.loggers.CSVLogger"


def yaml_logger(tmp_path, class_path, **options):
    config = tmp_path / "logger.yaml"
    config.write_text(json.dumps({"trainer": {"logger": {"class_path": class_path, "init_args": options}}}))
    return f"--config={config}"


@pytest.mark.filterwarnings("ignore:Experiment logs directory")  # Lightning: config.yaml is there already
def test_a_run_logs_csv_by_config(tiny, tmp_path):
    cli = tiny("fit", yaml_logger(tmp_path, CSV, save_dir="runs", name="table"))
    with Path(cli.trainer.log_dir, "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows if row["train_loss"]] == [1, 2, 3, 4, 5, 6]
    assert [int(row["step"]) for row in rows if row["val_loss"]] == [3, 6]


def installed(package):
    return pytest.mark.skipif(find_spec(package) is None, reason=f"needs {package}: .ci/loggers installs it")


NONE, WANDB, MLFLOW = "none", "lightning.pytorch.loggers.WandbLogger", "lightning.pytorch.loggers.MLFlowLogger"
LOGGERS = [
    (NONE, {}),
    (CSV, {"save_dir": "runs", "name": "table"}),
    (CSV, {"save_dir": "tables"}),
    pytest.param(WANDB, {"offline": True}, marks=[pytest.mark.slow, installed("wandb")]),
    pytest.param(MLFLOW, {"tracking_uri": "sqlite:///tracking.db"}, marks=[pytest.mark.slow, installed("mlflow")]),
    pytest.param("lightning.pytorch.loggers.TensorBoardLogger", {"save_dir": "curves"}, marks=pytest.mark.slow),
]


def listener():
    """A server that answers nobody, and the variables that send all traffic to other hosts through it."""
    server = socket.create_server(("127.0.0.1", 0))
    server.setblocking(False)
    proxy = f"http://127.0.0.1:{server.getsockname()[1]}"
    names = ("http_proxy", "https_proxy", "all_proxy")
    return server, {word: proxy for name in names for word in (name, name.upper())} | {"WANDB_BASE_URL": proxy}


def fit_twice(shell, words, *more):
    """Two runs of the command in processes of their own: W&B and MLflow leave threads and variables behind."""
    server, proxies = listener()
    with server:
        for options in (more, (*more, "--seed_everything=2")):
            command = [shell.python, "-m", "lightning_llm", "fit", *words, *options]
            environment = {**os.environ, **proxies, **shell.environment}
            done = subprocess.run(command, capture_output=True, text=True, env=environment)
            assert done.returncode == 0, done.stderr
        with pytest.raises(BlockingIOError):  # nobody has called
            server.accept()


def compared(text):
    """The run directories of a report."""
    return [folder for variant in json.loads(text)["variants"].values() for folder in variant["folders"]]


@pytest.mark.parametrize(("class_path", "options"), LOGGERS)
def test_each_run_has_its_own_folder_whatever_the_logger(
    flags, tiny, tmp_path, monkeypatch, capsys, request, class_path, options
):
    config = "--trainer.logger=false" if class_path == NONE else yaml_logger(tmp_path, class_path, **options)
    if request.node.get_closest_marker("slow"):
        fit_twice(request.getfixturevalue("quick_processes"), flags(), config)
    else:
        tiny("fit", config)
        tiny("fit", config, "--seed_everything=2")
    runs = [Path("runs", "run" if class_path == NONE else "logger", f"version_{number}") for number in range(2)]
    for seed, run in zip((1337, 2), runs, strict=True):
        files = {path.name for path in (run / "checkpoints").iterdir()}
        assert files == {"best.ckpt", "step-00000003.ckpt", "step-00000006.ckpt"}
        assert f"seed_everything: {seed}" in (run / "config.yaml").read_text()
        assert json.loads((run / "summary.json").read_text())["checkpoint"] == f"{run}/checkpoints/step-00000006.ckpt"
    assert not (tmp_path / "config.yaml").exists()
    assert not (tmp_path / "checkpoints").exists()
    assert {path.name for path in (tmp_path / "runs").iterdir()} <= {"run", "logger", "table"}

    capsys.readouterr()
    assert compare.run_compare(["runs", "--format", "json"]) == 0
    assert compared(capsys.readouterr().out) == list(map(str, runs))
    words = ["fit", "--ckpt_path=last", "--trainer.max_steps=7", "--trainer.logger=false"]
    assert cli_main(words).trainer.run_dir == runs[1]
    assert inference.run_generate([str(runs[0]), "--prompt", "A", "--max-new-tokens", "2"]) == 0


@pytest.mark.parametrize(
    ("class_path", "options", "run"),
    [
        (JSON_LINES, {"save_dir": "logs"}, "logs/run/version_0"),
        ("lightning.pytorch.loggers.TensorBoardLogger", {"save_dir": "runs", "name": "x"}, "runs/x/version_0"),
        (CSV, {"save_dir": "runs", "name": "x"}, "runs/logger/version_0"),
    ],
)
def test_last_is_looked_for_where_the_logger_makes_the_run(tiny, flags, tmp_path, error_line, class_path, options, run):
    words = [yaml_logger(tmp_path, class_path, **options)]
    assert tiny("fit", *words, **{"trainer.max_steps": 1}).trainer.run_dir == Path(run)
    again = ["fit", *flags(**{"trainer.max_steps": 2}), *words, "--ckpt_path=last"]
    assert main(again) == 0
    assert {path.parent.parent for path in tmp_path.glob("*/*/*/checkpoints")} == {(tmp_path / run).parent}
    if run.startswith("runs"):
        assert main(["fit", *flags(), "--config=quickstart", "--ckpt_path=last"]) == 2
        assert f"no checkpoint in runs/quickstart (the newest run beside it is {run}: give its path)" in error_line()


def test_a_fast_dev_run_leaves_other_runs_alone(finished, tiny, tmp_path):

    def state():
        return {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").rglob("*")}

    before = state()
    profiler = [{"class_path": "lightning_llm.training.callbacks.MemoryProfiler", "init_args": {"every_n_steps": 1}}]
    changes = {"trainer.fast_dev_run": 7, "trainer.callbacks": profiler}
    for more in ([], ["--trainer.logger=false"], ["--ckpt_path=last"]):
        cli = tiny("fit", *more, **changes)
        assert cli.trainer.run_dir is None
    assert state() == before


def test_files_above_the_runs_do_not_hide_them(tiny, tmp_path, capsys):
    tiny("fit", "--trainer.logger=false")
    run = Path("runs/run/version_0")
    for name in ("config.yaml", "summary.json"):  # as versions before this one left them without a logger
        Path("runs", name).write_text((run / name).read_text())
    capsys.readouterr()
    assert compare.run_compare(["runs", "--format", "json"]) == 0
    assert compared(capsys.readouterr().out) == ["runs", str(run)]
