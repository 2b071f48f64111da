"""What can be known of a training command before torch is imported: files, options and names that do not exist."""

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from lightning_llm.cli import jobs
from lightning_llm.cli.command_line import (
    CONFIG_OPTIONS,
    FIT,
    check_configs,
    check_store,
    experiment_of,
    option_values,
    with_config_paths,
)
from lightning_llm.cli.errors import USER_ERROR, one_line, reports
from lightning_llm.cli.process import is_first_process
from lightning_llm.data.corpora import STDIN, open_corpus
from lightning_llm.data.prepare import given_tokenizer
from lightning_llm.io.config_file import read_config
from lightning_llm.io.trust import PACKAGE, is_custom
from lightning_llm.io.untrusted import shown
from lightning_llm.model.parts import BUILT_IN, part_faults
from lightning_llm.runs.find import named_checkpoint

WHOLE_SECTIONS = ("--model", "--data", "--trainer", "--model.architecture")
ABSENT = object()


def refused(words: Sequence[str]) -> int:
    """Look for mistakes in the words of a shell that can be known before torch is imported.

    Returns:
        0, or the exit status after a line about a mistake.
    """
    if any(word in ("-h", "--help") or word.endswith(".help") for word in words):
        return 0
    try:
        complete = with_config_paths(words)
        check_configs(complete)
        jobs.check_restarts()
        jobs.check_address()
        if is_first_process() and "--print_config" not in words:  # another host may lack the text
            _check_named(complete)
    except (ValueError, OSError) as error:
        reason = one_line(error)
        if isinstance(error, OSError) and error.strerror:
            reason = f"{error.strerror}: {error.filename}"
        line = f"lightning-llm {words[0]}: error: {reason}"
        return reports.mistake(words[0], line) if is_first_process() else USER_ERROR
    return 0


def _check_named(words: Sequence[str]) -> None:
    """Refuse a checkpoint, a text or the name of a part that does not exist, if it is an option of its own.

    A whole section in one word, such as ``--trainer FILE``, is left to the parser.

    Raises:
        ValueError: One does not exist.
    """
    given, checkpoint = partial(_given, words), _given(words, "ckpt_path")
    has_section = any(word.partition("=")[0].removesuffix("+") in WHOLE_SECTIONS for word in words)
    if checkpoint is None:
        check_trained(words[0])
    elif checkpoint not in ("last", "best"):
        named_checkpoint(str(checkpoint), Path())
    elif not has_section:
        folder = Path(given("trainer.default_root_dir") or "runs", experiment_of(words))
        is_of_run = not option_values(words, *CONFIG_OPTIONS)  # then any run below the folder counts
        named_checkpoint(checkpoint, Path(given("trainer.run_dir") or (folder.parent if is_of_run else folder)))
    is_custom_class = any(is_custom(given(f"{name}.class_path") or PACKAGE) for name in ("model", "data"))
    if checkpoint is not None or has_section or is_custom_class:
        return
    for kind, known in BUILT_IN.items():
        name = given(f"model.architecture.{kind}")
        if isinstance(name, str) and name not in known and "." not in name:
            raise ValueError(next(part_faults(kind, name)))
    source, path, tokenizer = map(given, ("model.init_from", "data.path", "data.tokenizer"))
    if source is not None and not os.path.exists(str(source)):
        raise ValueError(
            f"model.init_from {shown(source)} does not exist: give a checkpoint, a run or a model's folder"
        )
    data = {name: given(f"data.{name}") for name in ("store", "corpus", "path", "mixture", "raw_dtype")}
    check_store(data, words)
    if data["store"] is None and data["mixture"] is None and data["raw_dtype"] is None:
        if isinstance(path, str) and path != STDIN and not Path(path).expanduser().exists():
            open_corpus([path])  # raises, unless it is a glob
        if isinstance(tokenizer, str) and not Path(tokenizer).is_file():
            given_tokenizer(tokenizer)


def check_trained(command: str) -> None:
    """Refuse to evaluate without a checkpoint.

    Raises:
        ValueError: The command needs one.
    """
    if command not in FIT:
        options = "--ckpt_path best, last, a run directory or a file"
        raise ValueError(f"{command} needs a trained model: {options}")


def _given(words: Sequence[str], name: str) -> Any:
    """The value of an option on the command line, else in the last config that has it."""
    if typed := option_values(words, f"--{name}"):
        return None if typed[-1] == "null" else typed[-1]
    for file in reversed(option_values(words, *CONFIG_OPTIONS)):
        value: Any = read_config(Path(file)) if os.path.exists(file) else {}
        for part in name.split("."):
            value = value.get(part, ABSENT) if isinstance(value, dict) else ABSENT
        if value is not ABSENT:
            return value
    return None
