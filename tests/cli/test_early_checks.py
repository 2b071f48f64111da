"""Before torch is imported: mistakes that can be known by then, configs by name, and a line while a terminal waits."""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from lightning_llm.cli.command_line import DEFAULT_STEPS, complete
from lightning_llm.io.config_file import config_path

ROOT = Path(__file__).parents[2]
UNKNOWN = (
    "no file and no shipped config: give a file, or ddp, fsdp, llama-125m, memory-profile, quickstart, shakespeare-"
)
MISSING = ["--config", "nope.yaml"]
MLP = "model.architecture.mlp"
RUN = ["validate", "--config", "quickstart", "--ckpt_path"]
# a command line, and what its error says
MISTAKES = [
    *(([word, *MISSING], UNKNOWN) for word in ("fit", "validate", "test", "predict", "check", "estimate")),
    (["plan", *MISSING, "--memory", "4GB"], UNKNOWN),
    (["ablate", "run", "--baseline", "nope.yaml", "--vary", f"{MLP}=relu"], UNKNOWN),
    (["ablate", "run", "nope.yaml"], "error: No such file or directory: nope.yaml ("),
    (["fit", "--conf", "nope"], UNKNOWN),
    (["fit", "--confg", "nope"], "did you mean --config?"),
    (["fit", "--dat.path", "x"], "did you mean --data.path?"),
    (["fit", "--max_steps", "3"], "--trainer.NAME"),
    (["fit", "--mlp=relu"], "'--mlp' is not an option: did you mean --model.architecture.mlp?"),
    (["fit", "--hlep"], "did you mean --help?"),
    (["fit", "quickstart"], "a config is given with --config quickstart"),
    (["fit", "--config"], "--config needs a value"),
    (["fit", "--data.path", "--data.tokenizer", "char"], "--data.path needs a value"),
    (["fit", "--config", "quickstart", "--data.path", "nope.txt"], "'nope.txt' is not a file"),
    (["check", "--data.tokenizer", "chars"], "tokenizer 'chars' is unknown: choose one of char, byte, bpe"),
    (["fit", "--data.store", "nope"], "data.store 'nope' does not exist"),
    (["fit", "--model.init_from", "nope"], "model.init_from 'nope' does not exist"),
    (["fit", f"--{MLP}", "relue"], "mlp 'relue' is unknown: choose one of swiglu"),
    (["test"], "test needs a trained model"),
    (["fit", "--ckpt_path=last"], "no checkpoint in runs:"),
    ([*RUN, "best"], "no checkpoint in runs/quickstart:"),
    ([*RUN, "nope"], "no such file"),
    (["generate", "nope"], "no such file"),
    (["evaluate", "nope", "--data", "stdlib"], "no such file"),
    (["evaluate", ".", "--data", "nope"], "'nope' is not a file"),
    (["export", "nope", "out"], "no such file"),
    (["consolidate", "nope", "--out", "x"], "no such file"),
    (["import", "nope", "--out", "x"], "nope is not a folder"),
    (["compare", "nope"], "no such directory"),
    (["dashboard", "nope", "--port", "PORT"], "Address already in use; give another, or --port 0 for any free one"),
]
FRONT_DOOR = """
import contextlib, io, json, os, socket, sys
from lightning_llm.__main__ import SUBCOMMANDS, main
taken = socket.create_server(("127.0.0.1", 0))
for words, says in json.loads(sys.argv[1]):
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        status = main([word.replace("PORT", str(taken.getsockname()[1])) for word in words])
    line = said.getvalue()
    assert status == 2 and says in line and line.count("\\n") == 1, (words, status, line)
    assert not {"torch", "tensorboard"} & sys.modules.keys(), words
os.environ["MASTER_ADDR"] = "no such host"
assert main(["fit"]) == 2
for subcommand in SUBCOMMANDS:
    assert main([subcommand, "--help"]) == 0
    assert "torch" not in sys.modules, subcommand
"""


def test_mistakes_and_help_do_not_wait_for_torch(tmp_path):
    command = [sys.executable, "-c", FRONT_DOOR, json.dumps(MISTAKES)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "MASTER_ADDR 'no such host'" in done.stderr


@pytest.mark.parametrize(
    "words",
    [
        ["fit", "--trainer.strategy.help", "DDPStrategy"],
        ["fit", "--print_config=skip_null", "--config=ddp"],
        ["fit", "--config", "trainer: {max_steps: 3}", "--trainer.max_st=3", "--trainer.callbacks+", "x.Y"],
        ["fit", "--trust-code", "--trainer.max_steps", "-1", "--seed", "3", "--data.path="],
    ],
)
def test_what_the_parser_accepts_is_passed_on(words):
    passed = complete(words)
    named = [word.replace("=ddp", f"={config_path('ddp')}") for word in words]
    assert sorted("=".join(passed).split("=")) == sorted("=".join(named).split("="))


# ---- configs by name


def test_shipped_configs_have_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shipped = sorted((ROOT / "configs").glob("*.yaml"))
    assert len(shipped) > 5
    for file in shipped:
        for name in (file.name, file.stem):
            assert Path(config_path(name)).read_bytes() == file.read_bytes()
            assert complete(["fit", "--data.path=x", f"--config={name}"])[1] == f"--config={config_path(name)}"
    Path("quickstart").mkdir()  # a folder is no config
    assert Path(config_path("quickstart")).is_absolute()
    Path("quickstart.yaml").touch()
    assert [config_path(name) for name in ("quickstart", "quickstart.yaml")] == ["quickstart.yaml"] * 2
    with pytest.raises(ValueError, match="config 'mine' is no file and no shipped config: give a file, or ddp, "):
        config_path("mine")


def test_a_wheel_contains_the_configs(tmp_path):
    pytest.importorskip("setuptools", minversion="77")
    tree = tmp_path / "tree"
    for name in ("lightning_llm", "configs"):
        shutil.copytree(ROOT / name, tree / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    code = "from setuptools.build_meta import build_wheel; build_wheel('..')"
    subprocess.run([sys.executable, "-c", code], cwd=tree, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        for file in (ROOT / "configs").glob("*.yaml"):
            assert archive.read(f"lightning_llm/configs/{file.name}") == file.read_bytes()


# ---- a run without a config


def test_a_run_without_a_config_has_a_length_and_says_so(tiny, tmp_path, capsys):
    no_steps = {"trainer.max_steps": None}
    assert tiny("check", **no_steps).trainer.max_steps == DEFAULT_STEPS
    said = f"lightning-llm check: without a config, a run has {DEFAULT_STEPS} steps: --trainer.max_steps or "
    assert said in capsys.readouterr().err
    (tmp_path / "c.yaml").write_text("trainer: {tf32: false}")
    for words in (["--trainer.max_epochs=2"], ["--trainer.max_time=00:00:01:00"], ["--config=c.yaml"]):
        assert tiny("check", *words, **no_steps).trainer.max_steps == -1
        assert said not in capsys.readouterr().err
