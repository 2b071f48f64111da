"""``lightning-llm fit|check|validate|test|predict``: LightningCLI around LanguageModel and TokenDataModule.

What is changed against a plain LightningCLI: a user's mistake is one line; ``--ckpt_path`` never overrules what the
command line and the configs say (Lightning's would silently build the model from the checkpoint); ``last`` with nothing
to go on from is an error; a resumed run goes on in its own run directory.
"""

import argparse
import errno
import json
import logging
import os
import signal
import sys
import threading
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from jsonargparse import ArgumentError
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback

from lightning_llm.checkpoints.reading import EXECUTION, check_run_checkpoint
from lightning_llm.cli.check import report
from lightning_llm.cli.command_line import (
    STRICT_YAML,
    check_config,
    check_store,
    code_named_by,
    config_files,
    experiment_of,
    option_values,
    resume_command,
    with_config_of_run,
)
from lightning_llm.cli.distributed import check_address, lost_contact, waiting_line
from lightning_llm.cli.failures import USER_ERROR, one_line, reports
from lightning_llm.cli.interrupts import interrupts, is_first_process
from lightning_llm.cli.jobs import check_restarts, may_have_run_before, restarts, this_job
from lightning_llm.cli.pages import ABOUT, COMMANDS, SYNTAX, with_page
from lightning_llm.cli.plan_record import record_plan
from lightning_llm.cli.report import RunReport
from lightning_llm.cli.runs import (
    CONFIG,
    JOB,
    find_checkpoint,
    last_of,
    newest_run,
    run_of,
    step_in,
)
from lightning_llm.data.datamodule import TokenDataModule
from lightning_llm.measure.attribution import is_out_of_memory
from lightning_llm.training.callbacks.consistency import RankConsistencyCheck, ResumeDiff
from lightning_llm.training.callbacks.non_finite import NonFinite
from lightning_llm.training.callbacks.progress import StatusFile
from lightning_llm.training.callbacks.signals import Interrupted, requeue_job
from lightning_llm.training.distributed import leave_groups
from lightning_llm.training.execution import choose_precision, keep_freed_memory
from lightning_llm.training.initial_weights import check_trust
from lightning_llm.training.module import LanguageModel
from lightning_llm.training.preflight import refuse
from lightning_llm.training.tensorboard import RunLogger
from lightning_llm.training.trainer import Trainer

TRUST_CODE = "--trust-code"
DIVERGED, OUT_OF_MEMORY, LOST_CONTACT = 1, 1, 1
ENDED_TOGETHER = (0, 129, 130, 143)  # all processes at the same step: none waits for another any more


class SaveConfig(SaveConfigCallback):
    """Writes ``config.yaml`` into the run directory, so that it starts a fresh run of the same kind."""

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """For ``fit`` only: evaluating a run leaves its record alone. Lightning would write where the logger does."""
        if stage == "fit":
            self.config["ckpt_path"] = None
            if getattr(pl_module, "plan", None) is not None:
                record_plan(self.config, trainer, pl_module)
            job, run = this_job(), trainer.run_dir  # a broadcast: every process must ask
            if not trainer.is_global_zero or run is None:
                return
            self.parser.save(self.config, run / CONFIG, skip_none=False, overwrite=True, multifile=self.multifile)
            if job is not None:
                (run / JOB).write_text(f"{job}\n", encoding="utf-8")


class TrainingCLI(LightningCLI):
    """The commands that the Trainer runs."""

    checkpoint: Path | None = None

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """Lightning's, and ``check``; with the arguments of each that are no options."""
        return {**LightningCLI.subcommands(), "check": {"model", "datamodule"}}

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
        self._trusts_code = TRUST_CODE in args  # on the command line only: a config could grant it to itself
        words = with_config_of_run([word for word in args if word != TRUST_CODE])
        for file in option_values(words, "--config", "-c"):
            check_config(Path(file))
        for line in code_named_by(config_files(words)):  # before the parser imports it
            _say(f"lightning-llm {words[0]}: {line}")
        for word in ("validate", "test"):  # our own lines print the metrics
            self._parser(word).set_defaults(verbose=False)
        self.experiment, self._words = experiment_of(words), words
        self.config = parser.parse_args(words)
        self._options = self.config[self.config.subcommand]
        self._ckpt_path = self._options.pop("ckpt_path", None)

    def before_instantiate_classes(self) -> None:
        """Find the checkpoint; prepare the process."""
        check_restarts()
        check_address()
        if self._options.get("weights_only") is False:
            raise ValueError("weights_only=False would run code from the checkpoint: leave the option out")
        check_store(self._options.data, self._words)
        folder = Path(self._options.trainer.default_root_dir) / self.experiment
        if self._ckpt_path is not None:
            self.checkpoint = find_checkpoint(self._ckpt_path, folder, _say)
        elif self.subcommand == "fit":
            self.checkpoint = _of_earlier_attempt(folder)
        elif self.subcommand != "check":
            raise ValueError(
                f"{self.subcommand} needs a trained model: --ckpt_path best, last, a run directory or a file"
            )
        saved: dict[str, Any] = {}
        if self.subcommand in ("fit", "check"):
            if self.checkpoint is not None:
                saved = check_run_checkpoint(self.checkpoint).get(EXECUTION, {})
            elif self._options.model.get("init_from") is not None and not self._trusts_code:
                check_trust(self._options.model.init_from)
        self._resolve_precision(saved)
        self._options["ckpt_path"] = None if self.checkpoint is None else str(self.checkpoint)
        if self._options.keep_freed_memory:
            keep_freed_memory()

    def _resolve_precision(self, saved: dict[str, Any]) -> None:
        """Put what ``auto`` means into the config, so that the run's record, its checkpoints and all ranks name it."""
        asked = self._options.trainer
        if asked.precision not in ("auto", None):
            self.precision_reason = "as asked for"
        elif "precision" in saved:
            asked.precision, self.precision_reason = saved["precision"], "as in the checkpoint"
        else:
            asked.precision, self.precision_reason = choose_precision(asked.accelerator)

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """The trainer, with its run directory: a new one, or that of the run that goes on."""
        options = self._get(self.config_init, "trainer")
        if options.get("logger") in (None, True) and self.subcommand != "fit":
            kwargs["logger"] = False
        try:
            trainer: Trainer = super().instantiate_trainer(**kwargs)  # type: ignore[assignment]
        except TypeError as error:  # Lightning's answer to devices "many"
            raise ValueError(
                f"trainer.devices {options.get('devices')!r} or another trainer option: {error}"
            ) from error
        trainer.precision_reason = self.precision_reason
        plain = self._parser(self.subcommand).dump(self._options, format="json")
        own = [RankConsistencyCheck(json.loads(plain), self.checkpoint), ResumeDiff(json.loads(plain))]
        trainer.callbacks[:0] = [*own, StatusFile()]  # type: ignore[attr-defined]
        if trainer.run_directory.experiment is None:
            trainer.run_directory.experiment = self.experiment
        run = None if self.checkpoint is None else run_of(self.checkpoint)
        if self.checkpoint is not None and run is not None and self.subcommand == "fit":
            trainer.run_directory.take(run)
            for logger in trainer.loggers:
                if isinstance(logger, RunLogger):
                    logger.resume_after(step_in(self.checkpoint))
        return trainer

    def before_fit(self) -> None:
        """Refuse what cannot go well, in one process, as preparing the data does; keep others out until the report."""
        trainer: Any = self.trainer
        if trainer.is_global_zero:
            refuse(check.fault for check in trainer.preflight(self.model, self.datamodule) if check.fault)
        if trainer.num_nodes > 1 and trainer.local_rank == 0:
            print(waiting_line(trainer), file=sys.stderr)
        trainer.open_run()

    def after_fit(self) -> None:
        """Make sure that the last step was validated, then report."""
        try:
            self.report.finish(self.trainer, self.model, self.datamodule)
        finally:
            self.trainer.run_directory.close()  # type: ignore[attr-defined]

    def after_check(self) -> None:
        """Print what was found."""
        report(self.trainer.checks)  # type: ignore[attr-defined]

    def after_validate(self) -> None:
        """Print the metrics."""
        self.report.print_metrics(self.trainer)

    after_test = after_validate

    def after_predict(self) -> None:
        """Print a JSON line for each prompt."""
        tokenizer = self.datamodule.tokenizer
        for prompt, ids in zip(self.datamodule.predict_prompts, self.trainer.predict_loop.predictions, strict=True):
            print(
                json.dumps(
                    {"prompt": prompt, "text": tokenizer.decode(ids[0].tolist())}, ensure_ascii=False, allow_nan=False
                )
            )

    @property
    def report(self) -> RunReport:
        """The callback that prints the summary at start and end."""
        callbacks = self.trainer.callbacks  # type: ignore[attr-defined]
        return next(callback for callback in callbacks if isinstance(callback, RunReport))


def cli_main(args: Sequence[str] | None = None) -> TrainingCLI:
    """Run ``fit``, ``check``, ``validate``, ``test`` or ``predict``: the same entry for shell, tests and notebooks.

    Args:
        args: The command and its options, such as ``["fit", "--config", "configs/quickstart.yaml"]``; ``None`` takes
            them from the shell.

    Returns:
        The command line object, with ``trainer``, ``model`` and ``datamodule`` as they are after the run.

    Raises:
        SystemExit: With status 2 after one line on stderr for a user's mistake or a failure of the system, 1 if the
            loss is no number any more, memory has run out or another process is lost, 129, 130 or 143 after
            SIGHUP, Ctrl-C or SIGTERM.
    """
    _quieten()
    threading.excepthook = _of_thread
    words = list(sys.argv[1:] if args is None else args)
    command = words[0] if words else "fit"
    with interrupts.taken(command):
        try:
            return _run_command(command, words)
        except (KeyboardInterrupt, SystemExit) as leaving:  # Lightning makes the one the other, of status 1
            if not isinstance(leaving, KeyboardInterrupt) and not interrupts.number:
                raise
            interrupts.hold_off()
            raise _LeftTheOthers(interrupts.say(interrupts.number or signal.SIGINT)) from None


class _LeftTheOthers(SystemExit):
    """This process ends wherever it was; others may be waiting for it."""


def _run_command(command: str, words: list[str]) -> TrainingCLI:
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
                "parser_mode": STRICT_YAML,
                **{word: _help_of(word) for word in TrainingCLI.subcommands()},
            },
            args=words,
        )
    except Interrupted as interruption:
        interrupts.hold_off()
        saved = f"nothing is lost. Go on with: {resume_command(words)}"
        outcome = saved if interruption.is_saved else "no checkpoint was saved: the run has none"
        _say(f"lightning-llm {command}: {interruption}; {outcome}")
        if interruption.requeue and is_first_process():
            _requeue()
        raise SystemExit(interruption.exit_status) from None
    except NonFinite as finding:
        _say(with_page(command, f"lightning-llm {command}: stopped: {finding}"))
        raise SystemExit(DIVERGED) from None
    except (RuntimeError, MemoryError) as error:
        lost = lost_contact(error)
        if not (lost or is_out_of_memory(error)):
            raise
        if lost:
            line = with_page(command, f"lightning-llm {command}: {lost}")
            print(line, file=sys.stderr)  # any process: it may be the only one left
            raise SystemExit(LOST_CONTACT) from None
        line = f"lightning-llm {command}: out of memory: {_reason(error)}"
        _say(with_page(command, line))  # the memory profiler has said what to do
        raise SystemExit(OUT_OF_MEMORY) from None
    except (ArgumentError, argparse.ArgumentError, ValueError, OSError, MisconfigurationException) as error:
        line = f"lightning-llm {command}: error: {_reason(error)}"
        met = dist.is_initialized()  # then it may be the only one that knows: before that, all read the same
        raise SystemExit(reports.mistake(command, line) if met or is_first_process() else USER_ERROR) from None


def run(words: Sequence[str]) -> int:
    """As :func:`cli_main`, for the shell: returns the exit status."""
    status = 0
    try:
        cli_main(words)
    except _LeftTheOthers as leaving:
        status = int(leaving.code or 0)
        if interrupts.is_own_process and dist.is_initialized():  # to end the groups could wait for the others
            os._exit(status)
        return status
    except SystemExit as leaving:
        status = leaving.code if isinstance(leaving.code, int) else USER_ERROR
    if status in ENDED_TOGETHER:
        leave_groups()
    return status


def _help_of(word: str) -> dict[str, Any]:
    return {
        "exit_on_error": False,
        "usage": f"lightning-llm {word} [--config FILE …] [--SECTION.OPTION VALUE …]",
        "description": f"{ABOUT[word]} {SYNTAX}",
        "epilog": f"More: {COMMANDS[word]}",
    }


def _of_thread(failure: threading.ExceptHookArgs) -> None:
    """What fails in TensorBoard's thread, on a full disk say, is raised again where the run logs next."""
    if not isinstance(failure.exc_value, OSError | SystemExit | None):
        reports.unexpected(interrupts.command, failure.exc_value)


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) and not error.filename
        advice = "something of the run cannot be written: free some space and go on with --ckpt_path last"
        return f"{error.strerror}: {error.filename or advice}" if error.filename or full else error.strerror
    return one_line(error)


def _say(text: str) -> None:
    if is_first_process():
        print(text, file=sys.stderr)


def _of_earlier_attempt(folder: Path) -> Path | None:
    """The checkpoint to go on from where SLURM or torchrun starts a job again, by whatever it was ended; else none."""
    job = this_job()
    if job is None or not may_have_run_before():
        return None
    run = newest_run(folder, job=job)
    if run is not None:
        return last_of(run, _say)
    if restarts():
        _say(f"job {job} was started again; it left no checkpoint in {folder}: starting afresh")
    return None


def _requeue() -> None:
    try:
        _say(f"SLURM queues job {requeue_job()} again")
    except OSError as error:
        _say(f"the job could not be queued again: {_reason(error)}")


def _quieten() -> None:
    """Lightning's notes on devices, seeds and services it would like to sell; our own report says what matters."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    logging.getLogger("lightning.pytorch.profilers").setLevel(logging.INFO)  # what --trainer.profiler found
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    warnings.filterwarnings("ignore", message=".*Experiment logs directory .* not empty")  # our config.yaml is there
    warnings.filterwarnings("ignore", message="Checkpoint directory .* exists and is not empty")  # ours are there
    warnings.filterwarnings("ignore", message=".*sync_dist=True.*")  # what is logged is the same in every process
    warnings.filterwarnings("ignore", message=r".*isinstance\(treespec, LeafSpec\).*")  # Lightning 2.6 with torch 2.13
