"""Checks of a training command before torch is imported: files, options and names that do not exist."""

import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from lightning_llm.cli import command_line, jobs, parsing
from lightning_llm.cli.errors import USER_ERROR, reason_of, reports
from lightning_llm.cli.part_options import name_in, with_whole_parts
from lightning_llm.data.corpora import STDIN, open_corpus
from lightning_llm.data.prepare import given_tokenizer
from lightning_llm.io.processes import is_first_process
from lightning_llm.io.trust import OUR_PREFIX, is_custom
from lightning_llm.io.untrusted import shown
from lightning_llm.model.parts import BUILT_IN, part_problems
from lightning_llm.runs.find import named_checkpoint

DATA_OPTIONS = ("store", "corpus", "path", "mixture", "raw_dtype", "tokenizer")
WHOLE_SECTIONS = ("--model", "--data", "--trainer", "--model.architecture")


def refused(words: Sequence[str]) -> int:
    """Look for mistakes in the words of a shell that can be known before torch is imported.

    Returns:
        0, or the exit status after a line about a mistake.
    """
    if any(word in ("-h", "--help") or word.endswith(".help") for word in words):
        return 0
    try:
        complete = command_line.with_config_paths(words)
        parsing.check_configs(complete)
        jobs.check_restarts()
        jobs.check_address()
        if is_first_process() and "--print_config" not in words:  # another host may lack the text
            _check_named(with_whole_parts(complete))
    except (ValueError, OSError) as error:
        line = f"lightning-llm {words[0]}: error: {reason_of(error)}"
        return reports.mistake(words[0], line) if is_first_process() else USER_ERROR
    return 0


def _check_named(words: Sequence[str]) -> None:
    """Refuse a checkpoint, a text or the name of a part that does not exist, if it is an option of its own.

    A whole section in one word, such as ``--trainer FILE``, is left to the parser.

    Raises:
        ValueError: One does not exist.
    """
    value_of = partial(command_line.given_option, words)
    has_section = any(word.partition("=")[0].removesuffix("+") in WHOLE_SECTIONS for word in words)
    if (checkpoint := value_of("ckpt_path")) is not None:
        _check_checkpoint(str(checkpoint), words, has_section)
        return
    check_trained(words[0])
    if has_section or any(is_custom(value_of(f"{name}.class_path") or OUR_PREFIX) for name in ("model", "data")):
        return
    for kind, names in BUILT_IN.items():
        name = name_in(value_of(f"model.architecture.{kind}"))
        if name is not None and name not in names and "." not in name:
            raise ValueError(next(part_problems(kind, name)))
    source = value_of("model.init_from")
    if source is not None and not os.path.exists(str(source)):
        raise ValueError(
            f"model.init_from {shown(source)} does not exist: give a checkpoint, a run or a model's folder"
        )
    _check_data({name: value_of(f"data.{name}") for name in DATA_OPTIONS}, words)


def _check_checkpoint(checkpoint: str, words: Sequence[str], has_section: bool) -> None:
    value_of = partial(command_line.given_option, words)
    if checkpoint not in ("last", "best"):
        named_checkpoint(checkpoint, Path())
    elif not has_section and not isinstance(value_of("trainer.logger"), str | dict | list):  # it may choose the folder
        root = Path(value_of("trainer.default_root_dir") or "runs")  # without a config any run below it counts
        folder = root / command_line.experiment_name(words) if command_line.configs_in(words) else root
        named_checkpoint(checkpoint, Path(value_of("trainer.run_dir") or folder))


def _check_data(data: Mapping[str, Any], words: Sequence[str]) -> None:
    command_line.check_store(data, words)
    if any(data[name] is not None for name in ("store", "mixture", "raw_dtype")):
        return
    path, tokenizer = data["path"], data["tokenizer"]
    if isinstance(path, str) and path != STDIN and not Path(path).expanduser().exists():
        open_corpus([path])  # raises, unless it is a glob
    if isinstance(tokenizer, str) and not Path(tokenizer).is_file():
        given_tokenizer(tokenizer)


def check_trained(command: str) -> None:
    """Refuse to evaluate without a checkpoint.

    Raises:
        ValueError: The command needs one.
    """
    if command not in command_line.FIT:
        raise ValueError(f"{command} needs a trained model: --ckpt_path best, last, a run directory or a file")
