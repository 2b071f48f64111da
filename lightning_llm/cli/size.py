"""``size`` of a training command: the options that it sets become words of the command line, before anything is made.

What follows the base config, later configs and the command line, is the user's and wins. The parser gets the resolved
options, so a run's ``config.yaml`` has them and no ``size``: it starts the same run again, even if the rules change.
"""

import dataclasses
import json
from argparse import SUPPRESS
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lightning_llm.accounting import sizing
from lightning_llm.accounting.measured_parts import measure_parts
from lightning_llm.cli import parsing
from lightning_llm.cli.command_line import CONFIG_OPTIONS, configs_in, option_values
from lightning_llm.cli.early_checks import WHOLE_SECTIONS
from lightning_llm.io.atomic import json_text
from lightning_llm.io.config_file import parse_yaml, read_config
from lightning_llm.runs.directory import CONFIG
from lightning_llm.runs.options import flat


def add_options(parser: Any) -> None:
    """Add ``size`` and what belongs to it. None of them is in a run's config."""
    about = "Set the model and its training by this number of parameters, such as ``100k``, from the base config."
    parser.add_argument("--size", type=int | str | None, default=SUPPRESS, help=about)
    about = f"With ``size``: tokens of the run for each parameter. Default: {sizing.TOKENS_PER_PARAMETER:g}."
    parser.add_argument("--tokens_per_parameter", type=float | None, default=SUPPRESS, help=about)
    about = f"With ``size``: accept more than {sizing.MOST_EPOCHS} epochs over the data."
    parser.add_argument("--repeat", type=bool | None, default=SUPPRESS, help=about)


def with_sizing(
    words: Sequence[str], parser: Any, of_command: Any, log: Callable[[str], None]
) -> tuple[list[str], sizing.Sizing | None]:
    """The words of a command with the options that ``size`` sets, if it is given.

    Args:
        words: With configs by path and before all options.
        parser: Parses them.
        of_command: The parser of the options of this command.
        log: Gets a line about what is set.

    Returns:
        The words without ``size`` and what belongs to it; and what it sets.

    Raises:
        ValueError: The size cannot be made, or one of its options is given without it.
    """

    def resolve(words: Sequence[str]) -> dict[str, Any]:
        parsed = parsing.parse(parser, words)
        return dict(json.loads(of_command.dump(parsed[parsed.subcommand], format="json")))

    words = [f"{word}=true" if word == "--repeat" else word for word in words]  # so that a later one overrides it
    contents = [read_config(Path(file)) if Path(file).is_file() else {} for file in configs_in(words)]
    own = {name: option_values(words, f"--{name}") for name in sizing.SIZE_OPTIONS}
    typed = {name: parse_yaml(values[-1]) for name, values in own.items() if values}
    request = sizing.request_in(contents, typed)
    rest = [word for word in words if word.partition("=")[0].removeprefix("--") not in sizing.SIZE_OPTIONS]
    if request is None:
        return rest, None
    if option_values(words, "--ckpt_path") and Path(configs_in(words)[-1]).name == CONFIG:
        raise ValueError("size is for a base config, and a run's own config has its size already: leave size out")
    files = [word for word in rest if word.partition("=")[0] in CONFIG_OPTIONS]
    names = {name for content in contents[request.base_configs :] for name in flat(content)}
    names |= {name for word in rest[1:] if word not in files for name in _typed(word)}
    resolved = resolve(rest)
    found = sizing.sizing_for(
        resolve([rest[0], *files[: request.base_configs]]),
        request.size,
        request.tokens_per_parameter,
        given=sizing.given_options(resolved, names),
        measure=lambda config: measure_parts(config, "32-true", resolved["data"]["context_length"]),
    )
    log(f"lightning-llm {words[0]}: {found.in_words()}")
    # behind all others: none of them is one of these
    rest += [f"--{name}={json_text(value)}" for name, value in found.options.items()]
    return rest, dataclasses.replace(found, limits_epochs=found.limits_epochs and not request.repeat)


def _typed(word: str) -> list[str]:
    """The options that a word gives; a whole section gives those in it."""
    name, _, value = word.removeprefix("--").partition("=")
    name = name.rstrip("+")
    if f"--{name}" not in WHOLE_SECTIONS:
        return [name]
    content = parse_yaml(value)
    return list(flat(content if isinstance(content, dict) else read_config(Path(value)), f"{name}."))
