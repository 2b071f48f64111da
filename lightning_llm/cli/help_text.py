"""Help of a training command: what this project decides comes first, in plain text without the markup of docstrings."""

import re
from argparse import SUPPRESS
from typing import Any

from lightning_llm.training import callbacks

ORDER = ("config", "ckpt_path", "model", "data", "trainer")  # of the groups: options that they have, or sections
TEXTS = {
    "ckpt_path": "Checkpoint to resume or to evaluate: a file or folder, a run directory, or last or best, of the "
    "newest run below trainer.default_root_dir.",
    "weights_only": "Checkpoints never run code: null or true.",
}
MARKUP = (
    (re.compile(r":\w+:`~?[\w.]*?(\w+)`"), r"\1"),  # a reference of Sphinx
    (re.compile(r"`([^`<]*?)\s*<([^`>]*)>`_"), r"\1 (\2)"),  # a link
    (re.compile(r"``?([^`]+)``?"), r"\1"),
)


def improve(parser: Any) -> None:
    """Put the groups of a parser in order, and strip the markup of their texts."""
    for name in dir(callbacks):  # classes that are imported are listed as known
        getattr(callbacks, name)
    parser._action_groups.sort(key=_place)
    for group in parser._action_groups:
        is_of_checkpoints = ORDER[_place(group)] == "ckpt_path"
        group.title = "checkpoint" if is_of_checkpoints else plain(group.title)  # Lightning's is about its method
    for action in parser._actions:
        action.help = TEXTS.get(action.dest) or plain(action.help)


def _place(group: Any) -> int:
    options = {action.dest for action in group._group_actions}
    words = options | {option.partition(".")[0] for option in options}
    return next((place for place, word in enumerate(ORDER) if word in words), 0)


def plain(text: Any) -> Any:
    """A text without the markup of reStructuredText; what is no text comes back as it is."""
    if isinstance(text, str) and text != SUPPRESS:
        for pattern, replacement in MARKUP:
            text = pattern.sub(replacement, text)
    return text
