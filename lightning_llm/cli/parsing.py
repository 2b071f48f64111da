"""The configs of a training command are checked, then parsed; the parser imports only what ``io.trust`` trusts.

Before anything is imported, :func:`check_configs` looks wherever the parser would find a class: in the configs, in
texts that stand for YAML, and in the files that options name. :func:`parse` gives the parser those paths alone.
"""

import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import typeshed_client
import yaml
from jsonargparse import ArgumentError, ArgumentParser, get_loader, set_loader, set_parsing_settings
from jsonargparse.typing import Path as ParsersPath

from lightning_llm.accounting.sizing import SIZE_OPTIONS
from lightning_llm.cli.command_line import SECTIONS, SINGLE_OPTIONS, configs_in, option_values
from lightning_llm.io import trust
from lightning_llm.io.config_file import check_yaml, parse_yaml, read_config
from lightning_llm.io.untrusted import check_regular, shown
from lightning_llm.model.parts import BUILT_IN, form_problems, name_of, normalized

STRICT_YAML = "strict_yaml"  # the parser's own mode, but for keys that are given twice
_PERMITTED: set[str] = set()


def check_configs(words: Sequence[str]) -> list[str]:
    """Check the configs of a command, which the parser reads without naming the file, dropping what is empty.

    Returns:
        What they import from outside this package, as ``FILE imports PATH, …``; to find it out imports nothing.

    Raises:
        ValueError: A config is invalid.
        OSError: It cannot be read.
    """
    known = (*SECTIONS, *SINGLE_OPTIONS, *SIZE_OPTIONS)
    for file in map(Path, configs_in(words)):
        if not file.exists():
            continue
        for name, value in read_config(file).items():
            if name not in known:
                raise ValueError(f"config {file}: {name!r} is unknown; the top level takes {', '.join(known)}")
            if name in SECTIONS and not isinstance(value, dict):
                raise ValueError(f"config {file}: {name} must have options by name, got {shown(value)}")
    trust.TRUSTED.update(trust.custom_paths([text for word in words for text in (word, word.partition("=")[2])]))
    return [line for path, content in config_files(words).items() for line in trust.trust_printed(path, content)]


def parse(parser: ArgumentParser, words: Sequence[str]) -> Any:
    """Parse words and configs that have been checked: the parser imports what they name, and nothing else.

    Raises:
        ArgumentError: An option is wrong.
        ValueError: A part of the model was not named where :func:`check_configs` looks.
    """
    _permit()
    while True:  # again, if what it has just imported is defined elsewhere than where it is named
        try:
            parsed = parser.parse_args(list(words))
        except ArgumentError:
            if not _permit():
                raise
        else:
            if not _permit():
                break
    _refuse_null(parser, parsed)
    options = parsed[parsed.subcommand]  # the parser imports no parts: the model does
    for kind in BUILT_IN:
        part = normalized(options.get(f"model.architecture.{kind}"))
        path = "" if any(form_problems(kind, part)) else name_of(part)  # of a malformed part the model says more
        if path not in BUILT_IN[kind] and trust.is_custom(path) and "." in path and path not in trust.TRUSTED:
            if not trust.is_import_path(path):
                raise trust.not_found(f"model.architecture.{kind}", path)
            raise ValueError(f"model.architecture.{kind} {shown(path)} is inside a string: write it without quotes")
    return parsed


def _refuse_null(parser: ArgumentParser, parsed: Any) -> None:
    """Refuse null where the type of an option does not accept it: by itself the parser takes it for "not given".

    Raises:
        ArgumentError: An option is null.
    """
    set_parsing_settings(unset_sentinel=True)
    try:
        parser.validate(parsed)
    except (TypeError, ValueError) as error:
        raise ArgumentError(None, str(error)) from error
    finally:
        set_parsing_settings(unset_sentinel=False)


def _permit() -> bool:
    """Let the parser import what is trusted, wherever that is defined, and nothing else; returns whether any is new."""
    trusted = {path for path in trust.trusted_definitions() if path.partition(".")[0] != "jsonargparse"}
    new, no_longer = trusted - _PERMITTED, _PERMITTED - trusted
    offered = tuple(f"{place}." for place in trust.OFFERED)
    _PERMITTED.symmetric_difference_update(new | no_longer)
    denied = [path for path in no_longer if not path.startswith(offered)]
    set_parsing_settings(import_path_allowlist=sorted(new), import_path_denylist=denied)
    return bool(new)


def config_files(words: Sequence[str]) -> dict[Path, Any]:
    """The YAML that a command reads: its configs, sections such as ``--trainer FILE``, and the files these name.

    The parser reads options of a class from any file that a value names, so FIFOs and devices are refused here.
    """
    contents: dict[Path, Any] = {}
    for config in map(Path, configs_in(words)):
        if config.is_file():
            _look_into(config, read_config(config), contents)
    for name in dict.fromkeys(word.partition("=")[0].removesuffix("+") for word in words):
        if name == "--data" or name.startswith(("--model", "--trainer")):
            for value in option_values(words, name, f"{name}+"):
                if name.endswith(".init_args") and not isinstance(parse_yaml(value), dict):
                    raise ValueError(f"{name[2:]} must have options by name, got {shown(value)}")
                _look_at(value, Path(), contents)
    return contents


def _look_into(file: Path, content: dict[str, Any], contents: dict[Path, Any]) -> None:
    contents[file] = content
    for name, value in content.items():
        _look_at(value, file.parent, contents, is_read=name != "data")  # whose paths may be texts


def _look_at(value: object, folder: Path, contents: dict[Path, Any], *, is_read: bool = True) -> None:
    for text in trust.texts_in(value):
        path = Path(ParsersPath(text, "", cwd=folder).absolute)  # with ~ and file: as the parser opens them
        if os.path.exists(path) and not path.is_dir():
            check_regular(path)
            if is_read and path not in contents:
                # whatever its name: the parser takes any file that holds options; one that cannot hold any, such as
                # the checkpoint of init_from, is left to the option that names it
                with nullcontext() if path.suffix in (".yaml", ".yml") else suppress(ValueError):
                    _look_into(path, read_config(path), contents)


def _load_strictly(text: str) -> Any:
    check_yaml(text)
    return get_loader("yaml")(text)


def _context_of_stubs(**options: Any) -> Any:
    return _get_search_context(search_path=[Path(path) for path in sys.path if path], **options)


set_loader(STRICT_YAML, _load_strictly, (yaml.YAMLError,))
# The parser reads stubs of functions. To know where, the library would start a Python in the current folder, whose
# json.py would run.
_get_search_context, typeshed_client.get_search_context = typeshed_client.get_search_context, _context_of_stubs
# The parser imports what is ours, what was named (``parse``), and the classes that Lightning and torch offer for an
# option, which short names stand for. It judges a path by where the object is defined. Below an option of any type,
# class_path is a word like any other: no class is made there.
set_parsing_settings(
    import_path_denylist=["*"], import_path_allowlist=[*trust.OFFERED], instantiate_subclass_spec_in_any=False
)
