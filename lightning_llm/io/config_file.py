"""Configs as files, read strictly: a key that is given twice is an error, where YAML's readers use the last one.

So is what would take too much memory or time: aliases that multiply, deep nesting, long names above many options,
numbers of thousands of digits, large files.
"""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

import yaml

from lightning_llm.io.untrusted import read_text, shown

LARGEST = 1 << 18  # bytes of a config; the largest of this project has 3,000
MOST_NODES = 100_000  # an alias counts as what it stands for
DEEPEST = 40
MOST_CHARACTERS = 1 << 20  # with what aliases stand for, and the whole name (a.b.c) of each value
MOST = 2**40  # of any whole number
_LONGEST_NUMBER = 100  # characters
_NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
SHIPPED = Path(__file__).parents[1] / "configs"  # in a clone a link
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast, if libyaml is installed

Section = dict[str, Any]


class HostileYAMLError(ValueError):
    """A key is given twice in one mapping, or a limit is exceeded; the text says where."""


def config_path(name: str) -> str:
    """The file that a config option means: one of that name, with or without ``.yaml``, else the shipped config.

    Raises:
        ValueError: There is neither.
    """
    for path in (name, f"{name}.yaml"):
        if os.path.exists(path) and not os.path.isdir(path):
            return path
    shipped = {file.stem: file for file in sorted(SHIPPED.glob("*.yaml"))}
    if (file := shipped.get(name.removesuffix(".yaml"))) is not None:
        return str(file)
    raise ValueError(f"config {shown(name)} is no file and no shipped config: give a file, or {', '.join(shipped)}")


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
        content = parse_yaml(text)
    except HostileYAMLError as error:
        raise ValueError(f"config {file}: {error}") from error
    except (yaml.YAMLError, ValueError) as error:  # such as a date in month 99
        raise ValueError(f"config {file} is not YAML: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"config {file} must have options by name, such as 'trainer:', got {shown(content)}")
    return content


def parse_yaml(text: str) -> Any:
    """Value of a YAML text. Errors as in :func:`check_yaml`."""
    check_yaml(text)
    return yaml.load(text, Loader=_LOADER)


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


class _Size(NamedTuple):
    """The size of a tree, in which an alias counts as what it stands for."""

    nodes: int
    levels: int
    leaves: int  # values that get a name of their own when the options are flattened
    characters: int  # of the values, and of their names below this tree


_ENDLESS = _Size(MOST_NODES, DEEPEST, 1, 0)


def _size(node: yaml.Node, sizes: dict[int, _Size]) -> _Size:
    if id(node) in sizes:
        return sizes[id(node)]
    line = node.start_mark.line + 1
    sizes[id(node)] = _ENDLESS  # until it is known: for an anchor that contains itself
    children = list[_Size]()
    if isinstance(node, yaml.MappingNode):
        _refuse_repeated([key for key, _ in node.value])
        # the options of a callback are named with its class
        class_name = sum(_size(value, sizes).characters for key, value in node.value if key.value == "class_path")
        for key, value in node.value:
            name, below = _size(key, sizes), _size(value, sizes)
            characters = below.characters + below.leaves * (name.characters + class_name)
            children += [name._replace(leaves=0, characters=0), below._replace(characters=characters)]
    elif isinstance(node, yaml.SequenceNode):
        children = [_size(child, sizes) for child in node.value]
    elif node.tag in _NUMBERS and len(node.value) > _LONGEST_NUMBER:
        raise HostileYAMLError(f"a number of {len(node.value)} characters, in line {line}")
    else:
        sizes[id(node)] = _Size(1, 0, 1, len(node.value) + 1)
        return sizes[id(node)]
    size = _Size(
        nodes=1 + sum(child.nodes for child in children),
        levels=1 + max((child.levels for child in children), default=-1),
        leaves=max(1, sum(child.leaves for child in children)),
        characters=sum(child.characters for child in children),
    )
    problem = ""
    if size.nodes > MOST_NODES or size.levels > DEEPEST:
        problem = f"aliases expand to more than {MOST_NODES} values or {DEEPEST} levels"
    elif size.characters > MOST_CHARACTERS:
        problem = f"aliases and names expand to more than {MOST_CHARACTERS} characters"
    if problem:
        raise HostileYAMLError(f"{problem}, in line {line}: write less")
    sizes[id(node)] = size
    return size


def _refuse_repeated(keys: list[yaml.Node]) -> None:
    lines: dict[tuple[str, str], int] = {}
    for key in keys:
        if not isinstance(key, yaml.ScalarNode):
            raise HostileYAMLError(f"a name that is a list or a mapping, in line {key.start_mark.line + 1}")
        name = (key.tag, key.value)
        line = key.start_mark.line + 1
        if name in lines:
            where = f"line {line}" if lines[name] == line else f"lines {lines[name]} and {line}"
            raise HostileYAMLError(f"{key.value!r} is given twice, in {where}: leave one out")
        lines[name] = line


def merged(first: Section, second: Section) -> Section:
    """Options of two configs: the second overrides; options of another class than the first's are not mixed in."""
    options = dict(first)
    for name, value in second.items():
        first_value = options.get(name)
        if isinstance(first_value, dict) and isinstance(value, dict):
            is_same_class = value.get("class_path", first_value.get("class_path")) == first_value.get("class_path")
            options[name] = merged(first_value, value) if is_same_class else value
        else:
            options[name] = value
    return options


def value_at(config: Any, name: str, default: Any = None) -> Any:
    """The value of a dotted name, or the default if the config does not have the name."""
    for part in name.split("."):
        if not isinstance(config, Mapping) or part not in config:
            return default
        config = config[part]
    return config


def section_of(config: Section, name: str) -> Section:
    """The options below a dotted name; none if the config does not have it.

    Raises:
        ValueError: It has something else there.
    """
    section: Any = config
    for part in filter(None, name.split(".")):  # an empty name is the whole config
        section = section.get(part, {})
        if section is None:
            return {}
        if not isinstance(section, dict):
            raise ValueError(f"{part} in the config must have options, got {shown(section)}")
    return cast(Section, section)


def whole_of(config: Section, name: str, default: Any = None, *, least: int = 1) -> Any:
    """The whole number of a dotted name, or the default.

    Raises:
        ValueError: It is none, or is not from ``least`` to 2^40.
    """
    section, _, option = name.rpartition(".")
    value = section_of(config, section).get(option, default)
    if value is not default and (type(value) is not int or not least <= value <= MOST):
        raise ValueError(f"{name} must be a whole number from {least} to {MOST}, got {shown(value)}")
    return value


def text_of(config: Section, name: str, default: Any = None) -> Any:
    """The text of a dotted name, or the default.

    Raises:
        ValueError: It is none.
    """
    section, _, option = name.rpartition(".")
    value = section_of(config, section).get(option)
    if value is not None and not isinstance(value, str):
        raise ValueError(f"{name} must be a name, got {shown(value)}")
    return default if value is None else value


def class_of(config: Section, name: str, default: str) -> tuple[str, Section]:
    """The path of a class and its arguments, from ``name: path`` or ``name: {class_path: path, init_args: …}``.

    Raises:
        ValueError: They are something else.
    """
    section, _, option = name.rpartition(".")
    if isinstance(section_of(config, section).get(option), dict):
        return text_of(config, f"{name}.class_path", default), section_of(config, f"{name}.init_args")
    return text_of(config, name, default), {}
