"""``lightning-llm runs``: what it lists, and that ``clean`` removes what is of no use and nothing else."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_llm.__main__ import main
from lightning_llm.cli import run_list
from lightning_llm.io.console import Console
from lightning_llm.runs.status import FINISHED, INTERRUPTED
from tests.tiny_run import listed


def test_state_step_loss_size_and_age_are_listed(make_run, capsys):
    finished = make_run(
        "a/version_0", FINISHED, checkpoint="checkpoints/step-00000007.ckpt", summary='{"val_loss": 1.5}'
    )
    os.link(finished / "checkpoints/step-00000007.ckpt", finished / "checkpoints/best.ckpt")
    failed = make_run("a/version_1")
    for path in (failed, *failed.iterdir()):
        os.utime(path, (0, 0))
    rows = listed()
    first, second = rows["a/version_0"], rows["a/version_1"]
    assert (first["state"], first["step"], first["val_loss"], first["removable"]) == (FINISHED, 7, 1.5, False)
    assert (second["state"], second["step"], second["val_loss"], second["removable"]) == ("failed (why)", 7, 2.5, True)
    assert 5000 < first["bytes"] < 60_000
    sizes = [512 * path.lstat().st_blocks for path in finished.rglob("*") if path.name != "best.ckpt"]
    assert first["bytes"] == sum(sizes)  # the best is another name of the newest
    assert first["age_s"] < 600
    assert second["age_s"] > 365 * 86400
    said = capsys.readouterr().out
    row = next(line for line in said.splitlines() if "a/version_1" in line)
    for word in ("failed (why)", "2.5000", "MiB", "days", "yes"):
        assert word in row
    assert "removable (ended without a result and without a checkpoint): lightning-llm runs clean\n" in said
    assert main(["runs", "runs/a", "./runs"]) == 0
    assert "checkpoint): lightning-llm runs clean runs/a ./runs\n" in capsys.readouterr().out


def test_clean_lists_and_removes_only_with_yes(make_run, capsys):
    make_run("a/version_0", FINISHED, summary="{}")
    useless = [make_run("a/version_1"), make_run("a/version_2", INTERRUPTED)]
    assert main(["runs", "clean"]) == 0
    said = capsys.readouterr().out
    assert [f"would remove {run}: " in said for run in useless] == [True, True]
    assert "2 runs, " in said
    assert said.endswith("would be removed: add --yes to remove them\n")
    assert all(run.is_dir() for run in useless)
    assert main(["runs", "clean", "runs", "--yes"]) == 0
    assert f"removed {useless[0]}: failed (why), " in capsys.readouterr().out
    assert [path.name for path in Path("runs/a").iterdir()] == ["version_0"]
    assert main(["runs", "clean", "--yes"]) == 0
    assert capsys.readouterr().out == "no run is removable: none has ended without a result and without a checkpoint\n"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "runs: no such directory; give run directories, or a folder that contains some"),
        (["nowhere"], "nowhere: no such directory"),
        (["clean", "nowhere", "--yes"], "nowhere: no such directory"),
        (["empty"], "empty: no run in it or up to two levels below"),
        (["--yes"], "--yes belongs to lightning-llm runs clean"),
        (["--jason", "x"], "unrecognized arguments: --jason"),
    ],
)
def test_a_mistake_is_one_line(words, says, error_line, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    assert main(["runs", *words]) == 2
    line = error_line()
    assert line.startswith("lightning-llm runs: error: ")
    assert says in line
    assert line.endswith("(docs/dashboard.md)")


def test_a_run_of_the_command_line_is_listed(tiny, capsys):
    tiny("fit", **{"trainer.max_steps": 3})
    summary = json.loads(Path("runs/run/version_0/summary.json").read_text())
    row = listed()["run/version_0"]
    assert (row["state"], row["step"], row["removable"]) == (FINISHED, 3, False)
    assert row["val_loss"] == summary["val_loss"]
    assert main(["runs", "clean", "--yes"]) == 0
    assert Path("runs/run/version_0/checkpoints/best.ckpt").is_file()


def test_no_torch_is_imported(make_run):
    make_run("a/version_0")
    code = (
        "import sys; from lightning_llm.__main__ import main; assert main(['runs']) == 0; "
        "assert not {'torch', 'lightning'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_runs_are_named_by_what_differs_in_a_narrow_table(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for number, mlp in enumerate(("relu", "memory_optimized_swiglu")):
        run = Path("runs/a-name-of-a-config") / f"version_{number}"
        run.mkdir(parents=True)
        (run / "config.yaml").write_text(f"model: {{architecture: {{mlp: {mlp}}}}}\n")
        (run / "summary.json").write_text('{"val_loss": 2.0}')
    assert main(["runs"]) == 0
    assert "mlp=memory_optimized_swiglu" in capsys.readouterr().out
    monkeypatch.setattr(run_list, "Console", lambda **options: Console(**{**options, "width": 80}))
    assert main(["runs"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    for word in ("a-name-of-a-config", "version_1", "swiglu", "2.0000", "finished"):
        assert any(word in line for line in lines), word


@pytest.mark.parametrize("name", ["shakespeare_char_of_a_long_name", "shakespeare-char-of-a-long-name"])
def test_no_character_of_a_name_is_lost_on_a_narrow_terminal(make_run, monkeypatch, capsys, name):
    make_run(f"{name}/version_0")
    monkeypatch.setattr(run_list.sys.stdout, "isatty", lambda: True)
    for width in range(70, 100, 5):
        monkeypatch.setenv("COLUMNS", str(width))
        assert main(["runs"]) == 0
        said = capsys.readouterr().out
        assert "…" not in said
        column = "".join(line[1:].split(" ")[0] for line in said.splitlines()[3:])
        assert f"runs/{name}/version_0" in column, said


def test_a_folder_of_experiments_says_where_their_runs_are(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run = Path("runs/gelu/runs/baseline,seed=0")
    run.mkdir(parents=True)
    (run / "config.yaml").write_text("{}")
    assert main(["runs"]) == 2
    said = capsys.readouterr().err
    assert "runs: no run in it or up to two levels below; give a folder in it, such as runs/gelu" in said
    assert main(["runs", "runs/gelu"]) == 0
