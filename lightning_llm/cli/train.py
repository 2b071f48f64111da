"""``lightning-llm fit|validate|test|predict``: LightningCLI around LanguageModel and TokenDataModule.

What is changed against a plain LightningCLI: a user's mistake is one line; ``--ckpt_path`` never overrules what the
command line and the configs say (Lightning's would silently build the model from the checkpoint); ``last`` with nothing
to go on from is an error; a resumed run goes on in its own run directory.
"""

import argparse
import json
import logging
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentError
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.loggers import TensorBoardLogger

from lightning_llm.cli.report import RunReport
from lightning_llm.cli.runs import CONFIG, find_checkpoint, newest_run, run_of
from lightning_llm.cli.trainer import Trainer
from lightning_llm.data.datamodule import TokenDataModule
from lightning_llm.training.allocator import keep_freed_memory
from lightning_llm.training.callbacks.signals import Interrupted
from lightning_llm.training.module import LanguageModel

USER_ERROR = 2


class SaveConfig(SaveConfigCallback):
    """Writes ``config.yaml`` into the run directory, so that it starts a fresh run of the same kind."""

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """As Lightning's, for ``fit`` only: evaluating a run leaves its record alone."""
        if stage == "fit":
            self.config["ckpt_path"] = None
            super().setup(trainer, pl_module, stage)


class TrainingCLI(LightningCLI):
    """The four commands that the Trainer runs."""

    checkpoint: Path | None = None

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Options that belong to neither model nor data nor trainer."""
        parser.add_argument(
            "--keep_freed_memory",
            type=bool,
            default=True,
            help="On Linux with glibc: keep freed memory in the process instead of giving it back to the system, which "
            "makes training on a CPU 15 to 20 percent faster and the process larger.",
        )

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Parse, and take ``ckpt_path`` aside: Lightning would let the checkpoint overrule the options given."""
        words = _with_config_of_run(list(args))
        self.experiment = _experiment(words)
        self.config = parser.parse_args(words)
        self._options = self.config[self.config.subcommand]
        self._ckpt_path = self._options.pop("ckpt_path", None)

    def before_instantiate_classes(self) -> None:
        """Find the checkpoint; prepare the process."""
        if self._options.get("weights_only") is False:
            raise ValueError("weights_only=False would run code from the checkpoint: leave the option out")
        root = Path(self._options.trainer.default_root_dir)
        if self._ckpt_path is not None:
            self.checkpoint = find_checkpoint(self._ckpt_path, root / self.experiment)
        elif self.subcommand != "fit":
            raise ValueError(
                f"{self.subcommand} needs a trained model: --ckpt_path best, last, a run directory or a file"
            )
        self._options["ckpt_path"] = None if self.checkpoint is None else str(self.checkpoint)
        if self._options.keep_freed_memory:
            keep_freed_memory()

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """The trainer, logging into the run directory: a new one, or that of the run that goes on."""
        options = self._get(self.config_init, "trainer")
        if options.get("logger") in (None, True):
            run = None if self.checkpoint is None else run_of(self.checkpoint)
            if run is not None:
                kwargs["logger"] = TensorBoardLogger(run.parent, name="", version=run.name, default_hp_metric=False)
            else:
                root = Path(options["default_root_dir"])
                kwargs["logger"] = TensorBoardLogger(root, name=self.experiment, default_hp_metric=False)
        return super().instantiate_trainer(**kwargs)  # type: ignore[return-value]

    def after_fit(self) -> None:
        """Make sure that the last step was validated, then report."""
        self.report.finish(self.trainer, self.model, self.datamodule)

    def after_predict(self) -> None:
        """Print a JSON line for each prompt."""
        tokenizer = self.datamodule.tokenizer
        for prompt, ids in zip(self.datamodule.predict_prompts, self.trainer.predict_loop.predictions, strict=True):
            print(json.dumps({"prompt": prompt, "text": tokenizer.decode(ids[0].tolist())}, ensure_ascii=False))

    @property
    def report(self) -> RunReport:
        """The callback that prints the summary at start and end."""
        callbacks = self.trainer.callbacks  # type: ignore[attr-defined]
        return next(callback for callback in callbacks if isinstance(callback, RunReport))


def cli_main(args: Sequence[str] | None = None) -> TrainingCLI:
    """Run ``fit``, ``validate``, ``test`` or ``predict``: the same entry for shell, tests and notebooks.

    Args:
        args: The command and its options, such as ``["fit", "--config", "configs/quickstart.yaml"]``; ``None`` takes
            them from the shell.

    Returns:
        The command line object, with ``trainer``, ``model`` and ``datamodule`` as they are after the run.

    Raises:
        SystemExit: With status 2 after one line on stderr for a user's mistake; 130 or 143 after Ctrl-C or SIGTERM.
    """
    _quieten()
    words = list(sys.argv[1:] if args is None else args)
    command = words[0] if words else "fit"
    try:
        return TrainingCLI(
            LanguageModel,
            TokenDataModule,
            save_config_callback=SaveConfig,
            save_config_kwargs={"overwrite": True},
            trainer_class=Trainer,
            trainer_defaults={"callbacks": [RunReport()]},
            seed_everything_default=1337,
            auto_configure_optimizers=False,
            load_from_checkpoint_support=False,
            parser_kwargs={
                "exit_on_error": False,
                **{word: {"exit_on_error": False} for word in TrainingCLI.subcommands()},
            },
            args=words,
        )
    except Interrupted as interruption:
        _say(f"{interruption}; nothing is lost. Go on with\n  {_resume_command(words)}")
        raise SystemExit(interruption.exit_status) from None
    except (ArgumentError, argparse.ArgumentError, ValueError, OSError, MisconfigurationException) as error:
        if os.environ.get("LIGHTNING_LLM_TRACEBACK"):
            raise
        _say(f"lightning-llm {command}: error: {_one_line(error)}")
        raise SystemExit(USER_ERROR) from None


def run(words: Sequence[str]) -> int:
    """As :func:`cli_main`, for the shell: returns the exit status."""
    try:
        cli_main(words)
    except SystemExit as leaving:
        return leaving.code if isinstance(leaving.code, int) else USER_ERROR
    return 0


def _experiment(words: Sequence[str]) -> str:
    """The name of a run: that of its last config file, or of the folder that a run's own config lies in."""
    given = _option_values(words, "--config", "-c")
    if not given:
        return "run"
    path = Path(given[-1])
    return path.resolve().parent.parent.name if path.name == CONFIG else path.stem


def _with_config_of_run(words: list[str]) -> list[str]:
    """Without ``--config``, a checkpoint of a run brings that run's own config: evaluating needs no second look-up."""
    given = _option_values(words, "--ckpt_path")
    if not words or not given or _option_values(words, "--config", "-c"):
        return words
    root = Path((_option_values(words, "--trainer.default_root_dir") or ["runs"])[-1])
    run = newest_run(root) if given[-1] in ("last", "best") else run_of(find_checkpoint(given[-1], root))
    return words if run is None else [words[0], "--config", str(run / CONFIG), *words[1:]]


def _option_values(words: Sequence[str], *names: str) -> list[str]:
    values = []
    for position, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name in names:
            values += [value] if equals else list(words[position + 1 : position + 2])
    return values


def _resume_command(words: Sequence[str]) -> str:
    kept = [word for word in words if not word.startswith("--ckpt_path")]
    return " ".join(["lightning-llm", *kept, "--ckpt_path last"])


def _one_line(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    return " ".join(str(error).split())


def _say(text: str) -> None:
    if int(os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0"))) == 0:
        print(text, file=sys.stderr)


def _quieten() -> None:
    """Lightning's notes on devices, seeds and services it would like to sell; our own report says what matters."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    warnings.filterwarnings("ignore", message=r".*isinstance\(treespec, LeafSpec\).*")  # Lightning 2.6 with torch 2.13
