"""A command with placeholders, such as ``python train.py --seed={seed} {options}``: what a run executes. No torch.

It is split like the words of a shell, and started without one. A placeholder that is a word of its own becomes as many
words as it has; inside a longer word it becomes text that a shell reads as these words, so that
``sh -c "cd src && python train.py {options}"`` works.
"""

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lightning_llm.io.untrusted import shown

SEED = "seed"
RUN = "run"
OPTIONS = "options"
DEVICE = "device"
PORT = "port"
TREE = "tree"
RESUME = "resume"
PLACEHOLDERS = {
    SEED: "the seed of the run",
    RUN: "an empty folder of the run's own",
    OPTIONS: "the options of the variant",
    DEVICE: "cpu or cuda",
    PORT: "a free port",
    TREE: "the folder of the revision that runs",
    RESUME: "what --resume says, in a run that was interrupted",
}
OF_SHELL = ("|", "||", "&&", "&", ";", ">", ">>", "<", "2>", "2>&1", "&>", "cd")
OPTION = "--{name}={value}"
_PLACEHOLDER = re.compile(r"\{\{|\}\}|\{([^{}]*)\}")


def words_of(command: str, source: str) -> list[str]:
    """The words of a command, whose placeholders are known.

    Args:
        command: As the user typed it.
        source: Names it in errors, such as ``--command``.

    Raises:
        ValueError: It cannot be split, has a placeholder that is not known, or needs a shell.
    """
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise ValueError(f"{source} {shown(command)} cannot be split into words: {error}") from None
    if not words:
        raise ValueError(f"{source} is empty: give what trains, such as 'python train.py --seed={{seed}} {{options}}'")
    if needing := next((word for word in words if word in OF_SHELL or _is_assignment(words[0], word)), None):
        advice = f"""it is started without one; give sh -c "{command.replace('"', "")}" if it should have one"""
        raise ValueError(f"{source} has {shown(needing)}, which needs a shell: {advice}")
    for word in words:
        names_in(word, PLACEHOLDERS, source)
    return words


def _is_assignment(first: str, word: str) -> bool:
    return word is first and re.fullmatch(r"[A-Za-z_]\w*=.*", word) is not None


def names_in(text: str, known: Mapping[str, str], source: str) -> list[str]:
    """The placeholders of a text.

    Args:
        text: With placeholders; ``{{`` and ``}}`` are braces.
        known: What each may be, by name.
        source: Names the text in errors.

    Raises:
        ValueError: One is unknown.
    """
    names = [match[1] for match in _PLACEHOLDER.finditer(text) if match[1] is not None]
    if unknown := [name for name in names if name not in known]:
        accepted = ", ".join(f"{{{name}}} ({about})" for name, about in known.items())
        problem = f"{source} has {{{unknown[0]}}}, which is no placeholder"
        raise ValueError(f"{problem}: there are {accepted}; {{{{ and }}}} are braces")
    return names


def has(words: Sequence[str], name: str) -> bool:
    """Whether a command has a placeholder."""
    return any(name in names_in(word, {**PLACEHOLDERS, name: ""}, "") for word in words)


def expanded(words: Sequence[str], values: Mapping[str, str | Sequence[str]]) -> list[str]:
    """A command with values in place of its placeholders.

    Args:
        words: As of :func:`words_of`.
        values: Of each placeholder: a text, or the words of several options.
    """
    return [text for word in words for text in _expanded(word, values)]


def _expanded(word: str, values: Mapping[str, str | Sequence[str]]) -> Iterator[str]:
    alone = _PLACEHOLDER.fullmatch(word)
    value = None if alone is None or alone[1] is None else values[alone[1]]
    if value is not None and not isinstance(value, str):
        yield from value
        return
    yield _PLACEHOLDER.sub(lambda match: match[0][0] if match[1] is None else _inside(values[match[1]]), word)


def _inside(value: str | Sequence[str]) -> str:
    return value if isinstance(value, str) else shlex.join(value)


def option_words(options: Mapping[str, Any], form: str) -> list[str]:
    """The words of options.

    Args:
        options: Values by name. ``true`` and ``null`` of a file are ``True`` and ``None``, as Python writes them.
        form: How an option is written: words with ``{name}`` and ``{value}``.
    """
    forms = shlex.split(form)
    return [
        text
        for name, value in options.items()
        for word in forms
        for text in _expanded(word, {"name": name, "value": str(value)})
    ]
