"""Arguments of a part by name on the command line: ``--model.architecture.attention.window 16``.

The parser takes a part as one value. Here, what configs and command line say of its class and its arguments becomes
that value.
"""

import json
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import get_loader

from lightning_llm.cli.command_line import CONFIG_OPTIONS
from lightning_llm.io.atomic import json_text
from lightning_llm.io.config_file import LARGEST, check_yaml, value_at
from lightning_llm.io.trust import CLASS_PATH, INIT_ARGS
from lightning_llm.io.untrusted import read_text, shown
from lightning_llm.model.config import ModelConfig
from lightning_llm.model.parts import BUILT_IN, arguments_of, form_problems, name_of, normalized

ARCHITECTURE = "model.architecture"
DEFAULTS = {field.name: field.default for field in fields(ModelConfig) if field.name in BUILT_IN}


def with_whole_parts(words: Sequence[str]) -> list[str]:
    """The same words, in which each part of the model is given once, as a whole, at the end.

    An argument is of the class that is named last, wherever it was typed: none is dropped in silence.

    Args:
        words: Each option in one word with its value.

    Raises:
        ValueError: The class or an argument cannot be read.
    """
    rest = list[str]()
    typed = dict[str, list[tuple[str, str]]]()
    for word in words:
        name, _, value = word.partition("=")
        kind, _, argument = name.removeprefix(f"--{ARCHITECTURE}.").partition(".")
        if name.startswith(f"--{ARCHITECTURE}.") and kind in BUILT_IN and argument != "help":
            typed.setdefault(kind, []).append((argument, value))
        else:
            rest.append(word)
    whole = list[str]()
    for kind, options in typed.items():
        is_given_whole = all(argument == "" for argument, _ in options)
        part = options[-1][1] if is_given_whole else _whole(kind, _given(kind, rest), options)
        if not isinstance(part, str) or isinstance(_read(part), dict):
            # the parser cannot put options of a class in the place of others that are plain, but in that of a name
            whole.append(f"--{ARCHITECTURE}.{kind}={DEFAULTS[kind]}")
        whole.append(f"--{ARCHITECTURE}.{kind}={part if isinstance(part, str) else json_text(part)}")
    return [*rest, *whole]


def name_in(part: object) -> str | None:
    """The name or the import path in a part as a config or a command line gives it; ``None``: there is none."""
    part = _read(part) if isinstance(part, str) else part
    path = part.get(CLASS_PATH) if isinstance(part, dict) else part
    return path if isinstance(path, str) else None


def _whole(kind: str, part: Any, options: list[tuple[str, str]]) -> Any:
    """A part with the class and the arguments that are given by name."""
    for argument, text in options:
        if argument == "":
            part = _read(text)
        elif argument == CLASS_PATH and text != name_in(part):
            part = text
    part = normalized(part)
    for problem in form_problems(kind, part):
        raise ValueError(problem)
    arguments = arguments_of(part)
    for argument, text in options:
        if argument in ("", CLASS_PATH):
            continue
        value = _read(text)
        if argument != INIT_ARGS:
            value = arguments | {argument.removeprefix(f"{INIT_ARGS}."): value}
        elif not isinstance(value, dict):
            raise ValueError(f"{ARCHITECTURE}.{kind}.{INIT_ARGS} must have options by name, got {shown(text)}")
        arguments = value
        try:
            json.dumps(arguments, allow_nan=False)
        except (TypeError, ValueError):
            expected = "a finite number, a text, a list or a mapping"
            raise ValueError(f"{ARCHITECTURE}.{kind}.{argument} is {shown(text)}, expected {expected}") from None
    return normalized({CLASS_PATH: name_of(part), INIT_ARGS: arguments})


def _given(kind: str, words: Sequence[str]) -> Any:
    """The value of a part in the configs and words; its default, if they do not have it."""
    part: Any = DEFAULTS[kind]
    for word in sorted(words, key=lambda word: word.partition("=")[0] not in CONFIG_OPTIONS):
        option, _, text = word.partition("=")
        section = "" if option in CONFIG_OPTIONS else option.removeprefix("--").rstrip("+")
        name = f"{ARCHITECTURE}.{kind}"
        if not section or section in (ARCHITECTURE, ARCHITECTURE.partition(".")[0]):
            content = _read(read_text(Path(text), LARGEST) if Path(text).is_file() else text)
            part = value_at(content, name.removeprefix(section).removeprefix("."), part)
    return part


def _read(text: str) -> Any:
    """A value as the parser reads it: 1e-4 is a number. What is not YAML is a text."""
    try:
        check_yaml(text)
        return get_loader("yaml")(text)
    except yaml.YAMLError:
        return text
