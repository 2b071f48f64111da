"""A wrong option of any subcommand: one line that names it, status 2, no usage text."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_llm.__main__ import TRAINER_WORDS, main


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["runs", "runs", "--json", ""], "argument --json: '' is the name of no file"),
        (["generate"], "the following arguments are required: checkpoint"),
        (["generate", "x", "--top-k", "many"], "argument --top-k: invalid int value: 'many'"),
        (["prepare", "x", "--vocab", "9"], "unrecognized arguments: --vocab"),
        (["data", "inspect"], "the following arguments are required: DIR"),
        (["data", "fix", "x"], "invalid choice: 'fix'"),
        (["compare"], "the following arguments are required: RUNS"),
        (["dashboard", "runs", "--port", "http"], "argument --port: invalid int value: 'http'"),
        (["estimate"], "the following arguments are required: --config"),
    ],
)
def test_a_wrong_option_is_one_line(words, says, capsys):
    assert main(words) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(f"lightning-llm {words[0]}")
    assert says in printed.err
    assert printed.err.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["fitt"], "unknown command 'fitt'; did you mean fit? (docs/"),
        (["abalte"], "unknown command 'abalte'; did you mean ablate? (docs/"),
        (["xyz"], "unknown command 'xyz'; the commands are fit, check, "),
        (["ablate", "tyr"], "; did you mean try? (docs/ablate.md)"),
        (["data", "verfy", "x"], "; did you mean verify? (docs/data.md)"),
        (["generate", "x", "--top_k", "3"], "unrecognized arguments: --top_k 3; did you mean --top-k? (docs/"),
        (["ablate", "extend", "x", "--pairs", "3", "--variant", "a"], "; did you mean --variants? (docs/ablate.md)"),
        (
            ["ablate", "try", "x"],
            "give --baseline CONFIG and --vary OPTION=VALUE to begin it, or --command TEXT (docs/stream.md)",
        ),
    ],
)
def test_the_nearest_name_and_the_page_of_the_action_are_named(words, says, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(("action", "page"), [("try", "docs/stream.md"), ("run", "docs/ablate.md")])
def test_the_help_of_an_action_names_its_page(action, page, capsys):
    assert main(["ablate", action, "--help"]) == 0
    assert capsys.readouterr().out.endswith(f"More: {page}\n")


@pytest.mark.parametrize(
    "words",
    [["fit", "--data.path", "empty.txt", "--data.tokenizer", "char"], ["evaluate", "x", "--data", "empty.txt"]],
)
def test_an_empty_text_leads_to_the_page_on_data(words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("empty.txt").touch()
    assert main(words) == 2
    assert capsys.readouterr().err.endswith("'empty.txt' is empty: no text in it (docs/data.md)\n")


def test_a_reader_that_leaves_is_no_error():
    root = Path(__file__).parents[2]
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "lightning_llm", "estimate", "--config", "configs/llama-125m.yaml", "--vocab-size"]
    done = subprocess.run([*command, "9"], cwd=root, stdout=writing, stderr=subprocess.PIPE, text=True)
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")


PART = """
from torch import nn


class Part(nn.Linear):
    def __init__(self, config):
        super().__init__(config.hidden_size, config.hidden_size)
"""


# The script that pip installs: unlike ``python -m``, it does not put the current folder on the path.
SCRIPT = """
import sys
from lightning_llm.__main__ import TRAINER_WORDS, main
sys.path[:] = [path for path in sys.path if path]
status = main()
print("last on the path:", sys.path[-1])
sys.exit(status)
"""


def as_script(*words):
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "PYTHONSAFEPATH": "1",
    }
    command = [sys.executable, "-c", SCRIPT, *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_part_in_the_current_folder_is_found_by_the_script(tmp_path, monkeypatch, flags):
    monkeypatch.chdir(tmp_path)
    Path("part_of_my_own.py").write_text(PART)
    here = f"last on the path: {tmp_path}"
    assert here not in as_script("data", "--help")  # it imports nothing of the user's
    assert here in as_script("check", *flags(**{"model.architecture.mlp": "part_of_my_own.Part"}))


@pytest.mark.parametrize("config", [["--config", "c.yaml"], ["--config=c.yaml"], ["-c", "c.yaml"]], ids=" ".join)
def test_an_option_overrides_a_config_wherever_it_is_typed(config, tiny, tmp_path):
    (tmp_path / "c.yaml").write_text("trainer: {max_steps: 3, val_check_interval: 1}")
    (tmp_path / "d.yaml").write_text("trainer: {val_check_interval: 2}")
    words = ["--trainer.max_steps=2", *config, "--config=d.yaml"]
    cli = tiny("fit", *words, **{"trainer.max_steps": None, "trainer.val_check_interval": None})
    assert (cli.trainer.max_steps, cli.trainer.val_check_interval) == (2, 2)


def test_a_command_of_the_trainer_defines_only_its_own_options(tiny, capsys):
    assert tiny("check").subcommands().keys() == {"check"}
    with pytest.raises(SystemExit, match="2"):
        tiny("train")
    said = capsys.readouterr().err
    assert all(word in said for word in TRAINER_WORDS)
