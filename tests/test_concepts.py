"""What a user has to learn is frozen in ``concepts.txt``: commands, options, classes that a config names, dataclasses.

A change that adds a line says why in its commit. Write the file again with ``python -m tests.test_concepts``.
"""

import argparse
import ast
import inspect
import runpy
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import lightning.pytorch as pl

from lightning_llm.cli import ablate
from lightning_llm.cli.commands import COMMANDS, TRAINER_WORDS
from lightning_llm.cli.subcommand import OneLineParser
from lightning_llm.model.parts import BUILT_IN
from lightning_llm.training.trainer import Trainer

ROOT = Path(__file__).parents[1]
FROZEN = Path(__file__).parent / "concepts.txt"
CONFIG_KEYS = ROOT / "docs" / "config_keys.py"


def concepts() -> list[str]:
    """One line for each thing that a user has to learn, sorted."""
    return sorted({*_commands(), *_config(), *_parts(), *_dataclasses()})


def _commands() -> Iterator[str]:
    for word, command in COMMANDS.items():
        yield f"command {word}"
        if word in TRAINER_WORDS:
            continue
        if word == "ablate":  # which makes its parser when it is called
            parser = OneLineParser("lightning-llm ablate")
            ablate._options(parser)
        else:
            parser = getattr(import_module(f"lightning_llm.cli.{command.module}"), f"run_{word}").parser
        yield from _options(word, parser)


def _options(word: str, parser: argparse.ArgumentParser) -> Iterator[str]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, inner in action.choices.items():
                yield f"command {word} {name}"
                yield from _options(f"{word} {name}", inner)
        elif action.help != argparse.SUPPRESS and "--help" not in action.option_strings:
            name = max(action.option_strings, key=len, default=action.dest)
            yield f"option of {word}: {name}"


def _config() -> Iterator[str]:
    """The keys of a config that this project adds to Lightning's, and the classes that have an entry in the docs."""
    script = runpy.run_path(str(CONFIG_KEYS), run_name="config_keys")
    theirs = inspect.signature(pl.Trainer.__init__).parameters
    own = inspect.signature(Trainer.__init__).parameters.keys() - theirs.keys() - {"options", "kwargs"}
    yield from (f"config trainer.{name}" for name in own)
    for key, *_ in script["keys_of"](script["fit_parser"]()):
        if not key.startswith("trainer."):
            yield f"config {key}"
    for kinds in script["CLASSES"].values():
        for kind in kinds:
            yield f"class {script['path_of'](kind)}"
            keys = script["keys_of"](script["of_class"](kind))
            yield from (f"class {script['path_of'](kind)}: {key}" for key, *_ in keys)


def _parts() -> Iterator[str]:
    for kind, parts in BUILT_IN.items():
        for name, part in parts.items():
            yield f"part {kind} {name}"
            yield from (f"part {kind} {name}: {option}" for option in part.options)


def _dataclasses() -> Iterator[str]:
    for path in sorted((ROOT / "lightning_llm").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                marks = " ".join(map(ast.unparse, (*node.decorator_list, *node.bases)))
                if "dataclass" in marks or "msgspec.Struct" in marks:
                    yield f"dataclass {node.name}"


def difference(found: list[str], frozen: list[str]) -> str:
    """What was added and what is gone, one line each; empty if nothing."""
    added, gone = sorted({*found} - {*frozen}), sorted({*frozen} - {*found})
    return "\n".join([*(f"added: {line}" for line in added), *(f"gone: {line}" for line in gone)])


def test_what_a_user_has_to_learn_is_frozen():
    frozen = FROZEN.read_text(encoding="utf-8").splitlines()
    assert len(frozen) > 300
    advice = "say why in the commit, and run python -m tests.test_concepts"
    assert not (changes := difference(concepts(), frozen)), f"{changes}\n{advice}"


def test_an_addition_and_a_removal_are_found():
    assert difference(["a", "b"], ["b", "c"]) == "added: a\ngone: c"
    assert difference(["a"], ["a"]) == ""


def test_all_kinds_are_listed():
    lines = concepts()
    for line in (
        "command ablate try",
        "option of ablate run: --vary",
        "option of compare: --delta",
        "config model.architecture.hidden_size",
        "config data.context_length",
        "config trainer.tf32",
        "class lightning_llm.optim.MuonAdamW: momentum",
        "part attention sliding_window: window",
        "dataclass Experiment",
    ):
        assert line in lines


if __name__ == "__main__":
    FROZEN.write_text("".join(f"{line}\n" for line in concepts()), encoding="utf-8")
