"""What a stranger's config imports: nothing silently, whatever form it has; and what a user names is imported."""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import typeshed_client
import yaml

from lightning_llm.__main__ import main
from lightning_llm.io.trust import TRUSTED, custom_paths

SHELL = {"class_path": "lightning_llm.ablate.slurm.subprocess.Popen", "init_args": {"args": "touch ran", "shell": True}}
LAMBDA = {"class_path": "lightning.pytorch.callbacks.LambdaCallback"}
STRANGER = """
import pathlib
import sys

from lightning.pytorch import Callback
from lightning.pytorch.loggers import CSVLogger

import torch

print("stranger: imported", file=sys.stderr)
pathlib.Path("ran").touch()


class Class(Callback):
    pass


def optimizer(params) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)
"""
NUMBERS = itertools.count()


@pytest.fixture
def stranger(tmp_path, monkeypatch):
    """The name of a module that was neither imported nor named before; importing it makes a file ``ran``."""
    name = f"stranger_{next(NUMBERS)}"
    folder = tmp_path / "modules"
    folder.mkdir()
    (folder / f"{name}.py").write_text(STRANGER)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.chdir(tmp_path)
    yield name
    sys.modules.pop(name, None)


def nested(name, value):
    """Options by their dotted name."""
    for word in reversed(name.split(".")):
        value = {word: value}
    return value


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("trainer.accelerator", SHELL),
        ("trainer.strategy", SHELL),
        ("trainer.plugins", [SHELL]),
        ("trainer.profiler", SHELL),
        ("trainer.precision", SHELL),
        ("trainer.logger", SHELL),
        ("trainer.callbacks", [SHELL]),
        ("trainer.accelerator", json.dumps(SHELL)),
        ("trainer.max_time", {"hours": SHELL}),
        ("model.optimizer", SHELL),
        ("model.optimizer", {"class_path": "lightning_llm.ablate.slurm.subprocess.run", **SHELL}),
        ("model.schedule", SHELL),
        ("model.groups", [{"pattern": SHELL}]),
        ("model.architecture.rope_scaling", {"rope_type": "linear", "factor": SHELL}),
        ("model.architecture.mlp", {"class_path": "mixture_of_experts", "init_args": {"num_experts": SHELL}}),
        (
            "model.architecture.mlp",
            {"class_path": "mixture_of_experts", "init_args": {"num_experts": json.dumps(SHELL)}},
        ),
        ("model.architecture.mlp", "lightning_llm.ablate.slurm.subprocess.Popen"),
        ("model.architecture.mlp", "lightning_llm.training.module.LightningModule"),
        ("model.architecture.mup", SHELL),
        ("trainer.callbacks", [{**LAMBDA, "init_args": {"setup": "lightning_llm.cli.standard_streams.os.system"}}]),
        ("trainer.callbacks", [{**LAMBDA, "init_args": {"setup": "torch.optim.lr_scheduler.partial"}}]),
    ],
)
def test_a_path_inside_this_package_gives_nothing_that_others_define(
    option, value, flags, tmp_path, monkeypatch, error_line
):
    started = []

    def start(process, args, *rest):
        started.append(args)
        raise OSError("not started")

    monkeypatch.setattr(subprocess.Popen, "_execute_child", start)
    monkeypatch.chdir(tmp_path)
    Path("theirs.yaml").write_text(yaml.safe_dump(nested(option, value)))
    words = flags(**{"trainer.accelerator": None, "trainer.max_steps": 1})
    assert main(["check", "--config", "theirs.yaml", *words]) == 2
    error_line()
    assert "touch ran" not in started


def test_what_is_trusted_no_longer_is_not_imported(flags, tmp_path, monkeypatch, error_line):
    def status_of(**callback):
        Path("theirs.yaml").write_text(yaml.safe_dump({"trainer": {"callbacks": [callback]}}))
        return main(["check", "--config", "theirs.yaml", *words])

    monkeypatch.chdir(tmp_path)
    words = flags(**{"trainer.accelerator": None, "trainer.max_steps": 1})
    assert status_of(**LAMBDA, init_args={"setup": "os.system"}) == 0  # which was printed
    TRUSTED.clear()
    assert status_of(class_path="LambdaCallback") == 0  # offered, whatever was trusted
    assert (
        status_of(class_path="LambdaCallback", init_args={"setup": "lightning_llm.cli.standard_streams.os.system"}) == 2
    )
    error_line()


@pytest.mark.parametrize(
    ("option", "form"),
    [
        ("trainer.callbacks", "[{class_path: PATH}]"),
        ("trainer.callbacks+", "{class_path: PATH}"),
        ("trainer.logger", "{class_path: PATH}"),
        ("trainer.profiler", "{class_path: PATH}"),
        ("trainer.plugins", "[PATH]"),
        ("trainer.strategy", "{class_path: PATH}"),
        ("trainer.accelerator", "{class_path: PATH}"),
        ("model.optimizer", "{class_path: PATH}"),
        ("model.optimizer", "'{class_path: PATH}'"),
        ("model.schedule", "{class_path: PATH}"),
        ("model.architecture", "{mlp: PATH}"),
        ("model.architecture.mlp", "{class_path: PATH}"),
    ],
)
def test_a_text_that_the_parser_reads_as_yaml_is_looked_into(option, form, stranger, flags, capsys):
    path = f"{stranger}.Class"
    Path("theirs.yaml").write_text(yaml.safe_dump(nested(option, form.replace("PATH", path))))
    main(["check", "--config", "theirs.yaml", *flags(**{"trainer.accelerator": None})])
    lines = capsys.readouterr().err.splitlines()
    note = lines.index(f"lightning-llm check: theirs.yaml imports {path}")
    assert note < lines.index("stranger: imported") if Path("ran").exists() else "error:" in lines[-1]


@pytest.mark.parametrize("form", ["~/theirs.yaml", "file://{}/theirs.yaml", "file:///proc/self/cwd/theirs.yaml"])
def test_a_file_is_looked_into_wherever_the_parser_opens_it(form, stranger, flags, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HOME", str(tmp_path))
    Path("theirs.yaml").write_text(f"class_path: {stranger}.Class")
    Path("config.yaml").write_text(yaml.safe_dump({"trainer": {"callbacks": form.format(tmp_path)}}))
    assert main(["check", "--config", "config.yaml", *flags()]) == 0
    lines = capsys.readouterr().err.splitlines()
    (note,) = (line for line in lines if line.endswith(f"theirs.yaml imports {stranger}.Class"))
    assert lines.index(note) < lines.index("stranger: imported")


def test_an_experiment_is_looked_into_too(stranger, monkeypatch, capsys):
    def stop(*words):
        raise ValueError("stopped")

    monkeypatch.setattr("lightning_llm.cli.ablate_fit.read_variant", stop)
    Path("theirs.yaml").write_text(yaml.safe_dump({"model": {"optimizer": f"{stranger}.optimizer"}}))
    variants = {"a": {"trainer": {"callbacks": [f"{stranger}.Class"]}}}
    Path("experiment.yaml").write_text(yaml.safe_dump({"baseline": "theirs.yaml", "variants": variants}))
    assert main(["ablate", "run", "experiment.yaml"]) == 2
    said = capsys.readouterr().err
    assert f"lightning-llm ablate: experiment.yaml imports {stranger}.Class\n" in said
    assert f"lightning-llm ablate: theirs.yaml imports {stranger}.optimizer\n" in said
    assert not Path("ran").exists()


def test_what_is_hidden_too_deep_is_not_imported(stranger, flags, error_line):
    text = f"{{class_path: {stranger}.Class}}"
    for _ in range(6):
        text = yaml.safe_dump([text])
    assert custom_paths(text) == []
    Path("theirs.yaml").write_text(yaml.safe_dump({"trainer": {"callbacks": text}}))
    assert main(["check", "--config", "theirs.yaml", *flags()]) == 2
    error_line()
    assert not Path("ran").exists()


@pytest.mark.parametrize(
    "words",
    [
        ["--trainer.callbacks=[{class_path: NAME.Class}]"],
        ["--trainer.callbacks", "NAME.Class"],
        ["--trainer.callbacks+=NAME.Class"],
        ["--model.optimizer", "NAME.optimizer"],
        ["--model.optimizer", "torch.optim.SGD", "--model.optimizer.lr", "0.1"],
        ["--model.optimizer=SGD", "--model.optimizer.lr=0.1"],
        ["--trainer.logger={class_path: CSVLogger, init_args: {save_dir: logs}}"],
        ["--trainer.callbacks+=again.Class"],
        ["--trainer.strategy={class_path: again.Strategy}"],
    ],
    ids=" ".join,
)
def test_what_the_user_names_is_imported_wherever_it_is_defined(words, stranger, flags, monkeypatch, capsys):
    again = f"from {stranger} import Class\nfrom lightning.pytorch.strategies import SingleDeviceStrategy\n"
    again += "class Strategy(SingleDeviceStrategy):\n    def __init__(self):\n        super().__init__('cpu')\n"
    Path("modules", f"again_{stranger}.py").write_text(again)
    words = [word.replace("NAME", stranger).replace("again", f"again_{stranger}") for word in words]
    assert main(["check", *words, *flags()]) == 0, capsys.readouterr().err
    assert " imports " not in capsys.readouterr().err


# ---- modules in the current folder

OWN = """
from torch import nn

import sibling


class MLP(nn.Linear):
    def __init__(self, config):
        super().__init__(config.hidden_size, config.hidden_size)

    def forward(self, x):
        import late_sibling

        return super().forward(x) * late_sibling.ONE * sibling.ONE
"""
# The script that pip installs does not put the current folder on the path
SCRIPT = """
import sys
sys.path[:] = [path for path in sys.path if path]
from lightning_llm.__main__ import main
sys.exit(main())
"""


def as_script(*words, script=SCRIPT):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONSAFEPATH": "1"}
    return subprocess.run([sys.executable, "-c", script, *words], env=environment, capture_output=True, text=True)


@pytest.mark.slow
def test_a_class_in_the_current_folder_may_import_others_there_at_any_time(tmp_path, monkeypatch, flags):
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text(OWN)
    for name in ("sibling", "late_sibling"):
        Path(f"{name}.py").write_text("ONE = 1\n")
    Path("dill.py").write_text("print('dill ran')\n")
    words = flags(**{"trainer.max_steps": 1, "model.architecture.mlp": "own.MLP"})
    done = as_script("fit", *words)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("section", ["model", "data"])
@pytest.mark.parametrize("form", ["a file of this name", "{}.Class ", "{}-2.Class"])
def test_a_class_path_that_is_not_printed_is_not_imported(form, section, stranger, flags, capsys):
    path = f"{stranger}.Class"
    if form.startswith("a file"):
        Path(path).touch()
    else:
        path = form.format(stranger)
        Path("modules", f"{stranger}-2.py").write_text(STRANGER)
    Path("theirs.yaml").write_text(yaml.safe_dump({section: {"class_path": path}}))
    assert main(["check", "--config", "theirs.yaml", *flags()]) == 2
    assert "no module was found by this path" in capsys.readouterr().err
    assert not Path("ran").exists()


def test_stubs_are_looked_for_without_another_python(tmp_path, monkeypatch):
    monkeypatch.setattr(subprocess, "check_output", lambda *words, **options: pytest.fail(f"starts {words}"))
    context = typeshed_client.get_search_context()
    assert [Path(path) for path in sys.path if path] == list(context.search_path)


def test_a_store_that_is_no_text_is_one_line(tmp_path, monkeypatch, flags, capsys):
    monkeypatch.chdir(tmp_path)
    Path("theirs.yaml").write_text(yaml.safe_dump(nested("data.store", ["a"])))
    assert main(["check", "--config", "theirs.yaml", *flags()]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "data.store must be the name of a folder, got ['a']" in line


@pytest.mark.parametrize(
    ("path", "advice"),
    [
        ("gated_tan.GatedTanh", "no module was found by this path; give package.module.Class"),
        ("own.py", "give own.Class"),
        ("./own.py", "give own.Class"),
        ("parts/own.py:MLP", "give parts.own.MLP"),
        ("Own.MLP", "no module was found by this path; give package.module.Class"),
    ],
)
@pytest.mark.parametrize("place", ["command line", "config"])
def test_a_part_that_is_not_there_says_what_to_give(path, advice, place, tmp_path, monkeypatch, flags, capsys):
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text(OWN)
    Path("theirs.yaml").write_text(yaml.safe_dump({"model": {"architecture": {"mlp": path}}}))
    words = ["--config", "theirs.yaml"] if place == "config" else ["--model.architecture.mlp", path]
    assert main(["check", *flags(), *words]) == 2
    assert f"model.architecture.mlp {path!r} cannot be imported: {advice} (docs/" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("--trainer.max_stpes=30", "; did you mean --trainer.max_steps?"),
        ("--model.architecture.hiden_size=8", "; did you mean --model.architecture.hidden_size?"),
        ("--trainer.zzz=1", "arguments: --trainer.zzz=1"),
    ],
)
def test_an_unknown_option_is_told_the_nearest(word, says, flags, capsys):
    assert main(["check", *flags(), word]) == 2
    assert f"{says} (docs/config.md)" in capsys.readouterr().err
