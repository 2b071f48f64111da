"""Options of ``fit`` by dotted name: those of a variant, as a file or ``--vary`` gives them, and as arguments."""

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import yaml

from lightning_llm.ablate.names import AGAIN, BASELINE, NULL
from lightning_llm.io.untrusted import SLASH, file_name, shown

# Neither options nor variants can set them
SEED_OPTION = "data.seed"  # of the order of TokenDataModule; data of another class may have another
SET_BY_EXPERIMENT = ("seed_everything", SEED_OPTION, "ckpt_path", "trainer.run_dir", "trainer.default_root_dir")

Options = dict[str, Any]  # by dotted name


def flat_options(options: Mapping[str, Any], prefix: str = "") -> Options:
    """Options by dotted names; those of a class (``class_path``) stay together."""
    flat: Options = {}
    for name, value in options.items():
        is_section = bool(value) and has_names(value) and "class_path" not in value
        flat |= flat_options(value, f"{prefix}{name}.") if is_section else {f"{prefix}{name}": value}
    return flat


def has_names(value: object) -> bool:
    """Whether it is a mapping whose keys are names."""
    return isinstance(value, dict) and all(isinstance(name, str) and name for name in value)


def command_line_of(options: Mapping[str, Any]) -> list[str]:
    """Options as arguments of a command line.

    Raises:
        ValueError: A value is none of JSON, such as a date.
    """
    arguments = []
    for name, value in options.items():
        try:
            text = value if isinstance(value, str) else json.dumps(value, allow_nan=False)
        except (TypeError, ValueError):
            expected = "a finite number, a text, a list or a mapping"
            raise ValueError(f"{name} is {shown(value)}, expected {expected}") from None
        arguments.append(f"--{name}={text}")
    return arguments


def varied(variants: Sequence[Sequence[str]]) -> dict[str, Options]:
    """Variants from ``OPTION=VALUE`` assignments, named by their values.

    A value that says nothing alone (a number, ``true``), or that two options have, is named with the option's last
    word. An import path is named by its last word.

    Args:
        variants: The assignments of each.

    Raises:
        ValueError: An assignment has no ``=``, a variant has two values of an option, or two have one name.
    """
    options = [[_option(word) for word in assignments] for assignments in variants]
    names = _names({assignment for of_variant in options for assignment in of_variant})
    found: dict[str, Options] = {}
    for of_variant in options:
        if len(values := dict(of_variant)) < len(of_variant):
            twice = next(option for option, _ in of_variant if [name for name, _ in of_variant].count(option) > 1)
            raise ValueError(f"--vary and --with give {twice} twice: a variant has one value of it")
        name = "+".join(names[assignment] for assignment in of_variant)
        if name in found:
            words = " ".join(f"{option}={value}" for option, value in of_variant)
            raise ValueError(f"--vary {words}: the variant {name} is given twice")
        found[name] = dict(values)
    return found


def _names(assignments: Collection[tuple[str, str]]) -> dict[tuple[str, str], str]:
    """A name for each assignment, as short as tells it from the others."""
    short_values = [_short(value) for _, value in assignments]
    names: dict[tuple[str, str], str] = {}
    for option, value in sorted(assignments):
        word = _short(value)
        last = option.rpartition(".")[2]
        is_enough = short_values.count(word) == 1 and word[0].isalpha() and _is_read_as_text(word)
        name = folder_name(word if is_enough else f"{last}={word}")
        if name in (*names.values(), BASELINE, AGAIN, NULL):
            name = folder_name(f"{last}={value}")
        names[option, value] = name
    return names


def _is_read_as_text(word: str) -> bool:
    try:
        return bool(yaml.safe_load(word) == word)
    except yaml.YAMLError:
        return False


def folder_name(text: str) -> str:
    """The name of a variant's folders: a comma would begin its seed, a backslash is in no plain name of a file."""
    return file_name(text.replace(",", ";")).replace("\\", SLASH)


def _option(assignment: str) -> tuple[str, str]:
    option, equals, value = assignment.partition("=")
    if not equals or not option or not value:
        raise ValueError(f"--vary {shown(assignment)} must be OPTION=VALUE, such as model.architecture.mlp=gelu")
    return option, value


def _short(value: str) -> str:
    """An import path's last word; another value as it is."""
    return value.rpartition(".")[2] if all(map(str.isidentifier, value.split("."))) else value
