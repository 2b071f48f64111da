"""The classes of model and data: ``--model.class_path``, ``--data.class_path``, the same keys in a config, or ours.

The parser asks a class for its options, so the classes are chosen before the parser is made. A class that the command
line names is imported; one that a config names is printed first, see ``parsing.check_configs``.
"""

import inspect
from argparse import SUPPRESS
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from traceback import walk_tb
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningDataModule, LightningModule
from lightning.pytorch.cli import LightningArgumentParser

from lightning_llm.cli.command_line import given_option, option_values
from lightning_llm.cli.errors import local_in, named, one_line
from lightning_llm.cli.jobs import lost_contact
from lightning_llm.cli.parser_words import NO_ALTERNATIVE_FITS, in_plain_words
from lightning_llm.data.datamodule import TokenDataModule
from lightning_llm.io.trust import CLASS_PATH, TRUSTED, is_custom, not_found, path_of, trust_and_import
from lightning_llm.io.untrusted import shown
from lightning_llm.measure.attribution import is_out_of_memory
from lightning_llm.training.module import LanguageModel

BASES: dict[str, tuple[type, type, str]] = {  # section: what a class must derive from, the default, which may be given
    "model": (LightningModule, LanguageModel, "any LightningModule"),
    "data": (LightningDataModule, TokenDataModule, "any LightningDataModule"),
}


def choose(words: Sequence[str], given: Mapping[str, type | None]) -> dict[str, type]:
    """The classes of model and data.

    Args:
        words: The command line, whose configs have been checked.
        given: By section, what is used unless the words name another class; ``None``: ours.

    Raises:
        ValueError: A class cannot be imported, or does not derive from the right one.
    """
    chosen = {}
    for section, (base, default, expected) in BASES.items():
        cls = given[section] or default
        path: str | None = given_option(words, f"{section}.{CLASS_PATH}")
        if path is not None and path != path_of(cls):
            cls = _imported(f"{section}.{CLASS_PATH}", path)
        if not (isinstance(cls, type) and issubclass(cls, base)):
            raise ValueError(f"{section}.{CLASS_PATH} must be {expected}, got {path or cls}")
        chosen[section] = cls
    return chosen


def is_custom_class(cls: type) -> bool:
    """Whether a class is the user's, and not the default of its section."""
    return all(cls is not default for _, default, _ in BASES.values())


def _imported(option: str, path: str) -> Any:
    if is_custom(path) and path not in TRUSTED:
        raise not_found(option, path)
    try:
        return trust_and_import(path)
    except Exception as error:  # whatever the user's module raises
        raise ValueError(f"{option} {path} cannot be imported: {named(error)}; give package.module.Class") from error


# ---- their options


def add_option(parser: LightningArgumentParser, section: str, cls: type) -> None:
    """Add ``class_path`` to the options of a section. It is in a run's config only if the class is not the default."""
    expected = BASES[section][2]
    default = BASES[section][1].__name__
    text = f"Import path of {expected}, whose arguments become options of this section. Default: ``{default}``."
    default_path = path_of(cls) if is_custom_class(cls) else SUPPRESS
    parser.add_argument(f"--{section}.{CLASS_PATH}", type=str, default=default_path, help=text)


def hide_options_of_ours(parser: LightningArgumentParser, words: Sequence[str], cls: type) -> list[str]:
    """Let a parser read configs that were written for token data, if the data are of another class.

    Returns:
        The options of ``data`` to leave out: those that only :class:`TokenDataModule` takes, unless they are typed.
    """
    taken, ours = (inspect.signature(owner).parameters for owner in (cls, TokenDataModule))
    names = [f"data.{name}" for name in ours if name not in taken and not issubclass(cls, TokenDataModule)]
    for name in (hidden := [name for name in names if not option_values(words, f"--{name}")]):
        parser.add_argument(f"--{name}", type=Any, default=SUPPRESS, help=SUPPRESS)
    return hidden


def check_parsed(options: Mapping[str, Any], words: Sequence[str], classes: Mapping[str, type]) -> None:
    """Refuse a ``class_path`` that the parser found and :func:`choose` did not: the options were of another class.

    Raises:
        ValueError: There is one.
    """
    for section, cls in classes.items():
        path = options.get(f"{section}.{CLASS_PATH}")
        if path not in (given_option(words, f"{section}.{CLASS_PATH}"), path_of(cls)):
            raise ValueError(f"{section}.{CLASS_PATH} {path}: write it in a config, or --{section}.{CLASS_PATH} {path}")


def check_architecture(architecture: object) -> None:
    """Refuse a ``model.architecture`` that holds no options: the parser lets a number, a list and null pass.

    Raises:
        ValueError: It is one of these.
    """
    if isinstance(architecture, int | float | str | list | None):
        raise ValueError(f"model.architecture must have options by name, got {shown(architecture)}")


# ---- making them


@contextmanager
def constructor_error_context(*classes: type) -> Iterator[None]:
    """An error in the constructor of one of these classes becomes a ``ValueError`` that names the class."""
    try:
        yield
    except Exception as error:
        owners = (type(frame.f_locals.get("self")) for frame, _ in walk_tb(error.__traceback__))
        owner = next((cls for cls in owners if issubclass(cls, classes) and is_custom_class(cls)), None)
        if owner is None:
            raise
        raise ValueError(f"{path_of(owner)}: its constructor failed: {named(error)}") from error


@contextmanager
def option_error_context() -> Iterator[None]:
    """An error in a constructor that the parser calls for an option begins with the option and the class.

    The parser's own message has all types that the option could have had, and the value several times.
    """
    try:
        yield
    except ValueError as error:
        if not str(error).startswith(NO_ALTERNATIVE_FITS):
            raise
        found = local_in(error, "component")
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        made = local_in(cause, "class_type")
        reason = in_plain_words(str(error)) if made is None else one_line(cause)
        is_named = made is None or made.__name__ in reason
        name = getattr(found, "dest", None)
        raise ValueError(": ".join([*filter(None, [name]), *([] if is_named else [made.__name__]), reason])) from error


@contextmanager
def callback_error_context() -> Iterator[None]:
    """An error in a hook of a callback from outside this package becomes a ``ValueError`` that names both."""
    try:
        yield
    except Exception as error:
        frames = [frame.f_locals for frame, _ in walk_tb(error.__traceback__) if "hook_name" in frame.f_locals]
        kind, hook = (type(frames[-1].get("callback")), frames[-1]["hook_name"]) if frames else (object, "")
        is_clear = isinstance(error, MisconfigurationException | OSError) or is_out_of_memory(error)
        if is_clear or lost_contact(error) or not issubclass(kind, Callback) or not is_custom(path_of(kind)):
            raise
        problem = f"its {hook} failed: {named(error)}; --debug shows the traceback"
        raise ValueError(f"callback {path_of(kind)}: {problem}") from error
