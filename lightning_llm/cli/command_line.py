"""The words of a training command: configs by name, options that do not exist, the values that options have."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml

from lightning_llm.accounting.sizing import SIZE_OPTIONS
from lightning_llm.cli.commands import TRAINER_WORDS
from lightning_llm.data.find_store import check_named_store
from lightning_llm.io.config_file import config_path, parse_yaml, read_config, value_at
from lightning_llm.io.shell import shell_command
from lightning_llm.io.trust import CLASS_PATH, TRUST_CODE
from lightning_llm.io.untrusted import file_name, shown
from lightning_llm.model.config import ModelConfig
from lightning_llm.runs.directory import CONFIG
from lightning_llm.runs.find import find_checkpoint, newest_run, run_of

CONFIG_OPTIONS = ("--config", "-c")
SECTIONS = ("model", "data", "trainer")
FIT = ("fit", "check")  # which start without a trained model
SINGLE_OPTIONS = ("seed_everything", "keep_freed_memory", "ckpt_path", "weights_only", "return_predictions", "verbose")
ABSENT = object()
OPTIONAL_VALUE = (".help", "--print_config")  # the ends of options whose value may be left out
FLAGS = ("-h", "--help", "--print_config", TRUST_CODE, "--repeat")
DEFAULT_STEPS = 300  # of a run without a config; Lightning's default is 1,000 epochs
OWN_LOGGER = "JSONLinesLogger"
LOGGERS_WITH_FOLDERS = (OWN_LOGGER, "TensorBoardLogger")
LENGTHS = ("max_epochs", "max_time", "min_steps", "min_epochs", "fast_dev_run")


def with_config_paths(words: Sequence[str]) -> list[str]:
    """The same words, each option in one word with its value, and the configs that they name by path.

    Raises:
        ValueError: A config is neither a file nor shipped, or a word is no option, or an option lacks its value.
    """
    complete = list(words[:1])
    rest = iter(words[1:])
    if not {*complete} <= {*TRAINER_WORDS}:  # the parser names the commands
        return list(words)
    for word in rest:
        name, equals, value = word.partition("=")
        if len(name) > len("--c") and "--config".startswith(name):  # an abbreviation
            name = "--config"
        if not name.startswith("-") and complete[-1].endswith(OPTIONAL_VALUE):
            complete.append(word)
            continue
        _check_option(name)
        if not equals and (name in FLAGS or name.endswith(".help")):
            complete.append(name)
            continue
        if not equals and (value := next(rest, "--")).startswith("--"):
            raise ValueError(f"{name} needs a value")
        complete.append(f"{name}={_config_path(value) if name in CONFIG_OPTIONS else value}")
    return complete


def _config_path(name: str) -> str:
    """Path as by :func:`config_path`, or a config that is typed itself, such as ``{trainer: {max_steps: 9}}``."""
    try:
        return config_path(name)
    except ValueError:
        with suppress(yaml.YAMLError):
            if isinstance(parse_yaml(name), dict):
                return name
        raise


def _check_option(name: str) -> None:
    """Refuse a word that cannot be an option. What is inside a section is the parser's to judge."""
    if not name.startswith("-"):
        raise ValueError(f"{shown(name)} is not an option: a config is given with --config {name}")
    top, dot, _ = name.removeprefix("--").partition(".")
    top = top.removesuffix("+")
    singles = [f"--{each}" for each in (*SINGLE_OPTIONS, *SIZE_OPTIONS)]
    sections = [f"--{each}" for each in SECTIONS]
    known = [*CONFIG_OPTIONS, *FLAGS, *singles, *sections]
    if (dot and top in SECTIONS) or (not dot and any(each.startswith(name) for each in known)):  # may be abbreviated
        return
    options = ", ".join(("--config FILE", *(f"{section}.NAME" for section in sections), *singles))
    if top in {field.name for field in fields(ModelConfig)}:
        raise ValueError(f"{shown(name)} is not an option: did you mean --model.architecture.{name[2:]}?")
    close = get_close_matches(top.removeprefix("--"), [option.lstrip("-") for option in known], 1)
    hint = f"did you mean --{close[0]}{name[len(top) + 2 :] if dot else ''}?" if close else f"options are {options}"
    raise ValueError(f"{shown(name)} is not an option: {hint}")


def with_nearest(message: str, options: Iterable[str]) -> str:
    """The parser's message about words that are no options, with the option that is nearest to the first, if one is."""
    name = message.partition("unrecognized arguments: --")[2].partition(" ")[0].partition("=")[0]
    close = get_close_matches(name, options, 5, cutoff=0.8)
    close.sort(key=lambda option: sorted(option) != sorted(name))  # letters in another order come first
    return f"{message}; did you mean --{close[0]}?" if close else message


def set_length(trainer: Any, words: Sequence[str]) -> str:
    """Give a run without any config a length, unless an option does.

    Args:
        trainer: The parsed options of the trainer.
        words: The command line.

    Returns:
        What to print; empty if nothing was set.
    """
    is_set = trainer.max_steps != -1 or any(trainer.get(name) for name in LENGTHS)
    if is_set or words[0] not in FIT or [*configs_in(words), *option_values(words, "--ckpt_path")]:
        return ""
    trainer.max_steps = DEFAULT_STEPS
    advice = "--trainer.max_steps or --trainer.max_epochs changes this"
    return f"without a config, a run has {DEFAULT_STEPS} steps: {advice}"


def experiment_name(words: Sequence[str]) -> str:
    """The name of a run: that of its last config file, or of the folder that a run's own config is in.

    A config that only says how to train, such as ``configs/ddp.yaml``, gives no name if another one does.
    """
    configs = [Path(file) for file in configs_in(words)]
    if not configs:
        return "run"
    with_model = (file for file in reversed(configs) if file.is_file() and {"model", "data"} & read_config(file).keys())
    path = next(with_model, configs[-1])
    return file_name(path.resolve().parent.parent.name if path.name == CONFIG else path.stem)


def folder_of_runs(trainer: Any, experiment: str) -> Path:
    """Where the runs of a command go: where its run directory is asked for, or a logger makes it, or by its name.

    Args:
        trainer: The parsed options of the trainer.
        experiment: The name of the runs.
    """
    if trainer.run_dir:
        return Path(trainer.run_dir)
    root = Path(trainer.default_root_dir)
    for logger in trainer.logger if isinstance(trainer.logger, list) else [trainer.logger]:
        name = getattr(logger, CLASS_PATH, "").rpartition(".")[2]
        if name not in LOGGERS_WITH_FOLDERS:
            continue
        folder = Path(logger.init_args.save_dir)
        if name == OWN_LOGGER or folder.resolve() == root.resolve():  # as the Trainer chooses it
            return folder / (logger.init_args.name or "")
    return root / experiment


def complete(words: Sequence[str]) -> list[str]:
    """The words for the parser: configs by path, that of a run to evaluate or resume too, before all other options.

    Raises:
        ValueError: A config is neither a file nor shipped, a word is no option, or there is no such checkpoint.
    """
    words = with_config_of_run(with_config_paths(words))
    # options override configs wherever they were typed
    return [*words[:1], *sorted(words[1:], key=lambda word: word.partition("=")[0] not in CONFIG_OPTIONS)]


def with_config_of_run(words: list[str]) -> list[str]:
    """Without ``--config``, a checkpoint of a run comes with that run's own config."""
    checkpoints = option_values(words, "--ckpt_path")
    if not words or not checkpoints or configs_in(words):
        return words
    roots = (option_values(words, f"--trainer.{name}") for name in ("run_dir", "default_root_dir"))
    root = Path(next(filter(None, roots), ["runs"])[-1])
    is_newest = checkpoints[-1] in ("last", "best")
    run = newest_run(root) if is_newest else run_of(find_checkpoint(checkpoints[-1], root, lambda line: None))
    return words if run is None else [words[0], f"--config={run / CONFIG}", *words[1:]]


def check_store(data: Mapping[str, Any], words: Sequence[str]) -> None:
    """Refuse a named store that is missing: a corpus in a config does not mean that the store is made from it.

    Args:
        data: The options of the data, from configs and command line together.
        words: The command line.

    Raises:
        ValueError: If the store is missing and neither ``data.path`` nor, in the words, ``data.corpus`` is given.
    """
    if data.get("mixture") is None and data.get("raw_dtype") is None:
        sections = [parse_yaml(section) for section in option_values(words, "--data")]  # files among them are words
        named = {name for section in sections if isinstance(section, dict) for name in section}
        is_given = "corpus" in named or option_values(words, "--data.corpus")
        store = data.get("store")
        if not isinstance(store, str | None):
            raise ValueError(f"data.store must be the name of a folder, got {shown(store)}")
        check_named_store(store, data.get("corpus") if is_given else None, data.get("path"))


def resume_command(words: Sequence[str]) -> str:
    """The same command, resuming from its newest checkpoint instead of the one it was given."""
    pairs = zip(words, ["", *words], strict=False)
    kept = [word for word, before in pairs if before != "--ckpt_path" and not word.startswith("--ckpt_path")]
    return shell_command("lightning-llm", *kept, "--ckpt_path", "last")


def option_values(words: Sequence[str], *names: str) -> list[str]:
    """The values given to an option, in their order, by words of :func:`with_config_paths`."""
    return [value for name, _, value in (word.partition("=") for word in words) if name in names]


def configs_in(words: Sequence[str]) -> list[str]:
    """The configs that a command line names, in their order."""
    return option_values(words, *CONFIG_OPTIONS)


def given_option(words: Sequence[str], name: str) -> Any:
    """The value of an option on the command line, else in the last config that has it; ``None``: it is not given."""
    if typed := option_values(words, f"--{name}"):
        return None if typed[-1] == "null" else typed[-1]
    for file in map(Path, reversed(configs_in(words))):
        value = value_at(read_config(file), name, ABSENT) if file.is_file() else ABSENT
        if value is not ABSENT:
            return value
    return None
