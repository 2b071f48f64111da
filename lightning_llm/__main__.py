"""``lightning-llm WORD …``: looks at the first word and imports only that side.

Written by hand because importing torch and Lightning takes seconds, and ``--help`` should not.
"""

import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from signal import SIGINT

from lightning_llm.cli.failures import reports
from lightning_llm.cli.interrupts import interrupts
from lightning_llm.cli.streams import drop_output, lasting, open_closed_streams

BROKEN_PIPE = 128 + 13  # as a shell has it of a program that SIGPIPE ended
TRAINER_WORDS = {
    "fit": "train a model",
    "check": "what fit looks at before its first step, alone",
    "validate": "loss of a checkpoint on the validation text",
    "test": "loss of a checkpoint on the test text",
    "predict": "the likeliest continuation of given prompts, as JSON lines",
}
TOOLS = {
    "prepare": "turn text into a token store",
    "tokenizer": "learn a tokenizer from text",
    "data": "look into a token store, or check it",
    "generate": "continue a prompt with a trained model",
    "evaluate": "loss, perplexity and bits per byte of a model on texts",
    "export": "a trained model as a folder that transformers loads",
    "import": "a model of transformers as a checkpoint",
    "consolidate": "put the shards of a checkpoint together into one file",
    "dashboard": "show runs in TensorBoard, on this machine",
    "compare": "loss, time and memory of runs, by what their configs differ in",
    "estimate": "parameters, memory, FLOPs and time of a run, from its config",
    "plan": "the fastest setting of a run that fits a memory, and a config for it",
    "bench": "measure memory and time on this machine",
}

# These build models, so they import parts of the user's own by their paths, such as my_parts.MyMLP.
IMPORT_PARTS = {*TRAINER_WORDS, "generate", "evaluate", "export", "bench"}

MODULES = {"import": "import_model"}  # a word of Python's own names no module


def help_text() -> str:
    """What ``lightning-llm --help`` prints."""
    lines = ["usage: lightning-llm COMMAND [OPTION …]", "", "Train decoder-only language models.", ""]
    lines += ["Training and evaluation (Lightning's options, YAML configs; see configs/):"]
    lines += [f"  {word:<11} {text}" for word, text in TRAINER_WORDS.items()]
    lines += ["", "Tools:"]
    lines += [f"  {word:<11} {text}" for word, text in TOOLS.items()]
    lines += ["", "With any of them, --debug prints the traceback of an error. Exit status: 0; 1, it failed;"]
    lines += ["2, a mistake in an option or a file; 128 and the number of the signal that ended it."]
    lines += ["", "lightning-llm COMMAND --help explains a command. To begin with:"]
    lines += ["  lightning-llm fit --config configs/quickstart.yaml"]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None, run: Callable[[Sequence[str]], int] | None = None) -> int:
    """Run one command.

    Args:
        argv: The words after ``lightning-llm``; ``None`` takes them from the shell, and the process for the command's.
        run: What runs the words; ``None``: the commands of ``lightning-llm``.

    Returns:
        The exit status: 0; 1 if it failed; 2 for a mistake of the user or in a file; 128 and the signal's number for
        an interrupted run.
    """
    words = reports.begin(sys.argv[1:] if argv is None else argv)
    if argv is None:  # a process of its own
        interrupts.own_process(words[0] if words else "")
        _bound_spinning()
        if words and words[0] in IMPORT_PARTS:
            _look_in_current_folder()
    try:
        if argv is None:
            open_closed_streams()
            sys.stderr = lasting(sys.stderr)
            if words and words[0] in TRAINER_WORDS:  # what trains goes on; what only prints ends
                sys.stdout = lasting(sys.stdout)
        status = (run or _run)(words)
        sys.stdout.flush()
    except (BrokenPipeError, SystemExit) as leaving:  # whoever read it, `head` say, has had enough
        if not isinstance(leaving, BrokenPipeError) and not isinstance(leaving.__context__, BrokenPipeError):
            raise  # else it is rich's own answer
        drop_output()
        status = BROKEN_PIPE
    except KeyboardInterrupt:
        status = interrupts.say(interrupts.number or SIGINT)
    except Exception as failure:  # whatever nobody foresaw, from the first import of a command on
        status = reports.unexpected(words[0] if words else "", failure)
    if argv is None:
        interrupts.settle(status)
    return status


def _run(words: Sequence[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        print(help_text())
        return 0
    if words[0] == "--version":
        from lightning_llm import __version__

        print(f"lightning-llm {__version__}")
        return 0
    if words[0] in TRAINER_WORDS:
        from lightning_llm.cli.train import run

        return run(words)
    if words[0] in TOOLS:
        return int(import_module(f"lightning_llm.cli.{MODULES.get(words[0], words[0])}").main(words[1:]))
    known = ", ".join([*TRAINER_WORDS, *TOOLS])
    return reports.mistake(words[0], f"lightning-llm: error: unknown command {words[0]!r}; the commands are {known}")


def _bound_spinning() -> None:
    """Let idle OpenMP threads sleep after 2,000 rounds of waiting, unless the user has said how they wait.

    libgomp reads this once, when torch loads it. With its own default of 300,000, two runs on two cores take 4 to 7
    times as long as one: the idle threads of each keep the other's from working (docs/benchmarks.md, "Two runs at
    once").
    """
    if not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & os.environ.keys():
        os.environ["GOMP_SPINCOUNT"] = "2000"


def _look_in_current_folder() -> None:
    """Find modules beside the user, last of all: a file there cannot replace an installed module."""
    try:
        folder = os.getcwd()
    except FileNotFoundError:  # it was deleted
        return
    if folder not in sys.path:
        sys.path.append(folder)


if __name__ == "__main__":
    sys.exit(main())
