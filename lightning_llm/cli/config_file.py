"""Configs as files, read strictly: a key that is given twice is an error, where YAML's readers use the last one.

So is what would take too much memory or time: aliases that multiply, deep nesting, numbers of thousands of digits,
large files.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from lightning_llm.io.untrusted import read_text, shown

LARGEST = 1 << 18  # bytes of a config; the largest of this project has 3,000
MOST_NODES = 100_000  # an alias counts as what it stands for
DEEPEST = 40
_LONGEST_NUMBER = 100  # characters
_NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
SHIPPED = Path(__file__).parents[1] / "configs"  # in a clone a link
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast, if libyaml is installed

Section = dict[str, Any]


class HostileYAMLError(ValueError):
    """A key is given twice in one mapping, or a limit is exceeded; the text says where."""


def config_path(given: str) -> str:
    """The file that a config option means: one of that name, with or without ``.yaml``, else the shipped config.

    Raises:
        ValueError: There is neither.
    """
    for path in (given, f"{given}.yaml"):
        if os.path.exists(path) and not os.path.isdir(path):
            return path
    shipped = {file.stem: file for file in sorted(SHIPPED.glob("*.yaml"))}
    if (file := shipped.get(given.removesuffix(".yaml"))) is not None:
        return str(file)
    raise ValueError(f"config {shown(given)} is no file and no shipped config: give a file, or {', '.join(shipped)}")


def read_config(file: Path) -> Section:
    """The options in a config file.

    Raises:
        ValueError: It is not YAML, gives a key twice, exceeds a limit, or holds something else than options by name.
            The message has the file's name.
        OSError: It cannot be read.
    """
    try:
        text = read_text(file, LARGEST)
    except ValueError as error:
        raise ValueError(f"config {error}") from error
    try:
        check_yaml(text)
        content = yaml.load(text, Loader=_LOADER)
    except HostileYAMLError as error:
        raise ValueError(f"config {file}: {error}") from error
    except (yaml.YAMLError, ValueError) as error:  # such as a date in month 99
        raise ValueError(f"config {file} is not YAML: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"config {file} must hold options by name, such as 'trainer:', got {shown(content)}")
    return content


def check_yaml(text: str) -> None:
    """Look for keys that are given twice, and for what exceeds a limit, without constructing any value.

    Raises:
        HostileYAMLError: One was found.
        yaml.YAMLError: The text is not YAML, or has tags.
    """
    depth = 0
    parsed: Iterator[Any] = yaml.parse(text, Loader=_LOADER)
    for event in parsed:
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > DEEPEST:
            raise HostileYAMLError(f"nested more than {DEEPEST} levels deep, in line {event.start_mark.line + 1}")
        if getattr(event, "tag", None) is not None:
            raise yaml.YAMLError(f"tag {event.tag!r} in line {event.start_mark.line + 1} is not accepted: leave it out")
    if (node := yaml.compose(text, Loader=_LOADER)) is not None:
        _size(node, {})


def _size(node: yaml.Node, sizes: dict[int, tuple[int, int]]) -> tuple[int, int]:
    """Nodes and levels of a tree; an alias counts as what it stands for."""
    if id(node) in sizes:
        return sizes[id(node)]
    line = node.start_mark.line + 1
    sizes[id(node)] = (MOST_NODES, DEEPEST)  # until it is known: for an anchor that contains itself
    nodes, levels, children = 1, 0, []
    if isinstance(node, yaml.MappingNode):
        _refuse_repeated([key for key, _ in node.value])
        children = [each for pair in node.value for each in pair]
    elif isinstance(node, yaml.SequenceNode):
        children = node.value
    elif node.tag in _NUMBERS and len(node.value) > _LONGEST_NUMBER:
        raise HostileYAMLError(f"a number of {len(node.value)} characters, in line {line}")
    for child in children:
        below = _size(child, sizes)
        nodes, levels = nodes + below[0], max(levels, 1 + below[1])
    if nodes > MOST_NODES or levels > DEEPEST:
        raise HostileYAMLError(
            f"aliases expand to more than {MOST_NODES} values or {DEEPEST} levels, in line {line}: write less"
        )
    sizes[id(node)] = (nodes, levels)
    return nodes, levels


def _refuse_repeated(keys: list[yaml.Node]) -> None:
    lines: dict[tuple[str, str], int] = {}
    for key in keys:
        if isinstance(key, yaml.ScalarNode):
            name, line = (key.tag, key.value), key.start_mark.line + 1
            if name in lines:
                where = f"line {line}" if lines[name] == line else f"lines {lines[name]} and {line}"
                raise HostileYAMLError(f"{key.value!r} is given twice, in {where}: leave one out")
            lines[name] = line
