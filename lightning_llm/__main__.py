"""``lightning-llm COMMAND …``: looks at the first word and imports only that command.

Importing torch and Lightning takes seconds, and ``--help`` should not.
"""

import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from signal import SIGINT

from lightning_llm.cli.commands import COMMANDS, TRAINER_WORDS, nearest
from lightning_llm.cli.errors import reports
from lightning_llm.cli.interrupts import PROGRAM, interrupts
from lightning_llm.cli.standard_streams import drop_output, note_imports, open_streams

# Idle OpenMP threads sleep after this many rounds of waiting, unless the user has set how they wait. libgomp reads it
# once, when torch loads it. With its own default of 300,000, two runs on two cores take 4 to 7 times as long as one:
# the idle threads of each keep the other's from working (benchmarks/README.md, "Two runs at once").
SPINS = "2000"
# CUDA's allocator lets a block grow in place, unless the user has set how it works: evaluation and generation, with
# their other shapes, then leave no gaps that a training step cannot use. torch reads it when it is imported.
GROWING_SEGMENTS = "expandable_segments:True"
NVIDIA_DRIVER = Path("/dev/nvidiactl")
BROKEN_PIPE = 128 + 13  # the status of a program that SIGPIPE ended
SUBCOMMANDS = [word for word in COMMANDS if word not in TRAINER_WORDS]
# These build models, and import the user's own parts by their paths, such as my_parts.MyMLP.
IMPORT_PARTS = {*TRAINER_WORDS, "generate", "evaluate", "export", "estimate", "plan", "same", "ablate"}


def help_text() -> str:
    """Text that ``lightning-llm --help`` prints."""
    return "\n".join(
        [
            "usage: lightning-llm COMMAND [OPTION …]\n",
            "Train decoder-only language models.\n",
            "Training and evaluation (Lightning's options, configs by path or shipped name):",
            *(f"  {word:<11} {COMMANDS[word].about}" for word in TRAINER_WORDS),
            "\nTools:",
            *(f"  {word:<11} {COMMANDS[word].about}" for word in SUBCOMMANDS),
            "\nWith any command, --debug prints the traceback of an error. Exit status: 0; 1 if it failed; 2 for a",
            "mistake in an option or a file; 128 plus the number of the signal that ended it.\n",
            "lightning-llm COMMAND --help explains a command. To start:",
            "  lightning-llm fit --config quickstart",
        ]
    )


def main(
    argv: Sequence[str] | None = None, run: Callable[[Sequence[str]], int] | None = None, program: str = PROGRAM
) -> int:
    """Run one command.

    Args:
        argv: The words after ``lightning-llm``; ``None``: they come from the shell, and the process is the command's.
        run: What runs the words; ``None``: the commands of ``lightning-llm``.
        program: As it is typed, for the lines about errors and signals.

    Returns:
        The exit status: 0; 1 if it failed; 2 for a mistake of the user or in a file; 128 plus the signal's number for
        an interrupted run.
    """
    words = reports.begin(sys.argv[1:] if argv is None else argv)
    command = words[0] if words else ""
    outer_program = interrupts.program
    interrupts.program = program
    interrupts.command = command
    if argv is None:  # a process of its own
        interrupts.own_process(command)
        if not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & os.environ.keys():
            os.environ["GOMP_SPINCOUNT"] = SPINS
        if not {"PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"} & os.environ.keys() and NVIDIA_DRIVER.exists():
            os.environ["PYTORCH_CUDA_ALLOC_CONF"] = GROWING_SEGMENTS
        if command in IMPORT_PARTS:
            from lightning_llm.io.trust import look_in_current_folder

            look_in_current_folder()
    try:
        if argv is None:
            open_streams(outlive_reader=command in TRAINER_WORDS)
            note_imports(f"{program} {command}".strip())
        status = (run or _run)(words)
        sys.stdout.flush()
    except (BrokenPipeError, SystemExit) as leaving:  # the reader, such as `head`, has left; rich makes it SystemExit
        if not isinstance(leaving, BrokenPipeError) and not isinstance(leaving.__context__, BrokenPipeError):
            raise
        drop_output()
        status = BROKEN_PIPE
    except KeyboardInterrupt:
        status = interrupts.print_interruption(interrupts.number or SIGINT)
    except Exception as failure:  # not handled anywhere, from the first import of a command on
        status = reports.unexpected(command, failure)
    if argv is None:
        interrupts.exit_on_signal(status)
    else:
        interrupts.program = outer_program  # of the command that this one ran inside of
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
        from lightning_llm.cli.early_checks import refused

        if status := refused(words):
            return status
        from lightning_llm.cli.train import run

        return run(words)
    if words[0] in SUBCOMMANDS:
        module = import_module(f"lightning_llm.cli.{COMMANDS[words[0]].module}")
        return int(getattr(module, f"run_{words[0]}")(words[1:]))
    advice = nearest(words[0], COMMANDS) or f"; the commands are {', '.join(COMMANDS)}"
    return reports.mistake(words[0], f"lightning-llm: error: unknown command {words[0]!r}{advice}")


if __name__ == "__main__":
    sys.exit(main())
