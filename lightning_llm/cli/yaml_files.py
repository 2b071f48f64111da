"""YAML of configs, read strictly: a key that is given twice is an error, where YAML's readers let the last one win."""

from pathlib import Path
from typing import Any

import yaml


class RepeatedKeyError(ValueError):
    """A key is given twice in one mapping; the text says in which lines."""


def read_config(file: Path) -> dict[str, Any]:
    """The options in a config file.

    Raises:
        ValueError: It is not YAML, gives a key twice, or holds something else than options by name. Names the file.
        OSError: It cannot be read.
    """
    try:
        text = file.read_text(encoding="utf-8")
        check_keys(text)
        content = yaml.safe_load(text)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"config {file} is not YAML: {error}") from error
    except RepeatedKeyError as error:
        raise ValueError(f"config {file}: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"config {file} must hold options by name, such as 'trainer:', got {content!r}")
    return content


def check_keys(text: str) -> None:
    """Look for keys that are given twice.

    Raises:
        RepeatedKeyError: There is one.
        yaml.YAMLError: The text is not YAML.
    """
    found: dict[int, yaml.Node] = {}
    waiting = [yaml.compose(text, Loader=yaml.SafeLoader)]
    while waiting:
        node = waiting.pop()
        if node is None or id(node) in found:  # an anchor's node is met once more at each alias
            continue
        found[id(node)] = node
        if isinstance(node, yaml.MappingNode):
            _compare([key for key, _ in node.value])
            waiting += [value for _, value in node.value]
        elif isinstance(node, yaml.SequenceNode):
            waiting += node.value


def _compare(keys: list[yaml.Node]) -> None:
    lines: dict[tuple[str, str], int] = {}
    for key in keys:
        if isinstance(key, yaml.ScalarNode):
            name, line = (key.tag, key.value), key.start_mark.line + 1
            if name in lines:
                where = f"line {line}" if lines[name] == line else f"lines {lines[name]} and {line}"
                raise RepeatedKeyError(f"{key.value!r} is given twice, in {where}: leave one out")
            lines[name] = line
