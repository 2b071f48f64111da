"""The words of a training command, looked at before LightningCLI parses them."""

import os
import shlex
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import get_loader, set_loader

from lightning_llm.cli.runs import CONFIG, find_checkpoint, newest_run, run_of
from lightning_llm.cli.yaml_files import check_yaml, read_config
from lightning_llm.data.find_store import check_named_store
from lightning_llm.io.printable import file_name
from lightning_llm.io.untrusted import check_regular, shown
from lightning_llm.model.config import is_foreign

SECTIONS = ("model", "data", "trainer")
STRICT_YAML = "strict_yaml"  # the parser's own mode, but for keys that are given twice
SINGLE_OPTIONS = ("seed_everything", "keep_freed_memory", "ckpt_path", "weights_only", "return_predictions", "verbose")


def experiment_of(words: Sequence[str]) -> str:
    """The name of a run: that of its last config file, or of the folder that a run's own config lies in.

    One that only says how to train, such as ``configs/ddp.yaml`` over another, gives no name.
    """
    given = [Path(file) for file in option_values(words, "--config", "-c")]
    if not given:
        return "run"
    path = next((file for file in reversed(given) if _says_what_is_trained(file)), given[-1])
    return file_name(path.resolve().parent.parent.name if path.name == CONFIG else path.stem)


def with_config_of_run(words: list[str]) -> list[str]:
    """Without ``--config``, a checkpoint of a run brings that run's own config: evaluating needs no second look-up."""
    given = option_values(words, "--ckpt_path")
    if not words or not given or option_values(words, "--config", "-c"):
        return words
    root = Path((option_values(words, "--trainer.default_root_dir") or ["runs"])[-1])
    run = (
        newest_run(root)
        if given[-1] in ("last", "best")
        else run_of(find_checkpoint(given[-1], root, lambda line: None))
    )
    return words if run is None else [words[0], "--config", str(run / CONFIG), *words[1:]]


def check_config(file: Path) -> None:
    """Name the file of a config that cannot be one: the parser's messages do not, and it drops what is empty."""
    if not file.exists():
        return
    for name, value in read_config(file).items():
        if name not in (*SECTIONS, *SINGLE_OPTIONS):
            known = ", ".join((*SECTIONS, *SINGLE_OPTIONS))
            raise ValueError(f"config {file}: {name!r} is unknown; at the top there may be {known}")
        if name in SECTIONS and not isinstance(value, dict):
            raise ValueError(f"config {file}: {name} must hold options by name, got {shown(value)}")


def code_named_by(files: Mapping[Path, Any]) -> list[str]:
    """What configs import that is not of this package, as ``FILE imports PATH, …``; to find it out imports nothing."""
    lines = []
    for file, content in files.items():
        if found := sorted({leaf for leaf in _leaves(content) if is_foreign(leaf) and _is_import_path(leaf)}):
            lines.append(f"{file} imports {', '.join(found)}")
    return lines


def check_store(data: Mapping[str, Any], words: Sequence[str]) -> None:
    """Refuse a named store that is missing: a corpus of a config does not say that it is to be made of it.

    Args:
        data: The options of the data, of configs and command line together.
        words: Of the command line.

    Raises:
        ValueError: If the store is missing and neither ``data.path`` nor, in the words, ``data.corpus`` is given.
    """
    if data.get("mixture") is None and data.get("raw_dtype") is None:
        sections = [yaml.safe_load(section) for section in option_values(words, "--data")]  # files among them are words
        named = {name for section in sections if isinstance(section, dict) for name in section}
        is_given = "corpus" in named or option_values(words, "--data.corpus")
        check_named_store(data.get("store"), data.get("corpus") if is_given else None, data.get("path"))


def config_files(words: Sequence[str]) -> dict[Path, Any]:
    """The YAML that a command reads: its configs, sections such as ``--trainer FILE``, and what these name in turn.

    The parser reads options of a class from any file that a value names, so FIFOs and devices are refused here.

    Raises:
        ValueError: A file is not YAML, gives a key twice, is too large, or holds something else than options by name.
        OSError: A file cannot be read.
    """
    found: dict[Path, Any] = {}
    for config in map(Path, option_values(words, "--config", "-c")):
        if config.is_file():
            _look_into(config, read_config(config), found)
    for name in dict.fromkeys(word.partition("=")[0].removesuffix("+") for word in words):
        if name == "--data" or name.startswith(("--model", "--trainer")):
            for value in option_values(words, name, f"{name}+"):
                _look_at(value, Path(), found)
    return found


def _look_into(file: Path, content: dict[str, Any], found: dict[Path, Any]) -> None:
    found[file] = content
    for name, value in content.items():
        _look_at(value, file.parent, found, is_read=name != "data")  # whose paths may be texts


def _look_at(value: object, folder: Path, found: dict[Path, Any], *, is_read: bool = True) -> None:
    if isinstance(value, dict | list):
        if isinstance(value, dict) and not isinstance(value.get("class_path", ""), str):
            raise ValueError(f"class_path must be an import path, got {shown(value['class_path'])}")
        for each in value.values() if isinstance(value, dict) else value:
            _look_at(each, folder, found, is_read=is_read)
    elif isinstance(value, str) and os.path.exists(path := folder / value) and not path.is_dir():
        check_regular(path)
        if is_read and path.suffix in (".yaml", ".yml") and path not in found:
            _look_into(path, read_config(path), found)


def resume_command(words: Sequence[str]) -> str:
    """The command at hand, going on from its newest checkpoint instead of what it was given."""
    kept, is_value = [], False
    for word in words:
        if not is_value and not word.startswith("--ckpt_path"):
            kept.append(word)
        is_value = word == "--ckpt_path"
    return shlex.join(["lightning-llm", *kept, "--ckpt_path", "last"])


def option_values(words: Sequence[str], *names: str) -> list[str]:
    """The values given to an option, in their order."""
    values = []
    for position, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name in names:
            values += [value] if equals else list(words[position + 1 : position + 2])
    return values


def _load_strictly(text: str) -> Any:
    check_yaml(text)
    return get_loader("yaml")(text)


set_loader(STRICT_YAML, _load_strictly, (yaml.YAMLError,))


def _leaves(value: Any) -> list[str]:
    """The strings in nested options."""
    if isinstance(value, dict | list):
        return [leaf for each in (value.values() if isinstance(value, dict) else value) for leaf in _leaves(each)]
    return [value] if isinstance(value, str) else []


def _is_import_path(leaf: str) -> bool:
    """Whether a string names something in a module that can be found; to look for it runs no code of it."""
    top, *rest = leaf.split(".")
    if not rest or not all(part.isidentifier() for part in (top, *rest)):
        return False
    try:
        return find_spec(top) is not None
    except ValueError:  # a module without a specification, such as __main__
        return True


def _says_what_is_trained(config: Path) -> bool:
    return config.is_file() and not {"model", "data"}.isdisjoint(read_config(config))
