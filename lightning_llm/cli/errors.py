"""Errors of the command line, each in one line: the parser, the documentation page, exit statuses, tracebacks.

Exit statuses: 0; 1 if a command failed; 2 for a mistake in an option or a file; 128 plus the number of a signal.
A traceback is printed with ``--debug`` only; without it, it goes to a file.
"""

import argparse
import os
import re
import shlex
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from itertools import dropwhile
from typing import Any, NamedTuple, NoReturn

from lightning_llm.cli.process import interrupts

FAILED, USER_ERROR = 1, 2
DEBUG = "--debug"
IN_A_WORKER = "Original Traceback (most recent call last):"  # torch puts it into the message of the error

# ---- the commands, and the page that explains a command or an option

FIRST, GENERATION, ACCOUNTING = "docs/quickstart.md", "docs/generation.md", "docs/accounting.md"
SCORES = "loss, perplexity and bits per byte"


class Command(NamedTuple):
    """A word after ``lightning-llm``.

    Attributes:
        module: In ``cli``; the options of those in ``train`` are those of Lightning's Trainer.
        page: Explains it.
        about: What it does.
    """

    module: str
    page: str
    about: str


COMMANDS = {
    "fit": Command("train", FIRST, "train a model, validate it, save checkpoints, and print a sample"),
    "check": Command("train", "docs/resume.md", "run fit's pre-flight checks without training"),
    "validate": Command("train", GENERATION, f"measure {SCORES} on the validation text"),
    "test": Command("train", GENERATION, f"measure {SCORES} on the test text"),
    "predict": Command("train", GENERATION, "continue prompts (--data.predict_prompts) greedily, as JSON lines"),
    "prepare": Command("data", "docs/data.md", "turn text into a token store"),
    "tokenizer": Command("data", GENERATION, "train a tokenizer on text"),
    "data": Command("data", "docs/data.md", "inspect or verify a token store"),
    "generate": Command("inference", GENERATION, "continue a prompt with a trained model"),
    "evaluate": Command("inference", GENERATION, f"measure {SCORES} on texts"),
    "export": Command("convert", "docs/interop.md", "write a trained model as a folder that transformers loads"),
    "import": Command("convert", "docs/interop.md", "turn a Hugging Face model into a checkpoint"),
    "consolidate": Command("convert", "docs/distributed.md", "merge the shards of a checkpoint into one file"),
    "dashboard": Command("dashboard", "docs/dashboard.md", "show runs in TensorBoard, on this machine"),
    "runs": Command(
        "run_list", "docs/dashboard.md", "list runs with state, loss, size and age; remove what is useless"
    ),
    "compare": Command("compare", "docs/dashboard.md", "compare loss, time and memory across runs"),
    "ablate": Command("ablate", "docs/ablate.md", "compare a baseline with variants in pairs of runs, until a verdict"),
    "estimate": Command("estimate", ACCOUNTING, "estimate parameters, memory, FLOPs and time of a run from its config"),
    "plan": Command("plan", ACCOUNTING, "find the fastest settings that fit in memory, and write their config"),
    "bench": Command("bench", "docs/benchmarks.md", "measure memory and time on this machine"),
}
TRAINER_WORDS = [word for word, command in COMMANDS.items() if command.module == "train"]
SYNTAX = (
    "Set any option in a YAML file (--config, repeatable; later files override earlier ones) or on the command line, "
    "which overrides the files. An option's name is its path in the file: 'trainer: {max_steps: 100}' is "
    "--trainer.max_steps 100. --print_config prints all options with their values. With --trust-code, "
    "model.init_from may name classes from outside lightning_llm."
)


def help_of(word: str) -> dict[str, Any]:
    """What the parser of a command of the Trainer says of itself."""
    command = COMMANDS[word]
    return {
        "exit_on_error": False,
        "usage": f"lightning-llm {word} [--config FILE …] [--SECTION.OPTION VALUE …]",
        "description": f"{command.about[0].upper()}{command.about[1:]}. {SYNTAX}",
        "epilog": f"More: {command.page}",
    }


# By page, the words of a message that lead there, for the commands in TRAINER_WORDS. The first one counts.
OPTIONS = {
    "docs/accounting.md": "memory_budget",
    "docs/dashboard.md": "logger, SampleText, Dashboard, JSONLinesLogger",
    "docs/data.md": "corpus, data.path, store, mixture, raw_dtype, dtype, document_mask, context_length, "
    "global_batch_size, micro_batch_size, eval_batch_size, num_workers, predict_prompts, UTF-8",
    "docs/distributed.md": "devices, num_nodes, strategy, MASTER_ADDR, processes, has lost the others, "
    "could not reach the others",
    "docs/extending.md": "model.class_path, data.class_path, constructor, mlp, optimizer, schedule, callbacks",
    "docs/interop.md": "init_from, rope_scaling",
    "docs/memory-optimized.md": "checkpoint_level, recompute, loss_chunks",
    "docs/memory.md": "MemoryProfiler, out of memory",
    "docs/speed.md": "compile_mode, keep_freed_memory, precision",
    "docs/reference/model.md": "hidden_size, intermediate_size, num_hidden_layers, num_attention_heads, "
    "num_key_value_heads, head_dim, max_position_embeddings, norm, rms_norm_eps, position, rope_theta, qk_norm, "
    "dropout, attention_bias, mlp_bias, lm_head_bias, tie_word_embeddings, initializer_range, architecture",
    "docs/resume.md": "ckpt_path, checkpoint, checkpoints, weights_only, disk, stopped",
}
_PAGES = {word: page for page, words in OPTIONS.items() for word in words.split(", ")}
_LONGEST_FIRST = "|".join(map(re.escape, sorted(_PAGES, key=len, reverse=True)))
_WORD = re.compile(rf"(?<![\w.])(?:[\w.]*\.)?({_LONGEST_FIRST})(?!\w)")  # perhaps with its section, as in data.store


def with_page(command: str, line: str) -> str:
    """A line that ends with the page to read.

    Args:
        command: The word after ``lightning-llm``.
        line: What is wrong; line breaks in it become spaces.
    """
    line = " ".join(line.split())
    line = line if len(line) <= _LONGEST else f"{line[:_LONGEST]} …"
    found = [match[1] for match in _WORD.finditer(line)] if command in TRAINER_WORDS else []
    # the name of a class, which is capitalized, says more than the option that it was given to
    word = min(found, key=lambda word: not word[0].isupper(), default="")
    return f"{line} ({_PAGES.get(word) or page_of(command)})"


def page_of(command: str) -> str:
    """The page that explains a command; of ``python -m benchmarks``, that is ``-m``."""
    command = "bench" if command == "-m" else command
    return COMMANDS[command].page if command in COMMANDS else FIRST


# ---- one line, and the exit status


class Reports:
    """Prints errors to stderr.

    Attributes:
        words: The command line.
        with_traceback: Whether to print tracebacks too.
    """

    def __init__(self) -> None:
        self.words: Sequence[str] = ()
        self.with_traceback = False

    def begin(self, words: Sequence[str]) -> list[str]:
        """Take ``--debug`` out of the words of a command that starts."""
        self.words, self.with_traceback = words, DEBUG in words
        return [word for word in words if word != DEBUG]

    def mistake(self, command: str, line: str) -> int:
        """Report a mistake in the input. Call it inside the ``except`` clause. Returns the exit status."""
        print(f"{_rank_prefix()}{with_page(command, line)}", file=sys.stderr)
        if self.with_traceback:
            traceback.print_exc()
        return USER_ERROR

    def unexpected(self, command: str, failure: BaseException) -> int:
        """Report an error that no code handles. Returns the exit status."""
        name = f"{_rank_prefix()}{interrupts.program} {command}".strip()
        trace = "".join(traceback.format_exception(failure))
        rest = f"\n{trace.rstrip()}" if self.with_traceback else f"; {self._written(trace)}"
        print(f"{name}: failed: {type(failure).__name__}: {one_line(failure)}{rest}", file=sys.stderr)
        return FAILED

    def _written(self, trace: str) -> str:
        try:
            number, name = tempfile.mkstemp(prefix="lightning-llm-", suffix=".txt")
            with open(number, "w", encoding="utf-8", errors="backslashreplace") as file:
                file.write(f"{interrupts.program} {shlex.join(self.words)}\n\n{trace}")
        except OSError:
            return f"{DEBUG} shows where"
        return f"where: {name} ({DEBUG} shows it)"


reports = Reports()


def one_line(failure: BaseException) -> str:
    """The message of an error, without the traceback that torch puts into those of its data workers."""
    text = str(failure)
    if IN_A_WORKER in text:
        lines = text.rpartition("Traceback (most recent call last):")[2].strip("\n").splitlines()
        text = "\n".join(dropwhile(lambda line: line.startswith(" "), lines)).partition(": ")[2]
    return " ".join(text.split())


# What the parser (jsonargparse) says, and what is said instead
TYPES = {
    **{"int": "a whole number", "float": "a number", "str": "text", "bool": "true or false", "NoneType": "null"},
    **{"dict": "options by name", "list": "a list", "tuple": "a list"},
}
_REWORDED = [
    (r'Parser key "([^"]*)"', r"\1"),
    (
        r"Importing '(.*?)' is not allowed, .*? in set_parsing_settings to allow it\.",
        r"\1 is not imported: it is outside lightning_llm, and no option or config names it by this path",
    ),
    (r"Problem with given class_path '(.*?)'", r"\1"),
    (r"- Expected a path but .*? either not accessible or invalid - ", ""),
    (r"Type typing\.Callable\[.*?\] expects a function or a callable class: ", ""),
    (r"\. Got value: Namespace\(.*?\)(?=$| - | Given value)", ""),
    (r"\. Got value: ", ", got "),
    (
        r"Not a valid subclass of \S+ Subclass types expect one of: .*?\(implicit class_path\)",
        "expected an import path",
    ),
    (r"(Expected a dot import path string:|Unexpected import path format:)", "expected an import path, got"),
    (r"Expected an import path or a subclass spec, but got", "expected an import path, got"),
    (r"Unable to load config '(.*?)' - .*", r"expected options by name, got \1"),
    (r"Subcommand \S+ does not accept option '(\w+)\.init_args", r"write each argument of \1.class_path as \1.NAME: '"),
    (r"'(\w+)' object has no attribute 'keys'", r"init_args: Expected a <class 'dict'>, got <class '\1'>"),
    (r"Expected a typing\.Literal\[(.*?)\]", r"expected one of \1"),
]
_LONGEST = 4000  # characters of a message, which has the value several times
_ALTERNATIVES = re.compile(
    r"Does not validate against any of the Union subtypes Subtypes: (?:(?!Does not validate).)*? Errors: - "
    r"((?:(?!Does not validate).)*) Given value type: .*? Given value: (.*)"
)


def in_plain_words(message: str) -> str:
    """A message of the parser in one line, with our words for types: ``expected a whole number, got all``."""
    text = " ".join(message.split())[:_LONGEST]
    for pattern, words in _REWORDED:
        text = re.sub(pattern, words, text)
    text = re.sub(r"(Expected an? )?<class '(?:\w+\.)*(\w+)'>", _type_in_words, text)
    text = re.sub(r"(, got [^,]+)\1$", r"\1", text)  # by its class, and by the type of the option
    while (shorter := _ALTERNATIVES.sub(_alternatives_in_words, text)) != text:
        text = shorter
    return text


def _type_in_words(found: re.Match[str]) -> str:
    return ("expected " if found[1] else "") + TYPES.get(found[2], found[2])


def _alternatives_in_words(found: re.Match[str]) -> str:
    """What a value could have been; if an alternative has another problem than the type, that one alone."""
    alternatives = list(dict.fromkeys(found[1].split(" - ")))
    if problems := [each for each in alternatives if not each.startswith("expected ")]:
        return " or ".join(problems)
    types = dict.fromkeys(each.removeprefix("expected ").partition(", got ")[0] for each in alternatives)
    return f"expected {' or '.join(types)}, got {found[2]}"


def _rank_prefix() -> str:
    """Which process prints, where several train together; empty for the first."""
    rank = os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0"))
    return f"process {int(rank)}: " if rank.isdecimal() and int(rank) else ""


# ---- tools: every command but those of the Trainer

Action = Callable[[argparse.Namespace], object]
AddOptions = Callable[["OneLineParser"], object]


class OneLineParser(argparse.ArgumentParser):
    """``argparse`` without the usage text before each error. Options cannot be abbreviated.

    Args:
        prog: As it is typed, such as ``lightning-llm data inspect``.
        description: What the command does.
        options: As in ``argparse``.
    """

    def __init__(self, prog: str, description: str | None = None, **options: Any) -> None:
        page = page_of(prog.split()[1])
        super().__init__(prog=prog, description=description, allow_abbrev=False, epilog=f"More: {page}", **options)

    def error(self, message: str) -> NoReturn:
        """One line, and status 2."""
        line = f"{self.prog}: error: {message}; {self.prog} --help explains"
        self.exit(USER_ERROR, f"{with_page(self.prog.split()[1], line)}\n")


class Tool:
    """A command of its own: call it with the words behind its name.

    Calling it returns the exit status: 0; 2 after a line about what is wrong; 130 after a line about Ctrl-C. It raises
    ``BrokenPipeError`` if nobody reads the output any more.

    Args:
        act: What it does with the options. Its docstring is shown by ``--help``.
        prog: As it is typed, such as ``lightning-llm data``.
        add_options: Adds its options to a parser.
        mistakes: Errors that are a user's mistake, besides ``ValueError`` and ``OSError``.
        when_interrupted: Added to the line about Ctrl-C.
    """

    def __init__(
        self, act: Action, prog: str, add_options: AddOptions, *mistakes: type[Exception], when_interrupted: str = ""
    ) -> None:
        self.parser = OneLineParser(prog, act.__doc__)
        add_options(self.parser)
        self._act, self._when_interrupted = act, when_interrupted
        self._mistakes: tuple[type[Exception], ...] = (ValueError, OSError, *mistakes)

    def __call__(self, words: Sequence[str]) -> int:
        """Run it."""
        command = self.parser.prog.split()[1]
        if command != "-m":  # of python -m benchmarks
            interrupts.command = command
        try:
            options = self.parser.parse_args(words)
        except SystemExit as leaving:  # --help, or a wrong option
            return int(leaving.code or 0)
        try:
            self._act(options)
        except BrokenPipeError:
            raise
        except KeyboardInterrupt:
            return interrupts.say(interrupts.number or signal.SIGINT, self._when_interrupted)
        except self._mistakes as error:
            return reports.mistake(command, f"{self.parser.prog}: error: {one_line(error)}")
        return 0


def tool(add_options: AddOptions, *mistakes: type[Exception], **options: str) -> Callable[[Action], Tool]:
    """Make a tool ``lightning-llm NAME`` of a function ``run_NAME``. Arguments as for :class:`Tool`."""

    def made(act: Any) -> Tool:
        return Tool(act, f"lightning-llm {act.__name__.removeprefix('run_')}", add_options, *mistakes, **options)

    return made
