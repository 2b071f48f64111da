"""Configs as files, read strictly: a key that is given twice is an error, where YAML's readers use the last one.

So are deep nesting, numbers of thousands of digits, and large files.
"""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import yaml

from lightning_llm.io.untrusted import read_text, shown

LARGEST = 1 << 18  # bytes of a config; the largest of this project has 3,000
DEEPEST = 40  # lists and mappings in one another; an alias counts as what it stands for
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
        _levels(node, {})


def _levels(node: yaml.Node, known: dict[int, int]) -> int:
    """How many lists and mappings are in one another in a node, which is checked."""
    if id(node) in known:
        return known[id(node)]
    line = node.start_mark.line + 1
    if isinstance(node, yaml.ScalarNode):
        if node.tag in _NUMBERS and len(node.value) > _LONGEST_NUMBER:
            raise HostileYAMLError(f"a number of {len(node.value)} characters, in line {line}")
        return 0
    known[id(node)] = DEEPEST  # until it is known: for an anchor that contains itself
    children = node.value
    if isinstance(node, yaml.MappingNode):
        _refuse_repeated([key for key, _ in node.value])
        children = [child for pair in node.value for child in pair]
    levels = 1 + max((_levels(child, known) for child in children), default=0)
    if levels > DEEPEST:
        raise HostileYAMLError(f"aliases nest more than {DEEPEST} levels deep, in line {line}")
    known[id(node)] = levels
    return levels


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
