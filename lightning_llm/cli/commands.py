"""The commands of ``lightning-llm``, and the page of the documentation that explains a command or an option."""

import re
from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any, NamedTuple

FIRST = "docs/first-steps.md"
GENERATION = "docs/generation.md"
ACCOUNTING = "docs/accounting.md"
SCORES = "loss, perplexity, and bits per byte"
NO_TEXT = "no text in it"  # leads to the page on data with every command
LONGEST_LINE = 4000  # characters of a message


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
    "evaluate": Command("evaluate", GENERATION, f"measure {SCORES} of models on texts, and compare them"),
    "export": Command("convert", "docs/interop.md", "write a trained model as a folder that transformers loads"),
    "import": Command("convert", "docs/interop.md", "turn a Hugging Face model into a checkpoint"),
    "consolidate": Command("convert", "docs/distributed.md", "merge the shards of a checkpoint into one file"),
    "dashboard": Command("dashboard", "docs/dashboard.md", "show runs in TensorBoard, on this machine"),
    "runs": Command("run_list", "docs/dashboard.md", "list runs with state, loss, size, and age; remove useless ones"),
    "compare": Command("compare", "docs/dashboard.md", "compare loss, time, and memory across runs"),
    "ablate": Command("ablate", "docs/ablate.md", "compare a baseline with variants in pairs of runs, until a verdict"),
    "estimate": Command("estimate", ACCOUNTING, "estimate a run's parameters, memory, FLOPs, and time from its config"),
    "plan": Command("plan", ACCOUNTING, "find the fastest settings that fit in memory, and write their config"),
    "same": Command("same", "docs/extending.md", "check that settings of a training step compute the same function"),
}
TRAINER_WORDS = [word for word, command in COMMANDS.items() if command.module == "train"]
SYNTAX = (
    "Set any option in a YAML file (--config, repeatable; later files override earlier ones) or on the command line, "
    "which overrides the files. An option's name is its path in the file: 'trainer: {max_steps: 100}' is "
    "--trainer.max_steps 100. --print_config prints all options with their values. With --trust-code, "
    "model.init_from may name classes from outside lightning_llm."
)


def help_of(word: str) -> dict[str, Any]:
    """Arguments for the parser of a command of the Trainer: usage, description and epilog."""
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
    "docs/config.md": "unrecognized arguments, is not an option",
    "docs/dashboard.md": "logger, SampleText, Dashboard, JSONLinesLogger",
    "docs/data.md": "no text in it, corpus, data.path, store, mixture, raw_dtype, dtype, document_mask, "
    "context_length, global_batch_size, micro_batch_size, eval_batch_size, num_workers, predict_prompts, UTF-8",
    "docs/distributed.md": "devices, num_nodes, strategy, MASTER_ADDR, processes, has lost the others, "
    "could not reach the others",
    "docs/extending.md": "model.class_path, data.class_path, constructor, mlp, optimizer, schedule, callbacks",
    "docs/interop.md": "init_from, rope_scaling",
    "docs/memory-optimized.md": "checkpoint_level, recompute, loss_chunks",
    "docs/memory.md": "MemoryProfiler, out of memory",
    "docs/speed.md": "capture, compile_mode, keep_freed_memory, precision",
    "docs/parts.md": "attention, layers, its first layer leaves",
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
        command: The word after ``lightning-llm``, perhaps with its action.
        line: What is wrong; line breaks in it become spaces.
    """
    line = " ".join(line.split())
    line = line if len(line) <= LONGEST_LINE else f"{line[:LONGEST_LINE]} …"
    if re.search(r" \(docs/[\w/-]+\.md\)$", line):  # of the command that found it
        return line
    matches = [match[1] for match in _WORD.finditer(line) if command in TRAINER_WORDS or match[1] == NO_TEXT]
    # the name of a class, which is capitalized, says more than the option that it was given to
    word = min(matches, key=lambda word: not word[0].isupper(), default="")
    return f"{line} ({_PAGES.get(word) or page_of(command)})"


def page_of(command: str) -> str:
    """The page that explains a command, or its action, as ``ablate try``; of ``python -m benchmarks``, it is ``-m``."""
    command, _, action = command.partition(" ")
    if (command, action) == ("ablate", "try"):
        return "docs/stream.md"
    if command == "-m":
        return "benchmarks/README.md"
    return COMMANDS[command].page if command in COMMANDS else FIRST


def nearest(name: str, names: Iterable[str]) -> str:
    """``; did you mean NAME?``, if one of the names is like this one."""
    close = get_close_matches(name, names, 1)
    return f"; did you mean {close[0]}?" if close else ""
