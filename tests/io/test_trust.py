"""No command runs code that a checkpoint or a config names, unless it is told to; fit says what a config imports."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from lightning_llm import LanguageModel
from lightning_llm.__main__ import SUBCOMMANDS, TRAINER_WORDS, main
from lightning_llm.checkpoints.archives import write_atomically
from lightning_llm.checkpoints.reading import load_transformer, read_checkpoint
from lightning_llm.cli.train import cli_main
from lightning_llm.io.trust import custom_paths, trust_and_import

CANARY = """
import pathlib
import sys

from lightning_llm import SwiGLU

print("canary: imported", file=sys.stderr)
pathlib.Path(__file__).with_name("imported").touch()


class MLP(SwiGLU):
    def __init__(self, config):
        super().__init__(config.hidden_size, config.intermediate_size)
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A tiny run whose checkpoint and config name a class of somebody else's, and its text."""
    folder = tmp_path_factory.mktemp("trust")
    (folder / "text.txt").write_text("a text of some length. " * 200)
    architecture = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 32}
    options = {"model.architecture": {**architecture, "mlp": "swiglu"}, "data.path": str(folder / "text.txt")}
    options |= {
        "data.tokenizer": "char",
        "data.context_length": 16,
        "data.global_batch_size": 4,
        "trainer.max_steps": 1,
    }
    options |= {"keep_freed_memory": False, "trainer.default_root_dir": str(folder / "runs")}
    options |= {"trainer.log_every_n_steps": 1, "trainer.accelerator": "cpu", "data.store": str(folder / "store")}
    words = [f"--{name}={json.dumps(value) if isinstance(value, dict) else value}" for name, value in options.items()]
    run = Path(cli_main(["fit", *words]).trainer.log_dir)
    (path,) = (run / "checkpoints").glob("step-*.ckpt")
    content = read_checkpoint(path)
    content["hyper_parameters"]["architecture"]["mlp"] = "canary.MLP"
    write_atomically(content, path)
    (run / "checkpoints" / "best.ckpt").unlink(missing_ok=True)
    config = run / "config.yaml"
    config.write_text(config.read_text().replace("mlp: swiglu", "mlp: canary.MLP"))
    assert "canary.MLP" in config.read_text()
    return folder, run, path


@pytest.fixture
def canary(tmp_path, monkeypatch):
    """``canary()``: whether the module of that name was imported."""
    folder = tmp_path / "stranger"
    folder.mkdir()
    (folder / "canary.py").write_text(CANARY)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "canary", raising=False)
    yield lambda: (folder / "imported").exists()
    sys.modules.pop("canary", None)


def command(word, folder, run, path):
    """Words that make a command read the run, and whether it would have to import the class."""
    text = str(folder / "text.txt")
    return {
        "generate": (["generate", str(path), "--prompt", "a"], True),
        "evaluate": (["evaluate", str(path), "--data", text], True),
        "export": (["export", str(path), "out"], True),
        "import": (["import", "hf", "--out", "imported.ckpt"], False),
        "consolidate": (["consolidate", str(path), "--out", "one.ckpt"], False),
        "estimate": (["estimate", "--config", str(run / "config.yaml"), "--vocab-size", "50"], True),
        "same": (["same", "--config", str(run / "config.yaml"), "--vary", "loss_chunks"], True),
        "plan": (["plan", "--config", str(run / "config.yaml"), "--vocab-size", "50", "--memory", "8GiB"], True),
        "compare": (["compare", str(run)], False),
        "runs": (["runs", str(run.parent)], False),
        "dashboard": (["dashboard", str(run), "--port", "0"], False),
        "fit": (["fit", "--config", "mine.yaml", "--model.init_from", str(path)], True),
        "check": (["check", "--config", "mine.yaml", "--model.init_from", str(path)], True),
    }.get(word)


# the rest reads neither a model of somebody else's nor a config but the one that it is given, see below
OTHERS = {"validate", "test", "predict", "prepare", "tokenizer", "data", "ablate"}


@pytest.mark.parametrize("word", sorted({*TRAINER_WORDS, *SUBCOMMANDS} - OTHERS))
def test_no_command_runs_what_a_file_names(word, trained, canary, monkeypatch, capsys, tmp_path):
    folder, run, path = trained
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["model"]["architecture"]["mlp"] = "swiglu"
    config["trainer"]["default_root_dir"] = str(tmp_path / "runs")
    Path("mine.yaml").write_text(yaml.safe_dump(config))
    Path("hf").mkdir()
    hf = {"architectures": ["canary.MLP"], "model_type": "canary.MLP", "auto_map": {"AutoModel": "canary.MLP"}}
    Path("hf", "config.json").write_text(json.dumps(hf))
    monkeypatch.setattr("lightning_llm.cli.dashboard._serve", lambda *options: None)
    words, would_import = command(word, folder, run, path)
    status = main(words)
    error = capsys.readouterr().err
    assert not canary()
    assert "canary" not in sys.modules
    assert "Traceback" not in error
    if would_import:
        assert status == 2
        (line,) = (line for line in error.splitlines() if "error:" in line)
        assert "names code from outside lightning_llm: canary.MLP; nothing was imported" in line
        assert "--trust-code" in line
        assert not Path("out").exists()
        assert not Path("runs").exists()


@pytest.mark.parametrize("word", ["generate", "evaluate", "export"])
def test_told_to_trust_it_runs_the_class(word, trained, canary, capsys):
    words, _ = command(word, *trained)
    status = main([*words, "--trust-code"])
    error = capsys.readouterr().err
    assert canary()
    assert (status, error.count("error:")) in {(0, 0), (2, 1)}  # export: transformers knows no such class
    assert (status == 2) is (word == "export")


def test_fit_begins_with_weights_that_it_is_told_to_trust(trained, canary, tmp_path):
    _, run, path = trained
    words = ["fit", "--config", str(run / "config.yaml"), "--trainer.default_root_dir", str(tmp_path / "runs")]
    assert main([*words, "--model.init_from", str(path)]) == 2
    assert main([*words, "--model.init_from", str(path), "--trust-code"]) == 0
    assert canary()


def test_a_config_cannot_grant_trust_to_itself(trained, canary, tmp_path, error_line):
    _, run, _ = trained
    Path("evil.yaml").write_text("trust_code: true\n")
    assert main(["check", "--config", str(run / "config.yaml"), "--config", "evil.yaml"]) == 2
    assert "'trust_code' is unknown" in error_line()
    assert not canary()


@pytest.mark.parametrize("word", ["fit", "check", "validate"])
def test_what_a_config_imports_is_said_before(word, trained, canary, tmp_path, capsys):
    _, run, path = trained
    words = [word, "--config", str(run / "config.yaml"), "--trainer.default_root_dir", str(tmp_path / "runs")]
    assert main([*words, *(["--ckpt_path", str(path)] if word == "validate" else [])]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert lines.index(f"lightning-llm {word}: {run / 'config.yaml'} imports canary.MLP") < lines.index(
        "canary: imported"
    )


def test_with_the_config_of_the_run_and_of_files_that_it_names(trained, canary, capsys):
    _, run, path = trained
    assert main(["validate", "--ckpt_path", str(path)]) == 0
    assert f"lightning-llm validate: {run / 'config.yaml'} imports canary.MLP" in capsys.readouterr().err
    Path("deep").mkdir()
    Path("deep", "optimizer.yaml").write_text("class_path: canary.Optimizer\n")
    Path("deep", "mine.yaml").write_text(yaml.safe_dump({"model": {"optimizer": "optimizer.yaml"}}))
    assert main(["check", "--config", str(run / "config.yaml"), "--config", "deep/mine.yaml"]) == 2
    assert "lightning-llm check: deep/optimizer.yaml imports canary.Optimizer" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["optimizer.txt", "optimizer"])
def test_a_file_of_options_may_have_any_name(trained, canary, capsys, name):
    _, run, _ = trained
    Path(name).write_text("class_path: canary.Optimizer\n")
    Path("mine.yaml").write_text(yaml.safe_dump({"model": {"optimizer": name}}))
    assert main(["check", "--config", str(run / "config.yaml"), "--config", "mine.yaml"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines.index(f"lightning-llm check: {name} imports canary.Optimizer") < lines.index("canary: imported")


def test_in_python_too(trained, canary):
    _, _, path = trained
    with pytest.raises(ValueError, match=r"canary\.MLP; nothing was imported.*trust_code=True"):
        load_transformer(path)
    with pytest.raises(ValueError, match=r"canary\.MLP; nothing was imported"):
        LanguageModel.load_from_checkpoint(path)
    assert not canary()
    assert type(load_transformer(path, trust_code=True)[0].layers[0].mlp).__name__ == "MLP"
    assert type(LanguageModel.load_from_checkpoint(path, trust_code=True).transformer.layers[0].mlp).__name__ == "MLP"


def test_aliases_of_texts_are_read_once():
    text = json.dumps([f"a: {number}" for number in range(500)])
    content = yaml.safe_load(f"x: &a '{text}'\ny: &b [{', '.join(['*a'] * 100)}]\nz: [{', '.join(['*b'] * 100)}]")
    assert custom_paths(content) == []


# The script that pip installs does not put the current folder on the path; -c does, and Python 3.10 has no safe path
AS_INSTALLED = """
import sys
sys.path[:] = [path for path in sys.path if path]
"""
SCRIPT = """
from lightning_llm.__main__ import main
sys.exit(main())
"""


def as_script(*words, script=SCRIPT):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONSAFEPATH": "1"}
    command = [sys.executable, "-c", AS_INSTALLED + script, *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


# All modules that torch, TensorBoard and others try to import
STRAY = ("dill", "pandas", "gmpy2", "opt_einsum", "pydot", "tensorflow", "isal", "cython", "lz4", "snappy", "canary")


FINDS = """
from lightning_llm.__main__ import main
status = main()
for name in {names!r}:
    try:
        __import__(name)
    except ImportError:
        pass
sys.exit(status)
"""


@pytest.mark.parametrize(
    "words", [["ablate", "status", "."], ["generate", "model.ckpt"], ["check", "--config", "no.yaml"]]
)
def test_nothing_else_in_the_current_folder_runs(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in STRAY:
        Path(f"{name}.py").write_text("import pathlib\npathlib.Path(__file__ + '.ran').touch()\n")
    assert as_script(*words, script=FINDS.format(names=STRAY)).returncode == 2
    assert not list(tmp_path.glob("*.ran"))


def test_a_path_through_this_package_to_what_others_define_is_refused():
    with pytest.raises(ImportError, match="not defined in lightning_llm"):
        trust_and_import("lightning_llm.ablate.slots.os")
    assert trust_and_import("lightning_llm.optim.AdamW").__name__ == "AdamW"
